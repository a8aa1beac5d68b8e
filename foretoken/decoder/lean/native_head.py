"""Draft heads in the memory layout of the native kernels."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.held_memory import HeldMemory, has_memory, lost_memory
from foretoken.decoder.lean.native_linear import NativeLinear
from foretoken.decoder.lean.structures import MatrixStruct, NormStruct
from foretoken.decoder.lean.threads import use_huge_pages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from foretoken.decoder.blocks import Norm


class ScaledEmbedding(NamedTuple):
    """An embedding table.

    Attributes:
        weight: (V, E), or (V, W) for "state".
        scale: Factor of every row.
    """

    weight: Tensor
    scale: float = 1.0


class BiasedNorm(NamedTuple):
    """Computes x / rms(x) * weight + bias; both vectors (W,)."""

    weight: Tensor
    bias: Tensor
    epsilon: float


class LmHead(NamedTuple):
    """A linear layer, and the model's change to logits: softcap * tanh(scale * logit / softcap).

    Attributes:
        layer: (..., W) to (..., Vd).
        scale: 1 for none.
        softcap: 0 for none.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadStep:
    """One step, see the module. Layers come from `fast_linear`.

    Attributes:
        first: (..., (i + 2) E) to (..., 2 W) of "path"; (..., E), later (..., W), to (..., W) of "state".
        norm: Of "state".
        embedding: Of "path" and "state".
        blocks: (..., W) to (..., W).
        head: Computes the logits.
    """

    first: nn.Module | None = None
    norm: BiasedNorm | None = None
    embedding: ScaledEmbedding | None = None
    blocks: Sequence[nn.Module] = ()
    head: LmHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSteps:
    """A head.

    Attributes:
        kind: See the module.
        hidden_size: E.
        width: W.
        vocab_size: V.
        steps: K steps.
        token_map: (Vd,) int64, the token of each row of the LM heads, or None if rows are tokens.
        feature_rms: Root mean square that features of "state" are scaled to, 0 for no scaling.
        feature_epsilon: Added to their mean square.
    """

    kind: Literal["feature", "path", "state"]
    hidden_size: int
    width: int
    vocab_size: int
    steps: Sequence[HeadStep]
    token_map: Tensor | None = None
    feature_rms: float = 0.0
    feature_epsilon: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AutoregressiveSteps:
    """An autoregressive head without its block. Layers come from `fast_linear`.

    Attributes:
        width: W.
        vocab_size: V.
        embedding: (V, W).
        head: (..., W) to (..., Vd) logits.
        token_map: (Vd,) int64, the token of each row of the LM head, or None if rows are tokens.
        fuse: (..., 2 W) to (..., W), or None if the embedding is the block's second input.
        norm: (W,), an RMS norm before the LM head, or None.
        state_norm: (W,), an RMS norm of the state before the block, or None. Only without `fuse`.
        feeds_normed: Whether the next state is the input of the LM head. Only without `fuse`.
    """

    width: int
    vocab_size: int
    embedding: ScaledEmbedding
    head: LmHead
    token_map: Tensor | None = None
    fuse: nn.Module | None = None
    norm: Norm | None = None
    state_norm: Norm | None = None
    feeds_normed: bool = False


class NativeAutoregressiveHead:
    """The kernels' description of an autoregressive head, and its tensors.

    Attributes:
        structure: See `kernels/head_interface.h`.
    """

    def __init__(self, head: AutoregressiveSteps) -> None:
        """Takes addresses; copies the norms and the token map.

        Raises:
            UnsuitableError: If a layer is not native, or a size differs from the head's.
        """
        parts, width = HeadParts(), head.width
        rows = head.vocab_size if head.token_map is None else head.token_map.numel()
        self.structure = AutoregressiveHeadStruct(
            lm_head=parts.layer("the LM head", head.head.layer, rows, width),
            token_map=parts.token_map(head.token_map, head.vocab_size),
            vocab=head.vocab_size,
            **parts.embedding(head.embedding, head.vocab_size, width),
            feeds_normed=head.feeds_normed,
            logit_scale=head.head.scale,
            logit_softcap=head.head.softcap,
        )
        if head.fuse is not None:
            has_norms = head.state_norm is not None or head.feeds_normed
            parts.require(not has_norms, "norms of the state, and a layer that fuses it", "one of them")
            self.structure.fuse = parts.layer("the layer that fuses", head.fuse, width, 2 * width)
        for name, norm in (("norm", head.norm), ("state_norm", head.state_norm)):
            if norm is not None:
                parts.require(norm.kind == "rms", f"a {norm.kind} norm", "an RMS norm")
                setattr(self.structure, name, parts.norm("a norm of the width", norm.weight, None, norm.epsilon, width))
        self._parts, self._memory = parts, parts.held_memory()

    def has_moved(self) -> bool:
        """Whether a tensor has moved, so that the structure is invalid."""
        return self._memory.has_changed()


class HeadMatrix(Structure):
    """A matrix with its dtype."""

    _fields_ = (("matrix", MatrixStruct), ("is_bfloat16", c_int64))


class Step(Structure):
    """The layers that draft the children of the nodes of one depth."""

    _fields_ = (
        ("first", HeadMatrix),
        ("lm_head", HeadMatrix),
        ("norm", NormStruct),
        ("blocks", POINTER(HeadMatrix)),
        ("num_blocks", c_int64),
        ("embedding", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "embedding_is_bfloat16")),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
    )


class HeadStruct(Structure):
    """All steps of a head."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "num_steps", "hidden", "width", "vocab")),
        ("token_map", c_void_p),
        *((name, c_float) for name in ("feature_rms", "feature_epsilon")),
        ("steps", POINTER(Step)),
    )


class AutoregressiveHeadStruct(Structure):
    """A head of one decoder block; the block's output is also the next step's state."""

    _fields_ = (
        ("fuse", HeadMatrix),
        ("lm_head", HeadMatrix),
        ("token_map", c_void_p),
        ("vocab", c_int64),
        ("embedding", c_void_p),
        *((name, c_int64) for name in ("num_tokens", "embedding_is_bfloat16", "feeds_normed")),
        *((name, NormStruct) for name in ("norm", "state_norm")),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
    )


_DTYPES = (torch.float32, torch.bfloat16)


class HeadParts:
    """Takes addresses of tensors and keeps the tensors alive; copies only norms and token maps.

    All methods raise `UnsuitableError` for tensors of a wrong size or kind.
    """

    def __init__(self) -> None:
        """Holds no tensors yet."""
        self._kept: list[Tensor] = []

    def held_memory(self) -> HeldMemory:
        """Moves the tensors taken so far into huge pages; returns their addresses for later checks."""
        use_huge_pages(self._kept)
        return HeldMemory(self._kept)

    def layer(self, name: str, layer: nn.Module | None, rows: int, cols: int) -> HeadMatrix:
        """Describes a linear layer in place."""
        if not isinstance(layer, NativeLinear):
            raise UnsuitableError(f"{name} is a {type(layer).__name__}. Expected a native linear layer.")
        matrix, is_bfloat16 = layer.described()
        self.require(
            (matrix.rows, matrix.cols) == (rows, cols), f"{name} ({matrix.rows}, {matrix.cols})", f"({rows}, {cols})"
        )
        self._kept += layer.tensors()
        return HeadMatrix(matrix=matrix, is_bfloat16=is_bfloat16)

    def embedding(self, embedding: ScaledEmbedding, vocab_size: int, size: int) -> dict[str, int | float]:
        """Returns the fields of an embedding table: at least `vocab_size` rows of `size` elements."""
        weight = embedding.weight.detach()
        self._hold("the embedding", weight, _DTYPES)
        self.require(
            weight.dim() == 2 and weight.shape[0] >= vocab_size and weight.shape[1] == size,
            f"the embedding {tuple(weight.shape)}",
            f"({vocab_size}, {size})",
        )
        return {
            "embedding": weight.data_ptr(),
            "num_tokens": weight.shape[0],
            "embedding_is_bfloat16": weight.dtype == torch.bfloat16,
            "embedding_scale": embedding.scale,
        }

    def norm(self, name: str, weight: Tensor, bias: Tensor | None, epsilon: float, size: int) -> NormStruct:
        """Describes an RMS norm over `size` elements."""
        addresses: list[int | None] = []
        for vector in (weight, bias):
            if vector is None:
                addresses.append(None)
                continue
            self.require(vector.shape == (size,), f"{name} {tuple(vector.shape)}", f"({size},)")
            copy = vector.detach().to(torch.float32, copy=True).contiguous()
            self._hold(name, copy, _DTYPES[:1])
            addresses.append(copy.data_ptr())
        return NormStruct(weight=addresses[0], bias=addresses[1], epsilon=epsilon)

    def token_map(self, tokens: Tensor | None, vocab_size: int) -> int | None:
        """Returns the address of a copy of an LM head's tokens, all below `vocab_size`; None without a map."""
        if tokens is None:
            return None
        copy = tokens.detach().to(torch.int64, copy=True).contiguous()
        self._hold("the token map", copy, (torch.int64,))
        self.require(
            bool(((copy >= 0) & (copy < vocab_size)).all()),
            "a token map beyond the vocabulary",
            f"ids below {vocab_size}",
        )
        return int(copy.data_ptr())

    def _hold(self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        """Keeps a tensor alive after a check of its class, dtype and memory."""
        is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in dtypes and tensor.is_contiguous()
        self.require(is_plain, f"{name} is {type(tensor).__name__} {tensor.dtype}", "a plain tensor on a CPU")
        if not has_memory(tensor):
            raise UnsuitableError(lost_memory(tensor))
        self._kept.append(tensor)

    @staticmethod
    def require(condition: bool, found: str, expected: str) -> None:
        """Raises `UnsuitableError` unless a size or kind is as expected."""
        if not condition:
            raise UnsuitableError(f"the head has {found}. Its kernels expect {expected}.")


_KINDS = {"feature": 0, "path": 1, "state": 2}


class NativeHead:
    """The kernels' description of a head, and its tensors.

    Attributes:
        structure: See `kernels/head_interface.h`.
    """

    def __init__(self, head: HeadSteps) -> None:
        """Takes addresses; copies only norms and the token map.

        Raises:
            UnsuitableError: If a layer is not native, or a size differs from the head's.
        """
        self._head, self._parts = head, HeadParts()
        self._blocks = [
            (HeadMatrix * len(step.blocks))(
                *(self._parts.layer("a block", each, head.width, head.width) for each in step.blocks)
            )
            for step in head.steps
        ]
        self._steps = (Step * len(head.steps))(*map(self._step, range(len(head.steps))))
        self.structure = HeadStruct(
            kind=_KINDS[head.kind],
            num_steps=len(head.steps),
            hidden=head.hidden_size,
            width=head.width,
            vocab=head.vocab_size,
            token_map=self._parts.token_map(head.token_map, head.vocab_size),
            feature_rms=head.feature_rms,
            feature_epsilon=head.feature_epsilon,
            steps=self._steps,
        )
        self._memory = self._parts.held_memory()

    def has_moved(self) -> bool:
        """Whether a tensor has moved, so that the structure is invalid."""
        return self._memory.has_changed()

    def _step(self, index: int) -> Step:
        head, step, parts = self._head, self._head.steps[index], self._parts
        rows = head.vocab_size if head.token_map is None else head.token_map.numel()
        made = {
            "lm_head": parts.layer("the LM head", step.head.layer, rows, head.width),
            "logit_scale": step.head.scale,
            "logit_softcap": step.head.softcap,
            "blocks": self._blocks[index],
            "num_blocks": len(step.blocks),
        }
        if head.kind == "feature":
            parts.require(head.width == head.hidden_size, f"a width of {head.width}", f"{head.hidden_size}")
            return Step(**made)
        parts.require(step.first is not None and step.embedding is not None, "a step without a part", "all of them")
        assert step.embedding is not None, "just looked"
        if head.kind == "path":
            size, inputs, outputs = head.hidden_size, (index + 2) * head.hidden_size, 2 * head.width
        else:
            size, inputs, outputs = head.width, head.width if index else head.hidden_size, head.width
            parts.require(step.norm is not None, "a step without a norm", f"({size},)")
            assert step.norm is not None, "just looked"
            made["norm"] = parts.norm("a step's norm", *step.norm, size)
        return Step(
            **made,
            first=parts.layer("the first layer of a step", step.first, outputs, inputs),
            **parts.embedding(step.embedding, head.vocab_size, size),
        )
