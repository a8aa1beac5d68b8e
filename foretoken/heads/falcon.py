"""Falcon's head: a block of K tokens a pass, drafted semi-autoregressively.

K pairs of a feature and the token after it give K further features at once: LSTM layers over the pairs, then a decoder
block without a norm before attention in which the positions of a block see each other, the later ones as well. The
target's own LM head reads the block's outputs. The tokens of a block are drafted independently of each other.

Pair j is (feature j, x_{j+1}); the output at it estimates feature j + K. A draft that begins at position t has the
pairs t - K + 1 … t as its first block and, K tokens on, those of the features that it estimated and the tokens it
chose. Keys and values depend on what a position reads, not on what it sees, as there is one decoder block: positions
that were part of a draft block and those of whole texts have the same ones.

Source: Gao et al. 2024 (arXiv 2412.12639). The released code runs its LSTM in mode "per_position".

Letters as in `base`, but K is the size of a block; W width of the block, E here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from foretoken.decoder.blocks import Blocks
from foretoken.decoder.lean.native_linear import optimize_for_inference
from foretoken.heads.autoregressive import AutoregressiveConfig
from foretoken.heads.base import Head
from foretoken.heads.decoder_layer import DecoderLayer, Heads, unrolled_attention
from foretoken.heads.pair_lstm import LstmMode, PairLstm

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Self

    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.models.parts import TargetParts


class FalconConfig(AutoregressiveConfig):
    """Sizes of a Falcon head.

    Attributes:
        block: K, tokens of a pass; 2 in the released heads.
        num_steps: Tokens for which acceptance is measured, a multiple of K; drafts may be deeper.
        lstm_mode: "recurrent" as in the paper, or "per_position" as the released heads were trained, see `pair_lstm`.
        has_bias: Whether the LSTM layers have biases.
        dropout: Between the LSTM layers, while training.
    """

    method: ClassVar[str] = "falcon"

    block: int = Field(default=2, ge=2, le=8)
    num_steps: int = Field(default=8, ge=2, le=64)
    lstm_mode: LstmMode = "recurrent"
    has_bias: bool = True
    dropout: float = Field(default=0.1, ge=0, lt=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_steps % self.block:
            raise ValueError(f"num_steps is {self.num_steps}. Expected a multiple of the block's {self.block} tokens")
        return self


class FalconHead(Head):
    """See the module.

    Attributes:
        lstm: Over the pairs, embedding first.
        layer: The decoder block.
    """

    config: FalconConfig

    def __init__(
        self, config: FalconConfig, *, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.lstm = PairLstm(
            config.hidden_size, config.lstm_mode, has_bias=config.has_bias, dropout=config.dropout, device=device,
            dtype=dtype,
        )  # fmt: skip
        self.layer = DecoderLayer(config.layer, config.hidden_size, has_input_norm=False, device=device, dtype=dtype)

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Random: the LSTM as torch has it, uniform within 1 / sqrt(W); the decoder block hands its output on."""
        del parts
        assert self.lstm.weights is not None, "only what drafts is split"
        self.lstm.weights.reset_parameters()
        self.layer.initialize()

    def block_outputs(self, features: Tensor, embedded: Tensor) -> Tensor:
        """A whole text as blocks 0 … K - 1, K … 2 K - 1 and so on, all at once: what training runs.

        Args:
            features: (B, S, E).
            embedded: (B, S, E), of the token after each position.

        Returns:
            (B, S, E), the estimate of feature j + K at j.
        """
        x = self.lstm(paired(features, embedded)).to(features.dtype)
        heads = self.layer.projected(x, torch.arange(x.shape[1], device=x.device).unsqueeze(0))
        is_grouped = heads.query.shape[2] != heads.key.shape[2]
        query, key, value = (part.transpose(1, 2) for part in heads)
        mask = relaxed_mask(x.shape[1], self.config.block, x.device)
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped)
        return self.layer.finished(x, mixed.transpose(1, 2))

    @override
    def teacher_forced(self, features: Tensor, tokens: Tensor, parts: TargetParts) -> Iterator[Tensor]:
        """See `Head`. Positions before K - 1 have no block: the first pair stands for those that are not there."""
        block = self.config.block
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        rows = parts.embed(tokens).to(features.dtype)
        x, states = self.lstm.run(paired(features, rows.roll(-1, dims=1)))
        text, drafted, outputs = self.layer.projected(x, positions), list[Heads](), list[Tensor]()
        for slot in range(block):
            own = (positions[0] + (slot + 1 - block)).clamp_min(0)
            mixed = unrolled_attention(text.query[:, own], positions[0], text, drafted)
            outputs.append(self.layer.finished(x[:, own], mixed))
            yield outputs[-1]
        for begin in range(1, self.config.steps - block, block):  # of a block, ahead of the draft's position
            pairs = [paired(of_slot, rows.roll(-(begin + 1 + o), dims=1)) for o, of_slot in enumerate(outputs)]
            x, after = self.lstm.run(torch.stack(pairs, dim=2), states)
            states = after[:, :, -1]
            new = [self.layer.projected(x[:, :, slot], positions + begin + slot) for slot in range(block)]
            drafted += new
            outputs = [
                self.layer.finished(x[:, :, slot], unrolled_attention(heads.query, positions[0], text, drafted))
                for slot, heads in enumerate(new)
            ]
            yield from outputs

    @override
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        return parts.lm_head(hidden)

    @property
    @override
    def has_target_lm_head(self) -> bool:
        return True

    @override
    def optimize_for_inference(self, quantization: Quantization | None = None, *, compacts: bool = True) -> None:
        """Packs the weights of the LSTM; the decoder block runs as a whole, see `as_blocks`."""
        self.lstm.split()
        optimize_for_inference(self.lstm, quantization=quantization, compacts=compacts)
        if compacts:
            self.layer.compact()

    def as_blocks(self, num_positions: int) -> Blocks:
        """The decoder block as a `BlockStack` takes it; num_positions: how many may be fed."""
        return Blocks(blocks=[self.layer.as_block(num_positions)])


def paired(features: Tensor, embedded: Tensor) -> Tensor:
    """(..., 2 W), what the LSTM reads of features and of the embeddings of the tokens after them, (..., W) both."""
    return torch.cat([embedded, features], dim=-1)


def relaxed_mask(length: int, block: int, device: torch.device) -> Tensor:
    """(S, S) bool, who sees whom: everything before, and the whole of one's own block.

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
