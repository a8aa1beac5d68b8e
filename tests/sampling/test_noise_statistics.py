"""Keyed noise as random numbers: uniform, independent of every part of the key, Gumbel where it should be.

Keys are fixed, so nothing here can flake; the level 1e-6 says how far from random a number may look.
"""

from collections.abc import Callable

import pytest
import torch
from chi_square import chi_square_p_value
from torch import Tensor

from foretoken.sampling.noise import KeyedNoise, Purpose, derive_seed

LEVEL = 1e-6
MANY = 200_000


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose = Purpose.ACCEPT, lane: int = 0) -> Tensor:
    return KeyedNoise(seeds).uniform(positions, purpose, lane)


FIXED, RUNNING = torch.full((MANY,), 7), torch.arange(MANY)

# Every way in which a caller walks through keys: the numbers along it must look independent and uniform.
STREAMS: dict[str, Callable[[], Tensor]] = {
    "positions": lambda: uniform(FIXED, RUNNING),
    "neighbouring seeds": lambda: uniform(RUNNING, FIXED),
    "negative seeds": lambda: uniform(-RUNNING - 1, FIXED),
    "seeds far apart": lambda: uniform(RUNNING << 40, FIXED),
    "seed moves against position": lambda: uniform(RUNNING, RUNNING.flip(0)),
    "completions of one request": lambda: uniform(
        torch.tensor([derive_seed(3, i) for i in range(2000)]).repeat(MANY // 2000),
        torch.arange(MANY // 2000).repeat_interleave(2000),
    ),
    "lanes": lambda: torch.cat([uniform(FIXED[:200], RUNNING[:200], lane=lane) for lane in range(MANY // 200)]),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_on_bins(stream: str) -> None:
    numbers = STREAMS[stream]()
    assert chi_square_p_value(numbers.mul(1000).long().bincount(minlength=1000)) > LEVEL


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("lag", [1, 2])
def test_neighbours_are_independent(stream: str, lag: int) -> None:
    """Pairs on a 30 x 30 grid."""
    cells = STREAMS[stream]().mul(30).long()
    assert chi_square_p_value((cells[:-lag] * 30 + cells[lag:]).bincount(minlength=900)) > LEVEL


PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "accept and draft": lambda: (uniform(FIXED, RUNNING), uniform(FIXED, RUNNING, Purpose.DRAFT)),
    "accept and residual": lambda: (uniform(FIXED, RUNNING), uniform(FIXED, RUNNING, Purpose.RESIDUAL)),
    "target and draft": lambda: (uniform(FIXED, RUNNING, Purpose.TARGET), uniform(FIXED, RUNNING, Purpose.DRAFT)),
    "two lanes": lambda: (uniform(FIXED, RUNNING), uniform(FIXED, RUNNING, lane=1)),
    "lane and purpose": lambda: (uniform(FIXED, RUNNING, lane=1), uniform(FIXED, RUNNING, Purpose.DRAFT)),
    "two positions": lambda: (uniform(RUNNING, FIXED), uniform(RUNNING, FIXED + 1)),
    "seed and its complement": lambda: (uniform(RUNNING, FIXED), uniform(~RUNNING, FIXED)),
    "uniform and Gumbel": lambda: (
        uniform(RUNNING, FIXED, Purpose.ACCEPT),
        torch.exp(-torch.exp(-KeyedNoise(RUNNING).gumbel(FIXED, Purpose.RESIDUAL, 1)[:, 0].double())),
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_numbers_of_different_keys_are_independent(pair: str) -> None:
    a, b = (numbers.mul(30).long().clamp(0, 29) for numbers in PAIRS[pair]())
    assert chi_square_p_value((a * 30 + b).bincount(minlength=900)) > LEVEL


def test_every_bit_is_fair() -> None:
    bits = (uniform(FIXED, RUNNING) * 2**53).long()
    ones = torch.stack([(bits >> shift & 1).sum() for shift in range(53)])
    deviations = (ones - MANY / 2).abs() / (MANY / 4) ** 0.5
    assert deviations.max() < 5.5  # 53 bits at level 1e-6


@pytest.mark.parametrize(("seeds", "positions"), [(RUNNING, FIXED), (FIXED, RUNNING)], ids=["seeds", "positions"])
def test_gumbel_quantiles(seeds: Tensor, positions: Tensor) -> None:
    """P(g <= -log(-log u)) = u, in 500 equal cells and out in both tails."""
    gumbel = KeyedNoise(seeds[:20_000]).gumbel(positions[:20_000], Purpose.TARGET, 50).double().flatten()
    u = torch.exp(-torch.exp(-gumbel))
    assert chi_square_p_value(u.mul(500).long().clamp_max(499).bincount(minlength=500)) > LEVEL
    for tail in (u < 1e-4, u > 1 - 1e-4):
        assert abs(int(tail.sum()) - 100) < 50  # 10^6 numbers: 100 expected, five deviations


def test_gumbel_columns_are_independent() -> None:
    gumbel = KeyedNoise(RUNNING).gumbel(FIXED, Purpose.TARGET, 4).double()
    cells = torch.exp(-torch.exp(-gumbel)).mul(30).long().clamp_max(29)
    for left, right in ((0, 1), (1, 2), (0, 3)):
        assert chi_square_p_value((cells[:, left] * 30 + cells[:, right]).bincount(minlength=900)) > LEVEL


def test_argmax_draws_from_the_distribution() -> None:
    """A distribution with a rare token: argmax(log p + g) has its frequencies."""
    distribution = torch.tensor([0.5, 0.3, 0.15, 0.049, 0.001], dtype=torch.float64)
    drawn = (distribution.log() + KeyedNoise(RUNNING).gumbel(FIXED, Purpose.TARGET, 5)).argmax(1)
    assert chi_square_p_value(drawn.bincount(minlength=5), distribution) > LEVEL


def test_the_tests_above_see_a_bad_generator() -> None:
    """The counter without its mixer is spread evenly, but its neighbours are not independent."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    numbers = (RUNNING * golden >> 11 & (2**53 - 1)).double() * 2.0**-53
    cells = numbers.mul(30).long()
    assert chi_square_p_value(cells.bincount(minlength=30)) > LEVEL
    assert chi_square_p_value((cells[:-1] * 30 + cells[1:]).bincount(minlength=900)) < LEVEL
