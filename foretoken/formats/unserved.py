"""Recognises heads of kinds that nothing here drafts with, so as to name them: speculators writes the kind down.

One is then neither taken for a damaged target nor for an unknown file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from foretoken.formats.speculators import KINDS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.formats.files import HeadFiles

# What vllm-project/speculators calls its kinds.
_SPECULATORS = {"peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark", "mtp": "multi-token prediction"}


def unserved_head(files: HeadFiles) -> str | None:
    """What a checkpoint holds that nothing here drafts with, in a few words; None when it is nothing of that kind."""
    kind = files.config.get("speculators_model_type")
    if not isinstance(kind, str) or kind in KINDS:
        return None
    name = _SPECULATORS.get(kind, f"'{kind}'")
    facts = ["format speculators", *_vocabularies(files)]
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name} head ({', '.join(facts)})"


def _vocabularies(files: HeadFiles) -> list[str]:
    """The vocabulary that is drafted, of the target's, as far as they are told."""
    layer: Mapping[str, Any] | Any = files.config.get("transformer_layer_config")
    drafted, whole = files.config.get("draft_vocab_size"), layer.get("vocab_size") if isinstance(layer, dict) else None
    drafted = drafted or whole
    return [f"draft vocabulary {drafted}" + (f" of {whole}" if whole and whole != drafted else "")] if drafted else []
