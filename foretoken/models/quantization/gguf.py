"""Opens GGUF files of llama.cpp as models whose matrices stay in integers.

Each tensor of a file is one weight of transformers, except for experts: a file has three tensors for all experts of a
layer, gate, up and down. A setting or a tensor that is not known is refused, because it may change the model.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from foretoken.core.errors import ModelError, foreign_errors_as, listed
from foretoken.decoder.quantized_embedding import is_plain_embedding
from foretoken.decoder.quantized_experts import is_plain_experts
from foretoken.models.architectures import ARCHITECTURES, GgufArchitecture
from foretoken.models.quantization.experts import PARTS as EXPERT_PARTS
from foretoken.models.quantization.experts import experts_of
from foretoken.models.quantization.gguf_config import (
    BLOCK,
    LONG_ROPE_FACTORS,
    ROPE_FACTORS,
    Settings,
    read_settings,
    refusal,
)
from foretoken.models.quantization.gguf_file import GgufFile, read_gguf
from foretoken.models.quantization.gguf_tokenizer import build_tokenizer
from foretoken.models.quantization.gguf_vocabulary import read_vocabulary
from foretoken.models.quantization.stored import StoredModel
from foretoken.models.weight_files import meta_model, untied_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from foretoken.decoder.quantized import QuantizedMatrix

_EMBEDDING = "model.embed_tokens"
_OUTER = {"token_embd": _EMBEDDING, "output_norm": "model.norm", "output": "lm_head"}
_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(?:gate|up|down)_proj\.(weight|bias)")  # all of a layer


def open_gguf(path: Path) -> StoredModel:
    """Opens a GGUF file, or a split model by its first file; its tensors are read later, one at a time.

    Matrices in the types of `gguf_blocks.FORMATS` keep their integers and scales; F32, F16 and BF16 are read as they
    are. If there is no LM head, the LM head shares a quantized embedding's integers.

    Raises:
        ModelError: If the file is damaged or incomplete, or the architecture or the type of a tensor is not known.
    """
    return stored_model(read_settings(read_gguf(path)))


def stored_model(settings: Settings) -> StoredModel:
    """Returns the model of a file that was opened; as `open_gguf`."""
    file, architecture, config = settings.file, settings.architecture, settings.config()
    names = _tensor_names(file, architecture)
    embedding = file.tensors.get("token_embd.weight")
    if config.tie_word_embeddings and embedding is not None and embedding.is_quantized:
        config.tie_word_embeddings = False
        names["lm_head.weight"] = "token_embd.weight"
    module, stored = _checked_module(file, config, names), {key: file.tensors[name] for key, name in names.items()}
    kept = {
        f"{linear}.weight"
        for linear, part in module.named_modules()
        if type(part) is nn.Linear and f"{linear}.weight" in stored and stored[f"{linear}.weight"].is_quantized
    }
    has_rows = embedding is not None and embedding.is_quantized and is_plain_embedding(module.get_submodule(_EMBEDDING))
    kept |= {f"{_EMBEDDING}.weight"} if has_rows else set()
    in_integers = {key.removesuffix(".weight"): names[key] for key in kept}
    for key in filter(_EXPERTS.fullmatch, names):
        owner, part, _ = key.rsplit(".", 2)
        if stored[key].is_quantized and is_plain_experts(module.get_submodule(owner)):
            kept.add(key)
            in_integers |= {f"{owner}.{expert}.{part}": names[key] for expert in range(stored[key].shape[0])}
    types = {file.tensors[name].type_name for name in in_integers.values()} or {"not quantized"}

    def matrix(part: str, dtype: torch.dtype) -> QuantizedMatrix:
        expert = None if experts_of(part) is None else int(part.rsplit(".", 2)[1])
        return file.matrix(in_integers[part], dtype, settings.row_order(in_integers[part]), part=expert)

    def dense(dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {
            key: file.dense(name, settings.row_order(name)).to(dtype) for key, name in names.items() if key not in kept
        }
        for owner, kind in sorted({match.groups() for key in tensors if (match := _EXPERTS.fullmatch(key))}):
            keys = [f"{owner}.{part}.{kind}" for part in EXPERT_PARTS]
            parts = [tensors.pop(key) for key in keys if key in tensors]
            if len(parts) == len(keys):  # `build` refuses some of them in integers
                tensors |= _joined_experts(owner, kind, config, *parts)
        lean = ARCHITECTURES[settings.model_type].lean
        if lean is not None and lean.norm_offset:
            norms = [key for key in tensors if key.endswith("norm.weight")]
            tensors |= {key: file.dense(names[key]).float() - lean.norm_offset for key in norms}
        return tensors

    label = f"GGUF, {' and '.join(sorted(types))}"
    return StoredModel(
        config=config, label=label, linears=frozenset(in_integers) - {_EMBEDDING}, matrix=matrix, dense=dense,
        embedding=_EMBEDDING if has_rows else None,
    )  # fmt: skip


def _joined_experts(owner: str, kind: str, config: Any, gate: Tensor, up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Returns weights, or biases, of all experts of a layer as transformers has them."""
    names = [f"{owner}.{part}{'_bias' if kind == 'bias' else ''}" for part in ("gate_up_proj", "down_proj")]
    if config.model_type != "gpt_oss":
        return dict(zip(names, (torch.cat([gate, up], 1), down), strict=True))
    both = torch.stack([gate, up], 2).flatten(1, 2)  # a row of gate, one of up, and so on
    joined = (both, down) if kind == "bias" else (both.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous())
    return dict(zip(names, joined, strict=True))


def _tensor_names(file: GgufFile, architecture: GgufArchitecture) -> dict[str, str]:
    """Returns the file's name of every weight of transformers."""
    parts, names, unknown = architecture.parts, {}, []
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        match = BLOCK.fullmatch(stem)
        part = parts.get(match[2]) if match else _OUTER.get(stem)
        if name in (ROPE_FACTORS, *LONG_ROPE_FACTORS):
            continue
        if part is None or kind not in ("weight", "bias"):
            unknown.append(name)
            continue
        key = f"model.layers.{int(match[1])}.{part}.{kind}" if match else f"{part}.{kind}"
        names[key.replace(".sinks.weight", ".sinks")] = name
    if unknown:
        raise ModelError(
            f"'{file.path}' has tensors that its architecture lacks: {listed(unknown)}. Expected only known tensors. "
            "Use another file, or safetensors of the model."
        )
    return names


def _checked_module(file: GgufFile, config: Any, names: dict[str, str]) -> nn.Module:
    """Builds the architecture without memory, and compares it with all tensors."""
    module = meta_model(config)
    shapes = {} if module is None else _file_shapes(untied_shapes(module), config)
    wrong = [f"{key} is missing" for key in shapes if key not in names]
    wrong += [f"{name} is not used" for key, name in names.items() if key not in shapes]
    wrong += [
        f"{names[key]} is {list(file.tensors[names[key]].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in names and file.tensors[names[key]].shape != shape
    ]
    if module is None or wrong:
        raise ModelError(
            f"the tensors of '{file.path}' do not fit its settings: {listed(wrong) or 'they describe no model'}. "
            "Copy or download the file again."
        )
    return module


def _file_shapes(shapes: dict[str, tuple[int, ...]], config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights, those of experts as files have them."""
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        owner, _, part = key.rpartition(".experts.")
        own = (shape[0], *reversed(shape[1:])) if config.model_type == "gpt_oss" else shape
        kind = "bias" if part.endswith("_bias") else "weight"
        if part.startswith("gate_up_proj"):
            halves = (own[0], own[1] // 2, *own[2:])
            found |= {f"{owner}.experts.{each}.{kind}": halves for each in ("gate_proj", "up_proj")}
        elif part.startswith("down_proj"):
            found[f"{owner}.experts.down_proj.{kind}"] = own
        else:
            found[key] = shape
    return found


def gguf_tokenizer(path: Path) -> Any | None:
    """Returns the tokenizer of a GGUF file, None if the file has none; raises `ModelError` if it is damaged."""
    file = read_gguf(path)
    vocabulary = read_vocabulary(file)
    if not vocabulary.tokens:
        return None
    with foreign_errors_as(ModelError, lambda err: refusal("tokenizer", path, err), passing=(ModelError,)):
        return build_tokenizer(file, vocabulary)
