"""A small hub on this machine: answers huggingface_hub's questions about repositories in a folder."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "c" * 40
_INFO = re.compile(r"/api/models/([\w.-]+/[\w.-]+)(?:/revision/(\w+))?")
_FILE = re.compile(r"/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)")


class Hub(ThreadingHTTPServer):
    """Serves `root/OWNER/NAME` at the revisions main and COMMIT; `asked` has the paths of all requests."""

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.root, self.asked = root, list[str]()

    @property
    def url(self) -> str:
        """The value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def hub(root: Path) -> Iterator[Hub]:
    """Runs a hub for the block."""
    server = Hub(root)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        self.server.asked.append(f"{self.command} {self.path}")
        if match := _INFO.fullmatch(self.path.partition("?")[0]):
            self._info(match[1], match[2] or "main")
        elif match := _FILE.fullmatch(self.path):
            self._file(self.server.root / match[1], match[2], match[3])
        else:
            self._refuse("EntryNotFound")

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def _info(self, name: str, revision: str) -> None:
        place = self.server.root / name
        if not place.is_dir() or revision not in ("main", COMMIT):
            return self._refuse("RevisionNotFound" if place.is_dir() else "RepoNotFound")
        files = sorted(path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file())
        return self._send(
            json.dumps({"id": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}).encode()
        )

    def _file(self, place: Path, revision: str, name: str) -> None:
        if revision not in ("main", COMMIT) or not (place / name).is_file():
            return self._refuse("EntryNotFound" if place.is_dir() else "RepoNotFound")
        content = (place / name).read_bytes()
        return self._send(content, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'})

    def _send(self, content: bytes, headers: dict[str, str] | None = None, code: int = 200) -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def _refuse(self, why: str) -> None:
        self._send(b"", {"X-Error-Code": why, "X-Error-Message": why}, 404)
