"""LSTM layers over pairs of an embedding and a feature: what fuses the two in Falcon, and carries the text so far.

    i, f, g, o = W_ih x + b_ih + W_hh h + b_hh
    c = sigmoid(f) c + sigmoid(i) tanh(g)
    h = sigmoid(o) tanh(c)

Mode "recurrent" carries h and c from position to position. Mode "per_position" starts every position from zero, as the
released heads were trained: their code fed batches of one text with positions where torch's LSTM takes the batch.

Letters: B texts, T positions, W width, L layers.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from foretoken.decoder.lean.native_linear import linear_layer

LstmMode = Literal["recurrent", "per_position"]
NUM_LAYERS = 2


class PairLstm(nn.Module):
    """See the module.

    Attributes:
        weights: Torch's own layers, with dropout between them while training; None after `split`.
        cells: After `split`: of each layer the linear layer of its input, and that of h in mode "recurrent"; else none.
    """

    weights: nn.LSTM | None

    def __init__(
        self,
        width: int,
        mode: LstmMode,
        *,
        has_bias: bool = True,
        dropout: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Weights are not set.

        Args:
            width: W.
            mode: See the module.
            has_bias: Whether there are b_ih and b_hh.
            dropout: Between the layers while training.
            device: Of the weights.
            dtype: Likewise.
        """
        super().__init__()
        self._width, self._mode = width, mode
        self.weights = nn.LSTM(
            2 * width, width, num_layers=NUM_LAYERS, bias=has_bias, dropout=dropout, batch_first=True, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.cells = nn.ModuleList()

    def forward(self, pairs: Tensor) -> Tensor:
        """(B, T, W) of whole texts, (B, T, 2 W); before `split`."""
        if self._mode == "recurrent":
            return self._layers(pairs)
        return self._layers(pairs.flatten(0, 1).unsqueeze(1)).view(*pairs.shape[:2], self._width)

    def _layers(self, pairs: Tensor) -> Tensor:
        """(B, T, W) of torch's layers; in their own dtype where autocast asks the processor for one that it lacks."""
        assert self.weights is not None, "only what drafts is split"
        keeps_dtype = torch.is_autocast_enabled("cpu") and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        with torch.autocast("cpu", enabled=False) if keeps_dtype else nullcontext():
            dtype = next(self.weights.parameters()).dtype if keeps_dtype else pairs.dtype
            result: Tensor = self.weights(pairs.to(dtype))[0]
        return result

    def run(self, pairs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Goes on over some positions from a state; without dropout.

        Args:
            pairs: (..., T, 2 W).
            state: (..., L, 2, W), h and c of each layer after the position before; None for zeros.

        Returns:
            (..., T, W), and (..., T, L, 2, W), the state after each position; of no content in mode "per_position".
        """
        x = pairs
        if state is None:
            state = pairs.new_zeros(*pairs.shape[:-2], NUM_LAYERS, 2, self._width)
        states = []
        for layer in range(NUM_LAYERS):
            gates = self._of_input(layer, x)
            if self._mode == "per_position":
                x, c = _activated(gates, None)
                states.append(torch.stack([x, c], dim=-2))
                continue
            h, c = state[..., layer, 0, :], state[..., layer, 1, :]
            after = []
            for of_input in gates.unbind(-2):
                h, c = _activated(of_input + self._of_hidden(layer, h), c)
                after.append(torch.stack([h, c], dim=-2))
            states.append(torch.stack(after, dim=-3))
            x = states[-1][..., 0, :]
        return x, torch.stack(states, dim=-3)

    def split(self) -> None:
        """Puts linear layers, which native kernels can replace, in the place of torch's LSTM; for drafting alone."""
        for layer in range(NUM_LAYERS):
            of_input, of_hidden = self._weights(layer)
            biases = self._biases(layer)
            parts = [linear_layer(of_input, biases[0])]
            if self._mode == "recurrent":
                parts.append(linear_layer(of_hidden, biases[1]))
            self.cells.append(nn.ModuleList(parts))
        self.weights = None

    def _weights(self, layer: int) -> tuple[Tensor, Tensor]:
        """(4 W, ...) of the input and of h."""
        assert self.weights is not None, "only what drafts is split"
        return getattr(self.weights, f"weight_ih_l{layer}"), getattr(self.weights, f"weight_hh_l{layer}")

    def _biases(self, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """(4 W,) that go with the input and with h; both with the input in mode "per_position", where h is zero."""
        assert self.weights is not None, "only what drafts is split"
        if not self.weights.bias:
            return None, None
        of_input, of_hidden = getattr(self.weights, f"bias_ih_l{layer}"), getattr(self.weights, f"bias_hh_l{layer}")
        return (of_input + of_hidden, None) if self._mode == "per_position" else (of_input, of_hidden)

    def _of_input(self, layer: int, x: Tensor) -> Tensor:
        """(..., 4 W), the input's part of the gates."""
        if len(self.cells):
            result: Tensor = self.cells[layer][0](x)  # type: ignore[index]
            return result
        return linear(x, self._weights(layer)[0], self._biases(layer)[0])

    def _of_hidden(self, layer: int, h: Tensor) -> Tensor:
        """(..., 4 W), the part of h, in mode "recurrent"."""
        if len(self.cells):
            result: Tensor = self.cells[layer][1](h)  # type: ignore[index]
            return result
        return linear(h, self._weights(layer)[1], self._biases(layer)[1])


def _activated(gates: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """(..., W) each, h and c after a position; c: before it, None for zeros."""
    take, keep, new, show = gates.chunk(4, dim=-1)
    c = take.sigmoid() * new.tanh() + (0.0 if c is None else keep.sigmoid() * c)
    return show.sigmoid() * c.tanh(), c
