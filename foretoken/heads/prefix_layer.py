"""One decoder block over the target's features: what gives a Hydra++ head more than the last position.

RMS norm, causal attention with rotary positions, residual, RMS norm, gated SiLU, residual, RMS norm: the block of a
Llama, fed with features instead of embeddings. It has a KV cache of its own.

Source: Ankner et al. 2024 (arXiv 2402.05109), section 4.3.

Letters: B sequences, T positions, E hidden size, H heads, Hk key and value heads, Dh head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from foretoken.decoder.blocks import Block, Blocks, BlockSpec, FeedForward, Matrix, Norm, Rotary
from foretoken.decoder.lean.native_linear import fits_bfloat16
from foretoken.hf.rotary import scaled_frequencies

if TYPE_CHECKING:
    from typing import Self


class PrefixConfig(BaseModel):
    """Sizes of the block; as a rule those of the target's blocks.

    Attributes:
        num_attention_heads: H.
        num_key_value_heads: Hk.
        head_dim: Dh.
        intermediate_size: Width of the gated layer.
        rms_norm_eps: Of all three norms.
        rope_theta: Base of the rotary frequencies. The released code always takes 10000, whatever the target's is.
        rope_scaling: How they are scaled, in transformers' words without the base, as {"rope_type": "linear", "factor":
            4.0}; "llama3" and "yarn" as well. None for plain ones. The released code knows "linear" of these, and takes
            the target's.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate_size: int = Field(ge=1)
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10000.0, gt=0)
    rope_scaling: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"{heads} query heads cannot share {groups} key heads. Expected a divisor")
        if self.rope_scaling is not None:
            frequencies, factor = self.scaled_frequencies(torch.device("cpu"))
            if not (0 < factor < float("inf") and bool(((frequencies > 0) & frequencies.isfinite()).all())):
                raise ValueError(f"rotary scaling {self.rope_scaling} gives frequencies that are not positive")
        return self

    def scaled_frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """(Dh / 2,) float32 angles of one step in position, and a factor of cosines and sines; with scaling only."""
        assert self.rope_scaling is not None, "the caller looks"
        return scaled_frequencies(self.rope_scaling, theta=self.rope_theta, head_dim=self.head_dim, device=device)


class PrefixLayer(nn.Module):
    """See the module. Parameter names are those of one transformers Llama block with its final norm."""

    def __init__(
        self,
        config: PrefixConfig,
        hidden_size: int,
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        values = config.num_key_value_heads * config.head_dim

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device=device, dtype=dtype)

        def norm() -> nn.Parameter:
            return nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))

        self.q_proj, self.k_proj = linear(hidden_size, queries), linear(hidden_size, values)
        self.v_proj, self.o_proj = linear(hidden_size, values), linear(queries, hidden_size)
        self.gate_proj = linear(hidden_size, config.intermediate_size)
        self.up_proj = linear(hidden_size, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, hidden_size)
        self.input_norm, self.post_attention_norm, self.norm = norm(), norm(), norm()
        self._scaled: dict[torch.device, tuple[Tensor, float]] = {}  # frequencies by device, made when first needed

    def initialize(self) -> None:
        """Normal with standard deviation 0.02, no contribution of either branch at first, norms neutral."""
        with torch.no_grad():
            for part in (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.up_proj):
                part.weight.normal_(std=0.02)
            self.o_proj.weight.zero_()
            self.down_proj.weight.zero_()
            for weight in (self.input_norm, self.post_attention_norm, self.norm):
                weight.fill_(1.0)

    def forward(
        self,
        features: Tensor,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Encodes features in the light of all that came before.

        Args:
            features: (B, T, E).
            positions: (B, T) int64; 0 … T - 1 when None.

        Returns:
            (B, T, E).
        """
        config, (batch, width, _) = self.config, features.shape
        if positions is None:
            positions = torch.arange(width, device=features.device).unsqueeze(0)
        x = self._normed(features, self.input_norm)
        query, key, value = (
            part(x).view(batch, width, -1, config.head_dim) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = self._rotation(positions, features.dtype)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        mixed = _causal(query, key, value).reshape(batch, width, -1)
        x = features + self.o_proj(mixed)
        inner = self._normed(x, self.post_attention_norm)
        x = x + self.down_proj(silu(self.gate_proj(inner)) * self.up_proj(inner))
        return self._normed(x, self.norm)

    def compact(self) -> None:
        """Keeps the weights in bfloat16 where that holds all of them exactly: half the bytes to read."""
        if all(fits_bfloat16(parameter) for parameter in self.parameters()):
            self.to(torch.bfloat16)

    def as_blocks(self, num_positions: int) -> Blocks:
        """The block as a `BlockStack` takes it; num_positions: how many may be fed."""
        config, dtype = self.config, torch.promote_types(self.norm.dtype, torch.float32)
        positions = torch.arange(num_positions, device=self.norm.device).unsqueeze(0)
        cos, sin = (table[0, :, 0].contiguous() for table in self._rotation(positions, dtype))
        input_norm, post_attention_norm, norm = (
            Norm(weight=weight.detach().to(dtype).contiguous(), epsilon=config.rms_norm_eps)
            for weight in (self.input_norm, self.post_attention_norm, self.norm)
        )
        query, key, value, output, gate, up, down = (
            Matrix(weight=part.weight)
            for part in (
                self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj,
            )
        )  # fmt: skip
        block = Block(
            spec=BlockSpec(
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
            ),
            query=query,
            key=key,
            value=value,
            output=output,
            mlp=FeedForward(gate=gate, up=up, down=down),
            attention_norm=input_norm,
            mlp_norm=post_attention_norm,
            rotary=Rotary(cos=cos, sin=sin),
        )
        return Blocks(blocks=[block], final_norm=norm)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return rms_norm(x, weight.shape, weight, self.config.rms_norm_eps)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(B, T, 1, Dh / 2) cosines and sines; angles in float64 where the features are, else float32."""
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        config, device = self.config, positions.device
        if config.rope_scaling is None:
            steps = torch.arange(0, config.head_dim, 2, device=device, dtype=exact) / config.head_dim
            frequencies, factor = config.rope_theta**-steps, 1.0
        else:
            if device not in self._scaled:
                self._scaled[device] = config.scaled_frequencies(device)
            frequencies, factor = self._scaled[device]
        angles = positions.to(exact).unsqueeze(-1) * frequencies.to(exact)
        return (angles.cos() * factor).to(dtype).unsqueeze(2), (angles.sin() * factor).to(dtype).unsqueeze(2)


def _causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of whole texts."""
    is_grouped = query.shape[2] != key.shape[2]
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=is_grouped).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, heads, Dh), halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
