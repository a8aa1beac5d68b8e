"""Reads and writes our own format: `config.json` with all facts about a head, and `model.safetensors`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ModelError, nearest_name_hint
from foretoken.files.bounded_reads import check_regular
from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo, check_keys, checked_extras
from foretoken.formats.conversion import Format, WriteOptions, check_token_map, check_values, head_shapes
from foretoken.formats.files import HeadFiles, whole_files, write_config, write_weights
from foretoken.heads import head_methods

if TYPE_CHECKING:
    from foretoken.heads.base import HeadConfig

KEY = "foretoken_head"
WEIGHTS = "model.safetensors"
_ADVICE = "Copy or train it again."


def read_checkpoint(directory: Path, config: Mapping[str, Any]) -> HeadCheckpoint:
    """Reads a head; raises `ModelError` for an invalid configuration, damaged files and wrong keys."""
    path = directory / WEIGHTS
    what = f"the configuration of head '{directory}'"
    sizes = validated(config_type(config[KEY], what), config.get("config"), what, error=ModelError, advice=_ADVICE)
    extras = checked_extras(config, sizes.vocab_size, what, advice=_ADVICE)
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - no mapping
            wanted = head_shapes(sizes)
            check_keys(str(directory), shapes, wanted)
            weights = {key: file.get_tensor(key) for key in wanted}
        if "token_map" in weights:
            check_token_map(str(directory), weights["token_map"], sizes.vocab_size)
    except (SafetensorError, OSError) as err:
        raise ModelError(f"{path} is missing or damaged: {err}. Copy or train it again.") from err
    return HeadCheckpoint(config=sizes, weights=weights, **dict(extras))


def write_checkpoint(checkpoint: HeadCheckpoint, directory: Path, *, replaces: bool = False) -> None:
    """Writes a head, all of its files or none; raises `ConfigError` if that fails. replaces: see `whole_files`."""
    with whole_files(directory, replaces=replaces) as new:
        write_files(checkpoint, new)


def write_files(checkpoint: HeadCheckpoint, directory: Path) -> None:
    """Writes the files of a head into a new directory; raises `OSError`."""
    write_weights(directory / WEIGHTS, checkpoint.weights)
    write_config(
        directory,
        {
            KEY: checkpoint.config.method,
            "config": checkpoint.config.model_dump(mode="json"),
            **checkpoint.extras(),
        },
    )


def config_type(method: Any, what: str) -> type[HeadConfig]:
    """Returns the configuration class of a method's head; raises `ModelError` for unknown methods, naming `what`."""
    if not isinstance(method, str) or method not in head_methods():
        hint = nearest_name_hint(shown(method), head_methods())
        raise ModelError(f"'{KEY}' of {what} is {shown(method)}. {hint} {_ADVICE}")
    kind: type[HeadConfig] = import_module(f"foretoken.heads.{method}").CONFIG
    return kind


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    directory = files.path if files.path.is_dir() else files.path.parent
    checkpoint = read_checkpoint(directory, files.config)
    check_values(str(files.path), checkpoint.weights)
    return checkpoint


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    write_files(checkpoint, directory)


FORMATS = (Format("native", lambda files: KEY in files.config, _read_head, tuple(head_methods()), _write_head),)
