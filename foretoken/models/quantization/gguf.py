"""Opens GGUF files of llama.cpp as models whose matrices stay in integers.

Each tensor of a file is one weight of transformers, except for experts: a file has three tensors for all experts of a
layer, gate, up and down. A setting or a tensor that is not known is refused, because it may change the model.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.decoder.quantized_embedding import is_plain_embedding
from foretoken.models.config_checks import check_sizes, is_size
from foretoken.models.quantization.experts import PARTS, experts_of
from foretoken.models.quantization.gguf_file import GgufFile, read_gguf
from foretoken.models.quantization.gguf_tokenizer import build_tokenizer
from foretoken.models.quantization.gguf_vocabulary import read_vocabulary
from foretoken.models.quantization.stored import StoredModel
from foretoken.models.weight_files import meta_model, untied_shapes

if TYPE_CHECKING:
    from pathlib import Path

    from foretoken.decoder.quantized import QuantizedMatrix


class _Architecture(NamedTuple):
    """What transformers calls an architecture, its blocks' tensors, and switches that a tensor's presence tells.

    `epsilon`: the key of the norms' epsilon, and its field in transformers.
    """

    model_type: str
    parts: dict[str, str] = {}  # noqa: RUF012 - never changed
    switches: dict[str, str] = {}  # noqa: RUF012
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")


_GEMMA = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_MIXTURE = {"ffn_gate_inp": "mlp.gate"} | {
    f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")
}
_BIAS = {"attention_bias": "blk.0.attn_q.bias"}
_ARCHITECTURES = {
    "llama": _Architecture("llama", switches=_BIAS | {"mlp_bias": "blk.0.ffn_up.bias"}),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3", switches=_BIAS),
    "phi3": _Architecture("phi3", {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}),
    "starcoder2": _Architecture(
        "starcoder2",
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        {"use_bias": "blk.0.attn_q.bias"},
        ("attention.layer_norm_epsilon", "norm_epsilon"),
    ),
    "gemma2": _Architecture("gemma2", _GEMMA),
    "gemma3": _Architecture("gemma3_text", _GEMMA),
    "qwen3moe": _Architecture("qwen3_moe", _MIXTURE, _BIAS),
}
_MIXTRAL = _Architecture("mixtral", _MIXTURE)  # of the architecture "llama" with experts
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}  # llama.cpp recognises these models by their layers too
_EMBEDDING = "model.embed_tokens"
_OUTER = {"token_embd": _EMBEDDING, "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_EXPERTS = re.compile(r".*\.mlp\.experts\.(?:gate|up|down)_proj\.weight")  # all of a layer
_BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)")
_ROPE_FACTORS = "rope_freqs.weight"  # one for each pair of a head, in place of a formula's parameters
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
    *("rope.scale_linear",),
    *("rope.scaling.original_context_length", "rope.scaling.finetuned", "expert_count", "expert_used_count"),
    *("vocab_size", "tensor_data_layout", "expert_feed_forward_length"),
}


class _Values:
    """The values of a file's architecture, by their names without it."""

    def __init__(self, file: GgufFile) -> None:
        self.path = file.path
        self.architecture = str(file.values.get("general.architecture"))
        if self.architecture not in _ARCHITECTURES:
            raise ModelError(
                f"'{self.path}' holds a model of the architecture {shown(self.architecture)}. Expected one of "
                f"{', '.join(_ARCHITECTURES)}. Use safetensors of the model."
            )
        prefix = f"{self.architecture}."
        self.own = {key.removeprefix(prefix): each for key, each in file.values.items() if key.startswith(prefix)}
        self.is_mixture = bool(self.own.get("expert_count"))
        if self.is_mixture != ("ffn_gate_inp" in _architecture(file).parts):
            found, wanted = ("is a mixture of", "a dense model") if self.is_mixture else ("has no", "some")
            raise self.refusal(f"{found} experts", wanted)
        unknown = self.own.keys() - {*_SIZES, *_OTHERS, *_DERIVED, _architecture(file).epsilon[0]}
        if unknown:
            raise self.refusal(f"has {prefix}{listed(unknown)}, which may change the model", "known settings")

    def refusal(self, what: str, expected: str) -> ModelError:
        return ModelError(f"'{self.path}' {what}. Expected {expected}. Use another file, or safetensors of the model.")

    def number(self, key: str, default: Any = None) -> Any:
        value = self.own.get(key, default)
        if value is None:
            raise self.refusal(f"lacks {self.architecture}.{key}", "every setting of its architecture")
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            value = value[0]
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise self.refusal(f"has {shown(value)} as {self.architecture}.{key}", "a positive number")
        return value

    def size(self, key: str, default: Any = None) -> int:
        value = self.number(key, default)
        if not is_size(value):
            raise self.refusal(f"has {shown(value)} as {self.architecture}.{key}", "a positive whole number")
        return int(value)


def _architecture(file: GgufFile) -> _Architecture:
    name = file.values["general.architecture"]
    return _MIXTRAL if name == "llama" and file.values.get("llama.expert_count") else _ARCHITECTURES[name]


def _read_config(file: GgufFile) -> Any:
    """Returns the configuration that a file states; what it does not state is as llama.cpp takes it."""
    values = _Values(file)
    architecture, vocabulary = _architecture(file), read_vocabulary(file)
    ends = vocabulary.ends
    fields: dict[str, Any] = {field: values.size(key) for key, field in _SIZES.items()}
    layers, heads = fields["num_hidden_layers"], fields["num_attention_heads"]
    found = len({match[1] for match in map(_BLOCK.match, file.tensors) if match})
    if layers != found:
        raise values.refusal(f"has {found} layers, and speaks of {layers}", "all layers")
    fields[architecture.epsilon[1]] = values.number(architecture.epsilon[0])
    # 0 switches a window or a cap off.
    fields |= {
        field: values.number(key) if values.own[key] else None for key, field in _OTHERS.items() if key in values.own
    }
    plain_dim = max(1, fields["hidden_size"] // heads)
    head_dim = values.size("attention.key_length", plain_dim)
    if values.size("attention.value_length", head_dim) != head_dim:
        raise values.refusal("has values of another length than keys", "one length")
    fields |= {
        "num_key_value_heads": values.size("attention.head_count_kv", heads),
        "rope_parameters": _rope(values, file, head_dim),
        "bos_token_id": vocabulary.ids.get("bos"),
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else None,
        "pad_token_id": vocabulary.ids.get("padding"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if "token_embd.weight" in file.tensors:
        fields["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    if values.architecture in ("gemma2", "gemma3"):
        fields["query_pre_attn_scalar"] = plain_dim if layers == _LAYERS_OF_27B[values.architecture] else head_dim
        fields |= _layer_types(values, layers)
    if architecture.model_type in ("llama", "qwen3", "qwen3_moe", "gemma2", "gemma3_text") or head_dim != plain_dim:
        fields["head_dim"] = head_dim
    if values.is_mixture:
        fields |= _mixture(values, fields["intermediate_size"])
    fields |= {field: tensor in file.tensors for field, tensor in architecture.switches.items()}
    with foreign_errors_as(ModelError, lambda err: _refusal("configuration", file.path, err)):
        config: Any = AutoConfig.for_model(architecture.model_type, **fields)
    foreign = [key for key, field in _OTHERS.items() if key in values.own and not hasattr(type(config), field)]
    if foreign:
        raise values.refusal(f"has {values.architecture}.{foreign[0]}, which may change the model", "known settings")
    check_sizes(config, str(file.path))
    return config


def _mixture(values: _Values, intermediate: int) -> dict[str, Any]:
    count, top_k = values.size("expert_count"), values.size("expert_used_count")
    if top_k > count:
        raise values.refusal(f"takes {top_k} of {count} experts", "at most all")
    inner = values.size("expert_feed_forward_length", intermediate)
    if values.architecture == "llama":
        return {"num_local_experts": count, "num_experts_per_tok": top_k, "intermediate_size": inner}
    # llama.cpp scales the weights of a token's experts to sum to 1, whatever the model does.
    return {"num_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner, "norm_topk_prob": True}


def _rope(values: _Values, file: GgufFile, head_dim: int) -> dict[str, Any]:
    factor = values.own.get("rope.scaling.factor", values.own.get("rope.scale_linear"))
    scaling = values.own.get("rope.scaling.type", "linear" if factor not in (None, 0, 1) else "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(values.number("rope.freq_base", 10000.0))}
    rotated = values.size("rope.dimension_count", head_dim)
    if values.architecture == "phi3":
        rope["partial_rotary_factor"] = rotated / head_dim
    elif rotated != head_dim:
        raise values.refusal(f"rotates {rotated} of {head_dim} numbers of a head", "all")
    if scaling not in ("none", "linear", "yarn"):
        raise values.refusal(f"scales positions by {shown(scaling)}", "none, linear or yarn")
    if scaling != "none":
        rope |= {"rope_type": scaling, "factor": float(values.number("rope.scaling.factor", factor))}
    if scaling == "yarn":
        key = "rope.scaling.original_context_length"
        rope["original_max_position_embeddings"] = values.size(key, values.size("context_length"))
    if _ROPE_FACTORS in file.tensors:
        if scaling != "none":
            raise values.refusal("scales positions in two ways", "one")
        rope |= _llama3_rope(values, file, rope["rope_theta"], rotated)
    if values.architecture != "gemma3":
        if values.own.get("rope.freq_base_swa", rope["rope_theta"]) != rope["rope_theta"]:
            raise values.refusal("rotates by another base in layers with a window", "one base")
        return rope
    local = {"rope_type": "default", "rope_theta": float(values.number("rope.freq_base_swa", 10000.0))}
    return {"full_attention": rope, "sliding_attention": local}


def _llama3_rope(values: _Values, file: GgufFile, theta: float, rotated: int) -> dict[str, Any]:
    """Returns the parameters of Llama 3 that give the file's factors; raises `ModelError` if there are none."""
    if file.tensors[_ROPE_FACTORS][:2] == ("F32", (rotated // 2,)):
        factors = file.dense(_ROPE_FACTORS).double()
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
    raise values.refusal(f"has factors of positions in {_ROPE_FACTORS} that no formula gives", "those of Llama 3")


def _layer_types(values: _Values, layers: int) -> dict[str, Any]:
    pattern = values.own.get("attention.sliding_window_pattern", 2 if values.architecture == "gemma2" else 6)
    if is_size(pattern):
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not values.own.get("attention.sliding_window") or not isinstance(pattern, list) or len(pattern) != layers:
        raise values.refusal("does not say which layers have a sliding window", "a window and its pattern")
    return {"layer_types": ["sliding_attention" if each else "full_attention" for each in pattern]}


def _refusal(what: str, path: Path, error: Exception) -> str:
    return f"the {what} of '{path}' cannot be read: {one_line(error)}. Copy or download the file again."


def open_gguf(path: Path) -> StoredModel:
    """Opens a GGUF file; its tensors are read later, one at a time.

    Matrices in the types of `gguf_blocks.FORMATS` keep their integers and scales; F32, F16 and BF16 are read as they
    are. If there is no LM head, the LM head shares a quantized embedding's integers.

    Raises:
        ModelError: If the file is damaged, incomplete or a part of several files, or the architecture or the type of a
            tensor is not known.
    """
    file = read_gguf(path)
    if file.values.get("split.count") or re.search(r"-\d+-of-\d+\.gguf$", path.name):
        raise ModelError(f"'{path}' is a part of a split model. Expected one file. Join it: llama-gguf-split --merge.")
    config = _read_config(file)
    names = _tensor_names(file)
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
        if stored[key].is_quantized:
            kept.add(key)
            in_integers |= {f"{owner}.{expert}.{part}": names[key] for expert in range(stored[key].shape[0])}
    types = {file.tensors[name].type_name for name in in_integers.values()} or {"not quantized"}
    shared: dict[torch.dtype, QuantizedMatrix] = {}  # the embedding, by the dtype of inputs

    def matrix(part: str, dtype: torch.dtype) -> QuantizedMatrix:
        name = in_integers[part]
        if file.tensors[name] == embedding:
            if dtype not in shared:
                shared[dtype] = file.matrix(name, dtype)
            return shared[dtype]
        expert = None if experts_of(part) is None else int(part.rsplit(".", 2)[1])
        return file.matrix(name, dtype, _row_order(file, config, name), part=expert)

    def dense(dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = {
            key: file.dense(name, _row_order(file, config, name)).to(dtype)
            for key, name in names.items()
            if key not in kept
        }
        for owner in sorted({key.rsplit(".", 2)[0] for key in tensors if _EXPERTS.fullmatch(key)}):
            gate, up, down = (tensors.pop(f"{owner}.{part}.weight", None) for part in PARTS)
            if gate is not None and up is not None and down is not None:  # `build` refuses some of them in integers
                tensors |= {f"{owner}.gate_up_proj": torch.cat([gate, up], 1), f"{owner}.down_proj": down}
        if config.model_type.startswith("gemma"):  # transformers adds 1 to the weights of norms, llama.cpp does not
            tensors |= {key: file.dense(names[key]).float() - 1 for key in tensors if key.endswith("norm.weight")}
        return tensors

    label = f"GGUF, {' and '.join(sorted(types))}"
    return StoredModel(
        config=config, label=label, linears=frozenset(in_integers) - {_EMBEDDING}, matrix=matrix, dense=dense,
        embedding=_EMBEDDING if has_rows else None,
    )  # fmt: skip


def _row_order(file: GgufFile, config: Any, name: str) -> Tensor | None:
    """Returns the order of rows that transformers expects, None for the file's own.

    llama.cpp rotates pairs of rows 0 and 1, 2 and 3, and so on; transformers pairs each row of a head's first half with
    one of its second half.
    """
    match = _BLOCK.match(name)
    part = match[2] if match and config.model_type in ("llama", "mixtral") else ""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(part)
    return heads and torch.arange(file.tensors[name].shape[0]).view(heads, -1, 2).transpose(1, 2).flatten()


def _tensor_names(file: GgufFile) -> dict[str, str]:
    """Returns the file's name of every weight of transformers."""
    parts = _PARTS | _architecture(file).parts
    names, unknown = {}, []
    for name in file.tensors:
        stem, _, kind = name.rpartition(".")
        match = _BLOCK.fullmatch(stem)
        part = parts.get(match[2]) if match else _OUTER.get(stem)
        if name == _ROPE_FACTORS:
            continue
        if part is None or kind not in ("weight", "bias"):
            unknown.append(name)
        else:
            names[f"model.layers.{int(match[1])}.{part}.{kind}" if match else f"{part}.{kind}"] = name
    if unknown:
        raise ModelError(
            f"'{file.path}' has tensors that its architecture lacks: {listed(unknown)}. Expected only known tensors. "
            "Use another file, or safetensors of the model."
        )
    return names


def _checked_module(file: GgufFile, config: Any, names: dict[str, str]) -> nn.Module:
    """Builds the architecture without memory, and compares it with all tensors."""
    module = meta_model(config)
    shapes = {} if module is None else _file_shapes(untied_shapes(module))
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


def _file_shapes(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights, those of experts as files have them."""
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        owner, _, part = key.rpartition(".experts.")
        if part == "gate_up_proj":
            count, rows, cols = shape
            found |= {f"{owner}.experts.{each}.weight": (count, rows // 2, cols) for each in ("gate_proj", "up_proj")}
        else:
            found[f"{key}.weight" if part == "down_proj" else key] = shape
    return found


def gguf_tokenizer(path: Path) -> Any | None:
    """Returns the tokenizer of a GGUF file, None if the file has none; raises `ModelError` if it is damaged."""
    file = read_gguf(path)
    vocabulary = read_vocabulary(file)
    if not vocabulary.tokens:
        return None
    with foreign_errors_as(ModelError, lambda err: _refusal("tokenizer", path, err), passing=(ModelError,)):
        return build_tokenizer(file, vocabulary)
