"""Milliseconds of a pass of a GGUF file by number of tokens, beside llama.cpp and its fork ik_llama.cpp.

    python -m benchmarks.gguf_passes MODEL.gguf … [--rival PYTHON …] [--rows 128] [--tokens 1 4 16 64 1000] [--rounds 5]

PYTHON is the interpreter of an environment with `llama-cpp-python` or `ik-llama-cpp-python`. Contestants are processes
that take turns, each with two threads: foretoken with inputs of 16 bits, foretoken with `quantization="a8"`, and the
rivals with their default attention. A pass begins with token ids and ends with logits: of all tokens up to 64, of the
last one for prompts. Rows of the cache are set back after each pass. Medians of rounds, and of five passes in each.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks.rivals.machine import describe_machine

_COMMON = """
import json, statistics, sys, time
path, rows = sys.argv[1], int(sys.argv[2])
ids = lambda count: [(37 * i + 5) % 5000 for i in range(count)]
def serve(run):
    print("ready", flush=True)
    for line in sys.stdin:
        tokens, count = map(int, line.split())
        print(json.dumps(statistics.median(run(tokens) for _ in range(count))), flush=True)
"""
_OURS = (
    _COMMON
    + """
from foretoken.core.passes import Pass
from foretoken.decoder.library import set_num_threads
from foretoken.models.loading import load_model
from foretoken.runner.runner import Runner
set_num_threads(2)
model = load_model(path, dtype="bfloat16", rounds_inputs=sys.argv[3] == "8")
runner = Runner(model, num_slots=1, context_len=rows + 1100, max_nodes=1000, runner="lean-native")
for part in (*runner.cache.keys, *runner.cache.values):
    part[..., : rows + 8, :].normal_()
def run(tokens):
    work = Pass.of_chains([ids(tokens)], slots=range(1), prefix_lens=[rows])
    work = work.with_all_logits() if tokens <= 64 else work
    begin = time.perf_counter()
    runner.run(work)
    return time.perf_counter() - begin
serve(run)
"""
)
_THEIRS = (
    _COMMON
    + """
import ctypes, os
os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
try:
    import llama_cpp as api
    cut = lambda: api.llama_memory_seq_rm(api.llama_get_memory(context), 0, rows, -1)
except ImportError:
    import ik_llama_cpp._ctypes_api as api
    remove = api._lib.llama_kv_cache_seq_rm
    remove.argtypes, remove.restype = [ctypes.c_void_p, *[ctypes.c_int32] * 3], ctypes.c_bool
    cut = lambda: remove(context, 0, rows, -1)
api.llama_backend_init()
model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
settings = api.llama_context_default_params()
settings.n_ctx, settings.n_batch, settings.n_ubatch = rows + 1100, 1024, 512
settings.n_threads = settings.n_threads_batch = 2
context = api.llama_init_from_model(model, settings)
def feed(tokens, first, has_all):
    batch = api.llama_batch_init(len(tokens), 0, 1)
    batch.n_tokens = len(tokens)
    for i, token in enumerate(tokens):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, first + i, 1, 0
        batch.logits[i] = has_all or i == len(tokens) - 1
    begin = time.perf_counter()
    assert api.llama_decode(context, batch) == 0
    api.llama_get_logits_ith(context, len(tokens) - 1)[0]
    seconds = time.perf_counter() - begin
    api.llama_batch_free(batch)
    return seconds
feed(ids(rows), 0, False)
def run(tokens):
    seconds = feed(ids(tokens), rows, tokens <= 64)
    cut()
    return seconds
serve(run)
"""
)


def contestant(python: str, program: str, *arguments: object) -> subprocess.Popen[str]:
    """Starts a process and waits until its model is loaded."""
    process = subprocess.Popen(
        [python, "-c", program, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    if process.stdout.readline() != "ready\n":
        sys.exit(f"{python} cannot time {arguments[0]}. Its environment needs llama-cpp-python or ik-llama-cpp-python.")
    return process


def seconds(process: subprocess.Popen[str], tokens: int, count: int) -> float:
    """Asks a process for the median of some passes."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{tokens} {count}\n")
    process.stdin.flush()
    found: float = json.loads(process.stdout.readline())
    return found


def main() -> None:
    """Prints a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rival", nargs="+", default=[], help="interpreters")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 5, 8, 16, 64, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    for model in options.models:
        own = [contestant(sys.executable, _OURS, model, options.rows, bits) for bits in (16, 8)]
        all_of = [*own, *(contestant(each, _THEIRS, model, options.rows) for each in options.rival)]
        print(
            f"\n{model.name}\n| tokens | {' | '.join(['16 bits', '8 bits', *map(str, options.rival)])} | over 16 bits |"
        )
        print("|---" * (len(all_of) + 2) + "|")
        for tokens in options.tokens:
            count = 5 if tokens <= 16 else 2 if tokens <= 64 else 1
            rounds = [[seconds(each, tokens, count) for each in all_of] for _ in range(options.rounds + 1)][1:]
            times = [f"{1e3 * statistics.median(each):.1f}" for each in zip(*rounds, strict=True)]
            ratios = [statistics.median(row[i] / row[0] for row in rounds) for i in range(1, len(all_of))]
            print(f"| {tokens} | {' | '.join(times)} | {', '.join(f'{each:.2f}' for each in ratios)} |", flush=True)
        for each in all_of:
            each.communicate()


if __name__ == "__main__":
    main()
