"""Describes decoder blocks and their tensors, for all backends and all users of blocks.

    h = inputs + attention_factor * post(output(attention(norm(inputs))))
    outputs = h + mlp_factor * post(mlp(norm(h)))

Each of the norms is optional, and factors are 1 in most architectures. `mlp` is one feed-forward layer, gated or not,
or a mixture of experts. Attention is grouped-query attention with rotary positions.

A recurrent block has another mixer in place of attention, see `RecurrentBlock`; some blocks have both. In some
architectures a block is one of the two lines alone.

Letters: E hidden size, H query heads, Hk KV heads, D head size, I width of the feed-forward layer, P positions, R
rotated elements of a head, X experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from foretoken.core.checks import require
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.memory import is_plain
from foretoken.decoder.quantized import QuantizedMatrix
from foretoken.decoder.quantized_modules import QuantizedLinear

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

    from foretoken.core.passes import Tap
    from foretoken.decoder.mixers import LinearAttention, ShortConvolution

Activation = Literal["silu", "gelu_tanh", "gelu", "relu2"]


class Part:
    """A part of blocks."""

    __slots__: tuple[str, ...] = ()

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor except the rotary tables."""
        for name in self.__slots__:
            yield from _tensors_in(getattr(self, name))


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Part | QuantizedMatrix):
        yield from value.tensors()
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors_in(each)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Matrix(Part):
    """A linear layer.

    Attributes:
        weight: (outputs, inputs), in the dtype of the blocks, or in 4 or 8 bits. For a parameter, backends follow its
            memory, and may turn it into a view of joined weights, see `FusedLinear`.
        bias: (outputs,), any dtype, or None.
    """

    weight: Tensor | QuantizedMatrix
    bias: Tensor | None = None

    @classmethod
    def of(cls, linear: nn.Linear | QuantizedLinear) -> Matrix:
        """Returns the matrix of a module, in place."""
        weight = linear.matrix if isinstance(linear, QuantizedLinear) else linear.weight
        return cls(weight=weight, bias=linear.bias)

    def dense(self) -> Tensor:
        """Returns a weight in the dtype of the blocks; raises `UnsuitableError` for one in 4 or 8 bits."""
        return _dense(self.weight)


def _dense(weight: Tensor | QuantizedMatrix) -> Tensor:
    if not isinstance(weight, Tensor):
        raise UnsuitableError(f"only native kernels on CPUs run weights in {weight.bits} bits.")
    return weight


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Norm(Part):
    """A norm over the last dimension.

    Attributes:
        weight: (N,) factor, in float32, or in float64 if the blocks are. Architectures that store the factor minus one
            (Gemma) give the whole factor here.
        bias: (N,) in the same dtype, or None; of layer norms only.
        epsilon: Added to the mean square, or to the variance.
        kind: "rms", or "layer" (mean subtracted).
    """

    weight: Tensor
    bias: Tensor | None = None
    epsilon: float
    kind: Literal["rms", "layer"] = "rms"

    def __post_init__(self) -> None:
        require(self.bias is None or self.kind == "layer", "an RMS norm has no bias")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rotary:
    """Rotary positions: element i of the first R of a head is paired with element i + R / 2; the rest stays.

    The tables are (P, R / 2), with all scaling, in float32, or in float64 if the blocks are.
    """

    cos: Tensor
    sin: Tensor

    @classmethod
    def plain(
        cls, *, num_positions: int, head_dim: int, theta: float = 10000.0, device: torch.device | str = "cpu"
    ) -> Rotary:
        """Returns float32 tables without scaling; `head_dim` is R, `theta` the base of the frequencies."""
        steps = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
        angles = torch.arange(num_positions, device=device).unsqueeze(1) * theta**-steps
        return cls(cos=angles.cos(), sin=angles.sin())


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSpec:
    """Sizes and options of a block.

    Attributes:
        num_kv_heads: Hk, a divisor of H.
        scale: Factor of the dot products of attention; D ** -0.5 when None.
        softcap: c in c tanh(score / c), or None.
        window: A token only sees keys less than this many positions back; None for all.
        activation: Of the feed-forward layers; "gelu_tanh" is the tanh approximation, "relu2" max(x, 0) ** 2.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float | None = None
    softcap: float | None = None
    window: int | None = None
    activation: Activation = "silu"

    def __post_init__(self) -> None:
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim)
        require(
            min(sizes) > 0 and self.num_heads % self.num_kv_heads == 0,
            f"{self.num_heads} query heads of {self.head_dim} do not share {self.num_kv_heads} KV heads",
        )
        require(self.window is None or self.window > 0, f"the window is {self.window}")
        require(self.softcap is None or self.softcap > 0, f"the softcap is {self.softcap}")

    @property
    def attention_scale(self) -> float:
        """Factor of the dot products."""
        return self.head_dim**-0.5 if self.scale is None else self.scale


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedForward(Part):
    """Computes down(activation(gate_factor * gate(x)) * up(x)), or down(activation(up(x))).

    Attributes:
        gate: (I, E), or None.
        up: (I, E).
        down: (E, I).
        gate_factor: 1 without a gate.
    """

    gate: Matrix | None
    up: Matrix
    down: Matrix
    gate_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts(Part):
    """Feed-forward layers; each token takes the `top_k` with the greatest scores, and the shared one.

    The scores of a token are softmax(router(x)), or sigmoid(router(x)). They are the weights of its experts.

    Attributes:
        router: (X, E).
        gate_up: (X, 2 I, E), gate first; in 4 or 8 bits, the 2 X matrices (I, E) one below another, see `stacked`.
            Layers without a gate: (X, I, E), and X matrices.
        down: (X, E, I); in 4 or 8 bits as `gate_up`.
        is_normalized: Whether the weights of a token's experts are divided by their sum, plus `epsilon`.
        is_gated: Whether the layers have gates.
        is_sigmoid: Whether scores are sigmoids.
        score_bias: (X,), added to scores where experts are chosen, not to weights; or None.
        factor: Of the weights in the end.
        shared: A layer that every token takes, added to the others; or None.
        shared_gate: (1, E): the outputs of `shared` are multiplied with sigmoid(shared_gate(x)). None for 1.
    """

    router: Matrix
    gate_up: Tensor | QuantizedMatrix
    down: Tensor | QuantizedMatrix
    top_k: int
    is_normalized: bool
    epsilon: float = 0.0
    is_gated: bool = True
    is_sigmoid: bool = False
    score_bias: Tensor | None = None
    factor: float = 1.0
    shared: FeedForward | None = None
    shared_gate: Matrix | None = None

    def __post_init__(self) -> None:
        require(self.shared is not None or self.shared_gate is None, "a gate of no shared expert")
        require(1 <= self.top_k <= self.count, f"a token takes {self.top_k} of {self.count} experts")

    @property
    def count(self) -> int:
        """X."""
        return int(self.router.weight.shape[0])

    @property
    def intermediate(self) -> int:
        """I."""
        return int(self.down.shape[-1])

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights and numbers of each token's experts, (M, top_k) each; logits: (M, X), of the router."""
        scores = logits.sigmoid() if self.is_sigmoid else logits.softmax(-1)
        biased = scores if self.score_bias is None else scores + self.score_bias
        chosen = biased.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.is_normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + self.epsilon)
        return weights * self.factor, chosen

    def dense(self) -> tuple[Tensor, Tensor]:
        """Returns `gate_up` and `down`; raises `UnsuitableError` for experts in 4 or 8 bits."""
        return _dense(self.gate_up), _dense(self.down)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Side(Part):
    """A second input of a block: attention reads [norm(side input); attention_norm(inputs)], twice as wide."""

    norm: Norm


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block(Part):
    """One decoder block.

    Attributes:
        query: (H D, E), or (H D, 2 E) with a second input.
        key: (Hk D, E), or (Hk D, 2 E).
        output: (E, H D).
        mlp: None for attention alone.
        side: The second input or None; of the first block alone.
        attention_norm: (E,), before attention, or None.
        attention_post_norm: (E,), of attention's output before it is added, or None.
        mlp_norm: (E,), before the feed-forward layer, or None.
        mlp_post_norm: (E,), of the feed-forward output before it is added, or None.
        query_norm: (D,), of each head before its rotation, or (H D,), of all heads at once; or None.
        key_norm: (D,) or (Hk D,), as `query_norm`.
        rotary: None for a block without positions.
        gates_heads: Whether the rows of `query` of each head are followed by as many of a gate: the head's output is
            multiplied with sigmoid(gate). `query` is (2 H D, E) then.
        beside: Another mixer of the same inputs; its outputs are added too. Or None.
        attention_factor: Of what attention adds.
        mlp_factor: Of what the feed-forward layer adds.
    """

    spec: BlockSpec
    query: Matrix
    key: Matrix
    value: Matrix
    output: Matrix
    mlp: FeedForward | Experts | None
    side: Side | None = None
    attention_norm: Norm | None = None
    attention_post_norm: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post_norm: Norm | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    rotary: Rotary | None = None
    gates_heads: bool = False
    beside: ShortConvolution | LinearAttention | None = None
    attention_factor: float = 1.0
    mlp_factor: float = 1.0

    def __post_init__(self) -> None:
        require((self.query_norm is None) == (self.key_norm is None), "queries and keys both have norms, or neither")

    def without_gates(self) -> tuple[Matrix, Matrix | None]:
        """Returns the matrices of queries and of gates, (H D, E) each; no gates if the block has none.

        Raises `UnsuitableError` for gates in 4 or 8 bits.
        """
        if not self.gates_heads:
            return self.query, None
        shape, bias = (self.spec.num_heads, 2, self.spec.head_dim), self.query.bias
        weights = self.query.dense().unflatten(0, shape).unbind(1)
        biases = [None, None] if bias is None else bias.unflatten(0, shape).unbind(1)
        query, gate = (
            Matrix(weight=weight.flatten(0, 1), bias=None if own is None else own.flatten())
            for weight, own in zip(weights, biases, strict=True)
        )
        return query, gate

    @property
    def norms_all_heads(self) -> bool:
        """Whether one norm covers all heads of a token's queries or keys."""
        return self.query_norm is not None and self.query_norm.weight.shape[0] != self.spec.head_dim


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecurrentBlock(Part):
    """One decoder block without attention: reads the state behind a token's parent in place of a KV cache.

    Attributes:
        mlp: None for the mixer alone.
        attention_norm: (E,), before the mixer.
        mlp_norm: (E,), before the feed-forward layer.
        activation: Of the feed-forward layers.
        mlp_factor: Of what the feed-forward layer adds.
    """

    mixer: ShortConvolution | LinearAttention
    mlp: FeedForward | Experts | None
    attention_norm: Norm | None = None
    mlp_norm: Norm | None = None
    activation: Activation = "silu"
    mlp_factor: float = 1.0

    @property
    def output(self) -> Matrix:
        """(E, C), of the mixer's outputs."""
        return self.mixer.output


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FeedForwardBlock(Part):
    """One decoder block without attention and mixer; its attributes are those of `RecurrentBlock`."""

    mlp: FeedForward | Experts
    mlp_norm: Norm | None = None
    activation: Activation = "silu"
    mlp_factor: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks(Part):
    """Blocks in order, all of the same hidden size and heads, and the (E,) norm after the last block.

    At least one of the blocks has attention or a mixer.
    """

    blocks: Sequence[Block | RecurrentBlock | FeedForwardBlock]
    final_norm: Norm | None = None

    def __post_init__(self) -> None:
        is_mixed = any(not isinstance(block, FeedForwardBlock) for block in self.blocks)
        require(is_mixed, "there is at least one block with attention or a mixer")
        require(not any(block.side for block in self.attention[1:]), "only the first block has a second input")

    @property
    def attention(self) -> list[Block]:
        """The blocks with attention."""
        return [block for block in self.blocks if isinstance(block, Block)]

    @property
    def mixers(self) -> list[ShortConvolution | LinearAttention]:
        """The recurrent parts of the blocks, in place of attention or beside it."""
        mixers = [block.mixer for block in self.blocks if isinstance(block, RecurrentBlock)]
        return mixers + [block.beside for block in self.attention if block.beside is not None]

    @property
    def is_plain(self) -> bool:
        """Whether every block has attention and a feed-forward layer, and nothing beside or behind them."""
        plain = [each for each in self.attention if each.beside is None and each.mlp]
        return len(plain) == len(self.blocks)

    @property
    def _weight(self) -> Tensor | QuantizedMatrix:
        return next(block for block in self.blocks if not isinstance(block, FeedForwardBlock)).output.weight

    @property
    def hidden_size(self) -> int:
        """E."""
        return int(self._weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all matrices."""
        return self._weight.dtype

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self._weight.device

    @property
    def has_side(self) -> bool:
        """Whether the first block has a second input."""
        first = self.blocks[0]
        return isinstance(first, Block) and first.side is not None

    @property
    def has_experts(self) -> bool:
        """Whether some block is a mixture of experts."""
        return any(isinstance(block.mlp, Experts) for block in self.blocks)


class ScaledEmbedding(NamedTuple):
    """An embedding table, (V, E), and a factor for every row."""

    weight: Tensor | QuantizedMatrix
    scale: float = 1.0


class LmHead(NamedTuple):
    """A linear layer, (..., E) to (..., V), and the model's change of logits: softcap * tanh(scale * logit / softcap).

    A `scale` of 1 and a `softcap` of 0 change nothing.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeanWeights:
    """A model for lean decoders.

    Attributes:
        embedding: (V, E), in the dtype of the blocks, or in 4 or 8 bits with this dtype.
        head: The LM head module; a tied one may have the embedding as its weight.
        head_tokens: (R,) int64, the token of each row of a head that has not all rows; None: row i is token i.
        logit_scale: Factor of the logits, before they are capped.
        logit_softcap: c in c tanh(logit / c), or None.
        is_borrowed: Whether the weights are the caller's and must not be moved.
    """

    embedding: Tensor | QuantizedMatrix
    embedding_scale: float = 1.0
    layers: Blocks
    head: nn.Module
    head_tokens: Tensor | None = None
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    is_borrowed: bool

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers.blocks)

    @property
    def vocab_size(self) -> int:
        """V, the width of the logits."""
        head: Any = self.head
        return int(head.out_features) if self.head_tokens is None else int(self.embedding.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all matrices."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.embedding.device

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor with readable memory except the rotary tables."""
        own = (*self.head.parameters(), *self.head.buffers())
        yield from filter(is_plain, (*_tensors_in(self.embedding), *self.layers.tensors(), *own))


def tap_indices(taps: Sequence[Tap], num_layers: int) -> list[int]:
    """Returns boundary indices of taps, `final` one past the last output; raises `UnsuitableError` for unknown taps."""
    indices = [num_layers + 1 if tap == "final" else tap for tap in taps]
    if any(not isinstance(i, int) or not 0 <= i <= num_layers + 1 for i in indices) or num_layers + 1 in taps:
        raise UnsuitableError(f"taps {list(taps)} do not all exist.")
    return [int(i) for i in indices]
