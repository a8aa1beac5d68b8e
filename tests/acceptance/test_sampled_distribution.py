"""Sampled texts with the engine's own noise over several iterations, and broken variants that the same test refuses.

16,000 sequences of 3 tokens at level 1e-6: where cells expected below 5 are pooled, 43 degrees of freedom are left,
whose level is a statistic of 102.2. A noncentrality of 126.1 misses it with probability 1e-3, and at total-variation
distance d it is at least 4 n d^2: all with d > 0.045 is found. The broken variants have statistics from 715 on. The
seeds are fixed, so a pass or a failure never changes.

Coupled acceptance walks in Python, row by row. Its text is that of plain decoding, token by token, for the first 4,000
seeds, and plain decoding's has the target distribution.
"""

from functools import cache

import pytest
import torch
from chi_square import chi_square_p_value
from torch import Tensor
from toy_decoding import (
    LENGTH,
    START,
    VOCAB,
    DraftNoise,
    Rule,
    draft_table,
    generate,
    joint_distribution,
    own_noise,
    plain_text,
    shared_noise,
)

from foretoken.acceptance.rules import Acceptance, Decisions, LogProbs, accept_coupled
from foretoken.acceptance.sampled_rules import accept_block, accept_sequential, accept_traversal
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.sampling.noise import KeyedNoise, Purpose
from foretoken.trees.choices import TreeShape

LEVEL = 1e-6
SEEDS = torch.arange(16_000)  # neighbouring seeds, as users choose them
CHAIN, TREE = TreeShape.chain(2), TreeShape.cartesian((2, 2))


def p_value(text: Tensor) -> float:
    cells = (text * VOCAB ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    return chi_square_p_value(cells.bincount(minlength=VOCAB**LENGTH), joint_distribution())


LOSSLESS: dict[str, tuple[Rule, TreeShape, DraftNoise, bool]] = {
    "sequential chain": (accept_sequential, CHAIN, own_noise, False),
    "sequential tree": (accept_sequential, TREE, own_noise, False),
    "sequential, one-hot tree": (accept_sequential, TREE, own_noise, True),
    "block chain": (accept_block, CHAIN, own_noise, False),
    "traversal chain": (accept_traversal, CHAIN, own_noise, False),
    "traversal tree": (accept_traversal, TREE, own_noise, False),
    "sequential, independent siblings": (accept_sequential, TREE, own_noise, False),
    "traversal, independent siblings": (accept_traversal, TREE, own_noise, False),
}
COUPLED: dict[str, tuple[TreeShape, DraftNoise]] = {
    "chain": (CHAIN, shared_noise),
    "tree": (TREE, shared_noise),
    "unrelated drafts": (TREE, own_noise),
}


@cache
def lossless_text(name: str) -> Tensor:
    """What a case generates from all seeds."""
    rule, shape, draw, is_one_hot = LOSSLESS[name]
    kind = DrawKind.INDEPENDENT if name.endswith("independent siblings") else DrawKind.WITHOUT_REPLACEMENT
    return generate(rule, shape, SEEDS, draw=draw, kind=kind, is_one_hot=is_one_hot)


@pytest.mark.parametrize("name", LOSSLESS)
def test_distribution_of_whole_sequences(name: str) -> None:
    assert p_value(lossless_text(name)) > LEVEL


def test_distribution_of_plain_decoding() -> None:
    assert p_value(plain_text(SEEDS)) > LEVEL


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_text_is_the_text_of_plain_decoding(name: str) -> None:
    shape, draw = COUPLED[name]
    some = SEEDS[:4000]
    assert torch.equal(generate(accept_coupled, shape, some, draw=draw, is_one_hot=True), plain_text(some))


def test_coupled_drafts_are_mostly_accepted() -> None:
    """Else the test above would only show that rejection works."""
    accepted: list[Tensor] = []

    def counting(tree: TokenTree, log_probs: LogProbs, decisions: Decisions) -> Acceptance:
        result = accept_coupled(tree, log_probs, decisions)
        accepted.append(result.num_accepted)
        return result

    generate(counting, CHAIN, SEEDS[:2000], draw=shared_noise, is_one_hot=True)
    assert accepted[0].double().mean() > 0.5


@pytest.mark.parametrize("rule", [accept_sequential, accept_block, accept_traversal])
def test_residual_replaced_by_the_target_is_refused(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.acceptance.sampled_rules.residual", lambda target_probs, draft_probs: target_probs)
    assert p_value(generate(rule, CHAIN, SEEDS, kind=DrawKind.WITHOUT_REPLACEMENT)) < LEVEL


@pytest.mark.parametrize("rule", [accept_sequential, accept_block, accept_coupled, accept_traversal])
def test_numbers_reused_in_the_next_iteration_are_refused(rule: Rule) -> None:
    seeds = SEEDS[:4000] if rule is accept_coupled else SEEDS  # the statistic is above 700 for these, too
    assert p_value(generate(rule, CHAIN, seeds, position_step=0, is_one_hot=rule is accept_coupled)) < LEVEL


def test_drafting_with_the_numbers_of_the_test_is_refused() -> None:
    """The chain's token at depth d + 1 is drawn by inversion of the very u that its test will use (lane d * 512)."""

    def inverted(noise: KeyedNoise, root_positions: Tensor, node: int, depth: int) -> Tensor:
        u = noise.uniform(root_positions, Purpose.ACCEPT, depth * 512)
        chosen = torch.searchsorted(draft_table()[START].cumsum(0), u).clamp_max(VOCAB - 1)
        return torch.zeros(len(u), VOCAB, dtype=torch.float64).scatter(1, chosen.unsqueeze(1), 1e3)

    assert p_value(generate(accept_sequential, TreeShape.chain(1), SEEDS, draw=inverted)) < LEVEL


def test_text_does_not_depend_on_the_batch() -> None:
    some = torch.tensor([17, 4, 15_999, 4])
    assert torch.equal(generate(accept_sequential, TREE, SEEDS[some]), lossless_text("sequential tree")[some])
