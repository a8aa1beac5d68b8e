"""Reads and writes Medusa heads as published: `{head}.{layer}.linear.*`, an LM head each, alone or in a whole model.

The reader knows three layouts: heads alone (`medusa_lm_head.pt` or safetensors), `medusa_head.*` inside a transformers
model (Medusa-1.0, Medusa-2), and `medusa_heads.*` inside one (ModelOpt). The writer writes heads alone. The tensors
give the counts: released configurations state two heads for files with five.

The original code opens the pickle alone and repeats one module for all blocks of a head. A head with different blocks
would be another network there, so it is not written as a pickle.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError
from foretoken.formats.conversion import (
    MEDUSA_CODE,
    TGI,
    TRT_MEDUSA,
    VLLM,
    Place,
    Reader,
    count,
    expect_method,
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
)
from foretoken.formats.files import save
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import torch
    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
    from foretoken.formats.conversion import WriteOptions
    from foretoken.formats.files import HeadFiles, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class MedusaNames:
    """Templates of tensor names; {head}, {layer} and {layers} stand for numbers.

    Attributes:
        block: Of a residual block, without `.weight` or `.bias`.
        lm_head: Of a head's LM head, whole.
    """

    block: str
    lm_head: str

    def match(self, weights: Weights) -> tuple[list[re.Match[str]], list[re.Match[str]]]:
        """Returns the keys of blocks and of LM heads in a file."""
        return weights.matches(_pattern(self.block, r"\.(?P<kind>weight|bias)")), weights.matches(
            _pattern(self.lm_head)
        )

    def recognises(self, weights: Weights) -> bool:
        """Decides whether a file holds any such key."""
        return any(self.match(weights))

    def prefixed(self, prefix: str) -> MedusaNames:
        """Returns the same names with a prefix."""
        return MedusaNames(block=prefix + self.block, lm_head=prefix + self.lm_head)

    def table(self, config: MedusaConfig) -> dict[str, Place]:
        """Returns places by key; tied blocks of a head share a place."""
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
        """Returns fields of `MedusaConfig` from a file's tensors, and `rows` of the LM heads or None.

        Raises:
            ModelError: If the tensors do not tell them.
        """
        blocks, lm_heads = self.match(weights)
        name = weights.name
        size = partial(most_common, name=name, what="hidden size")
        keys = [match[0] for match in blocks if match["kind"] == "weight"] + [match[0] for match in lm_heads]
        if "{layers}" in self.lm_head and lm_heads:
            num_layers = most_common((int(match["layers"]) for match in lm_heads), name=name, what="layers")
            num_layers = count([num_layers - 1], name=name, what="layers")
        else:
            num_layers = count((int(match["layer"]) for match in blocks), name=name, what="layers")
        rows = [weights.shapes[match[0]][0] for match in lm_heads if len(weights.shapes[match[0]]) == 2]
        return {
            "num_heads": count((int(match["head"]) for match in blocks + lm_heads), name=name, what="heads"),
            "num_layers": num_layers,
            "hidden_size": size(weights.shapes[key][-1] for key in keys if weights.shapes[key]),
            "has_bias": num_layers == 0 or any(match["kind"] == "bias" for match in blocks),
            "own_lm_head": bool(lm_heads),
            "rows": most_common(rows, name=name, what="vocabulary") if lm_heads else None,
        }

    def config(self, weights: Weights, *, vocab_size: int | None) -> MedusaConfig:
        """Returns the configuration from a file's tensors; vocab_size: for heads without LM heads.

        Raises:
            ModelError: If the tensors do not tell it.
        """
        sizes = self.sizes(weights)
        rows = sizes.pop("rows")
        vocab = rows or most_common([vocab_size] if vocab_size else [], name=weights.name, what=_VOCABULARY)
        config: MedusaConfig = make_config(MedusaConfig, weights.name, vocab_size=vocab, **sizes)
        return config


_VOCABULARY = "vocabulary, as its heads share the target's LM head; pass --target"
OFFICIAL = MedusaNames(block="{head}.{layer}.linear", lm_head="{head}.{layers}.weight")


def warn_of_counts(name: str, config: Mapping[str, Any], stated: Mapping[str, str], found: MedusaConfig) -> None:
    """Warns if a configuration's counts differ from the tensors'; stated: keys of `config` by attribute of `found`."""
    for attribute, key in stated.items():
        value = config.get(key)
        if value is not None and value != getattr(found, attribute):
            logging.getLogger(__name__).warning(
                "%s: config.json says %s %s, the tensors say %s", name, key, value, getattr(found, attribute)
            )


def for_writing(
    config: MedusaConfig, weights: Mapping[str, torch.Tensor], options: WriteOptions, *, what: str
) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """Converts a network for formats that have neither a shared LM head nor blocks without bias.

    Missing biases become zeros, which compute the same; the original loader would leave missing ones at random values.

    Raises:
        ConfigError: If there is a token map, or the target's LM head is needed and cannot be copied.
    """
    if config.draft_vocab_size is not None:
        raise ConfigError(f"{what} cannot hold LM heads over part of the vocabulary. Convert to 'vllm_medusa'.")
    result = dict(weights)
    if not config.own_lm_head:
        lm_head, _ = options.target.copy_of_lm_head(what, with_bias=False)
        copies = lm_head.to("cpu", weights["weight"].dtype)
        result["lm_head"] = copies.unsqueeze(0).expand(config.num_heads, -1, -1)
    config = config.model_copy(update={"own_lm_head": True})
    return with_biases(config, result)


def with_biases(config: MedusaConfig, weights: dict[str, torch.Tensor]) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """Adds biases of zero to a network without biases."""
    if config.has_bias:
        return config, weights
    bias = weights["weight"].new_zeros(weights["weight"].shape[:-1])
    return config.model_copy(update={"has_bias": True}), {**weights, "bias": bias}


def without_added_biases(
    stated: Mapping[str, Any], config: MedusaConfig, weights: dict[str, torch.Tensor]
) -> tuple[MedusaConfig, dict[str, torch.Tensor]]:
    """Removes biases of zero that `with_biases` added before the file was written; stated: its `config.json`."""
    if own_entry(stated, "has_bias", default=True) or not config.has_bias or weights["bias"].any():
        return config, weights
    rest = {key: tensor for key, tensor in weights.items() if key != "bias"}
    return config.model_copy(update={"has_bias": False}), rest


def _pattern(template: str, ending: str = "") -> re.Pattern[str]:
    """Compiles a template to a pattern with named groups."""
    escaped = re.escape(template).replace(r"\{", "{").replace(r"\}", "}")
    for field in _fields(escaped):
        escaped = escaped.replace(f"{{{field}}}", rf"(?P<{field}>\d{{1,4}})", 1)
    return re.compile(escaped + ending)


def _fields(template: str) -> Iterable[str]:
    return re.findall(r"\{(\w+)\}", template)


_OFFICIAL_HEADS = 5  # the original code always builds this number
_PREFIXES = ("", "medusa_head.", "medusa_heads.")


def recognises(files: HeadFiles) -> bool:
    """Decides whether there are keys of this family."""
    return any(OFFICIAL.prefixed(prefix).recognises(files.weights) for prefix in _PREFIXES)


def read(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads heads; those without LM heads share the target's.

    Args:
        files: The checkpoint.
        target: For the vocabulary's size of heads without LM heads.

    Raises:
        ModelError: If keys are wrong, or numbers are not finite.
    """
    weights, config = files.weights, files.config
    prefix = next(prefix for prefix in _PREFIXES if OFFICIAL.prefixed(prefix).recognises(weights))
    names = OFFICIAL.prefixed(prefix)
    stated = config.get("vocab_size")
    sizes = names.config(weights, vocab_size=stated if isinstance(stated, int) else target.vocab_size)
    counts = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}
    warn_of_counts(str(files.path), config, counts, sizes)
    if isinstance(config.get("medusa"), dict):
        counts = {"num_heads": "num_medusa_heads", "num_layers": "num_medusa_layers"}
        warn_of_counts(str(files.path), config["medusa"], counts, sizes)
    model = [key for key in weights.shapes if not key.startswith(prefix)]  # tensors of the model around the heads
    tensors = read_tensors(weights, names.table(sizes), sizes, ignored=model)
    sizes, tensors = without_added_biases(config, sizes, tensors)
    return finished(str(files.path), config, sizes, tensors, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes heads alone, each with an LM head.

    Raises:
        ConfigError: If the format cannot hold the head, the original code would load another network, or the target's
            LM head is needed and missing.
    """
    what = "format 'medusa'"
    expect_method(checkpoint, "medusa", what=what)
    if not options.as_safetensors and has_different_blocks(checkpoint, "weight", "bias"):
        raise ConfigError(
            f"the {checkpoint.weights['weight'].shape[1]} blocks of each head differ, and {MEDUSA_CODE}, which opens "
            "medusa_lm_head.pt, takes the last one in place of all: it would draft as another network. Train with "
            "tied_blocks=true, pass --safetensors for readers that keep blocks apart, or convert to 'vllm_medusa', "
            "'tensorrt_llm' or 'native'."
        )
    config = checkpoint.config
    assert isinstance(config, MedusaConfig), "the method says so"
    sizes, weights = for_writing(config, checkpoint.weights, options, what=what)
    write_heads(checkpoint, sizes, scatter(weights, OFFICIAL.table(sizes)), directory, options)


def readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    """Returns the programs that read the result of `write`."""
    named, heads = needs_target_name(checkpoint), checkpoint.config.steps
    vllm = Reader(
        VLLM, True, f"speculative_config with method 'medusa' named; a chain of the best token of {heads} heads"
    )
    converter = Reader(TRT_MEDUSA, True, f"its converter, with --medusa_model_dir and --num_medusa_heads {heads}")
    if options.as_safetensors:
        tgi = Reader(TGI, True, f"--model-id of this directory; a chain{named}")
        return [Reader(MEDUSA_CODE, False, "it opens medusa_lm_head.pt alone"), tgi, vllm, converter]
    official = Reader(MEDUSA_CODE, True, f"MedusaModel.from_pretrained{_other_count(heads)}{named}")
    return [official, Reader(TGI, False, "it opens safetensors alone; pass --safetensors"), vllm, converter]


def write_heads(
    checkpoint: HeadCheckpoint, sizes: MedusaConfig, tensors: dict[str, Tensor], directory: Path, options: WriteOptions
) -> None:
    """Writes tensors and `config.json` under the file names of the original code."""
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
    save(directory, name, tensors, config)


def _other_count(heads: int) -> str:
    """Returns what the original code does with another number of heads than its own."""
    if heads == _OFFICIAL_HEADS:
        return ""
    rest = "leaves the others at random" if heads < _OFFICIAL_HEADS else "passes over the others"
    return f", which builds {_OFFICIAL_HEADS} heads and {rest}: choose medusa_choices no deeper than {min(heads, 5)}"
