"""Dynamic trees and lattices: the nodes, parents and scores of a slow and obvious construction or of all paths."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree, ancestor_mask
from foretoken.sampling.batch import SamplingBatch, SamplingRequest, warp
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.sampling.noise import Purpose
from foretoken.trees import dynamic
from foretoken.trees.dynamic import DraftLattice, DynamicExpansion, DynamicShape
from foretoken.trees.merge import Pruning
from tests.tree_checks import check_tree

VOCAB, POSITION = 23, 9
GREEDY = (SamplingParams(temperature=0.0), False)
Request = tuple[SamplingParams, bool]
Path = tuple[int, ...]
Table = Callable[[int, Path], Tensor]  # sequence and tokens below its root to (V,) logits
REQUESTS: dict[str, list[Request]] = {
    "greedy": [GREEDY] * 3,
    "coupled": [(SamplingParams(temperature=0.5 + seed, seed=seed), True) for seed in range(3)],
    "sampled": [(SamplingParams(temperature=0.5 + seed, seed=seed), False) for seed in range(3)],
    "mixed": [
        (SamplingParams(temperature=0.7, seed=1), False), (SamplingParams(temperature=0.9, seed=3), True), GREEDY,
    ],
    "truncated": [
        (SamplingParams(temperature=0.8, seed=1, top_k=4), True), (SamplingParams(seed=2, top_p=0.7), False),
        (SamplingParams(seed=2, min_p=0.1), True),
    ],
}  # fmt: skip


def table(seed: int, spread: float = 3.0) -> Table:
    """Logits that depend on the sequence and on all tokens before."""

    def logits(row: int, path: Path) -> Tensor:
        generator = torch.Generator().manual_seed(hash((seed, row, *path)) % 2**31)
        return spread * torch.randn(VOCAB, generator=generator)

    return logits


def draws_of(requests: list[Request], first: int = 0, pruning: Pruning | None = None) -> DraftDraws:
    """The draws of requests whose roots stand at POSITION + `first`, and so on."""
    batch = SamplingBatch.build([SamplingRequest(params=p, seed=p.seed or 0) for p, _ in requests], VOCAB)
    positions = POSITION + first + torch.arange(len(requests))
    draws = DraftDraws.build(batch, [is_coupled for _, is_coupled in requests], positions)
    return replace(draws, pruning=pruning)


def expanded(
    shape: DynamicShape, requests: list[Request], logits: Table, first: int = 0, pruning: Pruning | None = None
) -> DynamicExpansion:
    """Trees filled as a drafter does it: what a node knows of its path comes from its parent in the frontier above."""
    roots = torch.full((len(requests),), 7)
    expansion = DynamicExpansion(shape, roots, draws_of(requests, first, pruning))
    above = torch.empty(len(requests), 1, 0, dtype=torch.int64)  # (B, P, depth), tokens of paths
    for depth in expansion.levels():
        frontier = expansion.frontier(depth)
        paths = frontier.inherited(above)
        if depth:
            paths = torch.cat([paths, frontier.tokens.unsqueeze(2)], dim=2)
        each = [[logits(first + row, tuple(path)) for path in of_row] for row, of_row in enumerate(paths.tolist())]
        expansion.grow(depth, torch.stack([torch.stack(of_row) for of_row in each]))
        above = paths
    return expansion


def finished(expansion: DynamicExpansion, count: int, room: int = 99) -> TokenTree:
    tree = expansion.finish(range(count), [room] * count, [7] * count)
    check_tree(tree)
    return tree


class Node(NamedTuple):
    """A candidate of the obvious construction."""

    path: Path
    score: Tensor
    parent: int


def gains(request: Request, row: int, logits: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """What candidates are ranked by, and the log-probability that each adds to a path: (V,) twice."""
    params, is_coupled = request
    if params.is_greedy:
        return (logits.log_softmax(0),) * 2
    batch = SamplingBatch.build([SamplingRequest(params=params, seed=params.seed or 0)], VOCAB)
    log_probs = warp(logits.unsqueeze(0), batch)[0]
    if not is_coupled:
        return log_probs, log_probs
    keys = log_probs + batch.noise.gumbel(torch.tensor([POSITION + row + depth + 1]), Purpose.TARGET, VOCAB)[0]
    return keys, keys.log_softmax(0)


def falls_short(gain: Tensor, token: int, path_score: Tensor, pruning: Pruning | None) -> bool:
    """Whether a candidate is pruned; gain: (V,) log-probabilities after its parent."""
    if pruning is None:
        return False
    probs = gain.exp()
    entropy = -sum(p * math.log(p) for p in probs.tolist() if p > 0) / math.log(VOCAB)
    return (
        probs[token].item() < (pruning.token_probability or 0.0)
        or path_score.exp().item() < (pruning.path_probability or 0.0)
        or probs[token].item() < (pruning.entropy_weighted or 0.0) * (1 - entropy)
    )


def obvious(
    shape: DynamicShape, request: Request, row: int, logits: Table, pruning: Pruning | None = None
) -> list[Node]:
    """The tree of one sequence: candidates in a list, sorted by Python; parents are indices into the result."""
    everything = [Node((), torch.tensor(0.0), -1)]
    expand = [0]
    for depth in range(shape.depth):
        start = len(everything)
        for index in expand:
            path, score, _ = everything[index]
            keys, gain = gains(request, row, logits(row, path), depth)
            best = keys.argsort(descending=True)[: shape.top_k].tolist()
            never = torch.tensor(float("-inf"))
            for token in best:
                of_path = score + gain[token]
                of_path = never if falls_short(gain, token, of_path, pruning) else of_path
                everything.append(Node((*path, token), of_path, index))
        level = range(start, len(everything))
        expand = sorted(level, key=lambda index: (-everything[index].score, index))[: shape.top_k]
    ranked = sorted(range(len(everything)), key=lambda index: (-everything[index].score, index))
    possible = [index for index in ranked[: shape.max_nodes] if everything[index].score > float("-inf")]
    kept = sorted(possible)
    return [
        Node(everything[i].path, everything[i].score, kept.index(everything[i].parent) if i else -1) for i in kept
    ]  # fmt: skip


def assert_is(tree: TokenTree, row: int, nodes: list[Node]) -> None:
    """A sequence's tree has just these nodes in this order."""
    count = int(tree.num_nodes[row])
    assert tree.tokens[row, :count].tolist() == [7, *(node.path[-1] for node in nodes[1:])]
    assert tree.parents[row, :count].tolist() == [node.parent for node in nodes]
    assert tree.depths[row, :count].tolist() == [len(node.path) for node in nodes]
    assert tree.scores is not None
    expected = torch.stack([node.score for node in nodes])
    torch.testing.assert_close(tree.scores[row, :count], expected, rtol=1e-6, atol=2e-6)
    mask = ancestor_mask(tree.parents)[row, :count, :count]
    sees = [[other.path == node.path[: len(other.path)] for other in nodes] for node in nodes]
    assert torch.equal(mask, torch.tensor(sees))
    facts = tree.host_facts
    assert facts is not None
    assert (facts.num_nodes[row], facts.depths[row]) == (count, max(len(node.path) for node in nodes))


@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("size", [(3, 3, 10), (10, 5, 60), (1, 4, 9), (4, 1, 8), (30, 2, 40)])
def test_trees_are_those_of_the_obvious_construction(size: tuple[int, int, int], kind: str) -> None:
    """Published sizes, chains, one level, and more candidates than tokens; several requests side by side."""
    shape = DynamicShape(top_k=size[0], depth=size[1], max_nodes=size[2])
    requests, logits = REQUESTS[kind], table(1)
    tree = finished(expanded(shape, requests, logits), len(requests))
    assert tree.distributions is None, "nodes are chosen, not drawn"
    for row, request in enumerate(requests):
        assert_is(tree, row, obvious(shape, request, row, logits))
    if kind == "greedy":
        most = {(3, 3, 10): 10, (10, 5, 60): 60, (1, 4, 9): 5, (4, 1, 8): 5, (30, 2, 40): 40}[size]
        assert tree.num_nodes.tolist() == [most] * 3


@pytest.mark.parametrize("kind", REQUESTS)
def test_one_row_of_logits_serves_a_level(kind: str) -> None:
    """Every node of a level has the same candidates then, as those of heads that look at no tokens."""
    shape, requests = DynamicShape(top_k=4, depth=3, max_nodes=14), REQUESTS[kind]
    by_depth = 2 * torch.randn(3, 3, VOCAB, generator=torch.Generator().manual_seed(6))
    expansion = DynamicExpansion(shape, torch.full((3,), 7), draws_of(requests))
    for depth in range(3):
        expansion.grow(depth, by_depth[:, depth : depth + 1])
    tree = finished(expansion, 3)
    for row, request in enumerate(requests):
        assert_is(tree, row, obvious(shape, request, row, lambda row, path: by_depth[row, len(path)]))


PRUNINGS = {
    "token": Pruning(token_probability=0.1),
    "path": Pruning(path_probability=0.1),
    "entropy": Pruning(entropy_weighted=0.25),
    "all": Pruning(token_probability=0.04, path_probability=0.01, entropy_weighted=0.15),
    "nothing is so sure": Pruning(token_probability=1.0),
}


@pytest.mark.parametrize("is_free", [True, False])
@pytest.mark.parametrize("kind", REQUESTS)
@pytest.mark.parametrize("pruning", PRUNINGS)
def test_pruned_trees_are_those_of_the_obvious_construction(
    pruning: str, kind: str, is_free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the host does not look, and every level is expanded whatever is left of it."""
    monkeypatch.setattr(dynamic, "reads_are_free", lambda device: is_free)
    shape = DynamicShape(top_k=5, depth=4, max_nodes=20)
    requests, logits = REQUESTS[kind], table(1)
    expansion = expanded(shape, requests, logits, pruning=PRUNINGS[pruning])
    tree = finished(expansion, len(requests))
    expected = [obvious(shape, request, row, logits, PRUNINGS[pruning]) for row, request in enumerate(requests)]
    for row, nodes in enumerate(expected):
        assert_is(tree, row, nodes)
    whole = finished(expanded(shape, requests, logits), len(requests))
    if kind == "greedy":
        assert any(paths_of(tree, row) != paths_of(whole, row) for row in range(3)), "something was pruned"
    if is_free:  # a node that was pruned was not expanded either
        widths = [expansion.frontier(depth).tokens.shape[1] for depth in expansion.levels()]
        deepest = max(len(node.path) for nodes in expected for node in nodes)
        assert len(widths) >= deepest
        if pruning == "nothing is so sure" and kind == "greedy":
            assert (widths, tree.width) == ([1], 1), "nothing is drafted below the root's candidates"


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.integers(1, 5), depth=st.integers(1, 4), max_nodes=st.integers(2, 25), seed=st.integers(0, 99),
    kind=st.sampled_from(sorted(REQUESTS)), pruning=st.sampled_from([None, *PRUNINGS.values()]),
)  # fmt: skip
def test_levels_at_once_are_the_best_of_all_paths(
    top_k: int, depth: int, max_nodes: int, seed: int, kind: str, pruning: Pruning | None
) -> None:
    """Of every path through the candidates of the levels, by brute force, also where none was among a level's best."""
    shape, requests = DynamicShape(top_k=top_k, depth=depth, max_nodes=max_nodes), REQUESTS[kind]
    by_depth = 1.5 * torch.randn(3, depth, VOCAB, generator=torch.Generator().manual_seed(seed))
    expansion = DynamicExpansion(shape, torch.full((3,), 7), draws_of(requests, pruning=pruning))
    expansion.grow_levels(by_depth)
    tree = finished(expansion, 3)
    assert tree.scores is not None
    for row, request in enumerate(requests):
        each = [gains(request, row, by_depth[row, level], level) for level in range(depth)]
        best = [keys.argsort(descending=True)[:top_k].tolist() for keys, _ in each]
        possible = [((), 0.0)]
        for path in (path for length in range(1, depth + 1) for path in product(*best[:length])):
            scores = torch.stack([each[level][1][token] for level, token in enumerate(path)]).cumsum(0)
            is_kept = scores[-1] > float("-inf") and not any(
                falls_short(each[level][1], token, scores[level], pruning) for level, token in enumerate(path)
            )
            possible += [(path, float(scores[-1]))] * is_kept
        possible.sort(key=lambda entry: (-entry[1], len(entry[0])))
        count = int(tree.num_nodes[row])
        assert count == min(max_nodes, len(possible))
        nodes = sorted(possible[:count], key=lambda entry: (len(entry[0]), -entry[1]))
        found = paths_of(tree, row)
        assert sorted(found) == sorted(path for path, _ in nodes)
        index = {path: node for node, path in enumerate(found)}
        expected = torch.tensor([dict(nodes)[path] for path in index])
        torch.testing.assert_close(tree.scores[row, :count], expected, rtol=1e-5, atol=1e-5)


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """Tokens from below the root down to every node."""
    found: list[Path] = []
    for node in range(int(tree.num_nodes[row])):
        parent = int(tree.parents[row, node])
        found.append(() if parent < 0 else (*found[parent], int(tree.tokens[row, node])))
    return found


@settings(max_examples=60, deadline=None)
@given(
    top_k=st.integers(1, 6), depth=st.integers(1, 5), max_nodes=st.integers(2, 30), seed=st.integers(0, 99),
    grid=st.sampled_from([0.0, 1.0, 40.0, 1000.0]),
)  # fmt: skip
def test_the_best_nodes_are_connected(top_k: int, depth: int, max_nodes: int, seed: int, grid: float) -> None:
    """Also where many candidates score alike: the shallower and earlier ones are taken, parents among them."""
    shape = DynamicShape(top_k=top_k, depth=depth, max_nodes=max_nodes)
    fine = table(seed)
    expansion = expanded(shape, [GREEDY] * 2, lambda row, path: grid * fine(row, path).round())
    tree = finished(expansion, 2)
    for row in range(2):
        scores = torch.cat([level.scores[row] for level in expansion._candidates]).tolist()
        parents = torch.cat([level.parents[row] for level in expansion._candidates]).tolist()
        tokens = torch.cat([level.tokens[row] for level in expansion._candidates]).tolist()
        assert all(score <= scores[parent] for score, parent in zip(scores, parents, strict=True))
        best = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:max_nodes]
        kept = sorted(i for i in best if scores[i] > float("-inf"))
        assert all(parents[i] in kept for i in kept)
        count = int(tree.num_nodes[row])
        assert tree.tokens[row, :count].tolist() == [tokens[i] for i in kept]
        assert tree.parents[row, 1:count].tolist() == [kept.index(parents[i]) for i in kept[1:]]
        depths = tree.depths[row, :count].tolist()
        assert depths == sorted(depths)
        families = list(zip(tree.parents[row, :count].tolist(), tree.tokens[row, :count].tolist(), strict=True))
        assert len(set(families)) == count, "no node has a token twice below it"


def test_of_equal_nodes_the_shallower_is_taken() -> None:
    """A drafter that is sure of a token gives it a log-probability of 0: its child scores as much as itself."""
    sure = torch.zeros(VOCAB)
    sure[5] = 500.0
    tree = finished(expanded(DynamicShape(top_k=2, depth=4, max_nodes=3), [GREEDY], lambda row, path: sure), 1)
    assert tree.tokens.tolist() == [[7, 5, 5]]
    assert tree.parents.tolist() == [[-1, 0, 1]]
    assert tree.scores is not None
    assert tree.scores.tolist() == [[0.0, 0.0, 0.0]]


@pytest.mark.parametrize("is_free", [True, False])
def test_sequences_with_less_room_get_the_best_of_their_levels(is_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tree is the one that its sequence would get alone with so many levels; others keep their root."""
    monkeypatch.setattr(dynamic, "reads_are_free", lambda device: is_free)
    shape, requests = DynamicShape(top_k=3, depth=4, max_nodes=12), REQUESTS["mixed"]
    expansion = expanded(shape, requests, table(2))
    tree = expansion.finish([0, 2, 3], [2, 5, 1, 9, 0], [7, 11, 7, 7, 12])
    check_tree(tree)
    facts = tree.host_facts
    assert facts is not None
    assert facts.are_depths_exact == is_free
    assert tree.tokens[:, 0].tolist() == [7, 11, 7, 7, 12]
    assert tree.num_nodes.tolist() == facts.num_nodes == [12, 1, 4, 12, 1]
    for row, (place, depth) in enumerate(((0, 2), (2, 1), (3, 4))):
        alone = finished(expanded(shape.truncated(depth), [requests[row]], table(2), first=row), 1)
        for name in ("tokens", "parents", "depths", "scores"):
            assert torch.equal(getattr(tree, name)[place, : alone.width], getattr(alone, name)[0])
            assert not (getattr(tree, name)[place, alone.width :] != (-1 if name == "parents" else 0)).any()
        greatest = int(alone.depths.max())
        assert facts.depths[place] >= greatest if not is_free else facts.depths[place] == greatest
        assert facts.depths[place] <= depth
    assert tree.max_depth == 4


def test_trees_that_no_host_reads_have_as_many_nodes_as_it_knows_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU impossible candidates fill the tree up; where reads are free they are left out."""
    shape, requests = DynamicShape(top_k=5, depth=3, max_nodes=20), [(SamplingParams(seed=1, top_k=2), False)]
    few = finished(expanded(shape, requests, table(3)), 1)
    assert few.num_nodes.tolist() == [15], "a root and two children of each node"
    monkeypatch.setattr(dynamic, "reads_are_free", lambda device: False)
    full = finished(expanded(shape, requests, table(3)), 1)
    assert full.num_nodes.tolist() == [20]
    assert full.host_facts is not None
    assert full.host_facts.num_nodes == [20]
    assert full.scores is not None
    is_possible = full.scores[0] > float("-inf")
    assert torch.equal(full.tokens[0, is_possible], few.tokens[0])
    assert ((full.tokens >= 0) & (full.tokens < VOCAB)).all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("is_free", [True, False])
def test_logits_that_are_no_numbers(value: float, is_free: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes after such a node is impossible; the other nodes are chosen as ever."""
    monkeypatch.setattr(dynamic, "reads_are_free", lambda device: is_free)
    valid = table(4)

    def logits(row: int, path: Path) -> Tensor:
        made = valid(row, path)
        if len(path) == 1 and row == 0:
            made[3] = value
        return made

    shape = DynamicShape(top_k=3, depth=3, max_nodes=9)
    tree = finished(expanded(shape, [GREEDY] * 2, logits), 2)
    assert ((tree.tokens >= 0) & (tree.tokens < VOCAB)).all()
    assert tree.num_nodes.tolist() == ([4, 9] if is_free else [9, 9])
    if is_free:
        assert_is(tree, 1, obvious(shape, GREEDY, 1, valid))


def test_every_root_without_a_number_is_a_root_alone() -> None:
    expansion = DynamicExpansion(DynamicShape(top_k=3, depth=1, max_nodes=9), torch.tensor([7]), draws_of([GREEDY]))
    expansion.grow(0, torch.full((1, 1, VOCAB), float("nan")))
    tree = finished(expansion, 1)
    assert (tree.width, tree.max_depth) == (1, 0)


def test_sizes() -> None:
    shape = DynamicShape(top_k=10, depth=6, max_nodes=60)
    assert [shape.truncated(depth).num_nodes for depth in range(4)] == [1, 11, 60, 60]
    assert DynamicShape(top_k=3, depth=9, max_nodes=20).truncated(2).num_nodes == 13
    assert [shape.truncated(depth).num_expanded for depth in range(4)] == [1, 1, 11, 21]


def lattice(depth: int, width: int, seed: int, *, has_pairs: bool, step: float) -> DraftLattice:
    """Two sequences; `step` rounds log-probabilities, so that many paths score alike, and some are impossible."""
    generator = torch.Generator().manual_seed(seed)

    def values(*shape: int) -> torch.Tensor:
        made = 4 * torch.randn(*shape, generator=generator).log_softmax(-1)
        made = (made / step).round() * step if step else made
        return torch.where(torch.rand(shape, generator=generator) < 0.1, float("-inf"), made).clamp_max(0.0)

    ids = torch.stack([torch.randperm(50, generator=generator)[:width] for _ in range(2 * depth)])
    pairs = values(2, depth, width, width) if has_pairs else None
    return DraftLattice(ids=ids.view(2, depth, width), log_probs=values(2, depth, width), pair_log_probs=pairs)


@given(
    depth=st.integers(1, 4), width=st.integers(1, 4), count=st.integers(1, 40), seed=st.integers(0, 999),
    has_pairs=st.booleans(), step=st.sampled_from([0.0, 0.5, 3.0]),
)  # fmt: skip
def test_the_best_nodes_are_among_those_found(
    depth: int, width: int, count: int, seed: int, has_pairs: bool, step: float
) -> None:
    given_ = lattice(depth, width, seed, has_pairs=has_pairs, step=step)
    levels = given_.best_nodes(count)
    assert len(levels) == depth
    for row in range(2):
        scores = {(): 0.0}
        for ranks in (ranks for length in range(1, depth + 1) for ranks in product(range(width), repeat=length)):
            level, pairs = len(ranks) - 1, given_.pair_log_probs
            if pairs is None or not level:
                gain = given_.log_probs[row, level, ranks[-1]]
            else:
                gain = pairs[row, level, ranks[-2], ranks[-1]]
            scores[ranks] = scores[ranks[:-1]] + float(gain)
        del scores[()]
        tokens = {
            tuple(int(given_.ids[row, level, rank]) for level, rank in enumerate(ranks)): score
            for ranks, score in scores.items()
        }
        found: list[tuple[tuple[int, ...], float]] = []
        above = [()]
        for depth_, level in enumerate(levels, start=1):
            assert level.tokens.shape == level.scores.shape == level.parents.shape
            assert level.tokens.shape[1] == min(count, width * len(above))
            paths = [
                (*above[parent], token)
                for parent, token in zip(level.parents[row].tolist(), level.tokens[row].tolist(), strict=True)
            ]
            assert len(set(paths)) == len(paths)
            assert all(len(path) == depth_ for path in paths)
            assert level.scores[row].tolist() == sorted(level.scores[row].tolist(), reverse=True)
            found += zip(paths, level.scores[row].tolist(), strict=True)
            above = paths
        for path, score in found:
            assert score == tokens[path] or abs(score - tokens[path]) < 1e-5, "a path with another path's score"
        best = sorted(scores.values(), reverse=True)[:count]
        mine = sorted((score for _, score in found), reverse=True)[:count]
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(best), rtol=1e-5, atol=1e-5)


def test_a_pair_can_bring_up_a_candidate_that_is_improbable_alone() -> None:
    pairs = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.1, 0.9], [0.99, 0.01]]).view(1, 2, 2, 2).log()
    given_ = DraftLattice(
        ids=torch.tensor([[[4, 5], [6, 7]]]),
        log_probs=torch.tensor([[[0.6, 0.4], [0.9, 0.1]]]).log(),
        pair_log_probs=pairs,
    )
    first, second = given_.best_nodes(3)
    assert first.tokens.tolist() == [[4, 5]]
    assert second.tokens.tolist() == [[7, 6, 6]]
    assert second.parents.tolist() == [[0, 1, 0]]
    torch.testing.assert_close(second.scores.exp(), torch.tensor([[0.54, 0.396, 0.06]]))
