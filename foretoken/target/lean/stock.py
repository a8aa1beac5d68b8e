"""The lean decoder on torch's own kernels: any device, and the CPUs whose matrix units oneDNN knows how to use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.attention.dispatch import tree_attention
from foretoken.target.decoder import PassOutput
from foretoken.target.lean.fused_linear import FusedLinear, fuse, is_packable
from foretoken.target.lean.weights import Block, read_weights, tap_indices

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.attention.layout import AttentionLayout
    from foretoken.target.loading import LoadedModel
    from foretoken.target.slot_cache import SlotCache
    from foretoken.target.taps import Tap


class _Layer(NamedTuple):
    """A block and its fused projections."""

    block: Block
    query_key_value: FusedLinear
    output: FusedLinear
    gate_up: FusedLinear
    down: FusedLinear


class StockDecoder:
    """See `Decoder`. Weights are fused in place: the transformers module goes on working with the same ones."""

    name = "lean-stock"

    def __init__(self, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> None:
        """Fuses the projections.

        Raises:
            UnsuitableError: When the architecture is not known.
        """
        self._weights = read_weights(model, cache.capacity)
        self._cache, self._dtype = cache, model.dtype
        self._taps = tap_indices(taps, len(self._weights.blocks))
        self._layers = [
            _Layer(
                block,
                fuse(block.attention, "q_proj", "k_proj", "v_proj"),
                fuse(block.attention, "o_proj"),
                fuse(block.mlp, "gate_proj", "up_proj"),
                fuse(block.mlp, "down_proj"),
            )
            for block in self._weights.blocks
        ]
        self._head: Callable[[Tensor], Tensor] = _head(model.module)

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """See `Decoder`."""
        with torch.inference_mode():
            final, features = self._hidden(tokens, layout)
            return PassOutput(logits=self._head(final).float(), features=features)

    def fill(self, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
        """See `Decoder`."""
        with torch.inference_mode():
            return self._hidden(tokens, layout)[1]

    def _hidden(self, tokens: Tensor, layout: AttentionLayout) -> tuple[Tensor, Tensor | None]:
        """(B, T, D) what the LM head reads, and the (B, T, F, D) tapped features."""
        weights = self._weights
        x = functional.embedding(tokens, weights.embedding)
        cos = weights.cos[layout.positions].to(self._dtype).unsqueeze(2)
        sin = weights.sin[layout.positions].to(self._dtype).unsqueeze(2)
        boundaries = []
        for index, layer in enumerate(self._layers):
            boundaries.append(x)
            x = x + layer.output(self._attend(index, layer, x, cos, sin, layout))
            gate, up = layer.gate_up(self._normed(x, layer.block.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        final = self._normed(x, weights.final_norm)
        boundaries += [x, final]
        return final, torch.stack([boundaries[tap] for tap in self._taps], dim=2) if self._taps else None

    def _attend(
        self, index: int, layer: _Layer, x: Tensor, cos: Tensor, sin: Tensor, layout: AttentionLayout
    ) -> Tensor:
        """(B, T, heads * E) mixed values of one layer; writes its keys and values."""
        weights, block = self._weights, layer.block
        batch, width, _ = x.shape
        heads, kv_heads = weights.num_heads, weights.num_kv_heads
        joined = layer.query_key_value(self._normed(x, block.attention_norm)).view(batch, width, -1, weights.head_dim)
        query, key, value = joined.split([heads, kv_heads, kv_heads], dim=2)
        if block.query_norm is not None and block.key_norm is not None:
            query, key = self._normed(query, block.query_norm), self._normed(key, block.key_norm)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        keys, values = self._cache.write(index, layout, key.transpose(1, 2), value.transpose(1, 2))
        mixed = tree_attention(query.transpose(1, 2), keys, values, layout, scale=weights.scale, window=block.window)
        return mixed.reshape(batch, width, -1)

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm over the last dimension."""
        return functional.rms_norm(x, weight.shape, weight.to(self._dtype), self._weights.epsilon)


def _head(module: Any) -> Any:
    """The LM head, packed where it can be: a tied one embeds tokens too, and packing would keep its weight twice."""
    head = module.lm_head
    if isinstance(head, nn.Linear) and (
        head.weight is module.get_input_embeddings().weight or not is_packable(head.weight)
    ):
        return head
    return fuse(module, "lm_head")


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of (B, T, heads, E), halves paired."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
