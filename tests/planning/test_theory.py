"""The closed forms against enumeration over all outcomes, and against the papers' own numbers."""

from __future__ import annotations

from itertools import product
from math import log, prod

import numpy as np
import pytest

from foretoken.core.errors import ConfigError
from foretoken.planning.theory import (
    Machine,
    ModelSizes,
    acceptance_probability,
    alpha_from_counts,
    alpha_from_overlaps,
    chain_tokens,
    expected_tokens,
    memory_bound_tokens,
    operations_factor,
    optimal_gamma,
    pass_seconds,
    speed_up,
    survivals,
    throughput_multiplier,
    total_variation,
    touched_experts,
    tree_survivals,
    walltime_factor,
)


def chain_outcomes(rates):
    """Number of accepted tokens and probability of every outcome of a chain's tests, whether looked at or not."""
    for tests in product((True, False), repeat=len(rates)):
        accepted = tests.index(False) if False in tests else len(tests)
        yield accepted, prod(rate if passed else 1 - rate for passed, rate in zip(tests, rates, strict=True))


def random_distributions(count, size=5, seed=0):
    return np.random.default_rng(seed).dirichlet(np.ones(size) * 0.5, count)


def test_acceptance_is_the_probability_of_the_test_and_one_minus_the_total_variation():
    for p, q in zip(random_distributions(20), random_distributions(20, seed=1), strict=True):
        tested = sum(each * min(1, its / each) for its, each in zip(p, q, strict=True))  # draw from q, keep by p / q
        assert acceptance_probability(p, q) == pytest.approx(tested, abs=1e-12)
        assert total_variation(p, q) == pytest.approx(1 - tested, abs=1e-12)
        assert total_variation(p, q) == pytest.approx(total_variation(q, p), abs=1e-12)
        middle = (p + q) / 2
        assert total_variation(p, q) == pytest.approx(np.abs(p - middle).sum(), abs=1e-12)  # D_LK, definition 3.2
    assert total_variation([1, 0], [0, 1]) == 1
    assert total_variation([0.3, 0.7], [0.3, 0.7]) == 0


@pytest.mark.parametrize("gamma", [0, 1, 2, 5])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.62, 0.99, 1.0])
def test_tokens_of_a_chain_by_enumeration(alpha, gamma):
    counted = sum((1 + accepted) * weight for accepted, weight in chain_outcomes([alpha] * gamma))
    assert chain_tokens(alpha, gamma) == pytest.approx(counted, abs=1e-12)
    assert expected_tokens(survivals([alpha] * gamma)) == pytest.approx(counted, abs=1e-12)


def test_tokens_of_a_chain_whose_rates_differ_by_depth():
    rates = [0.9, 0.4, 0.75, 0.1]
    counted = sum((1 + accepted) * weight for accepted, weight in chain_outcomes(rates))
    assert expected_tokens(survivals(rates)) == pytest.approx(counted, abs=1e-12)


def test_tokens_of_a_tree_by_enumeration_of_the_targets_ranks():
    rates = [[0.5, 0.3, 0.1], [0.6, 0.2], [0.4, 0.4]]
    choices = [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 1)]
    counted = 0.0
    for path in product(*(range(len(row) + 1) for row in rates)):  # the last rank: none of the candidates is right
        weight = prod([*row, 1 - sum(row)][rank] for rank, row in zip(path, rates, strict=True))
        counted += weight * (1 + sum(path[: len(choice)] == choice for choice in choices))
    assert expected_tokens(tree_survivals(choices, rates)) == pytest.approx(counted, abs=1e-12)


@pytest.mark.parametrize(
    ("alpha", "gamma", "operations", "speed"),
    [(0.6, 2, 1.53, 1.96), (0.7, 3, 1.58, 2.53), (0.8, 2, 1.23, 2.44), (0.8, 5, 1.63, 3.69), (0.9, 2, 1.11, 2.71),
     (0.9, 10, 1.60, 6.86)],
)  # fmt: skip
def test_the_table_of_leviathan_et_al(alpha, gamma, operations, speed):
    assert operations_factor(alpha, gamma, 0.0) == pytest.approx(operations, abs=0.005)
    assert walltime_factor(alpha, gamma, 0.0) == pytest.approx(speed, abs=0.005)


@pytest.mark.parametrize(
    ("alpha", "c", "gamma", "factor"),
    [(0.5, 0.01, 5, 1.88), (0.6, 0.02, 6, 2.17), (0.7, 0.05, 6, 2.35), (0.8, 0.05, 8, 3.09), (0.9, 0.10, 10, 3.43),
     (0.95, 0.20, 10, 2.87), (0.5, 0.20, 1, 1.25), (0.95, 0.01, 40, 12.5)],
)  # fmt: skip
def test_the_optimal_depth(alpha, c, gamma, factor):
    found, best = optimal_gamma(alpha, c)
    assert found == gamma
    assert best == pytest.approx(factor, rel=0.004)
    slope = [alpha ** (g + 1) * (1 - log(alpha) * (g + 1 / c)) - 1 for g in (found - 1, found + 1)]
    assert slope[0] > 0 > slope[1]  # the zero of the derivative by gamma lies between the depths beside it


def test_no_depth_helps_when_drafting_costs_more_than_it_keeps():
    assert optimal_gamma(0.3, 0.31) == (0, 1.0)
    assert optimal_gamma(0.3, 0.29)[0] >= 1
    alpha, c = 0.3, 0.2
    assert optimal_gamma(alpha, c)[1] >= (1 + alpha) / (1 + c)  # corollary 3.9
    assert optimal_gamma(0.5, 0.0, most=30)[0] == 30


def test_verification_that_is_not_free_counts():
    assert speed_up(3.0, draft=0.5, verify=1.0) == 2.0
    assert speed_up(3.0, draft=0.5, verify=2.5) == 1.0


DENSE = ModelSizes(layers=32, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, vocab_size=128256, weights=7.5e9)
H100 = Machine(bytes_per_s=3.35e12, flops_per_s=989e12, memory_bytes=80e9)


def test_a_narrow_pass_reads_weights_and_cache_once():
    weights, cache = 2 * 7.5e9, 2 * 32 * 8 * 128 * 2 * 1000
    logits = 4 * 128256 * 3
    expected = (weights + cache + logits) / H100.bytes_per_s
    assert pass_seconds(DENSE, H100, contexts=[1000], width=1) == pytest.approx(expected, rel=1e-12)
    eight = pass_seconds(DENSE, H100, contexts=[1000], width=8)
    assert eight == pytest.approx(expected + 7 * logits / H100.bytes_per_s, rel=1e-12)


def test_a_wide_pass_is_bound_by_arithmetic():
    seconds = pass_seconds(DENSE, H100, contexts=[0] * 1000, width=4)
    arithmetic = (2 * 7.5e9 * 4000 + 4 * 32 * 32 * 128 * 4 * 1000 * 2) / H100.flops_per_s
    assert seconds == pytest.approx(arithmetic + 4 * 4000 * 128256 * 3 / H100.bytes_per_s, rel=1e-12)


@pytest.mark.parametrize(
    ("tera_flops", "terabytes", "tokens"),
    [(312, 2.04, 153), (989, 3.35, 295), (989, 4.8, 206), (2250, 8, 281), (362, 0.864, 419)],
)  # A100, H100, H200, B200, L40S; dense bfloat16
def test_the_width_up_to_which_weights_are_bound_by_memory(tera_flops, terabytes, tokens):
    machine = Machine(bytes_per_s=terabytes * 1e12, flops_per_s=tera_flops * 1e12, memory_bytes=0)
    width = memory_bound_tokens(DENSE, machine)
    assert width == pytest.approx(tokens, abs=0.6)
    sizes = ModelSizes(layers=0, hidden_size=1, heads=1, kv_heads=1, head_dim=1, vocab_size=0, weights=1e9)
    plain, narrow, wide = (pass_seconds(sizes, machine, contexts=[0], width=w) for w in (1, width - 1, width + 1))
    assert plain == narrow < wide


def test_experts_that_a_pass_touches():
    assert [round(touched_experts(256, 8, tokens)) for tokens in (1, 16, 64)] == [8, 102, 222]
    routes = [set(each) for each in product(range(3), repeat=4)]  # four tokens, one of three experts each
    assert touched_experts(3, 1, 4) == pytest.approx(sum(map(len, routes)) / len(routes), abs=1e-12)
    assert touched_experts(0, 0, 7) == 0
    mixture = ModelSizes(
        layers=1, hidden_size=1, heads=1, kv_heads=1, head_dim=1, vocab_size=0, weights=1e9, experts=256,
        experts_per_token=8, expert_weights=1e8,
    )  # fmt: skip
    plain, wide = (pass_seconds(mixture, H100, contexts=[0], width=width) for width in (1, 16))
    assert wide / plain == pytest.approx((1e9 + 101.97e8) / (1e9 + 8e8), rel=1e-3)  # both bound by memory


def test_the_modelled_multiplier_is_the_ratio_of_rates():
    draft = ModelSizes(layers=8, hidden_size=4096, heads=32, kv_heads=8, head_dim=128, vocab_size=128256, weights=1.5e9)
    contexts = [500.0, 30000.0]
    plain = 2 / pass_seconds(DENSE, H100, contexts=contexts, width=1)
    iteration = 4 * pass_seconds(draft, H100, contexts=contexts, width=1)
    iteration += pass_seconds(DENSE, H100, contexts=contexts, width=5)
    found = throughput_multiplier(DENSE, draft, H100, contexts=contexts, gamma=4, tokens=2.8)
    assert found == pytest.approx(2 * 2.8 / iteration / plain, rel=1e-12)
    assert throughput_multiplier(DENSE, draft, H100, contexts=contexts, gamma=4, tokens=2.8, window=512) > found


@pytest.mark.parametrize("gamma", [1, 3])
def test_alpha_from_counts_is_most_likely(gamma):
    counts = [0, gamma, gamma, 1, 0, gamma]

    def likelihood(alpha):
        return prod(alpha**n * (1 if n == gamma else 1 - alpha) for n in counts)

    grid = np.linspace(0.001, 0.999, 9981)
    assert alpha_from_counts(counts, gamma) == pytest.approx(grid[np.argmax([likelihood(a) for a in grid])], abs=1e-4)


@pytest.mark.parametrize("gamma", [1, 2, 6])
def test_alpha_from_counts_does_not_depend_on_the_depth(gamma):
    alpha, passes = 0.7, 1000
    outcomes = [(n, weight) for n, weight in chain_outcomes([alpha] * gamma)]
    counts = [n for n, weight in outcomes for _ in range(round(passes * weight))]
    assert alpha_from_counts(counts, gamma) == pytest.approx(alpha, abs=0.002)  # counts are rounded


def test_overlaps_have_the_expectation_of_counts_and_less_variance():
    """Enumerates chains over two tokens, where the overlap depends on the drafted token before."""
    target, draft = random_distributions(3, size=2, seed=3), random_distributions(3, size=2, seed=4)
    overlaps = [acceptance_probability(p, q) for p, q in zip(target, draft, strict=True)]
    outcomes = []  # probability, accepted tokens, sum of overlaps at tested positions, tested positions
    for first, second in product(range(2), repeat=2):
        keep = [min(1, target[0][first] / draft[0][first])]
        keep.append(min(1, target[1 + first][second] / draft[1 + first][second]))
        drawn = draft[0][first] * draft[1 + first][second]
        for tests in product((True, False), repeat=2):
            weight = drawn * prod(k if passed else 1 - k for k, passed in zip(keep, tests, strict=True))
            accepted = 0 if not tests[0] else 1 + tests[1]
            seen = [overlaps[0], overlaps[1 + first]]
            tested = min(accepted + 1, 2)
            estimate = alpha_from_overlaps([seen], [accepted])
            outcomes.append((weight, accepted, estimate * tested, tested))
    weights, accepted, summed, tested = map(np.array, zip(*outcomes, strict=True))
    assert weights @ accepted == pytest.approx(weights @ summed, abs=1e-12)
    mean = (weights @ accepted) / (weights @ tested)
    assert weights @ (summed - mean * tested) ** 2 < weights @ (accepted - mean * tested) ** 2


@pytest.mark.parametrize("call", [
    lambda: chain_tokens(1.2, 3), lambda: alpha_from_counts([], 2), lambda: alpha_from_counts([3], 2),
    lambda: alpha_from_overlaps([], []),
])  # fmt: skip
def test_impossible_values_are_refused(call):
    with pytest.raises(ConfigError, match="Expected"):
        call()
