"""Reads files that a user names: bounded in size, never a device or a pipe; damage is named in one sentence.

Also reads JSON objects, and the tensors' names, shapes and dtypes in headers of safetensors files.
"""

import json
import os
import select
import stat
import time
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from safetensors import safe_open

from foretoken.core.errors import ForetokenError, ModelError, RequestError, one_line

MIB = 1 << 20  # bytes
MOST_JSON_BYTES = 64 * MIB  # a choice: the index of the largest public models has a few MiB
MOST_TEXT_BYTES = 64 * MIB  # a choice: a prompt of ten million tokens
_PIECE_BYTES = MIB
_WRITER_WAIT_S = 5.0  # seconds for which a pipe may be without a writer; a choice: a shell opens both ends at once
_NONBLOCKING = getattr(os, "O_NONBLOCK", 0)  # Windows has neither the flag nor such pipes


def read_regular(path: Path, *, limit: int = MOST_JSON_BYTES, error: type[ForetokenError] = ModelError) -> bytes:
    """Returns the bytes of a regular file, or of a link to one, of at most `limit` bytes.

    Raises `error` for a device, pipe, socket or directory, and for a larger file; `OSError` when the system refuses.
    """
    check_regular(path, error=error)
    with os.fdopen(os.open(path, os.O_RDONLY | _NONBLOCKING | getattr(os, "O_BINARY", 0)), "rb") as file:
        return read_stream(file, f"'{path}'", limit=limit, error=error)


def check_regular(path: Path, *, error: type[ForetokenError] = ModelError) -> None:
    """Raises `error` if `path` is not a regular file, and `OSError` if nothing is there."""
    kind = _kind(path.stat().st_mode)
    if kind is not None:
        raise error(f"'{path}' is {kind}. Expected a regular file. Copy or download it again.")


def read_named(path: Path, *, limit: int = MOST_TEXT_BYTES, error: type[ForetokenError] = RequestError) -> bytes:
    """Returns the bytes of a text that a command line names: a file, or a pipe such as a shell's `<(command)`.

    A byte-order mark, as of editors on Windows, is left out. Raises `error` for a larger file, and for a pipe without a
    writer; `OSError` when the system refuses.
    """
    if stat.S_ISFIFO(path.stat().st_mode):
        descriptor = os.open(path, os.O_RDONLY | _NONBLOCKING)
        try:
            return _read_pipe(descriptor, f"'{path}'", limit, error).removeprefix(BOM_UTF8)
        finally:
            os.close(descriptor)
    with path.open("rb") as file:
        return read_stream(file, f"'{path}'", limit=limit, error=error).removeprefix(BOM_UTF8)


def read_stream(
    stream: BinaryIO, where: str, *, limit: int = MOST_TEXT_BYTES, error: type[ForetokenError] = RequestError
) -> bytes:
    """Returns all bytes of a stream; raises `error`, which names `where`, for more than `limit` bytes."""
    data = bytearray()
    while piece := stream.read(_PIECE_BYTES):
        data += piece
        _check_length(data, where, limit, error)
    return bytes(data)


def _read_pipe(descriptor: int, where: str, limit: int, error: type[ForetokenError]) -> bytes:
    data, waits_until = bytearray(), time.monotonic() + _WRITER_WAIT_S
    has_writer = False
    while True:
        try:
            piece = os.read(descriptor, _PIECE_BYTES)
        except BlockingIOError:  # a writer has the pipe open and may write at any time
            has_writer = True
            select.select([descriptor], [], [])
            continue
        data += piece
        _check_length(data, where, limit, error)
        has_writer = has_writer or bool(piece)
        if not piece and (has_writer or _is_hung_up(descriptor)):
            return bytes(data)
        if not piece:
            if time.monotonic() > waits_until:
                raise error(
                    f"{where} is a pipe that no process has opened for writing for {_WRITER_WAIT_S:g} seconds. "
                    "Expected a file, or a pipe with a writer."
                )
            time.sleep(0.02)


def _is_hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


def _check_length(data: bytearray, where: str, limit: int, error: type[ForetokenError]) -> None:
    if len(data) > limit:
        raise error(f"{where} holds more than {limit // MIB} MiB. Expected at most that. Shorten it.")


def _kind(mode: int) -> str | None:
    if stat.S_ISREG(mode):
        return None
    if stat.S_ISDIR(mode):
        return "a directory"
    if stat.S_ISFIFO(mode):
        return "a pipe"
    return "a socket" if stat.S_ISSOCK(mode) else "a device"


def read_json_object(
    path: Path,
    *,
    limit: int = MOST_JSON_BYTES,
    error: type[ForetokenError] = ModelError,
    advice: str = "Copy or download it again.",
) -> dict[str, Any]:
    """Returns the object in a JSON file of at most `limit` bytes; raises `error`, with `advice`, otherwise."""
    try:
        value = json.loads(read_regular(path, limit=limit, error=error).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as err:
        raise error(f"{path} is not valid JSON: {one_line(err)}. {advice}") from err
    if not isinstance(value, dict):
        raise error(f"{path} holds a JSON {type(value).__name__}. Expected an object. {advice}")
    return value


class TensorHeader(NamedTuple):
    """Shape and dtype of a tensor in a file; the dtype as safetensors writes it, such as "BF16"."""

    shape: tuple[int, ...]
    dtype: str


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """Returns the headers of a file's tensors by name; raises `SafetensorError` or `OSError` for damaged files."""
    with safe_open(path, framework="np") as file:
        names = file.keys()  # the file is no mapping
        parts = {name: file.get_slice(name) for name in names}
        return {name: TensorHeader(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
