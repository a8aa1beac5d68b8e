"""Reads and writes Medusa heads as published: `{head}.{layer}.linear.*`, an LM head each, alone or in a whole model.

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
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from foretoken.core.errors import ConfigError
from foretoken.formats.conversion import (
    MEDUSA_CODE,
    TGI,
    TRT_MEDUSA,
    VLLM,
    Format,
    Place,
    Reader,
    WriteOptions,
    count,
    finished,
    has_different_blocks,
    make_config,
    most_common,
    needs_target_name,
    own_entries,
    own_entry,
    read_tensors,
    scatter,
    target_name,
    template_pattern,
    warn_of_counts,
)
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaNames:
    """Templates of names of residual blocks and LM heads; {head}, {layer} and {layers} stand for numbers."""

    block: str
    lm_head: str

    def match(self, weights: Weights) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
        """Returns the keys of blocks and of LM heads in a file."""
        blocks = weights.matches(template_pattern(self.block, r"\.(?P<kind>weight|bias)"))
        return blocks, weights.matches(template_pattern(self.lm_head))

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

    def sizes(self, weights: Weights) -> dict[str, Any]:
        """Returns fields of `MedusaConfig`, and `rows` of the LM heads or None; raises `ModelError` if unknown."""
        blocks, lm_heads = self.match(weights)
        name, shapes = weights.name, weights.shapes
        keys = [match[0] for match in blocks if match["kind"] == "weight"] + [match[0] for match in lm_heads]
        layers = [int(match["layer"]) for match in blocks]
        if "{layers}" in self.lm_head and lm_heads:
            layers = [most_common((int(match["layers"]) for match in lm_heads), name=name, what="layers") - 1]
        num_layers = count(layers, name=name, what="layers")
        rows = [shapes[match[0]][0] for match in lm_heads if len(shapes[match[0]]) == 2]
        return {
            "num_heads": count((int(match["head"]) for match in blocks + lm_heads), name=name, what="heads"),
            "num_layers": num_layers,
            "hidden_size": most_common((shapes[key][-1] for key in keys if shapes[key]), name=name, what="hidden size"),
            "has_bias": num_layers == 0 or any(match["kind"] == "bias" for match in blocks),
            "own_lm_head": bool(lm_heads),
            "rows": most_common(rows, name=name, what="vocabulary") if lm_heads else None,
        }

    def config(self, weights: Weights, *, vocab_size: int | None) -> MedusaConfig:
        """Returns the configuration from a file's tensors; vocab_size: for heads without LM heads.

        Raises `ModelError` if the tensors do not tell it.
        """
        sizes = self.sizes(weights)
        rows = sizes.pop("rows")
        vocab = rows or most_common([vocab_size] if vocab_size else [], name=weights.name, what=_VOCABULARY)
        return make_config(MedusaConfig, weights.name, vocab_size=vocab, **sizes)


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
    if own_entry(stated, "has_bias", default=True) or not config.has_bias or weights["bias"].any():
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
    warn_of_counts(name, config, {"medusa_num_heads": heads, "medusa_num_layers": layers})
    if isinstance(config.get("medusa"), dict):
        warn_of_counts(name, config["medusa"], {"num_medusa_heads": heads, "num_medusa_layers": layers})
    model = [key for key in weights.shapes if not key.startswith(prefix)]  # tensors of the model around the heads
    tensors = read_tensors(weights, names.table(sizes), sizes, ignored=model)
    return finished(files, *without_added_biases(config, sizes, tensors), target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    if not options.as_safetensors and has_different_blocks(checkpoint.weights):
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
    if has_different_blocks(checkpoint.weights):
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
        **target_name(checkpoint),
        "medusa_num_heads": sizes.num_heads,
        "medusa_num_layers": sizes.num_layers,
        **({} if sizes.own_lm_head else {"version": "2"}),
        "medusa_fc_bias": sizes.has_bias and sizes.num_layers > 0,  # vLLM drops biases without it
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        **own_entries(checkpoint),
    }
    name = "medusa_lm_head.safetensors" if options.as_safetensors else "medusa_lm_head.pt"
    save(directory, name, scatter(weights, _NAMES.table(sizes)), config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    named, heads = needs_target_name(checkpoint), checkpoint.config.steps
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
    config, named = cast("MedusaConfig", checkpoint.config), needs_target_name(checkpoint)
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
                logging.getLogger(__name__).warning("%s: %s is not the target's last norm", weights.name, key)
    tensors = read_tensors(weights, _GORGON.table(sizes), sizes, ignored=norms)
    return finished(files, sizes, tensors, target)


FORMATS = (
    Format("gorgon", lambda files: _GORGON.recognises(_compiled_or_not(files)), _read_gorgon),
    Format("medusa_v2", _recognises_v2, _read_head, ("medusa",), _write_v2, _readers_v2),
    Format("medusa", _recognises, _read_head, ("medusa",), _write_head, _readers),
)
