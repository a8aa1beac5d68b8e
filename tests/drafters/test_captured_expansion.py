"""Trees from a captured graph are the trees that the same call gives without one."""

from collections.abc import Iterator
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.head_drafter import fill_by_steps
from foretoken.drafters.levels import CapturedExpansion
from foretoken.heads.hydra import HydraConfig, HydraHeads
from foretoken.models.parts import TargetParts
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees import dynamic
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import AnyShape, DynamicShape

BATCH, WIDTH, VOCAB_SIZE = 2, 8, 29
SHAPE = TreeShape.from_choices([(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0)])
SHAPES: dict[str, AnyShape] = {"static": SHAPE, "dynamic": DynamicShape(top_k=3, depth=3, max_nodes=9)}
SAMPLED = {"temperature": 0.7}


class BlindRun(TorchDispatchMode):
    """Refuses to tell what a tensor holds, as a graph would."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in {torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero}, func
        return func(*args, **(kwargs or {}))


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those of lists, tuples and trees, whatever they hold."""
    if isinstance(value, TokenTree):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)


class Rerun:
    """Runs the function again, into the tensors of the first run."""

    num_captured = 0

    def capture(self, run: Any) -> Any:
        self.num_captured += 1
        first = run()

        def again() -> None:
            with BlindRun():
                second = run()
            places, contents = (tensors_in(list(vars(made[0]).values())) for made in (first, second))
            for place, content in zip(places, contents, strict=True):
                place.copy_(content)

        return first, again


@pytest.fixture(scope="module")
def fill() -> Any:
    generator = torch.Generator().manual_seed(0)
    head = HydraHeads(HydraConfig(hidden_size=WIDTH, vocab_size=VOCAB_SIZE, num_heads=3, num_layers=2))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    weight = torch.randn(VOCAB_SIZE, WIDTH, generator=generator)
    parts = TargetParts(embed=lambda ids: weight[ids], lm_head=lambda x: x @ weight.T, lm_head_weight=weight)
    return partial(fill_by_steps, head, parts)


def call(seed: int, params: list[dict[str, Any]], is_coupled: list[bool]) -> tuple[Tensor, DraftDraws, Tensor]:
    """Roots, draws and states of one proposal."""
    generator = torch.Generator().manual_seed(seed)
    requests = [
        SamplingRequest(params=SamplingParams(**given), seed=17 * seed + row) for row, given in enumerate(params)
    ]
    batch = SamplingBatch.build(requests, VOCAB_SIZE)
    roots = torch.randint(VOCAB_SIZE, (BATCH,), generator=generator)
    draws = DraftDraws.build(batch, is_coupled, torch.tensor([seed, 40 + seed]))
    return roots, draws, torch.randn(BATCH, WIDTH, generator=generator)


@pytest.mark.parametrize("room", [[3, 3], [3, 2]], ids=["whole", "cut"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("params", "is_coupled"),
    [
        ([{"temperature": 0.0}] * 2, [False, False]),
        ([SAMPLED, {"temperature": 1.4}], [True, True]),
        ([SAMPLED, {"temperature": 1.4}], [False, False]),
        ([SAMPLED, {"temperature": 0.0}], [True, False]),
        ([{**SAMPLED, "repetition_penalty": 1.3}, SAMPLED], [True, False]),
        ([{**SAMPLED, "top_k": 3}, {**SAMPLED, "top_k": 5}], [True, True]),
        ([{**SAMPLED, "top_p": 0.5}, {**SAMPLED, "min_p": 0.1}], [True, False]),
    ],
)  # fmt: skip
def test_captured_trees_are_the_same(
    fill: Any,
    params: list[dict[str, Any]],
    is_coupled: list[bool],
    shape: str,
    room: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamic, "reads_are_free", lambda _: False)
    capture = Rerun()
    captured = CapturedExpansion(fill, torch.device("cpu"), capture=capture)
    plain = CapturedExpansion(fill, torch.device("cpu"))
    seen = set()
    with torch.inference_mode():
        for seed in range(4):
            roots, draws, state = call(seed, params if seed % 2 else params[::-1], is_coupled[:: 1 if seed % 2 else -1])
            ours, theirs = (
                each.expand(SHAPES[shape], roots, draws, [state])[0].finish([0, 1], room, roots.tolist())
                for each in (captured, plain)
            )
            for name in ("tokens", "parents", "depths", "scores"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name))
            assert (ours.distributions is None) == (theirs.distributions is None)
            if ours.distributions is not None and theirs.distributions is not None:
                for name in ("kinds", "rows", "row_of"):
                    assert torch.equal(getattr(ours.distributions, name), getattr(theirs.distributions, name))
            seen.add(tuple(ours.tokens.flatten().tolist()))
    assert len(seen) == 4, "states and seeds differ, and so do trees"
    assert capture.num_captured == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_is_a_recording_of_its_own_from_its_second_use_on(fill: Any, shape: str) -> None:
    capture = Rerun()
    captured = CapturedExpansion(fill, torch.device("cpu"), capture=capture)
    with torch.inference_mode():
        for num_captured in (0, 3, 3):
            for depth in (1, 2, 3):
                roots, draws, state = call(1, [SAMPLED] * 2, [True, True])
                captured.expand(SHAPES[shape].truncated(depth), roots, draws, [state])
            assert capture.num_captured == num_captured
