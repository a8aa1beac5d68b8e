"""Reads and writes EAGLE-1, EAGLE-2 and HASS heads as published, and holds the parts that all formats of EAGLE share.

The tensors (`fc`, `layers.0`) identify such heads; the configuration, a Llama's, does not name EAGLE. Old files for
vLLM are read too: their configuration lies under `model`, and they repeat the target's LM head. The original code
silently drops a norm before attention or after the block; such a norm is an error here.

Formats have different names for the decoder block (`layers.0`, `midlayer`, `transformer`) and different keys in
`config.json`. Files store `d2t`, the offset of each drafted token to the target's, and `t2d`, which of the target's
tokens are drafted; a head here stores the tokens.

Letters: E hidden size of the target, W width of the block, V vocabulary, Vd vocabulary of the drafts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, listed
from foretoken.formats import conversion
from foretoken.formats.conversion import (
    ATTENTION_BIASES,
    EAGLE_CODE,
    FALCON_CODE,
    SGLANG,
    VLLM_EAGLE,
    Format,
    Place,
    Reader,
    WriteOptions,
)
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig
from foretoken.heads.falcon import NUM_LAYERS, FalconConfig

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

EMBEDDING, LM_HEAD, LAYER = "embed_tokens.weight", "lm_head.weight", "layers.0"
OFFSETS, IS_DRAFTED = "d2t", "t2d"
OTHER_NORMS = (
    "embed_layernorm", "hidden_layernorm", "lm_head_layernorm", "embedding_layernorm", "pre_lm_head_layernorm",
)  # fmt: skip
_THETA, _EPSILON = 10000.0, 1e-6  # for files that state none
BIASES = "its attention has no biases, and it drops those of the file without a word"
_INTEGERS = (torch.int64, torch.int32, torch.int16)


def without_prefix(files: HeadFiles) -> Weights:
    """Removes the prefix `model.` that some writers add to tensor names."""
    return files.weights.renamed(lambda key: key.removeprefix("model."))


def weights_file(options: WriteOptions) -> str:
    """Returns the name of the file of weights."""
    return "model.safetensors" if options.as_safetensors else "pytorch_model.bin"


def eagle_table(config: EagleConfig, *, fc: str = "fc", layer: str = LAYER) -> dict[str, Place]:
    """Returns the place of every tensor of an EAGLE head, by the file's key."""
    places = conversion.layer_table(layer, "layer", has_bias=config.layer.attention_bias)
    places[f"{fc}.weight"] = Place("fc.weight")
    if config.has_bias:
        places[f"{fc}.bias"] = Place("fc.bias")
    return places


def layer_config(weights: Weights, layer: str, stated: Mapping[str, Any], *, width: int) -> LayerConfig:
    """Returns the sizes of the block `layer`, W wide; only the configuration of a Llama tells the attention heads.

    Raises `ModelError` if a size is missing, or the block is not a Llama's.
    """
    name, shapes = weights.name, weights.shapes
    _check_kind(weights, layer, stated)
    heads = stated.get("num_attention_heads")
    if not isinstance(heads, int) or heads < 1:
        raise ModelError(
            f"the config.json of '{name}' has num_attention_heads {shown(heads)}. Expected a count, as of a Llama."
        )
    sizes = [size for size in (stated.get("head_dim"), width // heads) if isinstance(size, int)]
    rows = rows_of(shapes, f"{layer}.self_attn.q_proj.weight")
    return conversion.make_config(
        LayerConfig,
        name,
        num_attention_heads=heads,
        num_key_value_heads=stated.get("num_key_value_heads") or heads,
        head_dim=next((size for size in sizes if size * heads == rows), sizes[0]),
        intermediate_size=rows_of(shapes, f"{layer}.mlp.gate_proj.weight") or stated.get("intermediate_size"),
        attention_bias=any(f"{layer}.self_attn.{part}.bias" in shapes for part in ATTENTION_BIASES),
        rms_norm_eps=_EPSILON if stated.get("rms_norm_eps") is None else stated["rms_norm_eps"],
        **_rotation(name, stated),
    )


def stated_layer(config: LayerConfig, *, width: int, vocab_size: int, target: TargetInfo) -> dict[str, Any]:
    """Returns the configuration of a Llama with the block as its only layer, for `layer_config`."""
    longest = getattr(target.config, "max_position_embeddings", None)
    scaling = config.rope_scaling
    if scaling is not None and scaling["rope_type"] == "linear":  # EAGLE's code reads two keys and a float
        scaling = {"type": "linear", "factor": float(scaling["factor"])}
    return {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "max_position_embeddings": longest or 4096,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def misread_block(config: LayerConfig, *, width: int) -> str | None:
    """Returns why EAGLE's own code computes a block of `stated_layer` wrongly; None if it does not."""
    scaling = config.rope_scaling or {}
    kind = scaling.get("rope_type", "linear")
    if config.head_dim * config.num_attention_heads != width:
        return f"it cuts {width} into heads evenly, and tensors do not fit"
    if kind != "linear":
        return f"it does not know rotary scaling '{kind}' and stops"
    if scaling and scaling["factor"] <= 1:
        return f"it stops at a scaling factor of {scaling['factor']}, which has to be above 1 there"
    if scaling and config.rope_theta != _THETA:
        return f"it scales rotations of base {_THETA:g} alone, and this head's is {config.rope_theta:g}"
    return None


def warn_of_base(name: str, config: LayerConfig) -> None:
    """Warns of a rotary base that the authors' code ignores, in case the head was trained there."""
    if config.rope_scaling is not None and config.rope_theta != _THETA:
        theirs = f"beside rope_scaling EAGLE's own code takes {_THETA:g}, whatever config.json says"
        conversion.warn(name, f"rope_theta is {config.rope_theta:g} here; {theirs}")


def vocabulary(weights: Weights, stated: Mapping[str, Any], target: TargetInfo, *, keys: tuple[str, ...]) -> int:
    """Returns V from a tensor, the configuration or the target; raises `ModelError` without any."""
    rows = next((rows for key in keys if (rows := rows_of(weights.shapes, key))), None)
    size = rows or stated.get("vocab_size") or target.vocab_size
    if not isinstance(size, int) or isinstance(size, bool):
        raise ModelError(f"'{weights.name}' does not tell its vocabulary. Pass --target DIR.")
    return size


def width_of(weights: Weights, stated: Mapping[str, Any], key: str, *, parts: int = 1) -> int:
    """Returns W from the configuration, or from the rows of a weight that stacks several; raises `ModelError`."""
    rows = rows_of(weights.shapes, key)
    width = stated.get("hidden_size") or (None if rows is None else rows // parts)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ModelError(f"hidden_size of '{weights.name}' is {shown(width)}. Expected a size, as of a Llama.")
    return width


def rows_of(shapes: Mapping[str, tuple[int, ...]], key: str) -> int | None:
    """Returns the first dimension of a tensor; None if the tensor is missing, or has no dimensions."""
    return next(iter(shapes.get(key, ())), None)


def tokens_of(name: str, offsets: Tensor, is_drafted: Tensor | None, *, vocab_size: int) -> Tensor:
    """Returns (Vd,) int64, the target's token of each drafted token, from (Vd,) `d2t` and (V,) `t2d` if there is one.

    Raises `ModelError` if they are not a map of different tokens of the vocabulary, or contradict each other.
    """
    if offsets.dtype not in _INTEGERS:
        raise ModelError(f"{OFFSETS} of '{name}' holds {offsets.dtype}. Expected integers.")
    offsets = offsets.long()
    own = torch.arange(len(offsets))
    is_far = (offsets < -len(offsets)) | (offsets >= vocab_size)  # the sum could overflow
    tokens = own + offsets.masked_fill(is_far, vocab_size)
    outside = ((tokens < 0) | (tokens >= vocab_size)).nonzero()
    if len(outside):
        at = int(outside[0])
        raise ModelError(
            f"{OFFSETS} of '{name}' is {int(offsets[at])} at {at}, and the target has {vocab_size} tokens. Expected "
            "how far each drafted token is from the target's. Copy or convert it again."
        )
    found = torch.zeros(vocab_size, dtype=torch.long).index_add_(0, tokens, torch.ones_like(tokens))
    if bool((found > 1).any()):
        raise ModelError(
            f"{OFFSETS} of '{name}' maps several drafted tokens to {int(found.argmax())}. Expected how far each "
            "drafted token is from the target's, not the tokens themselves. Copy or convert it again."
        )
    if is_drafted is not None and not torch.equal(is_drafted != 0, found > 0):
        raise ModelError(
            f"{IS_DRAFTED} and {OFFSETS} of '{name}' name different tokens. Expected the same {len(offsets)} in both. "
            "Copy or convert it again."
        )
    return tokens


def map_tensors(token_map: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Returns `d2t` and `t2d` of a head's map."""
    is_drafted = torch.zeros(vocab_size, dtype=torch.bool)
    is_drafted[token_map] = True
    return {OFFSETS: token_map - torch.arange(len(token_map)), IS_DRAFTED: is_drafted}


def _check_kind(weights: Weights, layer: str, stated: Mapping[str, Any]) -> None:
    name, stem = weights.name, layer.rsplit(".", 1)[0] if layer.endswith(".0") else None
    further = [key for key in weights.shapes if stem and key.startswith(f"{stem}.") and not key.startswith(f"{layer}.")]
    count = stated.get("num_hidden_layers", 1)
    if further or count != 1:
        raise ModelError(
            f"'{name}' has {'several' if further else shown(count)} decoder layers. Expected a head with one."
        )
    if any(f"{layer}.self_attn.{part}.weight" in weights.shapes for part in ("q_norm", "k_norm")):
        raise ModelError(f"the block of '{name}' norms queries and keys (q_norm, k_norm), which heads here do not.")
    if "sliding_attention" in (stated.get("layer_types") or ()):
        raise ModelError(
            f"the block of '{name}' has a sliding window of {shown(stated.get('sliding_window'))} tokens. Expected one "
            "that sees the whole text."
        )
    wanted = {"hidden_act": "silu", "partial_rotary_factor": 1, "logit_scale": 1}
    for key, value in wanted.items():
        if stated.get(key) not in (None, value):
            raise ModelError(f"'{name}' has {key} {shown(stated[key])}. Expected {value}, as heads here compute it.")


def _rotation(name: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    parts = [stated.get(key) or {} for key in ("rope_scaling", "rope_parameters")]
    if not all(isinstance(part, dict) for part in parts):
        raise ModelError(f"the rotary scaling of '{name}' is {shown(parts)}. Expected keys and values, or null.")
    rope = parts[0] | parts[1]
    bases = {base for base in (rope.pop("rope_theta", None), stated.get("rope_theta")) if base is not None}
    if len(bases) > 1:
        raise ModelError(f"'{name}' has several values of rope_theta, {', '.join(map(shown, bases))}. Expected one.")
    old = rope.pop("type", None)
    kind = rope.pop("rope_type", old)
    rotation: dict[str, Any] = {"rope_theta": next(iter(bases), _THETA), "rope_scaling": None}
    if kind not in (None, "default"):
        rotation["rope_scaling"] = {"rope_type": kind, **rope}
        if kind in ("llama3", "yarn"):
            longest = stated.get("max_position_embeddings")
            rotation["rope_scaling"].setdefault("original_max_position_embeddings", longest)
    return rotation


_LAYER_KEY = re.compile(r"(?:model\.)?layers\.0\..*")


def _recognises(files: HeadFiles) -> bool:
    """Decides whether a layer stands beside `fc`; EAGLE-3 heads match too, and are recognised earlier."""
    shapes = files.weights.shapes
    has_fc = "fc.weight" in shapes or "model.fc.weight" in shapes
    return files.config.get("model_type") == "eagle" or (has_fc and bool(files.weights.matches(_LAYER_KEY)))


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = without_prefix(files), files.config, str(files.path)
    wrapped = config.get("model")
    sizes, tensors = read_eagle(
        weights, wrapped if isinstance(wrapped, dict) else config, target, fc="fc", layer=LAYER,
        num_steps=conversion.own_entry(config, "num_steps"), has_bias=conversion.own_entry(config, "has_bias"),
    )  # fmt: skip
    conversion.warn_of_counts(name, config, {"eagle_fc_bias": sizes.has_bias})
    if conversion.own_entry(config, "num_steps") is None:
        warn_of_base(name, sizes.layer)
    return conversion.finished(files, sizes, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    sizes = cast("EagleConfig", checkpoint.config)
    tensors = conversion.scatter(checkpoint.weights, eagle_table(sizes))
    if not sizes.has_bias:  # SGLang's layer always has one; others pass over it
        tensors["fc.bias"] = torch.zeros(sizes.width, dtype=tensors["fc.weight"].dtype)
    _save(checkpoint, directory, options, tensors, own=conversion.own_entries(checkpoint, num_steps=sizes.num_steps))


def _save(
    checkpoint: HeadCheckpoint,
    directory: Path,
    options: WriteOptions,
    tensors: dict[str, Tensor],
    own: dict[str, Any],
    **stated: Any,
) -> None:
    """Writes a head that the target's LM head reads, with the target's embedding if that is at hand."""
    sizes = cast("EagleConfig | FalconConfig", checkpoint.config)
    dtype = tensors[f"{LAYER}.self_attn.q_proj.weight"].dtype
    config = {
        "architectures": ["LlamaForCausalLM"],
        **stated_layer(sizes.layer, width=sizes.width, vocab_size=sizes.vocab_size, target=options.target),
        **stated,
        "bias": sizes.has_bias,
        "qkv_bias": sizes.layer.attention_bias,
        "torch_dtype": conversion.dtype_name(dtype),
        **conversion.target_name(checkpoint),
        **own,
    }
    save(directory, weights_file(options), tensors | options.target.copy_of_embedding(EMBEDDING, dtype), config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    sizes = cast("EagleConfig", checkpoint.config)
    how = "EaModel.from_pretrained with ea_model_path of this directory, use_eagle3 off"
    official = Reader.unless(misread_block(sizes.layer, width=sizes.width), EAGLE_CODE, how)
    if sizes.has_bias:
        served = Reader(VLLM_EAGLE, False, "its layer that fuses has no bias, and it drops the file's without a word")
        reason: str | None = "it gives attention biases too, without values; remove 'bias' from config.json"
        if sizes.layer.attention_bias:
            reason = "its attention has a bias behind o_proj, which has no value"
    else:
        served = Reader(VLLM_EAGLE, True, "speculative_config with method 'eagle' named; a chain of the best token")
        reason = BIASES if sizes.layer.attention_bias else None
    how = "--speculative-algorithm EAGLE with --speculative-draft-model-path of this directory"
    return [official, served, Reader.unless(reason, SGLANG, how)]


def read_eagle(
    weights: Weights,
    stated: Mapping[str, Any],
    target: TargetInfo,
    *,
    fc: str,
    layer: str,
    num_steps: Any = None,
    has_bias: Any = None,
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Reads the network of a file; compares a repeated embedding and LM head with the target's.

    Args:
        num_steps: K if the file states it.
        has_bias: Whether the layer that fuses has a bias; None if only its tensors tell.

    Raises:
        ModelError: For variants with more norms, an LM head that is not the target's, and as `Format.read`.
    """
    name, shapes = weights.name, weights.shapes
    _check_variant(name, weights, stated)
    bias = f"{fc}.bias"
    is_written_zero = has_bias is False and bias in shapes and not bool(weights.fetch([bias])[bias].any())
    width = width_of(weights, stated, f"{fc}.weight")
    sizes = conversion.make_config(
        EagleConfig,
        name,
        hidden_size=width,
        vocab_size=vocabulary(weights, stated, target, keys=(EMBEDDING, LM_HEAD)),
        layer=layer_config(weights, layer, stated, width=width),
        has_bias=bias in shapes if has_bias is None else has_bias,
        **({} if num_steps is None else {"num_steps": num_steps}),
    )
    shared = {key: (sizes.vocab_size, width) for key in (EMBEDDING, LM_HEAD) if key in shapes}
    ignored = [bias] if is_written_zero else []
    tensors = conversion.read_tensors(
        weights, eagle_table(sizes, fc=fc, layer=layer), sizes, ignored=ignored, extra=shared
    )
    _compare_shared(weights, [*shared], target)
    return sizes, tensors


def _check_variant(name: str, weights: Weights, stated: Mapping[str, Any]) -> None:
    norms = [key for key in weights.shapes if key.split(".")[0] in OTHER_NORMS]
    if norms or stated.get("add_para_norm"):
        found = listed(norms) or "add_para_norm"
        raise ModelError(
            f"'{name}' is a variant of EAGLE with norms of its own ({found}), which programs compute in different "
            "ways. Expected a head without embed_layernorm, hidden_layernorm and lm_head_layernorm."
        )
    if {OFFSETS, IS_DRAFTED} & weights.shapes.keys():
        raise ModelError(
            f"'{name}' drafts over a part of the vocabulary. Expected a head that the target's LM head reads."
        )


def _compare_shared(weights: Weights, keys: list[str], target: TargetInfo) -> None:
    if EMBEDDING in keys:
        conversion.warn_of_embedding(weights, EMBEDDING, target)
    if LM_HEAD not in keys:
        return
    if target.weights is None:
        conversion.warn(weights.name, f"{LM_HEAD} is taken for the target's")
    elif not conversion.is_targets(weights.fetch([LM_HEAD])[LM_HEAD], target.weights.lm_head):
        raise ModelError(
            f"'{weights.name}' has an LM head of its own, and heads of EAGLE-1 and -2 are read by the target's. "
            "Expected a copy of it. Pass the target that it was made for."
        )


_LSTM = "lstm.weight_ih_l0"
_BLOCKS = 4  # blocks of a draft in the published runs
_OWN_KEYS = ("num_steps", "lstm_mode", "dropout")  # entries that other programs do not write


def _recognises_falcon(files: HeadFiles) -> bool:
    shapes = files.weights.shapes
    return any(
        prefix + _LSTM in shapes and f"{prefix}{LAYER}.mlp.up_proj.weight" in shapes for prefix in ("", "model.")
    )


def _read_falcon(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads a head; the LSTM runs position by position unless the file states otherwise."""
    weights, config, name = without_prefix(files), files.config, str(files.path)
    block = config.get("k_mask")
    if not isinstance(block, int) or isinstance(block, bool):
        raise ModelError(
            f"the config.json of '{name}' has k_mask {shown(block)}. Expected the tokens of a block, as 2."
        )
    width = width_of(weights, config, _LSTM, parts=4)
    own: dict[str, Any] = {"num_steps": _BLOCKS * block, "lstm_mode": "per_position"}
    own |= {key: value for key in _OWN_KEYS if (value := conversion.own_entry(config, key)) is not None}
    sizes = conversion.make_config(
        FalconConfig,
        name,
        hidden_size=width,
        vocab_size=vocabulary(weights, config, target, keys=(EMBEDDING,)),
        block=block,
        layer=layer_config(weights, LAYER, config, width=width),
        has_bias="lstm.bias_ih_l0" in weights.shapes,
        **own,
    )
    shared = {EMBEDDING: (sizes.vocab_size, width)} if EMBEDDING in weights.shapes else {}
    tensors = conversion.read_tensors(weights, _falcon_table(sizes), sizes, extra=shared)
    if shared:
        conversion.warn_of_embedding(weights, EMBEDDING, target)
    return conversion.finished(files, sizes, tensors, target)


def _write_falcon(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    sizes = cast("FalconConfig", checkpoint.config)
    own = conversion.own_entries(checkpoint, **{key: getattr(sizes, key) for key in _OWN_KEYS})
    tensors = conversion.scatter(checkpoint.weights, _falcon_table(sizes))
    _save(checkpoint, directory, options, tensors, own=own, k_mask=sizes.block)


def _readers_falcon(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    return [Reader(FALCON_CODE, False, "it hands on its LSTM's output with its state, and stops there")]


def _falcon_table(config: FalconConfig) -> dict[str, Place]:
    kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if config.has_bias else ()))
    names = [f"{kind}_l{layer}" for layer in range(NUM_LAYERS) for kind in kinds]
    places = {f"lstm.{name}": Place(f"lstm.weights.{name}") for name in names}
    return places | conversion.layer_table(LAYER, "layer", has_bias=config.layer.attention_bias)


FORMATS = (
    Format("eagle", _recognises, _read_head, ("eagle",), _write_head, _readers),
    Format("falcon", _recognises_falcon, _read_falcon, ("falcon",), _write_falcon, _readers_falcon),
)
