"""A decoder block of a draft head: a Llama block that reads features instead of embeddings, with a KV cache.

    x = inputs + output(attention(q, k, v))
    outputs = x + down(silu(gate(norm(x))) * up(norm(x)))

Queries, keys and values are projections of norm(inputs), of the inputs in blocks without that norm (EAGLE-1), or of
[norm(side); norm(inputs)], twice as wide, in blocks with a second input (EAGLE-3).

Letters: B sequences, T positions, E width of the inputs, H heads, Hk key and value heads, Dh head size, I inner width.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Self, TypedDict, Unpack

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from foretoken.decoder.blocks import Block, Blocks, BlockSpec, FeedForward, Matrix, Norm, Rotary, Side
from foretoken.decoder.native_linear import fits_bfloat16
from foretoken.models.parts import scaled_frequencies


class Placement(TypedDict, total=False):
    """Device and dtype of new weights; torch's defaults where one is missing."""

    device: torch.device | None
    dtype: torch.dtype | None


class LayerConfig(BaseModel):
    """Sizes H, Hk, Dh and I of the block, usually those of the target's blocks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    intermediate_size: int = Field(ge=1)
    attention_bias: bool = False
    rms_norm_eps: float = Field(default=1e-6, gt=0)  # epsilon of all norms
    # Base of the rotary frequencies. Most released heads have 10000, whatever the target has.
    rope_theta: float = Field(default=10000.0, gt=0)
    # Scaling of the frequencies, in transformers' words without the base, such as {"rope_type": "linear", "factor":
    # 4.0}; also "llama3" and "yarn". None for no scaling.
    rope_scaling: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        heads, groups = self.num_attention_heads, self.num_key_value_heads
        if heads % groups:
            raise ValueError(f"{heads} query heads cannot share {groups} key heads. Expected a divisor")
        if self.rope_scaling is not None:
            frequencies, factor = self.scaled_frequencies(torch.device("cpu"))
            if not (0 < factor < float("inf") and bool(((frequencies > 0) & frequencies.isfinite()).all())):
                raise ValueError(f"rotary scaling {self.rope_scaling} gives frequencies that are not positive")
        return self

    def scaled_frequencies(self, device: torch.device) -> tuple[Tensor, float]:
        """Returns (Dh / 2,) float32 angles per position and the factor of cosines and sines, for `rope_scaling`."""
        assert self.rope_scaling is not None, "the caller looks"
        return scaled_frequencies(self.rope_scaling, theta=self.rope_theta, head_dim=self.head_dim, device=device)


class Heads(NamedTuple):
    """Rotated queries and keys, and values: (B, T, H or Hk, Dh)."""

    query: Tensor
    key: Tensor
    value: Tensor


class KeyValue(NamedTuple):
    """Rotated keys, and values: (B, T, Hk, Dh)."""

    key: Tensor
    value: Tensor


class DecoderLayer(nn.Module):
    """The block. Parameter names are those of a Llama block of transformers, with short names of norms."""

    def __init__(
        self,
        config: LayerConfig,
        width: int,
        *,
        has_input_norm: bool = True,
        has_side: bool = False,
        has_keys: bool = True,
        **placement: Unpack[Placement],
    ) -> None:
        """Creates the block with uninitialized weights; width: E; has_keys: whether it computes keys and values."""
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        values = config.num_key_value_heads * config.head_dim
        read = 2 * width if has_side else width

        def linear(inputs: int, outputs: int, *, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, **placement)

        def norm() -> nn.Parameter:
            return nn.Parameter(torch.empty(width, **placement))

        self.q_proj = linear(read, queries, bias=config.attention_bias)
        # None in blocks that read keys and values of another module.
        self.k_proj = linear(read, values, bias=config.attention_bias) if has_keys else None
        self.v_proj = linear(read, values, bias=config.attention_bias) if has_keys else None
        self.o_proj = linear(queries, width)
        self.gate_proj = linear(width, config.intermediate_size)
        self.up_proj = linear(width, config.intermediate_size)
        self.down_proj = linear(config.intermediate_size, width)
        self.input_norm = norm() if has_input_norm else None  # of the first input, before attention
        self.side_norm = norm() if has_side else None  # of the second input
        self.post_attention_norm = norm()
        self._scaled: dict[torch.device, tuple[Tensor, float]] = {}  # frequencies by device, computed on first use

    def initialize(self) -> None:
        """Draws weights with standard deviation 0.02; output projections start at zero, norms at one."""
        with torch.no_grad():
            for part in filter(None, (self.q_proj, self.k_proj, self.v_proj, self.gate_proj, self.up_proj)):
                part.weight.normal_(std=0.02)
                if part.bias is not None:
                    part.bias.zero_()
            self.o_proj.weight.zero_()
            self.down_proj.weight.zero_()
            for weight in (self.input_norm, self.side_norm, self.post_attention_norm):
                if weight is not None:
                    weight.fill_(1.0)

    def forward(self, inputs: Tensor, positions: Tensor | None = None, side: Tensor | None = None) -> Tensor:
        """Computes whole texts with causal attention; returns (B, T, E).

        Args:
            inputs: (B, T, E).
            positions: (B, T) or (1, T) int64; 0 … T - 1 when None.
            side: (B, T, E), the second input, in blocks that have one.
        """
        if positions is None:
            positions = torch.arange(inputs.shape[1], device=inputs.device).unsqueeze(0)
        return self.finished(inputs, causal_attention(self.projected(inputs, positions, side)))

    def projected(self, inputs: Tensor, positions: Tensor, side: Tensor | None = None) -> Heads:
        """Returns the inputs of attention for some positions; arguments as in `forward`."""
        assert self.k_proj is not None, "the block computes keys"
        assert self.v_proj is not None, "the block computes values"
        x = self._read(inputs, side)
        turns = self._rotation(positions, x.dtype)
        return Heads(self._turned(self.q_proj(x), turns), *self._key_value(x, turns, self.k_proj, self.v_proj))

    def query(self, inputs: Tensor, positions: Tensor) -> Tensor:
        """Returns (B, T, H, Dh), the rotated queries of a block with one input; arguments as in `forward`."""
        x = self._read(inputs, None)
        return self._turned(self.q_proj(x), self._rotation(positions, x.dtype))

    def key_value(self, x: Tensor, positions: Tensor, k_proj: nn.Module, v_proj: nn.Module) -> KeyValue:
        """Returns keys and values for the block's queries: two projections of (B, T, E)."""
        return self._key_value(x, self._rotation(positions, x.dtype), k_proj, v_proj)

    def _read(self, inputs: Tensor, side: Tensor | None) -> Tensor:
        x = inputs if self.input_norm is None else self.normed(inputs, self.input_norm)
        if self.side_norm is None:
            return x
        assert side is not None, "the block has a second input"
        return torch.cat([self.normed(side, self.side_norm), x], dim=-1)

    def _key_value(self, x: Tensor, turns: tuple[Tensor, Tensor], k_proj: nn.Module, v_proj: nn.Module) -> KeyValue:
        return KeyValue(self._turned(k_proj(x), turns), v_proj(x).unflatten(-1, (-1, self.config.head_dim)))

    def _turned(self, x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
        return _rotated(x.unflatten(-1, (-1, self.config.head_dim)), *turns)

    def finished(self, inputs: Tensor, mixed: Tensor) -> Tensor:
        """Returns (B, T, E), the block after attention, of (B, T, E) inputs and (B, T, H, Dh) mixed values."""
        x: Tensor = inputs + self.o_proj(mixed.flatten(2))
        return x + self.fed_forward(self.normed(x, self.post_attention_norm))

    def fed_forward(self, x: Tensor) -> Tensor:
        """Returns (B, T, E), the outputs of the feed-forward layer."""
        result: Tensor = self.down_proj(silu(self.gate_proj(x)) * self.up_proj(x))
        return result

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """Computes an RMS norm over the last dimension, in the weight's dtype even under autocast."""
        return rms_norm(x.to(weight.dtype), weight.shape, weight, self.config.rms_norm_eps).to(x.dtype)

    def compact(self) -> None:
        """Converts the weights to bfloat16 if that is exact for all of them: half the bytes to read."""
        if all(fits_bfloat16(parameter) for parameter in self.parameters()):
            self.to(torch.bfloat16)

    def as_blocks(self, num_positions: int) -> Blocks:
        """Returns the block for `BlockStack`, for up to `num_positions` positions."""
        config, dtype = self.config, self.exact_dtype
        positions = torch.arange(num_positions, device=self.post_attention_norm.device).unsqueeze(0)
        cos, sin = (table[0, :, 0].contiguous() for table in self._rotation(positions, dtype))
        assert self.k_proj is not None, "the block computes keys"
        assert self.v_proj is not None, "the block computes values"
        query, key, value, output, gate, up, down = (
            Matrix(weight=part.weight, bias=part.bias)
            for part in (
                self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.gate_proj, self.up_proj, self.down_proj,
            )
        )  # fmt: skip
        side_norm = self.as_norm(self.side_norm)
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
            attention_norm=self.as_norm(self.input_norm),
            side=None if side_norm is None else Side(norm=side_norm),
            mlp_norm=self.as_norm(self.post_attention_norm),
            rotary=Rotary(cos=cos, sin=sin),
        )
        return Blocks(blocks=[block])

    def as_norm(self, weight: Tensor | None) -> Norm | None:
        """Returns a norm of the block, or after it, for `BlockStack`."""
        if weight is None:
            return None
        return Norm(weight=weight.detach().to(self.exact_dtype).contiguous(), epsilon=self.config.rms_norm_eps)

    @property
    def exact_dtype(self) -> torch.dtype:
        """The dtype of norms and rotations."""
        return torch.promote_types(self.post_attention_norm.dtype, torch.float32)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns (B, T, 1, Dh / 2) cosines and sines; angles in float64 for float64 features, else float32."""
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


def causal_attention(heads: Heads, mask: Tensor | None = None) -> Tensor:
    """Returns (B, T, H, Dh), the attention of a whole text; mask: (T, T) bool, what is seen if not all before."""
    is_grouped = heads.query.shape[2] != heads.key.shape[2]
    query, key, value = (part.transpose(1, 2) for part in heads)
    mixed = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=is_grouped
    )
    return mixed.transpose(1, 2)


def unrolled_attention(
    query: Tensor,
    starts: Tensor,
    first: Heads | KeyValue,
    later: Sequence[Heads | KeyValue],
    seen: Tensor | None = None,
) -> Tensor:
    """Returns (B, Q, H, Dh), the attention of step j of Q drafts that are fed with a text.

    The draft that begins at position t sees the text's keys 0 … t, and its own key at each of its j steps. Scores are
    at least float32.

    Args:
        query: (B, Q, H, Dh), of step j.
        starts: (Q,) int64, the first positions.
        first: Of the text, (B, T, …).
        later: Of steps 1 … j, (B, Q, …) each.
        seen: (Q, T + J) bool, of the text's keys and those of J steps, the ones within sight; None for all.
    """
    batch, width, heads, size = query.shape
    length, groups = first.key.shape[1:3]
    exact = torch.promote_types(query.dtype, torch.float32)
    grouped = query.view(batch, width, groups, heads // groups, size).permute(0, 2, 3, 1, 4) * size**-0.5
    keys, values = (part.permute(0, 2, 3, 1).unsqueeze(2) for part in (first.key, first.value))  # (B, Hk, 1, Dh, T)
    is_future = torch.arange(length, device=query.device) > starts.unsqueeze(1)
    scores = [(grouped @ keys).to(exact).masked_fill(is_future, float("-inf"))]
    own_keys = [own.key.transpose(1, 2).unsqueeze(2) for own in later]  # (B, Hk, 1, Q, Dh), like the values
    own_values = [own.value.transpose(1, 2).unsqueeze(2) for own in later]
    scores += [(grouped * key).sum(-1, keepdim=True, dtype=exact) for key in own_keys]
    whole = torch.cat(scores, dim=-1)
    if seen is not None:
        whole = whole.masked_fill(~seen, float("-inf"))
    weights = whole.softmax(-1).to(query.dtype)
    mixed = weights[..., :length] @ values.transpose(-1, -2)
    for index, value in enumerate(own_values):
        mixed = mixed + weights[..., length + index].unsqueeze(-1) * value
    return mixed.permute(0, 3, 1, 2, 4).reshape(batch, width, heads, size)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to (B, T, heads, Dh), halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
