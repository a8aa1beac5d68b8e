"""Pads models of the Llama family, the target of a cost twin and its draft model, and writes their directories.

Attention heads keep their size; their number grows, for queries and keys alike. Further layers come last. They are
copies of the model's last layer and add nothing: their output is multiplied by zero, or by numbers so small that
rounding loses them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from foretoken.core.errors import ConfigError, ModelError
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats.checkpoint import TargetFingerprint, lm_head_hash
from foretoken.formats.files import Weights, open_files, write_config, write_weights
from foretoken.models.architectures import PLAIN_ARCHITECTURES
from foretoken.models.config_checks import TWIN_KEY, TwinRecord, check_model_files, read_twin_record
from foretoken.models.loading import check_architecture, load_config
from foretoken.models.weight_files import check_shapes, read_headers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

Fill = Literal["zeros", "random"]
_DEVIATION = 0.02  # of random weights, as transformers initialises models
_FAINT = 2.0**-100  # of weights in place of zeros: what they add is lost in rounding; 0 in float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one tensor grows.

    Attributes:
        axes: Axes that grow, counted from the last: -1 for columns, -2 for rows.
        is_written: Whether its output is added to the residual stream or enters a norm: all new numbers are then zero,
            with any filling.
        is_scaled_down: Whether its numbers are divided by the root of the factor: for weights of norms over growing
            axes, and weights that undo the former scale of such a norm.
        parts: Number of vectors of the hidden size side by side in the last axis; each of them grows.
        row_parts: The same in the axis before, such as the gates of an LSTM.
    """

    axes: tuple[int, ...] = ()
    is_written: bool = False
    is_scaled_down: bool = False
    parts: int = 1
    row_parts: int = 1


@dataclass(frozen=True, slots=True)
class Padding:
    """Pads by one factor.

    Attributes:
        factor: A power of four.
        fill: Added weights: "zeros", or "random" if their output is later multiplied by zero, and faint numbers in
            place of zero matrices.
        generator: For the random weights; padded tensors lie on its device.
    """

    factor: int
    fill: Fill
    generator: torch.Generator

    @property
    def root(self) -> int:
        """The square root of the factor, a power of two."""
        return math.isqrt(self.factor)

    def __call__(self, tensor: Tensor, rule: Rule) -> Tensor:
        """Returns the padded tensor, newly allocated; tensor: of any shape, on any device."""
        live = tensor / self.root if rule.is_scaled_down else tensor
        if not rule.axes:
            return live.to(self.generator.device, copy=True)
        *rest, columns = live.shape
        if rest:
            rest = [*rest[:-1], rule.row_parts, rest[-1] // rule.row_parts]
        live = live.reshape(*rest, rule.parts, columns // rule.parts)
        axes = {2 * axis + 1 for axis in rule.axes}  # `parts` comes before each of the last two axes
        shape = [size * self.factor if axis - live.dim() in axes else size for axis, size in enumerate(live.shape)]
        padded = torch.zeros(shape, dtype=tensor.dtype, device=self.generator.device)
        if self.fill == "random" and not rule.is_written and tensor.is_floating_point():
            padded.normal_(std=_DEVIATION, generator=self.generator)
        padded[tuple(slice(size) for size in live.shape)] = live
        padded = padded.flatten(-2)
        return padded.flatten(-3, -2) if tensor.dim() > 1 else padded


def growth(small: int, large: int) -> int | None:
    """Returns the factor between two sizes; None unless it is a power of four."""
    factor, rest = divmod(large, small)
    is_power = factor > 0 and factor & (factor - 1) == 0 and factor.bit_length() % 2 == 1
    return factor if is_power and not rest else None


def exactly(tensor: Tensor, dtype: torch.dtype | None, what: str) -> Tensor:
    """Returns the same numbers in another floating-point dtype; None keeps theirs. Integers stay as they are.

    Raises `ConfigError`, which names `what`, when rounding would change the numbers.
    """
    if dtype is None or not tensor.is_floating_point():
        return tensor
    converted = tensor.to(dtype)
    if not torch.equal(converted.to(tensor.dtype), tensor):
        raise ConfigError(
            f"{str(dtype).removeprefix('torch.')} cannot hold the weights of {what} exactly, which are "
            f"{str(tensor.dtype).removeprefix('torch.')}. Pass a wider dtype, or omit it to keep theirs."
        )
    return converted


_BOTH, _LAST = (-2, -1), (-1,)
_READS = Rule(axes=_BOTH)
_WRITES = Rule(axes=_BOTH, is_written=True)
_NORM = Rule(axes=_LAST, is_scaled_down=True)
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_QUERY_OR_KEY = re.compile(r"(model\.layers\.\d+\.self_attn\.[qk])_proj\.(weight|bias)")
_IN_BLOCK = {
    **{f"{part}.weight": _READS for part in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"{part}.bias": Rule(axes=_LAST) for part in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"{part}.weight": _WRITES for part in ("self_attn.o_proj", "mlp.down_proj")},
    **{f"{part}.bias": Rule(axes=_LAST, is_written=True) for part in ("self_attn.o_proj", "mlp.down_proj")},
    "input_layernorm.weight": _NORM,
    "post_attention_layernorm.weight": _NORM,
    # Norms over single heads keep their size but have the epsilon of the others, because their input shrinks.
    "self_attn.q_norm.weight": Rule(),
    "self_attn.k_norm.weight": Rule(),
}
_OUTSIDE = {
    "model.embed_tokens.weight": Rule(axes=_LAST, is_written=True),
    "model.norm.weight": _NORM,
    "lm_head.weight": Rule(axes=_LAST),
}


class SmallModel(NamedTuple):
    """A model before it is padded: directory, contents of `config.json`, and tensors that are not read yet."""

    path: Path
    config: Mapping[str, Any]
    weights: Weights

    @property
    def name(self) -> str:
        """The name of the directory."""
        return self.path.resolve().name

    @property
    def num_layers(self) -> int:
        """L."""
        return int(self.config["num_hidden_layers"])

    @property
    def hidden_size(self) -> int:
        """E."""
        return int(self.config["hidden_size"])

    def origins(self, num_layers: int) -> dict[str, str]:
        """Returns every tensor of the padded model, with its original."""
        last = self.num_layers - 1
        found = {key: key for key in self.weights.shapes}
        parts = [match for match in map(_BLOCK.fullmatch, found) if match is not None and int(match[1]) == last]
        for layer in range(last + 1, num_layers):
            found |= {f"model.layers.{layer}.{match[2]}": match[0] for match in parts}
        return found

    def grown(self, key: str, factor: int) -> int:
        """Returns the number of elements of a tensor that is padded by a factor."""
        return prod(self.weights.shapes[key]) * int(factor ** len(self.rule(key).axes))

    def num_bytes(self, num_layers: int, factor: int, dtype: torch.dtype | None) -> int:
        """Returns the bytes of the padded weights; dtype: None for the dtype of these weights."""
        shapes = self.weights.shapes
        stored = sum(file.stat().st_size for file in self.path.glob("*.safetensors"))
        itemsize = dtype.itemsize if dtype is not None else round(stored / sum(map(prod, shapes.values())))
        last = f"model.layers.{self.num_layers - 1}."
        layer = sum(self.grown(key, factor) for key in shapes if key.startswith(last))
        numbers = sum(self.grown(key, factor) for key in shapes) + (num_layers - self.num_layers) * layer
        return numbers * itemsize

    def rule(self, key: str) -> Rule:
        """Returns how a tensor grows; raises `ModelError` for an unknown tensor."""
        match = _BLOCK.fullmatch(key)
        known, part = (_OUTSIDE, key) if match is None else (_IN_BLOCK, match[2])
        if part in known:
            return known[part]
        query_or_key = _QUERY_OR_KEY.fullmatch(key)
        if query_or_key is None:
            raise ModelError(f"'{self.path}' has a tensor '{key}' that cannot be padded. Expected those of a Llama.")
        has_norm = f"{query_or_key[1]}_norm.weight" in self.weights.shapes
        return Rule(axes=_BOTH if query_or_key[2] == "weight" else _LAST, is_scaled_down=has_norm)


def open_model(path: Path) -> SmallModel:
    """Opens a model to pad.

    Raises `ModelError` when there is no model, or it is damaged, a cost twin, quantized, or of another architecture.
    """
    name = str(path)
    check_model_files(name, may_be_hub_id=False)
    config = read_json_object(path / "config.json")
    record = read_twin_record(config, name)
    if record is not None:
        raise ModelError(f"'{path}' is a {record} already. Expected a trained model. Make the twin of '{record.of}'.")
    if config.get("model_type") not in PLAIN_ARCHITECTURES or config.get("quantization_config") is not None:
        quantized = "quantized " if config.get("quantization_config") is not None else ""
        raise ModelError(
            f"'{path}' is a {quantized}'{config.get('model_type')}', which cannot be padded. Expected weights that are "
            f"not quantized, of one of {', '.join(PLAIN_ARCHITECTURES)}."
        )
    known = load_config(name)
    check_architecture(known, name)
    check_shapes(name, known, read_headers(path))
    model = SmallModel(path, config, open_files(path).weights)
    for key in model.weights.shapes:
        model.rule(key)
    return model


_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
_WEIGHTS = "model.safetensors"
_SHARD_SIZE = 1 << 30  # numbers in a file, 2 GiB in bfloat16; a choice: bounds the memory of writing
_TEXTS = {".json", ".txt", ".model", ".jinja"}  # tokenizer, generation configuration


def write_model(
    model: SmallModel,
    padding: Padding,
    record: TwinRecord,
    new: Path,
    *,
    num_layers: int,
    dtype: torch.dtype | None,
    on_tensor: Callable[[], None],
) -> None:
    """Writes a padded model, with configuration and tokenizer, into an empty directory.

    Args:
        num_layers: Layers of the padded model, at least the model's.
        dtype: Dtype of its weights; None keeps theirs.
        on_tensor: Called after each tensor.

    Raises:
        ConfigError: When the dtype cannot hold the model's numbers.
        OSError: When a file cannot be written.
    """
    origins = model.origins(num_layers)
    shards = _shards(model, origins, padding.factor)
    files: dict[str, str] = {}
    for number, keys in enumerate(shards, start=1):
        name = _WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {}
        for key in keys:
            tensors[key] = _padded(model, key, origins[key], padding, dtype).cpu()
            files[key] = name
            on_tensor()
        write_weights(new / name, tensors)
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": files}
        (new / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    write_all_but_weights(model, padding, record, new, num_layers=num_layers, dtype=dtype)


def write_all_but_weights(
    model: SmallModel,
    padding: Padding,
    record: TwinRecord,
    new: Path,
    *,
    num_layers: int,
    dtype: torch.dtype | None,
) -> None:
    """Writes a padded model's configuration and the small model's other files; see `write_model`."""
    for path in sorted(model.path.iterdir()):
        if path.suffix in _TEXTS and path.name != "config.json" and not path.name.endswith(".index.json"):
            shutil.copyfile(path, new / path.name)
    write_config(new, _config(model, padding.factor, record, num_layers=num_layers, dtype=dtype))


def padded_tensors(
    model: SmallModel, padding: Padding, *, num_layers: int, dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """Yields every tensor of a padded model with its name, on the device of `padding`; see `write_model`."""
    for key, origin in model.origins(num_layers).items():
        yield key, _padded(model, key, origin, padding, dtype)


def fingerprint(path: Path, name: str) -> TargetFingerprint:
    """Returns the fingerprint of a written padded model; name: the target's name in heads."""
    config, weights = read_json_object(path / "config.json"), open_files(path).weights
    key = next(key for key in ("lm_head.weight", "model.embed_tokens.weight") if key in weights.shapes)
    lm_head = weights.fetch([key])[key]
    return TargetFingerprint(
        name=name,
        architecture=(config.get("architectures") or [None])[0],
        hidden_size=lm_head.shape[1],
        vocab_size=lm_head.shape[0],
        num_layers=config["num_hidden_layers"],
        weights=lm_head_hash(lm_head),
    )


def _shards(model: SmallModel, origins: Mapping[str, str], factor: int) -> list[list[str]]:
    shards: list[list[str]] = [[]]
    size = 0
    for key, origin in origins.items():
        more = model.grown(origin, factor)
        if size and size + more > _SHARD_SIZE:
            shards.append([])
            size = 0
        shards[-1].append(key)
        size += more
    return shards


def _padded(model: SmallModel, key: str, origin: str, padding: Padding, dtype: torch.dtype | None) -> Tensor:
    rule = model.rule(origin)
    padded = padding(exactly(model.weights.fetch([origin])[origin], dtype, f"'{model.path}'"), rule)
    if not rule.is_written or key == origin:
        return padded
    # No two matrices are equal: engines that store equal constants once would read fewer bytes than for a real model.
    is_faint = padding.fill == "random" and padded.is_floating_point()
    return padded.normal_(0, _FAINT, generator=padding.generator) if is_faint else padded.zero_()


def _config(
    model: SmallModel, factor: int, record: TwinRecord, *, num_layers: int, dtype: torch.dtype | None
) -> dict[str, Any]:
    old = model.config
    config = dict(old)
    config |= {key: old[key] * factor for key in _SIZES if old.get(key) is not None}
    config |= {
        "head_dim": old.get("head_dim") or model.hidden_size // old["num_attention_heads"],
        "num_hidden_layers": num_layers,
        "rms_norm_eps": old.get("rms_norm_eps", 1e-6) / factor,
        TWIN_KEY: record.model_dump(mode="json"),
    }
    if old.get("layer_types"):
        config["layer_types"] = [*old["layer_types"], *old["layer_types"][-1:] * (num_layers - model.num_layers)]
    if dtype is not None:
        config |= {key: str(dtype).removeprefix("torch.") for key in ("dtype", "torch_dtype") if key in old}
    return config
