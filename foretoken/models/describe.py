"""Describes models from their configurations and weight headers: one by one, and all that are on this machine.

transformers knows every configuration, but takes seconds to import. Common architectures with all sizes in
`config.json` are described without it, with the same facts. Lists of models need no torch either.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open

from foretoken.core.checks import shown
from foretoken.core.errors import ForetokenError, ModelError, foreign_errors_as, one_line
from foretoken.files.bounded_reads import read_json_object, tensor_headers
from foretoken.models.architectures import PLAIN_ARCHITECTURES, is_lean
from foretoken.models.config import (
    ATTENTION_LAYERS,
    SIZES,
    check_architecture,
    check_model_files,
    is_size,
    read_config,
    read_twin_record,
)
from foretoken.models.names import is_gguf
from foretoken.models.stored.gguf_header import read_headers

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from foretoken.models.names import LocalModel

_PLAIN_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
_PLAIN_TENSORS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
_MOST_TOKENS = 1 << 22  # of a vocabulary; a choice: the largest public ones have some 260,000
_YES = "yes, if it loads and the self-test agrees"


def describe_plain(directory: Path) -> dict[str, Any] | None:
    """Returns the facts of `describe_directory` for a common architecture, without transformers or torch.

    Returns None for other directories, and for unusual ones: a draft head may have such a configuration. Raises
    `ModelError` if a file is damaged.
    """
    try:
        config = read_json_object(directory / "config.json")
    except ModelError:
        return None  # `describe_directory` says what is wrong
    paths = sorted(directory.glob("*.safetensors"))
    if not paths:
        return None
    model_type, layer_types = str(config.get("model_type")), config.get("layer_types") or []
    is_plain = (
        config.get("architectures") == [PLAIN_ARCHITECTURES.get(model_type)]
        and all(is_size(config.get(key)) for key in (*_PLAIN_SIZES, "intermediate_size", "num_attention_heads"))
        and all(is_size(config[key]) for key in SIZES if config.get(key) is not None)
        and config["hidden_size"] % config["num_attention_heads"] == 0
        and all(isinstance(config.get(key), dict | None) for key in ("rope_parameters", "rope_scaling"))
        and isinstance(layer_types, list)
        and all(isinstance(kind, str) and kind in ATTENTION_LAYERS for kind in layer_types)
        and not {"auto_map", "is_encoder_decoder", "quantization_config", "text_config"} & config.keys()
    )
    if not is_plain:
        return None
    check_model_files(str(directory), may_be_hub_id=False)
    keys = [key for path in paths for key in _keys(path)]
    if not all(key.startswith(_PLAIN_TENSORS) and not key.endswith(".qweight") for key in keys):
        return None
    sizes = dict(zip(("layers", "hidden_size", "vocabulary", "context"), map(config.get, _PLAIN_SIZES), strict=True))
    return _facts(directory, paths, PLAIN_ARCHITECTURES[model_type], sizes, _YES)


def describe_directory(directory: Path) -> dict[str, Any]:
    """Returns facts about a model directory, JSON-ready; raises `ModelError` if it is no model, or damaged."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from foretoken.models.stored.checkpoints import format_label
    from foretoken.models.weight_files import meta_model

    check_model_files(str(directory), may_be_hub_id=False)
    config, label = read_config(str(directory)), None
    text = config.get_text_config()
    try:
        check_architecture(config, str(directory))
        label = format_label(config, str(directory))
        is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        target = _YES if is_causal else "no: it is no causal LM of transformers"
    except ModelError as err:
        target = f"no: {err}"
    sizes = {
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "vocabulary": getattr(text, "vocab_size", None),
        "context": getattr(text, "max_position_embeddings", None),
    }
    architecture = ", ".join(config.architectures or [type(config).__name__])
    facts = _facts(directory, sorted(directory.glob("*.safetensors")), architecture, sizes, target)
    quality = getattr(config, "rounding_quality", None)
    module = None if label is None else meta_model(config)
    if module is not None:  # words hold several weights
        facts["parameters"] = sum(each.numel() for each in module.parameters())
    facts |= {} if label is None else {"quantization": label}
    return facts | ({} if quality is None else {"rounding_quality": quality})


def describe_gguf(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """Returns facts about a GGUF file, JSON-ready, in the words of `describe_directory`.

    Args:
        verify: Reads every tensor too; "findings" are those that hold NaN or infinite values.

    Raises:
        ModelError: If the file is missing or damaged.
    """
    from foretoken.models.stored.gguf import open_gguf
    from foretoken.models.stored.gguf_file import read_gguf
    from foretoken.models.stored.gguf_tokenizer import read_vocabulary

    file = read_gguf(path)
    vocabulary, tensors = read_vocabulary(file), file.tensors.values()
    try:
        check_architecture(open_gguf(path).config, str(path))
        target = _YES
    except ModelError as err:
        target = f"no: {err}"
    name = str(file.values.get("general.architecture"))
    sizes = {"layers": "block_count", "hidden_size": "embedding_length", "context": "context_length"}
    types = {
        kind: [each for each in tensors if each.type_name == kind] for kind in sorted({t.type_name for t in tensors})
    }
    kinds = [vocabulary.model, file.values.get("tokenizer.ggml.pre")]
    facts = {
        "file": str(path),
        "name": file.values.get("general.name"),
        "architecture": name,
        **{key: file.values.get(f"{name}.{own}") for key, own in sizes.items()},
        "vocabulary": len(vocabulary.tokens) or None,
        "parameters": sum(prod(each.shape) for each in tensors),
        "weight_dtypes": {
            kind: {"tensors": len(found), "bytes": sum(each.num_bytes for each in found)}
            for kind, found in types.items()
        },
        "weight_bytes": sum(each.num_bytes for each in tensors),
        "has_tokenizer": bool(vocabulary.tokens),
        "tokenizer": ", ".join(filter(None, kinds)) if vocabulary.tokens else None,
        "end_tokens": {str(token): vocabulary.tokens[token] for token in vocabulary.ends if vocabulary.tokens},
        "has_chat_template": "tokenizer.chat_template" in file.values,
        "can_be_target": target,
    }
    findings: list[str] = []
    for key in file.tensors if verify else ():
        try:
            file.dense(key)
        except ModelError as err:
            findings.append(str(err))
    return {key: value for key, value in facts.items() if value is not None} | (
        {"findings": findings} if verify else {}
    )


def listed_tokens(place: str) -> list[str | None] | None:
    """Returns the tokens of a model by their ids, as its files list them; None if they do not. Needs no torch.

    `place`: a directory or a GGUF file. Raises `ModelError` for a damaged file.
    """
    if is_gguf(place):
        return read_headers(Path(place))[0].array("tokenizer.ggml.tokens")
    path = Path(place) / "tokenizer.json"
    if not path.is_file():
        return None
    values = read_json_object(path)
    with foreign_errors_as(ModelError, lambda err: f"{path} is damaged: {one_line(err)}. Copy or download it again."):
        vocabulary, added = values["model"]["vocab"], values.get("added_tokens") or []
        if not isinstance(vocabulary, dict):  # a list of tokens with scores
            return None
        ids = {number: text for text, number in vocabulary.items()} | {each["id"]: each["content"] for each in added}
        largest = max(ids, default=-1)
        if largest >= _MOST_TOKENS:
            raise ValueError(f"it has a token with the id {shown(largest)}")
        return [ids.get(number) for number in range(largest + 1)]


def _facts(
    directory: Path, paths: list[Path], architecture: str, sizes: Mapping[str, int | None], target: str
) -> dict[str, Any]:
    num_parameters, dtypes = _weights(paths)
    twin = read_twin_record(read_json_object(directory / "config.json"), str(directory))
    return {
        "directory": str(directory),
        **({} if twin is None else {"cost_twin": twin.label}),
        "architecture": architecture,
        **sizes,
        "parameters": num_parameters,
        "weight_dtypes": sorted(dtypes),
        "weight_bytes": sum(path.stat().st_size for path in paths),
        "has_tokenizer": any(directory.glob("tokenizer*")),
        "can_be_target": target,
    }


def _keys(path: Path) -> list[str]:
    with safe_open(path, framework="np") as file:
        return list(file.keys())


def _weights(paths: list[Path]) -> tuple[int, set[str]]:
    total, dtypes = 0, set()
    for path in paths:
        for header in tensor_headers(path).values():
            total += prod(header.shape)
            dtypes.add(header.dtype)
    return total, dtypes


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
