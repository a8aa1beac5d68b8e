"""Weights in huge pages: moved where the system says so, and what they hold stays."""

import gc
import re
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from foretoken.decoder import memory
from foretoken.decoder.memory import SharedPages, untouched_zeros, use_huge_pages

_MAPS = Path("/proc/self/smaps")


def huge_bytes(tensors: list[torch.Tensor], kind: str = "AnonHugePages") -> int:
    """Returns the bytes in huge pages of all mappings that tensors lie in: advice splits a mapping into several."""
    count, inside = 0, False
    for line in _MAPS.read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = int(found[1], 16), int(found[2], 16)
            inside = any(t.data_ptr() < end and begin < t.data_ptr() + t.nbytes for t in tensors)
        elif inside and line.startswith(f"{kind}:"):
            count += int(line.split()[1]) * 1024
    return count


def test_weights_move_and_stay_what_they_are() -> None:
    weights = [torch.randn(1024, 1024) for _ in range(6)]
    copies, addresses = [weight.clone() for weight in weights], [weight.data_ptr() for weight in weights]
    moved = use_huge_pages(weights)
    assert all(map(torch.equal, weights, copies))
    assert [weight.data_ptr() for weight in weights] == addresses
    assert moved % 2**21 == 0
    assert moved <= sum(weight.nbytes for weight in weights)
    if not moved:
        pytest.skip("this system keeps no huge pages")
    assert huge_bytes(weights) >= moved
    assert use_huge_pages(weights) == moved


def test_what_fills_no_page_is_left() -> None:
    assert use_huge_pages([]) == 0
    assert use_huge_pages([torch.ones(100_000), torch.ones(3, dtype=torch.bfloat16), torch.ones(0)]) == 0


def test_untouched_zeros_take_the_memory_of_the_rows_that_are_written() -> None:
    zeros = untouched_zeros((32, 1 << 21), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert zeros.shape == (32, 1 << 21)
    assert zeros.dtype == torch.bfloat16
    before = huge_bytes([zeros], "Rss")  # its mapping may hold other memory too
    zeros[:, :1000] = 1
    assert huge_bytes([zeros], "Rss") - before < zeros.nbytes / 8, "a huge page for each row would be half of it"
    assert zeros.sum() == 32_000
    assert not huge_bytes([zeros[1:-1]]), "the pages at both ends may belong to other memory"
    assert not untouched_zeros((5,), dtype=torch.float32, device=torch.device("cpu")).any()
    assert untouched_zeros((0, 4), dtype=torch.float32, device=torch.device("cpu")).numel() == 0


_AFTER_FREEING = """
import torch
from foretoken.decoder.memory import untouched_zeros
from foretoken.files.processes import keep_freed_memory
from tests.decoder.test_huge_pages import huge_bytes

keep_freed_memory()  # as in `foretoken train`: the C library clears what was freed, and gives it again
for _ in range(8):
    torch.ones(40 << 20)
zeros = untouched_zeros((32, 1 << 21), dtype=torch.bfloat16, device=torch.device("cpu"))
print(huge_bytes([zeros[1:-1]], "Rss"))
"""


def test_zeros_are_untouched_where_freed_memory_is_kept() -> None:
    command = [sys.executable, "-c", _AFTER_FREEING]
    resident = subprocess.run(command, check=True, capture_output=True, text=True, cwd=Path(__file__).parents[2]).stdout
    assert int(resident) < 1 << 22


def test_small_tensors_share_huge_pages() -> None:
    pages, tensors = SharedPages(1 << 23), [torch.randn(300, 1000).to(torch.bfloat16) for _ in range(20)]
    copies = [pages.copy(each) for each in tensors]
    assert all(map(torch.equal, tensors, copies))
    assert all(one.dtype == other.dtype and one.is_contiguous() for one, other in zip(tensors, copies, strict=True))
    if copies[0] is tensors[0]:
        pytest.skip("this system keeps no huge pages")
    assert all(each.data_ptr() % 64 == 0 for each in copies)
    assert len({each.untyped_storage().data_ptr() for each in copies}) == 2, "13 of 600 KB fit into a block of 8 MiB"
    assert all(torch.equal(pages.copy(each), each) for each in (torch.ones(5_000_000), torch.ones(()), torch.ones(0)))
    large = torch.zeros(1 << 23, dtype=torch.uint8)
    if not use_huge_pages([large]):
        pytest.skip("this system keeps no huge pages")
    assert huge_bytes(copies), "none of them fills a page; a system that is short of them gives some"


def test_a_block_is_freed_with_its_last_tensor() -> None:
    pages = SharedPages()
    first, second = pages.copy(torch.ones(1000)), pages.copy(torch.zeros(1000))
    block = weakref.ref(first.untyped_storage())
    del first
    gc.collect()
    third = pages.copy(torch.ones(1000))
    assert torch.equal(second, torch.zeros(1000))
    assert third.untyped_storage() is second.untyped_storage() or third.untyped_storage().nbytes() == third.nbytes
    del second, third
    gc.collect()
    assert block() is None


@pytest.mark.parametrize("setting", ["always madvise [never]\n", None])
def test_nothing_is_asked_for_where_they_are_switched_off(
    setting: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is not None:
        (tmp_path / "enabled").write_text(setting, encoding="ascii")
    monkeypatch.setattr(memory, "_SETTING", tmp_path / "enabled")
    assert use_huge_pages([torch.ones(4 << 20)]) == 0
