"""Decoder blocks, and the lean decoder, on torch's GEMM: any device, and CPUs with matrix units that oneDNN supports.

On GPUs our own kernels compute the element-wise operations of common blocks, and recurrences (`triton_kernels`).

Letters: M tokens of a pass, E hidden size, F taps, H query heads, Hk KV heads, D head size, L blocks, I width of the
feed-forward layer.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.attention.layout import AttentionLayout, tree_attention
from foretoken.core.backend import has_triton_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.blocks import Block, Experts, FeedForward, FeedForwardBlock, Matrix, Norm, Side, tap_indices
from foretoken.decoder.fused_linear import fuse, lm_head
from foretoken.decoder.memory import check_memory
from foretoken.decoder.quantized_modules import mixed
from foretoken.decoder.torch_mixers import MixedPass, MixerSizes, torch_mixer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.passes import Pass, Tap
    from foretoken.decoder.blocks import Activation, Blocks, LeanWeights, RecurrentBlock, Rotary
    from foretoken.decoder.fused_linear import FusedLinear
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.decoder.torch_mixers import TorchMixer


class Turns:
    """Cosines and sines at the positions of a pass, looked up once for all layers; `positions`: (M,) int64."""

    def __init__(self, positions: Tensor, dtype: torch.dtype) -> None:
        self.positions, self._dtype = positions.contiguous(), dtype  # of the host's trees they are columns
        self._known: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, rotary: Rotary) -> tuple[Tensor, Tensor]:
        """Returns (M, 1, R / 2) cosines and sines."""
        if id(rotary) not in self._known:
            cos, sin = (table[self.positions].to(self._dtype).unsqueeze(1) for table in (rotary.cos, rotary.sin))
            self._known[id(rotary)] = cos, sin
        return self._known[id(rotary)]


class Projected(NamedTuple):
    """The (M, (H + 2 Hk) D) outputs of a layer's projections: queries, keys, values; no queries if `num_heads` is 0."""

    joined: Tensor
    num_heads: int
    layer: int
    turns: Turns
    layout: AttentionLayout


class TorchOps:
    """The operations in torch.

    Attributes:
        sums_parts: Whether a `delta` of `add_and_norm` may be (P, M, E), summed over P.
        kernels: The module `triton_kernels` where it computes recurrent states, or None.
    """

    sums_parts = False
    kernels: Any = None

    def add_and_norm(self, x: Tensor, delta: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """Returns x + delta and its norm, (M, E) each in the dtype of `x`; delta: (M, E) or None, norm: may be None."""
        total = x if delta is None else x + delta
        return total, _normed(total, norm)

    def activate(self, up: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
        """Computes activation(gate) * up of (M, 2 I), gate first; or activation(up) of (M, I) without a gate."""
        if not is_gated:
            return _activated(up, activation)
        gate, up = up.chunk(2, dim=-1)
        return _activated(gate, activation) * up

    def rotate_and_write(self, projected: Projected, block: Block, cache: SlotCache) -> Tensor:
        """Applies norms and rotation to queries and keys, and writes keys and values; returns (M, H, D) queries."""
        spec, joined = block.spec, projected.joined
        sizes = [projected.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        query, key, value = joined.split(sizes, dim=1)
        query, key = (
            part.unflatten(1, (0, spec.head_dim))
            if not part.shape[1]
            else _normed_and_rotated(part, norm, block, projected.turns)
            for part, norm in ((query, block.query_norm), (key, block.key_norm))
        )
        cache.write(projected.layer, projected.layout, key, value.unflatten(1, (-1, spec.head_dim)))
        return query


class TritonOps(TorchOps):
    """The kernels of `triton_kernels` if they know the operation, else torch's, as for layer norms."""

    sums_parts = True

    def __init__(self) -> None:
        """Imports the kernels; raises `ImportError` without triton."""
        from foretoken.decoder import triton_kernels

        self.kernels = self._kernels = triton_kernels

    def add_and_norm(self, x: Tensor, delta: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
        """See `TorchOps`."""
        if norm is None or norm.kind != "rms":
            if delta is not None and delta.dim() > x.dim():
                delta = delta.sum(0).to(x.dtype)
            return super().add_and_norm(x, delta, norm)
        return self._kernels.add_and_norm(x, delta, norm.weight, norm.epsilon)

    def activate(self, up: Tensor, activation: Activation, *, is_gated: bool) -> Tensor:
        """See `TorchOps`."""
        if activation != "silu" or not is_gated:
            return super().activate(up, activation, is_gated=is_gated)
        return self._kernels.gated_silu(up)

    def rotate_and_write(self, projected: Projected, block: Block, cache: SlotCache) -> Tensor:
        """See `TorchOps`."""
        norms, rotary = (block.query_norm, block.key_norm), block.rotary
        is_known = rotary is not None and 2 * rotary.cos.shape[1] == block.spec.head_dim and not block.norms_all_heads
        if not is_known or any(norm is not None and norm.kind != "rms" for norm in norms):
            return super().rotate_and_write(projected, block, cache)
        assert rotary is not None, "it is known"
        weights = [norm.weight for norm in norms if norm is not None]
        return self._kernels.rotate_and_write(
            projected.joined, rotary.cos, rotary.sin, projected.turns.positions, cache.keys[projected.layer],
            cache.values[projected.layer], projected.layout.tables(),
            (weights[0], weights[1]) if weights else None,
            0.0 if block.query_norm is None else block.query_norm.epsilon,
        )  # fmt: skip


def elementwise_ops(dtype: torch.dtype, device: torch.device) -> TorchOps:
    """Returns the Triton kernels if they run here, else torch's operations."""
    if has_triton_kernels(device) and dtype in (torch.float32, torch.float16, torch.bfloat16):
        return TritonOps()
    return TorchOps()


def prepared_norm(norm: Norm | None, dtype: torch.dtype) -> Norm | None:
    """Returns the norm with weights in `dtype` if that is exact, else in their own wider dtype."""
    if norm is None:
        return None
    tensors = [tensor.to(dtype) for tensor in norm.tensors()]
    if not all(torch.equal(a.to(b.dtype), b) for a, b in zip(tensors, norm.tensors(), strict=True)):
        return norm
    return replace(norm, weight=tensors[0], bias=tensors[1] if norm.bias is not None else None)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """Returns the norm over the last dimension, computed in the dtype of its weights, rounded to that of `x`."""
    if norm is None:
        return x
    wide, shape = x.to(norm.weight.dtype), norm.weight.shape
    if norm.kind == "layer":
        return functional.layer_norm(wide, shape, norm.weight, norm.bias, norm.epsilon).to(x.dtype)
    return functional.rms_norm(wide, shape, norm.weight, norm.epsilon).to(x.dtype)


def _activated(x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return functional.silu(x)
    if activation == "relu2":
        return functional.relu(x).square()
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _normed_and_rotated(x: Tensor, norm: Norm | None, block: Block, turns: Turns) -> Tensor:
    """Turns (M, heads D) into (M, heads, D)."""
    size = block.spec.head_dim
    if block.norms_all_heads:
        x = _normed(x, norm).unflatten(1, (x.shape[1] // size, size))
    else:
        x = _normed(x.unflatten(1, (x.shape[1] // size, size)), norm)
    return x if block.rotary is None else _rotated(x, *turns.of(block.rotary))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies rotary embedding to the first R elements of each head of (M, heads, D)."""
    size = 2 * cos.shape[-1]
    turned, rest = (x, None) if size == x.shape[-1] else (x[..., :size], x[..., size:])
    a, b = turned.chunk(2, dim=-1)
    parts = [a * cos - b * sin, b * cos + a * sin]
    return torch.cat(parts if rest is None else [*parts, rest], dim=-1)


_NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm", "query_norm", "key_norm")


class TorchBlocks:
    """Blocks on a slot cache. `FusedLinear` says how much memory fused weights take."""

    def __init__(self, blocks: Blocks, cache: SlotCache, *, moves_weights: bool = False) -> None:
        """Fuses the projections of blocks on one device; takes the fastest element-wise operations.

        Raises `UnsuitableError` for recurrent layers of several sizes, or without states in the cache.
        """
        if not blocks.is_plain and cache.states is None:
            raise UnsuitableError("recurrent layers, and blocks of one part, run in whole models alone.")
        self._cache, self._ops = cache, elementwise_ops(blocks.dtype, blocks.device)
        self._sizes = MixerSizes.of(blocks.mixers, blocks.dtype, blocks.device)
        self._layers, count = list[_Layer](), 0
        for index, block in enumerate(blocks.blocks):
            self._layers.append(_Layer(index, block, count, blocks.dtype, moves_weights=moves_weights))
            count += self._layers[-1].mixer is not None
        self._final_norm = prepared_norm(blocks.final_norm, blocks.dtype)

    def mixed(self, work: Pass) -> MixedPass | None:
        """Prepares what recurrent layers need in a pass; None without any. Raises `PassError` as `RecurrentStates`.

        The host reads the parents: work should be there, or the device is waited for.
        """
        if self._sizes is None:
            return None
        assert self._cache.states is not None, "recurrent layers have states"
        return MixedPass(work, self._cache.states, self._sizes, self._ops.kernels)

    def run(
        self,
        x: Tensor,
        work: Pass,
        layout: AttentionLayout,
        taps: Sequence[int],
        side: Tensor | None = None,
        mixed: MixedPass | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes every token of a pass; writes its keys and values to the cache.

        Args:
            x: (M, E), the inputs of the first block.
            taps: F boundary indices: i is the input of block i, L the output of the last block, L + 1 the final norm.
            side: (M, E), contiguous, the second input of the first block, or None.
            mixed: See `mixed`; the states of the pass are there afterwards.

        Returns:
            (M, E) after the final norm, and the (M, F, E) features of the taps; no features without taps or if only
                some blocks run.

        Raises:
            PassError: If there are fewer blocks than the pass needs.
        """
        layers = self._layers[: work.num_layers]
        if work.num_layers is not None and len(layers) < work.num_layers:
            raise PassError(f"the pass goes through {work.num_layers} blocks, the target has {len(layers)}.")
        inputs = _Inputs(Turns(work.token_positions, x.dtype), layout, side, mixed)
        x, delta, boundaries = self._through(layers, x, inputs)
        x, final = self._ops.add_and_norm(x, delta, self._final_norm)
        boundaries += [x, final]
        has_features = taps and work.num_layers is None
        return final, torch.stack([boundaries[tap] for tap in taps], dim=1) if has_features else None

    def append(self, x: Tensor, work: Pass, layout: AttentionLayout, side: Tensor | None = None) -> None:
        """Runs a pass without the rest of the last block, which has attention, after its keys and values."""
        inputs, last = _Inputs(Turns(work.token_positions, x.dtype), layout, side, None), self._layers[-1]
        block = last.block
        assert isinstance(block, Block), "it has keys and values"
        x, delta, _ = self._through(self._layers[:-1], x, inputs)
        _, normed = self._ops.add_and_norm(x, delta, block.attention_norm)
        joined = last.key_value(self._with_side(block, normed, side))
        TorchOps().rotate_and_write(Projected(joined, 0, last.index, inputs.turns, layout), block, self._cache)

    def _through(
        self, layers: Sequence[_Layer], x: Tensor, inputs: _Inputs
    ) -> tuple[Tensor, Tensor | None, list[Tensor]]:
        """Returns the residual stream, what is yet to be added to it, and the input of each block."""
        ops, boundaries = self._ops, list[Tensor]()
        delta: Tensor | None = None
        for layer in layers:
            block = layer.block
            if not isinstance(block, FeedForwardBlock):
                x, normed = ops.add_and_norm(x, delta, block.attention_norm)
                boundaries.append(x)
                delta = self._first_half(layer, normed, inputs)
            if layer.mlp is not None:
                x, normed = ops.add_and_norm(x, delta, block.mlp_norm)
                boundaries += [x] if isinstance(block, FeedForwardBlock) else []
                delta = self._normed(layer.mlp(normed, ops), layer.mlp_post_norm)
                delta = delta if block.mlp_factor == 1.0 else delta * block.mlp_factor
        return x, delta, boundaries

    def _first_half(self, layer: _Layer, normed: Tensor, inputs: _Inputs) -> Tensor:
        """Returns what attention and a mixer add, see `_projected`."""
        added = None
        if layer.mixer is not None:
            assert inputs.mixed is not None, "the pass was prepared"
            added = layer.mixer(normed, inputs.mixed)
        if isinstance(block := layer.block, Block):
            normed = self._with_side(block, normed, inputs.side)
            attended = self._normed(self._attention(layer, block, normed, inputs), block.attention_post_norm)
            attended = attended if block.attention_factor == 1.0 else attended * block.attention_factor
            added = attended if added is None else attended + added
        assert added is not None, "it has attention or a mixer"
        return added

    def _attention(self, layer: _Layer, block: Block, normed: Tensor, inputs: _Inputs) -> Tensor:
        """Returns the output projection of attention, see `_projected`; writes the layer's keys and values."""
        spec = block.spec
        projected = Projected(layer.query_key_value(normed), spec.num_heads, layer.index, inputs.turns, inputs.layout)
        query = self._ops.rotate_and_write(projected, block, self._cache)
        attended = tree_attention(
            query, self._cache.keys[layer.index], self._cache.values[layer.index], inputs.layout,
            scale=spec.attention_scale, window=spec.window, softcap=spec.softcap,
        )  # fmt: skip
        heads = attended.flatten(1)
        if layer.gate is not None:
            heads = heads * layer.gate(normed).sigmoid()
        in_parts = self._ops.sums_parts and not block.attention_post_norm and layer.mixer is None
        return _projected(layer.output, heads, in_parts=in_parts)

    def _with_side(self, block: Block, normed: Tensor, side: Tensor | None) -> Tensor:
        """Returns the input of attention: (M, E), or (M, 2 E) with a second input."""
        if block.side is None:
            return normed
        assert side is not None, "the block has a second input"
        return torch.cat([self._normed(side, block.side.norm), normed], dim=-1)

    def _normed(self, x: Tensor, norm: Norm | None) -> Tensor:
        return x if norm is None else self._ops.add_and_norm(x, None, norm)[1]


class _Inputs(NamedTuple):
    """What blocks read in a pass besides the residual stream."""

    turns: Turns
    layout: AttentionLayout
    side: Tensor | None
    mixed: MixedPass | None


class _Layer:
    """A block with its norms and matrices prepared. `number`: of its mixer among those of the model."""

    def __init__(
        self,
        index: int,
        block: Block | RecurrentBlock | FeedForwardBlock,
        number: int,
        dtype: torch.dtype,
        *,
        moves_weights: bool,
    ) -> None:
        self.index = index
        changes: dict[str, Any] = {
            name: prepared_norm(getattr(block, name), dtype) for name in _NORMS if hasattr(block, name)
        }
        mixer: Any = getattr(block, "mixer", None)
        activation = block.spec.activation if isinstance(block, Block) else block.activation
        if isinstance(block, Block):
            side = prepared_norm(None if block.side is None else block.side.norm, dtype)
            changes["side"] = None if side is None else Side(norm=side)
            mixer = block.beside
            query, gate = block.without_gates()
            self.query_key_value = fuse(query, block.key, block.value, moves_weights=moves_weights)
            self.gate = None if gate is None else fuse(gate)  # of the heads' outputs
            self.output = fuse(block.output)
        self.block = replace(block, **changes)
        self.mixer: TorchMixer | None = None
        if mixer is not None:
            self.mixer = torch_mixer(number, mixer, moves_weights=moves_weights)
        self.mlp_post_norm: Norm | None = changes.get("mlp_post_norm")
        self.mlp: TorchExperts | _TorchFeedForward | None = None
        if isinstance(block.mlp, Experts):
            self.mlp = TorchExperts(block.mlp, activation, moves_weights=moves_weights)
        elif block.mlp is not None:
            can_sum = self.mlp_post_norm is None
            self.mlp = _TorchFeedForward(block.mlp, activation, can_sum=can_sum, moves_weights=moves_weights)

    @cached_property
    def key_value(self) -> FusedLinear:
        assert isinstance(self.block, Block), "it has keys and values"
        return fuse(self.block.key, self.block.value)


class _TorchFeedForward:
    """A feed-forward layer. `can_sum`: whether the caller can sum over parts of the outputs."""

    def __init__(
        self, layers: FeedForward, activation: Activation, *, can_sum: bool = False, moves_weights: bool
    ) -> None:
        self._activation, self._is_gated, self._factor = activation, layers.gate is not None, layers.gate_factor
        self._can_sum = can_sum
        gates = () if layers.gate is None else (layers.gate,)
        self._up, self._down = fuse(*gates, layers.up, moves_weights=moves_weights), fuse(layers.down)

    def __call__(self, x: Tensor, ops: TorchOps) -> Tensor:
        up = self._up(x)
        if self._factor != 1.0:
            up[:, : up.shape[1] // 2] *= self._factor
        up = ops.activate(up, self._activation, is_gated=self._is_gated)
        return _projected(self._down, up, in_parts=ops.sums_parts and self._can_sum)


def _projected(layer: FusedLinear, x: Tensor, *, in_parts: bool) -> Tensor:
    """Returns (M, E), or (P, M, E) float32 to be summed over P, if the caller can sum."""
    output: Tensor = layer.gemm(x, x.dtype, in_parts=True) if in_parts else layer(x)
    return output


class TorchExperts:
    """A mixture of experts: computes all tokens of an expert together. Reads the routing on the host."""

    def __init__(self, experts: Experts, activation: Activation, *, moves_weights: bool) -> None:
        self._experts, self._activation = experts, activation
        self._gate_up, self._down = experts.dense()
        shared = experts.shared
        self._shared = None if shared is None else _TorchFeedForward(shared, activation, moves_weights=moves_weights)

    def __call__(self, x: Tensor, ops: TorchOps) -> Tensor:
        """Turns (M, E) into (M, E)."""
        experts = self._experts
        scores = functional.linear(x, experts.router.dense(), experts.router.bias)
        wide = torch.promote_types(x.dtype, torch.float32)
        weights, chosen = experts.chosen(scores.to(wide))

        def output_of(expert: int, inputs: Tensor) -> Tensor:
            up = functional.linear(inputs, self._gate_up[expert])
            out = functional.linear(ops.activate(up, self._activation, is_gated=experts.is_gated), self._down[expert])
            return out.to(wide)

        out = mixed(x, chosen, weights, output_of, wide)
        return (out if self._shared is None else out + self._shared_part(self._shared(x, ops), x, wide)).to(x.dtype)

    def _shared_part(self, out: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
        gate = self._experts.shared_gate
        if gate is None:
            return out.to(dtype)
        return out.to(dtype) * functional.linear(x, gate.dense(), gate.bias).to(dtype).sigmoid()


class StockDecoder:
    """The lean decoder on torch's operations, see `Decoder`; `FusedLinear` says how much memory weights take."""

    name = "lean-stock"
    is_exact = False

    def __init__(self, weights: LeanWeights, cache: SlotCache, taps: Sequence[Tap]) -> None:
        """Fuses the projections; raises `UnsuitableError` if a tap does not exist."""
        self._weights, self._embedding = weights, Matrix(weight=weights.embedding).dense()
        self._taps = tap_indices(taps, weights.num_layers)
        self._blocks = TorchBlocks(weights.layers, cache, moves_weights=not weights.is_borrowed)
        self._head = lm_head(weights)
        self._tensors = list(weights.tensors())

    def run(self, work: Pass) -> PassOutput:
        """See `Decoder`."""
        check_memory(self._tensors)
        with torch.inference_mode():
            given, mixed = work, self._blocks.mixed(work)
            work = work.to(self._weights.device)
            x = functional.embedding(work.tokens, self._embedding)
            if self._weights.embedding_scale != 1.0:
                x = x * self._weights.embedding_scale
            layout = AttentionLayout(work)
            final, features = self._blocks.run(x, work, layout, self._taps, mixed=mixed)
            logits, cap = None, self._weights.logit_softcap
            if work.logit_rows is not None:
                logits = self._head(final if work.has_all_logits else final[work.logit_rows]).float()
                logits = logits if self._weights.logit_scale == 1.0 else logits * self._weights.logit_scale
                logits = logits if cap is None else torch.tanh(logits / cap) * cap
                if (tokens := self._weights.head_tokens) is not None:
                    shape = len(logits), self._weights.vocab_size
                    logits = logits.new_full(shape, float("-inf")).index_copy_(1, tokens, logits)
            if mixed is not None:
                mixed.finish(given)
            return PassOutput(logits=logits, features=features, attention=layout.attention)
