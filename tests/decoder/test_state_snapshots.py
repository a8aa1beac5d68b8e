"""Which states inside texts are kept: by bytes, by use, about every `SPACING` tokens of a prompt."""

import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from tree_decoding import prefill, random_tokens, tiny_runner

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import state_snapshots
from foretoken.decoder.state_snapshots import SPACING, Snapshots


class Block(NamedTuple):
    """A state of 40 bytes in some memory."""

    memory: Tensor

    def tensors(self) -> Sequence[Tensor]:
        return [self.memory]


def block() -> Block:
    return Block(torch.zeros(10))


def kept(snapshots: Snapshots, slot: int) -> list[int]:
    """The lengths at which states are kept, found from behind."""
    lengths, length = list[int](), 1 << 40
    while length := snapshots.longest(slot, length - 1):
        lengths.insert(0, length)
    return lengths


def test_the_state_that_was_used_least_recently_goes_first() -> None:
    snapshots = Snapshots(2, most_bytes=3 * 40)
    states = [block() for _ in range(5)]
    for at, state in enumerate(states[:3]):
        snapshots.keep(at % 2, 10 + at, state)
    assert snapshots.find(0, 10) is states[0]
    snapshots.keep(1, 50, states[3])
    assert (kept(snapshots, 0), kept(snapshots, 1)) == ([10, 12], [50])
    snapshots.keep(1, 50, states[4])  # in place of the other one
    assert snapshots.find(1, 50) is states[4]
    assert (snapshots.num_bytes, snapshots.find(1, 11)) == (120, None)


def test_memory_of_several_states_counts_once() -> None:
    snapshots, shared = Snapshots(2, most_bytes=100), torch.zeros(10)
    snapshots.keep(0, 7, Block(shared))
    snapshots.keep(0, 8, Block(shared))
    snapshots.copy(0, 1, 7)
    assert (snapshots.num_bytes, kept(snapshots, 1)) == (40, [7])
    snapshots.cut(0, 0)
    assert (snapshots.num_bytes, kept(snapshots, 0)) == (40, [])
    snapshots.keep(0, 9, block())
    snapshots.keep(0, 10, block())  # the first goes, in the slot that has it
    assert (snapshots.num_bytes, kept(snapshots, 0), kept(snapshots, 1)) == (80, [9, 10], [])


@pytest.mark.parametrize("most_bytes", [0, 39])
def test_states_that_no_memory_holds(most_bytes: int) -> None:
    snapshots = Snapshots(1, most_bytes=most_bytes)
    snapshots.keep(0, 7, block())
    assert (snapshots.num_bytes, snapshots.longest(0, 7)) == (0, 0)


def test_ends_of_chunks_are_kept_some_tokens_apart() -> None:
    snapshots, last = Snapshots(1), 512 * 11 - 1
    for end in range(512, last + 2, 512):
        snapshots.keep_end(0, end - 1, block())
    lengths = kept(snapshots, 0)
    assert lengths == [1023, 2047, 3071, 4095, 5119, last]
    snapshots.keep_end(0, last + 8, block())  # the last one goes if the prompt goes on
    assert kept(snapshots, 0) == [*lengths[:-1], last + 8]
    snapshots.keep(0, 4100, block())
    snapshots.keep_end(0, 4101, block())
    assert 4100 in kept(snapshots, 0), "what was asked for stays"
    assert snapshots.longest(0, 4099) == 4095
    assert SPACING <= 1023


@pytest.mark.parametrize("route", ["generic", "lean-native"])
def test_a_text_begins_at_any_snapshot(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a long prompt, in the slot and copied, have the logits of a text that was read anew."""
    monkeypatch.setattr(state_snapshots, "SPACING", 12)
    runner, rng = tiny_runner("qwen3_5", runner=route, prefill_chunk=6), random.Random(7)
    prompt, tree = random_tokens(rng, 40), TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])])
    prefill(runner, 0, prompt, chunk=6)
    runner.verify([0], [40], tree)
    runner.commit([0], [40], [[1]])
    states = runner.cache.states
    assert states is not None
    lengths = kept(states.snapshots, 0)
    assert lengths == [17, 29, 39]
    fresh = tiny_runner("qwen3_5", runner=route)
    for length in lengths:
        text = [*prompt[:length], *random_tokens(rng, 9)]
        prefill(fresh, 0, text)
        expected = fresh.verify([0], [length + 9], tree).logits
        assert runner.cache.reusable(0, length + 1) == length
        runner.copy_prefix(0, 1, length)
        runner.prefill(1, text[length:], length)
        found = runner.verify([1], [length + 9], tree).logits
        assert torch.equal(found, expected) if route == "lean-native" else torch.allclose(found, expected, 1e-4, 1e-4)
    runner.cache.trim(0, 17)  # the slot goes on in place
    prefill(fresh, 0, prompt[:17])
    assert torch.allclose(
        runner.verify([0], [17], tree).logits, fresh.verify([0], [17], tree).logits, rtol=1e-4, atol=1e-4
    )
    assert kept(states.snapshots, 0) == [17]


@pytest.mark.parametrize("route", ["generic", "lean-native"])
def test_a_free_slot_keeps_its_committed_state_and_snapshots_alone(route: str) -> None:
    runner, prompt = tiny_runner("bamba", runner=route), random_tokens(random.Random(2), 20)
    prefill(runner, 0, prompt)
    runner.verify([0], [20], TokenTree.from_rows([TreeRow([5, 6, 7], [-1, 0, 0])]))
    states = runner.cache.states
    assert states is not None
    runner.cache.trim(0, 20)
    assert states._last[0] is None
    assert [runner.cache.reusable(0, length) for length in (25, 20, 19, 18)] == [20, 20, 19, 0]
    runner.cache.trim(0, 0)
    assert states._committed[0].state is None
    assert (states.snapshots.num_bytes, runner.cache.reusable(0, 20)) == (0, 0)
