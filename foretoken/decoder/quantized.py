"""Matrices in 4 to 8 bits: how weights are quantized, stored, and read from the blocks of GGUF files.

Letters: N outputs and K inputs of a matrix, G groups of weights that share a scale.
"""

from __future__ import annotations

from ctypes import addressof, byref, c_int64
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core.backend import kernel_threads, runs_cpu_kernels
from foretoken.core.checks import require
from foretoken.decoder.arguments import MatrixStruct, Status, StoredBlocks, address
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.library import library_or_none
from foretoken.decoder.memory import SHARED_PAGES
from foretoken.decoder.panels import (
    PANEL,
    QUAD,
    in_panels,
    in_rows,
    num_blocks,
    num_groups,
    packed,
    padded,
    put_rows,
    unpacked,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

# "w8a8" and "w4a8": weights as "int8" and "int4", and inputs rounded to 8 bits.
Quantization = Literal["int4", "int8", "w4a8", "w8a8"]

_GREATEST = 127  # of int8; -128 is left out, so that the range is symmetric
_ZERO = 8  # of 4 bits: numbers are from -_ZERO to _ZERO - 1
_SUPER = 256  # weights that share a scale of int8 scales
# The scales of groups of a `QuantizedMatrix`, in panels as the numbers are.
SCALES = ("group_scales", "group_offsets", "super_scales", "super_offsets")
_SHORTEST_GROUP = 16  # weights that share a scale; see `kernels/quantized.h`
_GROUP = 128  # weights of int4 that share a scale; a choice: 4.13 bits a weight
# Shares of the scale at which a group's greatest weight ends the range; the one with the least squared error is taken.
# A choice: smaller ones cut the greatest weights, and gives all others finer steps.
_SHARES = (1.0, 0.93, 0.86, 0.79)
_INPUT_GROUP = 128  # inputs that share a scale
_WIDE_INPUT_GROUP = 512  # the same for inputs of 16 bits; a choice: sums become float32 a quarter as often
_SCALE_DTYPES = (torch.float32, torch.float16, torch.int8)  # `ScaleKind`, in its order
_AT_ONCE = 1 << 20  # weights in float32 during rounding, 4 MiB; a choice: they stay in the processor's caches
_DENSE_AT_ONCE = 1 << 24  # weights that `QuantizedLinear` has dense at once; a choice: some 200 MiB with temporaries


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantizedMatrix:
    """A matrix (N, K): row n is `row_scales[n] * (numbers[n] * group_scales[n, g] + group_offsets[n, g])`.

    The kernels round inputs to integers of `input_bits`, with a scale for `input_group` of them. Products of
    bytes are exact, and so are their sums over as many inputs as share all scales; these sums are added in float32.
    Tensors are stored in the kernels' order, see `kernels/interface.h`; `of` takes them row by row. P = ceil(N / 16).

    Attributes:
        numbers: (P, ceil(K / 64) * 16, 64) int8; or of 4, 5 or 6 bits uint8, with 4/8, 5/8 or 6/8 of the blocks of 64.
        num_outputs: N.
        num_inputs: K.
        dtype: Of the layer's inputs and outputs, float32 or bfloat16.
        input_bits: 8, 16 or 24. The kernels take more where matrices share inputs.
        has_token_scales: Whether all inputs of a token share a scale.
        row_scales: (N,) float32, or None for 1.
        group: Weights side by side that share a scale, a power of 2 from 16 on; 0 without groups.
        group_scales: (P, G, 16) float16 or float32, or int8 as multiples of `super_scales`; None for 1.
        group_offsets: As `group_scales`, or None for 0.
        super_scales: (P, ceil(K / 256), 16) float16, with `group_scales` in int8; otherwise None.
        super_offsets: As `super_scales`, for `group_offsets`.
        offsets_are_lowest: Whether numbers count from the lowest one on, so that offsets are the lowest weights:
            numbers + 2 ** (bits - 1) stands in the formula.
        input_order: (K,) int32, a permutation: column k of the numbers belongs to input input_order[k], so that groups
            may hold inputs that are far apart. None for the order as it is.
    """

    numbers: Tensor
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype
    input_bits: int
    has_token_scales: bool = False
    row_scales: Tensor | None = None
    group: int = 0
    group_scales: Tensor | None = None
    group_offsets: Tensor | None = None
    super_scales: Tensor | None = None
    super_offsets: Tensor | None = None
    offsets_are_lowest: bool = False
    input_order: Tensor | None = None

    def __post_init__(self) -> None:
        rows, cols = self.shape
        panels, groups = -(-rows // PANEL), num_groups(cols, self.group)
        is_packed = self.numbers.dtype == torch.uint8
        expected = panels, num_blocks(cols, self.bits), PANEL * QUAD
        scales = [each for each in (self.group_scales, self.group_offsets) if each is not None]
        supers = [each for each in (self.super_scales, self.super_offsets) if each is not None]
        is_coded = bool(scales) and scales[0].dtype == torch.int8
        require(
            self.bits in ((4, 5, 6) if is_packed else (8,))
            and self.numbers.dtype in (torch.int8, torch.uint8)
            and self.numbers.shape == expected,
            "numbers have another shape",
        )
        require(self.dtype in (torch.float32, torch.bfloat16), "the dtype is not float32 or bfloat16")
        require(self.input_bits in (8, 16, 24), "inputs have other bits")
        require(
            not self.group or (_SHORTEST_GROUP <= self.group < 1 << 30 and self.group & (self.group - 1) == 0),
            "a group is too short",
        )
        require((self.group_scales is not None) == bool(self.group), "groups have scales, and only groups")
        require(bool(self.group) or not is_packed, "numbers of less than 8 bits come in groups")
        require(self.bits != 5 or self.group >= 2 * _SHORTEST_GROUP, "a group of numbers of 5 bits is too short")
        require(
            all(each.shape == (panels, groups, PANEL) and each.dtype == scales[0].dtype for each in scales)
            and (not scales or scales[0].dtype in _SCALE_DTYPES),
            "scales and offsets of groups have another shape or dtype",
        )
        require(
            len(supers) == (len(scales) if is_coded else 0)
            and all(each.shape == (panels, -(-cols // _SUPER), PANEL) for each in supers)
            and all(each.dtype == torch.float16 for each in supers)
            and (not is_coded or (self.group <= _SUPER and cols % _SUPER == 0)),
            "scales in int8 have no scales in float16 of their own",
        )
        require(
            self.row_scales is None or (self.row_scales.shape == (rows,) and self.row_scales.dtype == torch.float32),
            "there is not one scale in float32 a row",
        )
        require(
            self.input_order is None or _is_permutation(self.input_order, cols), "the order of inputs is no permutation"
        )
        require(
            not self.offsets_are_lowest or (is_packed and len(scales) == 2), "there are no offsets of lowest numbers"
        )
        require(len({each.device for each in self.tensors()}) == 1, "tensors are on several devices")
        require(all(each.is_contiguous() for each in self.tensors()), "a tensor is not contiguous")

    @classmethod
    def of(
        cls, numbers: Tensor, *, bits: int, group_scales: Tensor | None = None, group_offsets: Tensor | None = None,
        **fields: Any,
    ) -> QuantizedMatrix:  # fmt: skip
        """Stores tensors for the kernels.

        Args:
            numbers: (N, K) int8; of 4 bits from -8 to 7, of more accordingly.
            bits: 4, 5, 6 or 8.
            group_scales: (N, ceil(K / group)) float16 or float32, or None.
            group_offsets: As `group_scales`.
            fields: All others. Without `input_bits`, float32 inputs have 24 and bfloat16 ones 16.
        """
        rows, cols = numbers.shape
        is_small = 4 <= bits < 8 and bool(((numbers >= -(1 << bits - 1)) & (numbers < 1 << bits - 1)).all())
        require(is_small or bits == 8, "numbers have other bits")
        for each in (group_scales, group_offsets):
            expected = rows, -(-cols // max(1, fields.get("group", 0)))
            require(each is None or each.shape == expected, "scales and offsets of groups have another shape")
        fields = {"input_bits": _input_bits(fields["dtype"])} | fields
        groups = num_groups(cols, fields.get("group", 0))
        return cls(
            numbers=SHARED_PAGES.copy(packed(numbers, bits)), num_outputs=rows, num_inputs=cols,
            group_scales=None if group_scales is None else in_panels(group_scales, groups),
            group_offsets=None if group_offsets is None else in_panels(group_offsets, groups), **fields,
        )  # fmt: skip

    @classmethod
    def empty(
        cls, shape: Sequence[int], *, bits: int, group: int, dtype: torch.dtype, scale_dtype: torch.dtype,
        has_offsets: bool, offsets_are_lowest: bool = False,
    ) -> QuantizedMatrix:  # fmt: skip
        """Returns a matrix in groups, to be filled by `store_blocks`; `scale_dtype`: of scales and offsets."""
        panels, cols = -(-shape[0] // PANEL), shape[1]
        numbers = SHARED_PAGES.empty((panels, num_blocks(cols, bits), PANEL * QUAD), torch.uint8)
        places = ("group", num_groups(cols, group), scale_dtype), ("super", -(-cols // _SUPER), torch.float16)
        parts: dict[str, Any] = {
            f"{name}_{kind}": SHARED_PAGES.empty((panels, count, PANEL), own)
            for name, count, own in places[: 1 + (scale_dtype == torch.int8)]
            for kind in ("scales", "offsets")[: 1 + has_offsets]
        }
        return cls(
            numbers=numbers.view(torch.int8) if bits == 8 else numbers, num_outputs=shape[0], num_inputs=cols,
            dtype=dtype, input_bits=_input_bits(dtype), group=group, offsets_are_lowest=offsets_are_lowest, **parts,
        )  # fmt: skip

    @property
    def digits(self) -> int:
        """Bytes of a rounded input."""
        return -(-self.input_bits // 8)

    @property
    def input_group(self) -> int:
        """Inputs that share a scale, 0 for all of a token; the kernels take less where matrices share inputs."""
        if self.has_token_scales:
            return 0
        return (
            _WIDE_INPUT_GROUP
            if self.input_bits == 16 and (self.group or _WIDE_INPUT_GROUP) >= _WIDE_INPUT_GROUP
            else _INPUT_GROUP
        )

    @property
    def bits(self) -> int:
        """Bits of a number: 4, 5, 6 or 8."""
        return self.numbers.shape[1] * 8 * QUAD // padded(self.num_inputs)

    @property
    def shape(self) -> torch.Size:
        """(N, K)."""
        return torch.Size((self.num_outputs, self.num_inputs))

    @property
    def device(self) -> torch.device:
        """Device of all tensors."""
        return self.numbers.device

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(each.nbytes for each in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """Yields every tensor."""
        for name in ("numbers", "row_scales", *SCALES, "input_order"):
            each: Tensor | None = getattr(self, name)
            if each is not None:
                yield each

    def rows(self, start: int, end: int) -> QuantizedMatrix:
        """Returns the rows start..end, in place if start is a multiple of 16 and end too, or N; otherwise copied."""
        row_scales = None if self.row_scales is None else self.row_scales[start:end]
        panels = slice(start // PANEL, -(-end // PANEL))
        parts: dict[str, Any] = {name: each[panels] for name, each in self._panels()}
        if start % PANEL or (end % PANEL and end != self.num_outputs):
            cut = slice(start % PANEL, start % PANEL + end - start)
            parts = {
                name: packed(unpacked(each, self.num_inputs, self.bits)[cut], self.bits)
                if name == "numbers"
                else in_panels(in_rows(each)[cut], each.shape[1])
                for name, each in parts.items()
            }
        return replace(self, num_outputs=end - start, row_scales=row_scales, **parts)

    def taken(self, rows: Tensor) -> QuantizedMatrix:
        """Returns copies of (M,) int64 rows, in their order."""
        panels = -(-len(rows) // PANEL)
        parts: dict[str, Any] = {
            name: SHARED_PAGES.copy(each.new_zeros(panels, *each.shape[1:])) for name, each in self._panels()
        }
        scales = None if self.row_scales is None else self.row_scales[rows]
        made = replace(self, num_outputs=len(rows), row_scales=scales, **parts)
        made.put(torch.arange(len(rows), device=rows.device), self, rows)
        return made

    def put(self, places: Tensor, other: QuantizedMatrix, rows: Tensor) -> None:
        """Copies (M,) int64 rows of a matrix of the same form to places of this one."""
        for (name, own), (_, each) in zip(self._panels(), other._panels(), strict=True):
            sizes = (PANEL, QUAD) if name == "numbers" else (PANEL, 1)
            put_rows(own.unflatten(2, sizes), places, each.unflatten(2, sizes), rows)
        if self.row_scales is not None and other.row_scales is not None:
            self.row_scales[places] = other.row_scales[rows]

    def _panels(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("numbers", *SCALES):
            each: Tensor | None = getattr(self, name)
            if each is not None:
                yield name, each

    def dequantized(self, rows: Tensor | None = None) -> Tensor:
        """Returns the weights that the matrix stands for, (N, K) float32, rounded once for every operation.

        rows: (M,) int64 from 0..N - 1, for these rows alone; None for all.
        """
        library: Any = library_or_none() if rows is None and runs_cpu_kernels(self.device) else None
        if library is not None:
            weights, struct = torch.empty(self.shape), matrix_struct(self)
            arguments = addressof(struct), weights.data_ptr(), kernel_threads()
            library.foretoken_dequantize(*map(c_int64, arguments))
            return weights
        chosen: Any = slice(self.num_outputs) if rows is None else rows
        weights = unpacked(self.numbers, self.num_inputs, self.bits, chosen).float()
        if self.offsets_are_lowest:
            weights += 1 << self.bits - 1
        if self.group_scales is not None:
            weights *= self._spread("scales", chosen)
        if self.group_offsets is not None:
            weights += self._spread("offsets", chosen)
        if self.row_scales is not None:
            weights *= self.row_scales[chosen].unsqueeze(1)
        return weights if self.input_order is None else weights[:, self.input_order.long().argsort()]

    def product(self, x: Tensor) -> Tensor:
        """Returns x times the transposed matrix by torch, (..., K) to (..., N) of the same dtype.

        Rows are dequantized and freed again. Inputs of 8 bits are rounded; others differ by less than the dtype's
        rounding.
        """
        x = rounded_inputs(x, self) if self.input_bits == 8 else x
        step = max(1, _DENSE_AT_ONCE // self.num_inputs // PANEL) * PANEL
        starts = range(0, self.num_outputs, step)
        rows = (self.rows(start, min(start + step, self.num_outputs)) for start in starts)
        return torch.cat([functional.linear(x, each.dequantized().to(x.dtype)) for each in rows], -1)

    def _of_groups(self, kind: str, rows: Any) -> Tensor:
        """Returns the scales or offsets of groups (M, G) float32."""
        own, supers = getattr(self, f"group_{kind}"), getattr(self, f"super_{kind}")
        values = in_rows(own, rows).float()
        if supers is None:
            return values
        return values * in_rows(supers, rows).float().repeat_interleave(_SUPER // self.group, 1)

    def _spread(self, kind: str, rows: Any) -> Tensor:
        values = self._of_groups(kind, rows)
        return values.repeat_interleave(min(self.group, padded(self.num_inputs)), 1)[:, : self.num_inputs]


def matrix_struct(weight: Tensor | QuantizedMatrix, bias: Tensor | None = None, pass_bytes: int = 0) -> MatrixStruct:
    """Describes a matrix (N, K) and its bias (N,) in float32 for the kernels; valid until a tensor moves."""
    rows, cols = weight.shape
    struct = MatrixStruct(bias=address(bias), rows=rows, cols=cols, pass_bytes=pass_bytes)
    if isinstance(weight, Tensor):
        struct.weight = weight.data_ptr()
        return struct
    struct.weight, struct.scales = address(weight.numbers), address(weight.row_scales)
    for name in (*SCALES, "input_order"):
        setattr(struct, name, address(getattr(weight, name)))
    for name in ("bits", "group", "input_bits", "input_group", "offsets_are_lowest"):
        setattr(struct, name, getattr(weight, name))
    struct.scale_kind = 0 if weight.group_scales is None else _SCALE_DTYPES.index(weight.group_scales.dtype)
    return struct


def _input_bits(dtype: torch.dtype) -> int:
    """Returns bits whose errors are mostly below those of rounding to a dtype, see `docs/runners.md`."""
    return 24 if dtype == torch.float32 else 16


def _is_permutation(order: Tensor, count: int) -> bool:
    own = order.cpu()
    return own.dtype == torch.int32 and torch.equal(own.sort().values, torch.arange(count, dtype=torch.int32))


def is_int4(quantization: Quantization) -> bool:
    """Decides whether weights have 4 bits."""
    return quantization in ("int4", "w4a8")


def bytes_per_weight(quantization: Quantization) -> float:
    """Returns the bytes of a quantized weight with its share of the scales."""
    return 0.5 + 2.0 / _GROUP if is_int4(quantization) else 1.0


def quantized(weight: Tensor, quantization: Quantization, *, dtype: torch.dtype | None = None) -> QuantizedMatrix:
    """Rounds a weight (N, K) of any real dtype on a CPU.

    Args:
        quantization: "int8" and "w8a8" round every row to multiples of 1 / 127 of its largest absolute value, ties to
            even. "int4" and "w4a8" round groups of 128 weights to 16 multiples of a scale, of several scales the one
            with the least squared error. The kernels round inputs to 8 bits for "w8a8", with a scale a token, and for
            "w4a8", with a scale for 128 inputs; otherwise as `QuantizedMatrix.of` says.
        dtype: See `QuantizedMatrix`; None for bfloat16.

    Raises:
        UnsuitableError: For NaN and infinity.
    """
    weight, dtype = weight.detach(), dtype or torch.bfloat16
    is_small, cols = is_int4(quantization), weight.shape[1]
    made = []
    for part in weight.split(max(1, _AT_ONCE // cols // PANEL) * PANEL):
        numbers, scale = round_groups(part, _GROUP, _as_stored) if is_small else round_rows(part)
        made.append((packed(numbers, 4 if is_small else 8), scale))
    scales = torch.cat([each for _, each in made])
    if not scales.isfinite().all():
        raise UnsuitableError(
            f"a weight {tuple(weight.shape)} {weight.dtype} holds NaN or infinite values. {quantization} has no "
            "numbers for them."
        )
    fields: dict[str, Any] = {"input_bits": _input_bits(dtype)}
    if quantization in ("w4a8", "w8a8"):
        fields = {"input_bits": 8, "has_token_scales": quantization == "w8a8"}
    if is_small:
        stored = scales.half() if _fits_half(scales) else scales
        fields |= {"group": _GROUP, "group_scales": in_panels(stored, num_groups(cols, _GROUP))}
    else:
        fields["row_scales"] = scales.flatten()
    return QuantizedMatrix(
        numbers=SHARED_PAGES.copy(torch.cat([numbers for numbers, _ in made])), num_outputs=len(weight),
        num_inputs=cols, dtype=dtype, **fields,
    )  # fmt: skip


def round_rows(weight: Tensor, as_stored: Callable[[Tensor], Tensor] = lambda scale: scale) -> tuple[Tensor, Tensor]:
    """Rounds (N, K) to numbers (N, K) int8 from -127 to 127 and scales (N, 1) float32.

    as_stored: Rounds scales to what will be stored; numbers are those of the rounded ones.
    """
    wide = weight.float()
    scale = as_stored(wide.abs().amax(1, keepdim=True).div_(_GREATEST))
    divisor = torch.where(scale > 0, scale, 1.0)
    return (wide / divisor).round_().clamp_(-_GREATEST, _GREATEST).to(torch.int8), scale


def round_groups(weight: Tensor, group: int, as_stored: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Rounds (N, K) to numbers (N, K) int8 from -8 to 7, and scales (N, ceil(K / group)) float32 of least error.

    as_stored: As of `round_rows`.
    """
    cols = weight.shape[1]
    groups = functional.pad(weight.float(), (0, -cols % group)).unflatten(1, (-1, group))
    low, high = groups.aminmax(dim=2)
    # The greatest weight is at the end of the range with one number more, whatever its sign.
    greatest = torch.where(high > -low, high, low).div_(-_ZERO)
    best, error = greatest, groups.new_full(greatest.shape, torch.inf)
    for share in _SHARES:
        scale = as_stored(greatest * share)
        rest = _numbers(groups, scale).mul_(scale.unsqueeze(2)).sub_(groups)
        own = rest.square_().sum(2)
        best, error = torch.where(own < error, scale, best), torch.minimum(own, error)
    return _numbers(groups, best).flatten(1)[:, :cols].to(torch.int8), best


def _numbers(groups: Tensor, scale: Tensor) -> Tensor:
    divisor = torch.where(scale == 0, 1.0, scale).unsqueeze(2)
    return (groups / divisor).round_().clamp_(-_ZERO, _ZERO - 1)


def _as_stored(scale: Tensor) -> Tensor:
    """Rounds scales to half precision if that is a small change, so that errors are those of the stored ones."""
    return scale.half().float() if _fits_half(scale) else scale


def _fits_half(scale: Tensor) -> bool:
    sizes = scale.abs()
    return bool(((sizes == 0) | ((sizes >= 2.0**-14) & (sizes <= torch.finfo(torch.float16).max))).all())


def rounded_inputs(x: Tensor, matrix: QuantizedMatrix) -> Tensor:
    """Rounds inputs (..., K) of 8 bits as the kernels do, in the order of the numbers."""
    cols = x.shape[-1]
    group = matrix.input_group or cols
    ordered = x.float() if matrix.input_order is None else x.float()[..., matrix.input_order.long()]
    groups = functional.pad(ordered, (0, -cols % group)).unflatten(-1, (-1, group))
    scale = groups.abs().amax(-1, keepdim=True) / _GREATEST
    rounded = (groups / torch.where(scale > 0, scale, 1.0)).round().mul(scale).flatten(-2)[..., :cols]
    sorted_back: Tensor = rounded if matrix.input_order is None else rounded[..., matrix.input_order.long().argsort()]
    return sorted_back.to(x.dtype)


KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
    *("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S", "IQ1_M"),
)  # in the order of `kBlockForms` in `kernels/stored_blocks.h`


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
