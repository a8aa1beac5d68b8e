"""Reads and writes Medusa heads, as published and in vLLM's layout.

The published form is `{head}.{layer}.linear.*`, an LM head each, alone or in a whole model.

- `medusa`: heads alone (`medusa_lm_head.pt` or safetensors), `medusa_head.*` inside a transformers model (Medusa-1.0,
  Medusa-2), and `medusa_heads.*` inside one (ModelOpt). The writer writes heads alone. The tensors give the counts:
  released configurations state two heads for files with five. The original code opens the pickle alone and repeats one
  module for all blocks of a head. A head with different blocks would be another network there, so it is not written as
  a pickle.
- `medusa_v2`: blocks alone, of heads that share the target's LM head, as the legacy trainer's `"version": "2"` wrote
  them.
- `gorgon`, of Project Gorgon, read only: heads without bias behind a frozen copy of the target's last norm. The reader
  drops the norm: the features here are already normed. The first head is trained to predict x_{t+1}, one token earlier
  than ours, so the heads draft badly until they are trained further.
- `vllm_medusa`: `blocks.{head}.layers.{layer}`, `lm_heads.{head}`, and a `config.json` of its own. vLLM ignores unknown
  tensors and drops biases unless `medusa_fc_bias` is set; the writer sets it for every head with a bias.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats import conversion
from foretoken.formats.conversion import MEDUSA_CODE, TGI, TRT_MEDUSA, VLLM, Format, Place, Reader, WriteOptions
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaNames:
    """Templates of names of residual blocks and LM heads; {head}, {layer} and {layers} stand for numbers."""

    block: str
    lm_head: str

    def match(self, weights: Weights) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
        """Returns the keys of blocks and of LM heads in a file."""
        blocks = weights.matches(conversion.template_pattern(self.block, r"\.(?P<kind>weight|bias)"))
        return blocks, weights.matches(conversion.template_pattern(self.lm_head))

    def recognises(self, weights: Weights) -> bool:
        """Decides whether a file holds any such key."""
        return any(self.match(weights))

    def prefixed(self, prefix: str) -> MedusaNames:
        """Returns the same names with a prefix."""
        return MedusaNames(block=prefix + self.block, lm_head=prefix + self.lm_head)

    def table(self, config: MedusaConfig) -> dict[str, Place]:
        """Returns the place of every tensor by the file's key; tied blocks of a head share a place."""
        places: dict[str, Place] = {}
        kinds = ("weight", "bias") if config.has_bias else ("weight",)
        for head in range(config.num_heads):
            for layer in range(config.num_layers):
                key = self.block.format(head=head, layer=layer)
                kept = 0 if config.tied_blocks else layer
                places |= {f"{key}.{kind}": Place(kind, (head, kept)) for kind in kinds}
            if config.own_lm_head:
                places[self.lm_head.format(head=head, layers=config.num_layers)] = Place("lm_head", (head,))
        return places

    def sizes(self, weights: Weights) -> tuple[dict[str, Any], int | None]:
        """Returns fields of `MedusaConfig`, and the rows of the LM heads or None; raises `ModelError` if unknown."""
        blocks, lm_heads = self.match(weights)
        name, shapes = weights.name, weights.shapes
        keys = [match[0] for match in blocks if match["kind"] == "weight"] + [match[0] for match in lm_heads]
        layers = [int(match["layer"]) for match in blocks]
        if "{layers}" in self.lm_head and lm_heads:
            layers = [
                conversion.most_common((int(match["layers"]) for match in lm_heads), name=name, what="layers") - 1
            ]
        num_layers = conversion.count(layers, name=name, what="layers")
        rows = [shapes[match[0]][0] for match in lm_heads if len(shapes[match[0]]) == 2]
        sizes = {
            "num_heads": conversion.count((int(match["head"]) for match in blocks + lm_heads), name=name, what="heads"),
            "num_layers": num_layers,
            "hidden_size": conversion.most_common(
                (shapes[key][-1] for key in keys if shapes[key]), name=name, what="hidden size"
            ),
            "has_bias": num_layers == 0 or any(match["kind"] == "bias" for match in blocks),
            "own_lm_head": bool(lm_heads),
        }
        return sizes, conversion.most_common(rows, name=name, what="vocabulary") if lm_heads else None

    def config(self, weights: Weights, *, vocab_size: int | None) -> MedusaConfig:
        """Returns the configuration from a file's tensors; vocab_size: for heads without LM heads.

        Raises `ModelError` if the tensors do not tell it.
        """
        sizes, rows = self.sizes(weights)
        vocab = rows or conversion.most_common([vocab_size] if vocab_size else [], name=weights.name, what=_VOCABULARY)
        return conversion.make_config(MedusaConfig, weights.name, vocab_size=vocab, **sizes)


_VOCABULARY = "vocabulary, as its heads share the target's LM head; pass --target"
_NAMES = MedusaNames(block="{head}.{layer}.linear", lm_head="{head}.{layers}.weight")
_PREFIXES = ("", "medusa_head.", "medusa_heads.")
_OFFICIAL_HEADS = 5  # the original code always builds this number


def for_writing(
    config: MedusaConfig, weights: Mapping[str, Tensor], options: WriteOptions, *, what: str
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Converts a network for formats that have neither a shared LM head nor blocks without bias.

    Raises `ConfigError` if there is a token map, or the target's LM head is needed and cannot be copied.
    """
    if config.draft_vocab_size is not None:
        raise ConfigError(f"{what} cannot hold LM heads over part of the vocabulary. Convert to 'vllm_medusa'.")
    result = dict(weights)
    if not config.own_lm_head:
        lm_head, _ = options.target.copy_of_lm_head(what, with_bias=False)
        result["lm_head"] = lm_head.to("cpu", weights["weight"].dtype).expand(config.num_heads, -1, -1)
    return _with_biases(config.model_copy(update={"own_lm_head": True}), result)


def _with_biases(config: MedusaConfig, weights: dict[str, Tensor]) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Adds missing biases of zero: the original loader would leave them at random values."""
    if config.has_bias:
        return config, weights
    bias = weights["weight"].new_zeros(weights["weight"].shape[:-1])
    return config.model_copy(update={"has_bias": True}), {**weights, "bias": bias}


def without_added_biases(
    stated: Mapping[str, Any], config: MedusaConfig, weights: dict[str, Tensor]
) -> tuple[MedusaConfig, dict[str, Tensor]]:
    """Removes biases of zero that `for_writing` added before the file was written; stated: its `config.json`."""
    if conversion.own_entry(stated, "has_bias", default=True) or not config.has_bias or weights["bias"].any():
        return config, weights
    rest = {key: tensor for key, tensor in weights.items() if key != "bias"}
    return config.model_copy(update={"has_bias": False}), rest


def _recognises(files: HeadFiles) -> bool:
    return any(_NAMES.prefixed(prefix).recognises(files.weights) for prefix in _PREFIXES)


def _recognises_v2(files: HeadFiles) -> bool:
    blocks, lm_heads = _NAMES.match(files.weights)
    return bool(blocks) and not lm_heads


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = files.weights, files.config, str(files.path)
    prefix = next(prefix for prefix in _PREFIXES if _NAMES.prefixed(prefix).recognises(weights))
    names = _NAMES.prefixed(prefix)
    stated = config.get("vocab_size")
    sizes = names.config(weights, vocab_size=stated if isinstance(stated, int) else target.vocab_size)
    heads, layers = sizes.num_heads, sizes.num_layers
    conversion.warn_of_counts(name, config, {"medusa_num_heads": heads, "medusa_num_layers": layers})
    if isinstance(config.get("medusa"), dict):
        conversion.warn_of_counts(name, config["medusa"], {"num_medusa_heads": heads, "num_medusa_layers": layers})
    model = [key for key in weights.shapes if not key.startswith(prefix)]  # tensors of the model around the heads
    tensors = conversion.read_tensors(weights, names.table(sizes), sizes, ignored=model)
    return conversion.finished(files, *without_added_biases(config, sizes, tensors), target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    if not options.as_safetensors and conversion.has_different_blocks(checkpoint.weights):
        raise ConfigError(
            f"the {checkpoint.weights['weight'].shape[1]} blocks of each head differ, and {MEDUSA_CODE}, which opens "
            "medusa_lm_head.pt, takes the last one in place of all: it would draft as another network. Train with "
            "tied_blocks=true, pass --safetensors for readers that keep blocks apart, or convert to 'vllm_medusa', "
            "'tensorrt_llm' or 'native'."
        )
    config = cast("MedusaConfig", checkpoint.config)
    sizes, weights = for_writing(config, checkpoint.weights, options, what="format 'medusa'")
    _write_heads(checkpoint, sizes, weights, directory, options)


def _write_v2(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    config = cast("MedusaConfig", checkpoint.config)
    if config.own_lm_head or config.num_layers == 0:
        raise ConfigError("format 'medusa_v2' holds blocks and no LM heads. Convert this head to 'medusa'.")
    if conversion.has_different_blocks(checkpoint.weights):
        raise ConfigError(
            f"the {config.num_layers} blocks of each head differ, and no program reads that from format 'medusa_v2': "
            f"{MEDUSA_CODE} takes the last one in place of all, TGI knows one. Train with tied_blocks=true, or convert "
            "to 'vllm_medusa', 'tensorrt_llm' or 'native'."
        )
    _write_heads(checkpoint, *_with_biases(config, dict(checkpoint.weights)), directory, options)


def _write_heads(
    checkpoint: HeadCheckpoint,
    sizes: MedusaConfig,
    weights: Mapping[str, Tensor],
    directory: Path,
    options: WriteOptions,
) -> None:
    config = {
        **conversion.target_name(checkpoint),
        "medusa_num_heads": sizes.num_heads,
        "medusa_num_layers": sizes.num_layers,
        **({} if sizes.own_lm_head else {"version": "2"}),
        "medusa_fc_bias": sizes.has_bias and sizes.num_layers > 0,  # vLLM drops biases without it
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        **conversion.own_entries(checkpoint),
    }
    name = "medusa_lm_head.safetensors" if options.as_safetensors else "medusa_lm_head.pt"
    save(directory, name, conversion.scatter(weights, _NAMES.table(sizes)), config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    named, heads = conversion.needs_target_name(checkpoint), checkpoint.config.steps
    how = f"speculative_config with method 'medusa' named; a chain of the best token of {heads} heads"
    vllm = Reader(VLLM, True, how)
    converter = Reader(TRT_MEDUSA, True, f"its converter, with --medusa_model_dir and --num_medusa_heads {heads}")
    builds = ""
    if heads != _OFFICIAL_HEADS:
        rest = "leaves the others at random" if heads < _OFFICIAL_HEADS else "passes over the others"
        depth = min(heads, _OFFICIAL_HEADS)
        builds = f", which builds {_OFFICIAL_HEADS} heads and {rest}: choose medusa_choices no deeper than {depth}"
    official = _official(options, f"MedusaModel.from_pretrained{builds}{named}")
    return [official, _tgi(options, named), vllm, converter]


def _readers_v2(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    config, named = cast("MedusaConfig", checkpoint.config), conversion.needs_target_name(checkpoint)
    official = _official(options, f"the class of medusa_model_legacy.py alone{named}")
    tgi = _tgi(options, named)
    if config.num_layers > 1:
        tgi = Reader(TGI, False, f"it takes one block a head; there are {config.num_layers}")
    return [official, tgi, Reader(VLLM, False, "it misses LM heads; convert to 'vllm_medusa' with --target")]


def _official(options: WriteOptions, how: str) -> Reader:
    return Reader.unless("it opens medusa_lm_head.pt alone" if options.as_safetensors else None, MEDUSA_CODE, how)


def _tgi(options: WriteOptions, named: str) -> Reader:
    reason = None if options.as_safetensors else "it opens safetensors alone; pass --safetensors"
    return Reader.unless(reason, TGI, f"--model-id of this directory; a chain{named}")


_GORGON = MedusaNames(block="{head}.blocks.{layer}.linear", lm_head="{head}.lm_head.weight")
_GORGON_NORM = re.compile(r"\d{1,4}\.norm\.weight")


def _compiled_or_not(files: HeadFiles) -> Weights:
    """Returns the tensors without the prefix that `torch.compile` adds to names."""
    return files.weights.renamed(lambda key: key.replace("_orig_mod.", ""))


def _read_gorgon(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, known = _compiled_or_not(files), target.weights
    sizes = _GORGON.config(weights, vocab_size=target.vocab_size)
    norms = [match[0] for match in weights.matches(_GORGON_NORM)]
    if norms and known is not None and known.norm is not None:
        norm = known.norm.cpu().float()
        for key, tensor in weights.fetch(norms).items():
            if tensor.shape != norm.shape or not torch.allclose(tensor.float(), norm, rtol=1e-2, atol=1e-3):
                conversion.warn(weights.name, f"{key} is not the target's last norm")
    tensors = conversion.read_tensors(weights, _GORGON.table(sizes), sizes, ignored=norms)
    return conversion.finished(files, sizes, tensors, target)


_VLLM_NAMES = MedusaNames(block="blocks.{head}.layers.{layer}", lm_head="lm_heads.{head}.weight")
_VLLM_PREFIX = "medusa_heads."
_SHARED = "lm_head.weight"
_DEFAULT_VOCAB_SIZE = 32001  # vLLM's default, without a vocab_size in the file


def _recognises_vllm(files: HeadFiles) -> bool:
    if any(names.recognises(files.weights) for names in (_VLLM_NAMES, _VLLM_NAMES.prefixed(_VLLM_PREFIX))):
        return True
    is_shared = files.config.get("original_lm_head") is True and files.config.get("model_type") == "medusa"
    return is_shared and files.weights.shapes.keys() == {_SHARED}


def _read_vllm(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = files.weights, files.config, str(files.path)
    if config.get("logit_scale") not in (None, 1):
        raise ModelError(
            f"'{name}' scales its logits by {shown(config['logit_scale'])}. Expected heads without a scale."
        )
    prefix = _VLLM_PREFIX if _VLLM_NAMES.prefixed(_VLLM_PREFIX).recognises(weights) else ""
    names, map_key, shared_key = _VLLM_NAMES.prefixed(prefix), f"{prefix}token_map", _shared_key(files, prefix)
    sizes, rows = names.sizes(weights) if names.recognises(weights) else (_sizes_without_blocks(files), None)
    if shared_key is not None:
        rows = next(iter(weights.shapes.get(shared_key, ())), None)
    vocab_size = config.get("vocab_size", _DEFAULT_VOCAB_SIZE)
    sizes |= {"own_lm_head": shared_key is None, "vocab_size": rows or vocab_size}
    if sizes["num_layers"] == 0:
        sizes["has_bias"] = conversion.own_entry(config, "has_bias", default=True)
    sizes["has_bias"] |= config.get("medusa_fc_bias") is True
    stored = conversion.make_config(MedusaConfig, name, **sizes)
    extra: dict[str, tuple[int, ...]] = {}
    truncated = config.get("truncated_vocab_size")
    if map_key in weights.shapes:
        extra[map_key] = (prod(weights.shapes[map_key]),)
    elif isinstance(truncated, int) and truncated < vocab_size:
        extra[map_key] = (truncated,)  # the map tells which tokens the rows are
    if shared_key is not None:
        extra[shared_key] = (stored.vocab_size, stored.hidden_size)
    tensors = conversion.read_tensors(weights, names.table(stored), stored, extra=extra)
    others = weights.fetch(extra)
    shared = others.get(shared_key or "")
    _warn_of_vllm(name, config, stored, has_map=map_key in others)
    if map_key in others:
        full = _with_token_map(name, vocab_size, stored, tensors, others[map_key], shared)
    elif shared is not None:
        full = _with_shared_lm_head(name, stored, tensors, shared, target)
    else:
        full = stored
    return conversion.finished(files, full, tensors, target)


def _write_vllm(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    what = "format 'vllm_medusa'"
    sizes = cast("MedusaConfig", checkpoint.config)
    tensors = conversion.scatter(checkpoint.weights, _VLLM_NAMES.table(sizes))
    if "token_map" in checkpoint.weights:
        tensors["token_map"] = checkpoint.weights["token_map"].clone()
    if not sizes.own_lm_head:
        lm_head, _ = options.target.copy_of_lm_head(what, with_bias=False)
        tensors[_SHARED] = lm_head.to("cpu", checkpoint.weights["weight"].dtype, copy=True)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": sizes.draft_vocab_size,
        "medusa_fc_bias": sizes.has_bias and sizes.num_layers > 0,
        "original_lm_head": not sizes.own_lm_head,
        "torch_dtype": conversion.dtype_name(next(iter(tensors.values())).dtype),
        **conversion.own_entries(checkpoint),
    }
    save(directory, "model.safetensors", tensors, config)


def _readers_vllm(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    config = cast("MedusaConfig", checkpoint.config)
    if config.draft_vocab_size is not None:
        how = (
            f"it fails while loading: it expects LM heads over all {config.vocab_size} tokens even where a token_map "
            f"leaves {config.draft_vocab_size}; releases that build them by truncated_vocab_size read it"
        )
        return [Reader(VLLM, False, how)]
    how = f"speculative_config with method 'medusa'; a chain of the best token of {config.num_heads} heads"
    return [Reader(VLLM, True, how)]


def _shared_key(files: HeadFiles, prefix: str) -> str | None:
    shapes = files.weights.shapes
    if not files.config.get("original_lm_head") and prefix + _SHARED not in shapes:
        return None
    return next((key for key in (f"{prefix}lm_heads.0.weight",) if key in shapes), prefix + _SHARED)


def _sizes_without_blocks(files: HeadFiles) -> dict[str, Any]:
    heads, shape = files.config.get("num_heads"), files.weights.shapes[_SHARED]
    if not isinstance(heads, int) or isinstance(heads, bool) or files.config.get("num_hidden_layers") != 0:
        raise ModelError(
            f"'{files.path}' holds one LM head and no blocks. Expected num_heads and num_hidden_layers 0 in its "
            "config.json. Copy or convert it again."
        )
    return {
        "num_heads": heads,
        "num_layers": 0,
        "hidden_size": shape[1] if len(shape) == 2 else 0,
        "has_bias": True,
    }


def _with_token_map(
    name: str,
    vocab_size: Any,
    stored: MedusaConfig,
    tensors: dict[str, Tensor],
    token_map: Tensor,
    shared: Tensor | None,
) -> MedusaConfig:
    """Places LM heads over part of the vocabulary; cuts those over all of it, as vLLM does."""
    drafted, rows = token_map.numel(), stored.vocab_size
    changes = {"vocab_size": vocab_size, "own_lm_head": True, "draft_vocab_size": drafted}
    full = conversion.make_config(MedusaConfig, name, **stored.model_dump() | changes)
    vocab = full.vocab_size
    token_map = token_map.to(torch.int64)
    conversion.check_token_map(name, token_map, vocab)
    if rows not in (drafted, vocab):
        raise ModelError(
            f"the LM heads of '{name}' have {rows} rows. Expected {drafted}, as its token_map, or {vocab}."
        )
    lm_head = tensors["lm_head"] if shared is None else shared.expand(stored.num_heads, -1, -1)
    tensors["lm_head"] = (lm_head if rows == drafted else lm_head[:, token_map]).contiguous()
    tensors["token_map"] = token_map
    return full


def _with_shared_lm_head(
    name: str, stored: MedusaConfig, tensors: dict[str, Tensor], shared: Tensor, target: TargetInfo
) -> MedusaConfig:
    known = target.weights
    if known is None:
        conversion.warn(name, "its LM head is taken to be the target's")
        return stored
    if known.is_plain and known.lm_head_bias is None and torch.equal(known.lm_head.to("cpu", shared.dtype), shared):
        return stored
    tensors["lm_head"] = shared.expand(stored.num_heads, -1, -1).contiguous()
    return stored.model_copy(update={"own_lm_head": True})


def _warn_of_vllm(name: str, config: Mapping[str, Any], found: MedusaConfig, *, has_map: bool) -> None:
    heads, layers = found.num_heads, found.num_layers
    counts = {"num_heads": heads, "num_hidden_layers": layers}
    counts |= {"medusa_num_heads": heads, "medusa_num_layers": layers}  # vLLM also accepts these names
    if not has_map and found.own_lm_head:
        counts["vocab_size"] = found.vocab_size
    conversion.warn_of_counts(name, config, counts)
    if found.has_bias and layers and config.get("medusa_fc_bias") is not True:
        conversion.warn(name, "it has biases, which vLLM drops: medusa_fc_bias is not set")


FORMATS = (
    Format("vllm_medusa", _recognises_vllm, _read_vllm, ("medusa",), _write_vllm, _readers_vllm),
    Format("gorgon", lambda files: _GORGON.recognises(_compiled_or_not(files)), _read_gorgon),
    Format("medusa_v2", _recognises_v2, _read_head, ("medusa",), _write_v2, _readers_v2),
    Format("medusa", _recognises, _read_head, ("medusa",), _write_head, _readers),
)
