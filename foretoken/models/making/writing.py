"""Writes a checkpoint in 4 or 8 bits in the format of compressed-tensors, file by file; a killed run goes on."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from foretoken.core.errors import ConfigError, ModelError, listed
from foretoken.decoder.quantized import round_groups, round_rows
from foretoken.decoder.quantized_modules import is_plain_experts
from foretoken.files.atomic_files import is_begun, new_file, told_as, write_file
from foretoken.files.bounded_reads import TensorHeader, read_json_object, tensor_headers
from foretoken.files.processes import is_lock, run_lock
from foretoken.models.config import check_architecture, check_model_files, read_config
from foretoken.models.stored import experts_of, linear_shapes, name_in_transformers
from foretoken.models.weight_files import check_counts, check_fit, meta_model, model_files, untied_shapes

_RECORD = "quantize.json"  # what a directory is written from, and how
_INDEX = "model.safetensors.index.json"
_WHOLE = (_RECORD, _INDEX, "config.json", "README.md")
_SHARD_BYTES = 256 << 20  # of the source's tensors, for each file; a choice: so much is in memory, and lost by a kill
_OWN_HEAD = "mtp."  # of a head for multi-token prediction, perhaps in a file that transformers does not read
_AT_ONCE = 1 << 24  # weights that are in float32 at once, 64 MiB; a choice
_ADVICE = "Make room there, and run the command again: it goes on after the last whole file."
_BESIDE = {".json", ".txt", ".model", ".jinja"}  # files of tokenizers and chat templates


class Scheme(NamedTuple):
    """Bits of weights, how many of them share a scale (0: a row), and whether inputs are quantized to 8 bits."""

    bits: int
    group: int
    rounds_inputs: bool = False


SCHEMES = {"W4A16": Scheme(4, 128), "W8A16": Scheme(8, 0), "W8A8": Scheme(8, 0, rounds_inputs=True)}


class Quantized(NamedTuple):
    """A linear layer: numbers (N, K) int8, and scales (N, G) in the dtype of the checkpoint."""

    numbers: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Returns the weights, (N, K) float32."""
        each = -(-self.numbers.shape[1] // self.scales.shape[1])
        return self.numbers * self.scales.float().repeat_interleave(each, 1)[:, : self.numbers.shape[1]]


class Original:
    """A checkpoint to be quantized, and its linear layers except for the LM head.

    Attributes:
        config: Of transformers.
        headers: All tensors by name, block by block.
        linears: Names of the weights that are quantized, and what transformers calls them.
    """

    def __init__(self, directory: Path) -> None:
        """Reads configuration and headers; raises `ModelError` for what cannot be quantized."""
        check_model_files(str(directory), may_be_hub_id=False)
        self.directory, self.config = directory, read_config(str(directory))
        check_architecture(self.config, str(directory))
        if getattr(self.config, "quantization_config", None) is not None:
            raise ModelError(f"the weights of '{directory}' are quantized already. Expected the original model.")
        self.headers: dict[str, TensorHeader] = {}
        self._paths: dict[str, Path] = {}
        read = model_files(directory)
        for path in [*read, *(path for path in sorted(directory.glob("*.safetensors")) if path not in read)]:
            for key, header in tensor_headers(path).items():
                if path in read or (key.startswith(_OWN_HEAD) and key not in self.headers):
                    self.headers[key], self._paths[key] = header, path
        self.headers = dict(sorted(self.headers.items(), key=lambda item: _natural(item[0])))
        check_counts(self.headers, self.config.get_text_config(), str(directory))
        module: Any = meta_model(self.config)
        head = None if module is None else module.get_output_embeddings()
        parts = {} if module is None else dict(module.named_modules())
        shapes = {} if module is None else linear_shapes(untied_shapes(module), len(self.headers), str(directory))
        names = {f"{name}.weight" for name, part in parts.items() if type(part) is nn.Linear and part is not head}
        names |= {key for key in shapes if experts_of(key.removesuffix(".weight")) is not None}
        kind = self.config.get_text_config().model_type
        found = {name_in_transformers(key, kind): key for key in self.headers}
        self.linears = {found[name]: name for name in names if name in found}
        odd = next((name for name, part in parts.items() if _is_foreign(part)), None)
        reason = None
        if odd is not None:
            reason = f"has weights of another layout in {odd}"
        elif not names:
            reason = "has no linear layers of torch"
        elif missing := names - found.keys():
            reason = f"lacks {listed(missing)}"
        if reason is not None:
            raise ModelError(
                f"'{directory}' {reason}. Expected a model of plain linear layers and experts whose weights have the "
                "names of its architecture."
            )
        check_fit({name: self.headers[key] for name, key in found.items()}, shapes, str(directory))

    def check_groups(self, scheme: Scheme) -> None:
        """Raises `ConfigError` if groups do not divide the inputs of a layer."""
        inputs = {key: self.headers[key].shape[-1] for key in sorted(self.linears)}
        odd = next((key for key, cols in inputs.items() if scheme.group and cols % scheme.group), None)
        if odd is None:
            return
        fitting = next((each for each in (128, 64, 32) if all(cols % each == 0 for cols in inputs.values())), None)
        advice = "Quantize to 8 bits." if fitting is None else f"Pass --group-size {fitting}."
        raise ConfigError(
            f"groups have {scheme.group} weights, but {odd} has {inputs[odd]} inputs. Expected a multiple of it. "
            f"{advice}"
        )

    def read(self, key: str) -> Tensor:
        """Reads a tensor; its file is closed again, so that no pages of it stay in memory."""
        with safe_open(self._paths[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
        return tensor.clone()

    def digest(self, settings: Mapping[str, Any]) -> str:
        """Returns a hash of the settings and of what tells that the files are the same."""
        files = [
            (path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in sorted(set(self._paths.values()))
        ]
        return hashlib.sha256(json.dumps([files, dict(settings)], sort_keys=True).encode()).hexdigest()


def _is_foreign(part: nn.Module) -> bool:
    """Whether weights are no matrix of a linear layer, no known experts, and no convolution, which stays as it is.

    A layer with a convolution and matrices of its own (Mamba) reads the weights of its linear layers by itself.
    """
    if type(part) is nn.Conv1d:
        return False
    most = 1 if any(type(each) is nn.Conv1d for each in part.children()) else 2
    return any(each.dim() > most for each in part.parameters(recurse=False)) and not is_plain_experts(part)


def quantize_linear(name: str, weight: Tensor, scheme: Scheme) -> Quantized:
    """Quantizes a weight (N, K) to nearest, some rows at a time; raises `ModelError` for NaN and infinity."""
    kind = scale_dtype(weight)

    def as_stored(scale: Tensor) -> Tensor:
        return scale.to(kind).float()

    run = partial(round_rows if scheme.group == 0 else partial(round_groups, group=scheme.group), as_stored=as_stored)
    parts = [run(part) for part in weight.split(max(1, _AT_ONCE // weight.shape[1]))]
    numbers, scales = (torch.cat(each) for each in zip(*parts, strict=True))
    if not scales.isfinite().all():
        raise ModelError(f"{name} holds NaN or infinite values, or ones too large for {kind}. Expected finite weights.")
    return Quantized(numbers, scales.to(kind))


def packed_words(numbers: Tensor, bits: int) -> Tensor:
    """Returns words (N, W) int32 of numbers (N, K) int8 from -2^(bits - 1) on, the lowest bits first."""
    unsigned = (numbers + (-128 if bits == 8 else 8)).view(torch.uint8)
    unsigned = nn.functional.pad(unsigned, (0, -numbers.shape[1] % (32 // bits)))
    parts = unsigned[:, ::2] | unsigned[:, 1::2] << 4 if bits == 4 else unsigned
    return parts.contiguous().view(torch.int32)


def scale_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of a weight's scales: its own, or bfloat16 for float32. Readers convert scales anyhow."""
    return weight.dtype if weight.dtype in (torch.bfloat16, torch.float16) else torch.bfloat16


def write_quantized(
    source: Original,
    out: Path,
    scheme: Scheme,
    settings: Mapping[str, Any],
    quantized: Callable[[str, Tensor], Quantized],
    on_progress: Callable[[int, int], None],
) -> None:
    """Writes a model directory in the format of compressed-tensors.

    A file is written whole or not at all, and `config.json` last, so that an unfinished directory is no model. A run
    that finds files of the same source and settings goes on after them.

    Args:
        out: Directory; a new or empty one, or one of the same run.
        settings: All that decides the numbers, for the record in the directory.
        quantized: Quantizes a weight, by its name in transformers; called block by block.
        on_progress: Gets the number of files that are done and of all.

    Raises:
        ConfigError: If `out` holds something else, or a file cannot be written; the whole files stay.
        ModelError: If a weight is not finite.
    """
    digest = source.digest(settings)
    _check_directory(out, digest)
    with run_lock(out, option="OUT"):
        _write(out / _RECORD, {**settings, "digest": digest})
        tensors_of = partial(_tensors, source, scheme=scheme, quantized=quantized)
        weight_map = _write_shards(source, out, digest, tensors_of, on_progress)
        size = sum((out / name).stat().st_size for name in set(weight_map.values()))
        _write(out / _INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})
        for path in sorted(source.directory.iterdir()):
            if path.suffix in _BESIDE and path.name not in _WHOLE:
                with told_as(ConfigError, f"'{out / path.name}'", _ADVICE):
                    shutil.copyfile(path, out / path.name)
        if source.digest(settings) != digest:
            raise ConfigError(
                f"'{source.directory}' was changed meanwhile. Remove '{out}' and start again when nothing writes there."
            )
        values = read_json_object(source.directory / "config.json")
        values["quantization_config"] = _quantization(source, scheme)
        _write(out / "config.json", values)


def _write_shards(
    source: Original, out: Path, digest: str, tensors_of: Callable[[str], dict[str, Tensor]],
    on_progress: Callable[[int, int], None],
) -> dict[str, str]:  # fmt: skip
    """Writes the files that a killed run did not; returns the file of each tensor."""
    shards = _shards(source.headers)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map: dict[str, str] = {}
    for path in [*out.iterdir()]:
        if any(is_begun(path, name) for name in (*names, *_WHOLE)):
            path.unlink()
    on_progress(0, len(shards))
    for done, (name, keys) in enumerate(zip(names, shards, strict=True)):
        stored = _stored_keys(out / name, digest)
        if stored is None:
            tensors: dict[str, Tensor] = {}
            for key in keys:
                tensors |= tensors_of(key)
            with told_as(ConfigError, f"'{out / name}'", _ADVICE), new_file(out / name) as new:
                save_file(tensors, new, metadata={"format": "pt", "digest": digest})
            stored = list(tensors)
        weight_map |= dict.fromkeys(stored, name)
        on_progress(done + 1, len(shards))
    return weight_map


def _write(path: Path, values: Mapping[str, Any]) -> None:
    with told_as(ConfigError, f"'{path}'", _ADVICE):
        write_file(path, json.dumps(values, indent=2))


def _tensors(
    source: Original, key: str, scheme: Scheme, quantized: Callable[[str, Tensor], Quantized]
) -> dict[str, Tensor]:
    tensor = source.read(key)
    if key not in source.linears:
        return {key: tensor}
    made, name = quantized(source.linears[key], tensor), key.removesuffix(".weight")
    if scheme.rounds_inputs:
        return {key: made.numbers, f"{name}.weight_scale": made.scales}
    return {
        f"{name}.weight_packed": packed_words(made.numbers, scheme.bits),
        f"{name}.weight_scale": made.scales,
        f"{name}.weight_shape": torch.tensor(tensor.shape),
    }


def _quantization(source: Original, scheme: Scheme) -> dict[str, Any]:
    weights = {
        "num_bits": scheme.bits, "type": "int", "symmetric": True, "dynamic": False,
        "strategy": "group" if scheme.group else "channel", "group_size": scheme.group or None,
    }  # fmt: skip
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    group = {
        "targets": ["Linear"], "weights": weights, "input_activations": inputs if scheme.rounds_inputs else None,
        "output_activations": None,
    }  # fmt: skip
    has_experts = any(experts_of(name.removesuffix(".weight")) is not None for name in source.linears.values())
    whole = ["lm_head", *([r"re:.*\.gate$"] if has_experts else [])]  # in vLLM, routers are linear layers
    whole += [r"re:^mtp\..*"] if any(key.startswith(_OWN_HEAD) for key in source.headers) else []
    return {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": whole,
        "format": "int-quantized" if scheme.rounds_inputs else "pack-quantized", "kv_cache_scheme": None,
        "config_groups": {"group_0": group},
    }  # fmt: skip


def _shards(headers: Mapping[str, TensorHeader]) -> list[list[str]]:
    shards: list[list[str]] = []
    room = 0
    for key, header in headers.items():
        size = prod(header.shape) * 2
        if not shards or size > room:
            shards.append([])
            room = _SHARD_BYTES
        shards[-1].append(key)
        room -= size
    return shards


def _natural(key: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", key)]


def _check_directory(out: Path, digest: str) -> None:
    if out.exists() and not out.is_dir():
        raise ConfigError(f"'{out}' is no directory. Expected a new one.")
    content = [] if not out.is_dir() else [
        path for path in out.iterdir() if not is_lock(path) and not is_begun(path, _RECORD)
    ]  # fmt: skip
    if not content:
        return
    record = out / _RECORD
    if not record.is_file():
        raise ConfigError(f"'{out}' holds other files. Expected a new or empty directory.")
    if read_json_object(record, error=ConfigError, advice=f"Remove '{out}'.").get("digest") != digest:
        raise ConfigError(
            f"'{out}' was begun from other files or with other settings, see {_RECORD} there. Expected the same, to go "
            "on. Choose another directory, or remove it."
        )


def _stored_keys(path: Path, digest: str) -> list[str] | None:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys()) if (file.metadata() or {}).get("digest") == digest else None
    except (OSError, SafetensorError):
        return None
