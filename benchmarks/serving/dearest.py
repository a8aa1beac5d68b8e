"""What one client's dearest requests cost the others: python -m benchmarks.serving.dearest [MODEL] --out NAME.

Starts a server, sends it the requests of `dear_requests` one after the other, and measures meanwhile how long /health
and another client's completion of 8 tokens take, beside what they take undisturbed. Needs a quiet machine.
"""

import argparse
import http.client
import json
import multiprocessing
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import commit, describe_machine
from benchmarks.serving.dear_requests import DearRequest, dear_requests
from benchmarks.serving.servers import Server, Setting

_TEMPLATE = (
    "{% if messages[-1].content == 'forever' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif messages[-1].content == 'memory' %}{{ '%1000000000d' % 1 }}{% endif %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}# {{ m.role }}: {{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}\n{% endfor %}"
)
_PAUSE_S = 0.01  # between two probes of one kind
_AFTER_S = 0.5  # that probes go on after an answer
_LONGEST_S = 60.0
_ANOTHER = {"X-Forwarded-For": "192.0.2.1"}  # the address of the client that probes
_COMPLETION = {"prompt": "def main():", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Probes:
    """Two clients that ask again and again; seconds that each probe took, by what it asked for."""

    url: str
    seconds: dict[str, list[float]] = field(default_factory=lambda: {"health": [], "completion": []})

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Asks meanwhile."""
        is_over = threading.Event()
        threads = [threading.Thread(target=self._ask, args=(kind, is_over)) for kind in self.seconds]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            is_over.set()
            for thread in threads:
                thread.join()

    def _ask(self, kind: str, is_over: threading.Event) -> None:
        with httpx.Client(base_url=self.url, timeout=_LONGEST_S, headers=_ANOTHER) as client:
            while not is_over.is_set():
                begin = time.perf_counter()
                if kind == "health":
                    client.get("/health").raise_for_status()
                else:
                    client.post("/v1/completions", json=_COMPLETION).raise_for_status()
                self.seconds[kind].append(time.perf_counter() - begin)
                is_over.wait(_PAUSE_S)

    def worst(self) -> dict[str, float]:
        """The longest of each kind."""
        return {kind: max(seconds) for kind, seconds in self.seconds.items()}

    def median(self) -> dict[str, float]:
        """The median of each kind."""
        return {kind: statistics.median(seconds) for kind, seconds in self.seconds.items()}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, nargs="?", default=Path("models/tinycode"))
    parser.add_argument("--server", default="ngram", help="As in python -m benchmarks.serving.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="Requests whose name holds this.")
    parser.add_argument("--out", type=Path, required=True, help="Files to write, .json and .md added.")
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as logs:
        template = Path(logs) / "template"
        template.write_text(_TEMPLATE, encoding="utf-8")
        setting = Setting(
            model=given.model.resolve(), dtype="auto", threads=given.threads, max_num_seqs=8,
            log_dir=Path(logs), options=("--chat-template", str(template)),
        )  # fmt: skip
        server = Server(given.server, setting)
        try:
            with server.running():
                made = _measured(server.url, given.only)
        finally:
            server.end()
    made |= {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": describe_machine(),
        "model": given.model.name, "server": given.server, "threads": given.threads,
    }  # fmt: skip
    given.out.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(markdown(made), encoding="utf-8")
    print(markdown(made))


def _measured(url: str, only: str) -> dict[str, Any]:
    """Figures of all requests, and of probes without any."""
    context_len = httpx.get(f"{url}/v1/models", timeout=_LONGEST_S).json()["data"][0]["max_model_len"]
    for warm_up in (2.0, 5.0):  # what the first requests compile is no part of it
        undisturbed = Probes(url)
        with undisturbed.asking():
            time.sleep(warm_up)
    made: dict[str, Any] = {"median": undisturbed.median(), "undisturbed": undisturbed.worst(), "requests": []}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:  # sending and reading disturb no probe
        for request in dear_requests(context_len):
            if only not in request.name:
                continue
            probes = Probes(url)
            with probes.asking():
                status, num_bytes, seconds = pool.submit(_sent_at_once, url, request).result()
                time.sleep(_AFTER_S)
            worst = {kind: most - made["median"][kind] for kind, most in probes.worst().items()}
            row = {"name": request.name, "bytes": len(request.content), "status": status, "answer_bytes": num_bytes}
            made["requests"].append({**row, "seconds": seconds, "delays": worst})
            print(_row(made["requests"][-1]), flush=True)
    return made


def _sent_at_once(url: str, request: DearRequest) -> tuple[int, int, float]:
    """Status of the last copy, bytes of all answers, and seconds until the last one."""
    begin = time.perf_counter()
    with ThreadPoolExecutor(request.copies) as pool:
        sent = [pool.submit(_sent, url, request.path, request.content) for _ in range(request.copies)]
        answers = [each.result() for each in sent]
    return answers[-1][0], sum(size for _, size in answers), time.perf_counter() - begin


def _sent(url: str, path: str, content: bytes) -> tuple[int, int]:
    """Status and bytes of an answer; the client leaves, status 0, where nothing comes for long or the server leaves."""
    status, size = 0, 0
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=_LONGEST_S)
    try:
        if path:
            connection.request("POST", path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
        else:
            connection.connect()
            answer = http.client.HTTPResponse(connection.sock)
            connection.sock.sendall(content)
            answer.begin()
        status = answer.status
        while part := answer.read(1 << 20):
            size += len(part)
    except (TimeoutError, ConnectionError, http.client.HTTPException):
        pass
    finally:
        connection.close()
    return status, size


def markdown(made: Mapping[str, Any]) -> str:
    """The report; made: what is stored."""
    machine, median = made["machine"], made["median"]
    requests: Sequence[Mapping[str, Any]] = made["requests"]
    return "\n".join([
        f"# What one request costs others: {made['model']}, `{made['server']}`",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; {made['date']}, commit {made['commit']}; {made['threads']} "
        f"threads. Undisturbed, /health takes {1000 * median['health']:.1f} ms (median; longest "
        f"{1000 * made['undisturbed']['health']:.0f}) and 8 tokens take {1000 * median['completion']:.0f} ms "
        f"(longest {1000 * made['undisturbed']['completion']:.0f}). Delays are the longest of all probes while the "
        "request was served, less that median. `python -m benchmarks.serving.dearest`.",
        "",
        "| request | bytes | status | answer, bytes | its own s | worst delay of /health, s | of a completion, s |",
        "|---|---|---|---|---|---|---|",
        *map(_row, requests),
        "",
        f"Worst: /health {max((each['delays']['health'] for each in requests), default=0):.2f} s, completion "
        f"{max((each['delays']['completion'] for each in requests), default=0):.2f} s.",
        "",
    ])  # fmt: skip


def _row(request: Mapping[str, Any]) -> str:
    delays = request["delays"]
    return (
        f"| {request['name']} | {request['bytes']:,} | {request['status']} | {request['answer_bytes']:,} | "
        f"{request['seconds']:.2f} | {delays['health']:.2f} | {delays['completion']:.2f} |"
    )


if __name__ == "__main__":
    main()
