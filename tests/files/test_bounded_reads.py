"""What never ends, nobody writes, is too large or damaged is refused in a sentence; pipes of a shell are read."""

import contextlib
import os
import socket
import threading
import time
from codecs import BOM_UTF8
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretoken.bench.workload import load_prompts
from foretoken.cli import options
from foretoken.core.errors import ConfigError, ModelError, RequestError
from foretoken.files import bounded_reads
from foretoken.files.bounded_reads import (
    MIB,
    check_regular,
    read_json_object,
    read_named,
    read_regular,
    read_stream,
    tensor_headers,
)


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.mark.parametrize("read", [read_regular, read_named])
def test_up_to_the_limit(read: object, tmp_path: Path) -> None:
    assert callable(read)
    file = tmp_path / "file"
    for size in (0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB):
        file.write_bytes(bytes(size))
        assert len(read(file, limit=2 * MIB)) == size
    with pytest.raises((ModelError, RequestError), match=r"file' holds more than 1 MiB\. Expected at most that"):
        read(file, limit=MIB)
    with pytest.raises(ConfigError):
        read(file, limit=MIB, error=ConfigError)
    with pytest.raises(FileNotFoundError):
        read(tmp_path / "none")


def test_byte_order_marks_are_no_text(pipe: Path, tmp_path: Path) -> None:
    """Editors and shells on Windows write them."""
    text = b'{"prompt": "x"}\n'
    (tmp_path / "prompts.jsonl").write_bytes(BOM_UTF8 + text)
    assert read_named(tmp_path / "prompts.jsonl") == text
    assert load_prompts(str(tmp_path / "prompts.jsonl")) == ["x"]
    writer = threading.Thread(target=pipe.write_bytes, args=(BOM_UTF8 + text,))
    writer.start()
    assert read_named(pipe) == text
    writer.join()
    assert options.decode(BOM_UTF8 + text, "standard input") == text.decode()


def test_devices_end_at_the_limit() -> None:
    with pytest.raises(RequestError, match="'/dev/zero' holds more than 1 MiB"):
        read_named(Path("/dev/zero"), limit=MIB)
    with Path("/dev/zero").open("rb") as endless, pytest.raises(RequestError, match="standard input holds more than 1"):
        read_stream(endless, "standard input", limit=MIB)


def test_only_regular_files_belong_to_a_model(pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/dev/zero")
    address = socket.socket(socket.AF_UNIX)
    address.bind(str(tmp_path / "socket"))
    address.close()
    for path, kind in ((pipe, "a pipe"), (tmp_path / "link", "a device"), (tmp_path, "a directory")):
        with pytest.raises(ModelError, match=f"is {kind}. Expected a regular file"):
            read_regular(path)
    with pytest.raises(ModelError, match="is a socket"):
        check_regular(tmp_path / "socket")


def test_a_pipe_that_nobody_writes_to(pipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_reads, "_WRITER_WAIT_S", 0.1)
    with pytest.raises(RequestError, match=r"is a pipe that no process has opened for writing for 0\.1 seconds"):
        read_named(pipe)


@pytest.mark.parametrize("pieces", [[b"a"], [b"a" * 100_000, b"", b"b"], [b""]])
def test_a_pipe_with_a_slow_writer(pipe: Path, pieces: list[bytes]) -> None:
    def write() -> None:
        time.sleep(0.1)  # opened by the reader before
        with pipe.open("wb", buffering=0) as file:
            for piece in pieces:
                file.write(piece)
                time.sleep(0.1)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_named(pipe) == b"".join(pieces)
    writer.join()


def test_an_endless_pipe(pipe: Path) -> None:
    def write() -> None:
        with pipe.open("wb", buffering=0) as file, contextlib.suppress(BrokenPipeError):
            while True:
                file.write(bytes(MIB))

    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(RequestError, match="holds more than 2 MiB"):
        read_named(pipe, limit=2 * MIB)
    writer.join()


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


def test_objects_and_other_things_than_files(pipe: Path, tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "No such file"), (pipe, "is a pipe")):
        with pytest.raises(ModelError, match=message):
            read_json_object(path)
    (tmp_path / "config.json").write_text('{"a": [1]}')
    assert read_json_object(tmp_path / "config.json") == {"a": [1]}


def test_headers_of_tensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.int64)}, path)
    assert tensor_headers(path) == {"a.weight": ((3, 5), "BF16"), "b": ((), "I64")}
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(SafetensorError):
        tensor_headers(path)
