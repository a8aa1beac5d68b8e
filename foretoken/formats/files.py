"""Opens the files of a checkpoint, reads their tensors on demand, and writes new files.

Files are not trusted. Only torch's restricted reader, which runs no code, loads pickles. Shard names must be plain file
names.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from foretoken.core.errors import ConfigError, ModelError, foreign_errors_as, listed, one_line
from foretoken.files.atomic_files import new_directory, told_as
from foretoken.files.bounded_reads import check_regular, read_json_object, tensor_headers
from foretoken.models.config import indexed_files
from foretoken.models.names import is_gguf, is_hub_id

_PLAIN = ["*.json", "*.safetensors"]
# Downloaded only if a repository has no safetensors; torch's restricted reader opens them.
_FETCHED_PICKLES = ["medusa_lm_head.pt", "hydra_lm_head.pt", "medusa_heads*.pt", "pytorch_model*.bin"]
_ELSEWHERE = ["*/*"]  # parts of training runs
_NUMBERS = re.compile(r"\[\n([-+.\deE,\s]+)\]")  # of indented JSON; its strings hold no line breaks


def local_head(name: str, revision: str | None = None, *, what: str = "head") -> Path:
    """Returns the local path of a head; downloads the head if necessary.

    Args:
        name: A directory, a file of weights, or a hub id `owner/name`. A local path always wins.
        revision: Branch, tag or commit of the hub repository; None for its main branch.

    Raises:
        ModelError: If the head does not exist or cannot be downloaded; with `HF_HUB_OFFLINE=1` if it is not in the
            cache.
    """
    path = Path(name)
    if "/" not in name or not is_hub_id(name):
        if revision is not None:
            raise ModelError(f"revision '{revision}' is of a hub repository, and '{name}' is none. Leave it out.")
        if not name or not path.exists():
            raise ModelError(
                f"there is no {what} '{name}'. Expected a directory with weights, a file of weights, or a hub id "
                "'owner/name'. Check the path."
            )
        return path
    snapshot = _download(name, revision, _PLAIN, what)
    if not any(snapshot.glob("*.safetensors")):
        snapshot = _download(name, revision, _FETCHED_PICKLES, what)
    return snapshot


def _download(name: str, revision: str | None, patterns: list[str], what: str) -> Path:
    at = "" if revision is None else f" at revision '{revision}'"
    with foreign_errors_as(  # missing repository, rights, network or space: each has its own type
        ModelError,
        lambda err: (
            f"{what} '{name}'{at} cannot be fetched from the hub: {one_line(err)}. Expected a repository that may be "
            "read, or one in the cache. Check its name and the network, or pass a directory."
        ),
    ):
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, ignore_patterns=_ELSEWHERE))


_PICKLES = ("*.pt", "*.pth", "*.bin")
_KNOWN_PICKLES = ("medusa_lm_head.pt", "hydra_lm_head.pt", "pytorch_model.bin")
_WRAPPERS = ("heads_state_dict", "state_dict", "model_state_dict")
_RANK = re.compile(r"rank(\d{1,4})\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Tensors by name, from one or several files; `fetch` reads some of them."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    fetch: Callable[[Iterable[str]], dict[str, Tensor]]

    def matches(self, pattern: re.Pattern[str]) -> list[re.Match[str]]:
        """Returns the keys that match as a whole."""
        found = (pattern.fullmatch(key) for key in self.shapes)
        return [match for match in found if match is not None]

    def renamed(self, rename: Callable[[str], str | None]) -> Weights:
        """Renames tensors; None drops one. Raises `ModelError` if two get the same name."""
        origin: dict[str, str] = {}
        for key in self.shapes:
            new = rename(key)
            if new is None:
                continue
            if new in origin:
                raise ModelError(f"'{self.name}' holds both '{origin[new]}' and '{key}'. Expected one of them.")
            origin[new] = key

        def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
            keys = list(keys)
            tensors = self.fetch([origin[key] for key in keys])
            return {key: tensors[origin[key]] for key in keys}

        return Weights(name=self.name, shapes={new: self.shapes[key] for new, key in origin.items()}, fetch=fetch)


@dataclass(frozen=True)
class HeadFiles:
    """A checkpoint of unknown format; `path` is a directory, or one file of weights.

    `config` is its `config.json`, or empty. `ranks` has weights by rank, if the checkpoint is split for tensor
    parallelism.
    """

    path: Path
    config: Mapping[str, Any]
    ranks: Mapping[int, Weights] = field(default_factory=dict)
    _files: tuple[Path, ...] = ()
    _opened: Weights | None = None

    @cached_property
    def weights(self) -> Weights:
        """All tensors; those of rank 0 if there are ranks, those of the head alone in a GGUF file."""
        if self._opened is not None:
            return self._opened
        if self.ranks:
            return self.ranks[min(self.ranks)]
        return _merged(str(self.path), [open_weights(file) for file in self._files])


def open_files(path: Path) -> HeadFiles:
    """Opens a directory with weights, or one file of weights; raises `ModelError` if it is missing or damaged."""
    directory = path if path.is_dir() else path.parent
    if not path.exists():
        raise ModelError(f"there is no head '{path}'. Expected a directory with weights, or a file of weights.")
    config_path = directory / "config.json"
    config = read_json_object(config_path) if config_path.exists() else {}
    if path.is_file():
        return _own_head(path) if is_gguf(path) else HeadFiles(path, config, _files=(path,))
    ranked = {int(match[1]): file for file in directory.iterdir() if (match := _RANK.fullmatch(file.name))}
    if ranked:
        return HeadFiles(path, config, ranks={rank: open_weights(ranked[rank]) for rank in sorted(ranked)})
    return HeadFiles(path, config, _files=tuple(_weight_files(directory)))


def _own_head(path: Path) -> HeadFiles:
    """Returns the head for multi-token prediction in a GGUF file of its target, as checkpoints have it."""
    from foretoken.models.stored.gguf_next_tokens import FurtherTokens

    found = FurtherTokens.of_file(path)
    if found is None:
        raise ModelError(f"'{path}' is a GGUF file, which holds a model. Expected the weights of a draft head.")

    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        return {key: found.tensor(key) for key in keys}

    opened = Weights(name=str(path), shapes=found.shapes, fetch=fetch)
    return HeadFiles(path, found.settings.fields, _opened=opened)


def holds_further_tokens(path: Path) -> bool:
    """Decides whether a path is a GGUF file of a model with a head; raises `ModelError` for damaged files."""
    from foretoken.models.stored.gguf_next_tokens import FurtherTokens

    return is_gguf(path) and FurtherTokens.of_file(path) is not None


def holds_pickles(directory: Path) -> bool:
    """Decides whether a directory has files that may be pickled weights."""
    return any(file for kind in _PICKLES for file in directory.glob(kind))


def open_weights(path: Path) -> Weights:
    """Opens safetensors, or a pickle of tensors alone; raises `ModelError` for damaged files and other content."""
    check_regular(path)
    if is_gguf(path):
        raise ModelError(f"'{path}' is a GGUF file, which holds a model. Expected the weights of a draft head.")
    return _open_safetensors(path) if path.suffix == ".safetensors" else _open_pickle(path)


def _weight_files(directory: Path) -> list[Path]:
    """Returns the files with weights: safetensors before pickles, an index before single files."""
    for kind in ("*.safetensors", "*.bin"):
        indices = sorted(directory.glob(f"{kind}.index.json"))
        if len(indices) == 1:
            return indexed_files(indices[0])
    files = sorted(directory.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file for kind in _PICKLES for file in directory.glob(kind))
    known = [file for file in pickles if file.name in _KNOWN_PICKLES]
    if len(pickles) > 1 and len(known) != 1:
        names = listed(file.name for file in pickles)
        raise ModelError(f"'{directory}' holds several files of weights: {names}. Name the one that you mean.")
    if not pickles:
        raise ModelError(f"'{directory}' holds no weights. Expected *.safetensors, or *.pt or *.bin.")
    return known or pickles


def _merged(name: str, parts: list[Weights]) -> Weights:
    owner: dict[str, Weights] = {}
    for part in parts:
        for key in part.shapes:
            if key in owner:
                raise ModelError(f"'{key}' is both in {owner[key].name} and in {part.name}. Expected it once.")
            owner[key] = part

    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        wanted = list(keys)
        found: dict[str, Tensor] = {}
        for part in parts:
            found |= part.fetch([key for key in wanted if owner[key] is part])
        return found

    return Weights(name=name, shapes={key: part.shapes[key] for key, part in owner.items()}, fetch=fetch)


def _open_safetensors(path: Path) -> Weights:
    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in keys}

    try:
        shapes = {key: header.shape for key, header in tensor_headers(path).items()}
    except (SafetensorError, OSError) as err:
        raise ModelError(f"{path} is damaged: {one_line(err)}. Copy or download it again.") from err
    return Weights(name=str(path), shapes=shapes, fetch=fetch)


def _open_pickle(path: Path) -> Weights:
    def told(error: Exception) -> str:
        if isinstance(error, pickle.UnpicklingError):  # torch's own advice is to load the file without restrictions
            return (
                f"{path} is damaged, or a pickle of more than tensors, which could run code when it is loaded. "
                "Expected a state dictionary. Save it as safetensors where you trust its origin."
            )
        return f"{path} is damaged: {one_line(error)}. Copy or download it again."

    # ignores warnings about old pickle protocols
    with foreign_errors_as(ModelError, told), warnings.catch_warnings(action="ignore"):
        value = torch.load(path, weights_only=True, map_location="cpu", mmap=zipfile.is_zipfile(path))
    if isinstance(value, dict):
        value = next((value[key] for key in _WRAPPERS if isinstance(value.get(key), dict)), value)
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ModelError(f"{path} holds a {type(value).__name__}. Expected a state dictionary of tensors.")
    foreign = [key for key, tensor in value.items() if not _is_plain(tensor)]
    if foreign:
        raise ModelError(f"{path} holds entries that are no plain tensors: {listed(foreign)}.")
    tensors: dict[str, Tensor] = {key: tensor.detach() for key, tensor in value.items()}
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    return Weights(name=str(path), shapes=shapes, fetch=lambda keys: {key: tensors[key] for key in keys})


def _is_plain(value: Any) -> bool:
    """Decides whether a dense tensor has memory for each element: a view that repeats elements could have any size."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.device.type != "cpu":
        return False
    return value.numel() * value.element_size() <= value.untyped_storage().nbytes()


CONFIG = "config.json"


@contextmanager
def whole_files(directory: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yields a new directory to write into; its files move to `directory` when the block ends without an error.

    With `replaces` they replace everything in it; otherwise each replaces the file of its name, `config.json` last.
    Raises `ConfigError` if the files cannot be written.
    """
    advice = "Expected a directory with enough room that may be written to. Name another place, or make room."
    existing: Any = "replace" if replaces else "merge"
    with (
        told_as(ConfigError, f"'{directory}'", advice),
        new_directory(directory, existing=existing, last=CONFIG) as new,
    ):
        yield new


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, each with its own memory: safetensors, or a pickle by the name's ending.

    Raises `OSError` or `SafetensorError` when they cannot be written; see `told_as`.
    """
    if path.suffix == ".safetensors":
        path.touch()
        mode = path.stat().st_mode  # safetensors makes its files readable by their owner alone
        save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)
        return
    with path.open("wb") as file:
        try:
            torch.save(dict(tensors), file)
        except RuntimeError as err:  # torch's writer hides the file's error
            cause = err.__context__ if isinstance(err.__context__, OSError) else None
            raise cause or OSError(one_line(err)) from err


def write_config(directory: Path, config: Mapping[str, Any]) -> None:
    """Writes the `config.json` of a checkpoint; lists of numbers, such as a vocabulary's, are one line each."""
    text = _NUMBERS.sub(lambda found: f"[{' '.join(found[1].split())}]", json.dumps(config, indent=2))
    (directory / CONFIG).write_text(text + "\n", encoding="utf-8")


def save(directory: Path, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> None:
    """Writes weights, and a configuration if given; the ending of `name` decides between safetensors and a pickle."""
    write_weights(directory / name, tensors)
    if config is not None:
        write_config(directory, config)
