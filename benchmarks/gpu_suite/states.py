"""Times the recurrence of one layer with the shapes of Qwen3.5-35B-A3B: our kernel, and torch's loop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.timing import interleave, prepare
from foretoken.core.backend import integers_on
from foretoken.decoder.torch_mixers import DepthFirst, HeadInputs, Items, Levels, MixerSizes

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work

_SHAPES = ((1, 1, "chain"), (1, 16, "tree"), (8, 1, "chain"), (8, 16, "tree"), (1, 64, "tree"), (1, 512, "chain"))
_LARGEST_DIFFERENCE = 1e-4  # relative, in the norm


def run(work: Work) -> None:
    """Emits `states`."""
    state = (4, 8, 16) if work.is_rehearsal else (32, 128, 128)
    sizes = MixerSizes(1, 3, 1, state, torch.float32, work.device)
    for batch, nodes, kind in _SHAPES[:2] if work.is_rehearsal else _SHAPES:
        calls = candidates(sizes, batch, nodes, kind, work.seed)
        ours, theirs = (call() for call in calls.values())
        difference = float((ours.sum(0) - theirs.sum(0)).norm() / theirs.sum(0).norm())  # in any order of items
        assert difference < _LARGEST_DIFFERENCE, f"they differ by {difference:.1e}"
        programs = {name: prepare([call], work.device) for name, call in calls.items()}
        times = interleave(programs, work.device, seconds=1.0)
        kernels: dict[str, Any] = {name: each.as_dict() for name, each in times.items()}
        work.emit("states", {"batch": batch, "nodes": nodes, "shape": kind, "kernels": kernels})


def candidates(sizes: MixerSizes, batch: int, nodes: int, kind: str, seed: int) -> dict[str, Callable[[], Tensor]]:
    """Every way, by name; a node's children in a tree follow three by three, and the root's state is kept."""
    from foretoken.decoder import triton_kernels

    assert sizes.state is not None, "as given"
    (heads, keys, values), generator = sizes.state, torch.Generator(sizes.device).manual_seed(seed)
    numbers = partial(torch.randn, generator=generator, device=sizes.device)
    parents = [node - 1 if kind == "chain" else (node - 1) // 3 for node in range(1, nodes)]
    above = [each for at in range(batch) for each in (~at, *(at * nodes + parent for parent in parents))]
    states = [numbers(1, *sizes.state) for _ in range(2 * batch)]
    items = Items(above, states[:batch], [(at * nodes, each) for at, each in enumerate(states[batch:])])
    query, key = (numbers(len(above), heads // 2, keys) / keys for _ in range(2))
    inputs = query, key, numbers(len(above), heads, values)
    decay, rate = (numbers(len(above), heads).sigmoid() for _ in range(2))
    calls: dict[str, Callable[[], Tensor]] = {}
    for name, way in (("kernel", DepthFirst(items, sizes, triton_kernels)), ("torch", Levels(items, sizes))):
        way.tables = [integers_on(each, sizes.device) for each in way.lists]
        order = torch.tensor(way.order, device=sizes.device)
        heads_in_order = HeadInputs(*(each[order] for each in inputs))
        calls[name] = partial(way.read, 0, heads_in_order, decay[order], rate[order], is_delta=True)
    return calls
