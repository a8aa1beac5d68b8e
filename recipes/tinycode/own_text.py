"""Prompts for text that the target writes itself, and that text as documents: what heads learn from after the corpus.

Prompts are cut from training files as those of the benchmarks are from held-out ones. `foretoken data --self-distill`
writes what the target answers; `--responses` turns that into documents, which can be mixed with others.

    python -m recipes.tinycode.own_text --run-dir DIR --count 8000
    python -m recipes.tinycode.own_text --run-dir DIR --responses runs/own.generated.jsonl --out runs/own.jsonl
"""

from __future__ import annotations

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from recipes.tinycode.corpus import path_hash
from recipes.tinycode.paths import default_run_dir
from recipes.tinycode.prompts import OUT, choose, prompts_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

MODEL = OUT.parents[3] / "models" / "tinycode"


def prompts(files: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, str]]:
    """Yield prompts of training files, file by file in the order of their hashes."""
    with files.open(encoding="utf-8") as lines:
        records = sorted(map(json.loads, lines), key=lambda record: path_hash(record["path"], "own"))
    for record in records:
        for prompt in choose(prompts_of(record["text"], tokenizer), record["path"]):
            yield {"prompt": prompt, "completion": ""}


def documents(responses: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[dict[str, str]]:
    """Yield prompt and response of every line of a file of responses as one text."""
    with responses.open(encoding="utf-8") as lines:
        next(lines)  # the settings
        for line in map(json.loads, lines):
            yield {"text": tokenizer.decode(line["prompt"] + line["response"], skip_special_tokens=True)}


def main() -> None:
    """Write prompts, or documents of responses."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--count", type=int, default=8000, help="prompts")
    parser.add_argument("--responses", type=Path, help="of `foretoken data --self-distill`")
    parser.add_argument("--out", type=Path, help="default: own_prompts.jsonl in the run directory")
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if args.responses is None:
        rows = islice(prompts(args.run_dir / "train.jsonl", tokenizer), args.count)
    else:
        rows = documents(args.responses, tokenizer)
    out = args.out or args.run_dir / "own_prompts.jsonl"
    out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    print(f"{out}: {out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
