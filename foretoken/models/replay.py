"""Runs the blocks of a transformers model on given hidden states: the reference that a decoder's blocks must equal.

Every block gets the states that a decoder computed, so that errors of earlier blocks do not add up. A block of a model
in a narrow dtype runs twice: in float32, and as the model itself rounds. The difference of the two says what rounding
explains. Only one block at a time is in float32, and weights in integers are unpacked once for both.

Letters: P paths, T tokens of a path, E hidden size, L blocks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from foretoken.decoder.quantized import round_rows, rounded_inputs
from foretoken.decoder.quantized_modules import QuantizedLinear
from foretoken.models.borrowed import copies_of_empty_parts
from foretoken.models.forward_pass import ATTENTION_NAME
from foretoken.models.generic import find_blocks, first_output, own_attention

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

WIDE = (torch.float32, torch.float64)


class BlockOutput(NamedTuple):
    """What a block makes of given states, (P, T, E): in float32 or wider, and in the model's dtype."""

    exact: Tensor
    usual: Tensor


class Replay(NamedTuple):
    """What the model makes of a decoder's states.

    Attributes:
        embeddings: (P, T, E), inputs of the first block for the tokens.
        blocks: Outputs of the chosen blocks, by index.
        final: (P, T, E), output of the backbone for the states after the last block.
    """

    embeddings: Tensor
    blocks: Mapping[int, BlockOutput]
    final: Tensor


def replay(
    model: LoadedModel, paths: Tensor, states: Sequence[Tensor], chosen: Sequence[int], *, rounds_rows: bool = False
) -> Replay:
    """Runs chosen blocks with the model's own attention, each on its given states.

    Args:
        paths: (P, T) int64, tokens from position 0 on.
        states: L + 1 tensors (P, T, E): the input of every block, and the output of the last one.
        chosen: Blocks to run, the first among them.
        rounds_rows: Whether keys and values are quantized as in a KV cache in int8.
    """
    blocks = find_blocks(model.module, model.num_layers)
    rotations: list[nn.Module] = []
    rest: list[Any] = []
    stages = [
        _Stage(block, states[index : index + 2], model, rest, is_run=index in chosen, rounds_rows=rounds_rows)
        for index, block in enumerate(blocks)
    ]
    if model.dtype not in WIDE:
        rotations = [part for part in model.backbone.modules() if type(part).__name__.endswith("RotaryEmbedding")]
    handles = [part.register_forward_pre_hook(_widen_first) for part in rotations]
    try:
        # Eager attention rounds its scores to the model's dtype, which would excuse much. Adapted models have no other.
        config: Any = model.module.config
        kind = "sdpa" if config._attn_implementation == ATTENTION_NAME else "eager"
        with _replaced(blocks, stages), own_attention(model.module, kind), torch.inference_mode():
            final: Tensor = model.backbone(paths.to(model.device), use_cache=False)[0]
    finally:
        for handle in handles:
            handle.remove()
    outputs = {index: stage.output for index, stage in enumerate(stages) if stage.output is not None}
    assert stages[0].given is not None, "the backbone runs its first block"
    return Replay(stages[0].given, outputs, final)


@contextmanager
def _replaced(blocks: nn.ModuleList, stages: Sequence[nn.Module]) -> Iterator[None]:
    own = list(blocks)
    try:
        for index, stage in enumerate(stages):
            blocks[index] = stage
        yield
    finally:
        for index, block in enumerate(own):
            blocks[index] = block


class _Stage(nn.Module):
    """Stands in the model for a block: takes states from outside, and hands on those of the next boundary."""

    def __init__(
        self, block: nn.Module, states: Sequence[Tensor], model: LoadedModel, rest: list[Any], *, is_run: bool,
        rounds_rows: bool,
    ) -> None:  # fmt: skip
        """`states`: before and after the block; `rest`: filled with what blocks return beside states, if they do."""
        super().__init__()
        self.block, self._states, self._model, self._rest = block, states, model, rest
        self._is_run, self._rounds_rows = is_run, rounds_rows
        self.given: Tensor | None = None
        self.output: BlockOutput | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("block"), name)  # models read the kind of attention of a block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the states after the block, in the form that the block returns."""
        given, named = list(args), dict(kwargs)
        owner: Any = given or named
        key = 0 if given else "hidden_states"
        self.given = owner[key]
        before, after = self._states
        if self._is_run:
            owner[key] = before
            self.output = self._run(given, named)
        return (after, *self._rest[0]) if self._rest else after

    def _run(self, args: list[Any], kwargs: dict[str, Any]) -> BlockOutput:
        narrow = self._model.dtype
        wide = torch.float32 if narrow not in WIDE else narrow
        is_packed = any(isinstance(part, QuantizedLinear) for part in self.block.modules())
        block = self.block if narrow in WIDE else _copied(self.block, self._model.config).to(wide)
        exact = self._call(block, args, kwargs, wide)
        if narrow in WIDE:
            return BlockOutput(exact, exact)
        return BlockOutput(exact, self._call(block.to(narrow) if is_packed else self.block, args, kwargs, narrow))

    def _call(self, block: nn.Module, args: list[Any], kwargs: dict[str, Any], dtype: torch.dtype) -> Tensor:
        if self._rounds_rows:
            kwargs = {**kwargs, "past_key_values": _RoundedRows()}
        output = block(*_cast(args, dtype), **_cast(kwargs, dtype))
        if isinstance(output, tuple):
            self._rest[:] = [output[1:]]
        return first_output(output)


def _copied(block: nn.Module, config: Any) -> nn.Module:
    """Returns a copy of a block with dense matrices."""
    known = {**copies_of_empty_parts(block), id(config): config}
    for part in block.modules():
        if isinstance(part, QuantizedLinear):
            known[id(part)] = _Dense(part)
    return copy.deepcopy(block, known)


class _Dense(nn.Module):
    """A `QuantizedLinear` with its weights unpacked."""

    def __init__(self, packed: QuantizedLinear) -> None:
        super().__init__()
        self._matrix, bias = packed.matrix, packed.bias
        self.weight = nn.Parameter(packed.matrix.dequantized(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Turns (..., K) into (..., N) of the same dtype."""
        x = rounded_inputs(x, self._matrix) if self._matrix.input_bits == 8 else x
        return functional.linear(x, self.weight, self.bias)


class _RoundedRows:
    """A cache that keeps nothing, and rounds keys and values as the kernels store them in int8.

    Recurrent layers find no state, and what they would keep comes back as it is.
    """

    def update(self, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Returns both quantized."""
        return _rounded(key), _rounded(value)

    def get_conv_state(self, *_: Any, **__: Any) -> None:
        pass

    def get_recurrent_state(self, *_: Any, **__: Any) -> None:
        pass

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


def _rounded(rows: Tensor) -> Tensor:
    numbers, scale = round_rows(rows.flatten(0, -2))
    return (numbers * scale).view(rows.shape).to(rows.dtype)


def _widen_first(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Makes a rotary embedding return its cosines and sines in float32."""
    return (args[0].float(), *args[1:]) if args and isinstance(args[0], Tensor) else args


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.to(dtype).clamp(min=torch.finfo(dtype).min)  # a mask's lowest number must stay finite
    if isinstance(value, dict):
        return {key: _cast(each, dtype) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_cast(each, dtype) for each in value)
    return value
