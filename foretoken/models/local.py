"""Finds the models that are on this machine, and the names that they have for `foretoken`. Needs no torch.

Places: the hub's cache, Ollama's store, LM Studio's folder, installed Python packages with a GGUF file, and `models/`.
"""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.errors import ForetokenError
from foretoken.files.bounded_reads import MIB, read_json_object, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MAGIC = b"GGUF"
_ENDING = ".gguf"
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE | re.DOTALL)
_MOST_PARTS = 1 << 10  # of a split model; a choice: the largest public ones have some 50
# Files that go with a model: projectors of images, statistics for rounding, drafters.
_COMPANION = re.compile(r"mmproj|imatrix|^(?:mtp|eagle3|dflash|dspark)-", re.IGNORECASE)
TAG = re.compile(r"(?:UD-)?(?:I?Q\d\w*|B?F16|F32|MXFP4\w*|TQ\d_\d)", re.IGNORECASE)
_TAG_IN_NAME = re.compile(rf"(?<![A-Za-z0-9])({TAG.pattern})(?=[.-])", re.IGNORECASE)
_PREFERRED = ("Q4_K_M", "Q8_0")
_OLLAMA_HOST, _OLLAMA_OWNER, _OLLAMA_TAG = "registry.ollama.ai", "library", "latest"
_SERVICE_STORE = "/usr/share/ollama/.ollama/models"  # of the system's service
_PACKAGE_PREFIX = "llm-"  # of plugins of the program `llm`, which carry models


class LocalModel(NamedTuple):
    """A model on this machine: what may be written as MODEL, its directory or GGUF file, and what keeps it there."""

    name: str
    place: Path
    source: str


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Decides whether a name is meant for a GGUF file of llama.cpp: by its ending, or by the first bytes of a file."""
    path = Path(name)
    try:
        if path.suffix.lower() == _ENDING:
            return not is_directory(path)
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except (OSError, ValueError):  # no file can be called so, or it may not be read
        return False


def main_files(names: Iterable[str]) -> list[str]:
    """Returns the GGUF files of models among file names, sorted: no companions, and the first part of split models."""
    return sorted(
        name
        for name in names
        if name.lower().endswith(_ENDING) and name == part_names(name)[0] and not _COMPANION.search(Path(name).name)
    )


def part_names(name: str) -> list[str]:
    """Returns the names of all parts of a split model by that of one, `NAME-00001-of-00003.gguf`; else the name alone.

    Source: `llama_split_path` of ggml-org/llama.cpp, src/llama.cpp.
    """
    match = _PART.fullmatch(name)
    if match is None or not 0 < int(match[3]) <= _MOST_PARTS:
        return [name]
    return [f"{match[1]}-{number:05}-of-{match[3]}{match[4]}" for number in range(1, int(match[3]) + 1)]


def with_tag(files: Iterable[str], tag: str) -> str | None:
    """Returns the first file whose name holds a tag before a dot or hyphen, in any case; None if there is none.

    Source: the rule of ggml-org/llama.cpp for `owner/name:TAG`. A tag begins a word here, so that F16 is not BF16.
    """
    wanted = re.compile(rf"(?<![A-Za-z0-9]){re.escape(tag)}[.-]", re.IGNORECASE)
    return next((name for name in files if Path(name).name.lower() == tag.lower() or wanted.search(name)), None)


def preferred(files: list[str]) -> str:
    """Returns the file that a repository's name alone stands for: in Q4_K_M, else in Q8_0, else the first."""
    return next((found for tag in _PREFERRED if (found := with_tag(files, tag))), files[0])


def tag_of(file: str, files: Iterable[str]) -> str:
    """Returns a tag that stands for one file among others: its quantization if no other has it, else its name."""
    match = _TAG_IN_NAME.search(Path(file).name)
    others = [name for name in files if name != file]
    return match[1] if match and with_tag(others, match[1]) is None else Path(file).name


def files_below(directory: Path) -> list[str]:
    """Returns the names of all files below a directory, from there; an empty list if it cannot be read."""
    return [
        (Path(folder) / name).relative_to(directory).as_posix()
        for folder, _, names in os.walk(directory)
        for name in names
    ]


def is_checkpoint(names: Iterable[str]) -> bool:
    """Decides whether files are a model in Hugging Face layout."""
    names = list(names)
    return "config.json" in names and any(name.endswith((".safetensors", ".bin")) and "/" not in name for name in names)


def local_models() -> list[LocalModel]:
    """Returns the models on this machine, each name once; without files that cannot be read, or names printed."""
    found = chain(_of_packages(), _of_folders(), _of_hub(), _of_ollama(), _of_lm_studio())
    return list({each.name: each for each in reversed(list(found)) if each.name.isprintable()}.values())[::-1]


def local_model(name: str) -> LocalModel | None:
    """Returns the model with a name; `:latest` may be left out, as with Ollama."""
    known = {each.name: each for each in local_models()}
    return known.get(name) or known.get(f"{name}:{_OLLAMA_TAG}")


def _named(stem: str, directory: Path, files: list[str], source: str) -> Iterator[LocalModel]:
    """Yields the GGUF files below a directory, with a tag if there are several."""
    for file in files:
        name = stem if len(files) == 1 else f"{stem}:{tag_of(file, files)}"
        yield LocalModel(name, directory / file, source)


def is_directory(path: str | Path) -> bool:
    """Decides whether there is such a directory; False for names that no directory can have."""
    return os.path.isdir(path)  # noqa: PTH112 - pathlib raises for some names, and for folders without permission


def entries(directory: Path) -> list[Path]:
    """Returns what lies in a directory, sorted; an empty list if it cannot be read."""
    try:
        return sorted(directory.iterdir())
    except (OSError, ValueError):
        return []


def _directories(parent: Path) -> list[Path]:
    return [each for each in entries(parent) if is_directory(each)]


def _of_packages() -> Iterator[LocalModel]:
    """Yields GGUF files that lie beside the `__init__.py` of an installed package."""
    for place in map(Path, dict.fromkeys(sys.path)):
        for package in _directories(place):
            names = [each.name for each in entries(package)]
            files = main_files(names) if "__init__.py" in names else []
            name = package.name.replace("_", "-")
            yield from _named(name.removeprefix(_PACKAGE_PREFIX), package, files, f"package {name}")


def holds_checkpoint(directory: Path) -> bool:
    """Decides whether a directory holds a model in Hugging Face layout, and not a head of ours."""
    config = directory / "config.json"
    return os.path.isfile(config) and "model_type" in _json(config)  # noqa: PTH113 - as in `is_directory`


def _of_folders() -> Iterator[LocalModel]:
    """Yields the models below `models/` here, and in the clone that this package lies in."""
    roots = {root.resolve(): root for root in (Path(__file__).parents[2] / "models", Path("models"))}
    for directory in chain.from_iterable(map(_directories, roots.values())):
        if holds_checkpoint(directory):
            yield LocalModel(str(directory), directory, "folder models")
        else:
            files = main_files(each.name for each in entries(directory))
            yield from _named(str(directory), directory, files, "folder models")


def hub_caches() -> list[Path]:
    """Returns the directories in which huggingface_hub and llama.cpp keep repositories."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(each) for each in dict.fromkeys((HF_HUB_CACHE, os.environ.get("LLAMA_CACHE"))) if each]


def snapshot(repository: str, revision: str | None = None) -> Path | None:
    """Returns the directory of a hub repository's files at a revision in the cache, some may be missing; or None."""
    for cache in hub_caches():
        place = cache / f"models--{repository.replace('/', '--')}"
        try:
            commit = read_regular(place / "refs" / (revision or "main"), limit=MIB).decode("utf-8").strip()
        except (ForetokenError, OSError, ValueError):
            commit = revision or ""
        if commit.isalnum() and is_directory(place / "snapshots" / commit):
            return place / "snapshots" / commit
    return None


def _of_hub() -> Iterator[LocalModel]:
    for cache in hub_caches():
        for place in _directories(cache):
            kind, _, name = place.name.partition("--")
            repository = name.replace("--", "/")
            found = snapshot(repository) if kind == "models" else None
            if found is None:
                continue
            names = files_below(found)
            if is_checkpoint(names):
                yield LocalModel(repository, found, "hub cache")
                continue
            files = main_files(names)
            for file in files:
                yield LocalModel(f"{repository}:{tag_of(file, files)}", found / file, "hub cache")


def _home() -> Path:
    return Path(os.path.expanduser("~"))  # noqa: PTH111 - pathlib raises for users without a home


def _of_ollama() -> Iterator[LocalModel]:
    own = os.environ.get("OLLAMA_MODELS")
    for store in [Path(own)] if own else [_home() / ".ollama/models", Path(_SERVICE_STORE)]:
        manifests = store / "manifests"
        for file in sorted(files_below(manifests)):
            if file.count("/") < 2:
                continue
            host, *owner, model, tag = file.split("/")
            layers = _json(manifests / file).get("layers")
            digests = [
                str(each.get("digest")).replace(":", "-")
                for each in (layers if isinstance(layers, list) else ())
                if isinstance(each, dict) and str(each.get("mediaType")).endswith(".image.model")
            ]
            if len(digests) != 1 or not is_gguf(blob := store / "blobs" / digests[0]):
                continue
            words = [*([] if host == _OLLAMA_HOST else [host]), *([] if owner == [_OLLAMA_OWNER] else owner), model]
            yield LocalModel(f"{'/'.join(words)}:{tag}", blob, "Ollama")


def _of_lm_studio() -> Iterator[LocalModel]:
    for publisher in _directories(_home() / ".lmstudio/models"):
        for directory in _directories(publisher):
            files = main_files(files_below(directory))
            yield from _named(f"{publisher.name}/{directory.name}", directory, files, "LM Studio")


def _json(path: Path) -> dict[str, object]:
    try:
        return read_json_object(path, limit=MIB)
    except (ForetokenError, json.JSONDecodeError):
        return {}
