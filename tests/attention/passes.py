"""Random passes: ragged trees, some behind nodes of earlier passes, and chunks of prompts."""

from itertools import accumulate

import torch
from hypothesis import strategies as st

from foretoken.core.passes import Pass

SLOTS, LONGEST_PREFIX, MOST_NODES = 3, 6, 9


@st.composite
def some_passes(draw: st.DrawFn) -> Pass:
    """A pass over up to `SLOTS` sequences in any slots, of up to `LONGEST_PREFIX + MOST_NODES` rows."""
    num = draw(st.integers(1, SLOTS))
    slots = draw(st.permutations(range(SLOTS)))[:num]
    prefix_lens = draw(st.lists(st.integers(0, LONGEST_PREFIX), min_size=num, max_size=num))
    lengths = draw(st.lists(st.integers(1, 5), min_size=num, max_size=num))
    if draw(st.booleans()):
        return Pass.of_chains([[1] * length for length in lengths], slots=slots, prefix_lens=prefix_lens)
    earlier = draw(st.lists(st.integers(0, MOST_NODES - 5), min_size=num, max_size=num))
    parents, positions = [], []
    for length, before, prefix in zip(lengths, earlier, prefix_lens, strict=True):
        own = [draw(st.integers(-1, node - 1)) for node in range(before + length)]
        depths = [0] * len(own)
        for node, parent in enumerate(own):
            depths[node] = depths[parent] + 1 if parent >= 0 else 0
        parents += own
        positions += [prefix + depth for depth in depths]
    return Pass(
        tokens=torch.ones(sum(lengths), dtype=torch.int64),
        positions=torch.tensor(positions),
        parents=torch.tensor(parents),
        slots=slots,
        prefix_lens=prefix_lens,
        offsets=[0, *accumulate(lengths)],
        num_earlier=earlier if any(earlier) or draw(st.booleans()) else None,
        logit_rows=None,
    )
