"""The residual, and the engine's decisions from keyed noise."""

import pytest
import torch
from torch import Tensor

from foretoken.acceptance.rules import KeyedDecisions, residual
from foretoken.sampling.noise import KeyedNoise


def tensor(*rows: list[float], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(rows, dtype=dtype)


def decisions(batch: int, *, seed: int = 3) -> KeyedDecisions:
    """Every row its own position, so its own numbers."""
    return KeyedDecisions(KeyedNoise(torch.full((batch,), seed)), torch.arange(batch))


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ([0.5, 0.3, 0.2], [0.25, 0.5, 0.25], [1.0, 0.0, 0.0]),
        ([0.5, 0.375, 0.125], [0.25, 0.25, 0.5], [2 / 3, 1 / 3, 0.0]),
        ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]),  # disjoint: p itself
        ([0.5, 0.25, 0.25], [0.0, 1.0, 0.0], [2 / 3, 0.0, 1 / 3]),  # one-hot draft: p without its token
        ([0.25, 0.125, 0.125], [0.125, 0.5, 0.375], [1.0, 0.0, 0.0]),  # a scaled target, as blocks use it
    ],
)
def test_residual_by_hand(target: list[float], draft: list[float], expected: list[float]) -> None:
    # Two roundings of numbers below 1.
    torch.testing.assert_close(residual(tensor(target), tensor(draft)), tensor(expected), rtol=0, atol=1e-15)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_residual_of_equal_distributions_is_the_target(dtype: torch.dtype) -> None:
    distribution = tensor([0.2, 0.3, 0.5], dtype=dtype)
    torch.testing.assert_close(residual(distribution, distribution), distribution)


@pytest.mark.parametrize("rare", [9e-7, 1e-7, 1e-30, 1e-40, 1e-45])
def test_residual_of_any_mass(rare: float) -> None:
    """A token that the drafter never proposes has nothing but the residual, however rare it is."""
    target = tensor([1 - rare, rare, 0.0], dtype=torch.float32)
    assert residual(target, tensor([1.0, 0.0, 0.0], dtype=torch.float32)).tolist() == [[0.0, 1.0, 0.0]]


def test_residual_is_row_by_row() -> None:
    target, draft = torch.rand(7, 5).softmax(1), torch.rand(7, 5).softmax(1)
    rows = [residual(target[i : i + 1], draft[i : i + 1]) for i in range(7)]
    assert torch.equal(residual(target, draft), torch.cat(rows))


def test_certain_and_impossible_tests() -> None:
    many = 10_000
    keyed, one = decisions(many), torch.ones(many, dtype=torch.float64)
    assert keyed.accept(one * 0.3, one * 0.3, 0).all()
    assert keyed.accept(one * 0.4, one * 0.3, 0).all()
    assert keyed.accept(one * 1e-30, one * 0.0, 0).all()
    assert not keyed.accept(one * 0.0, one * 0.3, 0).any()
    assert not keyed.accept(one * 0.0, one * 0.0, 0).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_accept_keeps_the_ratio_of_the_probabilities(dtype: torch.dtype) -> None:
    many, keep = 100_000, 0.3
    kept = decisions(many).accept(torch.full((many,), 0.15, dtype=dtype), torch.full((many,), 0.5, dtype=dtype), 2)
    assert abs(kept.double().mean().item() - keep) < 5 * (keep * (1 - keep) / many) ** 0.5  # five deviations


def test_lanes_are_different_numbers() -> None:
    keyed, half = decisions(10_000), torch.full((10_000,), 0.5)
    first, second = (keyed.accept(half, torch.ones(10_000), lane) for lane in (0, 1))
    assert abs((first == second).double().mean().item() - 0.5) < 5 * 0.5 / 100


def test_kinds_of_choice_are_independent() -> None:
    """A rejection says nothing about the correction token or the target's: five deviations at 40,000 positions."""
    many = 40_000
    keyed, half = decisions(many), torch.full((many,), 0.5)
    accepted = keyed.accept(half, torch.ones(many), 0)
    correction, target = keyed.token(torch.full((many, 3), 1 / 3), 0), keyed.target_token(torch.zeros(many, 3), -1)
    for given, other in (
        (accepted, correction),
        (accepted, target),
        (correction == 0, target),
        (target == 0, correction),
    ):
        for token in range(3):
            share = (other[given] == token).double().mean().item()
            assert abs(share - 1 / 3) < 5 * (2 / 9 / int(given.sum())) ** 0.5


def test_token_ignores_scale_and_excludes_zero() -> None:
    many = 50_000
    distribution = tensor([0.2, 0.0, 0.5, 0.3]).expand(many, 4)
    drawn = decisions(many).token(distribution, 0)
    assert torch.equal(drawn, decisions(many).token(distribution * 0.125, 0))
    share = drawn.bincount(minlength=4) / many
    assert share[1] == 0
    assert (share - distribution[0]).abs().max() < 5 * 0.5 / many**0.5


def test_target_token_is_keyed_by_absolute_position() -> None:
    """Depth 2 under root 5 and depth 0 under root 7 are the same position, so the same draw."""
    log_probs = torch.zeros(1, 50)
    noise = KeyedNoise(torch.tensor([9]))
    draws = {
        (root, depth): int(KeyedDecisions(noise, torch.tensor([root])).target_token(log_probs, depth))
        for root in range(20)
        for depth in range(4)
    }
    for (root, depth), token in draws.items():
        assert token == draws[root - 1, depth + 1] if depth < 3 and root else True
    assert len({draws[root, 0] for root in range(20)}) > 10


def test_one_hot_target_is_always_drawn() -> None:
    """Greedy rows of a mixed batch: log-probabilities of 0 and -inf."""
    one_hot = torch.full((5000, 6), float("-inf")).scatter(1, torch.full((5000, 1), 4), 0.0)
    assert (decisions(5000).target_token(one_hot, 0) == 4).all()
