"""The search through a lattice of candidates against all its paths, with and without scores of pairs."""

from itertools import product

import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.trees.dynamic import DraftLattice


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
