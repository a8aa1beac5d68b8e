"""Describes models from their configurations and weight headers: one by one, and all that are on this machine.

transformers knows every configuration, but takes seconds to import. Common architectures with all sizes in
`config.json` are described without it, with the same facts. Lists of models need no torch either.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ForetokenError, ModelError, foreign_errors_as, one_line
from foretoken.files.bounded_reads import TensorHeader, read_json_object, tensor_headers
from foretoken.models.architectures import PLAIN_ARCHITECTURES, is_lean
from foretoken.models.config import (
    ATTENTION_LAYERS,
    SIZES,
    check_architecture,
    check_model_files,
    is_size,
    read_config,
    read_headers,
    read_twin_record,
)
from foretoken.models.names import LocalModel, is_gguf
from foretoken.models.stored.gguf_header import StoredTensor
from foretoken.models.stored.gguf_header import read_headers as read_gguf_headers

if TYPE_CHECKING:
    from foretoken.models.stored.gguf_file import GgufFile

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
    if not any(directory.glob("*.safetensors")):
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
    headers = read_headers(directory)
    if not all(key.startswith(_PLAIN_TENSORS) and not key.endswith(".qweight") for key in headers):
        return None
    sizes = map(config.get, _PLAIN_SIZES)
    return _facts(directory, headers, PLAIN_ARCHITECTURES[model_type], sizes, _YES)


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
    sizes = (getattr(text, name, None) for name in _PLAIN_SIZES)
    architecture = ", ".join(config.architectures or [type(config).__name__])
    facts = _facts(directory, read_headers(directory), architecture, sizes, target)
    facts |= _recurrent_facts(config)
    quality = getattr(config, "rounding_quality", None)
    module = None if label is None else meta_model(config)
    if module is not None:  # words hold several weights
        facts["parameters"] = sum(each.numel() for each in module.parameters())
    facts |= {} if label is None else {"quantization": label}
    return facts | ({} if quality is None else {"rounding_quality": quality})


def describe_gguf(path: Path, *, verify: bool = False) -> dict[str, Any]:
    """Returns facts about a GGUF file, JSON-ready, in the words of `describe_directory`.

    With `verify` all tensors are read, and "findings" are those that hold NaN or infinite values. Raises `ModelError`
    if the file is missing or damaged.
    """
    from foretoken.models.stored.gguf import open_gguf
    from foretoken.models.stored.gguf_file import read_gguf
    from foretoken.models.stored.gguf_tokenizer import read_vocabulary

    file = read_gguf(path)
    vocabulary, tensors = read_vocabulary(file), file.tensors.values()
    name = str(file.values.get("general.architecture"))
    own: dict[str, Any] = {"layers": file.values.get(f"{name}.block_count")}
    try:
        config = open_gguf(path).config  # without layers of a head
        own, target = {"layers": config.num_hidden_layers, **_recurrent_facts(config)}, _YES
    except ModelError as err:
        target = f"no: {err}"
    sizes = {"hidden_size": "embedding_length", "context": "context_length"}
    kinds = [vocabulary.model, file.values.get("tokenizer.ggml.pre")]
    facts: dict[str, Any] = {
        "file": str(path),
        "name": file.values.get("general.name"),
        "architecture": name,
        **own,
        **{key: file.values.get(f"{name}.{theirs}") for key, theirs in sizes.items()},
        "vocabulary": len(vocabulary.tokens) or None,
        "parameters": sum(prod(each.shape) for each in tensors),
        "weight_dtypes": {kind: _amounts(tensors, kind) for kind in sorted({each.type_name for each in tensors})},
        "weight_bytes": sum(each.num_bytes for each in tensors),
        "has_tokenizer": bool(vocabulary.tokens),
        "tokenizer": ", ".join(filter(None, kinds)) if vocabulary.tokens else None,
        "end_tokens": {str(token): vocabulary.tokens[token] for token in vocabulary.ends if vocabulary.tokens},
        "has_chat_template": "tokenizer.chat_template" in file.values,
        "own_head": "mtp" if any(".nextn." in key for key in file.tensors) else None,
        "can_be_target": target,
    }
    facts = {key: value for key, value in facts.items() if value is not None}
    return facts | ({"findings": _not_finite(file)} if verify else {})


def _recurrent_facts(config: Any) -> dict[str, Any]:
    """Returns the sizes of recurrent layers by the fact's name; empty for a model without any."""
    from foretoken.models.recurrent import WITHOUT_KEYS, recurrent_sizes
    from foretoken.models.weight_files import meta_model

    text = config.get_text_config()
    if not {*WITHOUT_KEYS, "hybrid"} & {*(getattr(text, "layer_types", None) or ())}:
        return {}  # building a model takes seconds
    module, dtype = meta_model(config), getattr(text, "dtype", None)
    sizes = None if module is None else recurrent_sizes(module, text, 2 if dtype is None else dtype.itemsize)
    return {} if sizes is None else {"recurrent_layers": sizes._asdict()}


def _not_finite(file: GgufFile) -> list[str]:
    findings = []
    for key in file.tensors:
        try:
            file.dense(key)
        except ModelError as err:
            findings.append(str(err))
    return findings


def _amounts(tensors: Iterable[StoredTensor], kind: str) -> dict[str, int]:
    found = [each.num_bytes for each in tensors if each.type_name == kind]
    return {"tensors": len(found), "bytes": sum(found)}


def listed_tokens(model: str) -> list[str | None] | None:
    """Returns the tokens of a directory or GGUF file by their ids; None if its files do not list them.

    Needs no torch. Raises `ModelError` for a damaged file.
    """
    if is_gguf(model):
        return read_gguf_headers(Path(model))[0].array("tokenizer.ggml.tokens")
    path = Path(model) / "tokenizer.json"
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
    directory: Path,
    headers: Mapping[str, TensorHeader],
    architecture: str,
    sizes: Iterable[int | None],
    target: str,
) -> dict[str, Any]:
    twin = read_twin_record(read_json_object(directory / "config.json"), str(directory))
    return {
        "directory": str(directory),
        **({} if twin is None else {"cost_twin": twin.label}),
        "architecture": architecture,
        **dict(zip(("layers", "hidden_size", "vocabulary", "context"), sizes, strict=True)),
        "parameters": sum(prod(each.shape) for each in headers.values()),
        "weight_dtypes": sorted({each.dtype for each in headers.values()}),
        "weight_bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        "has_tokenizer": any(directory.glob("tokenizer*")),
        **({"own_head": "mtp"} if "mtp.fc.weight" in headers else {}),
        "can_be_target": target,
    }


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

    def shares(draft: ModelSummary, own: str) -> dict[str, float]:
        size = draft.num_bytes or 0
        return {
            each.name: size / each.num_bytes
            for each, others in zip(found, tokens, strict=True)
            if others == own and each.num_bytes is not None and each.num_bytes > size
        }

    return [
        each if own is None else replace(each, drafts_for=shares(each, own))
        for each, own in zip(found, tokens, strict=True)
    ]


def _summary(model: LocalModel) -> ModelSummary:
    facts: dict[str, Any]
    try:
        facts = _of_gguf(model.path) if is_gguf(model.path) else _of_directory(model.path)
        facts["is_lean"] = is_lean(facts["architecture"])
    except (ForetokenError, OSError) as err:
        facts = {"error": str(err)}
    return ModelSummary(name=model.name, place=model.path, source=model.source, **facts)


def _of_gguf(path: Path) -> dict[str, Any]:
    headers = read_gguf_headers(path)
    kind = _most([(each.type_name, each.shape) for header in headers for each in header.tensors.values()])
    return {
        "num_bytes": sum(header.num_bytes for header in headers),
        "format": f"GGUF {kind}".rstrip(),
        "architecture": str(headers[0].values.get("general.architecture")),
    }


def _of_directory(directory: Path) -> dict[str, Any]:
    config, num_bytes = read_json_object(directory / "config.json"), 0
    kinds: list[tuple[str, tuple[int, ...]]] = []
    for path in sorted(directory.glob("*.safetensors")):
        with foreign_errors_as(ModelError, partial("'{}' cannot be read: {}. Download it again.".format, path)):
            kinds += [(each.dtype, each.shape) for each in tensor_headers(path).values()]
        num_bytes += path.stat().st_size
    settings, names = config.get("quantization_config"), config.get("architectures")
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return {
        "num_bytes": num_bytes,
        "format": f"safetensors {method or _most(kinds)}".rstrip(),
        "architecture": str(names[0] if isinstance(names, list) and names else config.get("model_type")),
    }


def _most(kinds: list[tuple[str, tuple[int, ...]]]) -> str:
    """Returns the type of most weights, given types and shapes of tensors; "" without tensors."""
    counts = Counter[str]()
    for kind, shape in kinds:
        counts[kind] += prod(shape)
    return max(counts, key=counts.__getitem__, default="")


def _tokens_hash(path: Path) -> str | None:
    try:
        tokens = listed_tokens(str(path))
    except ForetokenError:
        return None
    return None if not tokens else hashlib.sha256("\0".join(map(str, tokens)).encode("utf-8", "replace")).hexdigest()
