"""Freed memory stays in the process: asking for it again costs no page faults."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

_PROGRAM = """
import resource, sys
import torch
from foretoken.files.processes import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def rounds(count):
    for _ in range(count):
        torch.ones(9 << 20)  # larger than any block that the C library keeps by itself

rounds(12)  # what is freed is not always joined at once to what can be given again
before = faults()
rounds(4)
print(faults() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the setting is glibc's")
def test_freed_memory_is_not_asked_of_the_system_again() -> None:
    found = {}
    for mode in ("keep", "return"):
        command = [sys.executable, "-c", _PROGRAM, mode]
        found[mode] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert found["keep"] < 10
    assert found["return"] > 20  # tensors of 36 MiB, pages of 4 KiB or 2 MiB
