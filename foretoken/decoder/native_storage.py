"""Matrices in integers from the blocks of GGUF files, by the native kernels."""

from __future__ import annotations

from ctypes import byref, c_int64
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import require
from foretoken.decoder.arguments import Status, StoredBlocks, address
from foretoken.decoder.library import kernel_threads, library_or_none

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.decoder.quantized import QuantizedMatrix

KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
)  # `BlockKind`, in its order


def can_store_blocks() -> bool:
    """Whether there are kernels for `store_blocks`."""
    return library_or_none() is not None


def store_blocks(
    matrix: QuantizedMatrix, blocks: Tensor, kind: str, order: Tensor | None, table: Tensor | None = None
) -> bool:
    """Fills a matrix of `QuantizedMatrix.empty`; returns whether all scales and offsets are finite.

    Args:
        matrix: Its bits, and the dtype of its scales, are those of the blocks, see `BlockFormat`.
        blocks: The bytes of all rows, uint8, as a GGUF file has them.
        kind: Type of the blocks, one of `KINDS`.
        order: (N,) int64, the row of the file for each row of the matrix; None for the same.
        table: int8, the numbers for all codes of the type; None where codes are numbers.

    Raises:
        ValueError: For blocks that do not fill rows of this length, or rows that the file does not have.
    """
    order = None if order is None else order.contiguous()
    stored = StoredBlocks(
        blocks=address(blocks), order=address(order), kind=KINDS.index(kind), rows=matrix.num_outputs,
        cols=matrix.num_inputs, numbers=address(matrix.numbers), scales=address(matrix.group_scales),
        offsets=address(matrix.group_offsets), super_scales=address(matrix.super_scales),
        super_offsets=address(matrix.super_offsets), table=address(table),
    )  # fmt: skip
    library: Any = library_or_none()
    status = Status(library.foretoken_store_blocks(byref(stored), c_int64(kernel_threads())))
    require(status in (Status.DONE, Status.NOT_FINITE), f"{kind} does not fit the matrix: {status.name}")
    return status == Status.DONE
