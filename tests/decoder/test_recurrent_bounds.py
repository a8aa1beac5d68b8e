"""What the kernels of recurrent layers are handed: arguments and sizes that do not fit are refused before any write."""

from collections import deque
from collections.abc import Callable
from ctypes import addressof, byref, c_int64, c_void_p
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from tree_decoding import prefill, tiny_runner

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.arguments import PassArguments, Status
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.blocks import LeanWeights
from foretoken.decoder.library import native_library
from foretoken.decoder.native import NativeDecoder, PreparedPass
from foretoken.decoder.native_states import StateMemory
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native


def ready_pass() -> tuple[Runner, PreparedPass]:
    """Two sequences, each with one token to compute again and a tree; all their memory is zeros."""
    runner = tiny_runner("lfm2", runner="lean-native")
    for slot in range(2):
        prefill(runner, slot, list(range(10)))
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8], [-1, 0, 0, 1])] * 2)
    ready = runner.decoder.prepared(runner.verification([0, 1], [10, 10], tree))
    assert ready.states is not None
    assert ready.states.num_replayed == 2
    assert ready.states.settled == [1, 1]
    for block in ready.states.made:
        block.tensor.zero_()
    return runner, ready


def numbers(*values: int) -> Callable[[PassArguments], Any]:
    return lambda _: (c_int64 * len(values))(*values)


def without(name: str) -> Callable[[PassArguments], Any]:
    """The addresses of an array, the second one null."""
    return lambda arguments: (c_void_p * 2)(c_void_p.from_address(getattr(arguments, name)).value, None)


WRONG: dict[str, tuple[str, Callable[[PassArguments], Any], Status]] = {
    "settled beyond the nodes": ("settled", numbers(1, 5), Status.SEQUENCES),
    "settled below zero": ("settled", numbers(-1, 1), Status.SEQUENCES),
    "settled that is huge": ("settled", numbers(1, 2**63 - 1), Status.SEQUENCES),
    "settled with a branch": ("settled", numbers(1, 3), Status.PARENTS),
    "settled before another child": ("settled", numbers(2, 1), Status.PARENTS),
    "known rows that begin late": ("known_starts", numbers(1, 2, 2), Status.SEQUENCES),
    "known rows that begin early": ("known_starts", numbers(-1, 1, 2), Status.SEQUENCES),
    "known rows that go back": ("known_starts", numbers(0, 2, 1), Status.SEQUENCES),
    "no array of blocks to begin with": ("states_from", lambda _: None, Status.MISSING),
    "no array of blocks to make": ("states_to", lambda _: None, Status.MISSING),
    "no array of rows": ("rows_to", lambda _: None, Status.MISSING),
    "no array of known rows": ("known", lambda _: None, Status.MISSING),
    "no array of their starts": ("known_starts", lambda _: None, Status.MISSING),
    "no array of settled nodes": ("settled", lambda _: None, Status.MISSING),
    "no block for settled nodes": ("states_to", without("states_to"), Status.MISSING),
    "no memory for rows": ("rows_to", without("rows_to"), Status.MISSING),
    "a known row without memory": ("known", without("known"), Status.MISSING),
}


def call(ready: PreparedPass) -> Status:
    memory = torch.zeros(1 << 22, dtype=torch.uint8)
    ready.arguments.workspace = memory.data_ptr()
    return Status(native_library().foretoken_decode(byref(ready.model), byref(ready.arguments)))


@pytest.mark.parametrize("what", WRONG)
def test_states_that_do_not_fit_are_refused_and_nothing_is_written(what: str) -> None:
    name, change, status = WRONG[what]
    runner, ready = ready_pass()
    own, array = getattr(ready.arguments, name), change(ready.arguments)
    caches = [each.clone() for each in (*runner.cache.keys, *runner.cache.values)]
    setattr(ready.arguments, name, None if array is None else addressof(array))
    assert call(ready) is status
    assert ready.states is not None
    assert not any(block.tensor.any() for block in ready.states.made)
    assert all(map(torch.equal, caches, (*runner.cache.keys, *runner.cache.values)))
    setattr(ready.arguments, name, own)
    assert call(ready) is Status.DONE
    assert all(block.tensor.any() for block in ready.states.made)


def test_a_last_layer_without_attention_has_no_keys_to_append() -> None:
    _, ready = ready_pass()
    ready.arguments.is_append = 1
    assert call(ready) is Status.MISSING


def mixer_changed(weights: LeanWeights, **changes: Any) -> LeanWeights:
    """The first block's mixer has other sizes."""
    first, *rest = weights.layers.blocks
    mixer: Any = first.mixer  # type: ignore[union-attr]
    made = replace(first, mixer=replace(mixer, **changes))
    return replace(weights, layers=replace(weights.layers, blocks=[made, *rest]))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"columns": (65, 104)}, "reads 104 numbers from 65 on. Expected them within 168"),
        ({"columns": (0, 105)}, "reads 64 numbers from 105 on. Expected them within 168"),
        ({"columns": (-1, 104)}, "from -1 on"),
        ({"channels": (0, 16, 33)}, "reads 64 numbers from 33 on. Expected them within 96"),
        ({"channels": (0, 81, 32)}, "reads 16 numbers from 81 on"),
        ({"key_dim": 84}, "reads 168 numbers from 0 on. Expected them within 96"),
        ({"beta_scale": 0.0, "columns": (69, 0)}, "reads 100 numbers from 69 on"),
    ],
)
def test_sizes_of_recurrent_layers_that_do_not_fit_are_refused(changes: dict[str, Any], what: str) -> None:
    model = wrap_model(tiny_model("qwen3_5"), name="tiny")
    weights, cache = read_weights(model, 96), Runner(model, num_slots=1, runner="lean-native").cache
    NativeDecoder(mixer_changed(weights), cache, [])
    with pytest.raises(UnsuitableError, match=what):
        NativeDecoder(mixer_changed(weights, **changes), cache, [])


def test_the_order_of_a_convolutions_rows_is_a_permutation() -> None:
    model = wrap_model(tiny_model("lfm2"), name="tiny")
    with pytest.raises(ValueError, match=r"order of the projection's rows is \(3, 1, 0\)"):
        mixer_changed(read_weights(model, 96), order=(3, 1, 0))


class TakenByAnother(deque[torch.Tensor]):
    """Another thread takes the last block between the count and the call."""

    def popleft(self) -> torch.Tensor:
        self.clear()
        return super().popleft()


def test_threads_share_memory_of_states() -> None:
    memory = StateMemory(2)
    memory._idle = TakenByAnother([torch.zeros(4)])
    assert memory.take(4).numel() == 4
