"""Reads and writes EAGLE-3 heads of vllm-project/speculators, and reads its former EAGLE-1 heads.

The block is `layers.0`, `transformer_layer_config` holds a Llama's configuration, and `speculators_config` the target's
name. Taps are boundaries, as here. Heads of EAGLE-1 and -2 call the block `transformer` and the layer before it
`fusion_fc`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats import conversion
from foretoken.formats.conversion import SPECULATORS, VLLM_EAGLE, Format, Reader, WriteOptions
from foretoken.formats.eagle import EMBEDDING, read_eagle, stated_layer, without_prefix
from foretoken.formats.eagle3 import LAYER_IDS, boundaries_of, eagle3_tensors, flag, read_eagle3, with_plain_vocabulary
from foretoken.formats.files import HeadFiles, Weights, save

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo, TargetWeights
    from foretoken.heads.eagle3 import Eagle3Config

KINDS = ("eagle3", "eagle")
_LAYER, _LAYER_CONFIG = "layers.0", "transformer_layer_config"
_OUTPUT_BIAS = f"{_LAYER}.self_attn.o_proj.bias"
_VERSION = "0.9.0"  # version of the package that writes such files


def _recognises(files: HeadFiles) -> bool:
    kind = files.config.get("speculators_model_type")
    return kind in KINDS if isinstance(kind, str) else "fusion_fc.weight" in files.weights.shapes


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    config, name = files.config, str(files.path)
    stated = config.get(_LAYER_CONFIG)
    if not isinstance(stated, dict):
        raise ModelError(f"{_LAYER_CONFIG} of '{name}' is {shown(stated)}. Expected the configuration of its block.")
    verifier = _outer(config).get("verifier")
    base = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    named = replace(files, config={**config, "base_model_name_or_path": base})
    if config.get("speculators_model_type") != "eagle3":
        sizes, tensors = read_eagle(
            files.weights, stated, target, fc="fusion_fc", layer="transformer", num_steps=_steps(config)
        )
        return conversion.finished(named, sizes, tensors, target)
    boundaries = boundaries_of(name, config.get(LAYER_IDS))
    if boundaries is not None and boundaries[0] == 1:
        conversion.warn(
            name,
            f"taps {boundaries} are taken as boundaries, and files of SpecForge name the layer before instead: if it "
            f"comes from there, they should be {[one + 1 for one in boundaries]}",
        )
    steps = conversion.own_entry(config, "num_steps", default=_steps(config))
    weights = _without_output_bias(without_prefix(files), stated)
    eagle3_sizes, tensors = read_eagle3(
        files, weights, stated, target, layer=_LAYER, boundaries=boundaries,
        norm_before_residual=_norm_before_residual(name, config), feeds_normed=flag(name, config, "norm_output"),
        **({} if steps is None else {"num_steps": steps}),
    )  # fmt: skip
    return conversion.finished(named, eagle3_sizes, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    checkpoint = with_plain_vocabulary(checkpoint)
    sizes = cast("Eagle3Config", checkpoint.config)
    tensors = eagle3_tensors(checkpoint, layer=_LAYER)
    if sizes.layer.attention_bias:  # a Llama's bias covers the output as well
        tensors[_OUTPUT_BIAS] = torch.zeros(sizes.width, dtype=tensors["fc.weight"].dtype)
    if not sizes.own_embedding and options.target.weights is not None:
        tensors[EMBEDDING] = _shared_embedding(options.target.weights, tensors["fc.weight"].dtype)
    layer = stated_layer(sizes.layer, width=sizes.width, vocab_size=sizes.vocab_size, target=options.target)
    dtype = conversion.dtype_name(tensors["fc.weight"].dtype)
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "draft_vocab_size": sizes.draft_vocab_size or sizes.vocab_size,
        "norm_before_residual": sizes.norm_before_residual,
        "norm_before_fc": sizes.norm_before_fc,
        "fc_norm": sizes.fc_norms,
        "norm_output": sizes.feeds_normed,
        "target_hidden_size": None if sizes.width == sizes.hidden_size else sizes.hidden_size,
        "embed_requires_grad": False,
        LAYER_IDS: list(sizes.boundaries),
        _LAYER_CONFIG: layer
        | {
            "attention_bias": sizes.layer.attention_bias,
            "rope_scaling": sizes.layer.rope_scaling,
            "torch_dtype": dtype,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": sizes.num_steps,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "default_proposal_method": "greedy",
            "verifier": _verifier(checkpoint, options.target),
        },
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        **conversion.own_entries(checkpoint, num_steps=sizes.num_steps, own_embedding=sizes.own_embedding),
    }
    save(directory, "model.safetensors", tensors, config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    sizes = cast("Eagle3Config", checkpoint.config)
    reason = None
    if not sizes.own_embedding and options.target.load is None:
        reason = "it expects embeddings in the file, and takes random ones where they are missing; pass --target"
    elif sizes.width != sizes.hidden_size:
        reason = "it takes the target to be as wide as the head, and tensors do not fit"
    own = Reader.unless(reason, SPECULATORS, "SpeculatorModel.from_pretrained of this directory, to train it on")
    depth = "" if options.target.config is not None else "; pass --target, for the length of its context"
    fits = len(sizes.boundaries) == 3 and not sizes.layer.attention_bias
    how = f"vllm serve of this directory, a chain of the best token{depth}"
    vllm = Reader.unless(None if fits else "it expects three taps, and no bias", VLLM_EAGLE, how)
    return [own, vllm]


def _shared_embedding(target: TargetWeights, dtype: torch.dtype) -> Tensor:
    if not target.is_embedding_plain:
        raise ConfigError(
            "the head shares the target's embeddings, which are scaled, and format 'speculators' keeps them as they "
            "are stored. Keep the head in our own format, 'native'."
        )
    return target.embedding.to("cpu", dtype, copy=True)


def _verifier(checkpoint: HeadCheckpoint, target: TargetInfo) -> dict[str, Any]:
    known = checkpoint.target or target.fingerprint
    if known is None or not known.name:
        raise ConfigError(
            "format 'speculators' names the target that a head is for, and this one names none. Pass --target."
        )
    stated = getattr(target.config, "architectures", None)
    return {"name_or_path": known.name, "architectures": stated or ([known.architecture] if known.architecture else [])}


def _outer(config: Mapping[str, Any]) -> Mapping[str, Any]:
    outer = config.get("speculators_config")
    return outer if isinstance(outer, dict) else {}


def _steps(config: Mapping[str, Any]) -> Any:
    methods = _outer(config).get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    return first.get("speculative_tokens") if isinstance(first, dict) else None


def _norm_before_residual(name: str, config: Mapping[str, Any]) -> bool:
    """Returns the file's value, else the default of speculators, which differs from vLLM's."""
    if config.get("norm_before_residual") is None:
        conversion.warn(
            name,
            "norm_before_residual is missing and taken to be false, as speculators does; vLLM takes it to be true. Set "
            "it as the head was trained",
        )
    return flag(name, config, "norm_before_residual")


def _without_output_bias(weights: Weights, stated: Mapping[str, Any]) -> Weights:
    if _OUTPUT_BIAS not in weights.shapes or not stated.get("attention_bias"):
        return weights
    bias = weights.fetch([_OUTPUT_BIAS])[_OUTPUT_BIAS]
    width = weights.shapes.get(f"{_LAYER}.self_attn.o_proj.weight", (0,))[:1]
    if bool((bias != 0).any()) or tuple(bias.shape) != width:
        raise ModelError(
            f"{_OUTPUT_BIAS} of '{weights.name}' is not zero. Expected a block without it, as heads here are."
        )
    return weights.renamed(lambda key: None if key == _OUTPUT_BIAS else key)


FORMATS = (Format("speculators", _recognises, _read_head, ("eagle3",), _write_head, _readers),)
