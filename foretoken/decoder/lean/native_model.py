"""A model's weights and its slot cache as the native kernels see them: addresses, and the sizes that bound them.

Everything whose address is handed out is checked here, once: dtype, shape, device and that its rows lie one after
another. The kernels check what changes from pass to pass. Memory that moves under a tensor is noticed before a pass
(`has_moved`), and only then: a thread that moves it while the kernels run ends the process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.held_memory import HeldMemory, has_memory, lost_memory
from foretoken.decoder.lean.structures import Layer, Matrix, Model

if TYPE_CHECKING:
    from foretoken.decoder.lean.weights import Block, LeanWeights
    from foretoken.decoder.slot_cache import SlotCache


class NativeModel:
    """What the kernels are handed of a model, and the tensors behind it, which live as long as this.

    Attributes:
        structure: See `decoder.cpp`.
    """

    def __init__(self, weights: LeanWeights, cache: SlotCache, dtype: torch.dtype) -> None:
        """Takes addresses; copies biases that are not in float32 and nothing else.

        Args:
            weights: On a CPU.
            cache: In the same dtype.
            dtype: float32 or bfloat16.

        Raises:
            UnsuitableError: When a weight has been packed, or is not what the sizes of the model say.
        """
        self._weights, self._cache, self._dtype = weights, cache, dtype
        self._kept: list[Tensor] = []
        self._vocab, self._hidden = weights.embedding.shape
        mlp: Any = weights.blocks[0].mlp
        self._intermediate = int(mlp.down_proj.in_features)
        heads, kv_heads, self._head_dim = weights.num_heads, weights.num_kv_heads, weights.head_dim
        if min(heads, kv_heads, self._head_dim, self._hidden, self._intermediate) < 1 or heads % kv_heads:
            raise UnsuitableError(f"{heads} query heads of {self._head_dim} do not share {kv_heads} KV heads.")
        self._layers = (Layer * len(weights.blocks))(*(self._layer(i, b) for i, b in enumerate(weights.blocks)))
        self.structure = self._describe()
        self._memory = HeldMemory(self._kept)

    def has_moved(self) -> bool:
        """Whether the structure no longer says where the tensors lie: another one has to be made."""
        return self._memory.has_changed()

    def _describe(self) -> Model:
        """The whole model."""
        weights, hidden = self._weights, self._hidden
        turns = (weights.cos.shape[0], self._head_dim // 2)
        embedding, head = None, Matrix()
        if self._vocab:
            embedding = self._hold("the embedding", weights.embedding, (self._vocab, hidden), self._dtype)
            head = self._matrix("lm_head", weights.head, int(getattr(weights.head, "out_features", 0)), hidden)
        return Model(
            is_bfloat16=self._dtype == torch.bfloat16,
            num_layers=len(weights.blocks),
            hidden=hidden,
            heads=weights.num_heads,
            kv_heads=weights.num_kv_heads,
            head_dim=self._head_dim,
            intermediate=self._intermediate,
            vocab=self._vocab,
            capacity=self._cache.capacity,
            num_slots=self._cache.num_slots,
            num_positions=turns[0],
            epsilon=weights.epsilon,
            scale=weights.scale,
            embedding=embedding,
            cos=self._hold("the table of cosines", weights.cos, turns),
            sin=self._hold("the table of sines", weights.sin, turns),
            final_norm=self._hold("the final norm", weights.final_norm, (hidden,)),
            head=head,
            layers=self._layers,
        )

    def _layer(self, index: int, block: Block) -> Layer:
        """One layer."""
        weights, attention, mlp = self._weights, block.attention, block.mlp
        hidden, inner, width = self._hidden, self._intermediate, self._head_dim
        queries, values = weights.num_heads * width, weights.num_kv_heads * width
        rows = (self._cache.num_slots, weights.num_kv_heads, self._cache.capacity, width)
        return Layer(
            query=self._matrix("q_proj", attention.q_proj, queries, hidden),
            key=self._matrix("k_proj", attention.k_proj, values, hidden),
            value=self._matrix("v_proj", attention.v_proj, values, hidden),
            output=self._matrix("o_proj", attention.o_proj, hidden, queries),
            gate=self._matrix("gate_proj", mlp.gate_proj, inner, hidden),
            up=self._matrix("up_proj", mlp.up_proj, inner, hidden),
            down=self._matrix("down_proj", mlp.down_proj, hidden, inner),
            attention_norm=self._hold("the norm before attention", block.attention_norm, (hidden,)),
            mlp_norm=self._hold("the norm before the gated layers", block.mlp_norm, (hidden,)),
            query_norm=self._hold_some("the norm of queries", block.query_norm, (width,)),
            key_norm=self._hold_some("the norm of keys", block.key_norm, (width,)),
            keys=self._hold("the keys' cache", self._cache.keys[index], rows, self._dtype),
            values=self._hold("the values' cache", self._cache.values[index], rows, self._dtype),
            window=block.window or 0,
        )

    def _matrix(self, name: str, linear: Any, rows: int, cols: int) -> Matrix:
        """A linear layer's weight in place, its bias in float32.

        Raises:
            UnsuitableError: When the weight is not where transformers put it, or not (rows, cols).
        """
        if type(linear) is not torch.nn.Linear or not linear.weight.is_contiguous():
            raise UnsuitableError("another decoder has packed the model's weights.")
        bias = None if linear.bias is None else linear.bias.detach().float().contiguous()
        return Matrix(
            weight=self._hold(name, linear.weight.detach(), (rows, cols), self._dtype),
            bias=self._hold_some(f"the bias of {name}", bias, (rows,)),
            rows=rows,
            cols=cols,
        )

    def _hold_some(self, name: str, tensor: Tensor | None, shape: tuple[int, ...]) -> int | None:
        """As `_hold`, where there is a tensor."""
        return None if tensor is None else self._hold(name, tensor, shape)

    def _hold(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int:
        """The address of a tensor that stays alive as long as this.

        Raises:
            UnsuitableError: When it is not what the kernels take it for.
        """
        kind = "" if type(tensor) is Tensor else f"a {type(tensor).__name__} "  # of others the address may be 0
        is_as_said = not kind and tensor.shape == shape and tensor.dtype == dtype
        if not is_as_said or not tensor.is_cpu or not tensor.is_contiguous():
            raise UnsuitableError(
                f"{name} is {kind}{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}. Expected {shape} {dtype} "
                "on a CPU, its rows one after another."
            )
        if not has_memory(tensor):
            raise UnsuitableError(lost_memory(tensor))
        self._kept.append(tensor)
        return tensor.data_ptr()
