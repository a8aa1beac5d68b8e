"""Parts of draft heads as the native kernels see them: addresses, and what bounds them; all is checked here, once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.held_memory import HeldMemory, has_memory, lost_memory
from foretoken.decoder.lean.head_structures import HeadMatrix
from foretoken.decoder.lean.huge_pages import use_huge_pages
from foretoken.decoder.lean.native_linear import NativeLinear
from foretoken.decoder.lean.structures import Norm

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foretoken.decoder.lean.head_steps import ScaledEmbedding

_DTYPES = (torch.float32, torch.bfloat16)


class HeadParts:
    """Takes the addresses of tensors, which live as long as this; copies norms and token maps, and nothing else.

    All methods raise `UnsuitableError` when something is not what its sizes say.
    """

    def __init__(self) -> None:
        """None yet."""
        self._kept: list[Tensor] = []

    def held_memory(self) -> HeldMemory:
        """What tells whether the memory of those taken so far is where it was; it lies in huge pages from now on."""
        use_huge_pages(self._kept)
        return HeldMemory(self._kept)

    def layer(self, name: str, layer: nn.Module | None, rows: int, cols: int) -> HeadMatrix:
        """A linear layer where it is."""
        if not isinstance(layer, NativeLinear):
            raise UnsuitableError(f"{name} is a {type(layer).__name__}. Expected a native linear layer.")
        matrix, is_bfloat16 = layer.described()
        self.require(
            (matrix.rows, matrix.cols) == (rows, cols), f"{name} ({matrix.rows}, {matrix.cols})", f"({rows}, {cols})"
        )
        self._kept += layer.tensors()
        return HeadMatrix(matrix=matrix, is_bfloat16=is_bfloat16)

    def embedding(self, embedding: ScaledEmbedding, vocab_size: int, size: int) -> dict[str, int | float]:
        """The fields of rows that are looked up: at least `vocab_size` of them, of `size` elements."""
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

    def norm(self, name: str, weight: Tensor, bias: Tensor | None, epsilon: float, size: int) -> Norm:
        """An RMS norm over `size` elements."""
        addresses: list[int | None] = []
        for vector in (weight, bias):
            if vector is None:
                addresses.append(None)
                continue
            self.require(vector.shape == (size,), f"{name} {tuple(vector.shape)}", f"({size},)")
            copy = vector.detach().to(torch.float32, copy=True).contiguous()
            self._hold(name, copy, _DTYPES[:1])
            addresses.append(copy.data_ptr())
        return Norm(weight=addresses[0], bias=addresses[1], epsilon=epsilon)

    def token_map(self, tokens: Tensor | None, vocab_size: int) -> int | None:
        """The address of a copy of the tokens of an LM head's rows, below `vocab_size`; None for none."""
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
        """Keeps a tensor whose address is handed out."""
        is_plain = type(tensor) is torch.Tensor and tensor.is_cpu and tensor.dtype in dtypes and tensor.is_contiguous()
        self.require(is_plain, f"{name} is {type(tensor).__name__} {tensor.dtype}", "a plain tensor on a CPU")
        if not has_memory(tensor):
            raise UnsuitableError(lost_memory(tensor))
        self._kept.append(tensor)

    @staticmethod
    def require(condition: bool, found: str, expected: str) -> None:
        """Raises `UnsuitableError` when something is not what the sizes of the head say."""
        if not condition:
            raise UnsuitableError(f"the head has {found}. Its kernels expect {expected}.")
