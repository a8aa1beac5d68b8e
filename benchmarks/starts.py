"""Seconds from the start of a process to its first token, and its memory: with the self-test, and without.

    python -m benchmarks.starts MODEL.gguf …

Each start is a process of its own, on a file that the system has in memory. The first start of each model repeats the
self-test: what is remembered of earlier ones is removed before.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

from foretoken.files.user_cache import cache_directory
from foretoken.runner.proofs import FILE

_PROGRAM = """
import json, resource, sys, time
begin = time.perf_counter()
from foretoken import LLM, SamplingParams
imported = time.perf_counter()
llm = LLM(sys.argv[1], dtype="bfloat16")
made = time.perf_counter()
llm.generate(["def main(argv):"], SamplingParams(max_tokens=1, temperature=0.0), use_tqdm=False)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({
    "import_s": imported - begin, "llm_s": made - imported, "cpu_s": usage.ru_utime + usage.ru_stime,
    "memory_mib": usage.ru_maxrss >> 10,
}))
"""


def started(model: Path) -> dict[str, float]:
    """Starts a process; `first_token_s` counts from before the interpreter started until it has ended."""
    begin = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", _PROGRAM, str(model)], check=True, stdout=subprocess.PIPE)
    found: dict[str, float] = json.loads(done.stdout)
    return {"first_token_s": time.perf_counter() - begin, **found}


def main() -> None:
    """Prints a row for each start."""
    print("| file | start | to the first token, s | import, s | LLM, s | CPU, s | memory, MiB |\n" + "|---" * 7 + "|")
    for model in map(Path, sys.argv[1:]):
        model.read_bytes()
        (cache_directory() / FILE).unlink(missing_ok=True)
        for start in ("with the self-test", "later"):
            found = started(model)
            times = [f"{found[f'{name}_s']:.1f}" for name in ("first_token", "import", "llm", "cpu")]
            print("| " + " | ".join([model.name, start, *times, f"{found['memory_mib']:.0f}"]) + " |", flush=True)


if __name__ == "__main__":
    main()
