"""The lean decoder on kernels of our own, for CPUs: `decoder.cpp`, one call a pass.

It reads the weights where transformers put them and shares them with the module. Its arithmetic does not depend on how
many tokens or sequences share a pass: what a tree's path gets is what plain decoding gets, bit for bit, in every dtype.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.target.decoder import PassOutput, UnsuitableError
from foretoken.target.lean.build import native_library
from foretoken.target.lean.weights import Block, LeanWeights, read_weights, tap_indices

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.attention.layout import AttentionLayout
    from foretoken.target.loading import LoadedModel
    from foretoken.target.slot_cache import SlotCache
    from foretoken.target.taps import Tap

_DTYPES = (torch.float32, torch.bfloat16)


class Matrix(Structure):
    """See `decoder.cpp`, as for the other structures."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("cols", c_int64))


class _Layer(Structure):
    _fields_ = (
        *((name, Matrix) for name in ("query", "key", "value", "output", "gate", "up", "down")),
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm", "keys", "values")),
        ("window", c_int64),
    )


class _Model(Structure):
    _fields_ = (
        *((name, c_int64) for name in (
            "is_bfloat16", "num_layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "capacity",
        )),
        ("epsilon", c_float),
        ("scale", c_float),
        *((name, c_void_p) for name in ("embedding", "cos", "sin", "final_norm")),
        ("head", Matrix),
        ("layers", POINTER(_Layer)),
    )  # fmt: skip


class _Pass(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_threads", "batch", "width", "offset", "num_scratch")),
        *((name, c_void_p) for name in (
            "tokens", "positions", "inputs", "slots", "prefix", "parents", "visible", "scratch_positions", "logits",
            "taps",
        )),
        ("num_taps", c_int64),
        ("features", c_void_p),
        ("workspace", c_void_p),
    )  # fmt: skip


class NativeDecoder:
    """See `Decoder`."""

    name = "lean-native"
    is_exact = True

    def __init__(self, model: LoadedModel, cache: SlotCache, taps: Sequence[Tap]) -> None:
        """Compiles the kernels where that has not been done yet.

        Raises:
            UnsuitableError: When the architecture is not known, the model is not on a CPU in float32 or bfloat16, or
                the kernels cannot be compiled.
        """
        if not self.runs(model):
            raise UnsuitableError(f"it runs float32 and bfloat16 on CPUs, not {model.dtype} on {model.device}.")
        weights = read_weights(model, cache.capacity)
        self._vocab = model.vocab_size
        self._blocks = NativeBlocks(weights, cache, model.dtype, tap_indices(taps, len(weights.blocks)))

    @staticmethod
    def runs(model: LoadedModel) -> bool:
        """Whether the kernels are made for a model's device and dtype."""
        return model.device.type == "cpu" and model.dtype in _DTYPES

    def run(self, tokens: Tensor, layout: AttentionLayout) -> PassOutput:
        """See `Decoder`."""
        logits = torch.empty(*tokens.shape, self._vocab)
        return PassOutput(logits=logits, features=self._blocks.decode(tokens, layout, logits))

    def fill(self, tokens: Tensor, layout: AttentionLayout) -> Tensor | None:
        """See `Decoder`."""
        return self._blocks.decode(tokens, layout, None)


class NativeBlocks:
    """The blocks of a model on a slot cache, with whatever stands before and after them."""

    def __init__(self, weights: LeanWeights, cache: SlotCache, dtype: torch.dtype, taps: Sequence[int]) -> None:
        """Compiles the kernels where that has not been done yet.

        Args:
            weights: On a CPU.
            cache: In the same dtype.
            dtype: float32 or bfloat16.
            taps: Boundary indices of the features that passes give.

        Raises:
            UnsuitableError: For another dtype, when the kernels cannot be compiled, or when a weight has been packed.
        """
        if dtype not in _DTYPES:
            raise UnsuitableError(f"it runs float32 and bfloat16, not {dtype}.")
        self._weights = weights
        self._library = native_library()
        self._library.foretoken_workspace_bytes.restype = c_int64
        self._dtype, self._cache = dtype, cache
        self._taps = list(taps)
        self._tap_order = torch.tensor(sorted(set(self._taps)), dtype=torch.int64)
        self._kept: list[Tensor] = []  # what the structures below point to and nobody else holds
        self._layers = (_Layer * len(weights.blocks))(*(self._layer(i, b) for i, b in enumerate(weights.blocks)))
        self._model = self._describe(weights)
        self._workspace, self._room = torch.empty(0, dtype=torch.uint8), (0, 0)

    def decode(self, tokens: Tensor, layout: AttentionLayout, logits: Tensor | None) -> Tensor | None:
        """One call of the kernels.

        Args:
            tokens: (B, T) int64; or (B, T, D) float32, what stands in the place of their embeddings.
            layout: Positions, slots and who sees what.
            logits: (B, T, V) float32, filled; or None.

        Returns:
            The (B, T, F, D) features.
        """
        batch, width = tokens.shape[:2]
        threads = torch.get_num_threads()
        visible = None if layout.visible is None else layout.visible.contiguous()
        scratch_positions = None if layout.scratch_positions is None else layout.scratch_positions.contiguous()
        parents = None if layout.tree is None else layout.tree.parents.contiguous()
        tokens, positions = tokens.contiguous(), layout.positions.contiguous()
        slots, prefix = (c_int64 * batch)(*layout.slots), (c_int64 * batch)(*layout.prefix)
        features = None
        if self._taps:
            features = torch.empty(len(self._tap_order), batch, width, self._weights.embedding.shape[1])
        self._reserve(batch * width, threads)
        self._library.foretoken_decode(
            byref(self._model),
            byref(
                _Pass(
                    num_threads=threads,
                    batch=batch,
                    width=width,
                    offset=layout.offset,
                    num_scratch=0 if visible is None else visible.shape[2],
                    tokens=None if tokens.is_floating_point() else tokens.data_ptr(),
                    positions=positions.data_ptr(),
                    inputs=tokens.data_ptr() if tokens.is_floating_point() else None,
                    slots=ctypes.addressof(slots),
                    prefix=ctypes.addressof(prefix),
                    parents=_address(parents),
                    visible=_address(visible),
                    scratch_positions=_address(scratch_positions),
                    logits=_address(logits),
                    taps=self._tap_order.data_ptr(),
                    num_taps=len(self._tap_order),
                    features=_address(features),
                    workspace=self._workspace.data_ptr(),
                )
            ),
        )
        if features is None:
            return None
        if len(self._taps) == 1:
            return features[0].unsqueeze(2).to(self._dtype)
        order = torch.searchsorted(self._tap_order, torch.tensor(self._taps))
        return features[order].permute(1, 2, 0, 3).to(self._dtype)

    def _reserve(self, num_tokens: int, threads: int) -> None:
        """Makes the workspace large enough for a pass."""
        if num_tokens > self._room[0] or threads > self._room[1]:
            self._room = max(num_tokens, self._room[0]), max(threads, self._room[1])
            size = self._library.foretoken_workspace_bytes(byref(self._model), *map(c_int64, self._room))
            self._workspace = torch.empty(size, dtype=torch.uint8)

    def _describe(self, weights: LeanWeights) -> _Model:
        """The model as the kernels see it."""
        mlp: Any = weights.blocks[0].mlp
        return _Model(
            is_bfloat16=self._dtype == torch.bfloat16,
            num_layers=len(weights.blocks),
            hidden=weights.embedding.shape[1],
            heads=weights.num_heads,
            kv_heads=weights.num_kv_heads,
            head_dim=weights.head_dim,
            intermediate=mlp.down_proj.in_features,
            vocab=weights.embedding.shape[0],
            capacity=self._cache.capacity,
            epsilon=weights.epsilon,
            scale=weights.scale,
            embedding=self._hold(weights.embedding),
            cos=self._hold(weights.cos),
            sin=self._hold(weights.sin),
            final_norm=self._hold(weights.final_norm),
            head=self._matrix(weights.head) if len(weights.embedding) else Matrix(),
            layers=self._layers,
        )

    def _layer(self, index: int, block: Block) -> _Layer:
        """One layer as the kernels see it."""
        attention, mlp = block.attention, block.mlp
        return _Layer(
            query=self._matrix(attention.q_proj),
            key=self._matrix(attention.k_proj),
            value=self._matrix(attention.v_proj),
            output=self._matrix(attention.o_proj),
            gate=self._matrix(mlp.gate_proj),
            up=self._matrix(mlp.up_proj),
            down=self._matrix(mlp.down_proj),
            attention_norm=self._hold(block.attention_norm),
            mlp_norm=self._hold(block.mlp_norm),
            query_norm=self._hold(block.query_norm),
            key_norm=self._hold(block.key_norm),
            keys=self._cache.keys[index].data_ptr(),
            values=self._cache.values[index].data_ptr(),
            window=block.window or 0,
        )

    def _matrix(self, linear: Any) -> Matrix:
        """A linear layer's weight in place, its bias in float32.

        Raises:
            UnsuitableError: When the weight is not where transformers put it.
        """
        if type(linear) is not torch.nn.Linear or not linear.weight.is_contiguous():
            raise UnsuitableError("another decoder has packed the model's weights.")
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        return Matrix(
            weight=self._hold(linear.weight.detach()), bias=self._hold(bias), rows=linear.out_features,
            cols=linear.in_features,
        )  # fmt: skip

    def _hold(self, tensor: Tensor | None) -> int | None:
        """The address of a tensor that stays alive as long as this decoder."""
        if tensor is not None:
            self._kept.append(tensor)
        return _address(tensor)


def _address(tensor: Tensor | None) -> int | None:
    """Where a tensor's data lies."""
    return None if tensor is None else tensor.data_ptr()
