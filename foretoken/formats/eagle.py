"""Reads and writes EAGLE-1, EAGLE-2 and HASS heads as published: `fc`, `layers.0`, and a Llama's `config.json`.

The tensors identify such heads; the configuration does not name EAGLE. Old files for vLLM are read too: their
configuration lies under `model`, and they repeat the target's LM head. The original code silently drops a norm before
attention or after the block; such a norm is an error here.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ModelError, listed
from foretoken.formats.eagle_names import (
    EMBEDDING,
    IS_DRAFTED,
    LM_HEAD,
    OFFSETS,
    OTHER_NORMS,
    eagle_table,
    is_targets,
    layer_config,
    misread_block,
    stated_layer,
    vocabulary,
    warn_of_base,
    width_of,
    without_prefix,
)
from foretoken.formats.mapping import make_config, read_tensors, scatter
from foretoken.formats.saving import (
    EAGLE_CODE,
    SGLANG,
    VLLM_EAGLE,
    Reader,
    expect_method,
    finished,
    own_entries,
    own_entry,
    save,
    target_name,
)
from foretoken.heads.eagle import EagleConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.formats.files import HeadFiles, Weights
    from foretoken.formats.saving import WriteOptions
    from foretoken.formats.target_info import TargetInfo

_LAYER = re.compile(r"(?:model\.)?layers\.0\..*")


def recognises(files: HeadFiles) -> bool:
    """Decides whether a layer stands beside `fc`; EAGLE-3 heads match too, and are recognised earlier."""
    shapes = files.weights.shapes
    has_fc = "fc.weight" in shapes or "model.fc.weight" in shapes
    return files.config.get("model_type") == "eagle" or (has_fc and bool(files.weights.matches(_LAYER)))


def read(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads a head.

    Args:
        files: The checkpoint.
        target: If its embedding and LM head are available, they are compared with the file's.

    Raises:
        ModelError: For variants with more norms, an LM head that is not the target's, wrong keys, numbers that are not
            finite, or missing sizes.
    """
    weights, config, name = without_prefix(files), files.config, str(files.path)
    wrapped = config.get("model")
    sizes, tensors = read_eagle(
        weights, wrapped if isinstance(wrapped, dict) else config, target, fc="fc", layer="layers.0",
        num_steps=own_entry(config, "num_steps"), has_bias=own_entry(config, "has_bias"),
    )  # fmt: skip
    if config.get("eagle_fc_bias", sizes.has_bias) is not sizes.has_bias:
        logging.getLogger(__name__).warning(
            "%s: config.json says eagle_fc_bias %s, the tensors say %s", name, config["eagle_fc_bias"], sizes.has_bias
        )
    if own_entry(config, "num_steps") is None:
        warn_of_base(name, sizes.layer)
    return finished(name, config, sizes, tensors, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes a head, and the target's embedding if available; raises `ConfigError` for other methods."""
    expect_method(checkpoint, "eagle", what="format 'eagle'")
    sizes = checkpoint.config
    assert isinstance(sizes, EagleConfig), "the method says so"
    tensors = scatter(checkpoint.weights, eagle_table(sizes))
    dtype = tensors["fc.weight"].dtype
    if options.target.weights is not None:
        tensors[EMBEDDING] = options.target.weights.embedding.to("cpu", dtype, copy=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        **stated_layer(sizes.layer, width=sizes.width, vocab_size=sizes.vocab_size, target=options.target),
        "bias": sizes.has_bias,
        "qkv_bias": sizes.layer.attention_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **target_name(checkpoint),
        **own_entries(checkpoint, num_steps=sizes.num_steps),
    }
    save(directory, "model.safetensors" if options.as_safetensors else "pytorch_model.bin", tensors, config)


def readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    """Returns the programs that read the result of `write`."""
    sizes = checkpoint.config
    assert isinstance(sizes, EagleConfig), "the method says so"
    reason = misread_block(sizes.layer, width=sizes.width)
    how = reason or "EaModel.from_pretrained with ea_model_path of this directory, use_eagle3 off"
    official = Reader(EAGLE_CODE, reason is None, how)
    if sizes.has_bias:
        served = Reader(VLLM_EAGLE, False, "its layer that fuses has no bias, and it stops at fc.bias")
        unset = "it gives attention biases too, without values; remove 'bias' from config.json"
        if sizes.layer.attention_bias:
            unset = "its attention has a bias behind o_proj, which has no value"
    else:
        served = Reader(VLLM_EAGLE, True, "speculative_config with method 'eagle' named; a chain of the best token")
        unset = "its layer that fuses has a bias, which stays random"
    return [official, served, Reader(SGLANG, False, unset)]


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
    """Reads the network of a file.

    Args:
        weights: The file.
        stated: The configuration of a Llama.
        target: See `read`.
        fc: Name of the layer that fuses.
        layer: Name of the block.
        num_steps: K if the file states it.
        has_bias: Whether the layer that fuses has a bias; None if only its tensors tell.

    Raises:
        ModelError: See `read`.
    """
    name, shapes = weights.name, weights.shapes
    _check_variant(name, weights, stated)
    width = width_of(weights, stated, f"{fc}.weight")
    sizes: EagleConfig = make_config(
        EagleConfig,
        name,
        hidden_size=width,
        vocab_size=vocabulary(weights, stated, target, keys=(EMBEDDING, LM_HEAD)),
        layer=layer_config(weights, layer, stated, width=width),
        has_bias=f"{fc}.bias" in shapes if has_bias is None else has_bias,
        **({} if num_steps is None else {"num_steps": num_steps}),
    )
    shared = {key: (sizes.vocab_size, width) for key in (EMBEDDING, LM_HEAD) if key in shapes}
    tensors = read_tensors(weights, eagle_table(sizes, fc=fc, layer=layer), sizes, extra=shared)
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
    for key in keys:
        if target.weights is None:
            if key == LM_HEAD:
                logging.getLogger(__name__).warning("%s: %s is taken for the target's", weights.name, key)
            continue
        other = target.weights.embedding if key == EMBEDDING else target.weights.lm_head
        if is_targets(weights.fetch([key])[key], other):
            continue
        if key == LM_HEAD:
            raise ModelError(
                f"'{weights.name}' has an LM head of its own, and heads of EAGLE-1 and -2 are read by the target's. "
                "Expected a copy of it. Pass the target that it was made for."
            )
        logging.getLogger(__name__).warning("%s: %s is not the target's embedding", weights.name, key)
