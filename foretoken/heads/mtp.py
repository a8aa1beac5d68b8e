"""The head for multi-token prediction that Qwen3.5 is trained with: `mtp.*` of the target's own files.

A linear layer fuses the embedding of a token and the feature before it, each after a norm of its own. A decoder block
of the target's kind follows, with attention to the whole text: norms of queries and keys, rotations of a part of each
head, and a gate of each head's output. Heads of targets with experts have experts too, and a gated layer that every
token takes. The output after a norm is the input of the target's LM head, and the next feature. The feature is the one
after the target's last norm. Weights of norms count from 1.

Source: the equations are those of vLLM's `qwen3_5_mtp.py` and of the target's blocks in transformers. Letters as in
`base`; W width of the block, here E; H heads, Dh head size, R rotated elements of a head, X experts, J their width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu
from typing_extensions import override

from foretoken.decoder.blocks import Blocks, Experts, FeedForward, Matrix, Norm
from foretoken.decoder.quantized_modules import mixed
from foretoken.heads.base import AutoregressiveConfig, AutoregressiveHead, BlockInputs, BlockOutputs
from foretoken.heads.decoder_layer import DecoderLayer, Heads, LayerConfig, Placement
from foretoken.heads.steps import AutoregressiveSteps

if TYPE_CHECKING:
    from typing import Self

    from foretoken.models.parts import TargetParts


class MtpLayerConfig(LayerConfig):
    """Sizes of the block."""

    rotary_dim: int = Field(ge=2, multiple_of=2)  # R
    # X, 0 for none; beside them `intermediate_size` is the width of the layer that every token takes.
    num_experts: int = Field(default=0, ge=0, le=1 << 12)
    num_experts_per_tok: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)  # J
    norm_topk_prob: bool = True  # whether the weights of a token's experts add up to 1

    @model_validator(mode="after")
    def _check_rotation(self) -> Self:
        if self.rotary_dim > self.head_dim or self.rope_scaling is not None:
            raise ValueError(
                f"rotations of {self.rotary_dim} elements of {self.head_dim}, scaled by {self.rope_scaling}. Expected "
                "at most all of them, without scaling"
            )
        if self.num_experts and not (0 < self.num_experts_per_tok <= self.num_experts and self.moe_intermediate_size):
            raise ValueError(
                f"{self.num_experts_per_tok} of {self.num_experts} experts of width {self.moe_intermediate_size}. "
                "Expected one at least, and at most all"
            )
        return self


class MtpConfig(AutoregressiveConfig):
    """Sizes of the head."""

    method: ClassVar[str] = "mtp"

    layer: MtpLayerConfig


class MtpLayer(DecoderLayer):
    """The block; `q_proj` is (2 H Dh, W), the queries of each head followed by its gates."""

    config: MtpLayerConfig

    def __init__(self, config: MtpLayerConfig, width: int, **placement: Unpack[Placement]) -> None:
        super().__init__(config, width, **placement)
        rows = 2 * config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(width, rows, bias=config.attention_bias, **placement)
        self.query_norm, self.key_norm = (nn.Parameter(torch.empty(config.head_dim, **placement)) for _ in range(2))
        count, inner = config.num_experts, config.moe_intermediate_size
        # Router, gate and up of all experts, their down projections, and the gate of the layer that every token takes.
        sizes = ((count, width), (count, 2, inner, width), (count, width, inner), (1, width)) if count else (None,) * 4
        self.router, self.experts_gate_up, self.experts_down, self.shared_gate = (
            None if size is None else nn.Parameter(torch.empty(*size, **placement)) for size in sizes
        )

    @override
    def initialize(self) -> None:
        super().initialize()
        with torch.no_grad():
            if self.experts_down is not None:
                self.experts_down.zero_()
            for weight in (self.router, self.experts_gate_up, self.shared_gate):
                if weight is not None:
                    weight.normal_(std=0.02)
            for weight in (self.input_norm, self.post_attention_norm, self.query_norm, self.key_norm):
                assert weight is not None, "the block has all norms"
                weight.zero_()

    @override
    def projected(self, inputs: Tensor, positions: Tensor, side: Tensor | None = None) -> Heads:
        assert self.k_proj is not None, "the block computes keys"
        assert self.v_proj is not None, "the block computes values"
        size, x = self.config.head_dim, self._read(inputs, side)
        turns = self._rotation(positions, x.dtype)
        query, key = self._query_and_gate(x)[0], self.k_proj(x).unflatten(-1, (-1, size))
        return Heads(
            self._rotated_part(self.normed(query, self.query_norm), turns),
            self._rotated_part(self.normed(key, self.key_norm), turns),
            self.v_proj(x).unflatten(-1, (-1, size)),
        )

    @override
    def finished(self, inputs: Tensor, mixed: Tensor) -> Tensor:
        gate = self._query_and_gate(self._read(inputs, None))[1]
        return super().finished(inputs, mixed * gate.sigmoid())

    @override
    def fed_forward(self, x: Tensor) -> Tensor:
        if self.router is None or self.shared_gate is None:
            return super().fed_forward(x)
        experts, flat = self._experts(None), x.flatten(0, -2)
        gate_up, down = experts.dense()
        exact = torch.promote_types(x.dtype, torch.float32)
        weights, chosen = experts.chosen(linear(flat, self.router).to(exact))

        def output_of(expert: int, inputs: Tensor) -> Tensor:
            gate, up = linear(inputs, gate_up[expert]).chunk(2, dim=-1)
            return linear(silu(gate) * up, down[expert])

        shared = super().fed_forward(x) * linear(x, self.shared_gate).sigmoid()
        return shared + mixed(flat, chosen, weights, output_of, exact).to(x.dtype).view(x.shape)

    def _experts(self, shared: FeedForward | None) -> Experts:
        """Returns the experts beside `shared`, the layer that every token takes; None for the experts alone."""
        assert self.router is not None
        assert self.experts_gate_up is not None
        assert self.experts_down is not None
        assert self.shared_gate is not None
        return Experts(
            router=Matrix(weight=self.router), gate_up=self.experts_gate_up.flatten(1, 2), down=self.experts_down,
            top_k=self.config.num_experts_per_tok, is_normalized=self.config.norm_topk_prob, shared=shared,
            shared_gate=None if shared is None else Matrix(weight=self.shared_gate),
        )  # fmt: skip

    @override
    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        exact = torch.promote_types(weight.dtype, torch.float32)
        return rms_norm(x.to(exact), weight.shape, weight.to(exact) + 1, self.config.rms_norm_eps).to(x.dtype)

    @override
    def as_norm(self, weight: Tensor | None) -> Norm | None:
        norm = super().as_norm(weight)
        return None if norm is None else replace(norm, weight=norm.weight + 1)

    @override
    def as_blocks(self, num_positions: int) -> Blocks:
        (block,) = super().as_blocks(num_positions).attention
        query_norm, key_norm = self.as_norm(self.query_norm), self.as_norm(self.key_norm)
        assert isinstance(block.mlp, FeedForward), "the block of `DecoderLayer` has one"
        mlp = block.mlp if self.router is None else self._experts(block.mlp)
        return Blocks(blocks=[replace(block, mlp=mlp, gates_heads=True, query_norm=query_norm, key_norm=key_norm)])

    @override
    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (B, T, 1, R / 2) cosines and sines, as in `DecoderLayer`."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        count = self.config.rotary_dim
        frequencies = self.config.rope_theta ** -(
            torch.arange(0, count, 2, device=positions.device, dtype=exact) / count
        )
        angles = (positions.to(exact).unsqueeze(-1) * frequencies).unsqueeze(2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def _rotated_part(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        """Rotates the first R elements of each head of (B, T, heads, Dh)."""
        count, (cos, sin) = self.config.rotary_dim, turns
        a, b = x[..., :count].chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, x[..., count:]], dim=-1)

    def _query_and_gate(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns queries before their norm, and gates, (B, T, H, Dh) each."""
        both: Tensor = self.q_proj(x).unflatten(-1, (-1, 2 * self.config.head_dim))
        query, gate = both.chunk(2, dim=-1)
        return query, gate


class MtpHead(AutoregressiveHead):
    """The network; `fc` is (W, 2 W), embedding first."""

    config: MtpConfig
    layer: MtpLayer

    def __init__(self, config: MtpConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        width = config.width
        self.fc = nn.Linear(2 * width, width, bias=False, **placement)
        self.layer = MtpLayer(config.layer, width, **placement)
        # Of embeddings, of features, and of the block's output.
        self.embedding_norm, self.feature_norm, self.norm = (
            nn.Parameter(torch.empty(width, **placement)) for _ in range(3)
        )

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Passes the feature on."""
        with torch.no_grad():
            self.fc.weight.zero_()
            self.fc.weight[:, self.config.width :].copy_(torch.eye(self.config.width))
            for weight in (self.embedding_norm, self.feature_norm, self.norm):
                weight.zero_()
        self.layer.initialize()

    @override
    def paired(self, state: Tensor, embedded: Tensor) -> BlockInputs:
        normed = self.layer.normed
        both = torch.cat([normed(embedded, self.embedding_norm), normed(state, self.feature_norm)], dim=-1)
        return BlockInputs(self.fc(both), None)

    @override
    def outputs(self, x: Tensor) -> BlockOutputs:
        hidden = self.layer.normed(x, self.norm)
        return BlockOutputs(hidden, hidden)

    @override
    def native_steps(self, parts: TargetParts) -> AutoregressiveSteps | None:
        if parts.native is None:
            return None
        norm = self.layer.as_norm
        return AutoregressiveSteps(
            width=self.config.width, vocab_size=self.config.vocab_size, embedding=parts.native.embedding,
            head=parts.native.head, token_map=self.token_map, fuse=self.fc, norm=norm(self.norm),
            state_norm=norm(self.feature_norm), embedding_norm=norm(self.embedding_norm), feeds_normed=True,
        )  # fmt: skip


HEAD = MtpHead
CONFIG = MtpConfig
