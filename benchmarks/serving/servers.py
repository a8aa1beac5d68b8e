"""Starts the servers of a comparison, lets one at a time run, and always ends them.

A server that is not being asked gets SIGSTOP, its whole process group with it, so that no idle thread of one takes
processor time from another.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

_READY_SECONDS = 600.0
_END_SECONDS = 60.0
_CONTEXT = 1024  # tokens of a sequence in the rivals
_VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}


class ServerError(Exception):
    """A server did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What servers of a comparison have in common; `has_prefix_caching` is for ours and vLLM, `options` for ours.

    `draft` is the draft model of "draft_model" and "llama.cpp+draft", `llama_server` llama.cpp's program, `vllm` the
    interpreter of an environment with vllm-cpu.
    """

    model: Path
    dtype: str
    threads: int
    max_num_seqs: int
    log_dir: Path
    has_prefix_caching: bool = False
    options: tuple[str, ...] = ()
    draft: Path | None = None
    llama_server: Path | None = None
    vllm: Path | None = None


@dataclass(slots=True)
class Server:
    """A server process, stopped unless inside of `running`."""

    name: str  # "plain", "vllm", "transformers", "llama.cpp", "llama.cpp+draft", or what `-s` takes
    setting: Setting
    _process: subprocess.Popen[bytes] = field(init=False)
    port: int = field(init=False)

    def __post_init__(self) -> None:
        """Starts it and waits until it answers; it is stopped afterwards."""
        self.port = _free_port()
        command, variables = _command(self.name, self.setting, self.port)
        log = self.setting.log_dir / f"{self.name.replace('/', '_')}.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **variables}, start_new_session=True
            )
        try:
            self._wait(log)
        except BaseException:
            self.end()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def url(self) -> str:
        """Its base URL."""
        return f"http://127.0.0.1:{self.port}"

    def resident_bytes(self) -> int:
        """Memory of its process and of all that it has started."""
        of_group = subprocess.run(
            ["ps", "-o", "rss=", "-g", str(self._process.pid), "--ppid", str(self._process.pid)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        return 1024 * sum(map(int, of_group.split()))

    @contextmanager
    def running(self) -> Iterator[None]:
        """Lets it run meanwhile."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)

    def end(self) -> None:
        """Ends it, by force if it does not end by itself."""
        for number, seconds in ((signal.SIGTERM, _END_SECONDS), (signal.SIGKILL, None)):
            self._signal(signal.SIGCONT)
            self._signal(number)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                continue
            return

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _wait(self, log: Path) -> None:
        begin = time.monotonic()
        while time.monotonic() < begin + _READY_SECONDS:
            if self._process.poll() is not None:
                break
            with suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health", timeout=5.0).status_code == 200:
                    return
            time.sleep(0.5)
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise ServerError(f"'{self.name}' did not start; {log} ends with: {' | '.join(last)}")


def _command(name: str, setting: Setting, port: int) -> tuple[list[str], dict[str, str]]:
    threads = {"OMP_NUM_THREADS": str(setting.threads)}
    caching = f"--{'' if setting.has_prefix_caching else 'no-'}enable-prefix-caching"
    if name == "transformers":
        program = [str(Path(sys.executable).with_name("transformers")), "serve", str(setting.model)]
        return [*program, "--port", str(port), "--dtype", setting.dtype, "--device", "cpu"], threads
    if name == "vllm":
        if setting.vllm is None:
            raise ServerError("'vllm' needs an environment with vllm-cpu. Pass --vllm with its interpreter.")
        program = [str(setting.vllm), "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.model)]
        options = ["--dtype", setting.dtype, "--max-num-seqs", str(setting.max_num_seqs)]
        options += ["--max-model-len", str(_CONTEXT)]
        preload = [str(library) for library in setting.vllm.parents[1].glob("lib/libiomp5.so")]  # as it asks for
        variables = {**threads, **_VLLM_SETTINGS, **({"LD_PRELOAD": preload[0]} if preload else {})}
        return [*program, "--port", str(port), *options, caching], variables
    if name.startswith("llama.cpp"):
        if setting.llama_server is None:
            raise ServerError(f"'{name}' needs llama.cpp's server. Pass --llama-server with its path.")
        slots, each = setting.max_num_seqs, str(setting.threads)
        program = [str(setting.llama_server), "-m", str(setting.model), "--port", str(port), "--no-cache-prompt"]
        program += ["-np", str(slots), "-c", str(_CONTEXT * slots), "-t", each, "-tb", each]
        drafting = ["-md", str(setting.draft), "--spec-type", "draft-simple"] if name.endswith("+draft") else []
        return [*program, *drafting], threads
    if name == "draft_model" and setting.draft is not None:
        name = json.dumps({"method": name, "model": str(setting.draft)})
    drafting = [] if name == "plain" else ["-s", name]
    program = [sys.executable, "-m", "foretoken", "serve", str(setting.model), *drafting, "--port", str(port)]
    options = ["--dtype", setting.dtype, "--threads", str(setting.threads), "--max-num-seqs", str(setting.max_num_seqs)]
    return [*program, *options, *setting.options, caching], {}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
