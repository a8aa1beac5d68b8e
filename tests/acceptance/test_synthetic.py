"""Synthetic acceptance: lengths as frequent as the rates say, along the best children, on the host as on a device."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import Batch, batches
from test_rule_selection import scores_of

from foretoken.acceptance.rules import KeyedDecisions
from foretoken.acceptance.select import (
    AcceptancePolicy,
    LengthSchedule,
    accept,
    accept_synthetic,
    joint_rates,
    rates_of_length,
    walk_synthetic,
)
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree, TreeRow

CONDITIONAL = [[0.8, 0.7, 0.6], [0.9] * 8, [0.5], [0.25, 0.9], [1.0, 1.0, 0.9], [0.0], [1 / 3] * 5, [0.95, 0.05, 0.5]]


def entries(rates: list[float], start: int, count: int) -> list[int]:
    """Entries of the schedule, which seed 0 reads from its first entry."""
    schedule = LengthSchedule(rates)
    return [schedule.length(0, index) for index in range(start, start + count)]


def farthest_from_target(lengths: list[int], rates: list[float]) -> float:
    """The largest |count of a length - n times its probability| over all prefixes."""
    probs = [more - fewer for more, fewer in pairwise([1.0, *rates, 0.0])]
    counts = np.eye(len(probs))[lengths].cumsum(0)
    return float(np.abs(counts - np.outer(np.arange(1, len(lengths) + 1), probs)).max())


@pytest.mark.parametrize("conditional", CONDITIONAL, ids=str)
def test_no_count_is_one_iteration_off(conditional: list[float]) -> None:
    rates = joint_rates(conditional)
    assert farthest_from_target(entries(rates, 0, 3000), rates) < 1
    for start in (1, 17, 500, 999):
        assert farthest_from_target(entries(rates, start, 1000), rates) < 2


@given(conditional=st.lists(st.floats(0, 1), min_size=1, max_size=9))
@settings(max_examples=60)
def test_no_count_is_one_iteration_off_for_any_rates(conditional: list[float]) -> None:
    rates = joint_rates(conditional)
    assert farthest_from_target(entries(rates, 0, 400), rates) < 1


def test_independent_draws_are_farther_off() -> None:
    """What the bound forbids: lengths drawn one by one, as by coins."""
    rates = joint_rates([0.8, 0.7, 0.6])
    probs = [more - fewer for more, fewer in pairwise([1.0, *rates, 0.0])]
    drawn = np.random.default_rng(0).choice(4, size=1000, p=probs).tolist()
    assert farthest_from_target(drawn, rates) > 5


@pytest.mark.parametrize("conditional", CONDITIONAL, ids=str)
@pytest.mark.parametrize("seed", [0, 1, 7, -5, 2**62])
def test_thousand_drafts_have_the_mean_of_the_formula(conditional: list[float], seed: int) -> None:
    rates, schedule = np.cumprod(conditional), LengthSchedule(joint_rates(conditional))
    lengths = np.array([schedule.length(seed, index) for index in range(1000)])
    assert 1 + lengths.mean() == pytest.approx(1 + rates.sum(), abs=0.01)
    for position, rate in enumerate(rates, start=1):
        assert (lengths >= position).mean() == pytest.approx(rate, abs=0.01)


def test_seeds_begin_at_many_places() -> None:
    schedule = LengthSchedule(joint_rates([0.8, 0.7, 0.6]))
    firsts = Counter(schedule.length(seed, 0) for seed in range(200))
    for length, share in enumerate([0.2, 0.24, 0.224, 0.336]):
        assert firsts[length] / 200 == pytest.approx(share, abs=0.05)


@pytest.mark.parametrize("length", [1.0, 1.5, 2.9, 3.0, 7.25])
def test_rates_of_a_mean_length_are_those_of_two_neighbours(length: float) -> None:
    rates = rates_of_length(length)
    assert 1 + sum(rates) == pytest.approx(length)
    assert set(entries(rates, 0, 200)) <= {int(length) - 1, int(length)}


# 7 ── 1 ── 3
#   └─ 2 ── 4 ── 6
#      └─── 5
TREE = TokenTree.from_rows([TreeRow([7, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 2, 2, 4])])
NODES = len(TREE.rows()[0].tokens)


@pytest.mark.parametrize(
    ("scores", "length", "path"),
    [
        (None, 0, []),
        (None, 1, [1]),
        (None, 9, [1, 3]),  # the first child, down to a leaf
        ([0, -2.0, -1.0, -2.5, -4.0, -3.0, -5.0], 1, [2]),
        ([0, -2.0, -1.0, -2.5, -4.0, -3.0, -5.0], 3, [2, 5]),
        ([0, -2.0, -1.0, -2.5, -3.0, -3.0, -5.0], 3, [2, 4, 6]),  # the first of equal children
        ([0, float("nan"), float("-inf"), 0.0, 0.0, 0.0, 0.0], 2, [1, 3]),
    ],
)
def test_the_path_follows_the_best_children(scores: list[float] | None, length: int, path: list[int]) -> None:
    tree = TREE if scores is None else replace(TREE, scores=torch.tensor([scores]))
    chosen = [10 + node for node in range(NODES)]
    (walked,) = walk_synthetic(tree, chosen, [0], [length])
    tokens = TREE.rows()[0].tokens
    assert walked.nodes == path
    assert walked.tokens == [*(tokens[node] for node in path), chosen[[0, *path][-1]]]
    accepted = accept_synthetic(tree, torch.tensor([length]), lambda nodes, _: torch.tensor(chosen)[nodes])
    assert accepted.path[0].tolist() == [*path, *[-1] * (tree.max_depth - len(path))]
    assert (accepted.num_accepted.tolist(), accepted.next_token.tolist()) == ([len(path)], [walked.tokens[-1]])
    assert accepted.lossy_tv.isnan().all()


@given(batch=batches(), data=st.data())
@settings(max_examples=40)
def test_host_and_device_agree(batch: Batch, data: st.DataObject) -> None:
    count = batch.tree.batch_size
    lengths = data.draw(st.lists(st.integers(0, 6), min_size=count, max_size=count))
    values = data.draw(st.lists(st.integers(-4, 0), min_size=batch.tree.tokens.numel(), max_size=200).filter(bool))
    values = (values * batch.tree.tokens.numel())[: batch.tree.tokens.numel()]
    tree = replace(batch.tree, scores=torch.tensor(values, dtype=torch.float32).view(batch.tree.tokens.shape))
    chosen = torch.arange(tree.tokens.numel()).view(tree.tokens.shape)  # tells the nodes apart
    accepted = accept_synthetic(
        tree, torch.tensor(lengths), lambda nodes, _: chosen.gather(1, nodes.unsqueeze(1))[:, 0]
    )
    starts = [row * tree.width for row in range(count)]
    for row, walked in enumerate(walk_synthetic(tree, chosen.flatten().tolist(), starts, lengths)):
        assert accepted.path[row][: len(walked.nodes)].tolist() == walked.nodes
        assert int(accepted.num_accepted[row]) == len(walked.nodes) <= lengths[row]
        assert walked.tokens == [*tree.tokens[row, walked.nodes].tolist(), int(accepted.next_token[row])]


@given(batch=batches(max_rows=3, max_nodes=12), is_greedy=st.booleans())
@settings(max_examples=20)
def test_the_token_after_a_path_is_that_of_the_lossless_rule(batch: Batch, is_greedy: bool) -> None:
    """At every end of a path: for greedy requests the argmax, for sampled ones the draw of that position."""
    scores, count = scores_of(batch, [is_greedy] * batch.tree.batch_size), batch.tree.batch_size
    policy = AcceptancePolicy(rule="synthetic", synthetic_acceptance_length=2.0)
    for length in range(3):
        lengths = torch.full((count,), length)
        accepted = accept(scores, ["synthetic"] * count, policy, batch.root_positions, lengths)
        depth = accepted.num_accepted
        last = torch.cat([torch.zeros(count, 1, dtype=torch.int64), accepted.path], dim=1).gather(1, depth.unsqueeze(1))
        noise = KeyedDecisions(scores.batch.noise, batch.root_positions + depth)
        own = scores.argmax(last[:, 0]) if is_greedy else noise.target_token(scores.log_probs(last[:, 0]), 0)
        assert torch.equal(accepted.next_token, own)


RULE = {"rule": "synthetic"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (RULE, "needs either synthetic_acceptance_rates or synthetic_acceptance_length"),
        ({**RULE, "synthetic_acceptance_rates": [0.5], "synthetic_acceptance_length": 2.0}, "needs either"),
        ({**RULE, "synthetic_acceptance_rates": []}, "Expected a list of numbers"),
        ({**RULE, "synthetic_acceptance_rates": 0.5}, "Expected a list of numbers"),
        ({**RULE, "synthetic_acceptance_rates": [0.5, 0.6]}, "rise from 0.5 to 0.6"),
        ({**RULE, "synthetic_acceptance_rates": [1.5]}, "is 1.5. Expected at least 0 and at most 1"),
        ({**RULE, "synthetic_acceptance_rates": [0.5, float("nan")]}, "is nan. Expected"),
        ({**RULE, "synthetic_acceptance_rates": [True]}, "is True. Expected a number"),
        ({**RULE, "synthetic_acceptance_length": 0.5}, "'synthetic_acceptance_length' is 0.5. Expected at least 1"),
        ({**RULE, "synthetic_acceptance_length": "2"}, "is '2'. Expected a number"),
        ({"synthetic_acceptance_rates": [0.5]}, "synthetic acceptance came with the acceptance rule 'auto'"),
        ({"rule": "block", "synthetic_acceptance_length": 2.0}, "the acceptance rule 'block'"),
    ],
)
def test_wrong_options_are_one_sentence(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        AcceptancePolicy(**options)
    assert message in str(error.value)


def test_the_rule_is_lossy_for_every_request() -> None:
    policy = AcceptancePolicy(rule="synthetic", synthetic_acceptance_rates=[0.5, 0.0])
    assert policy.is_lossy
    assert list(policy.joint_rates) == [0.5]
    for is_greedy in (True, False):
        assert policy.rule_for(TREE, is_greedy=is_greedy, is_seeded=True, is_plain=True) == "synthetic"
