"""What readers and writers of foreign formats share: write options, and our own key in a foreign `config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, ModelError
from foretoken.core.validation import validated
from foretoken.formats.checkpoint import HeadCheckpoint, HeadExtras, TargetFingerprint
from foretoken.formats.mapping import with_ties
from foretoken.formats.target_info import TargetInfo
from foretoken.formats.whole_files import write_config, write_weights

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from foretoken.heads.base import HeadConfig

KEY = "foretoken"
# What numbers alone do not tell: equal blocks may be apart all the same, and biases of zero may be none.
_NETWORK_KEYS = ("tied_blocks", "has_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How to write a head.

    Attributes:
        target: What is known of the target.
        tp_size: Ranks to split the tensors over, for formats that do.
        as_safetensors: Whether to write safetensors where a format's own file is a pickle.
    """

    target: TargetInfo = field(default_factory=TargetInfo)
    tp_size: int = 1
    as_safetensors: bool = False


def expect_method(checkpoint: HeadCheckpoint, *methods: str, what: str) -> None:
    """Raises `ConfigError` unless a format has room for this kind of head."""
    method = checkpoint.config.method
    if method not in methods:
        raise ConfigError(f"{what} cannot hold a head of method '{method}'. Expected {' or '.join(methods)}.")


def own_entries(checkpoint: HeadCheckpoint, **more: Any) -> dict[str, Any]:
    """Our key of a foreign `config.json`, which other readers pass over; more: further values in it."""
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
    """The key by which published heads name their target."""
    name = None if checkpoint.target is None else checkpoint.target.name
    return {"base_model_name_or_path": name or "N/A"}


def own_entry(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """A value under our key of a foreign `config.json`."""
    entries = config.get(KEY)
    return entries.get(key, default) if isinstance(entries, dict) else default


def finished(
    name: str, config: Mapping[str, Any], sizes: HeadConfig, weights: Mapping[str, Tensor], target: TargetInfo
) -> HeadCheckpoint:
    """A checkpoint from what a format's reader found.

    Args:
        name: The file or directory, for messages.
        config: Its `config.json`.
        sizes: The head's configuration.
        weights: The head's tensors; equal blocks become tied ones unless the file says that they are apart.
        target: What the caller knows of the target; taken as the head's where the file does not say.

    Raises:
        ModelError: When our key holds nonsense.
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
    """Writes weights and then a configuration into a directory of `write_head`.

    Args:
        directory: New and empty, see `whole_files`.
        name: Of the weights, safetensors or a pickle by its ending.
        tensors: Each with memory of its own.
        config: For `config.json`; None leaves it out.
    """
    write_weights(directory / name, tensors)
    if config is not None:
        write_config(directory, config)
