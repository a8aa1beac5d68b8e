"""Checks the headers of weight files against a configuration, without loading weights."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM

from foretoken.core.errors import ModelError, listed
from foretoken.files.bounded_reads import TensorHeader, tensor_headers

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

_WIDE_DTYPES = {"F64", "F32", "F16", "BF16"}
_SLACK = 2  # files may leave out what is tied
_BLOCK = re.compile(r"(.*?)\.(\d+)\.")
_LISTS = ("layers", "h", "blocks", "layer", "block")  # as transformers and converters name the list of blocks
_EXTRA_LAYERS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")  # heads behind the blocks


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """The tensors of all safetensors files of a directory, by name; nothing for one that does not exist."""
    headers: dict[str, TensorHeader] = {}
    for path in sorted(directory.glob("*.safetensors")):
        headers |= tensor_headers(path)
    return headers


def check_counts(headers: dict[str, TensorHeader], config: Any, name: str) -> None:
    """Refuses a configuration with more layers or experts than the files have, before they are built one by one.

    Args:
        headers: Of the model's files; nothing is checked without any.
        config: Its text configuration.
        name: Of the model, for the message.

    Raises:
        ModelError: Naming field, value and what was found.
    """
    matches = [match for match in map(_BLOCK.match, headers) if match]
    indices = [int(match[2]) for match in matches]
    wanted = getattr(config, "num_hidden_layers", None)
    if indices and isinstance(wanted, int) and wanted > max(indices) + 1:
        missing = f"{matches[0][1]}.{max(indices) + 1}"
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json: num_hidden_layers is {wanted}, but the files have "
            f"{max(indices) + 1} layers; missing: {missing} and what follows. Copy or download the model again."
        )
    largest = max((size for header in headers.values() for size in header.shape), default=0)
    for field, value in config.to_dict().items():
        if "expert" in field and isinstance(value, int) and headers and value > max(largest, *indices, 0):
            raise ModelError(
                f"the weights of '{name}' do not fit its config.json: {field} is {value}, but no tensor is larger than "
                f"{largest}. Copy or download the model again."
            )


def check_unused(unexpected: Iterable[str], config: Any, name: str) -> None:
    """Refuses files with more blocks than the configuration: the model would be cut in silence.

    Args:
        unexpected: Names of tensors that the model has no use for.
        config: Its text configuration.
        name: Of the model, for the message.

    Raises:
        ModelError: Naming the first block that would be left out.
    """
    count = config.num_hidden_layers
    extra = next((value for field in _EXTRA_LAYERS if (value := getattr(config, field, None))), 0)
    for key in sorted(unexpected):
        match = _BLOCK.match(key)
        if match and match[1].split(".")[-1] in _LISTS and int(match[2]) >= count + extra:
            raise ModelError(
                f"the weights of '{name}' do not fit its config.json: num_hidden_layers is {count}, but the files have "
                f"a layer {match[1]}.{match[2]}. Expected as many layers as the files have. Correct config.json."
            )


def check_dtypes(headers: dict[str, TensorHeader], module: nn.Module, name: str) -> None:
    """Refuses integers and 8-bit numbers where the model expects real numbers: quantised without a configuration.

    Args:
        headers: Of the model's files.
        module: The loaded model, not quantised.
        name: Of the model, for the message.

    Raises:
        ModelError: Naming the first such tensor.
    """
    parameters = {key for key, _ in module.named_parameters()}
    prefix = f"{getattr(module, 'base_model_prefix', '')}."
    for key, header in headers.items():
        is_weight = key.endswith(".weight") or key in parameters or f"{prefix}{key}" in parameters
        if is_weight and header.dtype not in _WIDE_DTYPES:
            raise ModelError(
                f"{key} of '{name}' is stored as {header.dtype}, but its config.json has no quantization_config that "
                f"says what the numbers mean. Expected one, or weights as {', '.join(sorted(_WIDE_DTYPES))}."
            )


def check_keys(name: str, *, missing: Iterable[str], misshaped: Iterable[str]) -> None:
    """Raises `ModelError` naming missing and mis-shaped weights at once, of many the first."""
    groups = {"missing": list(missing), "wrong shape": list(misshaped)}
    parts = [f"{kind}: {listed(keys)}" for kind, keys in groups.items() if keys]
    if parts:
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json: {'; '.join(parts)}. "
            "Expected every weight of the architecture. Copy or download the model again."
        )


def check_shapes(name: str, config: Any, headers: dict[str, TensorHeader]) -> None:
    """Names the weights behind a failed load, where file headers and architecture tell them; else does nothing.

    transformers stops at a wrong shape without naming it, and would allocate whatever a damaged configuration asks
    for if told to go on. It also renames some weights while loading: a name that only the files know says nothing.
    """
    wanted = _wanted_shapes(config)
    misshaped = [
        f"{key} {list(headers[key].shape)} instead of {list(shape)}"
        for key, shape in wanted.items()
        if key in headers and headers[key].shape != shape
    ]
    if misshaped:
        check_keys(name, missing=wanted.keys() - headers.keys(), misshaped=misshaped)


def check_total(name: str, config: Any, headers: dict[str, TensorHeader]) -> None:
    """Refuses a configuration that asks for far more memory than its files could fill, before it is allocated.

    Args:
        name: Of the model, for the message.
        config: Of a model that is not quantised.
        headers: Of the model's files; nothing is checked without any.

    Raises:
        ModelError: Naming the weights whose shapes differ, as far as they go by the same names in the files.
    """
    total = sum(prod(header.shape) for header in headers.values())
    wanted = sum(map(prod, _wanted_shapes(config).values())) if headers else 0
    if wanted > _SLACK * total:
        check_shapes(name, config, headers)
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json, which describes {wanted} numbers where the files "
            f"hold {total}. Copy or download the model again."
        )


def _wanted_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of an architecture's weights, tied ones once; empty if it cannot be built."""
    module = meta_model(config)
    return {} if module is None else untied_shapes(module)


def meta_model(config: Any) -> nn.Module | None:
    """A model without numbers; None where its architecture cannot be built."""
    try:
        with torch.device("meta"):
            module: nn.Module = AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - then the architecture is the error, and loading says so
        return None
    return module


def untied_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of a model's weights, tied ones once."""
    tied = getattr(module, "all_tied_weights_keys", {})
    return {key: tuple(tensor.shape) for key, tensor in module.state_dict().items() if key not in tied}
