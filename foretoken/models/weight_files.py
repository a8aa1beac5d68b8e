"""Compares the headers of weight files, and for `inspect --verify` all numbers, with a configuration."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from torch import nn

from foretoken.core.errors import ModelError, listed
from foretoken.decoder.quantized_modules import QuantizedExperts, QuantizedLinear
from foretoken.models.config import check_architecture, indexed_files, read_config, read_headers
from foretoken.models.names import part_names

if TYPE_CHECKING:
    from foretoken.files.bounded_reads import TensorHeader

    Headers = Mapping[str, TensorHeader]
    Shapes = Mapping[str, tuple[int, ...]]

_OF_MODELS = (".safetensors", ".json")  # files that a model in Hugging Face layout is loaded from
_WORDS = (".qweight", ".weight_packed")  # ends of names of words of integers: GPTQ and AWQ, compressed-tensors
_WIDE_DTYPES = {"F64", "F32", "F16", "BF16"}
_SLACK = 2  # a choice: files may leave out tied weights, at most half of the model
_BLOCK = re.compile(r"(.*?)\.(\d+)\.")
_LISTS = ("layers", "h", "blocks", "layer", "block")  # names of the list of blocks in transformers and converters
_EXTRA_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # heads behind the blocks
_AGAIN = "Copy or download the model again."


def model_files(directory: Path) -> list[Path]:
    """Returns the safetensors that transformers reads: one file, those of an index, or else all."""
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    return indexed_files(index) if index.is_file() else sorted(directory.glob("*.safetensors"))


def check_keys(name: str, *, missing: Iterable[str], misshaped: Iterable[str]) -> None:
    """Raises `ModelError` with the names of missing and mis-shaped weights; lists only the first of many."""
    groups = {"missing": list(missing), "wrong shape": list(misshaped)}
    parts = [f"{kind}: {listed(keys)}" for kind, keys in groups.items() if keys]
    if parts:
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json: {'; '.join(parts)}. "
            f"Expected every weight of the architecture. {_AGAIN}"
        )


def check_fit(headers: Headers, shapes: Shapes, name: str) -> None:
    """Raises `ModelError` unless the files have all these weights, in these shapes, as floating-point numbers."""
    check_keys(name, missing=shapes.keys() - headers.keys(), misshaped=_misshaped(headers, shapes))
    odd = next((key for key in shapes if headers[key].dtype not in _WIDE_DTYPES), None)
    if odd is not None:
        raise ModelError(
            f"{odd} of '{name}' is stored as {headers[odd].dtype}. Expected one of {', '.join(sorted(_WIDE_DTYPES))}. "
            f"{_AGAIN}"
        )


def check_counts(headers: Headers, config: Any, name: str) -> None:
    """Raises `ModelError` for more layers or experts than the files have, before they are built one by one."""
    matches = [match for match in map(_BLOCK.match, headers) if match]
    last = max((int(match[2]) for match in matches), default=-1)
    wanted = getattr(config, "num_hidden_layers", None)
    if matches and isinstance(wanted, int) and wanted > last + 1:
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json: num_hidden_layers is {wanted}, but the files have "
            f"{last + 1} layers; missing: {matches[0][1]}.{last + 1} and what follows. {_AGAIN}"
        )
    largest = max((size for header in headers.values() for size in header.shape), default=0)
    for field, value in config.to_dict().items():
        if "expert" in field and isinstance(value, int) and headers and value > max(largest, last):
            raise ModelError(
                f"the weights of '{name}' do not fit its config.json: {field} is {value}, but no tensor is larger than "
                f"{largest}. {_AGAIN}"
            )


def check_unused(unexpected: Iterable[str], config: Any, name: str) -> None:
    """Raises `ModelError` for an unused block beyond the configured ones: the model would be cut silently."""
    count = config.num_hidden_layers
    extra = next((value for field in _EXTRA_LAYERS if (value := getattr(config, field, None))), 0)
    for key in sorted(unexpected):
        match = _BLOCK.match(key)
        if match and match[1].split(".")[-1] in _LISTS and int(match[2]) >= count + extra:
            raise ModelError(
                f"the weights of '{name}' do not fit its config.json: num_hidden_layers is {count}, but the files have "
                f"a layer {match[1]}.{match[2]}. Expected as many layers as the files have. Correct config.json."
            )


def check_dtypes(headers: Headers, module: nn.Module, name: str) -> None:
    """Raises `ModelError` for weights of integers or 8-bit numbers: quantized weights without a configuration."""
    parameters = {key for key, _ in module.named_parameters()}
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    for key, header in headers.items():
        is_weight = key.endswith(".weight") or key in parameters or f"{prefix}{key}" in parameters
        if is_weight and header.dtype not in _WIDE_DTYPES:
            raise ModelError(
                f"{key} of '{name}' is stored as {header.dtype}, but its config.json has no quantization_config that "
                f"says what the numbers mean. Expected one, or weights as {', '.join(sorted(_WIDE_DTYPES))}."
            )


def check_shapes(name: str, config: Any, headers: Headers) -> None:
    """Raises `ModelError` with the names of mis-shaped weights, if headers and architecture show any.

    transformers stops at a wrong shape without naming the weight, or allocates what a damaged configuration asks for.
    It also renames some weights while loading: names that only the files have say nothing.
    """
    wanted = _wanted_shapes(config)
    misshaped = _misshaped(headers, wanted)
    if misshaped:
        check_keys(name, missing=wanted.keys() - headers.keys(), misshaped=misshaped)


def _misshaped(headers: Headers, shapes: Shapes) -> list[str]:
    return [
        f"{key} {list(headers[key].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in headers and headers[key].shape != shape
    ]


def check_total(name: str, config: Any, headers: Headers) -> None:
    """Raises `ModelError` for a configuration that needs far more memory than its files fill, before allocation."""
    total = sum(prod(header.shape) for header in headers.values())
    wanted = sum(map(prod, _wanted_shapes(config).values())) if headers else 0
    if wanted > _SLACK * total:
        check_shapes(name, config, headers)
        words = next((key for key in headers if key.endswith(_WORDS)), None)
        if words is not None:
            raise ModelError(
                f"{words} of '{name}' holds weights in integers, but config.json has no quantization_config that says "
                f"what the numbers mean. Expected one. {_AGAIN}"
            )
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json, which describes {wanted} numbers where the files "
            f"hold {total}. {_AGAIN}"
        )


def _wanted_shapes(config: Any) -> Shapes:
    module = meta_model(config)
    return {} if module is None else untied_shapes(module)


def described_shapes(values: Mapping[str, Any]) -> Shapes:
    """Returns the shapes of a model's weights by the contents of its config.json; none if it cannot be built."""
    return _wanted_shapes(transformers.AutoConfig.for_model(**values))


def meta_model(config: Any) -> nn.Module | None:
    """Builds a model on the device "meta"; None if its architecture cannot be built."""
    try:
        with torch.device("meta"):
            module: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - loading reports the architecture as the error
        return None
    return module


def untied_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a model's weights, tied ones once."""
    tied = getattr(module, "all_tied_weights_keys", {})
    return {key: tuple(tensor.shape) for key, tensor in module.state_dict().items() if key not in tied}


def files_identity(path: Path) -> str | None:
    """Returns what changes when a model's files do: names, sizes, times; None if there is no such file or directory."""
    try:
        if path.is_file():
            files = [path.with_name(name) for name in part_names(path.name)]
        else:
            files = [each for each in path.iterdir() if each.suffix in _OF_MODELS]
        states = [(each.name, each.stat()) for each in sorted(files)]
    except OSError:
        return None
    facts = [(name, state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns) for name, state in states]
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:24] if facts else None


def num_weights(module: nn.Module) -> int:
    """Returns the number of a module's weights, those in integers too."""
    total = sum(p.numel() for p in module.parameters())
    for part in module.modules():
        if isinstance(part, QuantizedLinear):
            total += part.out_features * part.in_features
        if isinstance(part, QuantizedExperts):
            total += sum(m.num_outputs * m.num_inputs for m in (part.gate_up, part.down))
    return total


class WeightFindings(NamedTuple):
    """The findings in a target's weights.

    `findings`: tensors that are missing, of a wrong shape or dtype, or not finite. `warnings`: tensors that the
    architecture does not use; published checkpoints carry some.
    """

    findings: list[str]
    warnings: list[str]


def weight_findings(directory: Path) -> WeightFindings:
    """Compares the safetensors of a model directory with its architecture; reads one tensor at a time.

    Raises `ModelError` if there is nothing to compare with: quantized weights, architectures that cannot be built, and
    weights stored under other names.
    """
    name = str(directory)
    config, headers = read_config(name), read_headers(directory)
    check_architecture(config, name)
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the weights of '{name}' are quantized, which --verify cannot compare with the architecture. Load "
            "the model with `foretoken generate` to see whether they fit, or leave --verify out."
        )
    not_finite = list(_not_finite(directory))
    if more := _told(lambda: check_counts(headers, config.get_text_config(), name)):
        return WeightFindings([*more, *not_finite], [])  # before the layers are built one by one
    module: Any = meta_model(config)
    if module is None:
        raise ModelError(
            f"the architecture of '{name}' cannot be built, so --verify has nothing to compare its weights with. "
            "Expected a causal LM of transformers. Leave --verify out."
        )
    shapes, used = untied_shapes(module), set(module.state_dict())
    names = {_named(key, used, str(getattr(module, "base_model_prefix", ""))): key for key in headers}
    missing, unused = sorted(shapes.keys() - names.keys()), sorted(names.keys() - used)
    from transformers.conversion_mapping import get_model_conversion_mapping

    if missing and unused and get_model_conversion_mapping(module, add_legacy=False):
        raise ModelError(
            f"the weights of '{name}' are stored under other names than its architecture's, which --verify cannot "
            "compare. Load the model with `foretoken generate` to see whether they fit, or leave --verify out."
        )
    findings = [f"{key} is missing, of shape {list(shapes[key])}" for key in missing]
    findings += [
        f"{names[key]} has shape {list(headers[names[key]].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in names and headers[names[key]].shape != shape
    ]
    findings += _told(lambda: check_dtypes(headers, module, name))
    findings += _told(lambda: check_unused(unused, config.get_text_config(), name))
    return WeightFindings([*findings, *not_finite], [f"{names[key]} is not used" for key in unused])


def _told(check: Callable[[], None]) -> list[str]:
    try:
        check()
    except ModelError as err:
        return [str(err)]
    return []


def _named(key: str, used: set[str], prefix: str) -> str:
    names = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in names if name in used), key)


def _not_finite(directory: Path) -> Iterator[str]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(key)
                if tensor.is_floating_point():
                    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
                    if wrong:
                        yield f"{key} holds {wrong} numbers that are not finite"
