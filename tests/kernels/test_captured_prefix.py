"""The decoder block of Hydra++ as a captured graph, run again with other slots, lengths and features."""

from __future__ import annotations

import random

import pytest
import torch

pytest.importorskip("triton")

from heads.fed_prefix import GROUPS, Fed, block
from kernel_device import DEVICE, OnDevice

if DEVICE == "cuda":
    pytest.skip("the texts it is compared with lie on the CPU", allow_module_level=True)


class Rerun:
    """Runs the function again, into the tensors of the first run, and lets it look at no content."""

    def __init__(self):
        self.shapes, self.num_runs = [], 0

    def capture(self, run):
        first = run()
        self.shapes.append(tuple(first.shape))

        def again():
            self.num_runs += 1
            with OnDevice():
                first.copy_(run())

        return first, again


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("foretoken.decoder.torch_blocks.is_packable", lambda weight: False)


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
