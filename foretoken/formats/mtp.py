"""Reads the head for multi-token prediction out of the files of its target: Qwen3.5 and Qwen3-Next, `mtp.*`.

Such files are a model, which `holds_head` does not take for a head; `holds_own_head` does. `foretoken convert TARGET
TARGET-mtp` writes the head alone, in our own format. GGUF files of the targets have the same tensors under other names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ModelError
from foretoken.formats import conversion
from foretoken.formats.checkpoint import TargetFingerprint, lm_head_hash
from foretoken.formats.conversion import Format, Place
from foretoken.formats.files import HeadFiles, Weights
from foretoken.heads.mtp import MtpConfig, MtpLayerConfig

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

_PREFIX, _LAYER = "mtp.", "mtp.layers.0"
_MLP = f"{_LAYER}.mlp"
_GATE_UP = f"{_MLP}.experts.gate_up_proj"
_OF_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


def _recognises(files: HeadFiles) -> bool:
    return f"{_PREFIX}fc.weight" in files.weights.shapes


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    name = str(files.path)
    weights = _with_halves(files.weights.renamed(lambda key: key if key.startswith(_PREFIX) else None))
    stated: Any = files.config.get("text_config") or files.config
    has_experts = any(key.startswith(f"{_MLP}.experts.") for key in weights.shapes)
    if any(key.startswith("mtp.layers.1.") for key in weights.shapes):
        raise ModelError(f"the head for multi-token prediction of '{name}' has several blocks. Expected one.")
    rotation = stated.get("rope_parameters") or stated.get("rope_scaling") or {}
    if rotation.get("rope_type", "default") != "default":
        raise ModelError(f"rotations of '{name}' are scaled ({rotation['rope_type']}). Expected the default ones.")
    try:
        share = rotation.get("partial_rotary_factor", stated.get("partial_rotary_factor", 1.0))
        layer = conversion.make_config(
            MtpLayerConfig,
            name,
            num_attention_heads=stated["num_attention_heads"],
            num_key_value_heads=stated["num_key_value_heads"],
            head_dim=stated["head_dim"],
            intermediate_size=stated["shared_expert_intermediate_size" if has_experts else "intermediate_size"],
            **({key: stated[key] for key in _OF_EXPERTS} if has_experts else {}),
            norm_topk_prob=stated.get("norm_topk_prob", True),
            rms_norm_eps=stated["rms_norm_eps"],
            rope_theta=rotation.get("rope_theta", stated.get("rope_theta", 10000.0)),
            rotary_dim=int(stated["head_dim"] * share),
        )
        sizes = conversion.make_config(
            MtpConfig, name, hidden_size=stated["hidden_size"], vocab_size=stated["vocab_size"], layer=layer
        )
    except KeyError as err:
        raise ModelError(f"the config.json of '{name}' lacks {err}. Expected that of Qwen3.5. Copy it again.") from err
    table = _table(layer.num_experts, are_joined=_GATE_UP in weights.shapes)
    checkpoint = conversion.finished(files, sizes, conversion.read_tensors(weights, table, sizes), target)
    return replace(checkpoint, target=_fingerprint(files, stated))


def _fingerprint(files: HeadFiles, stated: Mapping[str, Any]) -> TargetFingerprint:
    """Returns that of the model around the head; `weights` is None if the files do not have its LM head as a matrix."""
    is_tied = stated.get("tie_word_embeddings", files.config.get("tie_word_embeddings", False))
    ending = "embed_tokens.weight" if is_tied else "lm_head.weight"
    keys = [key for key in files.weights.shapes if key.endswith(ending)][:1]
    hashes = [lm_head_hash(each) for each in files.weights.fetch(keys).values() if each.itemsize > 1 and each.ndim == 2]
    return TargetFingerprint(
        name=str(files.path), hidden_size=stated["hidden_size"], vocab_size=stated["vocab_size"],
        weights=hashes[0] if hashes else None,
    )  # fmt: skip


def _with_halves(weights: Weights) -> Weights:
    """Returns the tensors with those of gate and up of all experts as (X, 2, J, E) instead of (X, 2 J, E)."""
    shape = weights.shapes.get(_GATE_UP, ())
    if len(shape) != 3 or shape[1] % 2:
        return weights

    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        found = weights.fetch(keys)
        return {key: part.unflatten(1, (2, -1)) if key == _GATE_UP else part for key, part in found.items()}

    halves = (shape[0], 2, shape[1] // 2, shape[2])
    return Weights(name=weights.name, shapes={**weights.shapes, _GATE_UP: halves}, fetch=fetch)


def _table(num_experts: int, *, are_joined: bool) -> dict[str, Place]:
    """Returns the places of tensors; are_joined: whether one tensor has gate and up of all experts."""
    places = conversion.layer_table(_LAYER, "layer") | {f"{_LAYER}.input_layernorm.weight": Place("layer.input_norm")}
    places |= {f"{_LAYER}.self_attn.{part[0]}_norm.weight": Place(f"layer.{part}_norm") for part in ("query", "key")}
    places |= {
        "mtp.fc.weight": Place("fc.weight"),
        "mtp.pre_fc_norm_embedding.weight": Place("embedding_norm"),
        "mtp.pre_fc_norm_hidden.weight": Place("feature_norm"),
        "mtp.norm.weight": Place("norm"),
    }
    if not num_experts:
        return places
    for part in ("gate_proj", "up_proj", "down_proj"):
        places[f"{_MLP}.shared_expert.{part}.weight"] = places.pop(f"{_MLP}.{part}.weight")
    places[f"{_MLP}.gate.weight"] = Place("layer.router")
    places[f"{_MLP}.shared_expert_gate.weight"] = Place("layer.shared_gate")
    if are_joined:
        joined = {_GATE_UP: Place("layer.experts_gate_up"), f"{_MLP}.experts.down_proj": Place("layer.experts_down")}
        return places | joined
    for expert in range(num_experts):
        at = f"{_MLP}.experts.{expert}"
        places |= {f"{at}.{part}.weight": Place("layer.experts_gate_up", (expert, index))
                   for index, part in enumerate(("gate_proj", "up_proj"))}  # fmt: skip
        places[f"{at}.down_proj.weight"] = Place("layer.experts_down", (expert,))
    return places


FORMATS = (Format("mtp", _recognises, _read_head),)
