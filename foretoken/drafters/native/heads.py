"""Drafts whole trees with a head in one call of the native kernels: all steps and choices of children.

Letters: B sequences, E hidden size, W width of the LM head's inputs.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int64, c_void_p
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.backend import kernel_threads
from foretoken.core.errors import PassError
from foretoken.decoder.arguments import MatrixStruct, NormStruct, Status
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.library import native_library
from foretoken.decoder.memory import Described, HeldMemory, has_memory, lost_memory, use_huge_pages
from foretoken.decoder.native import DTYPES, Workspaces, fitting, range_of
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import matrix_struct
from foretoken.drafters.native.trees import NativeDraft, can_draft
from foretoken.trees.dynamic import DynamicExpansion, ShapedExpansion

if TYPE_CHECKING:
    from foretoken.core.passes import Pass
    from foretoken.decoder.block_stack import BlockStack
    from foretoken.decoder.blocks import LmHead, Norm, ScaledEmbedding
    from foretoken.heads.steps import AutoregressiveSteps, HeadSteps


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
        ("embedding", HeadMatrix),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
    )


class HeadStruct(Structure):
    """All steps of a head, `Head` in `kernels/heads.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("kind", "num_steps", "hidden", "width", "vocab")),
        ("token_map", c_void_p),
        *((name, c_float) for name in ("feature_rms", "feature_epsilon")),
        ("steps", POINTER(Step)),
    )


_NORMS = ("norm", "state_norm", "embedding_norm")


class AutoregressiveHeadStruct(Structure):
    """A head of one decoder block, `AutoregressiveHead` in `kernels/trees.h`."""

    _fields_ = (
        ("fuse", HeadMatrix),
        ("lm_head", HeadMatrix),
        ("token_map", c_void_p),
        ("vocab", c_int64),
        ("embedding", HeadMatrix),
        ("feeds_normed", c_int64),
        *((name, NormStruct) for name in _NORMS),
        *((name, c_float) for name in ("embedding_scale", "logit_scale", "logit_softcap")),
    )


class _Parts:
    """Takes addresses of tensors and keeps the tensors alive; raises `UnsuitableError` for a wrong size or kind."""

    def __init__(self, vocab_size: int, token_map: Tensor | None) -> None:
        self._kept: list[Tensor] = []
        self._vocab_size, self._tokens = vocab_size, token_map
        self._num_rows = vocab_size if token_map is None else token_map.numel()

    def held(self) -> HeldMemory:
        """Moves the tensors taken so far into huge pages; returns their addresses for later checks."""
        use_huge_pages(self._kept)
        return HeldMemory(self._kept)

    def layer(self, name: str, layer: nn.Module | None, rows: int, cols: int) -> HeadMatrix:
        """Describes a linear layer in place."""
        if not isinstance(layer, NativeLinear):
            raise UnsuitableError(f"{name} is a {type(layer).__name__}. Expected a native linear layer.")
        matrix, is_bfloat16 = layer.described()
        found = matrix.rows, matrix.cols
        self.require(found == (rows, cols), f"{name} {found}", f"({rows}, {cols})")
        self._kept += layer.tensors()
        return HeadMatrix(matrix=matrix, is_bfloat16=is_bfloat16)

    def lm_head(self, head: LmHead, width: int) -> dict[str, HeadMatrix | float]:
        """Returns the fields of an LM head."""
        matrix = self.layer("the LM head", head.layer, self._num_rows, width)
        return {"lm_head": matrix, "logit_scale": head.scale, "logit_softcap": head.softcap}

    def embedding(self, embedding: ScaledEmbedding, size: int) -> dict[str, HeadMatrix | float]:
        """Returns the fields of an embedding table with a row of `size` elements for every token."""
        table = embedding.weight.detach() if isinstance(embedding.weight, Tensor) else embedding.weight
        for each in (table,) if isinstance(table, Tensor) else table.tensors():
            self._keep_alive("the embedding", each, DTYPES if each is table else (each.dtype,))
        shape = tuple(table.shape)
        is_large = len(shape) == 2 and shape[0] >= self._vocab_size and shape[1] == size
        self.require(is_large, f"the embedding {shape}", f"({self._vocab_size}, {size})")
        described = HeadMatrix(matrix=matrix_struct(table), is_bfloat16=table.dtype == torch.bfloat16)
        return {"embedding": described, "embedding_scale": embedding.scale}

    def norm(self, weight: Tensor, bias: Tensor | None, epsilon: float, size: int) -> NormStruct:
        """Describes an RMS norm over `size` elements; copies its vectors."""
        struct = NormStruct(epsilon=epsilon)
        for field, vector in (("weight", weight), ("bias", bias)):
            if vector is not None:
                self.require(vector.shape == (size,), f"the {field} of a norm {tuple(vector.shape)}", f"({size},)")
                copy = vector.detach().to(torch.float32, copy=True).contiguous()
                self._keep_alive("a norm", copy, (torch.float32,))
                setattr(struct, field, copy.data_ptr())
        return struct

    def token_map(self) -> int | None:
        """Returns the address of the LM head's tokens; None without a map.

        The kernels read the tensor itself: rows may be exchanged for those of other tokens.
        """
        tokens, size = self._tokens, self._vocab_size
        if tokens is None:
            return None
        self._keep_alive("the token map", tokens.detach(), (torch.int64,))
        is_within = bool(((tokens >= 0) & (tokens < size)).all())
        self.require(is_within, "a token map beyond the vocabulary", f"ids below {size}")
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
    """The kernels' description of a head, and its tensors."""

    def __init__(self, head: HeadSteps) -> None:
        """Copies norms; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        super().__init__(head)
        self._head, self._parts = head, _Parts(head.vocab_size, head.token_map)
        self._steps = (Step * len(head.steps))(*map(self._describe_step, range(len(head.steps))))
        self.structure = HeadStruct(
            kind=_KINDS[head.kind],
            num_steps=len(head.steps),
            hidden=head.hidden_size,
            width=head.width,
            vocab=head.vocab_size,
            token_map=self._parts.token_map(),
            feature_rms=head.feature_rms,
            feature_epsilon=head.feature_epsilon,
            steps=self._steps,
        )
        self._memory = self._parts.held()

    def _describe_step(self, index: int) -> Step:
        head, step, parts = self._head, self._head.steps[index], self._parts
        blocks = [parts.layer("a block", each, head.width, head.width) for each in step.blocks]
        made: dict[str, Any] = parts.lm_head(step.head, head.width)
        made |= {"blocks": (HeadMatrix * len(blocks))(*blocks), "num_blocks": len(blocks)}
        if head.kind == "feature":
            parts.require(head.width == head.hidden_size, f"a width of {head.width}", f"{head.hidden_size}")
            return Step(**made)
        if step.embedding is None:
            raise UnsuitableError("the head has a step without an embedding. Its kernels expect one.")
        if head.kind == "path":
            size, inputs, outputs = head.hidden_size, (index + 2) * head.hidden_size, 2 * head.width
        else:
            size, inputs, outputs = head.width, head.width if index else head.hidden_size, head.width
            if step.norm is None:
                raise UnsuitableError("the head has a step without a norm. Its kernels expect one.")
            made["norm"] = parts.norm(*step.norm, size)
        first = parts.layer("the first layer of a step", step.first, outputs, inputs)
        return Step(**made, first=first, **parts.embedding(step.embedding, size))


class NativeAutoregressiveHead(Described):
    """The kernels' description of an autoregressive head, and its tensors."""

    def __init__(self, head: AutoregressiveSteps) -> None:
        """Copies norms; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        super().__init__(head)
        parts, width = _Parts(head.vocab_size, head.token_map), head.width
        fields: dict[str, Any] = {**parts.lm_head(head.head, width), **parts.embedding(head.embedding, width)}
        if head.fuse is not None:
            fields["fuse"] = parts.layer("the layer that fuses", head.fuse, width, 2 * width)
        for name in _NORMS:
            norm: Norm | None = getattr(head, name)
            if norm is not None:
                parts.require(norm.kind == "rms", f"a {norm.kind} norm", "an RMS norm")
                fields[name] = parts.norm(norm.weight, None, norm.epsilon, width)
        self.structure = AutoregressiveHeadStruct(
            token_map=parts.token_map(), vocab=head.vocab_size, feeds_normed=head.feeds_normed, **fields
        )
        self._parts, self._memory = parts, parts.held()


class HeadKernels:
    """Drafts with one head."""

    def __init__(self, head: HeadSteps) -> None:
        """Compiles the kernels if needed; raises `UnsuitableError` if a layer is not native or has a wrong size."""
        self._head, self._native = head, NativeHead(head)
        self._is_shared = head.kind == "feature"
        self._library, self._workspaces = native_library(), Workspaces()

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
        batch, vocab = len(expansion.roots), self._head.vocab_size
        (features,) = fitting(("features", features, torch.float32, (batch, self._head.hidden_size)))
        self._native = native = self._native.current()
        draft = NativeDraft(expansion, vocab, is_shared=self._is_shared)
        num_rows = c_int64(batch * (expansion.depth if self._is_shared else expansion.widest_level))
        head, drawn = byref(native.structure), byref(draft.arguments)
        size = self._library.foretoken_head_draft_bytes(head, drawn, num_rows)
        memory = self._workspaces.take(size, f"drafts of {num_rows.value} rows")
        status = self._library.foretoken_head_draft(
            head, drawn, c_void_p(features.data_ptr()), num_rows, c_int64(kernel_threads()), c_void_p(memory.data_ptr())
        )
        self._workspaces.give_back(memory)
        if status == Status.TOKENS:
            raise PassError(
                f"the roots are {expansion.roots.tolist()}. Expected ids below {vocab}, the head's vocabulary."
            )
        if status:
            raise PassError(f"the draft does not fit: {Status(status).name}. Expected a tree level by level.")


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
                root and the feature before it. Drafted nodes with children use the cache rows behind the pairs.
            states: (M, W) float32, of committed positions.
            expansion: Trees of roots that `can_draft` accepts, of the sequences of the pass; changed.

        Raises:
            PassError: If something does not fit the block, the cache or the head, memory is too small, or a weight's
                memory was freed.
        """
        self._native = native = self._native.current()  # kept until the end: another thread may replace it
        blocks, head = self._blocks, native.structure
        ready = blocks.prepared(work)
        (states,) = fitting(("states", states, torch.float32, (work.num_tokens, ready.model.hidden)))
        draft = NativeDraft(expansion, head.vocab)
        sizes = c_int64(work.node_offsets[-1]), c_int64(ready.arguments.num_threads)
        given, drawn = (byref(ready.model), byref(head)), byref(draft.arguments)
        size = blocks.library.foretoken_autoregressive_draft_bytes(*given, drawn, *sizes)
        memory = blocks.workspaces.take(size, f"a draft of {draft.arguments.num_nodes} nodes")
        ready.arguments.workspace = memory.data_ptr()
        last_position = c_int64(ready.model.num_positions - 1)
        status = blocks.library.foretoken_autoregressive_draft(
            *given, byref(ready.arguments), drawn, c_void_p(states.data_ptr()), last_position
        )
        blocks.workspaces.give_back(memory)
        if status == Status.TOKENS:
            raise PassError(
                f"tokens lie in {range_of(work.tokens)}. Expected ids below {head.embedding.matrix.rows}, the rows of "
                "the head's embedding."
            )
        if status:
            raise PassError(blocks.complaint(Status(status), work))
