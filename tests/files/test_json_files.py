from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretoken.core.errors import ConfigError, ModelError
from foretoken.files.bounded_reads import read_json_object


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b"{nope", "is not valid JSON"),
        (b"\xff\xfe{}", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b"[1]", "holds a JSON list. Expected an object"),
        (b"null", "holds a JSON NoneType. Expected an object"),
    ],
)
def test_damaged_files_are_named_with_advice(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ModelError) as caught:
        read_json_object(path)
    assert str(caught.value).startswith(f"{path} {message}")
    assert str(caught.value).endswith(". Copy or download it again.")
    with pytest.raises(ConfigError, match=r"Write it again\.$"):
        read_json_object(path, error=ConfigError, advice="Write it again.")


def test_other_things_than_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="No such file"):
        read_json_object(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="is a pipe"):
        read_json_object(tmp_path / "pipe")


def test_an_object(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": [1]}')
    assert read_json_object(tmp_path / "config.json") == {"a": [1]}
