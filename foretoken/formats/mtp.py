"""Reads the head for multi-token prediction out of the files of its target: Qwen3.5, `mtp.*`.

Such files are a model, which `holds_head` does not take for a head; `holds_own_head` does. `foretoken convert TARGET
TARGET-mtp` writes the head alone, in our own format.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ModelError
from foretoken.formats import conversion
from foretoken.formats.conversion import Format, Place
from foretoken.heads.mtp import MtpConfig, MtpLayerConfig

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
    from foretoken.formats.files import HeadFiles

_PREFIX, _LAYER = "mtp.", "mtp.layers.0"


def _recognises(files: HeadFiles) -> bool:
    return f"{_PREFIX}fc.weight" in files.weights.shapes


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    name = str(files.path)
    weights = files.weights.renamed(lambda key: key if key.startswith(_PREFIX) else None)
    stated: Any = files.config.get("text_config") or files.config
    if any(".experts." in key for key in weights.shapes):
        raise ModelError(f"the head for multi-token prediction of '{name}' has experts. Expected one of a dense model.")
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
            intermediate_size=stated["intermediate_size"],
            rms_norm_eps=stated["rms_norm_eps"],
            rope_theta=rotation.get("rope_theta", stated.get("rope_theta", 10000.0)),
            rotary_dim=int(stated["head_dim"] * share),
        )
        sizes = conversion.make_config(
            MtpConfig, name, hidden_size=stated["hidden_size"], vocab_size=stated["vocab_size"], layer=layer
        )
    except KeyError as err:
        raise ModelError(f"the config.json of '{name}' lacks {err}. Expected that of Qwen3.5. Copy it again.") from err
    return conversion.finished(files, sizes, conversion.read_tensors(weights, _table(), sizes), target)


def _table() -> dict[str, Place]:
    places = conversion.layer_table(_LAYER, "layer") | {f"{_LAYER}.input_layernorm.weight": Place("layer.input_norm")}
    places |= {f"{_LAYER}.self_attn.{part[0]}_norm.weight": Place(f"layer.{part}_norm") for part in ("query", "key")}
    places |= {
        "mtp.fc.weight": Place("fc.weight"),
        "mtp.pre_fc_norm_embedding.weight": Place("embedding_norm"),
        "mtp.pre_fc_norm_hidden.weight": Place("feature_norm"),
        "mtp.norm.weight": Place("norm"),
    }
    return places


FORMATS = (Format("mtp", _recognises, _read_head),)
