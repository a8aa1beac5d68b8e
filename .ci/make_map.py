"""Writes docs/map.md: every source file of the package with the first sentences of its docstring, layer by layer.

Usage: python .ci/make_map.py [--check] [--root DIRECTORY]. With --check nothing is written, and the exit status is 1
where the file differs from what would be written.
"""

import argparse
import ast
import re
import sys
import textwrap
import tomllib
from pathlib import Path

COMMAND = "python .ci/make_map.py"
PACKAGE = "foretoken"
_MAP = "docs/map.md"
_WIDTH = 100
_NATIVE = (".cpp", ".cu")
# Folders outside the package that hold no docstring to be read.
_FOLDERS = {
    ".ci": "What `make lint` and the continuous integration run; this map's generator.",
    "docs": "This folder: architecture, drafters, heads, runners, this map.",
    "models": "The bundled target, its draft model and a trained head of each method, each with its card.",
    "tests": "One folder for each package, and `end_to_end/` for the engine as a whole.",
}
_HEAD = f"""\
# Map

Written by `{COMMAND}` from the first sentences of the modules: change those, then run
the command again.

The packages stand in the order of the import layers (`[tool.importlinter]` in `pyproject.toml`,
checked by `make lint`): a package imports from those before it and from its own layer, never from
later ones. How they work together: [`architecture.md`](architecture.md).
"""


class MapError(Exception):
    """The repository has something that the map cannot describe."""


def layers(root: Path) -> list[list[str]]:
    """Names of the subpackages, layer by layer, beginning with the one that imports none of the others.

    Raises:
        MapError: When a subpackage is in no layer, or the other way round.
    """
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    contract = next(c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    found = [sorted(re.split(r"\s*[:|]\s*", layer)) for layer in reversed(contract["layers"])]
    odd = {name for layer in found for name in layer} ^ {
        init.parent.name for init in (root / PACKAGE).glob("*/__init__.py")
    }
    if odd:
        raise MapError(f"in [tool.importlinter] or in {PACKAGE}/, but not in both: {', '.join(sorted(odd))}.")
    return found


def summary(path: Path) -> str:
    """The first paragraph of a module's docstring, or the first sentence of a native source's opening comment.

    Raises:
        MapError: When there is none.
    """
    text = path.read_text(encoding="utf-8")
    if path.suffix in _NATIVE:
        comment = re.match(r"(?:// ?.*\n)+", text)
        found = "" if comment is None else re.sub(r"^// ?", "", comment[0], flags=re.MULTILINE).split("\n\n")[0]
        found = re.split(r"(?<=\.)\s", found)[0]
    else:
        found = (ast.get_docstring(ast.parse(text)) or "").split("\n\n")[0]
    if not found.strip():
        raise MapError(f"{path} does not say what it is for. Begin it with a sentence.")
    return " ".join(found.split())


def page(root: Path) -> str:
    """The whole of docs/map.md.

    Args:
        root: The repository.
    """
    package = root / PACKAGE
    order = layers(root)
    lines = [_HEAD, _wrapped(" → ".join(", ".join(layer) for layer in order)), ""]
    lines += [f"## {PACKAGE}\n", *_files(package, root), ""]
    for name in (name for layer in order for name in layer):
        folders = [init.parent for init in sorted((package / name).rglob("__init__.py"))]
        for folder in folders:
            lines += [f"## {folder.relative_to(package).as_posix()}\n", _wrapped(summary(folder / "__init__.py")), ""]
            lines += [*_files(folder, root), ""]
    lines += ["## Outside the package\n", *_other_folders(root)]
    return "\n".join(lines).replace("\n\n\n", "\n\n").rstrip() + "\n"


def _files(folder: Path, root: Path) -> list[str]:
    """One entry for each source file of a folder."""
    files = [path for path in folder.iterdir() if path.suffix in (".py", *_NATIVE)]
    if folder != root / PACKAGE:
        files = [path for path in files if path.name != "__init__.py"]
    return [_entry(path.relative_to(root).as_posix(), summary(path)) for path in sorted(files)]


def _other_folders(root: Path) -> list[str]:
    """One entry for each folder outside the package: what its `__init__.py` says, or what is written here."""
    entries = {name: text for name, text in _FOLDERS.items() if (root / name).is_dir()}
    for top in ("benchmarks", "recipes", "tests"):
        for init in (root / top).rglob("__init__.py"):
            entries[init.parent.relative_to(root).as_posix()] = summary(init)
    return [_entry(f"{name}/", text) for name, text in sorted(entries.items())]


def _entry(name: str, text: str) -> str:
    """A list entry, wrapped."""
    return _wrapped(f"- `{name}`: {text}", indent="  ")


def _wrapped(text: str, indent: str = "") -> str:
    """Text in lines that can be read without scrolling; paths are not broken."""
    return textwrap.fill(
        text, width=_WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def main() -> int:
    """Writes the map, or with --check says whether it is up to date; the exit status is 1 where it is not."""
    parser = argparse.ArgumentParser(description="Write docs/map.md from the docstrings of the modules.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where the map is stale")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the repository")
    arguments = parser.parse_args()
    place = arguments.root / _MAP
    try:
        wanted = page(arguments.root)
    except MapError as err:
        print(err)
        return 1
    if not arguments.check:
        place.write_text(wanted, encoding="utf-8")
    elif not place.is_file() or place.read_text(encoding="utf-8") != wanted:
        print(f"{_MAP} does not say what the modules say. Run {COMMAND} and commit the result.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
