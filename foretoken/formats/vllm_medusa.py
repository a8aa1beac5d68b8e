"""Reads and writes Medusa heads in vLLM's layout: `blocks.{head}.layers.{layer}`, `lm_heads.{head}`, `config.json`.

vLLM ignores unknown tensors and drops biases unless `medusa_fc_bias` is set; the writer sets it for every head with a
bias.
"""

from __future__ import annotations

import logging
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError
from foretoken.formats.conversion import (
    VLLM,
    Format,
    Reader,
    WriteOptions,
    check_token_map,
    dtype_name,
    finished,
    make_config,
    own_entries,
    own_entry,
    read_tensors,
    scatter,
    warn_of_counts,
)
from foretoken.formats.files import HeadFiles, save
from foretoken.formats.medusa import MedusaNames
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo

_NAMES = MedusaNames(block="blocks.{head}.layers.{layer}", lm_head="lm_heads.{head}.weight")
_PREFIX = "medusa_heads."
_SHARED = "lm_head.weight"
_DEFAULT_VOCAB_SIZE = 32001  # vLLM's default, without a vocab_size in the file


def _recognises(files: HeadFiles) -> bool:
    if any(names.recognises(files.weights) for names in (_NAMES, _NAMES.prefixed(_PREFIX))):
        return True
    is_shared = files.config.get("original_lm_head") is True and files.config.get("model_type") == "medusa"
    return is_shared and files.weights.shapes.keys() == {_SHARED}


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    weights, config, name = files.weights, files.config, str(files.path)
    if config.get("logit_scale") not in (None, 1):
        raise ModelError(
            f"'{name}' scales its logits by {shown(config['logit_scale'])}. Expected heads without a scale."
        )
    prefix = _PREFIX if _NAMES.prefixed(_PREFIX).recognises(weights) else ""
    names, map_key, shared_key = _NAMES.prefixed(prefix), f"{prefix}token_map", _shared_key(files, prefix)
    sizes = names.sizes(weights) if names.recognises(weights) else _sizes_without_blocks(files)
    rows = next(iter(weights.shapes.get(shared_key, ())), None) if shared_key else sizes["rows"]
    sizes |= {"rows": None, "own_lm_head": shared_key is None, "vocab_size": rows or _stated_vocab_size(config)}
    if sizes["num_layers"] == 0:
        sizes["has_bias"] = own_entry(config, "has_bias", default=True)
    sizes["has_bias"] |= config.get("medusa_fc_bias") is True
    stored = make_config(MedusaConfig, name, **{key: size for key, size in sizes.items() if key != "rows"})
    extra: dict[str, tuple[int, ...]] = {}
    stated = config.get("truncated_vocab_size")
    if map_key in weights.shapes:
        extra[map_key] = (prod(weights.shapes[map_key]),)
    elif isinstance(stated, int) and stated < _stated_vocab_size(config):
        extra[map_key] = (stated,)  # the map tells which tokens the rows are
    if shared_key is not None:
        extra[shared_key] = (stored.vocab_size, stored.hidden_size)
    tensors = read_tensors(weights, names.table(stored), stored, extra=extra)
    others = weights.fetch(extra)
    shared = others.get(shared_key or "")
    _warn(name, config, stored, has_map=map_key in others)
    if map_key in others:
        full = _with_token_map(name, config, stored, tensors, others[map_key], shared)
    elif shared is not None:
        full = _with_shared_lm_head(name, stored, tensors, shared, target)
    else:
        full = stored
    return finished(files, full, tensors, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    what = "format 'vllm_medusa'"
    sizes = cast("MedusaConfig", checkpoint.config)
    tensors = scatter(checkpoint.weights, _NAMES.table(sizes))
    if "token_map" in checkpoint.weights:
        tensors["token_map"] = checkpoint.weights["token_map"].clone()
    if not sizes.own_lm_head:
        lm_head, _ = options.target.copy_of_lm_head(what, with_bias=False)
        tensors[_SHARED] = lm_head.to("cpu", checkpoint.weights["weight"].dtype, copy=True)
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "num_heads": sizes.num_heads,
        "num_hidden_layers": sizes.num_layers,
        "max_paths": 64,
        "topk": 10,
        "truncated_vocab_size": sizes.draft_vocab_size,
        "medusa_fc_bias": sizes.has_bias and sizes.num_layers > 0,
        "original_lm_head": not sizes.own_lm_head,
        "torch_dtype": dtype_name(next(iter(tensors.values())).dtype),
        **own_entries(checkpoint),
    }
    save(directory, "model.safetensors", tensors, config)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    config = cast("MedusaConfig", checkpoint.config)
    if config.draft_vocab_size is not None:
        how = (
            f"it fails while loading: it expects LM heads over all {config.vocab_size} tokens even where a token_map "
            f"leaves {config.draft_vocab_size}; releases that build them by truncated_vocab_size read it"
        )
        return [Reader(VLLM, False, how)]
    how = f"speculative_config with method 'medusa'; a chain of the best token of {config.num_heads} heads"
    return [Reader(VLLM, True, how)]


def _shared_key(files: HeadFiles, prefix: str) -> str | None:
    shapes = files.weights.shapes
    if not files.config.get("original_lm_head") and prefix + _SHARED not in shapes:
        return None
    return next((key for key in (f"{prefix}lm_heads.0.weight",) if key in shapes), prefix + _SHARED)


def _sizes_without_blocks(files: HeadFiles) -> dict[str, Any]:
    heads, shape = files.config.get("num_heads"), files.weights.shapes[_SHARED]
    if not isinstance(heads, int) or isinstance(heads, bool) or files.config.get("num_hidden_layers") != 0:
        raise ModelError(
            f"'{files.path}' holds one LM head and no blocks. Expected num_heads and num_hidden_layers 0 in its "
            "config.json. Copy or convert it again."
        )
    return {
        "num_heads": heads,
        "num_layers": 0,
        "hidden_size": shape[1] if len(shape) == 2 else 0,
        "has_bias": True,
        "own_lm_head": False,
        "rows": None,
    }


def _stated_vocab_size(config: Mapping[str, Any]) -> Any:
    return config.get("vocab_size", _DEFAULT_VOCAB_SIZE)


def _with_token_map(
    name: str,
    config: Mapping[str, Any],
    stored: MedusaConfig,
    tensors: dict[str, Tensor],
    token_map: Tensor,
    shared: Tensor | None,
) -> MedusaConfig:
    """Places LM heads over part of the vocabulary; cuts those over all of it, as vLLM does."""
    drafted, rows = token_map.numel(), stored.vocab_size
    full = make_config(
        MedusaConfig,
        name,
        **stored.model_dump()
        | {"vocab_size": _stated_vocab_size(config), "own_lm_head": True, "draft_vocab_size": drafted},
    )
    vocab = full.vocab_size
    token_map = token_map.to(torch.int64)
    check_token_map(name, token_map, vocab)
    if rows not in (drafted, vocab):
        raise ModelError(
            f"the LM heads of '{name}' have {rows} rows. Expected {drafted}, as its token_map, or {vocab}."
        )
    lm_head = tensors["lm_head"] if shared is None else shared.expand(stored.num_heads, -1, -1)
    tensors["lm_head"] = (lm_head if rows == drafted else lm_head[:, token_map]).contiguous()
    tensors["token_map"] = token_map
    return full


def _with_shared_lm_head(
    name: str, stored: MedusaConfig, tensors: dict[str, Tensor], shared: Tensor, target: TargetInfo
) -> MedusaConfig:
    known = target.weights
    if known is None:
        logging.getLogger(__name__).warning("%s: its LM head is taken to be the target's", name)
        return stored
    if known.is_plain and known.lm_head_bias is None and torch.equal(known.lm_head.to("cpu", shared.dtype), shared):
        return stored
    tensors["lm_head"] = shared.expand(stored.num_heads, -1, -1).contiguous()
    return stored.model_copy(update={"own_lm_head": True})


def _warn(name: str, config: Mapping[str, Any], found: MedusaConfig, *, has_map: bool) -> None:
    heads, layers = found.num_heads, found.num_layers
    counts = {"num_heads": heads, "num_hidden_layers": layers}
    counts |= {"medusa_num_heads": heads, "medusa_num_layers": layers}  # vLLM also accepts these names
    if not has_map and found.own_lm_head:
        counts["vocab_size"] = found.vocab_size
    warn_of_counts(name, config, counts)
    if found.has_bias and layers and config.get("medusa_fc_bias") is not True:
        logging.getLogger(__name__).warning("%s: it has biases, which vLLM drops: medusa_fc_bias is not set", name)


FORMATS = (Format("vllm_medusa", _recognises, _read_head, ("medusa",), _write_head, _readers),)
