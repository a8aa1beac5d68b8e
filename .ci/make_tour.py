"""Runs docs/tour.py and writes its code and output into docs/tour.md and docs/tour.ipynb, its picture into docs/.

Usage: python .ci/make_tour.py [--prose]. The prose of both is that of docs/tour.md. Each block of Python there is
replaced by the next cell of docs/tour.py, each block of text by the cell's output. With --prose nothing runs: only the
notebook is written, from the page as it is.
"""

import ast
import contextlib
import io
import json
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, NOTEBOOK, SCRIPT = (ROOT / "docs" / f"tour.{suffix}" for suffix in ("md", "ipynb", "py"))
BLOCK = re.compile(r"```(python|text)\n(.*?)```\n", re.DOTALL)
PICTURE = "![Loss and acceptance while the head learns](tour.svg)\n"


def cells() -> list[str]:
    """Returns the code of the script by cell: imports and constants, then each step with its call in `main`."""
    source = SCRIPT.read_text(encoding="utf-8")
    body = ast.parse(source).body
    *steps, main = [node for node in body if isinstance(node, ast.FunctionDef)]
    calls = main.body[1:]  # without the docstring
    head = source.splitlines()[body[1].lineno : steps[0].lineno - 1]  # without `from __future__`
    made, pending, defined = ["\n".join(head).strip()], [], set()
    for step in steps:
        pending.append(_text(source, step))
        defined.add(step.name)
        later = {each.name for each in steps} - defined
        if not later & {node.id for node in ast.walk(calls[0]) if isinstance(node, ast.Name)}:
            made.append("\n\n\n".join([*pending, _text(source, calls.pop(0))]))
            pending = []
    return made


def _text(source: str, node: ast.stmt) -> str:
    begin = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) - 1
    return textwrap.dedent("\n".join(source.splitlines()[begin : node.end_lineno]))


def run(codes: list[str], changes: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """Runs cells in one namespace, as a notebook does.

    Args:
        codes: Code of the cells.
        changes: Names that get other values after the first cell.

    Returns:
        What each cell printed, and the namespace at the end.
    """
    namespace: dict[str, Any] = {}
    outputs = []
    for code in codes:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(code, str(SCRIPT), "exec"), namespace)
        outputs.append(printed.getvalue())
        if len(outputs) == 1:
            namespace |= changes
    return outputs, namespace


def page(text: str, codes: list[str], outputs: list[str]) -> str:
    """Returns the page with the code and the output of the cells in its blocks."""
    made = zip(codes, outputs, strict=True)
    left = [part for code, output in made for part in (("python", code), ("text", output)) if part[1]]
    kinds = [found[1] for found in BLOCK.finditer(text)]
    if kinds != [kind for kind, _ in left]:
        raise SystemExit(f"{PAGE} has blocks of {kinds}. Expected {[kind for kind, _ in left]}.")
    return BLOCK.sub(lambda found: f"```{found[1]}\n{left.pop(0)[1].rstrip()}\n```\n", text)


def notebook(text: str) -> str:
    """Returns the notebook of a page: its prose, code and output; the picture is that of the cell `result`."""
    made: list[dict[str, Any]] = []

    def add(kind: str, source: str, **more: Any) -> None:
        made.append({"cell_type": kind, "id": f"cell-{len(made)}", "metadata": {}, "source": source, **more})

    prose, *blocks = BLOCK.split(text.replace(PICTURE, "```python\nresult\n```\n"))
    add("markdown", prose.strip())
    for kind, content, after in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        code = content.rstrip()
        if kind == "text":
            made[-1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": content}]
        else:
            add("code", code, execution_count=None, outputs=[])
            if code == "result":
                data = {"image/svg+xml": PAGE.with_suffix(".svg").read_text(encoding="utf-8")}
                shown = {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
                made[-1]["outputs"] = [shown]
        if after.strip():
            add("markdown", after.strip())
    made[1]["source"] += '\n\nos.chdir("..")  # from docs/ to the root of the repository'
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    whole = {"cells": made, "metadata": {"kernelspec": python}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Runs the tour and writes its files."""
    os.chdir(ROOT)
    codes, text = cells(), PAGE.read_text(encoding="utf-8")
    if "--prose" not in sys.argv:
        outputs, namespace = run(codes, {})
        text = page(text, codes, outputs)
        namespace["result"].plot(PAGE.with_suffix(".svg"))
        PAGE.write_text(text, encoding="utf-8")
    NOTEBOOK.write_text(notebook(text), encoding="utf-8")


if __name__ == "__main__":
    main()
