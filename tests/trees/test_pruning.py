"""Pruned static trees against a plain loop, thresholds, and whole trees that are pruned by their scores."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, TreeError
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import DrawKind, TokenTree, TreeRow
from foretoken.sampling.batch import SamplingBatch, SamplingRequest, warp
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.sampling.noise import Purpose
from foretoken.trees import expansion
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion
from foretoken.trees.merge import Pruning, normalised_entropy, pruned
from tests.tree_checks import check_tree

VOCAB, POSITION = 11, 9
Path = tuple[int, ...]
SHAPES = {
    "chain": TreeShape.chain(5),
    "widths": TreeShape.cartesian((3, 2, 2)),
    "gaps": TreeShape.from_choices([[0], [2], [3], [2, 1], [3, 0], [2, 1, 0], [2, 1, 2], [3, 0, 1]]),
}
REQUESTS: dict[str, tuple[SamplingParams, bool]] = {
    "greedy": (SamplingParams(temperature=0.0), False),
    "coupled": (SamplingParams(temperature=0.9, seed=3), True),
    "sampled": (SamplingParams(temperature=0.8, seed=5), False),
    "truncated": (SamplingParams(seed=6, top_k=3), False),
}
thresholds = st.one_of(st.none(), st.sampled_from([0.02, 0.1, 0.3, 0.7]))
prunings = st.tuples(thresholds, thresholds, thresholds).filter(any)


def logits_after(seed: int, row: int, path: Path) -> Tensor:
    """(V,), which depend on all tokens before."""
    generator = torch.Generator().manual_seed(hash((seed, row, *path)) % 2**31)
    return 3 * torch.randn(VOCAB, generator=generator)


def filled(shape: TreeShape, kinds: list[str], seed: int, pruning: Pruning | None) -> tuple[TokenTree, list[int]]:
    """Trees drafted level by level, and how many nodes each level evaluated."""
    requests = [REQUESTS[kind] for kind in kinds]
    batch = SamplingBatch.build([SamplingRequest(params=p, seed=p.seed or 0) for p, _ in requests], VOCAB)
    draws = DraftDraws.build(batch, [is_coupled for _, is_coupled in requests], POSITION + torch.arange(len(kinds)))
    made = TreeExpansion(shape, torch.full((len(kinds),), 7), replace(draws, pruning=pruning))
    above, widths = torch.empty(len(kinds), 1, 0, dtype=torch.int64), []
    for depth in made.levels():
        frontier = made.frontier(depth)
        paths = frontier.inherited(above)
        if depth:
            paths = torch.cat([paths, frontier.tokens.unsqueeze(2)], dim=2)
        each = [[logits_after(seed, row, tuple(path)) for path in of_row] for row, of_row in enumerate(paths.tolist())]
        made.grow(depth, torch.stack([torch.stack(of_row) for of_row in each]))
        above = paths
        widths.append(paths.shape[1])
    tree = made.finish(range(len(kinds)), [99] * len(kinds), [7] * len(kinds))
    check_tree(tree)
    return tree, widths


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """Tokens from below the root down to every node."""
    found: list[Path] = []
    for node in range(int(tree.num_nodes[row])):
        parent = int(tree.parents[row, node])
        found.append(() if parent < 0 else (*found[parent], int(tree.tokens[row, node])))
    return found


def plain_loop(tree: TokenTree, row: int, kind: str, seed: int, pruning: Pruning) -> tuple[list[int], set[int]]:
    """Nodes of a whole tree that are kept, and those of them that something may follow; in plain Python."""
    params, is_coupled = REQUESTS[kind]
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=params.seed or 0)], VOCAB)
    kept, goes_on, score = [0], {0}, {0: 0.0}
    paths = paths_of(tree, row)
    for node in range(1, len(paths)):
        parent = int(tree.parents[row, node])
        logits = logits_after(seed, row, paths[parent])
        row_of_parent = logits.log_softmax(0) if params.is_greedy else warp(logits.unsqueeze(0), batch)[0]
        if is_coupled:  # how probable each token is once the target's noise is known
            position = torch.tensor([POSITION + row + len(paths[node])])
            row_of_parent = (row_of_parent + batch.noise.gumbel(position, Purpose.TARGET, VOCAB)[0]).log_softmax(0)
        probs = row_of_parent.exp().tolist()
        own = probs[paths[node][-1]]
        score[node] = score[parent] + (math.log(own) if own > 0 else -math.inf)
        entropy = -sum(p * math.log(p) for p in probs if p > 0) / math.log(VOCAB)
        falls_short = (
            own < (pruning.token_probability or 0)
            or math.exp(score[node]) < (pruning.path_probability or 0)
            or own < (pruning.entropy_weighted or 0) * (1 - entropy)
        )
        is_drawn = tree.distributions is not None and tree.distributions.kinds[row, node] != DrawKind.ONE_HOT
        if parent in goes_on and (is_drawn or not falls_short):
            kept.append(node)
        if parent in goes_on and not falls_short:
            goes_on.add(node)
    return kept, goes_on


@settings(max_examples=80, deadline=None)
@given(
    shape=st.sampled_from(sorted(SHAPES)), kinds=st.lists(st.sampled_from(sorted(REQUESTS)), min_size=1, max_size=3),
    seed=st.integers(0, 99), values=prunings, is_free=st.booleans(),
)  # fmt: skip
def test_pruned_trees_are_what_a_plain_loop_keeps(
    shape: str, kinds: list[str], seed: int, values: tuple[float | None, ...], is_free: bool
) -> None:
    """Also where the host does not look at the device, and all levels are expanded whole."""
    pruning = Pruning(**dict(zip(("token_probability", "path_probability", "entropy_weighted"), values, strict=True)))
    whole, all_widths = filled(SHAPES[shape], kinds, seed, None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expansion, "reads_are_free", lambda device: is_free)
        tree, widths = filled(SHAPES[shape], kinds, seed, pruning)
    facts = tree.host_facts
    assert facts is not None
    evaluated: list[set[int]] = [set() for _ in all_widths]
    for row, kind in enumerate(kinds):
        kept, goes_on = plain_loop(whole, row, kind, seed, pruning)
        before, after = paths_of(whole, row), paths_of(tree, row)
        assert after == [before[node] for node in kept]
        assert (facts.num_nodes[row], facts.depths[row]) == (len(kept), max(map(len, after)))
        assert tree.scores is not None
        assert whole.scores is not None
        assert torch.equal(tree.scores[row, : len(kept)], whole.scores[row, kept])
        parents = set(SHAPES[shape].parents)
        for node in goes_on & parents:
            evaluated[SHAPES[shape].depths[node]].add(node)
        if whole.distributions is None:
            assert tree.distributions is None
            continue
        assert tree.distributions is not None
        for new, node in enumerate(kept):
            assert tree.distributions.kinds[row, new] == whole.distributions.kinds[row, node]
            ours, theirs = int(tree.distributions.row_of[row, new]), int(whole.distributions.row_of[row, node])
            assert (ours < 0) == (theirs < 0)
            if ours >= 0:
                assert torch.equal(tree.distributions.rows[row, ours], whole.distributions.rows[row, theirs])
    expected = [len(nodes) for nodes in evaluated if nodes] if is_free else all_widths
    assert widths == expected, "what fell short for all sequences is not drafted from"


def test_one_row_of_logits_serves_a_level() -> None:
    """As the same logits after each node."""
    shape, pruning = SHAPES["widths"], Pruning(token_probability=0.15, entropy_weighted=0.3)
    by_depth = 2 * torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(2))
    batch = SamplingBatch.build([SamplingRequest(params=REQUESTS["sampled"][0], seed=5)] * 2, VOCAB)
    draws = replace(DraftDraws.build(batch, [False] * 2, torch.tensor([3, 4])), pruning=pruning)
    one, each = (TreeExpansion(shape, torch.tensor([7, 7]), draws) for _ in range(2))
    one.grow_levels(by_depth)
    for depth in each.levels():
        width = each.frontier(depth).tokens.shape[1]
        each.grow(depth, by_depth[:, depth : depth + 1].expand(-1, width, -1))
    trees = [made.finish([0, 1], [9, 9], [7, 7]) for made in (one, each)]
    for row in range(2):
        assert paths_of(trees[0], row) == paths_of(trees[1], row)
    assert int(trees[0].num_nodes.max()) < shape.num_nodes


def test_sequences_that_are_not_drafted_for_or_have_less_room() -> None:
    shape, pruning = SHAPES["widths"], Pruning(token_probability=0.1)
    batch = SamplingBatch.build([SamplingRequest(params=REQUESTS["greedy"][0], seed=0)] * 2, VOCAB)
    draws = replace(DraftDraws.build(batch, [False] * 2, torch.tensor([3, 4])), pruning=pruning)
    made = TreeExpansion(shape, torch.tensor([7, 8]), draws)
    made.grow_levels(2 * torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(2)))
    whole = made.finish([0, 1], [9, 9], [7, 8])
    tree = made.finish([0, 2], [1, 5, 9], [7, 6, 8])
    check_tree(tree)
    assert paths_of(tree, 0) == [path for path in paths_of(whole, 0) if len(path) <= 1]
    assert paths_of(tree, 1) == [()]
    assert paths_of(tree, 2) == paths_of(whole, 1)
    assert tree.tokens[:, 0].tolist() == [7, 6, 8]


def test_a_chain_that_is_not_sure_enough_ends_with_its_last_sure_token() -> None:
    """As with Hugging Face's assistant_confidence_threshold, but that a greedy chain leaves the unsure token out."""
    sure, unsure = torch.zeros(VOCAB), torch.zeros(VOCAB)
    sure[4] = 9.0
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)], VOCAB)
    draws = DraftDraws.build(batch, [False], torch.tensor([3]))
    made = TreeExpansion(TreeShape.chain(8), torch.tensor([7]), replace(draws, pruning=Pruning(token_probability=0.5)))
    asked = []
    for depth in made.levels():
        asked.append(depth)
        made.grow(depth, (sure if depth < 3 else unsure).view(1, 1, VOCAB))
    assert asked == [0, 1, 2, 3]
    assert made.finish([0], [8], [7]).tokens.tolist() == [[7, 4, 4, 4]]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("pruning", [{"token_probability": 0.1}, {"path_probability": 0.1}, {"entropy_weighted": 0.1}])
def test_logits_that_are_no_numbers_are_not_sure(pruning: dict[str, float], value: float) -> None:
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(temperature=0.0), seed=0)], VOCAB)
    draws = replace(DraftDraws.build(batch, [False], torch.tensor([3])), pruning=Pruning(**pruning))
    made = TreeExpansion(TreeShape.chain(2), torch.tensor([7]), draws)
    made.grow_levels(torch.full((1, 2, VOCAB), value))
    assert made.finish([0], [8], [7]).tokens.tolist() == [[7]]


@given(seed=st.integers(0, 99), values=st.tuples(thresholds, thresholds).filter(any))
def test_whole_trees_are_pruned_by_their_scores(seed: int, values: tuple[float | None, float | None]) -> None:
    """As lookups with scores use it."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1] + [int(torch.randint(0, node, (), generator=generator)) for node in range(1, 9)]
    own = torch.rand(9, generator=generator)
    own[torch.rand(9, generator=generator) < 0.1] = 0.0
    products = [1.0]
    for node in range(1, 9):
        products.append(products[parents[node]] * float(own[node]))
    tree = TokenTree.from_rows([TreeRow([50, *range(1, 9)], parents), TreeRow([3], [-1])])
    scores = torch.zeros(2, 9)
    scores[0] = torch.tensor(products).log()
    result = pruned(replace(tree, scores=scores), Pruning(token_probability=values[0], path_probability=values[1]))
    check_tree(result)
    kept = [0]
    for node in range(1, 9):
        is_likely = float(own[node]) >= (values[0] or 0) and products[node] >= (values[1] or 0)
        if parents[node] in kept and is_likely:
            kept.append(node)
    assert result.rows() == [
        TreeRow([tree.rows()[0].tokens[n] for n in kept], [-1, *(kept.index(parents[n]) for n in kept[1:])]),
        TreeRow([3], [-1]),
    ]


def test_trees_without_scores() -> None:
    with pytest.raises(TreeError, match=r"a tree without scores cannot be pruned by probabilities\. Expected scores"):
        pruned(TokenTree.roots([5]), Pruning(token_probability=0.5))


def test_entropy() -> None:
    uniform, certain = torch.full((8,), 1 / 8).log(), torch.tensor([0.0, *[float("-inf")] * 7])
    halves = torch.tensor([0.5, 0.5, *[0.0] * 6]).log()
    found = normalised_entropy(torch.stack([uniform, certain, halves, torch.full((8,), float("nan"))]))
    torch.testing.assert_close(found[:3], torch.tensor([1.0, 0.0, 1 / 3]))
    assert bool(found[3].isnan())
    assert normalised_entropy(torch.zeros(2, 1)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"pruning: there is no threshold; expected one of token_probability, path_probability, entropy_weighted"),
        ({"token_probability": None}, "there is no threshold"),
        ({"token_probability": 0.0}, "'token_probability' of pruning is 0.0. Input should be greater than 0"),
        ({"path_probability": 1.5}, "'path_probability' of pruning is 1.5. Input should be less than or equal to 1"),
        ({"path_probability": True}, "'path_probability' of pruning is True. Input should be a valid number"),
        ({"entropy_weighted": "0.2"}, "'entropy_weighted' of pruning is '0.2'. Input should be a valid number"),
        ({"entropy_weighted": float("nan")}, "Input should be a finite number"),
        ({"token_prob": 0.1}, r"pruning has no key 'token_prob'\. Did you mean 'token_probability'"),
        (0.1, r"pruning is 0\.1\. Expected keys and values\."),
    ],
)
def test_thresholds_that_are_none(values: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        validated(Pruning, values, "pruning")
