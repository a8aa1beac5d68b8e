"""Modules with weights in 4 to 8 bits: linear layers, embeddings, and mixtures of experts.

Letters: N outputs and K inputs of a matrix, V rows of a table, E hidden size, X experts, I inner size of an expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.checks import require
from foretoken.core.errors import ModelError
from foretoken.decoder.memory import SHARED_PAGES
from foretoken.decoder.panels import PANEL, whole_panels
from foretoken.decoder.quantized import SCALES, Quantization, QuantizedMatrix, quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_SCALED = "ScaledWordEmbedding"  # the end of the names of transformers' classes that multiply rows by `embed_scale`
_EXPERTS_MODULE = "transformers.integrations.moe"  # of the default way to multiply gate and up


class QuantizedModule(nn.Module):
    """A module with weights in integers: buffers, so that their bytes and devices are seen, which cannot be saved."""

    def __init__(self, *matrices: QuantizedMatrix) -> None:
        """Takes the tensors in place."""
        super().__init__()
        self._bits = matrices[0].bits
        for index, each in enumerate(part for matrix in matrices for part in matrix.tensors()):
            self.register_buffer(f"part_{index}", each, persistent=False)

    def _save_to_state_dict(self, _: Any, prefix: str, __: bool) -> None:
        raise ModelError(
            f"'{prefix.rstrip('.')}' keeps its weight in {self._bits} bits, which cannot be saved. Save the model "
            "before it is quantized."
        )


class QuantizedLinear(QuantizedModule):
    """A linear layer that keeps its weight in 4 or 8 bits. The native kernels read `matrix` in place."""

    def __init__(self, matrix: QuantizedMatrix, bias: Tensor | None = None) -> None:
        """Takes the tensors in place; bias: (N,), or None."""
        super().__init__(matrix)
        self.matrix = matrix
        self.out_features, self.in_features = matrix.shape
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A dequantized copy of the weight, (N, K)."""
        return self.matrix.dequantized().to(self.matrix.dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Turns (..., K) into (..., N) of the same dtype."""
        y = self.matrix.product(x)
        return y if self.bias is None else y + self.bias.to(x.dtype)


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
        rows = self.matrix.dequantized(ids.flatten().long()).to(self.matrix.dtype).view(*ids.shape, self.embedding_dim)
        scale: Any = self.embed_scale
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


def stacked(parts: Sequence[QuantizedMatrix], panels: Tensor | None = None) -> QuantizedMatrix:
    """Returns matrices one below another, each filled up with rows of zeros to `whole_panels`.

    Args:
        parts: Of the same number of inputs, and alike in bits, groups, offsets, order and rounding of inputs.
        panels: (panels,) int64, those of the result in another order; None for their own.

    Raises:
        ValueError: If they differ.
    """
    first = parts[0]
    require(all(_kind(each) == _kind(first) for each in parts), "matrices that are stacked differ in kind")
    rows = [
        nn.functional.pad(each.row_scales, (0, whole_panels(each.num_outputs) - each.num_outputs))
        for each in parts
        if each.row_scales is not None
    ]
    scales: dict[str, Any] = {name: _joined([getattr(each, name) for each in parts], panels) for name in SCALES}
    row_scales = torch.cat(rows) if rows else None
    if row_scales is not None and panels is not None:
        row_scales = row_scales.view(-1, PANEL)[panels].flatten()
    return replace(
        first,
        numbers=_joined([each.numbers for each in parts], panels),
        num_outputs=sum(whole_panels(each.num_outputs) for each in parts),
        row_scales=row_scales,
        **scales,
    )


def _kind(matrix: QuantizedMatrix) -> tuple[Any, ...]:
    """Returns what matrices that are stacked have in common."""
    order = None if matrix.input_order is None else matrix.input_order.numpy().tobytes()
    parts = tuple(getattr(matrix, name) is None for name in ("row_scales", *SCALES))
    rounding = matrix.input_bits, matrix.has_token_scales
    return matrix.bits, matrix.num_inputs, matrix.group, matrix.dtype, matrix.offsets_are_lowest, order, parts, rounding


def _joined(parts: list[Tensor | None], panels: Tensor | None) -> Any:
    found = [each for each in parts if each is not None]
    if len({each.dtype for each in found}) > 1:  # all in half precision, or none
        found = [each.float() for each in found]
    if not found:
        return None
    joined = torch.cat(found)
    return SHARED_PAGES.copy(joined if panels is None else joined[panels])


def quantized_parts(weight: Tensor, parts: int, quantization: Quantization, *, dtype: torch.dtype) -> QuantizedMatrix:
    """Rounds the matrices of all experts.

    Args:
        weight: (X, parts * rows, cols).
        parts: Matrices of an expert: 2 for gate and up, otherwise 1.
        quantization: See `quantized`.
        dtype: Of inputs.

    Returns:
        The X * parts matrices `stacked`.

    Raises:
        UnsuitableError: For NaN and infinity.
    """
    return stacked([quantized(each, quantization, dtype=dtype) for expert in weight for each in expert.chunk(parts)])


def is_plain_experts(part: nn.Module, *, is_gated: bool = True) -> bool:
    """Decides whether a module of transformers computes down(act_fn(gate(x)) * up(x)) for each expert.

    Its weights are then gate_up_proj (X, 2 I, E), gate first, and down_proj (X, E, I), without biases. Without gates
    it computes down(act_fn(up(x))), from up_proj (X, I, E).
    """
    names = {name for name, _ in part.named_parameters(recurse=False)}
    gate: Any = getattr(type(part), "_apply_gate", None)
    if (
        names != {"gate_up_proj" if is_gated else "up_proj", "down_proj"}
        or gate is None
        or gate.__module__ != _EXPERTS_MODULE
    ):
        return False
    usual = {"is_concatenated": True, "is_transposed": False, "has_gate": is_gated, "has_post_expert_norm": False}
    return all(getattr(part, name, value) is value for name, value in usual.items())


def are_plain_experts(part: nn.Module) -> bool:
    """Decides whether `is_plain_experts` holds of a module, with gates or without."""
    return is_plain_experts(part) or is_plain_experts(part, is_gated=False)


class QuantizedExperts(QuantizedModule):
    """The experts of a layer in 4 or 8 bits, in place of a module of transformers with the same arguments.

    The native kernels read `gate_up` and `down` in place, see `blocks.Experts`.
    """

    def __init__(
        self,
        gate_up: QuantizedMatrix,
        down: QuantizedMatrix,
        act_fn: Callable[[Tensor], Tensor],
        *,
        is_gated: bool = True,
    ) -> None:
        """Takes the matrices in place.

        Args:
            gate_up: The matrices of X experts `stacked`: gate and up of the first, of the second, and so on; or of
                each the latter alone.
            down: (E, I) of the first expert, of the second, and so on, `stacked`.
            act_fn: The activation of gates, or of `up` without gates.
            is_gated: Whether there are gates.
        """
        super().__init__(gate_up, down)
        self.gate_up, self.down, self.act_fn, self.is_gated = gate_up, down, act_fn, is_gated

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Turns (M, E) into (M, E); top_k_index, top_k_weights: (M, experts of a token)."""
        inner, hidden = self.down.num_inputs, hidden_states.shape[1]

        def output_of(expert: int, x: Tensor) -> Tensor:
            if not self.is_gated:
                up = self.act_fn(_part(self.gate_up, expert, inner).product(x))
                return _part(self.down, expert, hidden).product(up)
            gate, up = (_part(self.gate_up, 2 * expert + i, inner).product(x) for i in range(2))
            return _part(self.down, expert, hidden).product(self.act_fn(gate) * up)

        return mixed(hidden_states, top_k_index, top_k_weights, output_of)


def mixed(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    output_of: Callable[[int, Tensor], Tensor],
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Returns the weighted outputs of each token's experts, (M, E); all tokens of an expert are computed together.

    Args:
        x: (M, E).
        chosen: (M, experts of a token) int64.
        weights: Of the experts, as `chosen`.
        output_of: Turns the inputs (n, E) of an expert into its outputs (n, E).
        dtype: Of the sums; None for that of `x`.
    """
    total = torch.zeros_like(x, dtype=dtype)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        out = output_of(expert, x[tokens]) * weights[tokens, ranks, None]
        total.index_add_(0, tokens, out.to(total.dtype))
    return total


def _part(matrix: QuantizedMatrix, index: int, rows: int) -> QuantizedMatrix:
    start = index * whole_panels(rows)
    return matrix.rows(start, start + rows)
