"""Shared parts of foreign formats: write options, and our own key in a foreign `config.json`."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretoken.core.errors import ConfigError, ModelError, one_line
from foretoken.core.validation import validated
from foretoken.files.atomic_files import new_directory, told_as
from foretoken.formats.checkpoint import HeadCheckpoint, HeadExtras, TargetFingerprint
from foretoken.formats.mapping import with_ties
from foretoken.formats.target_info import TargetInfo

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from foretoken.heads.base import HeadConfig

CONFIG = "config.json"


@contextmanager
def whole_files(directory: Path, *, replaces: bool = False) -> Iterator[Path]:
    """Yields a new directory to write into; its files move to `directory` when the block ends without an error.

    Args:
        directory: Created if missing. See `core.atomic_files` for symbolic links.
        replaces: Whether the new files replace everything in it. Otherwise each replaces the file of its name,
            `config.json` last.

    Raises:
        ConfigError: If the files cannot be written.
    """
    advice = "Expected a directory with enough room that may be written to. Name another place, or make room."
    existing: Any = "replace" if replaces else "merge"
    with (
        told_as(ConfigError, f"'{directory}'", advice),
        new_directory(directory, existing=existing, last=CONFIG) as new,
    ):
        yield new


@contextmanager
def safetensors_errors() -> Iterator[None]:
    """Turns errors of safetensors about files that cannot be written into `OSError`."""
    try:
        yield
    except SafetensorError as err:
        raise OSError(one_line(err)) from err


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes tensors, each with its own memory: safetensors, or a pickle by the name's ending; raises `OSError`."""
    if path.suffix == ".safetensors":
        path.touch()
        mode = path.stat().st_mode  # safetensors makes its files readable by their owner alone
        with safetensors_errors():
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
    """Writes the `config.json` of a checkpoint."""
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


MEDUSA_CODE = "FasterDecoding/Medusa"
HYDRA_CODE = "zankner/Hydra"
TRT_MEDUSA = "TensorRT-LLM"
TRT_HYDRA = "the public Hydra port of TensorRT-LLM"
VLLM = "vLLM 0.32"
VLLM_EAGLE = "vLLM"
EAGLE_CODE = "SafeAILab/EAGLE"
FALCON_CODE = "Bestpay-inc/Falcon"
SGLANG = "SGLang"
SPECFORGE = "sgl-project/SpecForge"
SPECULATORS = "speculators 0.9"
TGI = "TGI 3.3"
OLD_TGI = "TGI 2.0.3 to 2.2"


class Reader(NamedTuple):
    """A program that may read a checkpoint.

    Attributes:
        program: Its name, with the version if that matters.
        reads: Whether it computes the same network.
        how: What to do; or, if it does not read the head, what happens.
    """

    program: str
    reads: bool
    how: str

    def __str__(self) -> str:
        return f"{'read' if self.reads else 'not read'} by {self.program}: {self.how}"


def has_different_blocks(checkpoint: HeadCheckpoint, *names: str) -> bool:
    """Decides whether blocks that other programs tie differ; names: stacked tensors with blocks along dimension 1."""
    stacked = [checkpoint.weights[name] for name in names if name in checkpoint.weights]
    return any(not torch.equal(part, part[:, :1].expand_as(part)) for part in stacked if part.shape[1] > 1)


def needs_target_name(checkpoint: HeadCheckpoint) -> str:
    """Returns advice for readers that load the target by the head's entry, if this head names no target."""
    is_named = checkpoint.target is not None and checkpoint.target.name
    return (
        "" if is_named else "; set base_model_name_or_path in config.json to the target, which this head does not name"
    )


KEY = "foretoken"
# Tensors do not tell these: equal blocks may be untied, and zero biases may be absent.
_NETWORK_KEYS = ("tied_blocks", "has_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How to write a head.

    Attributes:
        target: What is known of the target.
        tp_size: Ranks to split the tensors over, for formats that do.
        as_safetensors: Whether to write safetensors if the format's own file is a pickle.
    """

    target: TargetInfo = field(default_factory=TargetInfo)
    tp_size: int = 1
    as_safetensors: bool = False


def expect_method(checkpoint: HeadCheckpoint, *methods: str, what: str) -> None:
    """Raises `ConfigError` unless a format can hold heads of this method."""
    method = checkpoint.config.method
    if method not in methods:
        raise ConfigError(f"{what} cannot hold a head of method '{method}'. Expected {' or '.join(methods)}.")


def own_entries(checkpoint: HeadCheckpoint, **more: Any) -> dict[str, Any]:
    """Returns our key of a foreign `config.json`, which other readers ignore; more: further values in it."""
    target = checkpoint.target
    return {
        KEY: {
            "target": None if target is None else target.model_dump(mode="json"),
            "acceptance": checkpoint.acceptance,
            "choices": checkpoint.choices,
            "notes": dict(checkpoint.notes),
            **{key: getattr(checkpoint.config, key) for key in _NETWORK_KEYS if hasattr(checkpoint.config, key)},
            **more,
        }
    }


def target_name(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Returns the key by which published heads name their target."""
    name = None if checkpoint.target is None else checkpoint.target.name
    return {"base_model_name_or_path": name or "N/A"}


def own_entry(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns a value under our key of a foreign `config.json`."""
    entries = config.get(KEY)
    return entries.get(key, default) if isinstance(entries, dict) else default


def finished(
    name: str, config: Mapping[str, Any], sizes: HeadConfig, weights: Mapping[str, Tensor], target: TargetInfo
) -> HeadCheckpoint:
    """Returns the checkpoint of a format's reader.

    Args:
        name: The file or directory, for messages.
        config: Its `config.json`.
        sizes: The head's configuration.
        weights: The head's tensors; equal blocks become tied unless the file says otherwise.
        target: The caller's knowledge of the target, used if the file names none.

    Raises:
        ModelError: If our key has invalid entries, or the head does not fit the target.
    """
    if hasattr(sizes, "tied_blocks") and own_entry(config, "tied_blocks") is not False:
        sizes, weights = with_ties(sizes, dict(weights))
    entries = config.get(KEY)
    entries = entries if isinstance(entries, dict) else {}
    extras = validated(HeadExtras, entries, f"'{KEY}' in the config.json of '{name}'", error=ModelError)
    known = extras.target or target.fingerprint
    base = config.get("base_model_name_or_path")
    if known is None and isinstance(base, str) and base != "N/A":
        known = TargetFingerprint(name=base, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    checkpoint = HeadCheckpoint(
        config=sizes,
        weights=weights,
        target=known,
        acceptance=extras.acceptance,
        choices=extras.choices,
        notes=extras.notes,
    )
    own = TargetFingerprint(hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    if target.fingerprint is not None and own.differences(target.fingerprint):
        checkpoint.check_target(target.fingerprint, what=name)
        raise ModelError(
            f"head '{name}' has {', '.join(own.differences(target.fingerprint))}, which is the target's. "
            "Expected a head for this target."
        )
    return checkpoint


def save(directory: Path, name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any] | None = None) -> None:
    """Writes weights and then a configuration into a new directory, see `whole_files`.

    Args:
        directory: New and empty.
        name: Of the weights; the ending decides between safetensors and a pickle.
        tensors: Each with its own memory.
        config: For `config.json`; None leaves it out.
    """
    write_weights(directory / name, tensors)
    if config is not None:
        write_config(directory, config)
