"""The kernel of recurrent states against its definition in float64, and against torch's loop."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from kernel_device import DEVICE, GuardedMemory

from foretoken.core.backend import integers_on
from foretoken.decoder import torch_mixers, triton_kernels
from foretoken.decoder.torch_mixers import DepthFirst, HeadInputs, Items, Levels, MixerSizes

LAYERS, LAYER = 2, 1
# Two tiles of columns, the second of three; neither size is a power of two. Two heads share keys.
SIZES = MixerSizes(LAYERS, window=3, row=1, state=(4, 5, 11), dtype=torch.float32, device=torch.device(DEVICE))
SMALL = SIZES._replace(state=(2, 3, 2))
# Of each sequence, the parents of its items; -1: an item that begins with the sequence's state.
PASSES: dict[str, list[list[int]]] = {
    "tokens": [[-1], [-1], [-1]],
    "chains": [[-1, 0, 1], [-1, 0, 1, 2, 3]],
    "trees": [[-1, 0, 0, 1, 1, 2, 5, 6, 7], [], [-1], [-1, 0, -1, 2, 2, -1]],
    "random": [[random.Random(9 * at + seed).randrange(-1, at) for at in range(8)] for seed in range(2)],
}


class Inputs(NamedTuple):
    """Those of a layer, and the items they are of."""

    sizes: MixerSizes
    items: Items
    heads: HeadInputs
    decay: Tensor
    rate: Tensor


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Iterator[None]:
    """Scratch memory that is read before it is written shows as NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def made(name: str, seed: int = 0, sizes: MixerSizes = SIZES) -> Inputs:
    """A pass with random states before every other sequence; some sequences keep the state of an item, or the first."""
    generator = torch.Generator().manual_seed(seed)
    above, before, ends, (heads, keys, values) = list[int](), list[Any](), list[Any](), sizes.state

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    for sequence, parents in enumerate(PASSES[name]):
        first, count = len(above), len(parents)
        above += [first + parent if parent >= 0 else ~sequence for parent in parents]
        before.append(numbers(LAYERS, *sizes.state) if sequence % 2 else None)
        end = (~sequence, first, None, first + count - 1, first + count // 2)[(sequence + seed) % 5]
        memory = torch.full((LAYERS, *sizes.state), torch.nan, device=DEVICE)
        ends.append(None if end is None or not count else (end, memory))
    side_by_side = numbers(len(above), heads * (keys + values))  # as in the outputs of a convolution
    size = heads // 2 * keys
    query, key, value = side_by_side.split([size, size, heads * values], 1)
    query, key = (each.unflatten(1, (-1, keys)) / keys for each in (query, key))
    decay, rate = (numbers(len(above), heads).sigmoid() for _ in range(2))
    items = Items(above, before, ends)
    return Inputs(sizes, items, HeadInputs(query, key, value.unflatten(1, (-1, values))), decay, rate)


def plain(inputs: Inputs, *, is_delta: bool) -> tuple[Tensor, list[Tensor]]:
    """What the items read, and their states, by the definition."""
    items, states, read = inputs.items, list[Tensor](), list[Tensor]()
    for item, parent in enumerate(items.above):
        state = states[parent] if parent >= 0 else begun(inputs, ~parent)
        query, key = (each[item].double().repeat_interleave(2, 0) for each in inputs.heads[:2])
        state = inputs.decay[item].double()[:, None, None] * state
        value = inputs.heads.value[item].double()
        if is_delta:
            value = value - torch.einsum("hk,hkv->hv", key, state)
        state = state + torch.einsum("hk,h,hv->hkv", key, inputs.rate[item].double(), value)
        states.append(state)
        read.append(torch.einsum("hk,hkv->hv", query, state))
    return torch.stack(read), states


def begun(inputs: Inputs, sequence: int) -> Tensor:
    before = inputs.items.before[sequence]
    return torch.zeros(inputs.sizes.state, device=DEVICE).double() if before is None else before[LAYER].double()


def read(recurrence: Levels | DepthFirst, inputs: Inputs, *, is_delta: bool) -> Tensor:
    """What the items read, in their own order."""
    order = recurrence.order
    recurrence.tables = [integers_on(each, SIZES.device) for each in recurrence.lists]
    heads = HeadInputs(*(each.flatten(1)[order].view(len(order), *each.shape[1:]) for each in inputs.heads))
    found = recurrence.read(LAYER, heads, inputs.decay[order], inputs.rate[order], is_delta=is_delta)
    return found[torch.tensor(order).argsort()]


def assert_right(recurrence: Levels | DepthFirst, inputs: Inputs, *, is_delta: bool) -> None:
    wanted, states = plain(inputs, is_delta=is_delta)
    assert torch.allclose(read(recurrence, inputs, is_delta=is_delta).double(), wanted, rtol=1e-5, atol=1e-6)
    for item, memory in filter(None, inputs.items.ends):
        state = states[item] if item >= 0 else begun(inputs, ~item)
        assert torch.allclose(memory[LAYER].double(), state, rtol=1e-5, atol=1e-6)
        assert memory[1 - LAYER].isnan().all(), "other layers are left alone"


@pytest.mark.parametrize("is_delta", [True, False])
@pytest.mark.parametrize("name", PASSES)
def test_items_read_the_states_of_their_paths(name: str, is_delta: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the kernel and in torch; NaN in scratch memory, and in that of states which are kept."""
    inputs = made(name, seed=int(is_delta))
    assert_right(Levels(inputs.items, SIZES), inputs, is_delta=is_delta)
    for end in filter(None, inputs.items.ends):
        end[1].fill_(torch.nan)
    walk = DepthFirst(inputs.items, SIZES, triton_kernels)
    memory = GuardedMemory(monkeypatch)
    assert_right(walk, inputs, is_delta=is_delta)
    memory.check()
    assert len(walk._scratch) == 0 or name in ("trees", "random"), "chains need no scratch memory"


def test_bits_depend_on_the_path_alone() -> None:
    """An item has the bits that it has alone, or in a chain, whatever else is in the pass; so has a state."""
    inputs = made("trees")
    together = read(DepthFirst(inputs.items, SIZES, triton_kernels), inputs, is_delta=True)
    for leaf in (4, 8, 14):
        path = [leaf]
        while (parent := inputs.items.above[path[0]]) >= 0:
            path.insert(0, parent)
        before = inputs.items.before[~parent]
        memory = torch.full((LAYERS, *SIZES.state), torch.nan, device=DEVICE)
        items = Items([*range(-1, len(path) - 1)], [before], [(0, memory)])
        heads = HeadInputs(*(each[path] for each in inputs.heads))
        chain = Inputs(SIZES, items, heads, inputs.decay[path], inputs.rate[path])
        assert torch.equal(read(DepthFirst(items, SIZES, triton_kernels), chain, is_delta=True), together[path])
        items = Items([-1] * len(path), [memory], [None])  # all begin behind the first one
        assert torch.equal(read(DepthFirst(items, SIZES, triton_kernels), chain, is_delta=True)[1], together[path[1]])


def test_scratch_memory_is_small_and_shared_by_no_two_sequences() -> None:
    """A tree of n items needs log2(n) states at most, and each item but those behind branches follows its parent."""
    for seed in range(30):
        rng, above, used, before = random.Random(seed), list[int](), set[int](), 0
        counts = [rng.randrange(1, 40) for _ in range(3)]
        for sequence, count in enumerate(counts):
            first = len(above)
            above += [~sequence, *(first + rng.randrange(item) for item in range(1, count))]
        walk = DepthFirst(Items(above, [None] * 3, [None] * 3), SIZES, triton_kernels)
        sources, targets = walk.lists[1][::2], walk.lists[1][1::2]
        for count in counts:
            own = slice(before, before := before + count)
            assert {above[item] < 0 for item in walk.order[own][1:]} <= {False}
            numbers = {target for target in targets[own] if target >= 0}
            assert 2 ** len(numbers) <= count
            assert not numbers & used
            used |= numbers
            assert sum(source >= 0 for source in sources[own]) == sum(
                max(above.count(item) - 1, 0) for item in walk.order[own]
            )
        assert len(walk._scratch) == len(used)


KERNEL, HOST = triton_kernels, torch_mixers
MUTANTS = {  # (module, what it says, what a mutant says)
    "the state of a sibling": (KERNEL, "if source >= 0:", "if source >= 99:"),
    "a second beginning goes on behind the first": (KERNEL, "if source == -2:", "if source == -3:"),
    "a state that is kept one step too far": (KERNEL, "if item == last:", "if item == last + 1:"),
    "the state before the first item is not kept": (KERNEL, "if last == first - 1:", "if last == first - 9:"),
    "what a token adds decays at once": (
        KERNEL, "(added * tl.load(rate", "(added * tl.load(decay + item * HEADS + head) * tl.load(rate",
    ),
    "the delta rule reads a state before its decay": (
        KERNEL, "tl.sum(state * k[:, None], 0)", "tl.sum(state * k[:, None], 0) / tl.load(decay + item * HEADS + head)",
    ),
    "a token reads the state before it": (
        KERNEL, "tl.sum(state * q[:, None], 0)", "tl.sum((state - k[:, None] * added[None, :]) * q[:, None], 0)",
    ),
    "heads share keys in turns": (KERNEL, "head // SHARED", "head % SHARED"),
    "another layer's states": (KERNEL, "layer.to(tl.int64) * size", "0 * size"),
    "a state is overwritten before its last use": (HOST, "used + (target >= 0 and place > 0)", "used"),
    "a state is given up too early": (HOST, "target >= 0 and place > 0", "target >= 0 and place > 1"),
}  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_caught(mutant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, known, wrong = MUTANTS[mutant]
    text = Path(source.__file__).read_text()
    assert known in text
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(known, wrong))
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "mutant", module)
    spec.loader.exec_module(module)
    sound, inputs = (made("trees", seed=3, sizes=SMALL) for _ in range(2))
    assert_right(DepthFirst(sound.items, SMALL, triton_kernels), sound, is_delta=True)
    walk = module.DepthFirst if source is HOST else DepthFirst
    with pytest.raises(AssertionError):
        assert_right(walk(inputs.items, SMALL, module if source is KERNEL else triton_kernels), inputs, is_delta=True)
