"""A draft head as the native kernels see it: addresses, and what bounds them; all of it is checked here, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.held_memory import HeldMemory, has_memory, lost_memory
from foretoken.decoder.lean.head_structures import Head, HeadMatrix, Step
from foretoken.decoder.lean.native_linear import NativeLinear
from foretoken.decoder.lean.structures import Norm

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foretoken.decoder.lean.head_steps import BiasedNorm, HeadSteps, ScaledEmbedding

_KINDS = {"feature": 0, "path": 1, "state": 2}
_DTYPES = (torch.float32, torch.bfloat16)


class NativeHead:
    """What the kernels are handed of a head, and the tensors behind it, which live as long as this.

    Attributes:
        structure: See `kernels/head_interface.h`.
    """

    def __init__(self, head: HeadSteps) -> None:
        """Takes addresses; copies norms and nothing else.

        Raises:
            UnsuitableError: When a layer is not native, or something is not what the sizes of the head say.
        """
        self._head = head
        self._kept: list[Tensor] = []
        self._blocks = [
            (HeadMatrix * len(step.blocks))(
                *(self._layer("a block", each, head.width, head.width) for each in step.blocks)
            )
            for step in head.steps
        ]
        self._steps = (Step * len(head.steps))(*map(self._step, range(len(head.steps))))
        self.structure = Head(
            kind=_KINDS[head.kind],
            num_steps=len(head.steps),
            hidden=head.hidden_size,
            width=head.width,
            vocab=head.vocab_size,
            token_map=self._token_map(head.token_map),
            feature_rms=head.feature_rms,
            feature_epsilon=head.feature_epsilon,
            steps=self._steps,
        )
        self._memory = HeldMemory(self._kept)

    def has_moved(self) -> bool:
        """Whether the structure no longer says where the tensors lie: another one has to be made."""
        return self._memory.has_changed()

    def _step(self, index: int) -> Step:
        """One step."""
        head, step = self._head, self._head.steps[index]
        rows = head.vocab_size if head.token_map is None else head.token_map.numel()
        made = Step(
            lm_head=self._layer("the LM head", step.head.layer, rows, head.width),
            logit_scale=step.head.scale,
            logit_softcap=step.head.softcap,
            blocks=self._blocks[index],
            num_blocks=len(step.blocks),
        )
        if head.kind == "feature":
            self._require(head.width == head.hidden_size, f"a width of {head.width}", f"{head.hidden_size}")
            return made
        self._require(step.first is not None and step.embedding is not None, "a step without a part", "all of them")
        if head.kind == "path":
            size, inputs, outputs = head.hidden_size, (index + 2) * head.hidden_size, 2 * head.width
        else:
            size, inputs, outputs = head.width, head.width if index else head.hidden_size, head.width
            made.norm = self._norm(step.norm)
        made.first = self._layer("the first layer of a step", step.first, outputs, inputs)
        self._set_embedding(made, step.embedding, size)
        return made

    def _layer(self, name: str, layer: nn.Module | None, rows: int, cols: int) -> HeadMatrix:
        """A linear layer where it is."""
        if not isinstance(layer, NativeLinear):
            raise UnsuitableError(f"{name} is a {type(layer).__name__}. Expected a native linear layer.")
        matrix, is_bfloat16 = layer.described()
        self._require(
            (matrix.rows, matrix.cols) == (rows, cols), f"{name} ({matrix.rows}, {matrix.cols})", f"({rows}, {cols})"
        )
        self._kept += layer.tensors()
        return HeadMatrix(matrix=matrix, is_bfloat16=is_bfloat16)

    def _set_embedding(self, step: Step, embedding: ScaledEmbedding | None, size: int) -> None:
        """The rows that a step looks up."""
        assert embedding is not None, "the caller looks"
        weight, vocab = embedding.weight.detach(), self._head.vocab_size
        self._check("the embedding", weight, _DTYPES)
        self._require(
            weight.dim() == 2 and weight.shape[0] >= vocab and weight.shape[1] == size,
            f"the embedding {tuple(weight.shape)}",
            f"({vocab}, {size})",
        )
        step.embedding, step.num_tokens = weight.data_ptr(), weight.shape[0]
        step.embedding_is_bfloat16 = weight.dtype == torch.bfloat16
        step.embedding_scale = embedding.scale

    def _norm(self, norm: BiasedNorm | None) -> Norm:
        """A norm over a state."""
        width = self._head.width
        self._require(
            norm is not None and norm.weight.shape == norm.bias.shape == (width,), "a step's norm", f"({width},)"
        )
        assert norm is not None, "just looked"
        weight, bias = (vector.detach().to(torch.float32, copy=True).contiguous() for vector in norm[:2])
        for vector in (weight, bias):
            self._check("a norm", vector, _DTYPES[:1])
        return Norm(weight=weight.data_ptr(), bias=bias.data_ptr(), epsilon=norm.epsilon)

    def _token_map(self, tokens: Tensor | None) -> int | None:
        """The address of a copy of the tokens of the LM heads' rows."""
        if tokens is None:
            return None
        copy = tokens.detach().to(torch.int64, copy=True).contiguous()
        self._check("the token map", copy, (torch.int64,))
        vocab = self._head.vocab_size
        self._require(
            bool(((copy >= 0) & (copy < vocab)).all()), "a token map beyond the vocabulary", f"ids below {vocab}"
        )
        return int(copy.data_ptr())

    def _check(self, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        """Holds a tensor whose address is handed out."""
        is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in dtypes and tensor.is_contiguous()
        self._require(is_plain, f"{name} is {type(tensor).__name__} {tensor.dtype}", "a plain tensor on a CPU")
        if not has_memory(tensor):
            raise UnsuitableError(lost_memory(tensor))
        self._kept.append(tensor)

    @staticmethod
    def _require(condition: bool, found: str, expected: str) -> None:
        """Raises `UnsuitableError` when something is not what the sizes of the head say."""
        if not condition:
            raise UnsuitableError(f"the head has {found}. Its kernels expect {expected}.")
