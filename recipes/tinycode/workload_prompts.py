"""Cut prompts of two further workloads from held-out files: edits of code that stands in the prompt, and prose.

An edit is a function followed by the head of the same function with one of its names changed: most of what follows
repeats the prompt. A prose prompt ends at the end of a line in the middle of a docstring.

    python -m recipes.tinycode.workload_prompts --run-dir DIR
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

from recipes.tinycode.corpus import is_test, path_hash
from recipes.tinycode.paths import default_run_dir
from recipes.tinycode.prompts import OUT, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedTokenizerFast

HELD_OUT = set((Path(__file__).parent / "held_out.txt").read_text(encoding="utf-8").split())  # of the target's training
MODEL = OUT.parents[3] / "models" / "tinycode"
MIN_TOKENS, MAX_TOKENS = 60, 400
NUM_PROMPTS = 24
LEAST_USES = 3  # of a name that is changed
LEAST_PROSE_LINES = 6
NEW_NAMES = {"path": "filename", "name": "label", "value": "item", "data": "content", "key": "field", "text": "source"}


def functions_of(text: str) -> Iterator[ast.FunctionDef]:
    """Yield the top-level functions of a file."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    yield from (node for node in tree.body if isinstance(node, ast.FunctionDef))


def edits_of(text: str) -> Iterator[str]:
    """Yield a function and the head of the same with one of its arguments renamed, for every function that has one."""
    lines = text.split("\n")
    for node in functions_of(text):
        code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
        uses = Counter(re.findall(r"\w+", code))
        for argument in node.args.args:
            new = NEW_NAMES.get(argument.arg, f"new_{argument.arg}")
            if uses[argument.arg] < LEAST_USES or uses[new] or argument.arg in ("self", "cls"):
                continue
            head = "\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])
            renamed = re.sub(rf"\b{argument.arg}\b", new, head)
            if head and len(code) > 3 * len(head):
                yield f"{code}\n\n\n{renamed}"
                break


def prose_of(text: str) -> Iterator[str]:
    """Yield the beginning of a file or function up to the middle of a docstring of several lines."""
    lines = text.split("\n")
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) or not node.body:
            continue
        first = node.body[0]
        is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        if not is_docstring or not isinstance(first.value.value, str):  # type: ignore[attr-defined]
            continue
        begin = 0 if isinstance(node, ast.Module) else node.lineno - 1
        num_lines = (first.end_lineno or first.lineno) - first.lineno
        if num_lines >= LEAST_PROSE_LINES:
            yield "\n".join(lines[begin : first.lineno + num_lines // 2]).rstrip()


def write(kind: str, cut: Callable[[str], Iterator[str]], run_dir: Path) -> None:
    """Write the prompts of one workload beside those of completion."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(MODEL)
    with (run_dir / "held_out.jsonl").open(encoding="utf-8") as lines:
        files = [file for file in map(json.loads, lines) if file["path"] in HELD_OUT]
    records: list[str] = []
    for file in sorted(files, key=lambda f: (is_test(f["path"]), path_hash(f["path"], kind))):
        fitting = [p for p in cut(file["text"]) if MIN_TOKENS <= len(tokenizer(p)["input_ids"]) <= MAX_TOKENS]
        for number, prompt in enumerate(choose(fitting, file["path"])):
            name = f"{kind}-{file['path'].removesuffix('.py').replace('/', '.')}-{number}"
            records.append(json.dumps({"id": name, "source": file["path"], "prompt": prompt}, ensure_ascii=False))
    out = OUT.with_name(f"tinycode_{kind}.jsonl")
    out.write_text("\n".join(records[:NUM_PROMPTS]) + "\n", encoding="utf-8")
    print(f"{out.name}: {len(records)} found, {NUM_PROMPTS} kept, {out.stat().st_size} bytes")


def main() -> None:
    """Write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    args = parser.parse_args()
    write("edit", edits_of, args.run_dir)
    write("prose", prose_of, args.run_dir)


if __name__ == "__main__":
    main()
