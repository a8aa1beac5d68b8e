"""Reads and writes Hydra and Hydra++ heads as published: `hydra_lm_head.pt`, and a `config.json` without sizes.

In Hydra++ a dropout module stands before each block and LM head: blocks have the numbers 1, 3, 5, … instead of 0, 1, 2,
…. Its decoder block is called `prefix_embeding_layer`, misspelt.

The original code opens the pickle alone. It repeats one module for all blocks after a head's first, and its decoder
block rotates by its own rules. A head that would be another network there is not written as a pickle.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats.eagle_names import warn_of_embedding
from foretoken.formats.hydra_names import UPSTREAM_ROPE_THETA, HydraNames, prefix_entries, with_own_lm_heads
from foretoken.formats.mapping import read_tensors, scatter
from foretoken.formats.saving import (
    HYDRA_CODE,
    TRT_HYDRA,
    Reader,
    expect_method,
    finished,
    has_different_blocks,
    needs_target_name,
    own_entries,
    save,
    target_name,
)
from foretoken.heads.hydra import HydraConfig
from foretoken.models.rotary import target_scaling

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.formats.files import HeadFiles, Weights
    from foretoken.formats.saving import WriteOptions
    from foretoken.formats.target_info import TargetInfo

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


def recognises(files: HeadFiles) -> bool:
    """Decides whether there are keys of this family."""
    return bool(files.weights.matches(_ANY)) or "hydra_head_arch" in files.config


def read(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads heads.

    Args:
        files: The checkpoint.
        target: For attention sizes that files leave out; its embedding, if available, is compared with the file's.

    Raises:
        ModelError: For other architectures of the original code, wrong keys, numbers that are not finite, or unknown
            sizes.
    """
    weights, config, name = files.weights, files.config, str(files.path)
    _check_architecture(name, config, weights)
    spelling = next((one for one in _SPELLINGS if any(key.startswith(one) for key in weights.shapes)), None)
    names = PLAIN if spelling is None else with_prefix(spelling)
    sizes = names.config(weights, config, target)
    _warn_of_counts(name, config, sizes)
    ignored = [match[0] for match in weights.matches(_UNUSED)]
    if _EMBEDDING in weights.shapes:
        ignored.append(_EMBEDDING)
        warn_of_embedding(weights, _EMBEDDING, target)
    tensors = read_tensors(weights, names.table(sizes), sizes, ignored=ignored)
    return finished(name, config, sizes, tensors, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes heads, each with an LM head, and the target's embedding if available.

    Raises:
        ConfigError: If the head is of another method, the original code would load another network, or the target's LM
            head is needed and missing.
    """
    what = "format 'hydra'"
    expect_method(checkpoint, "hydra", what=what)
    config = checkpoint.config
    assert isinstance(config, HydraConfig), "the method says so"
    if not options.as_safetensors:
        _refuse_other_networks(checkpoint, config, options.target)
    sizes, weights = with_own_lm_heads(config, checkpoint.weights, options, what=what)
    names = PLAIN if sizes.prefix is None else with_prefix(_SPELLINGS[0])
    tensors = scatter(weights, names.table(sizes))
    if options.target.weights is not None:
        dtype = weights["first.0.linear.weight"].dtype
        tensors[_EMBEDDING] = options.target.weights.embedding.to("cpu", dtype, copy=True)
    stored = {
        **target_name(checkpoint),
        "grounded_heads": True,
        "hidden_state_offset": 0,
        "hydra_head_arch": "mlp" if sizes.prefix is None else "prefix-mlp",
        "hydra_num_heads": sizes.num_heads,
        "hydra_num_layers": sizes.num_layers,
        **prefix_entries(sizes),
        **own_entries(checkpoint),
    }
    file = "hydra_lm_head.safetensors" if options.as_safetensors else "hydra_lm_head.pt"
    save(directory, file, tensors, stored)


def readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    """Returns the programs that read the result of `write`."""
    config, named = checkpoint.config, needs_target_name(checkpoint)
    assert isinstance(config, HydraConfig), "the method says so"
    scaling = None if options.target.config is None else target_scaling(options.target.config)
    if options.as_safetensors:
        official = Reader(HYDRA_CODE, False, "it opens hydra_lm_head.pt alone")
    elif config.prefix is not None and config.prefix.num_key_value_heads != config.prefix.num_attention_heads:
        official = Reader(HYDRA_CODE, False, "its KV cache has no room for grouped key heads, and it stops")
    elif config.prefix is not None and scaling is not None and scaling["rope_type"] not in ("linear", "dynamic"):
        how = f"it does not know the target's rotary scaling '{scaling['rope_type']}' and stops"
        official = Reader(HYDRA_CODE, False, how)
    else:
        official = Reader(HYDRA_CODE, True, f"HydraModel.from_pretrained, for a Llama without grouped key heads{named}")
    if config.prefix is None:
        port = Reader(TRT_HYDRA, False, "it knows Hydra++ alone, with a prefix layer")
    else:
        heads, layers = config.num_heads, config.num_layers
        options_given = f"--num_hydra_heads {heads} and --num_hydra_layers {layers}"
        port = Reader(
            TRT_HYDRA, True, f"its converter with {options_given}; it runs the prefix layer without a context"
        )
    return [official, port]


def _refuse_other_networks(checkpoint: HeadCheckpoint, config: HydraConfig, target: TargetInfo) -> None:
    elsewhere = "pass --safetensors, which that code does not open, or convert to 'tensorrt_llm' or 'native'."
    if has_different_blocks(checkpoint, "weight", "bias"):
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
    """Returns the factor that the original code reads from a rotary scaling."""
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


def _warn_of_counts(name: str, config: Mapping[str, Any], found: HydraConfig) -> None:
    for key, number in (("hydra_num_heads", found.num_heads), ("hydra_num_layers", found.num_layers)):
        if config.get(key, number) != number:
            logging.getLogger(__name__).warning(
                "%s: config.json says %s %s, the tensors say %s", name, key, config[key], number
            )
