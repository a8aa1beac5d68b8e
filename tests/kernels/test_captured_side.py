"""A block with a second input as a captured graph, run again with other inputs, slots and trees."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from decoder.test_block_stack import CAPACITY, OPTIONS, SLOTS, E, chains, in_dtype, numbers, side_of, slow_of, two
from kernel_device import DEVICE, OnDevice

from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.block_stack import BlockStack

if DEVICE == "cuda":
    pytest.skip("what it is compared with lies on the CPU", allow_module_level=True)


class Rerun:
    """Runs the function again, into the tensors of the first run, and lets it look at no content."""

    def __init__(self):
        self.num_captured = self.num_runs = 0

    def capture(self, run):
        first = run()
        self.num_captured += 1

        def again():
            self.num_runs += 1
            with OnDevice():
                first.copy_(run())

        return first, again


@pytest.mark.parametrize("option", ["two inputs", "two inputs, one normed"])
def test_replays_read_the_second_input(option, monkeypatch) -> None:
    """Two sequences in pieces of as many tokens, or one fewer, then a tree; NaN in rows that nobody committed."""
    monkeypatch.setattr("foretoken.decoder.torch_blocks.is_packable", lambda weight: False)
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
