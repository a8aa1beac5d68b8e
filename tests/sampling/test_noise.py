"""Keyed noise number by number: against Python integers, at the ends of its range, in any order and with any seed."""

from dataclasses import replace

import pytest
import splitmix
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import foretoken.sampling.noise as noise_module
from foretoken.sampling.noise import KeyedNoise, Purpose, derive_seed, mix

int64s = st.integers(-(2**63), 2**63 - 1)
SEEDS = (0, 1, -1, 42, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 0x9E3779B9)


def noise(*seeds: int) -> KeyedNoise:
    return KeyedNoise(torch.tensor(seeds, dtype=torch.int64))


def at(*positions: int) -> Tensor:
    return torch.tensor(positions, dtype=torch.int64)


def test_mix_gives_the_published_numbers() -> None:
    """The first outputs of SplitMix64 seeded with 1234567, as published with its reference code."""
    expected = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = [splitmix.signed(1234567 + k * splitmix.GAMMA) for k in range(1, 6)]
    assert [word % splitmix.WORD for word in mix(torch.tensor(states)).tolist()] == expected
    assert [splitmix.mix((1234567 + k * splitmix.GAMMA) % splitmix.WORD) for k in range(1, 6)] == expected


@given(words=st.lists(int64s, min_size=1, max_size=20))
def test_mixing_is_the_same_with_and_without_signs(words: list[int]) -> None:
    """Torch's signed words serve accelerators, numpy's unsigned ones the CPU."""
    tensor = torch.tensor(words, dtype=torch.int64).view(1, -1)
    assert torch.equal(noise_module._mix_signed(tensor), noise_module._mix_unsigned(tensor))


@given(words=st.lists(int64s, min_size=1, max_size=20))
def test_mix_is_a_bijection(words: list[int]) -> None:
    mixed = mix(torch.tensor(words, dtype=torch.int64)).tolist()
    assert [splitmix.signed(splitmix.unmix(word % splitmix.WORD)) for word in mixed] == words


@given(
    seed=int64s,
    position=st.integers(0, 2**40),
    purpose=st.sampled_from(Purpose),
    lane=st.integers(0, 512 * 512),
)
def test_numbers_are_those_of_the_scheme(seed: int, position: int, purpose: Purpose, lane: int) -> None:
    uniform = noise(seed).uniform(at(position), purpose, lane)
    assert uniform.tolist() == [splitmix.uniform(seed, position, purpose, lane)]
    gumbel = noise(seed).gumbel(at(position), purpose, 5, lane)[0].double()
    expected = torch.tensor(
        [splitmix.gumbel(seed, position, purpose, lane, token) for token in range(5)], dtype=torch.float64
    )
    # float32 holds v = 1 - exp(-e), e = exp(-g), to 2^-25; dg/dv = 1 / (e (1 - v)). That is coarse for v near 1, the
    # losers of every draw. Two float32 logarithms add 1e-6.
    race = (-expected).exp()
    assert ((gumbel - expected).abs() < 2e-6 + 2.0**-24 / (race * (-race).exp()) * (1 - (-race).exp())).all()


@pytest.mark.parametrize("purpose", Purpose)
@pytest.mark.parametrize("lane", [0, 1, 7, 300_000])
def test_every_purpose_and_lane_works_and_is_different(purpose: Purpose, lane: int) -> None:
    """Found by this test: all but (TARGET, 0) overflowed int64."""
    number = noise(*SEEDS).uniform(at(*range(len(SEEDS))), purpose, lane)
    others = [
        noise(*SEEDS).uniform(at(*range(len(SEEDS))), other, other_lane)
        for other in Purpose
        for other_lane in (0, 1, 7, 300_000)
        if (other, other_lane) != (purpose, lane)
    ]
    assert all((number != other).all() for other in others)


def seed_whose_bits_are(word: int, position: int, purpose: Purpose) -> int:
    """The seed for which token 0's 64 bits at a key are `word`: the scheme run backwards."""
    state = splitmix.unmix((splitmix.unmix(word) - splitmix.GAMMA) % splitmix.WORD)
    state = splitmix.unmix(state ^ ((int(purpose) + 1) * splitmix.SECOND % splitmix.WORD))
    state = splitmix.unmix(state ^ (position * splitmix.GAMMA % splitmix.WORD))
    return splitmix.signed((state - splitmix.GAMMA) % splitmix.WORD)


@pytest.mark.parametrize("word", [0, 1 << 11, splitmix.WORD - 1, splitmix.WORD - (1 << 39), 1 << 63])
def test_ends_of_the_range(word: int) -> None:
    """Found by this test: the top 2^-25 of all draws were -inf, which rules out even a certain token."""
    keyed = noise(seed_whose_bits_are(word, 6, Purpose.RESIDUAL))
    uniform = keyed.uniform(at(6), Purpose.RESIDUAL)
    assert uniform.tolist() == [(word >> 11) / 2**53]
    assert 0 <= uniform.item() < 1
    gumbel = keyed.gumbel(at(6), Purpose.RESIDUAL, 3)
    assert gumbel.isfinite().all()
    certain = torch.tensor([0.0, float("-inf"), float("-inf")])
    assert (certain + gumbel).argmax(1).tolist() == [0]


def test_ten_million_draws_are_finite() -> None:
    keyed = noise(*range(100))
    positions = torch.arange(100)
    for lane in range(10):
        gumbel = keyed.gumbel(positions, Purpose.TARGET, 10_000, lane)
        assert gumbel.isfinite().all()
        assert gumbel.dtype == torch.float32
        assert -2.9 < gumbel.min() < gumbel.max() < 38  # -log(log 2^24.x) and log 2^54


def test_a_number_depends_on_its_key_alone() -> None:
    seeds, positions = list(SEEDS), [3 * i for i in range(len(SEEDS))]
    order = torch.randperm(len(seeds), generator=torch.Generator().manual_seed(1))
    keyed = noise(*seeds)
    together = keyed.gumbel(at(*positions), Purpose.TARGET, 50)
    assert torch.equal(keyed.select(order).gumbel(at(*positions)[order], Purpose.TARGET, 50), together[order])
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        assert torch.equal(noise(seed).gumbel(at(position), Purpose.TARGET, 50)[0], together[row])
    # A larger vocabulary (padding ids) leaves the numbers of the smaller one as they are.
    assert torch.equal(keyed.gumbel(at(*positions), Purpose.TARGET, 80)[:, :50], together)


def test_drawing_changes_nothing() -> None:
    keyed = noise(5, 6)
    first = keyed.uniform(at(1, 2), Purpose.ACCEPT)
    keyed.gumbel(at(1, 2), Purpose.ACCEPT, 1000)
    keyed.uniform(at(1, 2), Purpose.DRAFT, 4)
    assert torch.equal(keyed.uniform(at(1, 2), Purpose.ACCEPT), first)


@pytest.mark.parametrize("seed", [0, 5, -1, -(2**63), 2**63 - 1, 2**63, 2**64 - 1, 2**64, 2**64 + 5, 10**40, -(10**40)])
def test_derived_seeds_of_any_integer(seed: int) -> None:
    assert derive_seed(seed, 0) == splitmix.signed(seed % splitmix.WORD)
    for index in range(1, 6):
        expected = splitmix.mix((seed + index * splitmix.GAMMA) % splitmix.WORD)
        assert derive_seed(seed, index) == splitmix.signed(expected)
    seeds = [derive_seed(seed, index) for index in range(128)]
    assert len(set(seeds)) == 128
    torch.tensor(seeds, dtype=torch.int64)  # fits


def test_own_seed_is_kept() -> None:
    """A request's first completion is that of a request with n = 1."""
    assert derive_seed(1234, 0) == 1234


def test_noise_is_a_value() -> None:
    keyed = noise(1, 2)
    assert replace(keyed, seeds=keyed.seeds).select(at(1)).seeds.tolist() == [2]
