"""Drafts whole trees with a head in one call of the native kernels: all steps and choices of children.

Letters: B sequences, E hidden size.
"""

from __future__ import annotations

from ctypes import byref, c_int64, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.decoder.arguments import AutoregressiveHeadStruct, HeadMatrix, HeadStruct, NormStruct, Status, Step
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.library import kernel_threads, native_library
from foretoken.decoder.memory import Described, HeldMemory, has_memory, lost_memory, use_huge_pages
from foretoken.decoder.native import NativeDraft, can_draft
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import QuantizedMatrix, matrix_struct
from foretoken.trees.dynamic import DynamicExpansion, ShapedExpansion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from foretoken.core.passes import Pass
    from foretoken.decoder.block_stack import BlockStack
    from foretoken.decoder.blocks import Norm


class ScaledEmbedding(NamedTuple):
    """An embedding table, (V, E), or (V, W) in heads of kind "state", and a factor for every row."""

    weight: Tensor | QuantizedMatrix
    scale: float = 1.0


class BiasedNorm(NamedTuple):
    """Computes x / rms(x) * weight + bias; both vectors (W,)."""

    weight: Tensor
    bias: Tensor
    epsilon: float


class LmHead(NamedTuple):
    """A linear layer, (..., W) to (..., Vd), and the model's change of logits: softcap * tanh(scale * logit / softcap).

    A `scale` of 1 and a `softcap` of 0 change nothing.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadStep:
    """One step, see `kernels/interface.h`. Layers come from `fast_linear`.

    Attributes:
        first: (..., (i + 2) E) to (..., 2 W) of "path"; (..., E), later (..., W), to (..., W) of "state".
        norm: Of "state".
        embedding: Of "path" and "state".
        blocks: (..., W) to (..., W).
    """

    first: nn.Module | None = None
    norm: BiasedNorm | None = None
    embedding: ScaledEmbedding | None = None
    blocks: Sequence[nn.Module] = ()
    head: LmHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSteps:
    """A head with K steps over sizes E, W and V; `kind`: see `kernels/interface.h`.

    Attributes:
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


class NativeAutoregressiveHead(Described):
    """The kernels' description of an autoregressive head, and its tensors; `structure`: see `kernels/interface.h`."""

    def __init__(self, head: AutoregressiveSteps) -> None:
        """Copies norms; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        super().__init__(head)
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
        self._parts, self._memory = parts, parts.held()


_DTYPES = (torch.float32, torch.bfloat16)


class HeadParts:
    """Takes addresses of tensors and keeps the tensors alive; raises `UnsuitableError` for a wrong size or kind."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def held(self) -> HeldMemory:
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

    def embedding(self, embedding: ScaledEmbedding, vocab_size: int, size: int) -> dict[str, HeadMatrix | float]:
        """Returns the fields of an embedding table: at least `vocab_size` rows of `size` elements."""
        table = embedding.weight.detach() if isinstance(embedding.weight, Tensor) else embedding.weight
        for each in (table,) if isinstance(table, Tensor) else table.tensors():
            self._keep_alive("the embedding", each, _DTYPES if each is table else (each.dtype,))
        self.require(
            len(table.shape) == 2 and table.shape[0] >= vocab_size and table.shape[1] == size,
            f"the embedding {tuple(table.shape)}",
            f"({vocab_size}, {size})",
        )
        described = HeadMatrix(matrix=matrix_struct(table), is_bfloat16=table.dtype == torch.bfloat16)
        return {"embedding": described, "embedding_scale": embedding.scale}

    def norm(self, name: str, weight: Tensor, bias: Tensor | None, epsilon: float, size: int) -> NormStruct:
        """Describes an RMS norm over `size` elements."""
        addresses: list[int | None] = []
        for vector in (weight, bias):
            if vector is None:
                addresses.append(None)
                continue
            self.require(vector.shape == (size,), f"{name} {tuple(vector.shape)}", f"({size},)")
            copy = vector.detach().to(torch.float32, copy=True).contiguous()
            self._keep_alive(name, copy, _DTYPES[:1])
            addresses.append(copy.data_ptr())
        return NormStruct(weight=addresses[0], bias=addresses[1], epsilon=epsilon)

    def token_map(self, tokens: Tensor | None, vocab_size: int) -> int | None:
        """Returns the address of an LM head's tokens, all below `vocab_size`; None without a map.

        The kernels read the tensor itself: rows may be exchanged for those of other tokens.
        """
        if tokens is None:
            return None
        self._keep_alive("the token map", tokens.detach(), (torch.int64,))
        self.require(
            bool(((tokens >= 0) & (tokens < vocab_size)).all()),
            "a token map beyond the vocabulary",
            f"ids below {vocab_size}",
        )
        return int(tokens.data_ptr())

    def _keep_alive(self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
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


class NativeHead(Described):
    """The kernels' description of a head, and its tensors; `structure`: see `kernels/interface.h`."""

    def __init__(self, head: HeadSteps) -> None:
        """Copies norms; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        super().__init__(head)
        self._head, self._parts = head, HeadParts()
        self._blocks = [
            (HeadMatrix * len(step.blocks))(
                *(self._parts.layer("a block", each, head.width, head.width) for each in step.blocks)
            )
            for step in head.steps
        ]
        self._steps = (Step * len(head.steps))(*map(self._describe_step, range(len(head.steps))))
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
        self._memory = self._parts.held()

    def _describe_step(self, index: int) -> Step:
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


class HeadKernels:
    """Drafts with one head."""

    def __init__(self, head: HeadSteps) -> None:
        """Compiles the kernels if needed; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        self._head, self._native = head, NativeHead(head)
        self._is_shared = head.kind == "feature"
        self._library = native_library()
        self._idle: list[Tensor] = []  # workspaces; two Python threads never share one

    def can_fill(self, expansion: ShapedExpansion) -> bool:
        """Decides whether the kernels can choose children for the requests, and the head has a step for every level."""
        if (self._is_shared and isinstance(expansion, DynamicExpansion)) or expansion.draws.floors is not None:
            return False
        return expansion.depth <= len(self._head.steps) and can_draft(expansion, self._head.vocab_size)

    def fill(self, expansion: ShapedExpansion, features: Tensor) -> None:
        """Fills a tree of roots that `can_fill` accepts, in place.

        `features`: (B, E) float32, the target's at the last committed position. Raises `PassError` if the features do
        not fit, a root is not in the vocabulary, or memory is too small.
        """
        batch = len(expansion.roots)
        if features.shape != (batch, self._head.hidden_size) or features.dtype is not torch.float32:
            expected = (batch, self._head.hidden_size)
            raise PassError(f"features are {tuple(features.shape)} {features.dtype}. Expected {expected} float32.")
        features = features.contiguous()
        self._native = native = self._native.current()
        draft = NativeDraft(expansion, self._head.vocab_size, is_shared=self._is_shared)
        num_rows = c_int64(batch * (expansion.depth if self._is_shared else expansion.widest_level))
        workspace = self._take_workspace(native, draft, num_rows)
        status = self._library.foretoken_head_draft(
            byref(native.structure), byref(draft.arguments), c_void_p(features.data_ptr()), num_rows,
            c_int64(kernel_threads()), c_void_p(workspace.data_ptr()),
        )  # fmt: skip
        self._idle.append(workspace)
        if status == Status.TOKENS:
            roots, vocab = expansion.roots.tolist(), self._head.vocab_size
            raise PassError(f"the roots are {roots}. Expected ids below {vocab}, the head's vocabulary.")
        if status:
            raise PassError(f"the draft does not fit: {Status(status).name}. Expected a tree level by level.")

    def _take_workspace(self, native: NativeHead, draft: NativeDraft, num_rows: c_int64) -> Tensor:
        size = self._library.foretoken_head_draft_bytes(byref(native.structure), byref(draft.arguments), num_rows)
        try:
            workspace = self._idle.pop()
        except IndexError:
            workspace = torch.empty(0, dtype=torch.uint8, device="cpu")
        if 0 <= size <= len(workspace):
            return workspace
        try:
            return torch.empty(size, dtype=torch.uint8, device="cpu")
        except RuntimeError as err:  # torch has no type for it; a negative size stands for one beyond 64 bits
            raise PassError(
                f"there is no memory for drafts of {num_rows.value} rows. Draft for fewer at once."
            ) from err


class AutoregressiveKernels:
    """Drafts with one head and the KV rows of its block."""

    def __init__(self, head: AutoregressiveSteps, stack: BlockStack) -> None:
        """Takes addresses; raises `UnsuitableError` if block or head do not run on the native kernels.

        The cache of the stack has room for drafted nodes behind the committed rows.
        """
        blocks = stack.native_blocks
        if blocks is None:
            raise UnsuitableError(f"the block runs on {stack.backend}. Expected the native kernels.")
        if (head.width, head.fuse is None) != (stack.hidden_size, stack.has_side):
            raise UnsuitableError(
                f"the head is {head.width} wide, {'without' if head.fuse is None else 'with'} a layer that fuses, and "
                f"the block {stack.hidden_size}, {'with' if stack.has_side else 'without'} a second input. Expected "
                "the same width, and one of the two."
            )
        self._head, self._native, self._blocks = head, NativeAutoregressiveHead(head), blocks

    def can_draft(self, expansion: ShapedExpansion) -> bool:
        """Decides whether there is a level, and the kernels can choose children for the requests."""
        return expansion.depth > 0 and can_draft(expansion, self._head.vocab_size)

    def draft(self, work: Pass, states: Tensor, expansion: ShapedExpansion) -> None:
        """Feeds pairs and fills the trees behind them; the rows of the pairs stay in the cache.

        Args:
            work: The pairs' tokens, positions and slots; `logit_rows` is the last pair of each sequence, which has the
                root and the feature before it. Drafted nodes use the cache rows behind the pairs.
            states: (M, W) float32, of committed positions.
            expansion: Trees of roots that `can_draft` accepts, of the sequences of the pass; changed.

        Raises:
            PassError: If something does not fit the block, the cache or the head, memory is too small, or a weight's
                memory was freed.
        """
        self._native = native = self._native.current()  # kept until the end: another thread may replace it
        self._blocks.draft_head_trees(work, states, expansion, native.structure)
