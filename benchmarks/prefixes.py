"""Measures the time to the first token of prompts that share their beginning, with and without the prefix cache.

    python -m benchmarks.prefixes [MODEL] [--dtype auto] [--runner auto] [--method eagle] [--shared 400] [--own 20]

Requests come one at a time; both engines take turns, so that a slow minute is the same for both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

from foretoken import LLM, SamplingParams

_REQUESTS = 21  # the first fills the cache, and warms up


def first_token_seconds(llm: LLM, prompt: list[int]) -> float:
    """Seconds from a request to its first token."""
    begin = time.perf_counter()
    chunks: Any = llm.stream({"prompt_token_ids": prompt}, SamplingParams(temperature=0.0, max_tokens=8))
    next(chunks)
    seconds = time.perf_counter() - begin
    for _ in chunks:
        pass
    return seconds


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--runner", default="auto")
    parser.add_argument("--method", help="Of a bundled drafter; plain decoding without.")
    parser.add_argument("--shared", type=int, default=400, help="Tokens that all prompts begin with.")
    parser.add_argument("--own", type=int, default=20, help="Tokens behind them.")
    given = parser.parse_args()
    engines = {
        is_on: LLM(
            given.model, dtype=given.dtype, runner=given.runner, max_model_len=1024, enable_prefix_caching=is_on,
            speculative_config={"method": given.method} if given.method else None,
        )
        for is_on in (False, True)
    }  # fmt: skip
    size = engines[True].target.vocab_size
    shared = [(7 * i + i * i) % size for i in range(given.shared)]
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for request in range(_REQUESTS):
        prompt = [*shared, *((11 * i + 13 * request + 1) % size for i in range(given.own))]
        for is_on, llm in engines.items():
            seconds[is_on].append(first_token_seconds(llm, prompt))
    ms = {is_on: sorted(1e3 * each for each in times[1:]) for is_on, times in seconds.items()}
    medians = {is_on: statistics.median(each) for is_on, each in ms.items()}
    report = {
        "runner": engines[True].target.name,
        "read_as_a_whole_ms": medians[False],
        "read_behind_the_prefix_ms": medians[True],
        "ratio": medians[False] / medians[True],
        "quartiles_ms": {
            "whole": [ms[False][len(ms[False]) // 4], ms[False][len(ms[False]) * 3 // 4]],
            "behind": [ms[True][len(ms[True]) // 4], ms[True][len(ms[True]) * 3 // 4]],
        },
    }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
