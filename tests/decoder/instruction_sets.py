"""The native kernels compiled for other processors than this one, as far as this one runs them."""

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from filelock import FileLock
from made_once import shared_folder

from foretoken.decoder import library

# What -march is, and what that takes: this machine's own; vectors without intrinsics; AVX2; AVX-512 without bfloat16;
# and with it, where this machine has matrix units beside (elsewhere that is the machine's own).
INSTRUCTION_SETS = {
    "native": (), "x86-64": (), "x86-64-v3": ("avx2",), "x86-64-v4": ("avx512_f",), "cooperlake": ("amx_tile",),
}  # fmt: skip


@contextmanager
def kernels_for(name: str) -> Iterator[None]:
    """Native layers that are made here run on kernels of an instruction set; skips where there is none."""
    if name == "native":
        yield
        return
    capabilities = torch.cpu.get_capabilities()
    if platform.machine() != "x86_64" or not all(capabilities.get(each) for each in INSTRUCTION_SETS[name]):
        pytest.skip(f"this processor does not run {name}")
    # x86-64-v3 as another test compiles it; -O1 takes less time.
    other = library._Processor("older", (f"-march={name}", *(() if name == "x86-64-v3" else ("-O1",))))
    with mock.patch.object(library, "_fitting_processors", return_value=[other]):
        library.native_library.cache_clear()
        try:
            with FileLock(shared_folder() / f"kernels-{name}.lock"):  # or every process of xdist would compile them
                library.native_library()
            yield
        finally:
            library.native_library.cache_clear()
