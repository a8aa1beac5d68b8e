"""Cut benchmark prompts from held-out files: each stops where there is code to complete.

A prompt begins at the start of a file or of a top-level definition with what stands before it, and ends at the end of a
line (no trailing newline): a block opener, the close of a docstring, or the middle of a function body.

    python -m recipes.tinycode.prompts --run-dir DIR
"""

from __future__ import annotations

import argparse
import ast
import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from recipes.tinycode.corpus import is_test, path_hash
from recipes.tinycode.paths import default_run_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedTokenizerFast

MIN_TOKENS, MAX_TOKENS = 60, 250
MAX_PER_FILE = 2
TOTAL_BYTES = 115_000
OUT = Path(__file__).parents[2] / "foretoken" / "bench" / "prompts" / "tinycode_heldout.jsonl"


def cut_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield 1-based line numbers after which a function can be cut, leaving at least two lines of body."""
    first, *rest = node.body
    has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    if has_docstring and rest:
        yield first.end_lineno or first.lineno
    elif not has_docstring:
        yield first.lineno - 1
    for before, after in pairwise(node.body):
        if before is not first or not has_docstring:
            yield before.end_lineno or after.lineno - 1


def prompts_of(text: str, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return every admissible prompt of one file, in order."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    lines = text.split("\n")
    per_line = [len(e.ids) for e in tokenizer.backend_tokenizer.encode_batch([line + "\n" for line in lines])]
    total = [0, *accumulate(per_line)]  # tokens before each line: exact enough to skip hopeless ranges cheaply
    starts = [0, *(min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]) - 1 for n in tree.body)]
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for cut in cut_lines(node):
            if (node.end_lineno or 0) - cut < 2:
                continue
            for start in starts:  # the longest context that fits
                if not (start < cut and MIN_TOKENS <= total[cut] - total[start] <= MAX_TOKENS):
                    continue
                prompt = "\n".join(lines[start:cut]).rstrip()
                if MIN_TOKENS <= len(tokenizer(prompt)["input_ids"]) <= MAX_TOKENS:
                    found.append(prompt)
                    break
    return list(dict.fromkeys(found))


def choose(prompts: list[str], path: str) -> list[str]:
    """Pick at most `MAX_PER_FILE` prompts, by hash, of which no one contains the other."""
    chosen: list[str] = []
    for prompt in sorted(prompts, key=lambda p: path_hash(p, path)):
        if all(prompt[:80] not in other and other[:80] not in prompt for other in chosen):
            chosen.append(prompt)
        if len(chosen) == MAX_PER_FILE:
            break
    return chosen


def main() -> None:
    """Write the prompt file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(args.run_dir / "tokenizer")
    records, size = [], 0
    with (args.run_dir / "held_out.jsonl").open(encoding="utf-8") as lines:
        files = [json.loads(line) for line in lines]
    for file in sorted(files, key=lambda f: is_test(f["path"])):  # library code first
        for number, prompt in enumerate(choose(prompts_of(file["text"], tokenizer), file["path"])):
            name = f"{file['path'].removesuffix('.py').replace('/', '.')}-{number}"
            record = json.dumps({"id": name, "source": file["path"], "prompt": prompt}, ensure_ascii=False) + "\n"
            size += len(record.encode())
            if size <= TOTAL_BYTES:
                records.append(record)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("".join(records), encoding="utf-8")
    print(f"{len(records)} prompts, {OUT.stat().st_size} bytes")


if __name__ == "__main__":
    main()
