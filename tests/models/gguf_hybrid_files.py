"""Writes GGUF files of models with recurrent layers, with what llama.cpp's conversion script does to them.

Each matrix is written in a type, and the model gets the values that the file then has: moved back entry by entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import Add, blocks, join_tensors, replace_value

_ARCHITECTURES = {"qwen3_5_text": "qwen35", "lfm2": "lfm2"}


def write_hybrid(
    path: Path,
    model: Any,
    *,
    matrices: Type,
    values: Mapping[str, Any] | None = None,
    adds: Iterable[Add] = (),
    leave_out: Iterable[str] = (),
    joined: dict[str, tuple[str, ...]] | None = None,
) -> Any:
    """Writes a model, changes its weights to those of the file, and returns it.

    `values`: more of the header by its keys, without the architecture's name; None leaves a key out. `adds`: add more
    to the header. `leave_out`: tensors that are not written. `joined`: see `write` of `gguf_files`.
    """
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    (number,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    _HEADERS[architecture](writer, config)
    for key, value in (values or {}).items():
        replace_value(writer, f"{architecture}.{key}", value)
    for add in adds:
        add(writer)
    read, made = dict(model.state_dict()), dict[str, tuple[np.ndarray, Type]]()
    for seed, (key, weight) in enumerate(model.state_dict().items()):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(key.replace(".dt_bias", ".dt_proj.bias"), try_suffixes=(".weight", ".bias"))
        assert name is not None, key
        moved = _moved(key, weight, config)
        is_matrix = moved.ndim == 2 and "conv" not in key.split(".")[-2]
        kind = matrices if is_matrix else Type.F32
        whole = np.ascontiguousarray(_computed(key, moved, config).numpy())
        stored = blocks(whole, kind, seed) if kind != Type.F32 else whole
        if is_matrix:
            places = _moved(key, torch.arange(weight.numel()).view(weight.shape), config)
            back = torch.empty(weight.numel())
            back[places.flatten()] = torch.from_numpy(gguf.dequantize(stored, kind)).flatten().float()
            read[key] = back.view(weight.shape)
        if name not in leave_out:
            made[name] = stored, kind
    if config.tie_word_embeddings:
        read["lm_head.weight"] = read["model.embed_tokens.weight"]
    model.load_state_dict(read)
    join_tensors(made, joined or {})
    for name, (stored, kind) in made.items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _moved(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """The entries of a weight where a file has them, as `_LinearAttentionVReorderBase` of conversion/qwen.py."""
    if ".conv" in key and weight.ndim == 3:
        weight = weight.squeeze(1)
    if ".linear_attn." not in key or config.linear_num_key_heads == config.linear_num_value_heads:
        return weight
    part = key.split(".linear_attn.")[1].removesuffix(".weight")
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    if part == "out_proj":
        return torch.cat([weight[:, head * width : (head + 1) * width] for head in _tiled(config)], 1)
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return torch.stack([weight[head] for head in _tiled(config)])
    if part in ("in_proj_qkv", "conv1d", "in_proj_z"):
        others, own = weight[: len(weight) - heads * width], weight[len(weight) - heads * width :]
        return torch.cat([others, *(own[head * width : (head + 1) * width] for head in _tiled(config))])
    return weight


def _tiled(config: Any) -> list[int]:
    """The heads of values in a file's order: the first one of each head of keys, then the second ones, and so on."""
    each = config.linear_num_value_heads // config.linear_num_key_heads
    return [key * each + turn for turn in range(each) for key in range(config.linear_num_key_heads)]


def _computed(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    if key.endswith("A_log"):
        return -torch.exp(weight)
    is_offset = config.model_type == "qwen3_5_text" and key.endswith("norm.weight")
    return weight + 1 if is_offset and not key.endswith("linear_attn.norm.weight") else weight


def _common(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def _lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    _common(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
    writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_layer_norm_rms_eps(config.norm_eps)


def _qwen35(writer: gguf.GGUFWriter, config: Any) -> None:
    _common(writer, config)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)


_HEADERS = {"lfm2": _lfm2, "qwen35": _qwen35}
