"""Writes GGUF files of models with recurrent layers, with what llama.cpp's conversion script does to them.

Each matrix is written in a type, and the model gets the values that the file then has: moved back entry by entry.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import Add, join_tensors, replace_value
from models.gguf_files import blocks as blocks_of

_ARCHITECTURES = {
    "qwen3_5_text": "qwen35", "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next", "lfm2": "lfm2", "lfm2_moe": "lfm2moe", "granitemoehybrid": "granitehybrid",
    "mamba": "mamba", "falcon_mamba": "mamba", "mamba2": "mamba2", "jamba": "jamba",
    "bamba": "granitehybrid", "falcon_h1": "falcon-h1", "nemotron_h": "nemotron_h",
}  # fmt: skip
# Where transformers joins tensors, or has other names than the checkpoints that are converted.
_OWN_NAMES = {
    "gate_up_proj": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
    "experts.down_proj": ("ffn_down_exps.weight",),
    "experts.up_proj": ("ffn_up_exps.weight",),
    "mixer.gate.e_score_correction_bias": ("exp_probs_b.bias",),
    "feed_forward.gate.weight": ("ffn_gate_inp.weight",),
    "feed_forward.expert_bias": ("exp_probs_b.bias",),
    "feed_forward.router.weight": ("ffn_gate_inp.weight",),
    "block_sparse_moe.router.weight": ("ffn_gate_inp.weight",),
    "shared_mlp.input_linear.weight": ("ffn_gate{}.weight", "ffn_up{}.weight"),
    "in_proj_qkvz.weight": ("attn_qkv.weight", "attn_gate.weight"),
    "shared_mlp.output_linear.weight": ("ffn_down{}.weight",),
}
_IN_FLOATS = (".ssm_conv1d.", ".shortconv.conv.", ".ssm_norm.", ".ssm_a.", ".ssm_d.", ".ffn_gate_inp")


def write_hybrid(
    path: Path,
    model: Any,
    *,
    matrices: Type | Callable[[str], Type],
    values: Mapping[str, Any] | None = None,
    adds: Iterable[Add] = (),
    leave_out: Iterable[str] = (),
    joined: dict[str, tuple[str, ...]] | None = None,
) -> Any:
    """Writes a model, changes its weights to those of the file, and returns it.

    `matrices`: the type of all matrices, or of each by its name in the file. `values`: more of the header by its keys,
    without the architecture's name; None leaves a key out. `adds`: add more to the header. `leave_out`: tensors that
    are not written. `joined`: see `write` of `gguf_files`.
    """
    config = model.config
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(path, architecture)
    _write_header(writer, config)
    for key, value in (values or {}).items():
        replace_value(writer, f"{architecture}.{key}", value)
    for add in adds:
        add(writer)
    read, made = dict(model.state_dict()), dict[str, tuple[np.ndarray, Type]]()
    for seed, (key, weight) in enumerate(model.state_dict().items()):
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        factors = _factors(key, weight, config)
        parts = _moved(key, _computed(key, weight, config) * factors, config)
        places = _moved(key, torch.arange(weight.numel()).view(weight.shape), config)
        back = weight.flatten().clone()
        for part, place, name in zip(parts, places, _names(key, config), strict=True):
            is_matrix = part.ndim > 1 and not any(each in f"{name}." for each in _IN_FLOATS)
            kind = Type.F32 if not is_matrix else matrices(name) if callable(matrices) else matrices
            stored = np.ascontiguousarray(part.numpy())
            if kind != Type.F32:
                flat = blocks_of(stored.reshape(-1, stored.shape[-1]), kind, seed)
                stored = flat.reshape(*stored.shape[:-1], -1)
            if is_matrix:
                back[place.flatten()] = torch.from_numpy(gguf.dequantize(stored, kind)).flatten().float()
                read[key] = back.view(weight.shape) / factors
            if name not in leave_out:
                made[name] = stored, kind
    if config.tie_word_embeddings:
        read["lm_head.weight"] = read[next(key for key in read if "embed" in key)]
    model.load_state_dict(read)
    join_tensors(made, joined or {})
    for name, (stored, kind) in made.items():
        writer.add_tensor(name, stored, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _architecture(config: Any) -> str:
    name, is_mixture = _ARCHITECTURES[config.model_type], "moe" in getattr(config, "layers_block_type", ())
    return f"{name}_moe" if is_mixture else name


def _names(key: str, config: Any) -> list[str]:
    """The tensors of a file for a weight of transformers."""
    for own, parts in _OWN_NAMES.items():
        if key.endswith(own):
            shared = "_shexp" if getattr(config, "num_local_experts", 0) else ""
            return [f"blk.{key.split('.')[2]}.{part.format(shared)}" for part in parts]
    architecture = _architecture(config)
    (number,) = (each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    original = key.replace(".dt_bias", ".dt_proj.bias")
    if config.model_type == "nemotron_h":
        original = original.replace("model.", "backbone.")
    name = names.get_name(original, try_suffixes=(".weight", ".bias"))
    assert name is not None, key
    return [name]


def _moved(key: str, weight: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """The entries of a weight where a file has them, in one tensor or two."""
    if key.endswith("gate_up_proj"):
        return [each.contiguous() for each in weight.chunk(2, 1)]
    if key.endswith(("shared_mlp.input_linear.weight", "in_proj_qkvz.weight")):
        return list(weight.chunk(2)) if "shared_mlp" in key else _apart(weight, config)
    if ".conv" in key and weight.ndim == 3:
        weight = weight.squeeze(1)
    if config.model_type in ("granitemoehybrid", "bamba") and key.endswith(("q_proj.weight", "k_proj.weight")):
        heads = config.num_attention_heads if "q_proj" in key else config.num_key_value_heads
        return [weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)]  # pairs side by side
    groups = getattr(config, "mamba_n_groups", getattr(config, "n_groups", None))
    if groups is not None and key.endswith((".A_log", ".D")):
        return [weight.unsqueeze(1)]
    if groups is not None and key.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return [weight.view(groups, -1)]
    return [_tiled(key, weight, config)]


def _apart(weight: torch.Tensor, config: Any) -> list[torch.Tensor]:
    """As `Qwen3NextModel` of conversion/qwen.py: all queries, keys and values; and the gates."""
    width = config.linear_num_value_heads // config.linear_num_key_heads * config.linear_value_head_dim
    sizes = [config.linear_key_head_dim, config.linear_key_head_dim, width, width]
    heads = [head.split(sizes) for head in weight.chunk(config.linear_num_key_heads)]
    query, key, value, gate = (torch.cat(each) for each in zip(*heads, strict=True))
    return [torch.cat([query, key, value]), gate]


def _tiled(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """As `_LinearAttentionVReorderBase` of conversion/qwen.py: the heads of values in another order.

    The first one of each head of keys, then the second ones, and so on.
    """
    is_other = ".linear_attn." not in key or config.model_type == "qwen3_next"
    if is_other or config.linear_num_key_heads == config.linear_num_value_heads:
        return weight
    part = key.split(".linear_attn.")[1].removesuffix(".weight")
    heads, width = config.linear_num_value_heads, config.linear_value_head_dim
    each = heads // config.linear_num_key_heads
    order = [head * each + turn for turn in range(each) for head in range(config.linear_num_key_heads)]
    if part == "out_proj":
        return torch.cat([weight[:, head * width : (head + 1) * width] for head in order], 1)
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        return torch.stack([weight[head] for head in order])
    if part in ("in_proj_qkv", "conv1d", "in_proj_z"):
        others, own = weight[: len(weight) - heads * width], weight[len(weight) - heads * width :]
        return torch.cat([others, *(own[head * width : (head + 1) * width] for head in order)])
    return weight


def _computed(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    if key.endswith("A_log"):
        return -torch.exp(weight)
    is_offset = config.model_type.startswith("qwen3_") and key.endswith("norm.weight")
    return weight + 1 if is_offset and not key.endswith("linear_attn.norm.weight") else weight


def _factors(key: str, weight: torch.Tensor, config: Any) -> torch.Tensor:
    """What the script of Falcon-H1 multiplies a weight by, (rows, 1) or 1."""
    if config.model_type != "falcon_h1" or "conv" in key:
        return torch.ones(1)
    part = key.removesuffix(".weight").rpartition(".")[2]
    into = config.attention_in_multiplier
    factor = {
        "gate_proj": config.mlp_multipliers[0], "down_proj": config.mlp_multipliers[1], "q_proj": into,
        "k_proj": into * config.key_multiplier, "v_proj": into, "o_proj": config.attention_out_multiplier,
        "out_proj": config.ssm_out_multiplier, "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier, "in_proj": config.ssm_in_multiplier,
    }.get(part, 1.0)  # fmt: skip
    if part != "in_proj":
        return torch.tensor([factor])
    inner, state = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
    rows = torch.tensor([inner, inner, state, state, config.mamba_n_heads])
    factors: list[float] = [factor * each for each in config.ssm_multipliers]
    return torch.tensor(factors).repeat_interleave(rows).unsqueeze(1)


def _write_header(writer: gguf.GGUFWriter, config: Any) -> None:
    if config.model_type in ("mamba", "falcon_mamba", "mamba2"):
        return _write_mamba_header(writer, config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type != "qwen3_5_moe_text":
        writer.add_feed_forward_length(config.intermediate_size)
    if config.model_type == "nemotron_h":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
        if config.model_type != "jamba":
            writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    return _HEADERS[config.model_type](writer, config)


def _write_mamba_header(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(2**20)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    inner, sizes = config.expand * config.hidden_size, (config.conv_kernel, config.state_size)
    if config.model_type == "mamba2":
        _write_states(writer, *sizes, config.n_groups, config.num_heads, inner)
    else:
        _write_states(writer, *sizes, None, config.time_step_rank, inner)
        writer.add_ssm_dt_b_c_rms(config.model_type == "falcon_mamba")


def _jamba(writer: gguf.GGUFWriter, config: Any) -> None:
    sizes = config.mamba_d_conv, config.mamba_d_state, None, config.mamba_dt_rank
    _write_states(writer, *sizes, config.mamba_expand * config.hidden_size)
    _write_kv_heads(writer, config)
    _write_experts(writer, config.num_experts, config.num_experts_per_tok)


def _lfm2(writer: gguf.GGUFWriter, config: Any) -> None:
    _write_kv_heads(writer, config)
    writer.add_shortconv_l_cache(config.conv_L_cache)


def _lfm2_moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _lfm2(writer, config)
    _write_experts(writer, config.num_experts, config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_leading_dense_block_count(config.num_dense_layers)
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def _qwen35(writer: gguf.GGUFWriter, config: Any) -> None:
    _write_head_dim(writer, config.head_dim)
    writer.add_rope_dimension_count(int(config.head_dim * config.rope_parameters["partial_rotary_factor"]))
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    inner = config.linear_num_value_heads * config.linear_value_head_dim
    _write_states(
        writer, config.linear_conv_kernel_dim, config.linear_key_head_dim, config.linear_num_key_heads,
        config.linear_num_value_heads, inner,
    )  # fmt: skip
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)


def _qwen35moe(writer: gguf.GGUFWriter, config: Any) -> None:
    _qwen35(writer, config)
    _write_experts(writer, config.num_experts, config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _mamba2(writer: gguf.GGUFWriter, config: Any) -> None:
    inner = config.mamba_n_heads * config.mamba_d_head
    sizes = config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups, config.mamba_n_heads
    _write_states(writer, *sizes, inner)


def _granite(writer: gguf.GGUFWriter, config: Any) -> None:
    _mamba2(writer, config)
    _write_kv_heads(writer, config)
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    _write_experts(writer, config.num_local_experts, config.num_experts_per_tok)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _bamba(writer: gguf.GGUFWriter, config: Any) -> None:
    _mamba2(writer, config)
    _write_kv_heads(writer, config)
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(head_dim * config.rope_parameters["partial_rotary_factor"]))
    writer.add_rope_scaling_finetuned(True)


def _falcon_h1(writer: gguf.GGUFWriter, config: Any) -> None:
    _mamba2(writer, config)
    _write_head_dim(writer, config.head_dim)


def _nemotron_h(writer: gguf.GGUFWriter, config: Any) -> None:
    inner = config.mamba_num_heads * config.mamba_head_dim
    _write_states(writer, config.conv_kernel, config.ssm_state_size, config.n_groups, config.mamba_num_heads, inner)
    _write_head_dim(writer, config.head_dim)
    _write_kv_heads(writer, config)
    inner = {"mlp": config.intermediate_size, "moe": config.moe_intermediate_size}
    sizes = [inner.get(kind, 0) for kind in config.layers_block_type]
    replace_value(writer, f"{writer.arch}.feed_forward_length", sizes)
    if "moe" not in config.layers_block_type:
        return
    _write_experts(writer, config.n_routed_experts, config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_expert_weights_norm(config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if config.moe_latent_size is not None:
        writer.add_moe_latent_size(config.moe_latent_size)


def _write_kv_heads(writer: gguf.GGUFWriter, config: Any) -> None:
    kinds = getattr(config, "layer_types", None) or config.layers_block_type
    heads = [config.num_key_value_heads * (kind in ("full_attention", "attention")) for kind in kinds]
    replace_value(writer, f"{writer.arch}.attention.head_count_kv", heads)


def _write_head_dim(writer: gguf.GGUFWriter, head_dim: int) -> None:
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def _write_experts(writer: gguf.GGUFWriter, count: int, each: int) -> None:
    writer.add_expert_count(count)
    writer.add_expert_used_count(each)


def _write_states(writer: gguf.GGUFWriter, kernel: int, state: int, groups: int | None, heads: int, inner: int) -> None:
    writer.add_ssm_conv_kernel(kernel)
    writer.add_ssm_state_size(state)
    if groups is not None:
        writer.add_ssm_group_count(groups)
    writer.add_ssm_time_step_rank(heads)
    writer.add_ssm_inner_size(inner)


_HEADERS = {
    "lfm2": _lfm2, "lfm2_moe": _lfm2_moe, "qwen3_5_text": _qwen35, "qwen3_5_moe_text": _qwen35moe,
    "qwen3_next": _qwen35moe,
    "granitemoehybrid": _granite, "bamba": _bamba, "jamba": _jamba,
    "falcon_h1": _falcon_h1, "nemotron_h": _nemotron_h,
}  # fmt: skip
