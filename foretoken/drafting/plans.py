"""The formula: expected tokens per second of everything that an iteration may do.

    rate = (B + P + survival of its nodes) / (pass(B + P + nodes) + draft(who, depth) + host(tokens))

B sequences each emit a token of their own. P prompt tokens of other sequences are read in the same pass: they count as
tokens, so that drafts take room from prompts only where they bring more.

`best_depth` and `stop` judge what may be asked for, before it is drafted. L_d is the expected number of sequences whose
trees at hand are right down to depth d. R_d is the probability that a candidate is right there where they are wrong. A
draft of D levels then adds sum over d <= D of (B - L_d) R_d expected tokens.

`select_nodes` judges nodes that were drafted. A node is never worth more than its parent, so the most valuable nodes of
all sequences form trees. The best number of nodes is taken, which may be none.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.token_tree import PROBE

if TYPE_CHECKING:
    from foretoken.drafting.host_trees import HostRow


class Costs(NamedTuple):
    """Seconds of everything but drafting.

    Attributes:
        passes: Of passes over 0, 1, … tokens; the last one stands for all wider ones.
        host: Of accepting and committing: seconds at 0 emitted tokens, and of each token.
        merging: Of merging one more tree.
    """

    passes: Sequence[float]
    host: tuple[float, float] = (0.0, 0.0)
    merging: float = 0.0

    def without_drafting(self, width: float, tokens: float) -> float:
        """Returns the seconds of a pass over `width` tokens, and of the host for the expected tokens."""
        start, slope = self.host
        return self.passes[min(int(width + 0.5), len(self.passes) - 1)] + start + slope * tokens


class AtHand(NamedTuple):
    """The trees of the drafters that have answered.

    Attributes:
        batch: B.
        num_prompt_tokens: P.
        covered: By depth, the expected number of sequences whose trees are right down to it.
        values: Probabilities of their nodes, falling.
        draft_s: Seconds that the drafters took.
    """

    batch: int
    num_prompt_tokens: int = 0
    covered: Sequence[float] = ()
    values: Sequence[float] = ()
    draft_s: float = 0.0


class Candidate(NamedTuple):
    """A drafter that was not asked yet; all fields are by depth, from depth 1.

    Attributes:
        reach: Probability that it is right down to the depth where the trees at hand are wrong.
        widths: Nodes of a sequence that are verified at the depth.
        seconds: Of drafts of the depth.
    """

    reach: Sequence[float]
    widths: Sequence[float]
    seconds: Sequence[float]


class DraftPlan(NamedTuple):
    """What an iteration may do.

    Attributes:
        size: Levels to draft, or nodes at hand to verify; 0 for nothing more.
        width: Expected tokens of the pass.
        tokens: Expected tokens of the batch, prompt tokens included.
        seconds: Expected seconds of the iteration.
    """

    size: int
    width: float
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Expected tokens per second."""
        return self.tokens / self.seconds


def stop(at_hand: AtHand, costs: Costs) -> DraftPlan:
    """Returns the plan in which no further drafter is asked and the best number of nodes at hand is verified."""
    width = at_hand.batch + at_hand.num_prompt_tokens
    return _best_size(width, width, at_hand.values, costs, at_hand.draft_s)


def _best_size(width: float, tokens: float, values: Sequence[float], costs: Costs, draft_s: float) -> DraftPlan:
    """Returns how many of the sorted nodes to verify to maximise tokens per second.

    Without them a pass has `width` tokens and emits `tokens`; a node's value is the probability that it is accepted.
    """
    passes, last, (start, slope) = costs.passes, len(costs.passes) - 1, costs.host  # not a call for each value
    first, start = int(width + 0.5), start + draft_s
    best, best_tokens = 0, tokens
    best_s = passes[min(first, last)] + start + slope * tokens
    rate = tokens / best_s
    for size, value in enumerate(values, start=1):
        tokens += value
        seconds = passes[min(first + size, last)] + start + slope * tokens
        if tokens > rate * seconds:
            best, best_tokens, best_s, rate = size, tokens, seconds, tokens / seconds
    return DraftPlan(best, width + best, best_tokens, best_s)


def best_depth(now: DraftPlan, at_hand: AtHand, candidate: Candidate, costs: Costs, *, least: int = 1) -> DraftPlan:
    """Returns the plan with the most tokens per second in which a candidate is asked, for at least `least` levels.

    The depth is chosen for the number of nodes at hand that is best without the candidate (`now`), then the number of
    nodes for this depth, and then the depth again.
    """
    batch, values = at_hand.batch, at_hand.values
    draft_s = at_hand.draft_s + (costs.merging if values else 0.0)
    covered = [*at_hand.covered, *[0.0] * (len(candidate.reach) - len(at_hand.covered))]
    added = list(accumulate((batch - done) * reach for done, reach in zip(covered, candidate.reach, strict=False)))
    widths = [batch * width for width in accumulate(candidate.widths)]

    def deepest(width: float, tokens: float) -> DraftPlan:
        plans = [
            DraftPlan(d + 1, width + widths[d], tokens + more, costs.without_drafting(width + widths[d], tokens + more)
                      + draft_s + candidate.seconds[d])
            for d, more in enumerate(added[least - 1 :], start=least - 1)
        ]  # fmt: skip
        return max(plans, key=lambda plan: plan.rate)

    best = deepest(now.width, now.tokens)
    if values:
        d, start = best.size - 1, batch + at_hand.num_prompt_tokens
        size = _best_size(start + widths[d], start + added[d], values, costs, draft_s + candidate.seconds[d]).size
        if size != now.size:
            best = max(best, deepest(start + size, start + sum(values[:size])), key=lambda plan: plan.rate)
    return best


class Selection(NamedTuple):
    """Nodes that are worth their cost.

    Attributes:
        kept: By sequence and node, whether to verify it; entries of roots mean nothing.
        is_everything: Whether all nodes are kept.
    """

    kept: list[list[bool]]
    is_everything: bool


def select_nodes(
    rows: Sequence[HostRow],
    costs: Costs,
    *,
    max_nodes: int,
    draft_s: float = 0.0,
    num_prompt_tokens: int = 0,
    drawn: Sequence[Sequence[bool]] | None = None,
) -> Selection:
    """Chooses the nodes that are worth their cost.

    Args:
        rows: Trees. The value of a node is at most its parent's.
        max_nodes: Most nodes of each tree, root included. Drawn nodes and probes are kept beyond this bound.
        draft_s: Seconds that the drafts took.
        drawn: By sequence and node, whether it was drawn from a draft distribution; None for none.
    """
    kept = [[False] * len(row.tokens) for row in rows]
    candidates: list[tuple[float, int, int]] = []
    width = len(rows) + num_prompt_tokens
    tokens, num_drafted, num_fixed = float(width), 0, 0
    for b, row in enumerate(rows):
        # A cut that depends on drawn tokens would bias the output. Probes are always kept: the drafter reads the
        # target's answer there.
        nodes, flags = row.drafted(), kept[b]
        for node in range(1, len(flags)):
            is_fixed = row.sources[node] & PROBE or (drawn is not None and drawn[b][node])
            above = node if is_fixed and row.parents[node] >= 0 else 0
            while above > 0 and not flags[above]:
                flags[above], above = True, row.parents[above]
        tokens += sum(row.values[node] for node in nodes if flags[node])
        num_fixed += sum(flags)
        left = [(-row.values[node], b, node) for node in nodes if not flags[node]]
        num_drafted += len(left)
        room = max(max_nodes - 1 - sum(flags), 0)
        candidates += left if len(left) <= room else sorted(left)[:room]
    candidates.sort()
    best = _best_size(width + num_fixed, tokens, [-value for value, _, _ in candidates], costs, draft_s)
    for _, b, node in candidates[: best.size]:
        kept[b][node] = True
    return Selection(kept, best.size == num_drafted)
