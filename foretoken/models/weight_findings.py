"""Compares all weights of a model directory with its architecture, for `foretoken inspect --verify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import safe_open

from foretoken.core.errors import ModelError
from foretoken.models.loading import check_architecture, load_config
from foretoken.models.weight_files import (
    check_counts,
    check_dtypes,
    check_unused,
    meta_model,
    read_headers,
    untied_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


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
    config, headers = load_config(str(directory)), read_headers(directory)
    check_architecture(config, str(directory))
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the weights of '{directory}' are quantized, which --verify cannot compare with the architecture. Load "
            "the model with `foretoken generate` to see whether they fit, or leave --verify out."
        )
    not_finite = list(_not_finite(directory))
    if (more := _told(lambda: check_counts(headers, config.get_text_config(), str(directory)))) is not None:
        return WeightFindings([more, *not_finite], [])  # before the layers are built one by one
    module: Any = meta_model(config)
    if module is None:
        raise ModelError(
            f"the architecture of '{directory}' cannot be built, so --verify has nothing to compare its weights with. "
            "Expected a causal LM of transformers. Leave --verify out."
        )
    shapes, used = untied_shapes(module), set(module.state_dict())
    names = {_named(key, used, str(getattr(module, "base_model_prefix", ""))): key for key in headers}
    missing, unused = sorted(shapes.keys() - names.keys()), sorted(names.keys() - used)
    from transformers.conversion_mapping import get_model_conversion_mapping

    if missing and unused and get_model_conversion_mapping(module, add_legacy=False):
        raise ModelError(
            f"the weights of '{directory}' are stored under other names than its architecture's, which --verify cannot "
            "compare. Load the model with `foretoken generate` to see whether they fit, or leave --verify out."
        )
    findings = [f"{key} is missing, of shape {list(shapes[key])}" for key in missing]
    findings += [
        f"{names[key]} has shape {list(headers[names[key]].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in names and headers[names[key]].shape != shape
    ]
    more = _told(lambda: check_dtypes(headers, module, str(directory)))
    extra = _told(lambda: check_unused(unused, config.get_text_config(), str(directory)))
    findings += [each for each in (more, extra) if each is not None]
    return WeightFindings([*findings, *not_finite], [f"{names[key]} is not used" for key in unused])


def _told(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ModelError as err:
        return str(err)
    return None


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
