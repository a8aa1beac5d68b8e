"""Quantizes linear layers block by block so that their outputs on some text change least: GPTQ.

Source: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022,
section 3. Scales are chosen before, for groups of inputs side by side; inputs are then quantized in the order of their
squares, the largest first.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from foretoken.core.checks import require
from foretoken.core.errors import ModelError, foreign_errors_as, one_line
from foretoken.decoder.native_linear import linear_layer
from foretoken.decoder.quantized_modules import is_plain_experts, mixed
from foretoken.models.generic import find_blocks, first_output
from foretoken.models.making.writing import Original, Quantized, Scheme, quantize_linear
from foretoken.models.stored import PARTS

_DAMPING = 0.01  # of the mean square of inputs, added to each; the paper's
_COLUMNS = 128  # inputs whose errors are spread before all others get them; the paper's
_TOKENS_AT_ONCE = 1 << 13  # of products of inputs; a choice: 8,192 x 8,192 floats are 256 MiB


class Calibration:
    """Quantizes the layers of a model, in the order of its blocks; layers after quantized ones see their outputs."""

    def __init__(self, source: Original, scheme: Scheme, texts: Sequence[Sequence[int]]) -> None:
        """Loads the model in the dtype of its file, and reads the texts once for the arguments of all blocks.

        `texts`: token ids; each text is read alone. Raises `ModelError` if transformers cannot load the model, or its
        blocks are not found.
        """
        name = str(source.directory)
        with foreign_errors_as(
            ModelError, lambda err: f"model '{name}' cannot be loaded: {one_line(err)}. Check its files."
        ):
            loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
                name, dtype="auto", trust_remote_code=False, use_safetensors=True
            )
        self._module: Any = loaded.eval()
        separate_experts(self._module)
        self._scheme = scheme
        self._blocks = list(find_blocks(self._module, source.config.get_text_config().num_hidden_layers))
        paths = {part: path for path, part in self._module.named_modules()}
        self._paths = [paths[block] for block in self._blocks]
        self._calls = [self._calls_of(text) for text in texts]
        self._hidden = [calls[0][0] for calls in self._calls]
        self._next = 0
        self._made: dict[str, Quantized] = {}

    def quantized(self, name: str, weight: Tensor) -> Quantized:
        """Quantizes the weight of a linear layer, after those of all blocks before; other layers to nearest."""
        index = next((i for i, path in enumerate(self._paths) if name.startswith(f"{path}.")), None)
        if index is None:
            return quantize_linear(name, weight, self._scheme)
        while self._next <= index:
            self._made = self._quantize_block(self._next)
            self._next += 1
        return self._made.pop(name)

    @torch.no_grad()
    def _calls_of(self, text: Sequence[int]) -> list[tuple[Tensor | None, dict[str, Any]]]:
        """Returns each block's other arguments, as masks and rotations; and the input (1, T, E), of the first alone."""
        calls: list[tuple[Tensor | None, dict[str, Any]]] = []

        def note(_: nn.Module, inputs: tuple[Tensor, ...], others: dict[str, Any]) -> None:
            hidden = inputs[0] if inputs else others["hidden_states"]
            more = {key: each for key, each in others.items() if key != "hidden_states"}
            calls.append((None if calls else hidden, more))

        hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in self._blocks]
        self._module(torch.tensor([list(text)]), use_cache=False)
        for hook in hooks:
            hook.remove()
        return calls

    @torch.no_grad()
    def _quantize_block(self, index: int) -> dict[str, Quantized]:
        block, path = self._blocks[index], self._paths[index]
        linears = {name: part for name, part in block.named_modules() if type(part) is nn.Linear}
        squares = _Squares()
        hooks = [part.register_forward_pre_hook(partial(squares.add, name)) for name, part in linears.items()]
        for hidden, calls in zip(self._hidden, self._calls, strict=True):
            block(hidden, **calls[index][1])
        for hook in hooks:
            hook.remove()
        made = {}
        for name, part in linears.items():
            key = f"{path}.{name}.weight"
            made[key] = gptq(key, part.weight.detach(), squares.of(name, part.in_features), self._scheme)
            part.weight.copy_(made[key].dequantized())
        for text, (hidden, calls) in enumerate(zip(self._hidden, self._calls, strict=True)):
            self._hidden[text] = first_output(block(hidden, **calls[index][1]))
        return made


class _Squares:
    """Sums of x x^T over the inputs x of layers; layers that read one tensor, as query and key, share a sum."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}
        self._owners: dict[str, str] = {}  # the layer whose sum is a layer's own
        self._last: tuple[str, Tensor] | None = None

    def add(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Adds the inputs of a layer, before it computes."""
        (x,) = inputs
        owner = self._owners.setdefault(name, name if self._last is None or self._last[1] is not x else self._last[0])
        if owner != name:
            require(self._last is not None and self._last[1] is x, f"{name} and {owner} read one tensor in each text")
            return
        self._last = name, x
        for part in x.flatten(0, -2).split(_TOKENS_AT_ONCE):
            wide = part.float()
            total = self._totals.get(name)
            self._totals[name] = wide.T @ wide if total is None else total.addmm_(wide.T, wide)

    def of(self, name: str, size: int) -> Tensor:
        """Returns (size, size) float32; zeros for a layer that was not called."""
        total = self._totals.get(self._owners.get(name, name))
        return torch.zeros(size, size) if total is None else total


def gptq(name: str, weight: Tensor, squares: Tensor, scheme: Scheme) -> Quantized:
    """Quantizes a weight (N, K) so that its outputs change least.

    `squares`: (K, K) float32, the sum of x x^T over inputs x. Raises `ModelError` for weights that are not finite, or
    inputs whose squares have no inverse.
    """
    nearest = quantize_linear(name, weight, scheme)
    least, most = (-8, 7) if scheme.bits == 4 else (-127, 127)
    cols = weight.shape[1]
    order = squares.diagonal().argsort(descending=True)
    w, scales = weight.float()[:, order], nearest.scales.float()
    scales = scales[:, order // scheme.group] if scheme.group else scales.expand(-1, cols)
    inverse = _inverse_root(name, squares[order][:, order])
    numbers = torch.empty_like(w, dtype=torch.int8)
    for start in range(0, cols, _COLUMNS):
        end = min(start + _COLUMNS, cols)
        own, errors = w[:, start:end].clone(), torch.empty(len(w), end - start)
        for i in range(end - start):
            k = start + i
            scale = torch.where(scales[:, k] == 0, 1.0, scales[:, k])
            number = (own[:, i] / scale).round_().clamp_(least, most)
            numbers[:, k] = number.to(torch.int8)
            errors[:, i] = (own[:, i] - number * scales[:, k]) / inverse[k, k]
            own[:, i:].addr_(errors[:, i], inverse[k, k:end], alpha=-1)
        w[:, end:].addmm_(errors, inverse[start:end, end:], alpha=-1)
    return Quantized(numbers[:, order.argsort()].contiguous(), nearest.scales)


def _inverse_root(name: str, squares: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the damped inverse."""
    squares = squares.clone()
    squares.diagonal().add_(_DAMPING * squares.diagonal().mean() + 1e-8)
    lower, failed = torch.linalg.cholesky_ex(squares)
    inverse: Tensor
    inverse, failed_too = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
    if failed.any() or failed_too.any() or not inverse.isfinite().all():
        raise ModelError(f"GPTQ cannot quantize {name}: its inputs on the text have no inverse. Pass more text.")
    return inverse


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
