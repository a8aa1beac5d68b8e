"""Refuses a tree that is larger than the limits in `.ci/limits.toml`, and limits that are too large for the tree.

Usage: python .ci/check_size.py [DIRECTORY]; exits with 1 and one line a finding.
"""

import ast
import math
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = [f"foretoken/*.{suffix}" for suffix in ("py", "cpp", "h", "js", "html", "css")]
_LONG_FUNCTION = 50  # lines
_SLACK = 0.02  # of a limit; by more than that, a tree is smaller
_RULE = (
    "A limit in .ci/limits.toml is raised only with a line in CHANGELOG.md that says for what, and lowered whenever "
    "the tree is smaller by more than 2 %."
)


def sizes(repository: Path) -> dict[str, float]:
    """Returns what `.ci/limits.toml` limits, of the tracked files."""
    package = _texts(repository, *_PACKAGE)
    functions = [num_lines for text in _texts(repository, "foretoken/*.py") for num_lines in _functions(text)]
    num_long = sum(num_lines > _LONG_FUNCTION for num_lines in functions)
    return {
        "package_lines": _num_lines(package),
        "package_files": len(package),
        "test_lines": _num_lines(_texts(repository, "tests/*.py")),
        "benchmark_lines": _num_lines(_texts(repository, "benchmarks/*.py")),
        "long_functions_percent": round(100 * num_long / max(len(functions), 1), 1),
    }


def _texts(repository: Path, *patterns: str) -> list[str]:
    command = ["git", "ls-files", "-z", "--", *patterns]
    names = subprocess.run(command, cwd=repository, check=True, capture_output=True, text=True).stdout.split("\0")
    return [(repository / name).read_text(encoding="utf-8") for name in names if name and (repository / name).is_file()]


def _num_lines(texts: list[str]) -> int:
    return sum(text.count("\n") for text in texts)


def _functions(text: str) -> Iterator[int]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def findings(repository: Path) -> list[str]:
    """One line for each size above its limit, and for each limit that is to be lowered."""
    limits = tomllib.loads((repository / ".ci" / "limits.toml").read_text(encoding="utf-8"))
    found = []
    for name, size in sizes(repository).items():
        limit, new = limits[name], math.ceil(size / 100) * 100 if name.endswith("_lines") else size
        if size > limit:
            found.append(f"{name} is {size}. Expected at most {limit}.")
        elif size < limit * (1 - _SLACK) and new < limit:
            found.append(f"{name} is {size}, and its limit {limit}. Set the limit to {new}.")
    return [f"{line} {_RULE}" for line in found]


def main() -> int:
    """Prints the findings; the exit status is 1 where there are any."""
    found = findings(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
    print("\n".join(found) or "no size above its limit")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
