"""An embedding that keeps its rows in integers.

Letters: V rows, E elements of a row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from foretoken.decoder.quantized import QuantizedModule

if TYPE_CHECKING:
    from foretoken.decoder.quantized import QuantizedMatrix

_SCALED = "ScaledWordEmbedding"  # the end of the names of transformers' classes that multiply rows by `embed_scale`


class QuantizedEmbedding(QuantizedModule):
    """An embedding whose table is in 4 or 8 bits; rows are dequantized when they are looked up."""

    def __init__(self, matrix: QuantizedMatrix, scale: Tensor | float | None = None) -> None:
        """Takes the tensors in place.

        Args:
            matrix: (V, E); rows have its dtype.
            scale: Factor of every row; a tensor () is first rounded to the dtype. None for 1.
        """
        super().__init__(matrix)
        self.matrix = matrix
        self.num_embeddings, self.embedding_dim = matrix.shape
        if isinstance(scale, Tensor):
            self.register_buffer("embed_scale", scale.detach(), persistent=False)
        else:
            self.embed_scale = scale

    @property
    def weight(self) -> Tensor:
        """A dequantized copy of the table, (V, E)."""
        return self.matrix.dequantized().to(self.matrix.dtype)

    def forward(self, ids: Tensor) -> Tensor:
        """Turns (...) integers into (..., E) rows, scaled; raises `IndexError` for an id that the table lacks."""
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self.num_embeddings:
            raise IndexError(f"ids are {int(ids.min())}..{int(ids.max())}. Expected 0..{self.num_embeddings - 1}.")
        rows = self.matrix.dequantized(ids.flatten().long()).to(self.matrix.dtype)
        return _scaled(rows.view(*ids.shape, self.embedding_dim), self.embed_scale)


def _scaled(rows: Tensor, scale: Tensor | float | None) -> Tensor:
    if scale is None:
        return rows
    return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)


def is_plain_embedding(module: nn.Module) -> bool:
    """Decides whether a module looks rows of its weight up, and at most multiplies them by `embed_scale`."""
    kind = type(module)
    is_scaled = kind.__name__.endswith(_SCALED) and kind.__module__.startswith("transformers.")
    return isinstance(module, nn.Embedding) and (kind is nn.Embedding or is_scaled) and module.max_norm is None


def embedding_table(embedding: Any) -> tuple[Tensor | QuantizedMatrix, float]:
    """Returns the table (V, E) of an embedding module, in place, and the factor of every row."""
    table = embedding.matrix if isinstance(embedding, QuantizedEmbedding) else embedding.weight.detach()
    scale = getattr(embedding, "embed_scale", None)
    if isinstance(scale, Tensor):
        scale = scale.to(table.dtype)
    return table, 1.0 if scale is None else float(scale)
