"""Pads models of the Llama family: another size, the same function; see `cost_twin`.

Attention heads keep their size; their number grows, for queries and keys alike. Further layers come last. They are
copies of the model's last layer, or recurrent ones (`recurrent_twins`), and add nothing: their output is multiplied by
zero, or by numbers so small that rounding loses them.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, ModelError
from foretoken.files.bounded_reads import read_json_object
from foretoken.formats.checkpoint import TargetFingerprint, lm_head_hash
from foretoken.formats.files import Weights, open_files, write_config, write_weights
from foretoken.models.architectures import PLAIN_ARCHITECTURES
from foretoken.models.config import (
    TWIN_KEY,
    TwinRecord,
    check_architecture,
    check_model_files,
    read_headers,
    read_twin_record,
)
from foretoken.models.loading import load_config
from foretoken.models.weight_files import check_shapes

if TYPE_CHECKING:
    from foretoken.bench.recurrent_twins import RecurrentTwin

Fill = Literal["zeros", "random"]
_DEVIATION = 0.02  # of random weights, as transformers initialises models
_FAINT = 2.0**-100  # of weights in place of zeros: what they add is lost in rounding; 0 in float16


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one tensor grows."""

    axes: tuple[int, ...] = ()  # axes that grow, counted from the last: -1 for columns, -2 for rows
    # Whether its output is added to the residual stream or enters a norm: all new numbers are then zero, with any
    # filling.
    is_written: bool = False
    # Whether its numbers are divided by the root of the factor: for weights of norms over growing axes, and weights
    # that undo the former scale of such a norm.
    is_scaled_down: bool = False
    parts: int = 1  # number of vectors of the hidden size side by side in the last axis; each of them grows
    row_parts: int = 1  # the same in the axis before, such as the gates of an LSTM


@dataclass(frozen=True, slots=True)
class Padding:
    """Pads by one factor."""

    factor: int  # a power of four
    # Added weights: "zeros", or "random" if their output is later multiplied by zero, and faint numbers in place of
    # zero matrices.
    fill: Fill
    generator: torch.Generator  # for the random weights; padded tensors lie on its device

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

    def added(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a tensor without an original."""
        made = torch.zeros(*shape, dtype=dtype, device=self.generator.device)
        return made.normal_(std=_DEVIATION, generator=self.generator) if self.fill == "random" else made

    def silence(self, tensor: Tensor) -> Tensor:
        """Replaces weights whose outputs are added to the residual stream by zeros or faint numbers, in place."""
        # Matrices all differ: engines that store equal constants once would read less than for a real model.
        is_faint = self.fill == "random" and tensor.is_floating_point()
        return tensor.normal_(0, _FAINT, generator=self.generator) if is_faint else tensor.zero_()


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


SAME = Rule()
READS, WRITES = Rule(axes=(-2, -1)), Rule(axes=(-2, -1), is_written=True)
READS_LAST, WRITES_LAST = Rule(axes=(-1,)), Rule(axes=(-1,), is_written=True)  # biases, and tables of rows
NORM = Rule(axes=(-1,), is_scaled_down=True)
_BLOCK = re.compile(r"model\.layers\.(\d+)\.(.+)")
_QUERY_OR_KEY = re.compile(r"(model\.layers\.\d+\.self_attn\.[qk])_proj\.(weight|bias)")
_IN_BLOCK = {
    **{f"{part}.weight": READS for part in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"{part}.bias": READS_LAST for part in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")},
    **{f"{part}.weight": WRITES for part in ("self_attn.o_proj", "mlp.down_proj")},
    **{f"{part}.bias": WRITES_LAST for part in ("self_attn.o_proj", "mlp.down_proj")},
    "input_layernorm.weight": NORM,
    "post_attention_layernorm.weight": NORM,
    # Norms over single heads keep their size but have the epsilon of the others, because their input shrinks.
    "self_attn.q_norm.weight": SAME,
    "self_attn.k_norm.weight": SAME,
}
_OUTSIDE = {"model.embed_tokens.weight": WRITES_LAST, "model.norm.weight": NORM, "lm_head.weight": READS_LAST}


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
        axes = (-2, -1) if query_or_key[2] == "weight" else (-1,)
        return Rule(axes=axes, is_scaled_down=has_norm)

    def grown_shape(self, key: str, factor: int) -> tuple[int, ...]:
        """Returns the shape of a padded tensor."""
        shape = self.weights.shapes[key]
        axes = {len(shape) + axis for axis in self.rule(key).axes}
        return tuple(size * factor if axis in axes else size for axis, size in enumerate(shape))


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedModel:
    """A model of another size, before its tensors are made."""

    small: SmallModel
    factor: int  # growth of its sizes, a power of four
    num_layers: int  # at least those of `small`
    dtype: torch.dtype | None  # of the weights; None keeps theirs
    recurrent: RecurrentTwin | None = None  # makes the further layers; None: copies of the last one

    @property
    def record(self) -> TwinRecord:
        """What the model's configuration, and heads, say of the padding."""
        return TwinRecord(
            of=self.small.name,
            layers=self.num_layers,
            hidden_size=self.small.hidden_size * self.factor,
            recurrent=None if self.recurrent is None else self.recurrent.family.name,
        )

    @property
    def origins(self) -> dict[str, str]:
        """Every tensor with an original, and that original."""
        found = {key: key for key in self.small.weights.shapes}
        if self.recurrent is None:
            for layer in range(self.small.num_layers, self.num_layers):
                found |= {f"model.layers.{layer}.{match[2]}": match[0] for match in self._last_block}
        return found

    @property
    def _last_block(self) -> list[re.Match[str]]:
        """The tensors of the small model's last block, which the further blocks repeat."""
        last = self.small.num_layers - 1
        blocks = map(_BLOCK.fullmatch, self.small.weights.shapes)
        return [match for match in blocks if match is not None and int(match[1]) == last]

    @property
    def num_tensors(self) -> int:
        """Tensors that are written."""
        own, added = len(self.small.weights.shapes), self.num_layers - self.small.num_layers
        if self.recurrent is None:
            return own + added * len(self._last_block)
        return own + self.recurrent.num_head_norms + added * len(self.recurrent.block)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights."""
        shapes, added = self.small.weights.shapes, self.num_layers - self.small.num_layers
        stored = sum(file.stat().st_size for file in self.small.path.glob("*.safetensors"))
        itemsize = self.dtype.itemsize if self.dtype else round(stored / sum(map(prod, shapes.values())))
        if self.recurrent is not None:
            return self.recurrent.num_elements(added) * itemsize
        grown = {key: prod(self.small.grown_shape(key, self.factor)) for key in shapes}
        return (sum(grown.values()) + added * sum(grown[each[0]] for each in self._last_block)) * itemsize

    def padded(self, origin: str, padding: Padding) -> Tensor:
        """Returns a tensor of the small model, padded."""
        weight = exactly(self.small.weights.fetch([origin])[origin], self.dtype, f"'{self.small.path}'")
        return padding(weight, self.small.rule(origin))

    def tensors(self, padding: Padding) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor with its name, on the device of `padding`."""
        if self.recurrent is not None:
            yield from self.recurrent.tensors(self, padding)
            return
        for key, origin in self.origins.items():
            padded = self.padded(origin, padding)
            if self.small.rule(origin).is_written and key != origin:
                padding.silence(padded)
            yield key, padded

    def write(self, new: Path, padding: Padding, on_tensor: Callable[[], None]) -> None:
        """Writes weights, configuration and tokenizer into an empty directory; calls `on_tensor` after each tensor.

        Raises `ConfigError` when the dtype cannot hold the model's numbers, `OSError` when a file cannot be written.
        """
        shard: dict[str, Tensor] = {}
        files: dict[str, str] = {}  # by tensor; their number is known at the end, so no name says it

        def end_shard(name: str) -> None:
            write_weights(new / name, shard)
            files.update(dict.fromkeys(shard, name))
            shard.clear()

        def next_name() -> str:
            return f"model-{len(set(files.values())) + 1:05}.safetensors"

        for key, tensor in self.tensors(padding):
            if shard and sum(each.numel() for each in shard.values()) + tensor.numel() > _SHARD_SIZE:
                end_shard(next_name())
            shard[key] = tensor.cpu()
            on_tensor()
        end_shard(next_name() if files else _WEIGHTS)
        if _WEIGHTS not in files.values():
            index = {"metadata": {}, "weight_map": files}
            (new / f"{_WEIGHTS}.index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        self.write_all_but_weights(new)

    def write_all_but_weights(self, new: Path) -> None:
        """Writes the configuration, and copies the tokenizer and the small model's other texts; see `write`."""
        for path in sorted(self.small.path.iterdir()):
            if path.suffix in _TEXTS and path.name != "config.json" and not path.name.endswith(".index.json"):
                shutil.copyfile(path, new / path.name)
        write_config(new, self._config())

    def _config(self) -> dict[str, Any]:
        config = self._llama_config() if self.recurrent is None else self.recurrent.config(self.num_layers)
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            config |= {key: name for key in ("dtype", "torch_dtype") if key in config}
        return config | {TWIN_KEY: self.record.values}

    def _llama_config(self) -> dict[str, Any]:
        old = self.small.config
        config = dict(old)
        config |= {key: old[key] * self.factor for key in _SIZES if old.get(key) is not None}
        config |= {
            "head_dim": old.get("head_dim") or self.small.hidden_size // old["num_attention_heads"],
            "num_hidden_layers": self.num_layers,
            "rms_norm_eps": old.get("rms_norm_eps", 1e-6) / self.factor,
        }
        if old.get("layer_types"):
            added = self.num_layers - self.small.num_layers
            config["layer_types"] = [*old["layer_types"], *old["layer_types"][-1:] * added]
        return config


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
