"""What a caller has switched on in torch changes neither its own texts nor those of others."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import draft_model, llm, noisy, target
from pairwise import slow_products

from foretoken import LLM, SamplingParams
from foretoken.core.backend import _autocast_nesting, own_torch_state, restored_torch_state
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import TargetReads

PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=20, repetition_penalty=1.1, logprobs=1)
PROMPTS = [[5, 6, 5, 6], [7, 8]]
STATES: dict[str, Callable[[], AbstractContextManager]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "default device": lambda: torch.device("meta"),
    "grad": torch.enable_grad,
}
RUNNERS = {"generic": torch.float32, "lean-native": torch.float32, "lean-stock": torch.float32}


def made(runner: str, *, is_drafting: bool) -> LLM:
    """An engine, with a draft model that keeps a KV cache of its own or without."""
    draft = {"drafter": draft_model(noisy(dtype=torch.float32), num_speculative_tokens=3)} if is_drafting else {}
    return llm(draft, module=target("llama", torch.float32), runner=runner, max_num_seqs=2)


@cache
def wanted(runner: str) -> list[list[int]]:
    """What the prompts are completed to where nothing is switched on."""
    return [o.outputs[0].token_ids for o in made(runner, is_drafting=False).generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    ("runner", "state", "is_drafting"), slow_products(list(RUNNERS), list(STATES), [False, True], each=1)
)
def test_calls_and_engines_made_inside_a_state(runner: str, state: str, is_drafting: bool) -> None:
    """Engines are made in it and outside, and called in it and outside, in every order."""
    want = wanted(runner)
    for is_made_inside in (False, True):
        if is_made_inside:
            with STATES[state]():
                engine = made(runner, is_drafting=is_drafting)
        else:
            engine = made(runner, is_drafting=is_drafting)
        for is_called_inside in (True, False, True):
            if is_called_inside:
                with STATES[state]():
                    got = engine.generate(PROMPTS, PARAMS)
            else:
                got = engine.generate(PROMPTS, PARAMS)
            assert [o.outputs[0].token_ids for o in got] == want
            assert sum(o.metrics.draft_errors for o in got) == 0


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("runner", RUNNERS)
def test_neighbours_of_such_a_caller(runner: str, state: str) -> None:
    """A request that is open outside the state is served by iterations inside it."""
    engine = made(runner, is_drafting=False)
    want = made(runner, is_drafting=False).generate([PROMPTS[0]], PARAMS)[0].outputs[0]
    stream = engine.stream([PROMPTS[0]], PARAMS)
    tokens = list(next(stream).token_ids)
    with STATES[state]():
        engine.generate([PROMPTS[1]], SamplingParams(temperature=0.0, max_tokens=8))
    tokens += [token for chunk in stream for token in chunk.token_ids]
    assert tokens == want.token_ids


_entered: list[Any] = []


def entered(context: Any) -> None:
    """Enters a context that nobody leaves."""
    _entered.append(context)
    context.__enter__()


LEFT_ON: dict[str, Callable[[], object]] = {
    "default device": lambda: torch.set_default_device("meta"),
    "entered device": lambda: entered(torch.device("meta")),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "no grad": lambda: torch.set_grad_enabled(False),
    "entered no grad": lambda: entered(torch.no_grad()),
    "entered inference mode": lambda: entered(torch.inference_mode()),
    "entered autocast": lambda: entered(torch.autocast("cpu", dtype=torch.float16)),
    "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
    "matmul precision": lambda: torch.set_float32_matmul_precision("medium"),
    "matmul precision of a backend": lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
}  # fmt: skip


def torch_state() -> tuple[Any, ...]:
    """What foreign code may leave changed."""
    return (
        torch.get_default_device(), torch.get_default_dtype(), torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"),
        torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
        torch.zeros(1).device, (torch.zeros(1, device="cpu") + 1).requires_grad, _autocast_nesting(),
    )  # fmt: skip


@pytest.fixture
def unchanged() -> Iterator[None]:
    """The test leaves torch as it was; so does what follows it, whatever happens."""
    before, threads = torch_state(), torch.get_num_threads()
    try:
        yield
        assert torch_state() == before
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads(threads)
        while _entered:
            context = _entered.pop()
            if torch_state() != before:
                context.__exit__(None, None, None)


OUTER = {"nothing": ExitStack, "device set": lambda: entering(torch.device("meta"), is_set=True), **STATES}


def entering(device: torch.device, *, is_set: bool) -> AbstractContextManager:
    """A caller's default device, set for good or entered."""
    stack = ExitStack()
    if is_set:
        torch.set_default_device(device)
        stack.callback(torch.set_default_device, None)
    return stack


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("left_on", LEFT_ON)
@pytest.mark.parametrize("outer", OUTER)
def test_what_foreign_code_leaves_on_ends_with_the_call(outer: str, left_on: str) -> None:
    """Whatever the caller has switched on around it."""
    with OUTER[outer]():
        callers = torch_state()
        with own_torch_state():
            ours = torch_state()
            try:
                with restored_torch_state():
                    assert torch_state() == ours
                    LEFT_ON[left_on]()
            except AssertionError as err:  # torch's own, of a default device that is set inside an entered one
                assert "DeviceContext" in str(err)  # noqa: PT017
            assert torch_state() == ours
        assert torch_state() == callers


class Careless:
    """A drafter that leaves something switched on in one of its calls, or when it is made."""

    name, reads, nodes_by_depth = "careless", TargetReads(taps=("final",)), (1, 3)

    def __init__(self, call: str, left_on: Callable[[], object]) -> None:
        self._call, self._left_on = call, left_on
        self._leave("creation")

    def _leave(self, call: str) -> None:
        if call == self._call:
            self._left_on()

    def attach(self, target: Any) -> None:
        self._leave("attach")

    def begin(self, slot: int, request: Any) -> None:
        self._leave("begin")

    def propose(self, context: Any) -> TokenTree:
        rows = [TreeRow([root, 3, 4], [-1, 0, 0]) for root in context.roots]
        tree = TokenTree.from_rows(rows)
        self._leave("propose")
        return tree

    def commit(self, committed: Any) -> None:
        self._leave("commit")

    def release(self, slot: int) -> None:
        self._leave("release")


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize(
    ("call", "left_on"),
    slow_products(["creation", "attach", "begin", "propose", "commit", "release", "on_step"], list(LEFT_ON), each=1),
)
def test_a_drafter_or_callback_that_leaves_something_on(call: str, left_on: str) -> None:
    want = wanted("generic")
    if call == "on_step":
        arguments: dict[str, Any] = {"on_step": lambda record: LEFT_ON[left_on]()}
    else:
        arguments = {"drafter": lambda: Careless(call, LEFT_ON[left_on])}
    engine = llm(arguments, module=target("llama", torch.float32), max_num_seqs=2)
    before = torch_state()
    for _ in range(2):
        got = engine.generate(PROMPTS, PARAMS)
        assert torch_state() == before
        assert [(o.outputs[0].token_ids, o.outputs[0].error) for o in got] == [(ids, None) for ids in want]
        assert sum(o.metrics.draft_errors for o in got) == 0
        assert call == "on_step" or sum(o.metrics.num_drafted for o in got) > 20
