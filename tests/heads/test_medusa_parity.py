"""Medusa heads against their formula, and the batched form against the step-by-step one."""

import itertools
from typing import Any

import pytest
import torch
from head_formulas import SAME, E, V, medusa, numbers, random_weights, shared_parts, tokens
from torch import nn

from foretoken.heads.medusa import MedusaConfig, MedusaHeads, part_of

K = 3
LM_HEADS: dict[str, dict[str, Any]] = {
    "shared": {},
    "own": {"own_lm_head": True},
    "partial": {"own_lm_head": True, "draft_vocab_size": 5},
}
CASES = [
    (layers, is_tied, has_bias, name)
    for layers, is_tied, has_bias, name in itertools.product((0, 1, 3), (False, True), (False, True), LM_HEADS)
    if not (is_tied and layers < 3)  # one block is tied to itself
]


def heads(layers: int, is_tied: bool, has_bias: bool, name: str) -> MedusaHeads:
    config = MedusaConfig(
        hidden_size=E, vocab_size=V, num_heads=K, num_layers=layers, tied_blocks=is_tied, has_bias=has_bias,
        **LM_HEADS[name],
    )  # fmt: skip
    head = MedusaHeads(config, dtype=torch.float64)
    if head.token_map is not None:
        head.token_map.copy_(torch.tensor([7, 0, 10, 3, 4]))
    random_weights(head)
    return head


@pytest.mark.parametrize(("layers", "is_tied", "has_bias", "name"), CASES)
def test_every_position_and_head(layers: int, is_tied: bool, has_bias: bool, name: str) -> None:
    head, parts = heads(layers, is_tied, has_bias, name), shared_parts()
    features = numbers(2, 4, E, seed=9)
    with torch.no_grad():
        found = list(head.teacher_forced(features, tokens(2, 4), parts))
        assert len(found) == K
        for i, b, t in itertools.product(range(K), range(2), range(4)):
            expected = medusa(head.state_dict(), head.config, i, features[b, t], parts)
            torch.testing.assert_close(head.logits(i, found[i][b, t], parts), expected, **SAME)


@pytest.mark.parametrize("count", [1, 2, K])
@pytest.mark.parametrize(("layers", "is_tied", "has_bias", "name"), CASES)
def test_all_heads_at_once(layers: int, is_tied: bool, has_bias: bool, name: str, count: int) -> None:
    head, parts = heads(layers, is_tied, has_bias, name), shared_parts()
    features = numbers(4, E, seed=9)
    with torch.no_grad():
        found = head.all_logits(features, parts, count)
        assert found.shape == (4, count, V)
        for i, b in itertools.product(range(count), range(4)):
            expected = medusa(head.state_dict(), head.config, i, features[b], parts)
            torch.testing.assert_close(found[b, i], expected, **SAME)


def test_untied_blocks_have_gradients_of_their_own() -> None:
    """A list that repeats one module, as published code has it, would give all blocks the same."""
    head, parts = heads(3, False, True, "shared"), shared_parts()
    hidden = next(head.teacher_forced(numbers(1, 1, E, seed=9), tokens(1, 1), parts))
    head.logits(0, hidden, parts).square().sum().backward()
    grad = head.weight.grad
    assert grad is not None
    assert grad.shape[1] == 3
    assert not torch.allclose(grad[0, 0], grad[0, 1])
    assert not torch.allclose(grad[0, 1], grad[0, 2])
    assert grad[1:].abs().max() == 0


@pytest.mark.parametrize("name", ["shared", "own"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_new_heads_are_the_targets_own_prediction(name: str, has_bias: bool) -> None:
    head, parts = heads(3, False, has_bias, name), shared_parts()
    head.initialize(parts)
    features = numbers(2, 4, E, seed=9)
    own = parts.lm_head(features) if name == "shared" else features @ parts.lm_head_weight.T
    with torch.no_grad():
        for i, hidden in enumerate(head.teacher_forced(features, tokens(2, 4), parts)):
            assert torch.equal(head.logits(i, hidden, parts), own)


def test_a_new_partial_head_copies_the_rows_of_its_tokens() -> None:
    head, parts = heads(1, False, True, "partial"), shared_parts()
    head.initialize(parts)
    assert head.lm_head is not None
    assert head.token_map is not None
    for row, token in enumerate(head.token_map.tolist()):
        assert all(torch.equal(head.lm_head[i, row], parts.lm_head_weight[token]) for i in range(K))


def test_the_gradient_of_a_part_is_that_of_indexing() -> None:
    ours, plain = (nn.Parameter(torch.arange(24.0).view(4, 3, 2)) for _ in range(2))
    for index, factor in ((2, 3.0), (0, 5.0), (2, 7.0)):  # a part twice, two parts never
        assert torch.equal(part_of(ours, index), plain[index])
        (factor * part_of(ours, index).square()).sum().backward()
        (factor * plain[index].square()).sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad, plain.grad)


def test_nothing_of_the_stacks_size_is_made_for_a_part() -> None:
    stack = nn.Parameter(torch.zeros(5, 40, 60))
    stack.grad = torch.zeros_like(stack)
    with torch.profiler.profile(record_shapes=True) as seen:
        part_of(stack, 1).sum().backward()
    made = [event for event in seen.events() if event.name in ("aten::zeros", "aten::zero_", "aten::fill_")]
    assert not any([5, 40, 60] in event.input_shapes for event in made)
    assert not any(event.name == "aten::select_backward" for event in seen.events())
