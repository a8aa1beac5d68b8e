"""What a caller has switched on in torch changes neither its own texts nor those of others."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from end_to_end.tiny_llms import draft_model, llm, noisy, target

from foretoken import LLM, SamplingParams

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


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("is_drafting", [False, True])
def test_calls_and_engines_made_inside_a_state(runner: str, state: str, is_drafting: bool) -> None:
    """Engines are made in it and outside, and called in it and outside, in every order."""
    want = [o.outputs[0] for o in made(runner, is_drafting=False).generate(PROMPTS, PARAMS)]
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
            assert [o.outputs[0].token_ids for o in got] == [w.token_ids for w in want]
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
