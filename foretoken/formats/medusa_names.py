"""Tensor names of Medusa heads in all formats that hold them, with one reader and one table."""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError
from foretoken.formats.mapping import Place, count, make_config, most_common
from foretoken.formats.saving import own_entry
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from foretoken.formats.files import Weights
    from foretoken.formats.saving import WriteOptions


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
