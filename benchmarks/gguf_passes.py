"""Milliseconds of a pass of a GGUF file by number of tokens, beside llama.cpp and its fork ik_llama.cpp.

    python -m benchmarks.gguf_passes MODEL.gguf … [--rival PYTHON …] [--rows 128] [--tokens 1 4 16 64 1000] [--rounds 5]

PYTHON is the interpreter of an environment with `llama-cpp-python` or `ik-llama-cpp-python`. Contestants are processes
that take turns, each with two threads: foretoken with inputs of 16 bits, foretoken with `quantization="a8"`, and the
rivals with their default attention. A pass begins with token ids and ends with logits: of all tokens up to 64, of the
last one for prompts. Rows of the cache are set back after each pass. Medians of rounds, and of five passes in each.
"""

import argparse
import statistics
import sys

from benchmarks.machine import describe_machine
from benchmarks.pairs.contestants import Contestant


def main() -> None:
    """Prints a table for each file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--rival", nargs="+", default=[], help="interpreters")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 5, 8, 16, 64, 1000])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    print(describe_machine())
    for model in options.models:
        everyone = [
            Contestant(f"{bits} bits", "16 bits", sys.executable, "passes", target=model, bits=bits, rows=options.rows)
            for bits in (16, 8)
        ]
        for each in everyone:
            each.share_kept()  # compiled kernels
        everyone += [Contestant(name, "16 bits", name, "llama", target=model, draft=None) for name in options.rival]
        print(f"\n{model}\n| tokens | {' | '.join(each.name for each in everyone)} | over 16 bits |")
        print("|---" * (len(everyone) + 2) + "|")
        for tokens in options.tokens:
            passes = {"rows": options.rows, "tokens": tokens, "count": 5 if tokens <= 16 else 2 if tokens <= 64 else 1}
            rounds = [[each.answer(**passes)["seconds"] for each in everyone] for _ in range(options.rounds + 1)][1:]
            times = [f"{1e3 * statistics.median(each):.1f}" for each in zip(*rounds, strict=True)]
            ratios = [statistics.median(row[i] / row[0] for row in rounds) for i in range(1, len(everyone))]
            print(f"| {tokens} | {' | '.join(times)} | {', '.join(f'{each:.2f}' for each in ratios)} |", flush=True)
        for each in everyone:
            each.end()


if __name__ == "__main__":
    main()
