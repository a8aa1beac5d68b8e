"""Targets and drafters at the edges of float32 and bfloat16, as an engine has them: logits, then float32 numbers.

The target distribution is what plain decoding draws from: the softmax of the float32 log-probabilities, here without
rounding. A drafter draws from the softmax of its own float32 log-probabilities, and states `stated_probs` of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import torch
from drafting import Proposal, drafts
from enumeration import Drafts
from torch import Tensor

from foretoken.core.token_tree import DrawKind
from foretoken.sampling.draft_draws import stated_probs

VOCAB = 4

# Logits divided by the temperature. exp(-87.3) is the smallest normal float32 number, exp(-103.3) the smallest at all.
LOGITS: dict[str, tuple[float, ...]] = {
    "dense": (-0.7, -2.3, -2.4, -1.2),
    "dense, reversed": (-1.2, -2.4, -2.3, -0.7),
    "even": (0, 0, 0, 0),
    "even, by a rounding": (1e-7, -1e-7, 0, 2e-7),
    "thirds": (0, 0, 0, -inf),  # sum to 1 after rounding
    "first half": (0, -1, -inf, -inf),
    "second half": (-inf, -inf, 0, -1),
    "one-hot": (0, -inf, -inf, -inf),
    "one-hot, another": (-inf, 0, -inf, -inf),
    "another at 7e-7": (0, -14.1, -inf, -inf),
    "others below a rounding": (0, -16.7, -17.5, -18),
    "others small": (0, -60, -61, -59.5),
    "others at the smallest normal number": (0, -87.2, -87.6, -87.3),
    "others subnormal": (0, -90, -91.1, -93),
    "others of few bits": (0, -102.5, -103.2, -102.9),
    "others below all numbers": (0, -104, -150, -120),
    "three levels": (0, -50, -140, -141),
    "two lead": (-0.5, -95, 0, -96),
    "last leads": (-95, -100, -101, 0),
}
DTYPES = (torch.float32, torch.bfloat16)


def table(names: Sequence[str], dtype: torch.dtype) -> Tensor:
    """(C, V) float64, one of `LOGITS` after each context, from logits of a type."""
    logits = torch.tensor([LOGITS[name] for name in names]).to(dtype).float()
    return logits.log_softmax(1).double().softmax(1)


def rotated(first: str, count: int) -> list[str]:
    """`count` names of `LOGITS` from one on: neighbours meet on every path."""
    names = list(LOGITS)
    start = names.index(first)
    return [names[(start + step) % len(names)] for step in range(count)]


def engine_drafts(levels: Sequence[Proposal], stated: Callable[[Tensor], Tensor] = stated_probs) -> Drafts:
    """Drafts as `TreeExpansion` states them: float32 rows, and a token without stated probability is a choice."""
    every_draft = drafts(levels, VOCAB)
    distributions = every_draft.tree.distributions
    if distributions is None:
        return every_draft
    rows = stated(distributions.rows.log().float())
    index = torch.arange(len(rows)).unsqueeze(1)
    prob = rows[index, distributions.row_of.clamp_min(0), every_draft.tree.tokens]
    is_chosen = (distributions.row_of < 0) | (prob == 0)
    distributions = replace(
        distributions,
        rows=rows,
        kinds=distributions.kinds.masked_fill(is_chosen, DrawKind.ONE_HOT),
        row_of=distributions.row_of.masked_fill(is_chosen, -1),
    )
    return replace(every_draft, tree=replace(every_draft.tree, distributions=distributions))
