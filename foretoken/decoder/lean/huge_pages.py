"""Asks Linux to keep weights in pages of 2 MiB.

A pass reads all weights, and with pages of 4 KiB it needs an address looked up for each: in a virtual machine a
walk through two tables, for which a product of 16 tokens waits up to half of its time.
"""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.decoder.lean.threads import kernel_threads

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PAGE = 1 << 21
_PORTION = 1 << 26  # that one thread moves
_GAP = 1 << 16  # of what an allocator puts between two tensors
_HUGEPAGE, _COLLAPSE = 14, 25  # of madvise, see linux/mman.h


def use_huge_pages(tensors: Iterable[Tensor]) -> int:
    """Moves the memory of tensors into huge pages, where the system has them; what they hold and their addresses stay.

    Tensors that lie side by side are taken together, and only pages that they fill. The system may decline: Linux
    before 6.1 does it later and in its own time, other systems never, nor where an administrator has switched huge
    pages off. Takes a quarter of a second to two a GiB. Memory that a process shares with the one that it was forked
    from becomes its own, so load a model before forking.

    Args:
        tensors: Strided ones on a CPU that have been written already: memory never touched would be taken by this.

    Returns:
        Bytes that the system has moved now, or had moved before.
    """
    if not sys.platform.startswith("linux") or _are_switched_off():
        return 0
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):  # of an interpreter that is linked statically
        return 0
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def move(begin: int, size: int) -> int:
        advise(begin, size, _HUGEPAGE)
        return size if advise(begin, size, _COLLAPSE) == 0 else 0

    portions = [
        (begin, min(_PORTION, end - begin))
        for first, last in _spans(tensors)
        for end in (last // _PAGE * _PAGE,)
        for begin in range(-(-first // _PAGE) * _PAGE, end, _PORTION)
    ]
    if len(portions) < 2:
        return sum(move(*portion) for portion in portions)
    with ThreadPoolExecutor(kernel_threads(), "foretoken-huge-pages") as pool:
        return sum(pool.map(move, *zip(*portions, strict=True)))


def _are_switched_off() -> bool:
    """Whether the system keeps no huge pages for anyone, which a process that insists would still get."""
    try:
        return "[never]" in _SETTING.read_text(encoding="ascii")
    except OSError:
        return True


def _spans(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Where tensors begin and end, as one where nothing much lies between two of them."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted({(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in tensors}):
        if spans and begin <= spans[-1][1] + _GAP:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans
