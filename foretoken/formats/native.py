"""Our own format: `config.json` with everything that is known of a head, and `model.safetensors` with its module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, Field, ValidationError
from safetensors import SafetensorError, safe_open

from foretoken.core.bounded_reads import check_regular
from foretoken.core.errors import ModelError, one_line
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, check_keys
from foretoken.formats.whole_files import whole_files, write_config, write_weights
from foretoken.heads.base import HeadConfig, build_head

if TYPE_CHECKING:
    from pathlib import Path

KEY = "foretoken_head"
WEIGHTS = "model.safetensors"
_Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class _Extras(BaseModel):
    """What a head may bring besides its sizes and target; see `HeadCheckpoint`."""

    acceptance: Annotated[list[Annotated[list[_Probability], Field(min_length=1)]], Field(min_length=1)] | None = None
    choices: list[Annotated[list[Annotated[int, Field(ge=0, strict=True)]], Field(min_length=1)]] | None = None
    notes: Mapping[str, Any] = {}


def recognises(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is ours."""
    return KEY in config


def read(directory: Path, config: Mapping[str, Any]) -> HeadCheckpoint:
    """Reads a head.

    Args:
        directory: Holds the weights.
        config: Its parsed `config.json`.

    Raises:
        ModelError: When the configuration makes no sense, the file is damaged, or keys do not fit.
    """
    path = directory / WEIGHTS
    try:
        kind = config_type(str(config[KEY]))
        sizes = kind.model_validate(config["config"])
        extras = _Extras.model_validate({key: config[key] for key in _Extras.model_fields if key in config})
        target = None if config.get("target") is None else TargetFingerprint.model_validate(config["target"])
    except (KeyError, ValidationError) as err:
        raise ModelError(
            f"the configuration of head '{directory}' makes no sense: {_reason(err)}. Copy or train it again."
        ) from err
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as file:
            shapes = {key: file.get_slice(key).get_shape() for key in file.keys()}  # noqa: SIM118 - no mapping
            with torch.device("meta"):
                wanted = {key: tuple(part.shape) for key, part in build_head(sizes).state_dict().items()}
            check_keys(str(directory), shapes, wanted)
            weights = {key: file.get_tensor(key) for key in wanted}
    except (SafetensorError, OSError) as err:
        raise ModelError(f"{path} is missing or damaged: {err}. Copy or train it again.") from err
    return HeadCheckpoint(
        config=sizes,
        weights=weights,
        target=target,
        acceptance=extras.acceptance,
        choices=extras.choices,
        notes=extras.notes,
    )


def write(checkpoint: HeadCheckpoint, directory: Path, *, replaces: bool = False) -> None:
    """Writes a head; each file appears whole or not at all, the configuration last.

    Args:
        checkpoint: The head.
        directory: Where to; made when it is not there.
        replaces: Whether everything else in the directory goes.

    Raises:
        ConfigError: When it cannot be written.
    """
    with whole_files(directory, replaces=replaces) as new:
        write_files(checkpoint, new)


def write_files(checkpoint: HeadCheckpoint, directory: Path) -> None:
    """The files of a head, one after another; for a directory that nobody reads yet. Raises `OSError`."""
    write_weights(directory / WEIGHTS, checkpoint.weights)
    write_config(
        directory,
        {
            KEY: checkpoint.config.method,
            "config": checkpoint.config.model_dump(mode="json"),
            "target": None if checkpoint.target is None else checkpoint.target.model_dump(mode="json"),
            "acceptance": checkpoint.acceptance,
            "choices": checkpoint.choices,
            "notes": dict(checkpoint.notes),
        },
    )


def config_type(method: str) -> type[HeadConfig]:
    """The configuration class of a method's head.

    Raises:
        KeyError: When no such head exists.
    """
    from importlib import import_module
    from importlib.util import find_spec

    if not method.isidentifier() or find_spec(f"foretoken.heads.{method}") is None:
        raise KeyError(method)
    kind: type[HeadConfig] = import_module(f"foretoken.heads.{method}").CONFIG
    return kind


def _reason(err: Exception) -> str:
    """What is wrong with a configuration, in one line."""
    if not isinstance(err, ValidationError):
        return one_line(err)
    first = err.errors()[0]
    more = f", and {err.error_count() - 1} more" if err.error_count() > 1 else ""
    return f"{'.'.join(map(str, first['loc'])) or 'it'}: {first['msg']}{more}"
