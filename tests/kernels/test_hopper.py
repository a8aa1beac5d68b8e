"""Every Triton kernel compiles for Hopper, without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_device import DEVICE

pytest.importorskip("triton.backends.nvidia")

EXPECTED = {
    "_attend_kernel", "_merge_kernel", "_tables_kernel", "_part_kernel", "_walk_kernel",
    "_distribution_kernel", "_distance_kernel", "_scores_kernel", "_weights_kernel",
    "_commit_kernel", "_write_kernel", "_norm_kernel", "_gate_kernel", "_rotate_kernel", "_gemm_kernel",
    "_states_kernel",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(DEVICE == "cuda", reason="the GPU compiles them in every other test")
def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("TRITON_INTERPRET", None)
    script = Path(__file__).with_name("hopper_compiler.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == EXPECTED
