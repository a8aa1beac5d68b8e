"""Loads a server for a long time with requests of every kind, and watches its memory and its texts.

    python -m benchmarks.soak [MODEL] [-s ngram] [--minutes 30] [--clients 8] [--out NAME]

Writes NAME.json and NAME.md. Exits with 1 when a text differs from that of plain decoding, a request fails, a
slot stays taken, or memory grows: by more than 5 % from the end of the first quarter to the end.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.machine import commit, describe_machine
from benchmarks.serving.servers import Server, Setting
from foretoken.bench.workload import load_prompts

_MOST_GROWTH = 1.05
_SAMPLE_SECONDS = 5.0
_SCHEMA = {"type": "object", "properties": {"name": {"enum": ["a", "b"]}, "size": {"enum": [1, 2]}}}


def requests(prompts: Sequence[str]) -> list[dict[str, Any]]:
    """Bodies of all kinds, each of which has one right answer."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0.0, "max_tokens": 64},
        {"temperature": 0.8, "seed": 7, "max_tokens": 48, "n": 2},
        {"temperature": 0.0, "max_tokens": 32, "logprobs": 2, "repetition_penalty": 1.1},
        {"temperature": 0.7, "seed": 3, "max_tokens": 48, "stop": ["\n\n", "return"], "top_p": 0.9},
        {"temperature": 0.0, "max_tokens": 40, "structured_outputs": {"json": _SCHEMA}},
    )
    return [{"prompt": prompt, **kinds[index % len(kinds)]} for index, prompt in enumerate(prompts)]


class Soak:
    """What happens to one server."""

    def __init__(self, url: str, bodies: Sequence[Mapping[str, Any]], expected: Sequence[list[str]]) -> None:
        """Nothing is sent yet; expected: the texts of each body's answer."""
        self.counts: Counter[str] = Counter()
        self.first_difference = ""
        self._bodies, self._expected = bodies, expected
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=300.0, limits=limits)

    async def run(self, clients: int, seconds: float, sample: Any) -> None:
        """Sends requests until the time is over, and waits for the last; sample: called every few seconds."""
        end = time.monotonic() + seconds

        async def client(seed: int) -> None:
            rng = random.Random(seed)
            while time.monotonic() < end:
                await self._one(rng)

        async def watch() -> None:
            while time.monotonic() < end:
                await asyncio.sleep(_SAMPLE_SECONDS)
                sample(self.counts)

        async with self._client:
            await asyncio.gather(watch(), *(client(seed) for seed in range(clients)))

    async def _one(self, rng: random.Random) -> None:
        """One request: whole, as a stream, or given up in the middle."""
        index = rng.randrange(len(self._bodies))
        way = rng.choices(["whole", "streamed", "left"], [5, 3, 2])[0]
        body, texts = dict(self._bodies[index]), [""] * len(self._expected[index])
        try:
            if way == "whole":
                answer = await self._client.post("/v1/completions", json=body)
                answer.raise_for_status()
                texts = [choice["text"] for choice in answer.json()["choices"]]
            else:
                is_left = await self._read(body, texts, rng.randrange(1, 6) if way == "left" else None)
                if is_left:
                    self.counts["left"] += 1
                    return
        except (httpx.HTTPError, ValueError, LookupError) as err:
            self.counts["failed"] += 1
            self.first_difference = self.first_difference or f"{type(err).__name__}: {err}"
            return
        self.counts[way] += 1
        if texts != self._expected[index]:
            self.counts["different"] += 1
            self.first_difference = self.first_difference or f"{body}: {texts} instead of {self._expected[index]}"

    async def _read(self, body: dict[str, Any], texts: list[str], parts: int | None) -> bool:
        """Adds a stream's parts to `texts`; whether it was left after so many of them."""
        async with self._client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                for choice in json.loads(line[6:]).get("choices", []):
                    texts[choice["index"]] += choice["text"]
                if parts is not None and (parts := parts - 1) <= 0:
                    return True
        return False


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=Path("models/tinycode"))
    parser.add_argument("-s", "--drafter", default="ngram")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        model=given.model.resolve(), dtype="float32", threads=given.threads, max_num_seqs=given.max_num_seqs,
        log_dir=given.out.parent, has_prefix_caching=True,
    )  # fmt: skip
    made = {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": describe_machine(), "model": given.model.name,
        "drafter": given.drafter, "minutes": given.minutes, "clients": given.clients,
        **soaked(setting, given.drafter, given.clients, given.minutes),
    }  # fmt: skip
    given.out.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    given.out.with_suffix(".md").write_text(markdown(made), encoding="utf-8")
    print(markdown(made))
    sys.exit(1 if faults(made) else 0)


def soaked(setting: Setting, drafter: str, clients: int, minutes: float) -> dict[str, Any]:
    """What happens to a server with a drafter in so many minutes, JSON-ready."""
    bodies = requests(load_prompts("heldout")[:60])
    expected = plain_texts(setting, bodies)
    samples: list[dict[str, float]] = []
    server = Server(drafter, setting)
    try:
        with server.running():
            soak, begin = Soak(server.url, bodies, expected), time.monotonic()

            def sample(counts: Mapping[str, int]) -> None:
                at, mib = (time.monotonic() - begin) / 60, server.resident_bytes() / 2**20
                samples.append({"minutes": at, "mib": mib, "requests": sum(counts.values())})
                if len(samples) % 12 == 0:
                    print(f"{at:.0f} min, {mib:.0f} MiB, {dict(counts)}", file=sys.stderr, flush=True)

            asyncio.run(soak.run(clients, 60 * minutes, sample))
            running, waiting = wait_until_idle(server.url)
    finally:
        server.end()
    mib = [each["mib"] for each in samples]
    return {
        "counts": dict(soak.counts), "first_difference": soak.first_difference, "running": running, "waiting": waiting,
        "mib_after_a_quarter": statistics.median(mib[len(mib) // 5 : len(mib) // 4 + 1]),
        "mib_at_the_end": statistics.median(mib[-max(len(mib) // 20, 1) :]), "samples": samples,
    }  # fmt: skip


def faults(made: Mapping[str, Any]) -> list[str]:
    """What is not as it should be, in words."""
    counts = made["counts"]
    found = []
    if counts.get("failed") or counts.get("different"):
        found.append(f"requests failed or had another text, the first: {made['first_difference']}")
    if made["running"] or made["waiting"]:
        found.append("requests were left running or waiting")
    if made["mib_at_the_end"] > _MOST_GROWTH * made["mib_after_a_quarter"]:
        found.append("memory grew")
    return found


def plain_texts(setting: Setting, bodies: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """What a server without drafts answers."""
    server = Server("plain", setting)
    try:
        with server.running(), httpx.Client(base_url=server.url, timeout=300.0) as client:
            answers = [client.post("/v1/completions", json=body).raise_for_status().json() for body in bodies]
    finally:
        server.end()
    return [[choice["text"] for choice in answer["choices"]] for answer in answers]


def wait_until_idle(url: str) -> tuple[int, int]:
    """Requests that run and wait, once there are none, or after a minute."""
    running, waiting, end = 1, 1, time.monotonic() + 60
    while (running or waiting) and time.monotonic() < end:
        time.sleep(0.5)
        page = httpx.get(f"{url}/metrics", timeout=60.0).text
        found = {line.split("{")[0]: float(line.split()[-1]) for line in page.splitlines() if line[:1] not in ("#", "")}
        running, waiting = (int(found[f"foretoken:num_requests_{state}"]) for state in ("running", "waiting"))
    return running, waiting


def markdown(made: Mapping[str, Any]) -> str:
    """The report."""
    counts, machine = made["counts"], made["machine"]
    answers, failures = (
        ", ".join(str(counts.get(kind, 0)) for kind in kinds)
        for kinds in (("whole", "streamed", "left"), ("failed", "different"))
    )
    return "\n".join([
        f"# {made['minutes']:g} minutes of requests of all kinds: {made['model']} with `{made['drafter']}`",
        "",
        f"{machine['cpu']}, {machine['cores']} cores; {made['date']}, commit {made['commit']}; {made['clients']} "
        "clients; `python -m benchmarks.soak`.",
        "",
        "| | |",
        "|---|---|",
        f"| answers as a whole, as a stream, left in the middle | {answers} |",
        f"| failed, or with another text than plain decoding's | {failures} |",
        f"| requests that run and wait at the end | {made['running']}, {made['waiting']} |",
        f"| memory after a quarter of the time, at the end | {made['mib_after_a_quarter']:.0f} MiB, "
        f"{made['mib_at_the_end']:.0f} MiB |",
        f"| verdict | {'; '.join(faults(made)) or 'as it should be'} |",
        "",
    ])  # fmt: skip


if __name__ == "__main__":
    main()
