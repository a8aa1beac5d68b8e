"""What rounding matrices or KV rows changes: perplexity, KL divergence, and how often the greedy token changes.

    python -m benchmarks.rounding models/tinycode models/tinycode16k

Reads held-out texts of `benchmarks/prompts/long.jsonl`, with the model in float32 and the rounded models in bfloat16.
"kv" stands for KV rows in int8.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from benchmarks.rivals.machine import describe_machine
from foretoken.bench.quality import compare_weights
from foretoken.bench.workload import no_progress
from foretoken.decoder.quantized import Quantization
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.models.quantization.rounding import quantize_model

_TEXTS, _TOKENS = 24, 512
_PROMPTS = Path(__file__).with_name("prompts") / "long.jsonl"


def main() -> None:
    """Prints a table for each model."""
    print(f"{describe_machine()}; {_TEXTS} held-out texts of {_TOKENS} tokens")
    for name in sys.argv[1:]:
        texts = _texts(name)
        print(f"\n{name}\n\n| weights | perplexity | KL divergence | greedy tokens changed |\n|---|---|---|---|")
        for kind in ("bfloat16", "kv", *get_args(Quantization)):
            model = load_model(name, dtype="bfloat16", device="cpu")
            if kind == "kv":
                model = replace(model, kv_cache_dtype="int8")
            elif kind != "bfloat16":
                model = quantize_model(model, kind)
            found = compare_weights(model, load_model(name, dtype="float32", device="cpu"), texts, no_progress)
            change = found.perplexity / found.original_perplexity - 1
            print(f"| {kind} | {change:+.2%} | {found.kl_divergence:.5f} | {found.greedy_changes:.2%} |", flush=True)


def _texts(name: str) -> list[list[int]]:
    tokenizer: Any = load_tokenizer(name)
    lines = [json.loads(line) for line in _PROMPTS.read_text(encoding="utf-8").splitlines()]
    ids = [tokenizer.encode(line["prompt"])[:_TOKENS] for line in lines]
    return [each for each in ids if len(each) == _TOKENS][:_TEXTS]


if __name__ == "__main__":
    main()
