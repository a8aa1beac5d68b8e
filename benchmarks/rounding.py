"""What rounding a model's matrices changes: perplexity, KL divergence, and how often the greedy token changes.

    python -m benchmarks.rounding models/tinycode models/tinycode16k

Reads held-out texts of `benchmarks/prompts/long.jsonl`, as the model in float32 reads them and as the rounded models do
in bfloat16. KL divergence: of the next token's distribution from that in float32, in nats, mean over all tokens.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.rivals.machine import describe_machine
from foretoken.core.passes import Pass
from foretoken.decoder.quantized import Quantization
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.models.quantization.rounding import quantize_model
from foretoken.runner.runner import Runner

_TEXTS, _TOKENS = 24, 512
_PROMPTS = Path(__file__).with_name("prompts") / "long.jsonl"


def main() -> None:
    """Prints a table for each model."""
    print(f"{describe_machine()}; {_TEXTS} held-out texts of {_TOKENS} tokens")
    for name in sys.argv[1:]:
        exact, *others = [(each, _logits(name, each)) for each in ("float32", "bfloat16", *get_args(Quantization))]
        ids = _texts(name)[:, 1:].flatten()
        reference = exact[1].flatten(0, 1).log_softmax(1)
        plain = float(functional.nll_loss(reference, ids))
        print(
            f"\n{name}, perplexity {math.exp(plain):.3f}\n\n"
            "| weights | perplexity | KL divergence | greedy tokens changed |"
        )
        print("|---|---|---|---|")
        for kind, logits in others:
            own = logits.flatten(0, 1).log_softmax(1)
            divergence = float((reference.exp() * (reference - own)).sum(1).mean())
            loss, changed = float(functional.nll_loss(own, ids)), (own.argmax(1) != reference.argmax(1)).float().mean()
            print(
                f"| {kind} | {math.exp(loss - plain) - 1:+.2%} | {divergence:.5f} | {float(changed):.2%} |",
                flush=True,
            )


def _texts(name: str) -> Tensor:
    tokenizer: Any = load_tokenizer(name)
    lines = [json.loads(line) for line in _PROMPTS.read_text(encoding="utf-8").splitlines()]
    ids = [tokenizer.encode(line["prompt"])[: _TOKENS + 1] for line in lines]
    return torch.tensor([each for each in ids if len(each) > _TOKENS][:_TEXTS])


def _logits(name: str, kind: Any) -> Tensor:
    """Returns logits (texts, tokens, V) in float32."""
    model = load_model(name, dtype="float32" if kind == "float32" else "bfloat16")
    if kind not in ("float32", "bfloat16"):
        model = quantize_model(model, kind)
    runner = Runner(model, num_slots=1, context_len=_TOKENS, max_nodes=_TOKENS, runner="lean-native")
    rows = []
    for text in _texts(name):
        work = Pass.of_chains([text[:-1].tolist()], slots=[0], prefix_lens=[0]).with_all_logits()
        logits = runner.run(work).logits
        assert logits is not None
        rows.append(logits.float().clone())
    return torch.stack(rows)


if __name__ == "__main__":
    main()
