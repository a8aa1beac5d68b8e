"""Decoder blocks as captured graphs, run again with other inputs, slots, lengths and trees."""

import random

import pytest
import torch

pytest.importorskip("triton")

from decoder.test_block_stack import CAPACITY, OPTIONS, SLOTS, E, chains, in_dtype, numbers, side_of, slow_of, two
from heads.fed_prefix import GROUPS, Fed, block
from kernel_device import DEVICE, Rerun

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.block_stack import BlockStack

if DEVICE == "cuda":
    pytest.skip("what it is compared with lies on the CPU", allow_module_level=True)


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("foretoken.decoder.fused_linear.is_packable", lambda weight: False)


@pytest.mark.parametrize("name", GROUPS)
def test_ragged_slots_that_come_and_go(name, monkeypatch) -> None:
    """What `test_prefix_block` asks of the block in torch's operations, NaN in whatever is not committed included."""
    monkeypatch.setattr("foretoken.decoder.cuda_graphs._LEAST_BOUND", 64)  # fewer programs for the interpreter
    dice, capture = random.Random(3), Rerun()
    fed = Fed(block(*GROUPS[name]), torch.float32, capture=capture)
    for slot in range(3):
        fed.begin(slot, seed=slot)
    for turn in range(8):
        counts = {}
        for slot in dice.sample(range(3), dice.randint(1, 3)):
            if fed.length[slot] > 60:
                fed.begin(slot, seed=10 * turn + slot)
            counts[slot] = dice.randint(1, 50 if fed.length[slot] == 0 else 5)
        fed.commit(counts)
        known = [slot for slot in range(3) if fed.length[slot]]
        fed.check(dice.sample(known, dice.randint(1, len(known))))
    assert capture.num_runs > len(capture.shapes) > 1
    assert all(tokens & (tokens - 1) == 0 for tokens, *_ in capture.shapes), "powers of two"


def test_long_parts_are_not_captured() -> None:
    capture = Rerun()
    fed = Fed(block(), torch.float32, capture=capture)
    fed.begin(0, seed=1)
    fed.commit({0: 33})
    fed.check([0])
    assert capture.num_runs == 1, "the last position, behind 32 that are appended"
    fed.commit({0: 32})
    fed.check([0])
    assert capture.num_runs == 2


@pytest.mark.parametrize("option", ["two inputs", "two inputs, one normed"])
def test_replays_read_the_second_input(option, monkeypatch) -> None:
    """Two sequences in pieces of as many tokens, or one fewer, then a tree; NaN in rows that nobody committed."""
    monkeypatch.setattr("foretoken.decoder.cuda_graphs._LEAST_BOUND", 64)
    layers, capture = two(OPTIONS[option]), Rerun()
    stack = BlockStack(in_dtype(layers, torch.float32), num_slots=SLOTS, capacity=CAPACITY, capture=capture)
    assert stack.backend == "graphs"
    texts = [numbers(9, E, seed=70, scale=1.0), numbers(9, E, seed=71, scale=1.0)]
    known = [slow_of(layers, text)[3] for text in texts]

    def check(found, expected) -> None:
        assert (found.double() - expected).abs().max() <= 2e-5 * expected.abs().max()

    for slot in range(SLOTS):
        stack.cache.poison(slot, 0)
    at = 0
    for count in (4, 3, 2):
        part = torch.cat([text[at : at + count] for text in texts])
        found = stack.run(part, chains([count] * 2, slots=[2, 0], prefix_lens=[at] * 2), side_of(layers, part))
        check(found, torch.cat([each[at : at + count] for each in known]))
        at += count
    parents = [-1, 0, 0, 1, 2, 4, 4, 1]
    nodes = numbers(8, E, seed=72, scale=1.0)
    tree = TokenTree.from_rows([TreeRow([0] * 8, parents)])
    work = Pass.of_tree(tree, slots=[0], prefix_lens=[at], last_position=CAPACITY - 1)
    found = stack.run(nodes, work, side_of(layers, nodes))
    for path in ([0, 1, 3], [0, 2, 4, 6]):
        check(found[path], slow_of(layers, torch.cat([texts[1], nodes[path]]))[3][9:])
    assert capture.num_runs == 4 > capture.num_captured
