"""What NVRTC reports becomes a sentence, under `python -O` too."""

from __future__ import annotations

from types import SimpleNamespace

import cuda_tree
import pytest

from foretoken.core.errors import ConfigError


@pytest.mark.parametrize("failing", ["nvrtcCreateProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN"])
def test_errors_of_nvrtc(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("nvrtcCreateProgram", "nvrtcCompileProgram", "nvrtcDestroyProgram", "nvrtcGetCUBINSize", "nvrtcGetCUBIN")
    calls = {name: lambda *_, name=name: 1 if name == failing else 0 for name in names}
    nvrtc = SimpleNamespace(**calls, nvrtcGetErrorString=lambda status: b"NVRTC_ERROR_OUT_OF_MEMORY")
    monkeypatch.setattr(cuda_tree, "_nvrtc", lambda: nvrtc)
    with pytest.raises(ConfigError, match=r"NVRTC failed: NVRTC_ERROR_OUT_OF_MEMORY \(1\)"):
        cuda_tree.compile_source("")
