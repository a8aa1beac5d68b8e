"""One part of weights that are stored in a stack, with a gradient that costs no more than the part."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def part_of(stack: nn.Parameter, index: int) -> Tensor:
    """`stack[index]`, whose gradient a backward pass adds to `stack.grad[index]` and to nothing else.

    Autograd's own indexing makes a whole stack of zeros around the gradient of a part and adds that, for every part and
    every portion of a batch. In return `torch.autograd.grad` finds no gradient for the stack: only `backward` does.

    Args:
        stack: (K, ...).
        index: Which part.
    """
    result: Tensor = _Part.apply(stack, index)
    return result


class _Part(torch.autograd.Function):
    """See `part_of`."""

    @staticmethod
    def forward(ctx: Any, stack: nn.Parameter, index: int) -> Tensor:
        """The part, without a copy."""
        ctx.stack, ctx.index = stack, index
        return stack.detach()[index]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None]:
        """Adds to the gradient in place."""
        stack = ctx.stack
        if stack.grad is None:
            stack.grad = torch.zeros_like(stack)
        stack.grad[ctx.index] += grad
        return None, None
