"""Chooses the acceptance rule of each sequence, and runs several rules over one batch.

Synthetic acceptance accepts as many drafted tokens as given rates say, without a comparison of tokens. A drafter
without trained weights then shows the speed that a drafter with these rates would have. The text is not the target's.
vLLM calls this `rejection_sample_method="synthetic"`. Rates are *joint*, as in vLLM: rate k is the probability that the
first k drafted tokens are all accepted.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import mul
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.acceptance import sampled_rules
from foretoken.acceptance.rules import (
    Acceptance,
    ChosenPath,
    KeyedDecisions,
    accept_chosen,
    accept_coupled,
    accept_greedy,
    descend,
)
from foretoken.core.backend import has_triton_kernels
from foretoken.core.checks import check_number, shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.core.token_tree import MAX_NODES, DrawKind, TokenTree

if TYPE_CHECKING:
    from foretoken.sampling.node_scores import NodeScores

LOSSLESS_RULES = ("greedy", "coupled", "sequential", "block", "traversal")
LOSSY_RULES = ("lenient", "typical", "synthetic")
TYPICAL_ENDS = ("draw", "argmax")
_SELECTABLE = ("auto", *(rule for rule in LOSSLESS_RULES if rule != "greedy"), *LOSSY_RULES)


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptancePolicy:
    """How sampled requests are verified; greedy requests always use exact match unless the rule is lossy.

    Attributes:
        rule: "auto", "coupled", "sequential", "block", "traversal", or a lossy rule by name: "lenient", "typical",
            "synthetic".
        lenience: Factor l of the lenient rule, in (0, 1].
        posterior_threshold: Epsilon of the typical rule, in (0, 1].
        posterior_alpha: Delta of the typical rule, in (0, 1].
        typical_end: The token after a path of the typical rule: "draw" from the target's distribution, or its "argmax"
            as in Medusa's code.
        synthetic_acceptance_rates: K joint rates of the synthetic rule, as in vLLM: rate k is the probability that the
            first k drafted tokens are all accepted.
        synthetic_acceptance_length: Its mean acceptance length instead, the target's own token included.

    Raises:
        ConfigError: When the rule does not exist or a value is outside its range.
    """

    rule: str = "auto"
    lenience: float = 0.8
    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    typical_end: str = "draw"
    synthetic_acceptance_rates: Sequence[float] | None = None
    synthetic_acceptance_length: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rule, str) or self.rule not in _SELECTABLE:
            hint = nearest_name_hint(shown(self.rule), _SELECTABLE)
            raise ConfigError(f"acceptance rule {shown(self.rule)} does not exist. {hint}")
        for name in ("lenience", "posterior_threshold", "posterior_alpha"):
            check_number(f"'{name}'", getattr(self, name), 0.0, 1.0, low_open=True, error=ConfigError)
        if not isinstance(self.typical_end, str) or self.typical_end not in TYPICAL_ENDS:
            raise ConfigError(f"'typical_end' is {shown(self.typical_end)}. Expected 'draw' or 'argmax'.")
        check_synthetic(self.rule, self.synthetic_acceptance_rates, self.synthetic_acceptance_length)

    @property
    def is_lossy(self) -> bool:
        """Whether the rule may change the target's output distribution."""
        return self.rule in LOSSY_RULES

    @property
    def joint_rates(self) -> Sequence[float]:
        """Joint rates of the synthetic rule, positive ones only; empty for other rules."""
        length = self.synthetic_acceptance_length
        rates = rates_of_length(length) if length is not None else self.synthetic_acceptance_rates or ()
        return [rate for rate in rates if rate > 0]

    def schedule(self) -> LengthSchedule | None:
        """Returns the accepted lengths of the synthetic rule; None for other rules."""
        return LengthSchedule(self.joint_rates) if self.rule == "synthetic" else None

    @property
    def keeps_seeded_text(self) -> bool:
        """Whether a seeded request gets the text of plain decoding; other lossless rules keep its distribution."""
        return self.rule in ("auto", "coupled")

    def is_coupled(self, *, is_seeded: bool) -> bool:
        """Returns whether drafts for a request share the target's noise: only if its rule is `coupled`.

        The synthetic rule compares no tokens, so drafts are made as for `auto`.
        """
        return self.rule == "coupled" or (self.rule in ("auto", "synthetic") and is_seeded)

    def rule_for(
        self, tree: TokenTree, *, is_greedy: bool, is_seeded: bool, row: int | None = None, is_plain: bool = False,
        is_mixed: bool = False,
    ) -> str:  # fmt: skip
        """Returns the rule for one request. Synchronises with the host.

        Seeded requests are coupled, so that their text depends on the seed alone. Without a seed, a chain with draft
        distributions is verified as a block, a tree with draft distributions by the sequential test, and one-hot drafts
        by coupling, which for them is sample and match. The block and lenient rules exist for chains only; a tree that
        is no chain is verified by the sequential test. So are trees without a drawn node under the traversal rule,
        which takes all others: what was drawn must not choose between two rules.

        Args:
            row: Index of the request: the rule cannot depend on other sequences. None asks for one rule that
                fits all rows.
            is_plain: Whether only temperature changes its distribution, on a device with kernels for that. "coupled"
                then becomes "drawn": the same rule with the tokens after all nodes drawn at once.
            is_mixed: Whether chosen tokens, of other drafters or a grammar, may join drawn tokens. Such a tree is never
                verified as a block: whether it is a chain depends on what was drawn, and the rule must not.
        """
        if self.rule == "synthetic":
            return self.rule
        rows = slice(None) if row is None else slice(row, row + 1)
        if self.rule == "typical" or (self.rule == "lenient" and _is_chain(tree, rows)):
            return self.rule
        if is_greedy:
            return "greedy"
        if self.is_coupled(is_seeded=is_seeded) or (self.rule == "auto" and tree.distributions is None):
            return "drawn" if is_plain else "coupled"
        if self.rule == "traversal":
            return self.rule if _has_draws(tree, rows) else "sequential"
        is_block = not is_mixed and self.rule in ("auto", "block") and _is_sampled_chain(tree, rows)
        return "block" if is_block else "sequential"


def accept(
    scores: NodeScores,
    rules: Sequence[str],
    policy: AcceptancePolicy,
    root_positions: Tensor,
    lengths: Tensor | None = None,
) -> Acceptance:
    """Verifies a batch, each of the B sequences by its own rule.

    Args:
        scores: The target's logits at the nodes.
        rules: B, from `AcceptancePolicy.rule_for`.
        policy: Options of the rules.
        root_positions: (B,) int64, absolute position of each root.
        lengths: (B,) int64, accepted tokens of the synthetic rule, which then is the rule of all; None for other rules.
    """
    if lengths is not None:
        return accept_synthetic(scores.tree, lengths, _token_after(scores, root_positions))
    names = sorted(set(rules))
    if len(names) == 1:
        return _accept_with(names[0], scores, policy, root_positions)
    parts = []
    for name in names:
        rows = torch.tensor([i for i, rule in enumerate(rules) if rule == name], device=root_positions.device)
        parts.append((rows, _accept_with(name, scores.select(rows), policy, root_positions[rows])))
    order = torch.cat([rows for rows, _ in parts]).argsort()
    return Acceptance(
        path=torch.cat([part.path for _, part in parts])[order],
        num_accepted=torch.cat([part.num_accepted for _, part in parts])[order],
        next_token=torch.cat([part.next_token for _, part in parts])[order],
        lossy_tv=torch.cat([part.lossy_tv.float() for _, part in parts])[order],
    )


_SAMPLED_RULES = {
    "coupled": accept_coupled,
    "sequential": sampled_rules.accept_sequential,
    "block": sampled_rules.accept_block,
    "traversal": sampled_rules.accept_traversal,
}


def _accept_with(rule: str, scores: NodeScores, policy: AcceptancePolicy, root_positions: Tensor) -> Acceptance:
    tree, decisions = scores.tree, KeyedDecisions(scores.batch.noise, root_positions)
    match rule:
        case "greedy" | "drawn":
            chosen = scores.argmax_everywhere() if rule == "greedy" else scores.drawn_everywhere(root_positions)
            return accept_greedy(tree, scores.argmax) if chosen is None else accept_chosen(tree, chosen)
        case "lenient":
            return sampled_rules.accept_lenient(
                tree,
                scores.log_probs,
                scores.unwarped_log_probs,
                scores.batch.greedy,
                decisions,
                lenience=policy.lenience,
            )
        case "typical":
            return sampled_rules.accept_typical(
                tree,
                scores.log_probs,
                decisions,
                epsilon=policy.posterior_threshold,
                delta=policy.posterior_alpha,
                is_end_drawn=policy.typical_end == "draw",
            )
    return _SAMPLED_RULES[rule](tree, scores.log_probs, decisions)


def _has_draws(tree: TokenTree, rows: slice) -> bool:
    """Whether any node of some rows was drawn. Synchronises with the host."""
    drafts = tree.distributions
    return drafts is not None and bool(((drafts.kinds[rows] != DrawKind.ONE_HOT) & (tree.parents[rows] >= 0)).any())


def _token_after(scores: NodeScores, root_positions: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Returns what gives the target's token after a node, at the cost that it has under the rules of `auto`."""
    batch, device, chosen = scores.batch, root_positions.device, None
    if batch.is_all_greedy:
        chosen = scores.argmax_everywhere()
    elif batch.is_plain and scores.chosen is None and has_triton_kernels(device):
        chosen = scores.drawn_everywhere(root_positions)
    if chosen is not None:
        tokens = chosen
        return lambda nodes, _: tokens.gather(1, nodes.unsqueeze(1))[:, 0]
    decisions = KeyedDecisions(batch.noise, root_positions)
    return lambda nodes, depth: decisions.target_token(scores.log_probs(nodes), depth)


def _is_chain(tree: TokenTree, rows: slice) -> bool:
    """Synchronises with the host."""
    node = torch.arange(tree.width, device=tree.tokens.device)
    is_padding = node >= tree.num_nodes[rows].unsqueeze(1)
    return bool(((tree.parents[rows] == node - 1) | is_padding).all())


def _is_sampled_chain(tree: TokenTree, rows: slice) -> bool:
    """Whether all nodes of some rows were drawn independently and form chains. Synchronises with the host.

    A tree that could have branched is none, even where pruning by drawn tokens left a chain: the draws must not choose
    between two rules.
    """
    if tree.distributions is None or tree.distributions.max_siblings > 1 or not _is_chain(tree, rows):
        return False
    is_drafted = tree.parents[rows] >= 0
    return bool(((tree.distributions.kinds[rows] == DrawKind.INDEPENDENT) | ~is_drafted).all())


_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: multiples spread evenly modulo 2^64
_NUM_STARTS = 1000  # places of the schedule where sequences begin; a choice


def joint_rates(conditional: Sequence[float]) -> list[float]:
    """Returns joint rates, the cumulative products of P(token k is accepted | all tokens before are accepted)."""
    return list(accumulate(conditional, mul))


def rates_of_length(length: float) -> list[float]:
    """Returns the joint rates with a mean acceptance length, the target's own token included.

    Of all such rates these have the least variance: a pass accepts one of two neighbouring numbers of tokens.
    """
    whole = math.floor(length - 1)
    part = length - 1 - whole
    return [1.0] * whole + [part] * (part > 0)


def check_synthetic(rule: str, rates: object, length: object) -> None:
    """Checks joint rates and mean acceptance length of an acceptance rule; None for a missing one.

    Raises:
        ConfigError: When another rule has one of them, the synthetic rule not exactly one, or a value is out of range.
    """
    if rule != "synthetic":
        if rates is not None or length is not None:
            raise ConfigError(
                f"synthetic acceptance came with the acceptance rule '{rule}'. Expected it with "
                "rejection_sample_method 'synthetic' alone, which is lossy."
            )
        return
    if (rates is None) == (length is None):
        raise ConfigError(
            "rejection_sample_method 'synthetic' needs either synthetic_acceptance_rates or "
            "synthetic_acceptance_length. Pass one of them."
        )
    if rates is None:
        check_number("'synthetic_acceptance_length'", length, 1.0, MAX_NODES, error=ConfigError)
        return
    if not isinstance(rates, list | tuple) or not 0 < len(rates) < MAX_NODES:
        raise ConfigError(f"'synthetic_acceptance_rates' is {shown(rates)}. Expected a list of numbers.")
    for before, rate in pairwise([1.0, *rates]):
        check_number("a rate of 'synthetic_acceptance_rates'", rate, 0.0, 1.0, error=ConfigError)
        if rate > before:
            raise ConfigError(
                f"'synthetic_acceptance_rates' rise from {before:g} to {rate:g}. Expected P(the first k drafted tokens "
                "are accepted), which never rises with k."
            )


class LengthSchedule:
    """Numbers of accepted tokens, 0 to K, in an order in which each is as frequent as its probability says.

    Among the first n entries the count of every number differs from n times its probability by less than 1, for all n.
    Among n entries in a row, from any place, the count differs by less than 2.

    Source: Tijdeman 1980, "The chairman assignment problem": with M numbers by at most 1 - 1 / (2 M - 2).
    """

    def __init__(self, rates: Sequence[float]) -> None:
        """Makes the schedule of K joint rates, which do not increase."""
        bounds = pairwise([1.0, *rates, 0.0])
        self._probs = {number: more - fewer for number, (more, fewer) in enumerate(bounds) if more > fewer}
        self._counts = dict.fromkeys(self._probs, 0)
        self._entries: list[int] = []  # made as they are read

    def length(self, seed: int, index: int) -> int:
        """Returns how many tokens the `index`-th draft of a sequence adds, from 0; the seed sets the first entry."""
        at = (seed * _GOLDEN % (1 << 64)) * _NUM_STARTS >> 64
        while len(self._entries) <= at + index:
            self._append()
        return self._entries[at + index]

    def _append(self) -> None:
        n = len(self._entries) + 1
        lag = {number: n * p - self._counts[number] for number, p in self._probs.items()}
        least = 1 / (2 * len(lag) - 2) if len(lag) > 1 else 0.0
        eligible = [number for number in lag if lag[number] >= least - 1e-9]  # lags sum to 1; 1e-9: rounding
        entry = min(eligible, key=lambda number: (1 - least - lag[number]) / self._probs[number])  # earliest deadline
        self._counts[entry] += 1
        self._entries.append(entry)


def accept_synthetic(tree: TokenTree, lengths: Tensor, token_after: Callable[[Tensor, int], Tensor]) -> Acceptance:
    """Accepts a number of tokens along the path of best children, fewer where the path ends.

    The best child has the highest score, or is the first one without scores. The token after the path is the target's
    own. `lossy_tv` is NaN: the distance is unknown for this rule.

    Args:
        tree: Candidates drawn in any way.
        lengths: (B,) int64.
        token_after: (nodes (B,) int64, depth) -> (B,) int64, the target's token after each node.
    """
    scores = torch.zeros(tree.tokens.shape, device=tree.tokens.device) if tree.scores is None else tree.scores
    scores = scores.nan_to_num(nan=torch.finfo(scores.dtype).min)

    def step(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        is_child = tree.parents == node.unsqueeze(1)
        best = torch.where(is_child, scores, -math.inf).argmax(1)
        return torch.where(is_child.any(1) & (depth < lengths), best, -1), token_after(node, depth)

    return replace(descend(tree, step), lossy_tv=torch.full(lengths.shape, math.nan, device=lengths.device))


def walk_synthetic(
    tree: TokenTree, chosen: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
) -> list[ChosenPath]:
    """Does `accept_synthetic` on the host, if the host knows the target's token after every node.

    Args:
        tree: (B, N) candidates.
        chosen: The token after each node; those of sequence b begin at `starts[b]`.
        starts: At least B.
        lengths: B.
    """
    scores = [[0.0] * tree.width] * tree.batch_size if tree.scores is None else tree.scores.tolist()
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), scores, starts, lengths, strict=False)
    paths = []
    for tokens, parents, values, start, length in rows:
        node, path = 0, ChosenPath([], [])
        while len(path.nodes) < length:
            children = [child for child in range(node + 1, len(parents)) if parents[child] == node]
            if not children:
                break
            node = max(children, key=lambda child: -math.inf if math.isnan(values[child]) else values[child])
            path.nodes.append(node)
            path.tokens.append(tokens[node])
        path.tokens.append(chosen[start + node])
        paths.append(path)
    return paths
