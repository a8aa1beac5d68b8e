"""The parts that readers and writers of foreign formats share: tables of tensor names, write options, our own key.

A table maps a format's tensor names to entries of a head's state dictionary, for reading and for writing, so a round
trip changes nothing. A head stacks tensors that formats store separately: a `Place` is a name and indices into the
first dimensions. Several names may share a place; their tensors must then be equal.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.checks import Model, validated
from foretoken.core.errors import ModelError, listed
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint, TargetInfo, check_keys, checked_extras
from foretoken.heads.base import HeadConfig, build_head

if TYPE_CHECKING:
    from foretoken.formats.files import HeadFiles, Weights

KEY = "foretoken"
_MOST_PARTS = 64  # heads, layers or stages; a choice: published heads have at most 8, a typing error has more
# Tensors do not tell these: equal blocks may be untied, and zero biases may be absent.
_NETWORK_KEYS = ("tied_blocks", "has_bias")
_REPEATED = ("weight", "bias")  # stacked tensors with blocks along dimension 1
ATTENTION_BIASES = ("q_proj", "k_proj", "v_proj")

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

    `reads`: whether it computes the same network. `how`: what to do, or what happens if it does not read the head.
    """

    program: str
    reads: bool
    how: str

    @classmethod
    def unless(cls, reason: str | None, program: str, how: str) -> Reader:
        """Returns a program that reads a checkpoint in the way `how`, unless there is a reason against it."""
        return cls(program, reason is None, reason or how)

    def __str__(self) -> str:
        return f"{'read' if self.reads else 'not read'} by {self.program}: {self.how}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How to write a head.

    Formats that split tensors take `tp_size` ranks. `as_safetensors` writes safetensors if the format's own file is a
    pickle.
    """

    target: TargetInfo = field(default_factory=TargetInfo)
    tp_size: int = 1
    as_safetensors: bool = False


class Format(NamedTuple):
    """A format of heads. Only a format that can be written has `methods`, `write` and `readers`.

    Attributes:
        name: As `read_head` returns it and `write_head` takes it.
        recognises: Decides by tensors and configuration, never by a path's name.
        read: Returns the head of a checkpoint that was recognised. The target gives sizes that files leave out, and
            tensors to compare with those that files repeat. Raises `ModelError` for missing, unexpected and mis-shaped
            keys, numbers that are not finite, and sizes that are unknown or make no sense.
        methods: The methods of heads that can be written.
        write: Writes a head of one of these methods into an empty directory. Raises `ConfigError` if the format cannot
            hold the head, if other programs would compute another network, or if a part of the target is missing.
        readers: Returns the programs that read the result of `write`, and those that do not.
    """

    name: str
    recognises: Callable[[HeadFiles], bool]
    read: Callable[[HeadFiles, TargetInfo], HeadCheckpoint]
    methods: tuple[str, ...] = ()
    write: Callable[[HeadCheckpoint, Path, WriteOptions], None] | None = None
    readers: Callable[[HeadCheckpoint, WriteOptions], list[Reader]] | None = None


class Place(NamedTuple):
    """Where a tensor lies in the state dictionary of a head: a name, and indices into the first dimensions."""

    name: str
    at: tuple[int, ...] = ()


def layer_table(theirs: str, ours: str, *, has_bias: bool = False) -> dict[str, Place]:
    """Returns the places of the tensors of a Llama's block, without its first norm, by prefixes of both names."""
    names = {f"self_attn.{part}": part for part in (*ATTENTION_BIASES, "o_proj")}
    names |= {f"mlp.{part}": part for part in ("gate_proj", "up_proj", "down_proj")}
    places = {f"{theirs}.{name}.weight": Place(f"{ours}.{part}.weight") for name, part in names.items()}
    if has_bias:
        places |= {f"{theirs}.self_attn.{part}.bias": Place(f"{ours}.{part}.bias") for part in ATTENTION_BIASES}
    places[f"{theirs}.post_attention_layernorm.weight"] = Place(f"{ours}.post_attention_norm")
    return places


def template_pattern(template: str, ending: str = "") -> re.Pattern[str]:
    """Compiles a template of tensor names: each {field} becomes a number in a group of that name."""
    return re.compile(re.sub(r"\\{(\w+)\\}", r"(?P<\1>\\d{1,4})", re.escape(template)) + ending)


def head_shapes(config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a head's state dictionary."""
    with torch.device("meta"):
        return {name: tuple(part.shape) for name, part in build_head(config).state_dict().items()}


def wanted_shapes(table: Mapping[str, Place], config: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the file's tensors."""
    shapes = head_shapes(config)
    return {key: shapes[place.name][len(place.at) :] for key, place in table.items()}


def read_tensors(
    weights: Weights,
    table: Mapping[str, Place],
    config: HeadConfig,
    *,
    ignored: Iterable[str] = (),
    extra: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, Tensor]:
    """Reads a head's state dictionary from a file.

    Args:
        table: Places by the file's keys; a key may be missing if another key shares its place.
        ignored: Unused keys of the file.
        extra: Shapes of further tensors that must exist and be finite; the caller fetches them.

    Raises:
        ModelError: With all keys that are wrong, not finite, or share a place and differ.
    """
    wanted = {**wanted_shapes(table, config), **(extra or {})}
    unused = set(ignored)
    found = {key: shape for key, shape in weights.shapes.items() if key not in unused}
    present = {place for key, place in table.items() if key in found}
    repeated = [key for key, place in table.items() if key not in found and place in present]
    check_keys(weights.name, found, {key: shape for key, shape in wanted.items() if key not in repeated})
    if extra:
        check_values(weights.name, weights.fetch(extra))
    return assemble(weights.name, weights.fetch([key for key in table if key in found]), table, config)


def assemble(
    name: str, tensors: Mapping[str, Tensor], table: Mapping[str, Place], config: HeadConfig
) -> dict[str, Tensor]:
    """Builds a state dictionary from tensors of checked shapes; name: of the file, for messages."""
    check_values(name, tensors)
    first: dict[Place, str] = {}
    for key, tensor in tensors.items():
        other = first.setdefault(table[key], key)
        if other != key and not torch.equal(tensors[other], tensor):
            raise ModelError(
                f"'{other}' and '{key}' of '{name}' differ. Expected equal tensors, as its weights are tied."
            )
    default = next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), torch.float32)
    result = {}
    for ours, shape in head_shapes(config).items():
        parts = {place.at: tensors[key] for place, key in first.items() if place.name == ours}
        if () in parts:
            result[ours] = parts[()].contiguous()
            continue
        dtypes = {part.dtype for part in parts.values()} or {default}
        whole = torch.empty(shape, dtype=max(dtypes, key=lambda one: (one.itemsize, str(one))))
        for index, part in parts.items():
            whole[index] = part
        result[ours] = whole
    return result


def scatter(weights: Mapping[str, Tensor], table: Mapping[str, Place]) -> dict[str, Tensor]:
    """Returns the file's tensors from a head's state dictionary, as copies."""
    return {key: weights[place.name][place.at].clone().contiguous() for key, place in table.items()}


def check_values(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raises `ModelError` with the names of all tensors that are quantized or not finite."""
    packed = [key for key, tensor in tensors.items() if tensor.is_floating_point() and tensor.itemsize < 2]
    if packed:
        raise ModelError(f"'{name}' holds quantized tensors: {listed(packed)}. Expected floats of 16 bits or more.")
    bad = [key for key, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]
    if bad:
        raise ModelError(f"tensors of '{name}' hold numbers that are not finite: {listed(bad)}. Train it again.")


def check_token_map(name: str, token_map: Tensor, vocab_size: int) -> None:
    """Raises `ModelError` unless the map has different tokens of the vocabulary, int64; name: of the file."""
    is_map = token_map.dtype == torch.int64 and token_map.unique().numel() == token_map.numel()
    if not is_map or bool(((token_map < 0) | (token_map >= vocab_size)).any()):
        raise ModelError(f"the token_map of '{name}' is no map. Expected different tokens in 0..{vocab_size - 1}.")


def has_different_blocks(weights: Mapping[str, Tensor]) -> bool:
    """Decides whether blocks differ that other programs tie."""
    stacked = [weights[name] for name in _REPEATED if name in weights]
    return any(not torch.equal(part, part[:, :1].expand_as(part)) for part in stacked)


def most_common(values: Iterable[int], *, name: str, what: str) -> int:
    """Returns the size of most tensors, so that errors name the odd one; raises `ModelError` without any."""
    counted = Counter(values).most_common(1)
    if not counted:
        raise ModelError(f"'{name}' does not tell its {what}. Expected tensors that do. Copy or convert it again.")
    return counted[0][0]


def count(indices: Iterable[int], *, name: str, what: str) -> int:
    """Returns the largest index plus one; raises `ModelError` for an implausible number."""
    number = max(indices, default=-1) + 1
    if number > _MOST_PARTS:
        raise ModelError(f"'{name}' numbers {number} {what}. Expected at most {_MOST_PARTS}.")
    return number


def make_config(kind: type[Model], name: str, **sizes: Any) -> Model:
    """Builds a configuration from a file's sizes; raises `ModelError` for invalid sizes."""
    for key in ("num_heads", "num_layers"):
        if isinstance(sizes.get(key), int) and sizes[key] > _MOST_PARTS:
            raise ModelError(f"head '{name}' has {key} {sizes[key]}. Expected at most {_MOST_PARTS}.")
    return validated(kind, sizes, f"head '{name}'", error=ModelError, advice="Copy or convert it again.")


def is_targets(tensor: Tensor, other: Tensor) -> bool:
    """Decides whether a tensor equals a tensor of the target, in its own dtype."""
    return tensor.shape == other.shape and torch.equal(tensor, other.to("cpu", tensor.dtype))


def warn(name: str, what: str) -> None:
    """Warns of something suspicious in the file or directory `name`."""
    logging.getLogger(__name__).warning("%s: %s", name, what)


def warn_of_embedding(weights: Weights, key: str, target: TargetInfo) -> None:
    """Warns if a file's embedding differs from the target's."""
    if target.weights is not None and not is_targets(weights.fetch([key])[key], target.weights.embedding):
        warn(weights.name, f"{key} is not the target's embedding")


def warn_of_counts(name: str, config: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Warns where config.json counts differ from `found`, the counts in the tensors."""
    for key, number in found.items():
        if config.get(key) not in (None, number):
            warn(name, f"config.json says {key} {config[key]}, the tensors say {number}")


def dtype_name(dtype: torch.dtype) -> str:
    """Returns a dtype as transformers' configurations name it, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def needs_target_name(checkpoint: HeadCheckpoint) -> str:
    """Returns advice for readers that load the target by its name in the file; empty if the head names its target."""
    if checkpoint.target is not None and checkpoint.target.name:
        return ""
    return "; set base_model_name_or_path in config.json to the target, which this head does not name"


def own_entries(checkpoint: HeadCheckpoint, **more: Any) -> dict[str, Any]:
    """Returns the entry under our key for a foreign `config.json`, with further values; others ignore the entry."""
    network = {key: getattr(checkpoint.config, key) for key in _NETWORK_KEYS if hasattr(checkpoint.config, key)}
    return {KEY: {**checkpoint.extras(), **network, **more}}


def target_name(checkpoint: HeadCheckpoint) -> dict[str, Any]:
    """Returns the key by which published heads name their target."""
    name = None if checkpoint.target is None else checkpoint.target.name
    return {"base_model_name_or_path": name or "N/A"}


def own_entry(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    """Returns a value under our key of a foreign `config.json`."""
    entries = config.get(KEY)
    return entries.get(key, default) if isinstance(entries, dict) else default


def finished(files: HeadFiles, sizes: HeadConfig, weights: Mapping[str, Tensor], target: TargetInfo) -> HeadCheckpoint:
    """Returns the checkpoint of a format's reader, with the metadata under the 'foretoken' key of its `config.json`.

    Equal blocks of `weights` become tied unless the file says otherwise. `target` is used if the file names none.
    Raises `ModelError` if our key has invalid entries, or the head does not fit the target.
    """
    name, config = str(files.path), files.config
    stacked = [key for key in _REPEATED if key in weights and weights[key].shape[1] > 1]
    may_tie = hasattr(sizes, "tied_blocks") and own_entry(config, "tied_blocks") is not False
    if may_tie and stacked and not has_different_blocks(weights):  # released code repeated one module
        weights = {**weights, **{key: weights[key][:, :1].contiguous() for key in stacked}}
        sizes = sizes.model_copy(update={"tied_blocks": True})
    entries = config.get(KEY)
    entries = entries if isinstance(entries, dict) else {}
    extras = checked_extras(entries, sizes.vocab_size, f"'{KEY}' in the config.json of '{name}'")
    known = extras.target or target.fingerprint
    base = config.get("base_model_name_or_path")
    if known is None and isinstance(base, str) and base != "N/A":
        known = TargetFingerprint(name=base, hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    checkpoint = HeadCheckpoint(config=sizes, weights=weights, **{**dict(extras), "target": known})
    own = TargetFingerprint(hidden_size=sizes.hidden_size, vocab_size=sizes.vocab_size)
    if target.fingerprint is not None and own.differences(target.fingerprint):
        checkpoint.check_target(target.fingerprint, what=name)
        raise ModelError(
            f"head '{name}' has {', '.join(own.differences(target.fingerprint))}, which is the target's. "
            "Expected a head for this target."
        )
    return checkpoint
