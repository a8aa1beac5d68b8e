"""Prompts as token ids, tokenized once for all engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.bench.workload import HELD_OUT, load_prompts
from foretoken.models.loading import load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence


def of_length(prompts: Sequence[Sequence[int]], length: int) -> list[list[int]]:
    """As many prompts of exactly `length` tokens: each begins with its own and goes on with those that follow it.

    Args:
        prompts: Token ids, none empty.
        length: At least 1.
    """
    long = []
    for start in range(len(prompts)):
        tokens: list[int] = []
        following = start
        while len(tokens) < length:
            tokens += prompts[following % len(prompts)]
            following += 1
        long.append(tokens[:length])
    return long


def read_prompts(source: str, model: str, *, limit: int) -> list[list[int]]:
    """Reads prompts.

    Args:
        source: A `.jsonl` file whose lines hold `prompt_ids` or `prompt`, or what `foretoken bench` takes.
        model: Directory of the target, whose tokenizer turns text into ids.
        limit: At most this many.

    Raises:
        ValueError: When text has to be tokenized and the model has no tokenizer, or a prompt is empty.
    """
    path = Path(source)
    if source != HELD_OUT and path.is_file() and '"prompt_ids"' in path.read_text(encoding="utf-8"):
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        prompts = [list(json.loads(line)["prompt_ids"]) for line in lines[:limit]]
    else:
        texts = load_prompts(source, limit=limit)
        tokenizer = load_tokenizer(model)
        if tokenizer is None:
            raise ValueError(f"'{model}' has no tokenizer. Pass --prompts with a .jsonl file that holds 'prompt_ids'.")
        prompts = [list(tokenizer(text)["input_ids"]) for text in texts]
    if not prompts or not all(prompts):
        raise ValueError(f"'{source}' holds an empty prompt or none. Expected at least one token in each.")
    return prompts
