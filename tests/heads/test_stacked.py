"""A part of stacked weights gets the gradient that indexing gives it, and leaves the other parts alone."""

from __future__ import annotations

import torch
from torch import nn

from foretoken.heads.medusa import part_of


def test_gradient_is_that_of_indexing() -> None:
    ours, plain = (nn.Parameter(torch.arange(24.0).view(4, 3, 2)) for _ in range(2))
    for index, factor in ((2, 3.0), (0, 5.0), (2, 7.0)):  # a part twice, two parts never
        assert torch.equal(part_of(ours, index), plain[index])
        (factor * part_of(ours, index).square()).sum().backward()
        (factor * plain[index].square()).sum().backward()
    assert ours.grad is not None
    assert torch.equal(ours.grad, plain.grad)


def test_nothing_of_the_stack_s_size_is_made_for_a_part() -> None:
    stack = nn.Parameter(torch.zeros(5, 40, 60))
    stack.grad = torch.zeros_like(stack)
    with torch.profiler.profile(record_shapes=True) as seen:
        part_of(stack, 1).sum().backward()
    made = [event for event in seen.events() if event.name in ("aten::zeros", "aten::zero_", "aten::fill_")]
    assert not any([5, 40, 60] in event.input_shapes for event in made)
    assert not any(event.name == "aten::select_backward" for event in seen.events())
