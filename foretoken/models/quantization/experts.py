"""The linear layers of experts as checkpoints have them: three for each expert, where transformers has two tensors.

Gate, up and down of expert 3 of a layer are "model.layers.0.mlp.experts.3.gate_proj", ".up_proj" and ".down_proj";
transformers has all experts' weights in `gate_up_proj` (X, 2 I, E) and `down_proj` (X, E, I).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from foretoken.core.errors import ModelError
from foretoken.decoder.native_linear import linear_layer
from foretoken.decoder.quantized_experts import is_plain_experts, mixed

if TYPE_CHECKING:
    from collections.abc import Mapping

PARTS = ("gate_proj", "up_proj", "down_proj")
_LINEAR = re.compile(rf"(.*\.experts)\.\d+\.(?:{'|'.join(PARTS)})")
# Checkpoints of these architectures have other names than transformers.
_RENAMED = {
    "mixtral": (
        (".block_sparse_moe.", ".mlp."), (".w1.", ".gate_proj."), (".w3.", ".up_proj."), (".w2.", ".down_proj."),
    ),
}  # fmt: skip


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

    Args:
        shapes: By name.
        num_tensors: How many tensors the files have.
        name: Of the model.

    Raises:
        ModelError: For a layer with more experts than the files have tensors.
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


class SeparateExperts(nn.Module):
    """The experts of a layer as linear layers, named as in checkpoints, on the weights of a module of transformers."""

    def __init__(self, experts: Any) -> None:
        """Shares the weights; `experts`: see `is_plain_experts`."""
        super().__init__()
        self._act_fn = experts.act_fn
        for expert, (gate_up, down) in enumerate(zip(experts.gate_up_proj, experts.down_proj, strict=True)):
            weights = dict(zip(PARTS, (*gate_up.chunk(2), down), strict=True))
            self.add_module(str(expert), nn.ModuleDict({part: linear_layer(each) for part, each in weights.items()}))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Turns (M, E) into (M, E); top_k_index, top_k_weights: (M, experts of a token)."""

        def output_of(expert: int, x: Tensor) -> Tensor:
            gate, up, down = self.get_submodule(str(expert)).children()
            out: Tensor = down(self._act_fn(gate(x)) * up(x))
            return out

        return mixed(hidden_states, top_k_index, top_k_weights, output_of)


def separate_experts(module: nn.Module) -> None:
    """Replaces all experts within a module by `SeparateExperts`, in place."""
    for name in [name for name, part in module.named_modules() if is_plain_experts(part)]:
        module.set_submodule(name, SeparateExperts(module.get_submodule(name)))
