"""Makes cost twins whose further layers are recurrent: the text of a small attention model, the cost of a hybrid.

The small model's layers come first, as attention layers of the hybrid's architecture. All further layers are recurrent,
of the sizes that published models of the architecture have at this hidden size, and add nothing. The order of layers
changes no cost.

Attention of some hybrids differs from Llama's, and is made to compute the same:
- Heads of queries and keys have norms. Their inputs are scaled down until the norm divides by the root of epsilon
  alone, and the weight of the norm scales them up again.
- Norms add 1 to their weights. In bfloat16 w - 1 has fewer digits than a small w, so w is scaled to [1, 2) by powers of
  two, which move to the columns of the next matrices. The final norm is left alone, since heads read its output.
- Outputs of heads are multiplied by the sigmoid of a gate: gates are 0, and the next matrix is doubled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, foreign_errors_as, one_line
from foretoken.models.architectures import ARCHITECTURES, LeanArchitecture
from foretoken.models.loading import load_config
from foretoken.models.weight_files import described_shapes

if TYPE_CHECKING:
    from foretoken.bench.padding import PaddedModel, Padding, SmallModel

# Heads that get norms are scaled by 2 to the power of -40: squares of numbers up to 512 are lost in epsilon.
_SCALE = 40
_STEPS = 256  # of a search for two numbers with a given product; bfloat16 has 128 between powers of two
_OUTPUTS = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "w2.weight")  # of layers that add nothing
_LLAMA = LeanArchitecture()
# Matrices that read the outputs of a block's norms.
_READERS = {
    "input_layernorm": ("q_proj", "k_proj", "v_proj"),
    "post_attention_layernorm": ("gate_proj", "up_proj"),
}
_MODEL_TYPES = ("llama", "qwen3")
_HELP = "Expected a Llama or Qwen3 without biases and windows. Make a twin of its own architecture, without a family."


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture with recurrent layers.

    Attributes:
        name: As users write it.
        model_type: Of transformers.
        sizes: From the hidden size to the configuration of recurrent layers.
        layer_types: From the number of attention layers and that of all layers to the configuration.
        epsilon: The configuration's key.
    """

    name: str
    model_type: str
    sizes: Callable[[int], dict[str, Any]]
    layer_types: Callable[[int, int], dict[str, Any]]
    epsilon: str = "rms_norm_eps"

    @property
    def lean(self) -> LeanArchitecture:
        """How its parts are named."""
        lean = ARCHITECTURES[self.model_type].lean
        assert lean is not None, "lean decoders know the family"
        return lean


def _kinds(kind: str) -> Callable[[int, int], dict[str, Any]]:
    return lambda first, total: {"layer_types": ["full_attention"] * first + [kind] * (total - first)}


FAMILIES = {
    family.name: family
    for family in (
        # Qwen3.5-0.8B: 16 heads of 128 at a hidden size of 1024.
        Family(
            "qwen3_5",
            "qwen3_5_text",
            lambda hidden: {
                "linear_num_key_heads": max(1, hidden // 64),
                "linear_num_value_heads": max(1, hidden // 64),
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
            },
            _kinds("linear_attention"),
        ),
        Family(
            "lfm2", "lfm2", lambda _: {"conv_L_cache": 3, "block_auto_adjust_ff_dim": False}, _kinds("conv"), "norm_eps"
        ),
        # Mamba2 as in Bamba-9B and Granite 4: heads of 64, twice the hidden size in all, states of 128.
        Family(
            "bamba",
            "bamba",
            lambda hidden: {
                "mamba_n_heads": max(1, hidden // 32),
                "mamba_d_head": 2 * hidden // max(1, hidden // 32),
                "mamba_d_state": 128,
                "mamba_n_groups": 1,
            },
            lambda first, _: {"attn_layer_indices": list(range(first))},
        ),
    )
}


class RecurrentTwin:
    """What a twin of another architecture than the small model's has in place of Llama's.

    Attributes:
        family: Its architecture.
        block: Shapes of a recurrent layer's tensors, by their names inside the layer.
        num_head_norms: Norms of heads that the small model does not have.
    """

    def __init__(self, small: SmallModel, factor: int, family: Family) -> None:
        """Prepares a twin; factor: growth of its sizes. Raises `ConfigError` if the family cannot hold the model."""
        self.family = family
        self._small, self._factor = small, factor
        self._known: Any = load_config(str(small.path))
        kind = self._known.model_type
        if kind not in _MODEL_TYPES or "sliding_attention" in (getattr(self._known, "layer_types", None) or ()):
            raise ConfigError(f"'{small.path}' is a '{kind}', or has windows, and cannot become a hybrid. {_HELP}")
        prefix = f"model.layers.{small.num_layers}."
        shapes = self._shapes()
        self.block = {key.removeprefix(prefix): shape for key, shape in shapes.items() if key.startswith(prefix)}
        self._held = {key: shape for key, shape in shapes.items() if not key.startswith(prefix)}
        ends = tuple(f"self_attn.{family.lean.names.get(name, name)}.weight" for name in ("q_norm", "k_norm"))
        self._head_norms = [key for key in self._held if key.endswith(ends)]
        if any(self._new_name(key) in self._head_norms for key in small.weights.shapes):
            self._head_norms = []  # the small model has them
        self.num_head_norms = len(self._head_norms)
        self._check()

    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the shapes of all tensors of a twin with one recurrent layer."""
        values = self.config(self._small.num_layers + 1)
        what = f"a '{self.family.name}' with the attention heads of '{self._small.path}' cannot be built: {{}}."
        with foreign_errors_as(ConfigError, lambda err: f"{what.format(one_line(err))} {_HELP}"):
            return described_shapes(values)

    def _check(self) -> None:
        made = {self._new_name(key): self._shape(key) for key in self._small.weights.shapes}
        made |= {key: self._held[key] for key in self._head_norms}
        different = sorted(made.items() ^ self._held.items())
        if different:
            raise ConfigError(
                f"'{self._small.path}' is a '{self._small.config['model_type']}' whose '{different[0][0]}' a "
                f"'{self.family.name}' does not have like this. {_HELP}"
            )

    def _new_name(self, key: str) -> str:
        lean = self.family.lean
        names = {_LLAMA.norms[field]: lean.norms[field] for field in _LLAMA.norms} | dict(lean.names)
        return ".".join(names.get(part, part) for part in key.split("."))

    def _shape(self, key: str) -> tuple[int, ...]:
        rows, *columns = self._small.grown_shape(key, self._factor)
        has_gates = self.family.lean.gates_heads and key.endswith("q_proj.weight")
        return (2 * rows if has_gates else rows, *columns)

    def num_elements(self, num_recurrent: int) -> int:
        """Returns the number of weights of a twin with some recurrent layers."""
        return sum(map(prod, self._held.values())) + num_recurrent * sum(map(prod, self.block.values()))

    def config(self, num_layers: int) -> dict[str, Any]:
        """Returns the configuration of a twin with some layers in all."""
        known, factor = self._known, self._factor
        kept = (
            "vocab_size", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "initializer_range",
            "bos_token_id", "eos_token_id", "pad_token_id",
        )  # fmt: skip
        grown = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        hidden_size = known.hidden_size * factor
        return {
            "model_type": self.family.model_type,
            "architectures": [ARCHITECTURES[self.family.model_type].name],
            **{key: getattr(known, key) for key in kept},
            **{key: getattr(known, key) * factor for key in grown},
            "head_dim": getattr(known, "head_dim", None) or known.hidden_size // known.num_attention_heads,
            "num_hidden_layers": num_layers,
            "rope_parameters": {**known.rope_parameters, "partial_rotary_factor": 1.0},
            "dtype": str(known.dtype or torch.float32).removeprefix("torch."),
            self.family.epsilon: known.rms_norm_eps / factor,
            **self.family.sizes(hidden_size),
            **self.family.layer_types(self._small.num_layers, num_layers),
        }

    def tensors(self, model: PaddedModel, padding: Padding) -> Iterator[tuple[str, Tensor]]:
        """Yields every tensor with its name, on the device of `padding`."""
        for key in self._small.weights.shapes:
            tensor = model.padded(key, padding)
            dtype = tensor.dtype
            yield self._new_name(key), self._adapted(model, key, tensor, padding)
        for_queries, for_keys = _factors(4.0**_SCALE * self._known.rms_norm_eps / self._factor, dtype)
        for name in self._head_norms:
            norm = torch.full(self._held[name], for_queries if ".q_" in name else for_keys, dtype=dtype)
            yield name, norm.to(padding.generator.device) - self.family.lean.norm_offset
        for layer in range(self._small.num_layers, model.num_layers):
            for name, shape in self.block.items():
                added = padding.added(shape, dtype)
                yield f"model.layers.{layer}.{name}", padding.silence(added) if name.endswith(_OUTPUTS) else added

    def _adapted(self, model: PaddedModel, key: str, tensor: Tensor, padding: Padding) -> Tensor:
        """Returns a padded tensor of the small model so that the hybrid computes the same with it."""
        lean, part = self.family.lean, key.removesuffix(".weight").rsplit(".", 1)[-1]
        if part.endswith("norm"):
            if not lean.norm_offset:
                return tensor
            if part in _READERS:
                tensor = 2.0 * torch.frexp(tensor.float())[0].abs().to(tensor.dtype)
            return tensor - lean.norm_offset
        if lean.norm_offset:
            for norm, readers in _READERS.items():
                if part in readers:
                    name = f"{key.rsplit('.', 3)[0]}.{norm}.weight"
                    live = model.padded(name, padding)[: self._small.hidden_size].float()
                    powers = torch.ldexp(torch.ones_like(live), torch.frexp(live)[1] - 1).copysign(live)
                    tensor[:, : self._small.hidden_size] *= powers.to(tensor.dtype)
        if part in {"q_proj", "k_proj"} and self._head_norms:
            tensor = tensor * 2.0**-_SCALE
        if lean.gates_heads and part == "q_proj":
            heads = tensor.unflatten(0, (-1, 1, self._known.head_dim))
            tensor = torch.cat([heads, torch.zeros_like(heads)], dim=1).flatten(0, 2)
        return tensor * 2.0 if lean.gates_heads and part == "o_proj" else tensor


def _factors(product: float, dtype: torch.dtype) -> tuple[float, float]:
    """Returns two numbers of a dtype whose product is as near as possible to a number."""
    steps = torch.arange(_STEPS, dtype=torch.float64) / _STEPS
    first = (math.sqrt(product) * (1 + steps)).to(dtype).double()
    second = (product / first).to(dtype).double()
    best = int((first * second - product).abs().argmin())
    return float(first[best]), float(second[best])
