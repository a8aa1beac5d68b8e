"""Mixtures of experts with weights in 4 or 8 bits: one matrix for those of all experts, and a module for torch.

Letters: X experts, I inner size of an expert, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.checks import require
from foretoken.decoder.memory import SHARED_PAGES
from foretoken.decoder.panels import whole_panels
from foretoken.decoder.quantized import SCALES, Quantization, QuantizedMatrix, QuantizedModule, quantized

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_EXPERTS_MODULE = "transformers.integrations.moe"  # of the default way to multiply gate and up


def stacked(parts: Sequence[QuantizedMatrix]) -> QuantizedMatrix:
    """Returns matrices one below another, each filled up with rows of zeros to `whole_panels`.

    Args:
        parts: Of the same number of inputs, and alike in bits, groups, offsets, order and rounding of inputs.

    Raises:
        ValueError: If they are not alike.
    """
    first = parts[0]
    require(all(_kind(each) == _kind(first) for each in parts), "matrices that are stacked differ in kind")
    rows = [
        nn.functional.pad(each.row_scales, (0, whole_panels(each.num_outputs) - each.num_outputs))
        for each in parts
        if each.row_scales is not None
    ]
    scales: dict[str, Any] = {name: _joined([getattr(each, name) for each in parts]) for name in SCALES}
    return replace(
        first,
        numbers=SHARED_PAGES.copy(torch.cat([each.numbers for each in parts])),
        num_outputs=sum(whole_panels(each.num_outputs) for each in parts),
        row_scales=torch.cat(rows) if rows else None,
        **scales,
    )


def _kind(matrix: QuantizedMatrix) -> tuple[Any, ...]:
    """Returns what matrices that are stacked have in common."""
    order = None if matrix.input_order is None else matrix.input_order.numpy().tobytes()
    parts = tuple(getattr(matrix, name) is None for name in ("row_scales", *SCALES))
    rounding = matrix.input_bits, matrix.has_token_scales
    return matrix.bits, matrix.num_inputs, matrix.group, matrix.dtype, matrix.offsets_are_lowest, order, parts, rounding


def _joined(scales: list[Tensor | None]) -> Tensor | None:
    found = [each for each in scales if each is not None]
    if len({each.dtype for each in found}) > 1:  # all in half precision, or none
        found = [each.float() for each in found]
    return SHARED_PAGES.copy(torch.cat(found)) if found else None


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


def is_plain_experts(part: nn.Module) -> bool:
    """Decides whether a module of transformers computes down(act_fn(gate(x)) * up(x)) for each expert.

    Its weights are then gate_up_proj (X, 2 I, E), gate first, and down_proj (X, E, I), without biases.
    """
    names = {name for name, _ in part.named_parameters(recurse=False)}
    gate: Any = getattr(type(part), "_apply_gate", None)
    if names != {"gate_up_proj", "down_proj"} or gate is None or gate.__module__ != _EXPERTS_MODULE:
        return False
    usual = {"is_concatenated": True, "is_transposed": False, "has_gate": True, "has_post_expert_norm": False}
    return all(getattr(part, name, value) is value for name, value in usual.items())


class QuantizedExperts(QuantizedModule):
    """The experts of a layer in 4 or 8 bits, in place of a module of transformers with the same arguments.

    The native kernels read `gate_up` and `down` in place, see `blocks.Experts`.
    """

    def __init__(self, gate_up: QuantizedMatrix, down: QuantizedMatrix, act_fn: Callable[[Tensor], Tensor]) -> None:
        """Takes the matrices in place.

        Args:
            gate_up: The matrices of X experts `stacked`: gate and up of the first, of the second, and so on.
            down: (E, I) of the first expert, of the second, and so on, `stacked`.
            act_fn: The activation of gates.
        """
        super().__init__(gate_up, down)
        self.gate_up, self.down, self.act_fn = gate_up, down, act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Turns (M, E) into (M, E); top_k_index, top_k_weights: (M, experts of a token)."""
        inner, hidden = self.down.num_inputs, hidden_states.shape[1]

        def output_of(expert: int, x: Tensor) -> Tensor:
            gate, up = (_part(self.gate_up, 2 * expert + i, inner).product(x) for i in range(2))
            return _part(self.down, expert, hidden).product(self.act_fn(gate) * up)

        return mixed(hidden_states, top_k_index, top_k_weights, output_of)


def mixed(x: Tensor, chosen: Tensor, weights: Tensor, output_of: Callable[[int, Tensor], Tensor]) -> Tensor:
    """Returns the weighted outputs of each token's experts, (M, E); all tokens of an expert are computed together.

    Args:
        x: (M, E).
        chosen: (M, experts of a token) int64.
        weights: Of the experts, as `chosen`.
        output_of: Turns the inputs (n, E) of an expert into its outputs (n, E).
    """
    total = torch.zeros_like(x)
    for expert in sorted(set(chosen.flatten().tolist())):
        tokens, ranks = (chosen == expert).nonzero(as_tuple=True)
        out = output_of(expert, x[tokens]) * weights[tokens, ranks, None]
        total.index_add_(0, tokens, out.to(total.dtype))
    return total


def _part(matrix: QuantizedMatrix, index: int, rows: int) -> QuantizedMatrix:
    start = index * whole_panels(rows)
    return matrix.rows(start, start + rows)
