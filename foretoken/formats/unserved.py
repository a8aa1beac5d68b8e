"""Recognises EAGLE-1, -2 and -3 heads in the layouts of their authors, SpecForge and speculators, so as to name them.

They are known by tensors (`fc` beside a decoder layer without a model around it) and by keys of `config.json`, so that
one is neither taken for a damaged target nor for an unknown file.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.formats.files import HeadFiles

_MODEL = r"(?:model\.)?"
_FC = re.compile(_MODEL + r"fc\.weight")
_FUSION = re.compile(_MODEL + r"fusion_fc\.weight")
_MID_LAYER = re.compile(_MODEL + r"midlayer\..*")
_LAYER = re.compile(_MODEL + r"(layers\.0|transformer)\..*")
_D2T, _T2D, _LM_HEAD = (re.compile(_MODEL + key) for key in ("d2t", "t2d", r"lm_head\.weight"))
# What vllm-project/speculators calls its kinds.
_SPECULATORS = {
    "eagle": "EAGLE-1 or -2",
    "eagle3": "EAGLE-3",
    "peagle": "P-EAGLE",
    "dflash": "DFlash",
    "dspark": "DSpark",
    "mtp": "multi-token prediction",
}


def unserved_head(files: HeadFiles) -> str | None:
    """What a checkpoint holds that nothing here drafts with, in a few words; None when it is nothing of that kind."""
    config = files.config
    kind = config.get("speculators_model_type")
    if isinstance(kind, str):
        return _described(_SPECULATORS.get(kind, f"'{kind}'"), "format speculators", files, has_taps=kind == "eagle3")
    architectures = config.get("architectures")
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    shapes = files.weights.shapes
    has_fc, has_layer = _first(shapes, _FC) is not None, _first(shapes, _LAYER) is not None
    if any("eagle3" in name.lower() for name in names) or (has_fc and _first(shapes, _MID_LAYER)):
        return _described(
            "EAGLE-3", "of SpecForge" if "LlamaForCausalLMEagle3" in names else None, files, has_taps=True
        )
    if has_fc and has_layer and (_first(shapes, _D2T) or "draft_vocab_size" in config):
        return _described("EAGLE-3", None, files, has_taps=True)
    if config.get("model_type") == "eagle" or ((has_fc or _first(shapes, _FUSION)) and has_layer):
        return _described("EAGLE-1 or -2", None, files, has_taps=False)
    return None


def _described(name: str, origin: str | None, files: HeadFiles, *, has_taps: bool) -> str:
    """The name with what tells one head from another."""
    facts = [origin] if origin else []
    if has_taps:
        facts.append(_taps(files))
    drafted, whole = _vocabularies(files)
    if drafted:
        facts.append(f"draft vocabulary {drafted}" + (f" of {whole}" if whole and whole != drafted else ""))
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name} head" + (f" ({', '.join(facts)})" if facts else "")


def _taps(files: HeadFiles) -> str:
    """Which layers of the target it reads, or how many."""
    nested = files.config.get("eagle_config")
    for config in (nested if isinstance(nested, dict) else {}, files.config):
        taps = config.get("eagle_aux_hidden_state_layer_ids")
        if isinstance(taps, list) and taps:
            return f"taps {', '.join(map(str, taps))}"
    key = _first(files.weights.shapes, _FC)
    shape = () if key is None else files.weights.shapes[key]
    width = files.config.get("target_hidden_size") or _text(files.config).get("hidden_size")
    if len(shape) == 2 and isinstance(width, int) and width > 0 and shape[1] % width == 0:
        return f"{shape[1] // width} taps, their layers not stated"
    return "taps not stated"


def _vocabularies(files: HeadFiles) -> tuple[Any, Any]:
    """Sizes of the vocabulary that is drafted and of the target's, as far as they are told."""
    shapes = files.weights.shapes
    drafted = files.config.get("draft_vocab_size")
    for pattern in (_D2T, _LM_HEAD):
        key = _first(shapes, pattern)
        drafted = drafted or (shapes[key][0] if key is not None and shapes[key] else None)
    key = _first(shapes, _T2D)
    whole = _text(files.config).get("vocab_size") or (shapes[key][0] if key is not None and shapes[key] else None)
    return drafted or whole, whole


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Where the decoder layer's sizes are."""
    nested = (config.get(key) for key in ("transformer_layer_config", "model"))
    return next((part for part in nested if isinstance(part, dict)), config)


def _first(shapes: Mapping[str, Any], pattern: re.Pattern[str]) -> str | None:
    """The first key that matches as a whole."""
    return next((key for key in shapes if pattern.fullmatch(key)), None)
