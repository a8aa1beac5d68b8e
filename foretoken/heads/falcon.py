"""Falcon's head: drafts a block of K tokens a pass, semi-autoregressively.

K pairs of a feature and the next token give K further features at once: LSTM layers over the pairs, then a decoder
block without a norm before attention. In the decoder block all positions of a block of K see each other, also later
ones. The target's LM head reads the outputs. The tokens of a block are drafted independently of each other.

Pair j is (feature j, x_{j+1}); the output at j estimates feature j + K. The first block of a draft at position t has
the pairs t - K + 1 … t. The next block has the estimated features and the chosen tokens. As there is one decoder block,
keys and values do not depend on attention: positions of draft blocks and of whole texts have the same ones.

Source: Gao et al. 2024 (arXiv 2412.12639). The released code runs its LSTM in mode "per_position".
Letters as in `base`, but K is the size of a block; W width of the block, here E.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear
from typing_extensions import override

from foretoken.decoder.native_linear import linear_layer, optimize_for_inference
from foretoken.heads.base import IN_PLACE, AutoregressiveConfig, Head, WindowPositions
from foretoken.heads.decoder_layer import DecoderLayer, Heads, Placement, causal_attention, unrolled_attention

if TYPE_CHECKING:
    from foretoken.decoder.quantized import Quantization
    from foretoken.models.parts import TargetParts

LstmMode = Literal["recurrent", "per_position"]
NUM_LAYERS = 2  # of the LSTM, as in the published model


class PairLstm(nn.Module):
    """LSTM layers over pairs of embedding and feature; after `split` each has linear `cells` instead of `weights`."""

    weights: nn.LSTM | None

    def __init__(
        self, width: int, mode: LstmMode, *, has_bias: bool = True, dropout: float = 0.0, **placement: Unpack[Placement]
    ) -> None:
        """Creates layers with uninitialized weights; "per_position": every position starts from a zero state."""
        super().__init__()
        self._width, self._mode = width, mode
        self.weights = nn.LSTM(
            2 * width, width, num_layers=NUM_LAYERS, bias=has_bias, dropout=dropout, batch_first=True, **placement,
        )  # fmt: skip
        self.cells = nn.ModuleList()

    def forward(self, pairs: Tensor) -> Tensor:
        """Returns (B, T, W) for whole texts, (B, T, 2 W); only before `split`."""
        if self._mode == "recurrent":
            return self._layers(pairs)
        return self._layers(pairs.flatten(0, 1).unsqueeze(1)).view(*pairs.shape[:2], self._width)

    def _layers(self, pairs: Tensor) -> Tensor:
        """Returns (B, T, W). Uses the weights' dtype if the processor lacks autocast's dtype."""
        assert self.weights is not None, "only what drafts is split"
        keeps_dtype = torch.is_autocast_enabled("cpu") and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        with torch.autocast("cpu", enabled=False) if keeps_dtype else nullcontext():
            dtype = next(self.weights.parameters()).dtype if keeps_dtype else pairs.dtype
            result: Tensor = self.weights(pairs.to(dtype))[0]
        return result

    def feed_pairs(self, pairs: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Continues over (..., T, 2 W) pairs from a state, without dropout.

        `state` is (..., L, 2, W), h and c of each layer after the position before; None for zeros. Returns (..., T, W),
        and (..., T, L, 2, W), the state after each position; meaningless in mode "per_position".
        """
        x = pairs
        if state is None:
            state = pairs.new_zeros(*pairs.shape[:-2], NUM_LAYERS, 2, self._width)
        states = []
        for layer in range(NUM_LAYERS):
            gates = self._gates(layer, 0, x)
            if self._mode == "per_position":
                x, c = _activated(gates, None)
                states.append(torch.stack([x, c], dim=-2))
                continue
            h, c = state[..., layer, 0, :], state[..., layer, 1, :]
            after = []
            for of_input in gates.unbind(-2):
                h, c = _activated(of_input + self._gates(layer, 1, h), c)
                after.append(torch.stack([h, c], dim=-2))
            states.append(torch.stack(after, dim=-3))
            x = states[-1][..., 0, :]
        return x, torch.stack(states, dim=-3)

    def split(self) -> None:
        """Replaces torch's LSTM by linear layers, which native kernels can replace; training ends with it."""
        num_parts = 2 if self._mode == "recurrent" else 1
        self.cells.extend(
            nn.ModuleList(linear_layer(*self._part(layer, part)) for part in range(num_parts))
            for layer in range(NUM_LAYERS)
        )
        self.weights = None

    def _part(self, layer: int, part: int) -> tuple[Tensor, Tensor | None]:
        """Returns (4 W, …) weight and (4 W,) bias of a layer's input, part 0, or of h, part 1."""
        assert self.weights is not None, "only what drafts is split"
        weight: Tensor = getattr(self.weights, f"weight_{'ih' if part == 0 else 'hh'}_l{layer}")
        if not self.weights.bias:
            return weight, None
        biases = getattr(self.weights, f"bias_ih_l{layer}"), getattr(self.weights, f"bias_hh_l{layer}")
        # As h is zero in mode "per_position", both belong to the input there.
        return weight, biases[part] if self._mode == "recurrent" else biases[0] + biases[1]

    def _gates(self, layer: int, part: int, x: Tensor) -> Tensor:
        """Returns (..., 4 W), a part of the gates, from the layer's input or from h; see `_part`."""
        if len(self.cells):
            result: Tensor = self.cells[layer][part](x)  # type: ignore[index]
            return result
        return linear(x, *self._part(layer, part))


def _activated(gates: Tensor, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns (..., W) each, h and c after a position; c: before the position, None for zeros."""
    take, keep, new, show = gates.chunk(4, dim=-1)
    c = take.sigmoid() * new.tanh() + (0.0 if c is None else keep.sigmoid() * c)
    return show.sigmoid() * c.tanh(), c


class FalconConfig(AutoregressiveConfig):
    """Sizes of a Falcon head."""

    method: ClassVar[str] = "falcon"

    block: int = Field(default=2, ge=2, le=8)  # K, tokens of a pass; 2 in the released heads
    num_steps: int = Field(default=8, ge=2, le=64)  # that training measures, a multiple of K
    lstm_mode: LstmMode = "recurrent"  # as in the paper, or "per_position" like the released heads
    has_bias: bool = True
    dropout: float = Field(default=0.1, ge=0, lt=1)  # between the LSTM layers, while training

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.num_steps % self.block:
            raise ValueError(f"num_steps is {self.num_steps}. Expected a multiple of the block's {self.block} tokens")
        return self


class FalconHead(Head):
    """The network: `lstm` over the pairs, embedding first, then the decoder block `layer`."""

    config: FalconConfig

    def __init__(self, config: FalconConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        self.lstm = PairLstm(
            config.hidden_size, config.lstm_mode, has_bias=config.has_bias, dropout=config.dropout, **placement,
        )  # fmt: skip
        self.layer = DecoderLayer(config.layer, config.hidden_size, has_input_norm=False, **placement)

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Draws the LSTM's weights from torch's default, uniform within 1 / sqrt(W); the block passes its input on."""
        del parts
        assert self.lstm.weights is not None, "only what drafts is split"
        self.lstm.weights.reset_parameters()
        self.layer.initialize()

    def block_outputs(self, features: Tensor, embedded: Tensor, positions: WindowPositions = IN_PLACE) -> Tensor:
        """Returns (B, S, E), the estimate of feature j + K at j, for training.

        Computes a whole text as blocks 0 … K - 1, K … 2 K - 1, …, all at once. `features` and `embedded`, of the token
        after each position, are (B, S, E).
        """
        x = self.lstm(paired(features, embedded)).to(features.dtype)
        heads = self.layer.projected(x, positions.of(torch.arange(x.shape[1], device=x.device)))
        mask = relaxed_mask(x.shape[1], self.config.block, x.device)
        return self.layer.finished(x, causal_attention(heads, mask))

    @override
    def teacher_forced(
        self, features: Tensor, tokens: Tensor, parts: TargetParts, positions: WindowPositions = IN_PLACE
    ) -> Iterator[Tensor]:
        """Computes `Head.teacher_forced`. Positions before K - 1 have no full block; the first pair fills the gap."""
        block = self.config.block
        begins = torch.arange(tokens.shape[1], device=tokens.device)
        rows = parts.embed(tokens).to(features.dtype)
        x, states = self.lstm.feed_pairs(paired(features, rows.roll(-1, dims=1)))
        text, drafted, outputs = self.layer.projected(x, positions.of(begins)), list[Heads](), list[Tensor]()
        for slot in range(block):
            own = (begins + (slot + 1 - block)).clamp_min(0)
            mixed = unrolled_attention(text.query[:, own], begins, text, drafted)
            outputs.append(self.layer.finished(x[:, own], mixed))
            yield outputs[-1]
        for begin in range(1, self.config.steps - block, block):  # offset of a block from the draft's position
            pairs = [paired(of_slot, rows.roll(-(begin + 1 + o), dims=1)) for o, of_slot in enumerate(outputs)]
            x, after = self.lstm.feed_pairs(torch.stack(pairs, dim=2), states)
            states = after[:, :, -1]
            new = [self.layer.projected(x[:, :, slot], positions.of(begins + begin + slot)) for slot in range(block)]
            drafted += new
            outputs = [
                self.layer.finished(x[:, :, slot], unrolled_attention(heads.query, begins, text, drafted))
                for slot, heads in enumerate(new)
            ]
            yield from outputs

    @override
    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the weights of the LSTM; `DecoderLayer.as_blocks` runs the decoder block as a whole."""
        self.lstm.split()
        optimize_for_inference(self.lstm, quantization=quantization, compacts=compacts)
        if compacts:
            self.layer.compact()


def paired(features: Tensor, embedded: Tensor) -> Tensor:
    """Returns (..., 2 W), the LSTM's input, of features and embeddings of the next tokens, (..., W) each."""
    return torch.cat([embedded, features], dim=-1)


def relaxed_mask(length: int, block: int, device: torch.device) -> Tensor:
    """Returns (S, S) bool: each position sees all earlier positions and the whole of its block.

    With S = 5 and K = 2:

        1 1 0 0 0
        1 1 0 0 0
        1 1 1 1 0
        1 1 1 1 0
        1 1 1 1 1
    """
    number = torch.arange(length, device=device) // block
    return number.unsqueeze(1) >= number


HEAD = FalconHead
CONFIG = FalconConfig
