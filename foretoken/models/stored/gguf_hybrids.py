"""How GGUF files hold recurrent layers: their settings, the order of their heads, and what conversion did to values.

Source: `load_arch_hparams` of ggml-org/llama.cpp, src/models/lfm2.cpp and qwen35.cpp, and its conversion/qwen.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError
from foretoken.models.config import is_size

if TYPE_CHECKING:
    from collections.abc import Container, Iterable

    from torch import Tensor

    from foretoken.models.architectures import GgufArchitecture
    from foretoken.models.stored.gguf_config import Settings, Values
    from foretoken.models.stored.gguf_file import GgufFile

_KV_HEADS = "attention.head_count_kv"
_TILED = ("qwen35", "qwen35moe")  # heads of values in another order, see `_head_order`
DELTA_NETS = (*_TILED, "qwen3next")
# Linear layers of transformers that files have as two.
_JOINED = {
    "shared_mlp.input_linear": ("shared_mlp.gate_proj", "shared_mlp.up_proj"),
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
}
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_MAMBA2 = ("granitehybrid", "falcon-h1", "mamba2", *_NEMOTRON)
_MAMBA2_FIELDS = ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv")
_MAMBA2_ONLY_FIELDS = ("num_heads", "head_dim", "n_groups", "state_size", "conv_kernel")
_NEMOTRON_FIELDS = ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel")
_RECURRENT = "attention.recurrent_layers"
_ROWS_OF_VALUES = ("attn_qkv", "attn_gate", "ssm_conv1d")
_ROWS_OF_HEADS = ("ssm_beta", "ssm_alpha", "ssm_dt", "ssm_a")
# Sizes that are no whole numbers, by the types in transformers: there are several, or none.
_MAMBA_ONLY = ("mamba", "falcon_mamba", "mamba2")
LEFT_OUT = {
    "nemotron_h": ("feed_forward_length",),
    **dict.fromkeys(_MAMBA_ONLY, ("feed_forward_length", "attention.head_count")),
}  # fmt: skip
_NO_HEADS = ("lfm2", "lfm2moe", "granitehybrid", "jamba", *_NEMOTRON)  # layers without attention have 0 heads of keys


def kv_heads(values: Values, layers: int, heads: int) -> tuple[int, list[bool]]:
    """Returns the heads of keys of the attention layers, and whether each layer is one: some say so by 0 heads.

    Raises `ModelError` if the attention layers do not have one number.
    """
    found, count = values.own.get(_KV_HEADS), values.size("block_count")
    if values.name not in _NO_HEADS or not isinstance(found, list):
        return values.size(_KV_HEADS, heads), [True] * layers
    numbers = sorted({each for each in found[:layers] if each != 0})  # further entries: as in `_recurrent_layers`
    if len(found) != count or len(numbers) != 1 or not is_size(numbers[0]):
        expected = f"{count} numbers, one positive number and 0 for layers without attention"
        raise values.refusal(f"has {shown(found)} as {values.name}.{_KV_HEADS}", expected)
    return numbers[0], [each != 0 for each in found[:layers]]


def recurrent_fields(values: Values, file: GgufFile, hidden: int, has_attention: list[bool]) -> dict[str, Any]:
    """Returns the fields of recurrent layers; {} for architectures without any. Raises `ModelError` as `Values`.

    `hidden`: the hidden size; `has_attention`: by layers, see `kv_heads`.
    """
    if values.name in ("lfm2", "lfm2moe"):
        kinds = ["full_attention" if each else "conv" for each in has_attention]
        own = {"block_auto_adjust_ff_dim": False} if values.name == "lfm2" else {}
        return own | {"layer_types": kinds, "conv_L_cache": values.size("shortconv.l_cache"), "conv_bias": False}
    if values.name in DELTA_NETS:
        return _delta_net(values, len(has_attention))
    if values.name in ("mamba", "jamba"):
        return _mamba(values, file, hidden, has_attention)
    return _mamba2(values, file, hidden, has_attention) if values.name in _MAMBA2 else {}


def _mamba2(values: Values, file: GgufFile, hidden: int, has_attention: list[bool]) -> dict[str, Any]:
    inner, heads = values.size("ssm.inner_size"), values.size("ssm.time_step_rank")
    groups, expand = values.size("ssm.group_count"), inner // hidden
    has_expand = values.name in ("granitehybrid", "mamba2")
    if inner % heads or inner % groups or (has_expand and inner != expand * hidden):
        expected = f"a multiple of {heads} heads, of {groups} groups and of the hidden size"
        raise values.refusal(f"has {inner} as {values.name}.ssm.inner_size", expected)
    sizes = [heads, inner // heads, groups, values.size("ssm.state_size"), values.size("ssm.conv_kernel")]
    has_bias = any(name.endswith(".ssm_conv1d.bias") for name in file.tensors)
    if values.name in _NEMOTRON:
        return dict(zip(_NEMOTRON_FIELDS, sizes, strict=True)) | {"use_conv_bias": has_bias}
    if values.name == "mamba2":
        return dict(zip(_MAMBA2_ONLY_FIELDS, sizes, strict=True)) | {"expand": expand}
    fields = dict(zip(_MAMBA2_FIELDS, sizes, strict=True)) | {"mamba_conv_bias": has_bias}
    if values.name == "falcon-h1":  # its factors are multiplied into the weights
        return fields | {"mamba_d_ssm": inner, "mamba_norm_before_gate": False}
    fields["mamba_expand"] = expand
    if values.model_type == "bamba":
        return fields | {"attn_layer_indices": [layer for layer, each in enumerate(has_attention) if each]}
    kinds = ["full_attention" if each else "linear_attention" for each in has_attention]
    has_rope = values.own.get("rope.scaling.finetuned", True) is not False
    return fields | {"layer_types": kinds, "position_embedding_type": "rope" if has_rope else None}


def _mamba(values: Values, file: GgufFile, hidden: int, has_attention: list[bool]) -> dict[str, Any]:
    inner = values.size("ssm.inner_size")
    if inner % hidden:
        raise values.refusal(f"has {inner} as {values.name}.ssm.inner_size", f"a multiple of the hidden size, {hidden}")
    sizes = {
        "state_size": values.size("ssm.state_size"), "conv_kernel": values.size("ssm.conv_kernel"),
        "expand": inner // hidden, "time_step_rank": values.size("ssm.time_step_rank"),
    }  # fmt: skip
    if values.name == "mamba":
        return sizes
    has_experts = [f"blk.{layer}.ffn_gate_inp.weight" in file.tensors for layer in range(len(has_attention))]
    fields = dict(zip(("mamba_d_state", "mamba_d_conv", "mamba_expand", "mamba_dt_rank"), sizes.values(), strict=True))
    for kind, found in (("attn", has_attention), ("expert", has_experts)):
        fields[f"{kind}_layer_period"], fields[f"{kind}_layer_offset"] = _period(values, kind, found)
    return fields


def _period(values: Values, kind: str, found: list[bool]) -> tuple[int, int]:
    """Returns the distance of layers of a kind, and the first of them."""
    count, layers = len(found), [layer for layer, each in enumerate(found) if each]
    offset = layers[0] if layers else count
    period = layers[1] - offset if len(layers) > 1 else count + 1
    if [(layer - offset) % period == 0 and layer >= offset for layer in range(count)] != found or offset >= period:
        raise values.refusal(f"has layers of the kind '{kind}' at {shown(layers)}", "one distance between them")
    return period, offset


def block_types(values: Values, layers: int, has_attention: list[bool]) -> tuple[int, list[str]]:
    """Returns the inner size of the feed-forward blocks of Nemotron-H, and what each of its blocks is."""
    key, count = "feed_forward_length", values.size("block_count")
    found = values.value(key)
    is_list = isinstance(found, list) and len(found) == count
    sizes = found[:layers] if is_list else [] if isinstance(found, list) else [values.size(key)] * layers
    own = sorted({each for each in sizes if each != 0})
    both = [bool(size) and each for size, each in zip(sizes, has_attention, strict=False)]
    if len(sizes) != layers or len(own) != 1 or not is_size(own[0]) or any(both):
        expected = f"{count} numbers, one positive number in place of attention and 0 for other blocks"
        raise values.refusal(f"has {shown(found)} as {values.name}.{key}", expected)
    kind = "moe" if values.is_mixture else "mlp"
    kinds = [kind if size else "full_attention" if each else "linear_attention"
             for size, each in zip(sizes, has_attention, strict=True)]  # fmt: skip
    return own[0], kinds


def plain_experts(values: Values, count: int, top_k: int, inner: int) -> dict[str, Any]:
    """Returns the fields of Nemotron-H's experts, which have no gates; `inner`: numbers inside an expert."""
    groups = values.size("expert_group_count", 1)
    used = values.size("expert_group_used_count", 1 if groups == 1 else None)
    if count % groups or count < 2 * groups or used > groups:
        what = f"has {count} experts in {groups} groups, and takes {used} of these"
        raise values.refusal(what, "groups of one size, of two experts or more")
    is_normalized = values.own.get("expert_weights_norm", False)
    if not isinstance(is_normalized, bool):
        raise values.refusal(f"has {shown(is_normalized)} as {values.name}.expert_weights_norm", "true or false")
    latent = values.size("moe_latent_size") if "moe_latent_size" in values.own else None
    return {
        "n_routed_experts": count, "num_experts_per_tok": top_k, "moe_intermediate_size": inner,
        "moe_shared_expert_intermediate_size": values.size("expert_shared_feed_forward_length"),
        "n_shared_experts": values.size("expert_shared_count", 1), "norm_topk_prob": is_normalized,
        "routed_scaling_factor": float(values.number("expert_weights_scale", 1.0)), "moe_latent_size": latent,
        "n_group": groups, "topk_group": used,
    }  # fmt: skip


def stored_shape(fields: dict[str, Any], key: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape that a file has for a weight of transformers that is no expert."""
    groups = fields.get("mamba_n_groups", fields.get("n_groups"))  # of Mamba2
    if groups is not None and key.endswith((".A_log", ".D")):
        return (*shape, 1)
    if groups is not None and key.endswith((".mamba.norm.weight", ".mixer.norm.weight")):
        return (groups, shape[0] // groups)
    is_convolution = len(shape) == 3 and shape[1] == 1  # of single channels
    return (shape[0], shape[2]) if is_convolution else shape


def _delta_net(values: Values, layers: int) -> dict[str, Any]:
    keys, heads = values.size("ssm.group_count"), values.size("ssm.time_step_rank")
    inner = values.size("ssm.inner_size")
    if heads % keys or inner % heads:
        raise values.refusal(
            f"has {keys} heads of keys, {heads} of values and {inner} numbers in these", "multiples of one another"
        )
    kinds = ["linear_attention" if each else "full_attention" for each in _recurrent_layers(values, layers)]
    return {
        "layer_types": kinds, "linear_conv_kernel_dim": values.size("ssm.conv_kernel"),
        "linear_key_head_dim": values.size("ssm.state_size"), "linear_num_key_heads": keys,
        "linear_num_value_heads": heads, "linear_value_head_dim": inner // heads,
    }  # fmt: skip


def _recurrent_layers(values: Values, layers: int) -> list[bool]:
    """Returns whether each layer is recurrent; further entries are of layers for further tokens."""
    found, count = values.own.get(_RECURRENT), values.size("block_count")
    if found is None:
        interval = values.size("full_attention_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(layers)]
    if not isinstance(found, list) or len(found) != count or not all(isinstance(each, bool) for each in found):
        raise values.refusal(f"has {shown(found)} as {values.name}.{_RECURRENT}", f"{count} booleans")
    return found[:layers]


def sections(values: Values, rotated: int) -> dict[str, Any]:
    """Returns the entries of `rope_parameters` of models that also see images, whose positions have several axes.

    A text has the same position on three axes, and 0 on a fourth one. Raises `ModelError` if that axis rotates any of
    the `rotated` numbers of a head.
    """
    found = values.value("rope.dimension_sections")
    is_list = isinstance(found, list) and len(found) in (3, 4)
    counts = list(found) if is_list and all(isinstance(each, int) and each >= 0 for each in found) else [0]
    num_pairs = min(rotated // 2, sum(counts))  # the axes of further pairs are those of the first ones
    last_pairs = [num_pairs - 1 - (num_pairs - 1 - axis) % 3 for axis in range(3)]
    if num_pairs == 0 or any(last >= 3 * count for last, count in zip(last_pairs, counts, strict=False)):
        raise values.refusal(
            f"has {shown(found)} as {values.name}.rope.dimension_sections", "sections of three axes for all pairs"
        )
    return {"mrope_section": counts[:3], "mrope_interleaved": True}


def joined_rows(fields: dict[str, Any], architecture: GgufArchitecture, head_dim: int) -> dict[str, list[int]]:
    """Returns the rows of queries, keys and values, by blocks whose file may join them to one tensor.

    Queries of some architectures come with gates of their own.
    """
    if "self_attn.qkv_proj" in architecture.parts.values():  # transformers joins them too
        return {}
    keys = fields["num_key_value_heads"] * head_dim
    queries = fields["num_attention_heads"] * head_dim * (2 if architecture.name in DELTA_NETS else 1)
    kinds = fields.get("layer_types", ["full_attention"] * fields["num_hidden_layers"])
    return {f"blk.{layer}": [queries, keys, keys] for layer, kind in enumerate(kinds) if kind == "full_attention"}


def halves_of(shapes: Iterable[str], names: Container[str]) -> dict[str, tuple[str, str]]:
    """Returns both weights of a file for each linear layer of transformers that the file has as two.

    `shapes`: transformers' weights; `names`: those that a file has as they are.
    """
    return {
        linear: (f"{owner}{first}.weight", f"{owner}{second}.weight")
        for linear in (key.removesuffix(".weight") for key in shapes if key not in names)
        for whole, (first, second) in _JOINED.items()
        if linear.endswith(f".{whole}") and (owner := linear.removesuffix(whole))
    }


def half_rows(fields: dict[str, Any], linear: str, rows: int) -> tuple[int, int]:
    """Returns the rows of both halves of a linear layer of `rows`, see `halves_of`."""
    if not linear.endswith("in_proj_qkvz"):
        return rows // 2, rows // 2
    gates = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    return rows - gates, gates


def joined_order(fields: dict[str, Any], linear: str) -> Tensor | None:
    """Returns the place in both halves, one below the other, of each row of a linear layer, (rows,) int64.

    None for the same order. In transformers each head of keys of Qwen3-Next has its rows side by side: the query, the
    key, the values and their gates.
    """
    if not linear.endswith("in_proj_qkvz"):
        return None
    keys = fields["linear_num_key_heads"]
    key_rows = keys * fields["linear_key_head_dim"]
    value_rows = fields["linear_num_value_heads"] * fields["linear_value_head_dim"]
    parts = torch.arange(2 * (key_rows + value_rows)).split([key_rows, key_rows, value_rows, value_rows])
    return torch.cat([part.view(keys, -1) for part in parts], 1).flatten()


def head_rows(settings: Settings, part: str) -> Tensor | None:
    """Returns where a file has the rows of a part of a recurrent layer, (rows,) int64; None for the same order."""
    if settings.architecture.name not in _TILED:
        return None
    width = settings.fields.get("linear_value_head_dim", 0) if part in _ROWS_OF_VALUES else 1
    order = _head_order(settings.fields, width) if part in (*_ROWS_OF_VALUES, *_ROWS_OF_HEADS) else None
    if order is None or part == "attn_gate" or part in _ROWS_OF_HEADS:
        return order
    before = 2 * settings.fields["linear_num_key_heads"] * settings.fields["linear_key_head_dim"]
    return torch.cat([torch.arange(before), before + order])


def head_columns(settings: Settings, part: str) -> Tensor | None:
    """Returns where a file has the columns of a part of a recurrent layer, (columns,) int64, as `head_rows`."""
    if settings.architecture.name not in _TILED:
        return None
    width = settings.fields.get("linear_value_head_dim", 0)
    return _head_order(settings.fields, width) if part == "ssm_out" else None


def _head_order(fields: dict[str, Any], width: int) -> Tensor | None:
    """Returns where a file has the numbers of the heads of values, `width` for each.

    In transformers the heads of values of one head of keys follow each other. Files have the first one of each head of
    keys, then the second ones, and so on.
    """
    keys, heads = fields.get("linear_num_key_heads", 0), fields.get("linear_num_value_heads", 0)
    if keys == heads:
        return None
    return torch.arange(heads * width).view(heads // keys, keys, width).transpose(0, 1).flatten()


def logarithms(settings: Settings, name: str, decays: Tensor) -> Tensor:
    """Returns the logarithms of decay rates that a file has with the opposite sign, float32.

    Raises `ModelError` for rates that are not positive.
    """
    rates = -decays.float()
    if not (rates > 0).all():
        raise ModelError(
            f"{name} of '{settings.file.path}' holds numbers that are not negative. Expected -exp(A_log). Copy or "
            "download the file again."
        )
    return rates.log()
