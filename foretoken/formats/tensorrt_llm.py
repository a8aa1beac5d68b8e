"""Reads and writes Medusa and Hydra heads in TensorRT-LLM's layout: `config.json` and `rank{r}.safetensors`.

Only the heads' tensors are handled; TensorRT-LLM's own converter writes those of the target, `transformer.*` and
`lm_head.weight`. Column-parallel layers are split along their outputs with their biases, row-parallel ones along their
inputs. LM heads are padded with rows of zeros to a multiple of the ranks.

The public port of Hydra runs the prefix layer without a cache and splits no bias. Files written here are correct for a
runtime without these faults, and for one rank equal the port's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError, listed
from foretoken.formats import conversion, hydra, medusa
from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo, check_keys
from foretoken.formats.conversion import TRT_HYDRA, TRT_MEDUSA, Format, Place, Reader, WriteOptions
from foretoken.formats.files import HeadFiles, Weights, save
from foretoken.formats.hydra import HydraNames, prefix_entries
from foretoken.formats.medusa import MedusaNames
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from foretoken.heads.base import HeadConfig

_MOST_RANKS = 4096  # a choice: bounds the files that are opened
_ROW_PARALLEL = re.compile(r".*\.(o_proj|down_proj)\.weight")
_REPLICATED = re.compile(r".*(layernorm|\.norm)\.weight")


def _split_dim(key: str) -> int | None:
    if _REPLICATED.fullmatch(key):
        return None
    return 1 if _ROW_PARALLEL.fullmatch(key) else 0


def _split(key: str, tensor: Tensor, rank: int, tp_size: int) -> Tensor:
    dim = _split_dim(key)
    if dim is None or tp_size == 1:
        return tensor.clone()
    if tensor.shape[dim] % tp_size:
        raise ConfigError(f"tp_size is {tp_size}. Expected a divisor of {tensor.shape[dim]}, a size of '{key}'.")
    return tensor.chunk(tp_size, dim)[rank].clone()


def _head_ranks(files: HeadFiles) -> dict[int, Weights]:
    mapping = files.config.get("mapping") or {}
    tp_size = mapping.get("tp_size", mapping.get("world_size", max(files.ranks, default=0) + 1))
    stages = mapping.get("pp_size", 1)
    if not isinstance(tp_size, int) or not isinstance(stages, int) or not 1 <= tp_size * stages <= _MOST_RANKS:
        raise ModelError(
            f"'{files.path}' has tp_size {shown(tp_size)} and pp_size {shown(stages)}. Expected positive integers, "
            f"with at most {_MOST_RANKS} ranks in all."
        )
    world = files.ranks or {0: files.weights}
    missing = [f"rank{rank}.safetensors" for rank in range(tp_size * stages) if rank not in world]
    if missing:
        raise ModelError(f"'{files.path}' lacks {listed(missing)}. Expected a file of each rank. Copy it again.")
    unknown = [f"rank{rank}.safetensors" for rank in world if rank >= tp_size * stages]
    if unknown:
        raise ModelError(f"'{files.path}' holds {listed(unknown)}, beyond the ranks of its config.json.")
    return {
        rank: world[rank].renamed(lambda key: None if _TARGET_KEY.fullmatch(key) else key)
        for rank in range(tp_size * (stages - 1), tp_size * stages)
    }


def _merged(name: str, ranks: Mapping[int, Weights]) -> Weights:
    shapes: dict[str, tuple[int, ...]] = {}
    for key in dict.fromkeys(key for part in ranks.values() for key in part.shapes):
        found, dim = [part.shapes[key] for part in ranks.values() if key in part.shapes], _split_dim(key)
        whole = list(found[0])
        if dim is not None and dim < len(whole):
            whole[dim] = sum(shape[dim] for shape in found if dim < len(shape))
        shapes[key] = tuple(whole)

    def fetch(keys: Iterable[str]) -> dict[str, Tensor]:
        keys, result = list(keys), {}
        tensors = [part.fetch(keys) for part in ranks.values()]
        for key in keys:
            dim, parts = _split_dim(key), [one[key] for one in tensors]
            if dim is None and any(not torch.equal(parts[0], part) for part in parts[1:]):
                raise ModelError(f"'{key}' of '{name}' differs between ranks. Expected the same in each.")
            result[key] = parts[0] if dim is None else torch.cat(parts, dim)
        return result

    return Weights(name=name, shapes=shapes, fetch=fetch)


def _check_parts(name: str, ranks: Mapping[int, Weights], wanted: Mapping[str, tuple[int, ...]]) -> None:
    prefixes = {rank: f"rank{rank}: " if len(ranks) > 1 else "" for rank in ranks}
    found = {prefixes[rank] + key: shape for rank, part in ranks.items() for key, shape in part.shapes.items()}
    parts: dict[str, tuple[int, ...]] = {}
    for key, shape in wanted.items():
        dim = _split_dim(key)
        part = tuple(size // len(ranks) if index == dim else size for index, size in enumerate(shape))
        parts |= {prefix + key: part for prefix in prefixes.values()}
    check_keys(name, found, parts)


_MEDUSA = MedusaNames(
    block="medusa_heads.{head}.medusa_layers.{layer}.linear", lm_head="medusa_heads.{head}.lm_head.weight"
)
_HYDRA = HydraNames(
    first="hydra_heads.{head}.hydra_mlp",
    further="hydra_heads.{head}.hydra_mlps.{index}.linear",
    lm_head="hydra_heads.{head}.hydra_lm_head",
    prefix=("prefix_embedding_layer.layer", "prefix_embedding_layer.norm"),
)
_HYDRA_KEY = re.compile(r"hydra_heads\.\d+\..*")
_TARGET_KEY = re.compile(r"transformer\..*|lm_head\..*")
_MAX_DRAFT_LEN = 63  # nodes of the published trees, without the root
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PADDING = 64  # rows; a choice: the builder pads the vocabulary to a multiple of the ranks or of 64

# Names of transformers' entries by the format's.
_BASE_KEYS = {
    "num_hidden_layers": "num_hidden_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_size": "head_dim",
    "intermediate_size": "intermediate_size",
    "max_position_embeddings": "max_position_embeddings",
    "hidden_act": "hidden_act",
    "norm_epsilon": "rms_norm_eps",
    "model_type": "model_type",
}


def _recognises(files: HeadFiles) -> bool:
    return _MEDUSA.recognises(files.weights) or bool(files.weights.matches(_HYDRA_KEY))


def _read_head(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    config, name = files.config, str(files.path)
    algorithm = (config.get("quantization") or {}).get("quant_algo")
    if algorithm is not None:
        raise ModelError(f"the heads of '{name}' are quantized by {algorithm}. Expected float16, bfloat16 or float32.")
    ranks = _head_ranks(files)
    merged = _merged(name, ranks)
    stored: MedusaConfig | HydraConfig
    if _MEDUSA.recognises(files.weights):
        stored = _MEDUSA.config(merged, vocab_size=config.get("vocab_size"))
        table = _MEDUSA.table(stored)
        conversion.warn_of_counts(
            name, config, {"num_medusa_heads": stored.num_heads, "num_medusa_layers": stored.num_layers}
        )
    else:
        stored = _HYDRA.config(merged, _prefix_sizes(config), target)
        table = _HYDRA.table(stored)
    wanted = conversion.wanted_shapes(table, stored)
    _check_parts(name, ranks, wanted)
    tensors = conversion.assemble(name, merged.fetch(wanted), table, stored)
    sizes: Any = stored.model_copy(update={"vocab_size": _vocab_size(name, config, stored.vocab_size)})
    cut = {key: _cut(key, tensor, sizes.vocab_size) for key, tensor in tensors.items()}
    if isinstance(sizes, MedusaConfig):
        sizes, cut = medusa.without_added_biases(config, sizes, cut)
    return conversion.finished(files, sizes, cut, target)


def _write_head(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    what = "format 'tensorrt_llm'"
    config, tp_size = checkpoint.config, options.tp_size
    _check_ranks(config, tp_size)
    sizes: MedusaConfig | HydraConfig
    table: dict[str, Place]
    if isinstance(config, MedusaConfig):
        sizes, weights = medusa.for_writing(config, checkpoint.weights, options, what=what)
        table = _MEDUSA.table(sizes)
    else:
        assert isinstance(config, HydraConfig), "the method says so"
        sizes, weights = hydra.with_own_lm_heads(config, checkpoint.weights, options, what=what)
        table = _HYDRA.table(sizes)
    tensors = {key: _padded(key, tensor, tp_size) for key, tensor in conversion.scatter(weights, table).items()}
    dtypes = sorted({conversion.dtype_name(tensor.dtype) for tensor in tensors.values()})
    if len(dtypes) > 1 or next(iter(tensors.values())).dtype not in _DTYPES:
        raise ConfigError(f"{what} holds float16, bfloat16 or float32. The head has {', '.join(dtypes)}. Pass --dtype.")
    stored = _config(checkpoint, sizes, options, dtypes[0])
    for rank in range(tp_size):
        parts = {key: _split(key, tensor, rank, tp_size) for key, tensor in tensors.items()}
        save(directory, f"rank{rank}.safetensors", parts, stored if rank == tp_size - 1 else None)


def _readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    config = checkpoint.config
    rest = "once each rank's file also holds the target's transformer.* and lm_head.weight, from its own conversion"
    if isinstance(config, MedusaConfig):
        return [Reader(TRT_MEDUSA, True, f"--speculative_decoding_mode medusa, {rest}")]
    assert isinstance(config, HydraConfig), "the method says so"
    reason = None
    if config.prefix is None:
        reason = "it knows Hydra++ alone and misses the prefix layer"
    elif options.tp_size > 1:
        reason = f"its prefix layer cannot be split; tp_size is {options.tp_size}, it takes 1"
    how = f"--speculative_decoding_mode hydra, {rest}; it runs the prefix layer without a context"
    return [Reader.unless(reason, TRT_HYDRA, how)]


def _config(
    checkpoint: HeadCheckpoint, sizes: MedusaConfig | HydraConfig, options: WriteOptions, dtype: str
) -> dict[str, Any]:
    method, base = sizes.method, options.target.config
    known = {} if base is None else {key: getattr(base, name, None) for key, name in _BASE_KEYS.items()}
    if base is not None:
        rope = getattr(base, "rope_parameters", None) or {}
        known["rotary_base"] = rope.get("rope_theta", 10000.0)
        if rope.get("rope_type", "default") != "default":
            scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
            known["rotary_scaling"] = {"type": rope["rope_type"], **scaling}
        known["position_embedding_type"] = "rope_gpt_neox"
    return {
        "architecture": {"medusa": "MedusaForCausalLM", "hydra": "HydraForCausalLM"}[method],
        "dtype": dtype,
        "logits_dtype": "float32",
        **{key: value for key, value in known.items() if value is not None},
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        "quantization": {"quant_algo": None, "kv_cache_quant_algo": None},
        "mapping": {"world_size": options.tp_size, "tp_size": options.tp_size, "pp_size": 1},
        "use_parallel_embedding": False,
        "embedding_sharding_dim": 0,
        "max_draft_len": _MAX_DRAFT_LEN,
        f"num_{method}_heads": sizes.num_heads,
        f"num_{method}_layers": sizes.num_layers,
        **(prefix_entries(sizes) if isinstance(sizes, HydraConfig) else {}),
        **conversion.own_entries(checkpoint),
    }


def _prefix_sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    found = {
        "prefix_num_attention_heads": heads,
        "prefix_num_key_value_heads": config.get("num_key_value_heads", heads),
        "prefix_head_dim": config.get("head_size") or (width // heads if width and heads else None),
        "prefix_rms_norm_eps": config.get("norm_epsilon"),
    }
    if isinstance(scaling := config.get("rotary_scaling"), dict):
        found[hydra.TARGET_SCALING] = {"rope_type": scaling.get("type", scaling.get("rope_type")), **scaling}
    return {key: value for key, value in found.items() if value is not None} | dict(config)


def _vocab_size(name: str, config: Mapping[str, Any], rows: int) -> int:
    stated = config.get("vocab_size")
    if isinstance(stated, int) and 0 <= rows - stated < _MOST_PADDING:
        return stated
    conversion.warn(name, f"config.json says vocab_size {stated}, the tensors say {rows}")
    return rows


def _check_ranks(sizes: HeadConfig, tp_size: int) -> None:
    """Refuses ranks that split an attention head, and too many ranks: LM heads are padded to a multiple of them."""
    if not 1 <= tp_size <= _MOST_RANKS:
        raise ConfigError(f"tp_size is {shown(tp_size)}. Expected 1 to {_MOST_RANKS} ranks.")
    prefix = sizes.prefix if isinstance(sizes, HydraConfig) else None
    for what in ("num_attention_heads", "num_key_value_heads"):
        number = tp_size if prefix is None else getattr(prefix, what)
        if number % tp_size:
            raise ConfigError(f"tp_size is {tp_size}. Expected a divisor of the prefix layer's {what}, {number}.")


def _padded(key: str, tensor: Tensor, tp_size: int) -> Tensor:
    """Pads dimension 0 of LM heads, the vocabulary, with rows of zeros to a multiple of the ranks."""
    missing = -tensor.shape[0] % tp_size if ".lm_head." in key or ".hydra_lm_head." in key else 0
    return pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, missing)) if missing else tensor


def _cut(key: str, tensor: Tensor, vocab_size: int) -> Tensor:
    """Cuts the padding of LM heads, in our names: (K, V, E) in a Medusa head, (V, E) and (V,) in a Hydra head."""
    if key == "lm_head":
        return tensor[:, :vocab_size].contiguous()
    return tensor[:vocab_size].contiguous() if key.startswith("lm_heads.") else tensor


FORMATS = (Format("tensorrt_llm", _recognises, _read_head, ("medusa", "hydra"), _write_head, _readers),)
