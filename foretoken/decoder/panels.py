"""The order in which the native kernels keep matrices in integers: panels of 16 rows, see `kernels/interface.h`.

Letters: N rows and K columns of a matrix, P = ceil(N / 16) panels, G groups of weights that share a scale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.decoder.memory import SHARED_PAGES

PANEL = 16  # rows that are stored together
QUAD = 4  # numbers of a row side by side
_WHOLE = 64  # the inputs of a row are padded to multiples of this
_ALL = slice(None)


def whole_panels(rows: int) -> int:
    """Returns a number of rows, filled up to whole panels of the kernels."""
    return -(-rows // PANEL) * PANEL


def padded(cols: int) -> int:
    """Returns the columns that are stored, zeros at the end included."""
    return -(-cols // _WHOLE) * _WHOLE


def num_blocks(cols: int, bits: int) -> int:
    """Returns the blocks of 64 bytes of a panel."""
    return padded(cols) * bits // (8 * QUAD)


def num_groups(cols: int, group: int) -> int:
    """Returns G, 0 without groups."""
    return -(-padded(cols) // group) if group else 0


def packed(numbers: Tensor, bits: int) -> Tensor:
    """Turns numbers (N, K) int8 into the kernels' order, (P, blocks, 64) int8, of fewer than 8 bits uint8."""
    rows, cols = numbers.shape
    whole: Tensor = functional.pad(numbers, (0, padded(cols) - cols, 0, -rows % PANEL)).view(-1, PANEL, padded(cols))
    if bits == 8:
        whole = whole.unflatten(2, (-1, QUAD)).transpose(1, 2)
        return whole.flatten(2)
    codes = (whole + (1 << bits - 1)).view(torch.uint8).unflatten(2, (-1, _quads_of_chunk(bits), QUAD))
    low, upper = codes & 15, codes >> 4
    blocks: Tensor = low[:, :, :, ::2] | low[:, :, :, 1::2] << 4
    if bits > 4:
        blocks = torch.cat([blocks, (upper << _shifts(bits)).sum(3, keepdim=True, dtype=torch.uint8)], 3)
    return blocks.flatten(2, 3).transpose(1, 2).flatten(2)


def unpacked(numbers: Tensor, cols: int, bits: int, rows: Any = _ALL) -> Tensor:
    """Returns rows (M, K) int8, of 4 bits from -8 to 7; of all 16 * panels rows those of a slice, or (M,) int64."""
    quads = in_rows(numbers.unflatten(2, (PANEL, QUAD)), rows)
    if bits == 8:
        return quads.flatten(1)[:, :cols]
    pairs = _quads_of_chunk(bits) // 2
    chunks = quads.unflatten(1, (-1, pairs + (bits > 4)))
    codes = torch.stack([chunks[:, :, :pairs] & 15, chunks[:, :, :pairs] >> 4], 3).flatten(2, 3)
    if bits > 4:
        codes |= (chunks[:, :, pairs:] >> _shifts(bits) & ((1 << bits - 4) - 1)) << 4
    numbers = codes.view(torch.int8).sub_(1 << bits - 1)
    return numbers.flatten(1)[:, :cols]


def _quads_of_chunk(bits: int) -> int:
    """Returns the quads whose blocks are understood together, see `kernels/quantized.h`."""
    return 2 if bits == 4 else 8 // (bits - 4)


def _shifts(bits: int) -> Tensor:
    """Returns where the upper bits of each quad are in their block, (quads, 1) uint8."""
    return torch.arange(0, 8, bits - 4, dtype=torch.uint8).unsqueeze(1)


def in_panels(scales: Tensor, groups: int) -> Tensor:
    """Turns scales (N, G) into the kernels' order, with zeros for the groups and rows that are missing."""
    rows, own = scales.shape
    whole = functional.pad(scales, (0, groups - own, 0, -rows % PANEL))
    return SHARED_PAGES.copy(whole.view(-1, PANEL, groups).transpose(1, 2).contiguous())


def put_rows(panels: Tensor, places: Tensor, others: Tensor, rows: Tensor) -> None:
    """Copies (K,) rows of others to places, int64; both (P, G, 16, ...)."""
    panels[places // PANEL, :, places % PANEL] = others[rows // PANEL, :, rows % PANEL]


def in_rows(panels: Tensor, rows: Any = _ALL) -> Tensor:
    """Turns (P, G, 16, ...) into rows (M, G, ...); `rows` as in `unpacked`."""
    whole = panels.transpose(1, 2)
    return whole[rows // PANEL, rows % PANEL] if isinstance(rows, Tensor) else whole.flatten(0, 1)[rows]
