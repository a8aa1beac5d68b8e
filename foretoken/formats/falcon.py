"""Reads and writes Falcon heads as published: `lstm`, `layers.0`, and a Llama's `config.json` with `k_mask`.

Published heads run their LSTM position by position without saying so; files written here state it under our key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError
from foretoken.formats.conversion import (
    FALCON_CODE,
    Format,
    Place,
    Reader,
    WriteOptions,
    dtype_name,
    finished,
    layer_table,
    make_config,
    own_entries,
    own_entry,
    read_tensors,
    scatter,
    target_name,
    warn_of_embedding,
)
from foretoken.formats.eagle import EMBEDDING, layer_config, stated_layer, vocabulary, without_prefix
from foretoken.formats.files import HeadFiles, save
from foretoken.heads.falcon import NUM_LAYERS, FalconConfig

if TYPE_CHECKING:
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

_LSTM, _LAYER = "lstm.weight_ih_l0", "layers.0"
_BLOCKS = 4  # blocks of a draft in the published runs
_OWN_KEYS = ("num_steps", "lstm_mode", "dropout")  # entries that other programs do not write


def _recognises(files: HeadFiles) -> bool:
    shapes = files.weights.shapes
    return any(
        prefix + _LSTM in shapes and f"{prefix}{_LAYER}.mlp.up_proj.weight" in shapes for prefix in ("", "model.")
    )


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads a head; the LSTM runs position by position unless the file states otherwise."""
    weights, config, name = without_prefix(files), files.config, str(files.path)
    block, rows = config.get("k_mask"), weights.shapes[_LSTM]
    if not isinstance(block, int) or isinstance(block, bool):
        raise ModelError(
            f"the config.json of '{name}' has k_mask {shown(block)}. Expected the tokens of a block, as 2."
        )
    width = config.get("hidden_size") or (rows[0] // 4 if rows else None)
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        raise ModelError(f"hidden_size of '{name}' is {shown(width)}. Expected a size, as of a Llama.")
    own: dict[str, Any] = {"num_steps": _BLOCKS * block, "lstm_mode": "per_position"}
    own |= {key: value for key in _OWN_KEYS if (value := own_entry(config, key)) is not None}
    sizes = make_config(
        FalconConfig,
        name,
        hidden_size=width,
        vocab_size=vocabulary(weights, config, target, keys=(EMBEDDING,)),
        block=block,
        layer=layer_config(weights, _LAYER, config, width=width),
        has_bias="lstm.bias_ih_l0" in weights.shapes,
        **own,
    )
    shared = {EMBEDDING: (sizes.vocab_size, width)} if EMBEDDING in weights.shapes else {}
    tensors = read_tensors(weights, _table(sizes), sizes, extra=shared)
    if shared:
        warn_of_embedding(weights, EMBEDDING, target)
    return finished(files, sizes, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    sizes = cast("FalconConfig", checkpoint.config)
    tensors = scatter(checkpoint.weights, _table(sizes))
    dtype = tensors[_LSTM].dtype
    if options.target.weights is not None:
        tensors[EMBEDDING] = options.target.weights.embedding.to("cpu", dtype, copy=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        **stated_layer(sizes.layer, width=sizes.hidden_size, vocab_size=sizes.vocab_size, target=options.target),
        "k_mask": sizes.block,
        "bias": sizes.has_bias,
        "qkv_bias": sizes.layer.attention_bias,
        "torch_dtype": dtype_name(dtype),
        **target_name(checkpoint),
        **own_entries(checkpoint, **{key: getattr(sizes, key) for key in _OWN_KEYS}),
    }
    save(directory, "model.safetensors" if options.as_safetensors else "pytorch_model.bin", tensors, config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    return [Reader(FALCON_CODE, False, "it hands on its LSTM's output with its state, and stops there")]


def _table(config: FalconConfig) -> dict[str, Place]:
    kinds = ("weight_ih", "weight_hh", *(("bias_ih", "bias_hh") if config.has_bias else ()))
    names = [f"{kind}_l{layer}" for layer in range(NUM_LAYERS) for kind in kinds]
    places = {f"lstm.{name}": Place(f"lstm.weights.{name}") for name in names}
    return places | layer_table(_LAYER, "layer", has_bias=config.layer.attention_bias)


FORMATS = (Format("falcon", _recognises, _read_head, ("falcon",), _write_head, _readers),)
