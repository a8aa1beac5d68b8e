"""Where tests of kernels run: under Triton's interpreter, or compiled on a GPU if FORETOKEN_TEST_DEVICE=cuda asks."""

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from pairwise import pairwise
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.core.token_tree import TokenTree
from foretoken.decoder.base import PassOutput
from foretoken.decoder.cuda_graphs import GraphDecoder
from foretoken.decoder.torch_blocks import TritonOps
from foretoken.models.lean_weights import read_weights
from foretoken.trees.dynamic import DynamicExpansion
from foretoken.trees.expansion import TreeExpansion

DEVICE = "cuda" if os.environ.get("FORETOKEN_TEST_DEVICE") == "cuda" else "cpu"


class OnDevice(TorchDispatchMode):
    """Refuses whatever reads a tensor on the host, and notes down the shapes of what is allocated."""

    def __init__(self) -> None:
        super().__init__()
        self.allocated: list[tuple[int, ...]] = []

    def __enter__(self):
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        return super().__enter__()

    def __exit__(self, *details):
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
        return super().__exit__(*details)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}, func
        result = func(*args, **(kwargs or {}))
        known = [arg.untyped_storage().data_ptr() for arg in args if isinstance(arg, torch.Tensor)]
        is_new = isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in known
        if is_new and result.numel() and result.dtype is not torch.uint8:  # the interpreter copies storages as bytes
            self.allocated.append(tuple(result.shape))
        return result


class Rerun:
    """Captures as a CUDA graph does, without one: a replay runs the function again, into the tensors of the first run.

    A graph could not look at the contents of a tensor, and neither may a replay.
    """

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.num_runs = 0

    @property
    def num_captured(self) -> int:
        return len(self.shapes)

    def capture(self, run: Callable[[], Any]) -> Any:
        first = run()
        self.shapes.append(tuple(tensors_in(first)[0].shape))

        def again() -> None:
            self.num_runs += 1
            with OnDevice():
                second = run()
            for place, content in zip(tensors_in(first), tensors_in(second), strict=True):
                place.copy_(content)

        return first, again


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Those that a graph returns, whatever they are in."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for part in value for tensor in tensors_in(part)]
    if isinstance(value, TreeExpansion | DynamicExpansion):
        return tensors_in(list(vars(value).values()))
    if isinstance(value, TokenTree):
        return tensors_in([getattr(value, field.name) for field in fields(value)])
    return tensors_in([value.logits, value.features]) if isinstance(value, PassOutput) else []


def graph_decoder(capture: Any) -> Callable[..., GraphDecoder]:
    """Makes the decoder "lean-graphs" with our kernels on any device."""

    def made(model: Any, cache: Any, taps: Any) -> GraphDecoder:
        with mock.patch("foretoken.decoder.torch_blocks.elementwise_ops", return_value=TritonOps()):
            return GraphDecoder(read_weights(model, cache.capacity), cache, taps, capture=capture)

    return made


class GuardedMemory:
    """Puts numbers before and behind whatever `new_empty` gives; `check` looks whether they still stand there."""

    def __init__(self, monkeypatch) -> None:
        self._guards: list[torch.Tensor] = []
        plain, margin = torch.Tensor.new_empty, 1024

        def new_empty(like, *size, **options):
            if "device" in options:  # by the interpreter
                return plain(like, *size, **options)
            shape = plain(like, *size).shape
            whole = like.new_full((shape.numel() + 2 * margin,), 77, **options)
            self._guards += [whole[:margin], whole[-margin:]]
            return whole[margin:-margin].view(shape)

        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def check(self) -> None:
        """Nothing was written past what was allocated, and something was allocated."""
        assert self._guards
        for guard in self._guards:
            assert guard.eq(77).all()


def random_parents(nodes: int, reach: int, generator: torch.Generator) -> list[int]:
    """A tree whose nodes have a parent at most `reach` before them: 1 makes a chain, large numbers make stars."""
    draws = torch.rand(nodes, generator=generator).tolist()
    return [-1, *(i - 1 - int(draws[i] * min(i, reach)) for i in range(1, nodes))]


def few(*axes: Sequence[Any]) -> list[Any]:
    """Cases in which every two options meet, and all other combinations, which are slow."""
    chosen = pairwise(*axes)
    return [*chosen, *(pytest.param(*case, marks=pytest.mark.slow) for case in product(*axes) if case not in chosen)]
