"""Checkpoints whose matrices are in integers: GGUF, GPTQ, AWQ and compressed-tensors. Needs no torch.

A format is a module that opens a checkpoint as `StoredModel`; `building` makes a transformers model of it. Drafts are
then verified against the weights as they are stored.

Experts have three linear layers each in checkpoints, where transformers has two tensors for all experts of a layer:
"model.layers.0.mlp.experts.3.gate_proj", ".up_proj" and ".down_proj" of expert 3 are a part of `gate_up_proj`
(X, 2 I, E) and `down_proj` (X, E, I).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from foretoken.decoder.quantized import QuantizedMatrix

OWN_METHOD = "foretoken"  # what transformers is told when it builds a model; no checkpoint has it
PARTS = ("gate_proj", "up_proj", "down_proj")
_LINEAR = re.compile(rf"(.*\.experts)\.\d+\.(?:{'|'.join(PARTS)})")
# Checkpoints of these architectures have other names than transformers.
_RENAMED = {
    "mixtral": (
        (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """A checkpoint with matrices in integers.

    Attributes:
        config: Of transformers, without `quantization_config`; says that weights are not tied if the LM head is one of
            `linears`.
        label: The format and its bits, for people: "GPTQ, 4 bits".
        linears: Names of linear layers in integers, as "model.layers.0.mlp.up_proj"; experts apart.
        matrix: Reads one of them, or the embedding, for inputs of a dtype, float32 or bfloat16. Raises `ModelError` if
            it is damaged.
        dense: Reads all other weights, by their names in the architecture; may convert them to a dtype.
        embedding: Name of the embedding if it is in integers, or None.
    """

    config: Any
    label: str
    linears: frozenset[str]
    matrix: Callable[[str, torch.dtype], QuantizedMatrix]
    dense: Callable[[torch.dtype], Mapping[str, Tensor]]
    embedding: str | None = None

    def with_inputs(self, input_bits: int | None) -> StoredModel:
        """Returns the model with `input_bits` of all matrices, see `QuantizedMatrix`; None for the model itself."""
        if input_bits is None:
            return self

        def matrix(name: str, dtype: torch.dtype) -> QuantizedMatrix:
            return replace(self.matrix(name, dtype), input_bits=input_bits)

        return replace(self, label=label_of_inputs(self.label, input_bits), matrix=matrix)


def label_of_inputs(label: str, input_bits: int | None) -> str:
    """Adds the bits of inputs to a label, for people."""
    return label if input_bits is None else f"{label}, inputs of {input_bits} bits"


def name_in_transformers(key: str, model_type: str) -> str:
    """Returns the name of a checkpoint's tensor in transformers."""
    for old, new in _RENAMED.get(model_type, ()):
        key = key.replace(old, new)
    return key


def experts_of(linear: str) -> str | None:
    """Returns the module of all experts of a layer whose expert has a linear layer; None for other layers."""
    match = _LINEAR.fullmatch(linear)
    return match and match[1]


def linear_shapes(shapes: Mapping[str, tuple[int, ...]], num_tensors: int, name: str) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of weights of transformers with those of each expert apart.

    Raises `ModelError` for a layer of the model `name` with more experts than its files have tensors.
    """
    found: dict[str, tuple[int, ...]] = {}
    for key, shape in shapes.items():
        owner, _, part = key.rpartition(".")
        if not owner.endswith(".experts") or part not in ("gate_up_proj", "down_proj") or len(shape) != 3:
            found[key] = shape
            continue
        count, rows, cols = shape
        if count > num_tensors:
            raise ModelError(
                f"config.json of '{name}' asks for {count} experts in {owner}, but its files have {num_tensors} "
                "tensors. Copy or download the model again."
            )
        parts, rows = (PARTS[:2], rows // 2) if part == "gate_up_proj" else (PARTS[2:], rows)
        found |= {f"{owner}.{expert}.{each}.weight": (rows, cols) for expert in range(count) for each in parts}
    return found
