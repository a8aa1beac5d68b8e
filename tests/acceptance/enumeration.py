"""The exact distribution of an acceptance rule: every draft, every random choice, no randomness.

Probabilities of outcomes are summed in float64. The rule itself computes in float64, or in float32 as in the engine.
Many cases, each with drafts and a target of its own, are enumerated in one batch.

Contexts (the tokens after the root) are numbered like a heap: the empty one is 0, and context c followed by token x is
c * V + 1 + x, so a table of distributions is one (C, V) tensor.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.acceptance.rules import Acceptance, Decisions, LogProbs
from foretoken.core.token_tree import DraftDistributions, TokenTree

# Distributions are sums of some 10^5 float64 products, each good to 1e-16 relative: 1e-12 leaves three digits of room,
# while the smallest bias that any of the mutants in test_mutants.py makes is above 1e-3.
EXACT = 1e-12

# In float32 a probability of an outcome goes through some ten roundings of numbers of at most 1, by at most 2^-25 each:
# 3e-7. Measured on all cases of test_float_edges.py: 8e-8. The smallest bias of the mutants there is 7e-7.
EXACT_32 = 5e-7

# Branches that exist by rounding alone are not followed: 10^5 of them would weigh 1e-13, a tenth of EXACT.
_NEGLIGIBLE = 1e-18

_MAX_ROWS = 40_000  # keeps a run below some 100 MB

Columns = dict[tuple[str, int], int]  # of a script, by kind and lane of a choice
Rule = Callable[[TokenTree, LogProbs, Decisions], Acceptance]
Lookup = Callable[[TokenTree, Tensor, LogProbs], LogProbs]


@dataclass(frozen=True)
class Drafts:
    """Every tree a drafter can propose.

    Attributes:
        tree: One row a possible tree.
        contexts: (B, N), the context that each node ends.
        probs: (B,), how probable each tree is.
    """

    tree: TokenTree
    contexts: Tensor
    probs: Tensor


@dataclass(frozen=True)
class ExactLaw:
    """What a rule does.

    Attributes:
        tokens: (V ** length,), of the next `length` tokens; what the rule did not emit is drawn from the target.
        target: The same of the target alone.
        vocab: V.
        num_accepted: Expected number of accepted drafted tokens.
        lossy_tv: Expected `lossy_tv`.
    """

    tokens: Tensor
    target: Tensor
    vocab: int
    num_accepted: float
    lossy_tv: float

    @property
    def error(self) -> float:
        """Largest difference of a probability."""
        return (self.tokens - self.target).abs().max().item()

    def first_token(self) -> tuple[Tensor, Tensor]:
        """(V,) distributions of the first token: the rule's and the target's."""
        return self.tokens.view(self.vocab, -1).sum(1), self.target.view(self.vocab, -1).sum(1)


class ReplayedDecisions:
    """Follows a script of outcomes; elsewhere takes the first possible outcome and notes all others as new scripts.

    A script has a column for each choice, known by its kind and lane as the engine's random numbers are. -1 is open.

    Attributes:
        weight: (B,), probability of the choices made, the draft's included.
        is_over: (B,), rows whose outcome is decided: their further choices are not enumerated.
        branches: Scripts with their weights and drafts that lead to the other outcomes.
    """

    def __init__(self, script: Tensor, weight: Tensor, draft: Tensor, columns: Columns) -> None:
        self._script, self._draft, self._columns = script, draft, columns
        self._taken: dict[int, Tensor] = {}
        self.weight = weight
        self.is_over = torch.zeros_like(draft, dtype=torch.bool)
        self.branches: list[tuple[Tensor, Tensor, Tensor]] = []

    def target_token(self, log_probs: Tensor, depth: int) -> Tensor:
        return self._choose(log_probs.double().softmax(1), ("target", depth))

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        target_prob, draft_prob = target_prob.double(), draft_prob.double()  # as the engine compares them
        keep = torch.where(target_prob > 0, (target_prob / draft_prob).clamp_max(1.0), 0.0)
        return self._choose(torch.stack([keep, 1 - keep], dim=1), ("accept", lane)) == 0

    def token(self, probs: Tensor, lane: int) -> Tensor:
        # The engine draws by argmax(log p + g), which does not see the scale of p. Neither may this.
        probs = probs.double()
        return self._choose(probs / probs.sum(1, keepdim=True), ("token", lane))

    def _choose(self, probs: Tensor, key: tuple[str, int]) -> Tensor:
        assert probs.isfinite().all(), "a rule asked for a choice between probabilities that are not finite"
        column = self._columns.setdefault(key, len(self._columns))
        assert column not in self._taken, "a rule used a random number twice"
        is_scripted = column < self._script.shape[1]
        scripted = self._script[:, column] if is_scripted else torch.full_like(self._draft, -1)
        first = (probs > 0).to(torch.uint8).argmax(1)
        chosen = torch.where(scripted >= 0, scripted, first)
        is_open = (scripted < 0) & ~self.is_over
        possible = (self.weight.unsqueeze(1) * probs > _NEGLIGIBLE) & is_open.unsqueeze(1)
        possible[torch.arange(len(first)), first] = False
        row, outcome = possible.nonzero(as_tuple=True)
        if row.numel():
            script = torch.full((len(row), len(self._columns)), -1)
            for earlier, taken in self._taken.items():
                script[:, earlier] = taken[row]
            script[:, column] = outcome
            self.branches.append((script, self.weight[row] * probs[row, outcome], self._draft[row]))
        fresh = probs.gather(1, chosen.unsqueeze(1))[:, 0]
        # A scripted choice is in the weight already: it was counted where the script branched off.
        self.weight = torch.where(is_open, self.weight * fresh, self.weight)
        self._taken[column] = chosen
        return chosen


DecisionsFactory = Callable[[Tensor, Tensor, Tensor, Columns], ReplayedDecisions]


def exact_distribution(
    rule: Rule,
    drafts: Drafts,
    target: Tensor,
    *,
    lookup: Lookup | None = None,
    decisions: DecisionsFactory = ReplayedDecisions,
    walks: bool = False,
    dtype: torch.dtype = torch.float64,
) -> ExactLaw:
    """Sums a rule's outcomes over all drafts and all choices.

    Args:
        rule: What is tested.
        drafts: All trees.
        target: (C, V) float64, the target distribution after every context of at most the trees' depth.
        lookup: Replaces the log-probabilities that the rule sees, for broken variants.
        decisions: (script, weight, draft, columns) -> decisions.
        walks: The rule looks at one node a depth and stops at the first node it looks at twice. Only saves time: later
            choices of such a row are then not enumerated.
        dtype: Of the log-probabilities that the rule sees.
    """
    (law,) = exact_distributions(rule, [(drafts, target)], lookup=lookup, decisions=decisions, walks=walks, dtype=dtype)
    return law


def exact_distributions(
    rule: Rule,
    cases: Sequence[tuple[Drafts, Tensor]],
    *,
    lookup: Lookup | None = None,
    decisions: DecisionsFactory = ReplayedDecisions,
    walks: bool = False,
    dtype: torch.dtype = torch.float64,
) -> list[ExactLaw]:
    """Does `exact_distribution` for many pairs of drafts and target over one vocabulary, all in one batch."""
    drafts, case = _joined([each for each, _ in cases])
    vocab, depth, num_cases = cases[0][1].shape[1], drafts.tree.max_depth, len(cases)
    target = _same_depth([each for _, each in cases], vocab, depth)
    num_contexts = _num_contexts(vocab, depth + 1)
    mass = torch.zeros(num_cases * num_contexts, dtype=torch.float64)
    totals = torch.zeros(2, num_cases, dtype=torch.float64)
    log_target = target.flatten(0, 1).log().to(dtype)
    draft = torch.arange(len(drafts.probs))
    columns: Columns = {}
    jobs = [(torch.empty(len(draft), 0, dtype=torch.int64), drafts.probs, draft)]
    while jobs:
        branches = []
        for script, weight, draft in _in_chunks(jobs):
            replay = decisions(script, weight, draft, columns)
            tree, contexts = drafts.tree.select(draft), drafts.contexts[draft]
            log_probs = _lookup(log_target, contexts + case[draft].unsqueeze(1) * target.shape[1])
            if lookup:
                log_probs = lookup(tree, contexts, log_probs)
            result = rule(tree, _watched(log_probs, tree, replay) if walks else log_probs, replay)
            emitted = _emitted_context(result, tree, contexts, vocab)
            mass.index_add_(0, case[draft] * num_contexts + emitted, replay.weight)
            totals[0].index_add_(0, case[draft], replay.weight * result.num_accepted)
            totals[1].index_add_(0, case[draft], replay.weight * result.lossy_tv)
            branches += replay.branches
        jobs = branches
    mass = mass.view(num_cases, num_contexts)
    plain = torch.zeros_like(mass)
    plain[:, 0] = 1.0
    emitted, wanted = (_extended(each, target, depth + 1) for each in (mass, plain))
    return [
        ExactLaw(
            tokens=emitted[index], target=wanted[index], vocab=vocab, num_accepted=totals[0, index].item(),
            lossy_tv=totals[1, index].item(),
        )
        for index in range(num_cases)
    ]  # fmt: skip


def _joined(parts: Sequence[Drafts]) -> tuple[Drafts, Tensor]:
    """All drafts as one batch, and (B,) int64 which part each is of; trees get padding, which changes no outcome."""
    case = torch.arange(len(parts)).repeat_interleave(torch.tensor([len(each.probs) for each in parts]))
    if len(parts) == 1:
        return parts[0], case
    width = max(each.tree.width for each in parts)

    def wide(values: Tensor, filler: int) -> Tensor:
        return pad(values, (0, width - values.shape[1]), value=filler)

    trees = [each.tree.mapped(wide) for each in parts]
    names = ("tokens", "parents", "depths", "num_nodes")
    tree = TokenTree(
        **{name: torch.cat([getattr(each, name) for each in trees]) for name in names},
        max_depth=max(each.max_depth for each in trees),
        distributions=_joined_distributions(trees),
    )
    contexts = torch.cat([wide(each.contexts, 0) for each in parts])
    return Drafts(tree=tree, contexts=contexts, probs=torch.cat([each.probs for each in parts])), case


def _joined_distributions(trees: Sequence[TokenTree]) -> DraftDistributions | None:
    known = [each.distributions for each in trees if each.distributions is not None]
    if not known:
        return None
    num_rows = max(each.rows.shape[1] for each in known)

    def rows_of(tree: TokenTree) -> Tensor:
        drafts = tree.distributions
        if drafts is None:
            return known[0].rows.new_zeros(tree.batch_size, num_rows, known[0].rows.shape[2])
        return pad(drafts.rows, (0, 0, 0, num_rows - drafts.rows.shape[1]))

    def of(tree: TokenTree, name: str, filler: int) -> Tensor:
        return torch.full_like(tree.tokens, filler) if tree.distributions is None else getattr(tree.distributions, name)

    return DraftDistributions(
        kinds=torch.cat([of(each, "kinds", 0) for each in trees]),
        rows=torch.cat([rows_of(each) for each in trees]),
        row_of=torch.cat([of(each, "row_of", -1) for each in trees]),
        max_siblings=max(each.max_siblings for each in known),
    )


def _same_depth(targets: Sequence[Tensor], vocab: int, depth: int) -> Tensor:
    """(K, C, V): the first C contexts of every table; missing ones, which no case reaches, get rows of 1 / V."""
    count = _num_contexts(vocab, depth)
    return torch.stack([pad(each[:count], (0, 0, 0, count - len(each[:count])), value=1 / vocab) for each in targets])


def _lookup(log_target: Tensor, contexts: Tensor) -> LogProbs:
    index = torch.arange(len(contexts))
    return lambda nodes: log_target[contexts[index, nodes]]


def _watched(log_probs: LogProbs, tree: TokenTree, replay: ReplayedDecisions) -> LogProbs:
    """Tells the decisions which rows have stopped walking: the d-th look is at depth d only while they walk."""
    looks = iter(range(tree.max_depth + 1))
    index = torch.arange(tree.batch_size)

    def look(nodes: Tensor) -> Tensor:
        replay.is_over = tree.depths[index, nodes] < next(looks)
        return log_probs(nodes)

    return look


def _emitted_context(result: Acceptance, tree: TokenTree, contexts: Tensor, vocab: int) -> Tensor:
    """The context after accepted and emitted tokens; checks that the path is one."""
    index = torch.arange(tree.batch_size)
    path = torch.cat([torch.zeros_like(result.path[:, :1]), result.path], dim=1) if tree.max_depth else None
    last = index * 0 if path is None else path[index, result.num_accepted]
    assert torch.equal(tree.path_nodes(last), result.path), "the accepted nodes are no path from the root"
    return contexts[index, last] * vocab + 1 + result.next_token


def _extended(mass: Tensor, target: Tensor, length: int) -> Tensor:
    """Pushes mass on short contexts down to contexts of `length` tokens by the target distribution, case by case."""
    vocab, mass = target.shape[2], mass.clone()
    for level in range(length):
        above, below, end = (_num_contexts(vocab, n) for n in (level - 1, level, level + 1))
        mass[:, below:end] += (mass[:, above:below, None] * target[:, above:below]).flatten(1)
    return mass[:, _num_contexts(vocab, length - 1) :]


def _num_contexts(vocab: int, depth: int) -> int:
    """Contexts of at most `depth` tokens."""
    return sum(vocab**d for d in range(depth + 1))


def _in_chunks(jobs: Sequence[tuple[Tensor, Tensor, Tensor]]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Joins jobs into few, of at most `_MAX_ROWS` rows; short scripts are padded by -1."""
    longest = max(script.shape[1] for script, _, _ in jobs)
    script = torch.cat([torch.nn.functional.pad(s, (0, longest - s.shape[1]), value=-1) for s, _, _ in jobs])
    weight, draft = torch.cat([w for _, w, _ in jobs]), torch.cat([d for _, _, d in jobs])
    return list(zip(script.split(_MAX_ROWS), weight.split(_MAX_ROWS), draft.split(_MAX_ROWS), strict=True))
