"""What a wheel holds; `make wheel` also compiles the kernels."""

import zipfile
from pathlib import Path

import pytest
from scikit_build_core.build import build_wheel

REPOSITORY = Path(__file__).parents[1]


def test_a_wheel_has_the_whole_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pattern of files to leave out once took `foretoken/models` for `models`."""
    monkeypatch.chdir(REPOSITORY)
    name = build_wheel(str(tmp_path), {"wheel.cmake": "false"})
    with zipfile.ZipFile(tmp_path / name) as wheel:
        found = {each for each in wheel.namelist() if ".dist-info/" not in each}
    expected = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "foretoken").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert expected <= found
    assert {each.split("/")[0] for each in found} == {"foretoken"}
    assert name.startswith("foretoken_decoding-")
