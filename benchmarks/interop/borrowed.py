"""Imports single files of another project's clone, with stand-ins for imports that are not needed.

Nothing of theirs is copied: files are run where they lie.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any


class UnusableError(Exception):
    """A clone lacks a file, or its code does not run beside the packages installed here; says why."""


def borrow(root: Path, *names: str, stand_ins: Mapping[str, Mapping[str, Any]] | None = None) -> list[ModuleType]:
    """Imports modules from a clone whose directory `root` holds their top package; packages around them are not run.

    `stand_ins` says what other modules are made of, by name.

    Raises:
        UnusableError: When a file is missing or cannot be run.
    """
    for name in names:
        file = root.joinpath(*name.split(".")).with_suffix(".py")
        if not file.is_file():
            raise UnusableError(f"'{root}' has no {file.relative_to(root)}")
    with _replaced(root, names, stand_ins or {}):
        try:
            return [importlib.import_module(name) for name in names]
        except Exception as err:  # whatever their imports meet here
            raise UnusableError(f"{names[0]} does not run here: {type(err).__name__}: {err}") from err


@contextmanager
def _replaced(root: Path, names: tuple[str, ...], stand_ins: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
    """Stand-ins and empty packages in `sys.modules`; afterwards it is as before."""
    before = dict(sys.modules)
    packages = {name.rsplit(".", depth)[0] for name in [*names, *stand_ins] for depth in range(1, name.count(".") + 1)}
    for package in packages:
        module = ModuleType(package)
        module.__path__ = [str(root.joinpath(*package.split(".")))]
        sys.modules[package] = module
    for name, content in stand_ins.items():
        if name not in packages:
            sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(content)
    try:
        yield
    finally:
        for name in set(sys.modules) - set(before):
            if name.split(".")[0] in {package.split(".")[0] for package in (*packages, *stand_ins)}:
                del sys.modules[name]
        sys.modules.update(before)
