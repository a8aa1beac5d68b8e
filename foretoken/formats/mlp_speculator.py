"""Reads and writes MLP speculators of IBM, vLLM and TGI: `speculator.{emb,proj,head,ln}.{stage}`.

Files with tied weights hold any of the repeated tensors, at least one of each kind. The writer writes all of them, so
that every reader finds its own. One stage is written as untied, because readers look for a second projection if weights
are tied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from foretoken.core.errors import ConfigError, ModelError
from foretoken.formats import conversion
from foretoken.formats.conversion import OLD_TGI, TGI, VLLM, Format, Place, Reader, WriteOptions
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

_PREFIX = "speculator."
_KEY = re.compile(r"(speculator\.)?(emb|proj|head|ln)\.(?P<stage>\d{1,4})\.(weight|bias)")
_DEFAULT_TREE = (4, 3, 2)  # then 2 for each further stage, as published for llama3-8b


def _recognises(files: HeadFiles) -> bool:
    found = {match[2] for match in files.weights.matches(_KEY)}
    return {"emb", "proj"} <= found


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = files.weights, files.config, str(files.path)
    prefix = _PREFIX if any(key.startswith(_PREFIX) for key in weights.shapes) else ""
    sizes = _sizes(name, weights, config, prefix)
    tensors = conversion.read_tensors(weights, _table(sizes, prefix), sizes)
    return conversion.finished(files, sizes, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    sizes = cast("MlpSpeculatorConfig", checkpoint.config)
    epsilon = MlpSpeculatorConfig.model_fields["rms_norm_eps"].default
    if sizes.rms_norm_eps != epsilon:
        raise ConfigError(
            f"the head has rms_norm_eps {sizes.rms_norm_eps}, and readers of format 'mlp_speculator' take {epsilon} "
            "alone. Keep the head in our own format, 'native'."
        )
    tensors = conversion.scatter(checkpoint.weights, _table(sizes, _PREFIX))
    default = (_DEFAULT_TREE + (2,) * sizes.num_heads)[: sizes.num_heads]
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        **conversion.target_name(checkpoint),
        "vocab_size": sizes.vocab_size,
        "emb_dim": sizes.hidden_size,
        "inner_dim": sizes.inner_dim,
        "n_predict": sizes.num_heads,
        "top_k_tokens_per_head": list(sizes.top_k or default),
        "n_candidates": sizes.num_candidates,
        "tie_weights": sizes.tie_weights and sizes.num_heads > 1,
        "scale_input": sizes.scale_input,
        "torch_dtype": conversion.dtype_name(next(iter(tensors.values())).dtype),
        # vLLM always needs a list of that length; our key tells that there is no tree.
        **conversion.own_entries(checkpoint, has_tree=sizes.top_k is not None, tie_weights=sizes.tie_weights),
    }
    save(directory, "model.safetensors", tensors, config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    config, named = cast("MlpSpeculatorConfig", checkpoint.config), conversion.needs_target_name(checkpoint)
    how = f"--model-id of this directory, all {config.num_heads} stages (its factors follow --speculate){named}"
    is_tied = config.tie_weights and config.num_heads > 1
    untied = None if is_tied else "it fails while loading stages that are not tied, since TGI 2.3"
    scaled = "it passes over scale_input and computes something else" if config.scale_input else None
    return [
        Reader("fms-extras", True, "its MLPSpeculator, 'speculator.' left out of the keys"),
        Reader.unless(untied, TGI, how),
        Reader.unless(scaled, OLD_TGI, how),
        Reader(VLLM, False, "it has no drafter for it any more"),
    ]


def _table(config: MlpSpeculatorConfig, prefix: str) -> dict[str, Place]:
    places: dict[str, Place] = {}
    for stage in range(config.num_heads):
        own = 0 if config.tie_weights else stage
        projection = min(stage, 1) if config.tie_weights else stage
        places[f"{prefix}emb.{stage}.weight"] = Place(f"embeddings.{own}.weight")
        places[f"{prefix}proj.{stage}.weight"] = Place(f"projections.{projection}.weight")
        places[f"{prefix}head.{stage}.weight"] = Place(f"lm_heads.{own}.weight")
        places[f"{prefix}ln.{stage}.weight"] = Place(f"norms.{own}.weight")
        places[f"{prefix}ln.{stage}.bias"] = Place(f"norms.{own}.bias")
    return places


def _sizes(name: str, weights: Weights, config: Mapping[str, Any], prefix: str) -> MlpSpeculatorConfig:
    """Returns the configuration. Its number of stages is part of the network; tensors do not overrule it."""
    if not isinstance(config.get("n_predict"), int):
        raise ModelError(f"the config.json of '{name}' does not give n_predict. Expected the number of stages.")

    def size(key: str, kind: str, dimension: int) -> int:
        stated = config.get(key)
        if stated:
            return int(stated)
        keys = [key for key in weights.shapes if key.startswith(f"{prefix}{kind}.") and len(weights.shapes[key]) == 2]
        return conversion.most_common((weights.shapes[key][dimension] for key in keys), name=name, what=f"'{key}'")

    try:
        inner = size("inner_dim", "emb", 1)
        hidden = config.get("emb_dim") or config.get("hidden_size") or weights.shapes[f"{prefix}proj.0.weight"][1]
        has_tree = conversion.own_entry(config, "has_tree", default=True) and config.get("top_k_tokens_per_head")
        return conversion.make_config(
            MlpSpeculatorConfig,
            name,
            hidden_size=hidden,
            vocab_size=size("vocab_size", "emb", 0),
            num_heads=config["n_predict"],
            inner_dim=inner,
            tie_weights=conversion.own_entry(config, "tie_weights", default=config.get("tie_weights", False)),
            scale_input=config.get("scale_input", False),
            top_k=config["top_k_tokens_per_head"] if has_tree else None,
            num_candidates=config.get("n_candidates", 5),
        )
    except (KeyError, IndexError, TypeError, ValueError) as err:
        raise ModelError(f"the config.json of '{name}' does not fit its tensors: {err!r}.") from err


FORMATS = (Format("mlp_speculator", _recognises, _read_head, ("mlp_speculator",), _write_head, _readers),)
