"""Reads the configuration that a GGUF file states, as transformers has it.

What a file leaves out is as llama.cpp takes it; a setting that is not known is refused, because it may change the
model. This module reads no weights but factors of positions.

Source: `load_hparams` of ggml-org/llama.cpp, src/llama-model.cpp, and `load_arch_hparams` in src/models.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.models.architectures import GGUF_ARCHITECTURES, GgufArchitecture
from foretoken.models.config import LARGEST_SIZE, check_sizes, is_size
from foretoken.models.stored.gguf_hybrids import (
    DELTA_NETS,
    LEFT_OUT,
    block_types,
    head_columns,
    head_rows,
    joined_rows,
    kv_heads,
    plain_experts,
    recurrent_fields,
    sections,
)
from foretoken.models.stored.gguf_tokenizer import read_vocabulary

if TYPE_CHECKING:
    from foretoken.models.stored.gguf_file import GgufFile
    from foretoken.models.stored.gguf_header import StoredTensor

_LAYERS_OF_EXAONE4_32B = 64  # llama.cpp recognises these models by their layers too
_SIGMOID = 2  # of `expert_gating_func`
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(.+)")
ROPE_FACTORS = "rope_freqs.weight"  # one for each pair of a head, in place of a formula's parameters
LONG_ROPE_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
_SIZES = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
}
_OTHERS = {
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_DERIVED = {
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.sliding_window_pattern"),
    *("rope.dimension_count", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scale_linear", "rope.scaling.original_context_length", "rope.scaling.finetuned"),
    *("rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "nextn_predict_layers"),
    *("vocab_size", "tensor_data_layout"),
}


class Values:
    """The values of a file's architecture, by their names without it; raises `ModelError` for unknown ones."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.name = str(file.values.get("general.architecture"))
        kinds = [kind for kind, each in GGUF_ARCHITECTURES.items() if self.name in each.names]
        if not kinds:
            names = dict.fromkeys(name for each in GGUF_ARCHITECTURES.values() for name in each.names)
            raise ModelError(
                f"'{self.path}' holds a model of the architecture {shown(self.name)}. Expected one of "
                f"{', '.join(names)}. Use safetensors of the model."
            )
        prefix = f"{self.name}."
        self.own = {key.removeprefix(prefix): each for key, each in file.values.items() if key.startswith(prefix)}
        self.is_mixture = bool(self.own.get("expert_count"))
        self.model_type = kinds[0]
        if self.name == "llama" and self.is_mixture:
            self.model_type = "mixtral"
        elif self.name == "olmo2" and self.own.get("attention.sliding_window"):
            self.model_type = "olmo3"
        elif self.name == "granitehybrid":
            self.model_type = "bamba" if self._is_plain() else "granitemoehybrid"
        elif self.name == "mamba":
            self.model_type = "falcon_mamba" if self.own.get("ssm.dt_b_c_rms", False) is not False else "mamba"
        self.architecture = GGUF_ARCHITECTURES[self.model_type]
        if self.name == "exaone4" and self.own.get("block_count") == _LAYERS_OF_EXAONE4_32B:
            self.architecture = replace(self.architecture, window=4, default_window=4096)
        mixture = self.architecture.mixture
        may_be_mixture = self.name == mixture if mixture else "ffn_gate_inp" in self.architecture.parts
        if self.is_mixture != may_be_mixture and self.model_type != "granitemoehybrid":
            found, wanted = ("is a mixture of", "a dense model") if self.is_mixture else ("has no", "some")
            raise self.refusal(f"{found} experts", wanted)
        own = (*self.architecture.scales, *self.architecture.keys, self.architecture.epsilon[0])
        known = {*_SIZES, *_OTHERS, *_DERIVED, *own}
        unknown = self.own.keys() - known
        if unknown:
            raise self.refusal(f"has {prefix}{listed(unknown)}, which may change the model", "known settings")

    def _is_plain(self) -> bool:
        """Decides whether a Granite has rotary positions, no experts, and no factors."""
        scales = GGUF_ARCHITECTURES["granitemoehybrid"].scales.keys()
        has_rope = self.own.get("rope.scaling.finetuned") is not False
        return has_rope and not self.is_mixture and not scales & self.own.keys()

    def refusal(self, what: str, expected: str) -> ModelError:
        """Returns the error for a file that `what` says of."""
        return ModelError(f"'{self.path}' {what}. Expected {expected}. Use another file, or safetensors of the model.")

    def value(self, key: str, default: Any = None) -> Any:
        """Returns a setting, or its default; raises `ModelError` if the setting is missing and has no default."""
        value = self.own.get(key, default)
        if value is None:
            raise self.refusal(f"lacks {self.name}.{key}", "every setting of its architecture")
        return value

    def number(self, key: str, default: Any = None) -> Any:
        """Returns a positive number, the same one for all layers; raises `ModelError` for another value."""
        value = self.value(key, default)
        expected = "a positive number"
        if isinstance(value, list) and value:  # one for each layer
            expected = "the same positive number for all layers"
            value = value[0] if all(each == value[0] for each in value) else value
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refusal(f"has {shown(value)} as {self.name}.{key}", expected)
        return value

    def size(self, key: str, default: Any = None) -> int:
        """Returns a positive whole number, as `number`."""
        value = self.number(key, default)
        if not is_size(value):
            raise self.refusal(f"has {shown(value)} as {self.name}.{key}", f"a whole number from 1 to {LARGEST_SIZE}")
        return int(value)


class Settings(NamedTuple):
    """The settings of a file.

    Attributes:
        file: With one tensor for each part of a block.
        model_type: The architecture's row of `ARCHITECTURES`.
        architecture: How the file has it.
        fields: Of transformers' configuration; what the file does not state is as llama.cpp takes it.
        others: Keys of `fields` that not every architecture has, as the file calls them.
    """

    file: GgufFile
    model_type: str
    architecture: GgufArchitecture
    fields: dict[str, Any]
    others: dict[str, str]

    def row_order(self, name: str) -> Tensor | None:
        """Returns the order of a tensor's rows in transformers, (rows,) int64; None for the file's own.

        llama.cpp rotates pairs of rows 0 and 1, 2 and 3, and so on; transformers pairs each row of a head's first half
        with one of its second half.
        """
        part = _part(name)
        field = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(part)
        if field is not None and self.architecture.is_permuted:
            rows = self.file.tensors[name].shape[0]
            return torch.arange(rows).view(self.fields[field], -1, 2).transpose(1, 2).flatten()
        return head_rows(self, part)

    def column_order(self, name: str) -> Tensor | None:
        """Returns the order of a matrix's columns in transformers, (columns,) int64; None for the file's own."""
        return head_columns(self, _part(name))

    def config(self) -> Any:
        """Returns transformers' configuration; raises `ModelError` for a setting that it does not know."""
        from transformers import AutoConfig

        path = self.file.path
        with foreign_errors_as(ModelError, lambda err: refusal("configuration", path, err)):
            config: Any = AutoConfig.for_model(self.model_type, **self.fields)
        foreign = [key for key, field in self.others.items() if self.fields[field] and not hasattr(type(config), field)]
        if foreign:
            raise ModelError(
                f"'{path}' has {foreign[0]}, which may change the model. Expected known settings. Use another file, or "
                "safetensors of the model."
            )
        check_sizes(config, str(path))
        return config


def read_settings(file: GgufFile) -> Settings:
    """Returns the settings of a file; raises `ModelError` for unknown architectures, unknown and missing settings."""
    values = Values(file)
    architecture, vocabulary = values.architecture, read_vocabulary(file)
    ends = vocabulary.ends
    inner = values.own.get("expert_feed_forward_length")
    fields: dict[str, Any] = {
        field: values.size(key, inner if key == "feed_forward_length" else None)
        for key, field in _SIZES.items()
        if key not in LEFT_OUT.get(values.model_type, ())
    }
    file = _without_next_token_layers(values, file, fields)
    fields[architecture.epsilon[1]] = values.number(architecture.epsilon[0])
    # 0 switches a window or a cap off.
    fields |= {
        field: values.number(key) if values.own[key] else None for key, field in _OTHERS.items() if key in values.own
    }
    if "num_attention_heads" in fields:
        file = _with_attention(values, file, fields)
    else:
        fields |= recurrent_fields(values, file, fields["hidden_size"], [False] * fields["num_hidden_layers"])
    fields |= {
        "bos_token_id": vocabulary.ids.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": vocabulary.ids.get("padding"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if fields["tie_word_embeddings"] and values.name in ("gpt-oss", "olmo2"):
        raise values.refusal("lacks output.weight", "the LM head of its architecture")
    if "token_embd.weight" in file.tensors:
        fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    fields |= {field: tensor in file.tensors for field, tensor in architecture.switches.items()}
    others = {f"{values.name}.{key}": field for key, field in _OTHERS.items() if key in values.own}
    return Settings(file, values.model_type, architecture, fields, others)


def _with_attention(values: Values, file: GgufFile, fields: dict[str, Any]) -> GgufFile:
    """Adds the fields of models with attention to `fields`; returns the file without joined tensors."""
    architecture, layers, heads = values.architecture, fields["num_hidden_layers"], fields["num_attention_heads"]
    plain_dim = max(1, fields["hidden_size"] // heads)
    head_dim = values.size("attention.key_length", plain_dim)
    if values.size("attention.value_length", head_dim) != head_dim:
        raise values.refusal("has values of another length than keys", "one length")
    fields["num_key_value_heads"], has_attention = kv_heads(values, layers, heads)
    fields |= recurrent_fields(values, file, fields["hidden_size"], has_attention)
    if values.model_type == "nemotron_h":
        fields["intermediate_size"], fields["layer_types"] = block_types(values, layers, has_attention)
    file = _with_split_tensors(file, joined_rows(fields, architecture, head_dim))
    if values.model_type not in ("nemotron_h", "jamba"):
        fields["rope_parameters"] = _rope(values, file, head_dim)
    if values.name in _LAYERS_OF_27B:
        fields["query_pre_attn_scalar"] = plain_dim if layers == _LAYERS_OF_27B[values.name] else head_dim
    if architecture.window:
        fields |= _layer_types(values, layers)
    elif values.name == "exaone4":
        fields |= {"sliding_window": None, "layer_types": ["full_attention"] * layers}
    if architecture.has_own_head_dim or head_dim != plain_dim:
        fields["head_dim"] = head_dim
    fields |= _scales(values, head_dim)
    fields |= _mixture(values, fields["intermediate_size"])
    return file


def _part(name: str) -> str:
    """Returns a tensor's name without its block and kind: "attn_q" of "blk.0.attn_q.weight"; "" outside blocks."""
    match = BLOCK.fullmatch(name)
    return match[2].removesuffix(".weight").removesuffix(".bias") if match else ""


def refusal(what: str, path: Path, error: Exception) -> str:
    """Returns the message for an error of another library in a part of a file."""
    return f"the {what} of '{path}' cannot be read: {one_line(error)}. Copy or download the file again."


def _without_next_token_layers(values: Values, file: GgufFile, fields: dict[str, Any]) -> GgufFile:
    """Leaves out the layers behind the last one, which predict further tokens; changes the number in `fields`."""
    layers = fields["num_hidden_layers"]
    blocks = {name: int(match[1]) for name in file.tensors if (match := BLOCK.match(name))}
    if layers != len(set(blocks.values())):
        found = len(set(blocks.values()))
        raise values.refusal(f"has tensors of {found} layers, but block_count is {layers}", "the same number")
    if not values.own.get("nextn_predict_layers"):
        return file
    count = values.size("nextn_predict_layers")
    if count >= layers:
        raise values.refusal(f"has {count} layers for further tokens of {layers}", "fewer")
    fields["num_hidden_layers"] = layers - count
    return replace(file, tensors={
        name: each for name, each in file.tensors.items() if blocks.get(name, 0) < layers - count
    })  # fmt: skip


def _with_split_tensors(file: GgufFile, sizes: dict[str, list[int]]) -> GgufFile:
    """Returns a file without joined tensors: of queries, keys and values, see `joined_rows`, and of experts."""
    tensors: dict[str, StoredTensor] = {}
    for name, stored in file.tensors.items():
        rows = stored.shape[-2 if stored.is_matrix else -1]
        stem, _, kind = name.rpartition(".")
        block, _, part = stem.rpartition(".")
        if part == "attn_qkv" and rows == sum(sizes.get(block, ())):
            apart = dict(zip(("attn_q", "attn_k", "attn_v"), stored.split_rows(sizes[block]), strict=True))
        elif part == "ffn_gate_up_exps" and kind == "weight" and rows % 2 == 0:
            apart = dict(zip(("ffn_gate_exps", "ffn_up_exps"), stored.split_rows([rows // 2] * 2), strict=True))
        else:
            apart = {part: stored}
        tensors |= {f"{block}.{each}.{kind}" if len(apart) > 1 else name: made for each, made in apart.items()}
    return replace(file, tensors=tensors)


def _scales(values: Values, head_dim: int) -> dict[str, float]:
    plain, optional = {"attention_multiplier": head_dim**-0.5}, ("command-r", "granitehybrid")
    return {
        field: float(
            values.number(key, None if key == "logit_scale" and values.name not in optional else plain.get(field, 1.0))
        )
        for key, field in values.architecture.scales.items()
    }


def _mixture(values: Values, intermediate: int) -> dict[str, Any]:
    if not values.is_mixture:
        none = {"num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": intermediate}
        return none if values.model_type == "granitemoehybrid" else {}
    count, top_k = values.size("expert_count"), values.size("expert_used_count")
    if top_k > count:
        raise values.refusal(f"takes {top_k} of {count} experts", "at most all")
    inner = values.size("expert_feed_forward_length", None if values.name == "gpt-oss" else intermediate)
    if values.model_type == "nemotron_h":
        return plain_experts(values, count, top_k, inner)
    if values.name == "jamba":
        return {"num_experts": count, "num_experts_per_tok": top_k}
    if values.name in ("llama", "gpt-oss"):
        return {"num_local_experts": count, "num_experts_per_tok": top_k, "intermediate_size": inner}
    if values.name == "granitehybrid":  # llama.cpp ignores `expert_feed_forward_length`
        shared = values.size("expert_shared_feed_forward_length")
        return {"num_local_experts": count, "num_experts_per_tok": top_k, "shared_intermediate_size": shared}
    dense = {}
    if values.name in ("qwen35moe", "qwen3next"):
        dense["shared_expert_intermediate_size"] = values.size("expert_shared_feed_forward_length")
    if values.name == "lfm2moe":
        if values.value("expert_gating_func") != _SIGMOID:
            raise values.refusal("does not take experts by sigmoid", f"expert_gating_func {_SIGMOID}")
        dense["num_dense_layers"] = (
            values.size("leading_dense_block_count") if values.own.get("leading_dense_block_count") else 0
        )
    # llama.cpp scales the weights of a token's experts to sum to 1, whatever the model does.
    return dense | {
        "num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner, "norm_topk_prob": True,
    }  # fmt: skip


def _rope(values: Values, file: GgufFile, head_dim: int) -> dict[str, Any]:
    theta, rotated = float(values.number("rope.freq_base", 10000.0)), values.size("rope.dimension_count", head_dim)
    if rotated > head_dim or rotated % 2:
        raise values.refusal(f"rotates {rotated} of {head_dim} numbers of a head", "an even number, at most all")
    plain = {"rope_type": "default", "rope_theta": theta}
    rope = plain | _scaling(values, file, rotated, theta)
    if values.name in ("phi3", "glm4", *DELTA_NETS) or values.model_type == "bamba":
        rope["partial_rotary_factor"] = rotated / head_dim
        rope |= sections(values, rotated) if "rope.dimension_sections" in values.architecture.keys else {}
    elif rotated != head_dim:
        raise values.refusal(f"rotates {rotated} of {head_dim} numbers of a head", "all")
    if values.name == "granite" and values.own.get("rope.scaling.finetuned") is False:
        raise values.refusal("does not rotate queries and keys", "rotary positions")
    if values.name == "gemma3":
        plain["rope_theta"] = float(values.number("rope.freq_base_swa", 10000.0))
    elif values.own.get("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
        raise values.refusal("rotates by another base in layers with a window", "one base")
    # In these, layers with a window rotate by another base or scaling.
    has_two = values.model_type in ("gemma3_text", "olmo3")
    return {"full_attention": rope, "sliding_attention": plain} if has_two else rope


def _scaling(values: Values, file: GgufFile, rotated: int, theta: float) -> dict[str, Any]:
    """Returns the entries of `rope_parameters` that scale positions; {} without scaling."""
    factor = values.own.get("rope.scaling.factor", values.own.get("rope.scale_linear"))
    kind = values.own.get("rope.scaling.type", "linear" if factor not in (None, 0, 1) else "none")
    has_factors = any(name in file.tensors for name in LONG_ROPE_FACTORS)
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise values.refusal(f"scales positions by {shown(kind)}", "none, linear, yarn or longrope")
    if (kind != "none") + (ROPE_FACTORS in file.tensors) + (has_factors and kind != "longrope") > 1:
        raise values.refusal("scales positions in two ways", "one")
    if has_factors or kind == "longrope":
        return _long_rope(values, file, rotated)
    if kind != "yarn" and values.own.get("rope.scaling.attn_factor", 1) != 1:
        raise values.refusal("has a factor of attention without the scaling of positions that has one", "yarn")
    if ROPE_FACTORS in file.tensors:
        return _llama3_rope(values, file, theta, rotated)
    if kind == "none":
        return {}
    found = {"rope_type": kind, "factor": float(values.number("rope.scaling.factor", factor))}
    return found | (_yarn(values, found["factor"]) if kind == "yarn" else {})


def _yarn(values: Values, factor: float) -> dict[str, Any]:
    key, plain = "rope.scaling.original_context_length", 0.1 * math.log(factor) + 1
    found: dict[str, Any] = {"original_max_position_embeddings": values.size(key, values.size("context_length"))}
    found |= {
        name: float(values.number(f"rope.scaling.yarn_{name}"))
        for name in ("beta_fast", "beta_slow")
        if f"rope.scaling.yarn_{name}" in values.own
    }
    if (share := values.number("rope.scaling.attn_factor", 1)) != 1:
        found["attention_factor"] = share * plain
    # llama.cpp rounds the range of turns in between; gpt-oss was trained without.
    return found | ({"truncate": False} if values.name == "gpt-oss" else {})


def _long_rope(values: Values, file: GgufFile, rotated: int) -> dict[str, Any]:
    """Returns the parameters of LongRoPE: the file has its factors of short and of long texts."""
    if values.name != "phi3" or any(
        name not in file.tensors or file.tensors[name][:2] != ("F32", (rotated // 2,)) for name in LONG_ROPE_FACTORS
    ):
        raise values.refusal("scales positions by 'longrope'", f"{' and '.join(LONG_ROPE_FACTORS)} of phi3")
    short, long = (file.dense(name).tolist() for name in LONG_ROPE_FACTORS)
    return {
        "rope_type": "longrope", "short_factor": short, "long_factor": long,
        "attention_factor": float(values.number("rope.scaling.attn_factor", 1)),
        "original_max_position_embeddings": values.size("rope.scaling.original_context_length"),
    }  # fmt: skip


def _llama3_rope(values: Values, file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """Returns the parameters of Llama 3 that give the file's factors; raises `ModelError` if there are none."""
    if file.tensors[ROPE_FACTORS][:2] == ("F32", (rotated // 2,)):
        factors = file.dense(ROPE_FACTORS).double()
        largest, low, high, context = round(float(factors.max()), 4), 1.0, 4.0, 8192
        turns = context / (2 * math.pi) * theta ** (-torch.arange(0, rotated, 2).double() / rotated)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        if torch.allclose(factors, 1 / ((1 - smooth) / largest + smooth), rtol=1e-4):
            return {
                "rope_type": "llama3",
                "factor": largest,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": context,
            }
    raise values.refusal(f"has factors of positions in {ROPE_FACTORS} that no formula gives", "those of Llama 3")


def _layer_types(values: Values, layers: int) -> dict[str, Any]:
    window = values.own.get("attention.sliding_window", values.architecture.default_window)
    if not window and values.name == "gemma3":
        return {"layer_types": ["full_attention"] * layers}
    pattern = values.own.get("attention.sliding_window_pattern", values.architecture.window)
    if is_size(pattern):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not window or not isinstance(pattern, list) or len(pattern) != layers:
        raise values.refusal("does not say which layers have a sliding window", "a window and its pattern")
    kinds = ["sliding_attention" if each else "full_attention" for each in pattern]
    return {"layer_types": kinds, "sliding_window": values.size("attention.sliding_window", window)}
