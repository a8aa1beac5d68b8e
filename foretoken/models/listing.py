"""Says what the models on this machine are, from their headers, and which can draft for which. Needs no torch."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ForetokenError, ModelError, foreign_errors_as
from foretoken.files.bounded_reads import read_json_object, tensor_headers
from foretoken.models.architectures import is_lean
from foretoken.models.describe import listed_tokens
from foretoken.models.local import is_gguf
from foretoken.models.quantization.gguf_header import read_headers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from foretoken.models.local import LocalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSummary:
    """What a model on this machine is.

    Attributes:
        name: What may be written as MODEL.
        place: Its directory or GGUF file.
        source: What keeps it there.
        num_bytes: The sizes of its weight files; None if they cannot be read, like the following.
        format: Of most weights: "GGUF Q4_K", or "safetensors BF16".
        architecture: Its name in GGUF files, or its class in transformers.
        is_lean: Whether a lean decoder knows the architecture.
        drafts_for: Models with the same tokens and more bytes, and its share of their bytes.
        error: Why it cannot be read.
    """

    name: str
    place: Path
    source: str
    num_bytes: int | None = None
    format: str | None = None
    architecture: str | None = None
    is_lean: bool | None = None
    drafts_for: dict[str, float] | None = None
    error: str | None = None


def summaries(models: Iterable[LocalModel]) -> list[ModelSummary]:
    """Returns what models are, in their order; no weights are read."""
    found = [_summary(model) for model in models]
    tokens = [None if each.error else _tokens_hash(each.place) for each in found]
    return [
        each if own is None else replace(each, drafts_for=_shares(each, own, found, tokens))
        for each, own in zip(found, tokens, strict=True)
    ]


def _shares(draft: ModelSummary, own: str, models: list[ModelSummary], tokens: list[str | None]) -> dict[str, float]:
    size = draft.num_bytes or 0
    return {
        each.name: size / each.num_bytes
        for each, others in zip(models, tokens, strict=True)
        if others == own and each.num_bytes is not None and each.num_bytes > size
    }


def _summary(model: LocalModel) -> ModelSummary:
    try:
        facts = _of_gguf(model.place) if is_gguf(model.place) else _of_directory(model.place)
    except (ForetokenError, OSError) as err:
        facts = {"error": str(err)}
    return ModelSummary(name=model.name, place=model.place, source=model.source, **facts)


def _of_gguf(path: Path) -> dict[str, Any]:
    headers = read_headers(path)
    tensors = [each for header in headers for each in header.tensors.values()]
    kinds = Counter[str]()
    for each in tensors:
        kinds[each.type_name] += prod(each.shape)
    name = str(headers[0].values.get("general.architecture"))
    return {
        "num_bytes": sum(header.num_bytes for header in headers),
        "format": f"GGUF {kinds.most_common(1)[0][0]}" if kinds else "GGUF",
        "architecture": name,
        "is_lean": is_lean(name),
    }


def _of_directory(directory: Path) -> dict[str, Any]:
    paths, config = sorted(directory.glob("*.safetensors")), read_json_object(directory / "config.json")
    kinds = Counter[str]()
    for path in paths:
        with foreign_errors_as(ModelError, partial("'{}' cannot be read: {}. Download it again.".format, path)):
            headers = tensor_headers(path)
        for each in headers.values():
            kinds[each.dtype] += prod(each.shape)
    settings, names = config.get("quantization_config"), config.get("architectures")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    name = names[0] if isinstance(names, list) and names else config.get("model_type")
    return {
        "num_bytes": sum(path.stat().st_size for path in paths),
        "format": f"safetensors {method or (kinds.most_common(1)[0][0] if kinds else '')}".rstrip(),
        "architecture": str(name),
        "is_lean": is_lean(str(name)),
    }


def _tokens_hash(place: Path) -> str | None:
    try:
        tokens = listed_tokens(str(place))
    except ForetokenError:
        return None
    return None if not tokens else hashlib.sha256("\0".join(map(str, tokens)).encode("utf-8", "replace")).hexdigest()
