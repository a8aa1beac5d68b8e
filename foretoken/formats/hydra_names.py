"""Tensor names of Hydra heads in all formats that hold them, with one reader and one table."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError
from foretoken.formats.mapping import Place, count, make_config, most_common
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.models.rotary import target_scaling

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from foretoken.formats.files import Weights
    from foretoken.formats.saving import WriteOptions
    from foretoken.formats.target_info import TargetInfo

_PREFIX_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
_SCALING = "prefix_rope_scaling"
TARGET_SCALING = "target_rope_scaling"  # for formats with the target's scaling in their configuration
UPSTREAM_ROPE_THETA = 10000.0  # the released code never reads the target's
LAYER_PARTS = {
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "o_proj": "self_attn.o_proj",
    "gate_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "down_proj": "mlp.down_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraNames:
    """Templates of tensor names; {head} and {index} stand for numbers.

    Attributes:
        first: Of a head's first block, before `.linear` and `.res_connection`.
        further: Of the other blocks, before `.weight` and `.bias`.
        start: Index of the first of the other blocks.
        stride: Difference of their indices.
        lm_head: Of a head's LM head, before `.weight` and `.bias`.
        prefix: Of the decoder block's layer and of the norm behind it; None for heads without a decoder block.
    """

    first: str
    further: str
    start: int = 0
    stride: int = 1
    lm_head: str
    prefix: tuple[str, str] | None = None

    def table(self, config: HydraConfig) -> dict[str, Place]:
        """Returns places by key; tied blocks share a place."""
        places: dict[str, Place] = {}
        for head in range(config.num_heads):
            first = self.first.format(head=head)
            for kind in ("weight", "bias"):
                places[f"{first}.linear.{kind}"] = Place(f"first.{head}.linear.{kind}")
                places[f"{first}.res_connection.{kind}"] = Place(f"first.{head}.residual.{kind}")
                for layer in range(config.num_layers - 1):
                    key = self.further.format(head=head, index=self.start + self.stride * layer)
                    places[f"{key}.{kind}"] = Place(kind, (head, 0 if config.tied_blocks else layer))
                if config.own_lm_head:
                    places[f"{self.lm_head.format(head=head)}.{kind}"] = Place(f"lm_heads.{head}.{kind}")
        if config.prefix is not None:
            assert self.prefix is not None, "the caller chose names by the configuration"
            layer_name, norm = self.prefix
            places |= {
                f"{layer_name}.{key}.weight": Place(f"prefix.{ours}.weight") for ours, key in LAYER_PARTS.items()
            }
            places[f"{layer_name}.input_layernorm.weight"] = Place("prefix.input_norm")
            places[f"{layer_name}.post_attention_layernorm.weight"] = Place("prefix.post_attention_norm")
            places[f"{norm}.weight"] = Place("prefix.norm")
        return places

    def config(self, weights: Weights, stated: Mapping[str, Any], target: TargetInfo) -> HydraConfig:
        """Returns the configuration that a file's tensors show.

        Other sizes come from `stated`, the file's `config.json`, then from `target`. Raises `ModelError` for unknown
        sizes.
        """
        name = weights.name
        size = partial(most_common, name=name)
        first = weights.matches(_pattern(self.first, r"\.(linear|res_connection)\.(weight|bias)"))
        further = weights.matches(_pattern(self.further, r"\.(weight|bias)"))
        lm_heads = weights.matches(_pattern(self.lm_head, r"\.(weight|bias)"))
        biases = [match[0] for match in first if match[0].endswith("bias")]
        hidden = size((weights.shapes[key][0] for key in biases if weights.shapes[key]), what="hidden size")
        indices = [int(match["index"]) for match in further if match["index"]]
        kept = [(index - self.start) // self.stride for index in indices if index >= self.start]
        rows = [weights.shapes[match[0]][0] for match in lm_heads if weights.shapes[match[0]]]
        vocab = rows or [stated.get("vocab_size") or target.vocab_size or 0]
        if not vocab[0]:
            raise ModelError(f"'{name}' has no LM heads to tell its vocabulary. Pass --target DIR.")
        config: HydraConfig = make_config(
            HydraConfig,
            name,
            hidden_size=hidden,
            vocab_size=size(vocab, what="vocabulary"),
            num_heads=count((int(match["head"]) for match in first + lm_heads), name=name, what="heads"),
            num_layers=count(kept, name=name, what="layers") + 1,
            own_lm_head=bool(rows),
            prefix=self._prefix_config(weights, stated, target),
        )
        return config

    def _prefix_config(self, weights: Weights, stated: Mapping[str, Any], target: TargetInfo) -> LayerConfig | None:
        if self.prefix is None or not any(key.startswith(self.prefix[0]) for key in weights.shapes):
            return None
        name, base = weights.name, target.config
        found = {key: stated[f"prefix_{key}"] for key in _PREFIX_KEYS if f"prefix_{key}" in stated}
        if base is not None:
            found = _base_sizes(base) | found
        found = {"rope_theta": UPSTREAM_ROPE_THETA} | found
        scaling = _rope_scaling(name, stated, base)
        missing = [key for key in _PREFIX_KEYS if found.get(key) is None]
        if missing:
            raise ModelError(
                f"'{name}' does not say {', '.join(missing)} of its prefix layer, which are the target's. "
                "Pass --target DIR."
            )
        gates = [shape for key, shape in weights.shapes.items() if re.search(r"mlp\.(gate|up)_proj\.weight$", key)]
        inner = most_common((shape[0] for shape in gates if shape), name=name, what="prefix layer's inner width")
        sizes = {**found, "intermediate_size": inner, "rope_scaling": scaling}
        config: LayerConfig = make_config(LayerConfig, name, **sizes)
        return config


def prefix_entries(config: HydraConfig) -> dict[str, Any]:
    """Returns keys for `config.json` with sizes that the tensors do not show; other readers ignore them."""
    if config.prefix is None:
        return {}
    entries = {f"prefix_{key}": getattr(config.prefix, key) for key in _PREFIX_KEYS}
    return entries | {_SCALING: config.prefix.rope_scaling}


def with_own_lm_heads(
    config: HydraConfig, weights: Mapping[str, torch.Tensor], options: WriteOptions, *, what: str
) -> tuple[HydraConfig, dict[str, torch.Tensor]]:
    """Copies the target's LM head into each head, for formats without a shared one.

    Raises:
        ConfigError: If the target's LM head is missing or cannot be copied.
    """
    if config.own_lm_head:
        return config, dict(weights)
    lm_head, bias = options.target.copy_of_lm_head(what, with_bias=True)
    dtype = weights["first.0.linear.weight"].dtype
    bias = lm_head.new_zeros(lm_head.shape[0]) if bias is None else bias
    copies = {}
    for head in range(config.num_heads):
        copies[f"lm_heads.{head}.weight"] = lm_head.to("cpu", dtype)
        copies[f"lm_heads.{head}.bias"] = bias.to("cpu", dtype)
    return config.model_copy(update={"own_lm_head": True}), {**weights, **copies}


def _rope_scaling(name: str, stated: Mapping[str, Any], base: Any | None) -> Any:
    """Returns the scaling that the file states, else the target's, as the original code does."""
    if _SCALING in stated or "prefix_rope_theta" in stated:
        return stated.get(_SCALING)
    scaling = stated.get(TARGET_SCALING) or (None if base is None else target_scaling(base))
    if scaling is None or scaling.get("rope_type") == "linear":
        return None if scaling is None else {"rope_type": "linear", "factor": scaling.get("factor")}
    raise ModelError(
        f"'{name}' does not say how its prefix layer rotates: its target's rotary scaling is "
        f"{shown(scaling.get('rope_type'))}, which the original code does not know. Expected '{_SCALING}' (null, or "
        "transformers' rope_parameters) and 'prefix_rope_theta' in its config.json, as it was trained. Add them."
    )


def _base_sizes(base: Any) -> dict[str, Any]:
    heads = getattr(base, "num_attention_heads", None)
    width = getattr(base, "hidden_size", None)
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(base, "num_key_value_heads", None) or heads,
        "head_dim": getattr(base, "head_dim", None) or (width // heads if width and heads else None),
        "rms_norm_eps": getattr(base, "rms_norm_eps", None),
    }


def _pattern(template: str, ending: str) -> re.Pattern[str]:
    """Compiles a template to a pattern with the groups `head` and, if the template has one, `index`."""
    escaped = (
        re.escape(template).replace(r"\{head\}", r"(?P<head>\d{1,4})").replace(r"\{index\}", r"(?P<index>\d{1,4})")
    )
    return re.compile(escaped + ending)
