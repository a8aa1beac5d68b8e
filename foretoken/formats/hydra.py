"""Reads and writes Hydra and Hydra++ heads as published: `hydra_lm_head.pt`, and a `config.json` without sizes.

In Hydra++ a dropout module stands before each block and LM head: blocks have the numbers 1, 3, 5, … instead of 0, 1, 2,
…. Its decoder block is called `prefix_embeding_layer`, misspelt.

The original code opens the pickle alone. It repeats one module for all blocks after a head's first, and its decoder
block rotates by its own rules. A head that would be another network there is not written as a pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats import conversion
from foretoken.formats.conversion import HYDRA_CODE, TRT_HYDRA, Format, Place, Reader, WriteOptions
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.hydra import HydraConfig
from foretoken.models.parts import target_scaling

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

_PREFIX_KEYS = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_theta")
_SCALING = "prefix_rope_scaling"
TARGET_SCALING = "target_rope_scaling"  # for formats with the target's scaling in their configuration
UPSTREAM_ROPE_THETA = 10000.0  # the released code never reads the target's


@dataclass(frozen=True, slots=True, kw_only=True)
class HydraNames:
    """Templates of tensor names; {head} and {index} stand for numbers."""

    first: str  # of a head's first block, before `.linear` and `.res_connection`
    further: str  # of the other blocks, before `.weight` and `.bias`
    start: int = 0  # index of the first of the other blocks
    stride: int = 1  # difference of their indices
    lm_head: str  # of a head's LM head, before `.weight` and `.bias`
    # Of the decoder block's layer and of the norm behind it; None for heads without a decoder block.
    prefix: tuple[str, str] | None = None

    def table(self, config: HydraConfig) -> dict[str, Place]:
        """Returns the place of every tensor by the file's key; tied blocks share a place."""
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
            places |= conversion.layer_table(layer_name, "prefix")
            places[f"{layer_name}.input_layernorm.weight"] = Place("prefix.input_norm")
            places[f"{norm}.weight"] = Place("prefix.norm")
        return places

    def config(self, weights: Weights, stated: Mapping[str, Any], target: TargetInfo) -> HydraConfig:
        """Returns the configuration by tensors, then `stated`, then `target`; raises `ModelError` for unknown sizes."""
        name = weights.name
        size = partial(conversion.most_common, name=name)
        first = weights.matches(conversion.template_pattern(self.first, r"\.(linear|res_connection)\.(weight|bias)"))
        further = weights.matches(conversion.template_pattern(self.further, r"\.(weight|bias)"))
        lm_heads = weights.matches(conversion.template_pattern(self.lm_head, r"\.(weight|bias)"))
        biases = [match[0] for match in first if match[0].endswith("bias")]
        hidden = size((weights.shapes[key][0] for key in biases if weights.shapes[key]), what="hidden size")
        indices = [int(match["index"]) for match in further if match["index"]]
        kept = [(index - self.start) // self.stride for index in indices if index >= self.start]
        rows = [weights.shapes[match[0]][0] for match in lm_heads if weights.shapes[match[0]]]
        vocab = rows or [stated.get("vocab_size") or target.vocab_size or 0]
        if not vocab[0]:
            raise ModelError(f"'{name}' has no LM heads to tell its vocabulary. Pass --target DIR.")
        return conversion.make_config(
            HydraConfig,
            name,
            hidden_size=hidden,
            vocab_size=size(vocab, what="vocabulary"),
            num_heads=conversion.count((int(match["head"]) for match in first + lm_heads), name=name, what="heads"),
            num_layers=conversion.count(kept, name=name, what="layers") + 1,
            own_lm_head=bool(rows),
            prefix=self._prefix_config(weights, stated, target),
        )

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
        inner = conversion.most_common(
            (shape[0] for shape in gates if shape), name=name, what="prefix layer's inner width"
        )
        return conversion.make_config(LayerConfig, name, **found, intermediate_size=inner, rope_scaling=scaling)


def prefix_entries(config: HydraConfig) -> dict[str, Any]:
    """Returns keys for `config.json` with sizes that the tensors do not show; other readers ignore them."""
    if config.prefix is None:
        return {}
    entries = {f"prefix_{key}": getattr(config.prefix, key) for key in _PREFIX_KEYS}
    return entries | {_SCALING: config.prefix.rope_scaling}


def with_own_lm_heads(
    config: HydraConfig, weights: Mapping[str, Tensor], options: WriteOptions, *, what: str
) -> tuple[HydraConfig, dict[str, Tensor]]:
    """Copies the target's LM head into each head; raises `ConfigError` if that is missing or cannot be copied."""
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


_SPELLINGS = ("prefix_embeding_layer", "prefix_embedding_layer")
_ANY = re.compile(r"hydra_(mlp|lm_head)\.\d+\..*")
_EMBEDDING = "input_embed_fn.weight"
_UNUSED = re.compile(rf"({'|'.join(_SPELLINGS)})\.(embed_tokens\.weight|layers\.0\.self_attn\.rotary_emb\.inv_freq)")

PLAIN = HydraNames(
    first="hydra_mlp.{head}.0", further="hydra_mlp.{head}.{index}.linear", start=1, lm_head="hydra_lm_head.{head}"
)


def with_prefix(spelling: str) -> HydraNames:
    """Returns the names of Hydra++."""
    return HydraNames(
        first="hydra_mlp.{head}.1",
        further="hydra_mlp.{head}.{index}.linear",
        start=3,
        stride=2,
        lm_head="hydra_lm_head.{head}.1",
        prefix=(f"{spelling}.layers.0", f"{spelling}.norm"),
    )


def _recognises(files: HeadFiles) -> bool:
    return bool(files.weights.matches(_ANY)) or "hydra_head_arch" in files.config


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = files.weights, files.config, str(files.path)
    _check_architecture(name, config, weights)
    spelling = next((one for one in _SPELLINGS if any(key.startswith(one) for key in weights.shapes)), None)
    names = PLAIN if spelling is None else with_prefix(spelling)
    sizes = names.config(weights, config, target)
    conversion.warn_of_counts(name, config, {"hydra_num_heads": sizes.num_heads, "hydra_num_layers": sizes.num_layers})
    ignored = [match[0] for match in weights.matches(_UNUSED)]
    if _EMBEDDING in weights.shapes:
        ignored.append(_EMBEDDING)
        conversion.warn_of_embedding(weights, _EMBEDDING, target)
    tensors = conversion.read_tensors(weights, names.table(sizes), sizes, ignored=ignored)
    return conversion.finished(files, sizes, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    what = "format 'hydra'"
    config = cast("HydraConfig", checkpoint.config)
    if not options.as_safetensors:
        _refuse_other_networks(checkpoint, config, options.target)
    sizes, weights = with_own_lm_heads(config, checkpoint.weights, options, what=what)
    names = PLAIN if sizes.prefix is None else with_prefix(_SPELLINGS[0])
    tensors = conversion.scatter(weights, names.table(sizes))
    tensors |= options.target.copy_of_embedding(_EMBEDDING, weights["first.0.linear.weight"].dtype)
    stored = {
        **conversion.target_name(checkpoint),
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "mlp" if sizes.prefix is None else "prefix-mlp",
        "hydra_num_heads": sizes.num_heads,
        "hydra_num_layers": sizes.num_layers,
        **prefix_entries(sizes),
        **conversion.own_entries(checkpoint),
    }
    file = "hydra_lm_head.safetensors" if options.as_safetensors else "hydra_lm_head.pt"
    save(directory, file, tensors, stored)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    config, named = cast("HydraConfig", checkpoint.config), conversion.needs_target_name(checkpoint)
    scaling = None if options.target.config is None else target_scaling(options.target.config)
    prefix, reason = config.prefix, None
    if options.as_safetensors:
        reason = "it opens hydra_lm_head.pt alone"
    elif prefix is not None and prefix.num_key_value_heads != prefix.num_attention_heads:
        reason = "its KV cache has no room for grouped key heads, and it stops"
    elif prefix is not None and scaling is not None and scaling["rope_type"] not in ("linear", "dynamic"):
        reason = f"it does not know the target's rotary scaling '{scaling['rope_type']}' and stops"
    how = f"HydraModel.from_pretrained, for a Llama without grouped key heads{named}"
    official = Reader.unless(reason, HYDRA_CODE, how)
    counts = f"--num_hydra_heads {config.num_heads} and --num_hydra_layers {config.num_layers}"
    how = f"its converter with {counts}; it runs the prefix layer without a context"
    port = Reader.unless("it knows Hydra++ alone, with a prefix layer" if prefix is None else None, TRT_HYDRA, how)
    return [official, port]


def _refuse_other_networks(checkpoint: HeadCheckpoint, config: HydraConfig, target: TargetInfo) -> None:
    elsewhere = "pass --safetensors, which that code does not open, or convert to 'tensorrt_llm' or 'native'."
    if conversion.has_different_blocks(checkpoint.weights):
        raise ConfigError(
            f"the {config.num_layers - 1} blocks after the first of each head differ, and {HYDRA_CODE}, which opens "
            "hydra_lm_head.pt, takes the last one in place of all: it would draft as another network. Train with "
            f"tied_blocks=true or two layers, {elsewhere}"
        )
    prefix = config.prefix
    if prefix is None:
        return
    if prefix.rope_theta != UPSTREAM_ROPE_THETA:
        raise ConfigError(
            f"the prefix layer rotates with rope_theta {prefix.rope_theta:g}, and {HYDRA_CODE}, which opens "
            f"hydra_lm_head.pt, always with {UPSTREAM_ROPE_THETA:g}. Train with that, {elsewhere}"
        )
    theirs = prefix.rope_scaling if target.config is None else target_scaling(target.config)
    rope_type = None if prefix.rope_scaling is None else prefix.rope_scaling.get("rope_type")
    # Other types make that code stop, with an error.
    is_known = theirs is None or theirs["rope_type"] in ("linear", "dynamic")
    if rope_type not in (None, "linear") or (is_known and _factor(theirs) != _factor(prefix.rope_scaling)):
        raise ConfigError(
            f"the prefix layer has rotary scaling {prefix.rope_scaling}, and {HYDRA_CODE}, which opens "
            f"hydra_lm_head.pt, takes the target's, {theirs if target.config is not None else 'if it is linear'}. "
            f"Train with the target's, {elsewhere}"
        )


def _factor(scaling: Mapping[str, Any] | None) -> tuple[Any, Any]:
    return (None, None) if scaling is None else (scaling.get("rope_type"), scaling.get("factor"))


def _check_architecture(name: str, config: Mapping[str, Any], weights: Weights) -> None:
    arch = config.get("hydra_head_arch", "mlp")
    if arch not in ("mlp", "prefix-mlp"):
        raise ModelError(f"'{name}' has hydra_head_arch {shown(arch)}. Expected 'mlp' or 'prefix-mlp'.")
    residuals = any(".res_connection." in key for key in weights.shapes)
    if config.get("grounded_heads", True) is not True or not residuals:
        raise ModelError(
            f"the heads of '{name}' are not grounded: they do not read drafted tokens. Expected ones that do."
        )
    if config.get("hidden_state_offset", 0) != 0:
        raise ModelError(
            f"'{name}' reads the feature {config['hidden_state_offset']} layers below the last. Expected offset 0."
        )


FORMATS = (Format("hydra", _recognises, _read_head, ("hydra",), _write_head, _readers),)
