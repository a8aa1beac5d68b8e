"""Broken variants of acceptance, each next to the healthy setting it was made from. The exact tests must see every one.

A mutant replaces one thing: the rule, the drafts it is told of, the rows it reads, its choices, or a function it calls.
"""

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import torch
from drafting import (
    Child,
    Proposal,
    best,
    drafts,
    for_all,
    independent,
    joined,
    random_table,
    tables,
    without_improbable,
    without_replacement,
)
from enumeration import EXACT, EXACT_32, Columns, DecisionsFactory, Drafts, Lookup, ReplayedDecisions, Rule
from float_edges import engine_drafts, table
from penalised import penalised_rule, penalised_target, without_the_node_itself, without_the_path
from torch import Tensor

from foretoken.acceptance.rules import Acceptance, Decisions, LogProbs, child_with_token, descend, residual
from foretoken.acceptance.sampled_rules import (
    accept_block,
    accept_lenient,
    accept_sequential,
    accept_traversal,
    accept_typical,
    draft_distributions,
    drawn_distributions,
    sampled_children,
)
from foretoken.core.token_tree import MAX_NODES, DrawKind, TokenTree

VOCAB = 3


@dataclass(frozen=True)
class Setting:
    """A rule that has the target distribution on these drafts."""

    rule: Rule
    drafts: Drafts
    target: Tensor


@dataclass(frozen=True)
class Mutant:
    """A setting with one thing broken.

    Attributes:
        setting: The healthy one.
        broken: The same with another rule or other drafts.
        lookup: Which rows the rule reads instead.
        decisions: Where its choices come from instead.
        patches: Dotted names and what stands there instead.
        dtype: Of the target's log-probabilities that the rule sees; float32 as in the engine.
        least: The error of a probability that the mutant exceeds.
    """

    setting: Setting
    broken: Setting | None = None
    lookup: Lookup | None = None
    decisions: DecisionsFactory = ReplayedDecisions
    patches: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float64
    least: float = 1e-3

    @property
    def tolerance(self) -> float:
        """The largest error of the healthy setting."""
        return EXACT if self.dtype == torch.float64 else EXACT_32


def setting(rule: Rule, draw: Callable[[Tensor, int], Proposal], shape: Sequence[int]) -> Setting:
    """A rule on random tables."""
    target, draft = tables("dense", VOCAB, len(shape))
    return Setting(rule, drafts([draw(draft, width) for width in shape], VOCAB), target)


CHAIN = setting(accept_sequential, independent, (1, 1))
BLOCK = setting(accept_block, independent, (1, 1))
PAIR = setting(accept_sequential, independent, (2,))
DISTINCT_PAIR = setting(accept_sequential, without_replacement, (2,))
BEST_PAIR = setting(accept_sequential, best, (2,))
TRAVERSAL = setting(accept_traversal, without_replacement, (2, 1))


def rewritten(function: Any, old: str, new: str) -> Any:
    """A function with one place of its source replaced."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{function.__name__} has {source.count(old)} times {old}"
    names = dict(vars(sys.modules[function.__module__]))
    exec(source.replace(old, new), names)
    return names[function.__name__]


def traversal_with(old: str, new: str) -> Mutant:
    return Mutant(TRAVERSAL, broken=replace(TRAVERSAL, rule=rewritten(accept_traversal, old, new)))


def unchanged(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """In place of the residual: the target's own distribution."""
    return target_probs


def not_normalised(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    return (target_probs - draft_probs).clamp_min(0)


def parent_row(tree: TokenTree, contexts: Tensor, log_probs: LogProbs) -> LogProbs:
    """Off by one: reads the row that predicts a node where the row after it is wanted."""
    index = torch.arange(tree.batch_size)
    return lambda nodes: log_probs(tree.parents[index, nodes].clamp_min(0))


def parent_row_after_the_whole_chain(tree: TokenTree, contexts: Tensor, log_probs: LogProbs) -> LogProbs:
    """The bonus token comes from p_gamma."""
    index = torch.arange(tree.batch_size)

    def look(nodes: Tensor) -> Tensor:
        is_last = tree.depths[index, nodes] == tree.max_depth
        return log_probs(torch.where(is_last, tree.parents[index, nodes].clamp_min(0), nodes))

    return look


def pruned(every: Callable[[Tensor, int], Proposal], shape: Sequence[int], threshold: float) -> Drafts:
    """The drafts of `setting` without draws whose own probability falls short."""
    _, draft = tables("dense", VOCAB, len(shape))
    return drafts([without_improbable(every(draft, width), draft, threshold) for width in shape], VOCAB)


def other_temperature(every_draft: Drafts) -> Drafts:
    """Tokens drawn at one temperature, tested with the distribution of another."""
    distribution = every_draft.tree.distributions
    assert distribution is not None
    squared = distribution.rows**2
    distribution = replace(distribution, rows=squared / squared.sum(-1, keepdim=True).clamp_min(1e-9))
    return replace(every_draft, tree=replace(every_draft.tree, distributions=distribution))


def marked(every_draft: Drafts, kind: DrawKind) -> Drafts:
    """The same trees, with every node said to have been chosen in another way."""
    distribution = every_draft.tree.distributions
    assert distribution is not None
    distribution = replace(distribution, kinds=torch.full_like(distribution.kinds, kind), max_siblings=2)
    return replace(every_draft, tree=replace(every_draft.tree, distributions=distribution))


def larger_of_two(q: Tensor, count: int) -> Proposal:
    """Two draws, of which the one with the larger q is kept: a choice by token, so one-hot."""
    rows = list(q)

    def propose(context: int) -> list[tuple[list[Child], float]]:
        row = rows[context]
        kept = [
            (max(pair, key=row.__getitem__), row[list(pair)].prod().item()) for pair in product(range(VOCAB), repeat=2)
        ]
        return [([Child(token, DrawKind.ONE_HOT, row)], prob) for token, prob in kept]

    return propose


def said_to_be_drawn(q: Tensor, count: int) -> Proposal:
    """The most probable tokens with the row they were chosen by."""
    rows = list(q)
    return lambda c: [([Child(x, DrawKind.ONE_HOT, rows[c]) for x in rows[c].topk(count).indices.tolist()], 1.0)]


def without_duplicates(tree: TokenTree) -> Tensor:
    """In place of `sampled_children`: a token that an earlier sibling held is not tested again."""
    table = sampled_children(tree)
    tokens = tree.tokens.gather(1, table.clamp_min(0).flatten(1)).view(table.shape)
    is_repeated = (tokens[..., 1:] == tokens[..., :1]) & (table[..., :1] >= 0)
    return torch.cat([table[..., :1], table[..., 1:].masked_fill(is_repeated, -1)], dim=2)


def siblings_tested_with_unmodified_target(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    """The sequential test, but p stays p until all children have been rejected."""
    table, index = sampled_children(tree), torch.arange(tree.batch_size)

    def step(node: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        probs = rest = log_probs(node).exp()
        child = torch.full_like(node, -1)
        for slot in range(table.shape[2]):
            candidate = table[index, node, slot]
            draft_probs = draft_distributions(tree, candidate.clamp_min(0), probs)
            token = tree.tokens.gather(1, candidate.clamp_min(0).unsqueeze(1))
            is_tested = (candidate >= 0) & (child < 0)
            p, q = probs.gather(1, token)[:, 0], draft_probs.gather(1, token)[:, 0]
            survives = decisions.accept(torch.where(is_tested, p, 0.0), q, depth * MAX_NODES + slot)
            child = torch.where(survives, candidate, child)
            rest = torch.where((is_tested & ~survives).unsqueeze(1), residual(rest, draft_probs), rest)
        drawn = decisions.token(rest, depth)
        return torch.where(child < 0, child_with_token(tree, node, drawn), child), drawn

    return descend(tree, step)


class StopsAtFirstFailure(ReplayedDecisions):
    """Block verification that gives up at the first failing position instead of keeping the longest passing prefix."""

    def __init__(self, script: Tensor, weight: Tensor, draft: Tensor, columns: Columns) -> None:
        super().__init__(script, weight, draft, columns)
        self._passing = torch.ones_like(draft, dtype=torch.bool)

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        self._passing = self._passing & super().accept(target_prob, draft_prob, lane)
        return self._passing


ONE_DRAWN = setting(accept_sequential, independent, (1,))


class ReusesTheDraftsNumber(ReplayedDecisions):
    """Tests a token with the number u that drew it by inversion: u lies in [Q(x - 1), Q(x)), not in [0, 1)."""

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        tree = ONE_DRAWN.drafts.tree
        assert tree.distributions is not None
        token = tree.tokens[self._draft, 1]
        high = tree.distributions.rows[0, 0].cumsum(0)[token]
        low = high - draft_prob
        return super().accept((target_prob / draft_prob - low).clamp_min(0), draft_prob, lane)


def lenient(lenience: float) -> Rule:
    def rule(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
        is_greedy = torch.zeros(tree.batch_size, dtype=torch.bool)
        return accept_lenient(tree, log_probs, log_probs, is_greedy, decisions, lenience=lenience)

    return rule


def typical(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
    result = accept_typical(tree, log_probs, decisions, epsilon=0.09, delta=0.3)
    return replace(result, lossy_tv=torch.zeros(tree.batch_size))


def edge(
    rule: Rule, draw: Callable[[Tensor, int], Proposal], shape: Sequence[int], names: Sequence[str], **stated: Any
) -> Setting:
    """A rule on drafts at the edges of float32; `names`: the target's and the draft's distribution, see `LOGITS`."""
    contexts = sum(4**d for d in range(len(shape) + 1))
    target, draft = (table([name] * contexts, torch.float32) for name in names)
    return Setting(rule, engine_drafts([draw(draft, width) for width in shape], **stated), target)


def bounded(weights: Tensor) -> Tensor:
    """In place of `normalised`: a sum below the smallest normal number counts as that number."""
    return weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)


def without_a_small_residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """In place of the residual: p itself where the residual's mass is below 1e-6."""
    is_small = (target_probs - draft_probs).clamp_min(0).sum(1, keepdim=True) < 1e-6
    return torch.where(is_small, target_probs, residual(target_probs, draft_probs))


def still_drawn(every_draft: Drafts) -> Drafts:
    """The same trees, in which tokens without a stated probability count as drawn; there is one row for all."""
    distribution = every_draft.tree.distributions
    assert distribution is not None
    is_node = every_draft.tree.parents >= 0
    distribution = replace(
        distribution,
        kinds=torch.where(is_node, DrawKind.WITHOUT_REPLACEMENT.value, 0),
        row_of=torch.where(is_node, 0, -1),
    )
    return replace(every_draft, tree=replace(every_draft.tree, distributions=distribution))


def scaled_rows(every_draft: Drafts) -> Drafts:
    """The same trees with rows that sum to 0.9995, as rows in bfloat16 do."""
    distribution = every_draft.tree.distributions
    assert distribution is not None
    distribution = replace(distribution, rows=distribution.rows * 0.9995)
    return replace(every_draft, tree=replace(every_draft.tree, distributions=distribution))


RULES = "foretoken.acceptance.sampled_rules."
LENIENT = replace(CHAIN, rule=lenient(1.0))
LARGER = setting(accept_sequential, larger_of_two, (1,))
TOP = setting(accept_sequential, said_to_be_drawn, (2,))
FAR = {  # siblings of which all but the first are subnormal
    rule: edge(rule, without_replacement, (2,), ("dense", "others subnormal"))
    for rule in (accept_sequential, accept_traversal)
}
FAR_AS_IT_IS = edge(accept_sequential, without_replacement, (2,), ("dense", "others subnormal"), stated=torch.exp)
RARE = edge(accept_sequential, independent, (1,), ("another at 7e-7", "one-hot"))
OF_PARENT = "(tree.parents == tree.parents.gather(1, nodes)) & "
_TARGET, _DRAFT = tables("dense", VOCAB, 2)
SHARED_ROWS = Setting(
    accept_sequential, drafts([for_all(without_replacement(each, 2)) for each in (_DRAFT, _DRAFT[1:])], VOCAB), _TARGET
)
_TARGET, _DRAFT = tables("dense", 4, 1)
TWO_DRAFTERS = Setting(
    accept_sequential,
    drafts([joined(independent(_DRAFT, 1), without_replacement(random_table(4, 1, 7), 2))], 4),
    _TARGET,
)
SCALED_BLOCK, SCALED_CHAIN = (replace(each, drafts=scaled_rows(each.drafts)) for each in (BLOCK, CHAIN))
PENALISED = replace(CHAIN, rule=penalised_rule, target=penalised_target(VOCAB, 2))

MUTANTS: dict[str, Mutant] = {
    "residual replaced by p": Mutant(CHAIN, patches={RULES + "residual": unchanged}),
    "residual replaced by p, block": Mutant(BLOCK, patches={RULES + "residual": unchanged}),
    "residual replaced by p, lenient": Mutant(LENIENT, patches={RULES + "residual": unchanged}),
    "residual not normalised": Mutant(PAIR, patches={RULES + "residual": not_normalised}),
    "siblings tested with unmodified p": Mutant(
        PAIR, broken=replace(PAIR, rule=siblings_tested_with_unmodified_target)
    ),
    "bonus from the wrong row": Mutant(CHAIN, lookup=parent_row_after_the_whole_chain),
    "bonus from the wrong row, block": Mutant(BLOCK, lookup=parent_row_after_the_whole_chain),
    "rows off by one": Mutant(CHAIN, lookup=parent_row),
    "rows off by one, block": Mutant(BLOCK, lookup=parent_row),
    "rows off by one, one-hot": Mutant(setting(accept_sequential, best, (2, 1)), lookup=parent_row),
    "u reused from drafting": Mutant(ONE_DRAWN, decisions=ReusesTheDraftsNumber),
    "q at another temperature": Mutant(CHAIN, broken=replace(CHAIN, drafts=other_temperature(CHAIN.drafts))),
    "q at another temperature, block": Mutant(BLOCK, broken=replace(BLOCK, drafts=other_temperature(BLOCK.drafts))),
    "block stops at the first failure": Mutant(BLOCK, decisions=StopsAtFirstFailure),
    "duplicate skipped": Mutant(PAIR, patches={RULES + "sampled_children": without_duplicates}),
    "distinct draws tested as independent": Mutant(
        DISTINCT_PAIR, broken=replace(DISTINCT_PAIR, drafts=marked(DISTINCT_PAIR.drafts, DrawKind.INDEPENDENT))
    ),
    "independent draws tested as distinct": Mutant(
        PAIR, broken=replace(PAIR, drafts=marked(PAIR.drafts, DrawKind.WITHOUT_REPLACEMENT))
    ),
    "selected after drawing, tested with p/q": Mutant(
        LARGER, broken=replace(LARGER, drafts=marked(LARGER.drafts, DrawKind.INDEPENDENT))
    ),
    "draws pruned by their probability": Mutant(CHAIN, broken=replace(CHAIN, drafts=pruned(independent, (1, 1), 0.3))),
    "draws pruned by their probability, block": Mutant(
        BLOCK, broken=replace(BLOCK, drafts=pruned(independent, (1, 1), 0.3))
    ),
    "draws pruned by their probability, tree": Mutant(
        DISTINCT_PAIR, broken=replace(DISTINCT_PAIR, drafts=pruned(without_replacement, (2,), 0.3))
    ),
    "top-k children tested with p/q": Mutant(TOP, broken=replace(TOP, drafts=marked(TOP.drafts, DrawKind.INDEPENDENT))),
    "traversal, weight not clipped": traversal_with(".clamp_max(1.0)", ""),
    "traversal, weight not raised after a deletion": traversal_with(
        "torch.where(is_deleted & (parent > 0), raised, weight)", "weight"
    ),
    "traversal, weight of the parent left out": traversal_with(
        "weights[index, node].unsqueeze(1) * path_probs", "path_probs"
    ),
    "traversal, weight left out of the residual": traversal_with("weight.unsqueeze(1) * path_probs", "path_probs"),
    "traversal, residual not normalised": Mutant(TRAVERSAL, patches={RULES + "residual": not_normalised}),
    "traversal, residual replaced by p": Mutant(TRAVERSAL, patches={RULES + "residual": unchanged}),
    "traversal, draft distribution not updated after a deletion": Mutant(
        TRAVERSAL, broken=replace(TRAVERSAL, drafts=marked(TRAVERSAL.drafts, DrawKind.INDEPENDENT))
    ),
    "traversal, rows off by one": Mutant(TRAVERSAL, lookup=parent_row),
    "penalties of the root only": Mutant(
        PENALISED, patches={"foretoken.sampling.batch.History.extended": without_the_path}
    ),
    "penalties one token late": Mutant(
        PENALISED, patches={"foretoken.sampling.batch.History.extended": without_the_node_itself}
    ),
    **{
        f"float32, {rule.__name__}, sum of later siblings bounded below": Mutant(
            healthy,
            broken=replace(healthy, drafts=FAR_AS_IT_IS.drafts),
            patches={RULES + "normalised": bounded},
            dtype=torch.float32,
        )
        for rule, healthy in FAR.items()
    },
    "float32, sum bounded below, a drafter that states subnormal numbers": Mutant(
        FAR_AS_IT_IS, patches={RULES + "normalised": bounded}, dtype=torch.float32
    ),
    "float32, subnormal probabilities of few bits stated": Mutant(
        edge(accept_sequential, without_replacement, (2,), ("dense", "others of few bits")),
        broken=edge(accept_sequential, without_replacement, (2,), ("dense", "others of few bits"), stated=torch.exp),
        dtype=torch.float32,
    ),
    "float32, tokens without stated probability count as drawn": Mutant(
        FAR[accept_sequential],
        broken=replace(FAR[accept_sequential], drafts=still_drawn(FAR[accept_sequential].drafts)),
        dtype=torch.float32,
    ),
    "float32, small residual replaced by p": Mutant(
        RARE, patches={RULES + "residual": without_a_small_residual}, dtype=torch.float32, least=EXACT_32
    ),
    "tokens of cousins excluded": Mutant(
        SHARED_ROWS, patches={RULES + "drawn_distributions": rewritten(drawn_distributions, OF_PARENT, "")}
    ),
    "tokens of another drafter excluded": Mutant(
        TWO_DRAFTERS,
        patches={RULES + "drawn_distributions": rewritten(drawn_distributions, " & (drafts.row_of == row)", "")},
    ),
    "rows that do not sum to 1": Mutant(
        SCALED_CHAIN, patches={RULES + "normalised": lambda weights: weights}, least=1e-5
    ),
    "rows that do not sum to 1, block": Mutant(
        SCALED_BLOCK, patches={RULES + "normalised": lambda weights: weights}, least=1e-5
    ),
    "lenience 0.95": Mutant(LENIENT, broken=replace(LENIENT, rule=lenient(0.95))),
    "typical acceptance": Mutant(BEST_PAIR, broken=replace(BEST_PAIR, rule=typical)),
}
