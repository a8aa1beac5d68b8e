"""Held-out loss by length of context: by window length over the same tokens, and by position in a long window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from recipes.tinycode.data import held_out_windows

if TYPE_CHECKING:
    from torch import Tensor

    from recipes.tinycode.model import TinyLlama

BATCH_TOKENS = 16_384


@torch.no_grad()
def token_losses(model: TinyLlama, windows: Tensor) -> Tensor:
    """Return the loss of each label: (n, T) float32 on the CPU, in nats, of windows (n, T + 1) of token ids."""
    device = model.device
    losses = []
    for part in windows.split(max(1, BATCH_TOKENS // windows.shape[1])):
        ids = part.to(device)
        losses.append(functional.cross_entropy(model(ids[:, :-1]).mT.float(), ids[:, 1:], reduction="none").cpu())
    return torch.cat(losses)


def held_out_loss(model: TinyLlama, windows: Tensor) -> float:
    """Mean loss in nats per token of (n, T + 1) windows."""
    return float(token_losses(model, windows).mean())


def loss_by_context(model: TinyLlama, stream: Tensor, length: int, count: int) -> dict[str, dict[int, float]]:
    """Show what further context is worth.

    Args:
        model: the model to evaluate.
        stream: (tokens,) held-out stream.
        length: longest window in tokens.
        count: windows of that length, spread evenly over the stream.

    Returns:
        `by_window`: mean loss in nats when these windows are cut into windows of 256, 1024, 4096, 16384 tokens (as far
        as `length` goes), so each length predicts the same tokens; `by_position`: in the longest windows, mean loss of
        the positions from the end before (or 0) to each end.
    """
    windows = held_out_windows(stream, count, length)
    lengths = [n for n in (256, 1024, 4096, 16_384) if n < length] + [length]
    losses = {n: token_losses(model, windows.unfold(1, n + 1, n).flatten(0, 1)) for n in lengths}
    ends = [length // 2**k for k in (4, 3, 2, 1, 0)]
    longest = losses[length].mean(0)
    return {
        "by_window": {n: float(loss.mean()) for n, loss in losses.items()},
        "by_position": {end: float(longest[start:end].mean()) for start, end in zip([0, *ends], ends, strict=False)},
    }
