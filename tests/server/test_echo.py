"""Completions that begin with their prompt, with the log-probabilities that the model gives, whole and in streams."""

from typing import Any

import pytest
from server.live_server import LiveServer, live_server

from foretoken import LLM, SamplingParams
from foretoken.core.results import Logprob, RequestOutput
from foretoken.server.answers import EchoedPrompt

CODE = "class Queue:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self"
IDS = [300, 301, 302, 303, 300, 301]
ASK: dict[str, Any] = {"model": "tinycode", "echo": True, "logprobs": 2, "temperature": 0.0, "max_tokens": 12}


def direct(server: LiveServer, prompt: str | list[int]) -> RequestOutput:
    """The same from the model itself."""
    params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=2)
    (output,) = server.engine.llm.generate(prompt, params)
    return output


def expected(server: LiveServer, prompt: str | list[int], *, has_completion: bool) -> dict[str, Any]:
    """What a choice tells by what the model itself gives."""
    output, llm = direct(server, prompt), server.engine.llm
    (completion,) = output.outputs
    assert output.prompt_logprobs is not None
    assert completion.logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    ids = [*output.prompt_token_ids, *(completion.token_ids if has_completion else [])]
    scores = [*output.prompt_logprobs, *(completion.logprobs if has_completion else [])]
    tokens = [llm.decode([token]) for token in ids]
    return {
        "text": "".join(tokens),
        "tokens": tokens,
        "token_logprobs": [entry and entry[token].logprob for token, entry in zip(ids, scores, strict=True)],
        "top_logprobs": [entry and alternatives(entry, token) for token, entry in zip(ids, scores, strict=True)],
        "text_offset": [len("".join(tokens[:at])) for at in range(len(tokens))],
    }


def alternatives(entry: dict[int, Logprob], token: int) -> dict[str, float]:
    """The two most probable tokens, and the one that was taken."""
    best = sorted(entry.values(), key=lambda each: -each.logprob)[:2]
    return {str(each.decoded_token): each.logprob for each in [*best, entry[token]]}


def flat(choice: Any) -> dict[str, Any]:
    """What a choice tells, in the shape of `expected`."""
    told = choice.logprobs.to_dict()
    assert {len(values) for values in told.values()} == {len(told["tokens"])}
    return {"text": choice.text, **told}


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Texts are equal; numbers differ by the order of sums, which goes with the width of a pass."""
    for name in ("text", "tokens", "text_offset"):
        assert got[name] == want[name]
    assert got["token_logprobs"][0] is None
    assert got["top_logprobs"][0] is None
    assert got["token_logprobs"][1:] == pytest.approx(want["token_logprobs"][1:], abs=1e-5)
    for ours, theirs in zip(got["top_logprobs"][1:], want["top_logprobs"][1:], strict=True):
        assert ours == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("prompt", [CODE, "x", IDS], ids=["text", "one token", "token ids"])
@pytest.mark.parametrize("max_tokens", [12, 0])
def test_the_prompt_is_scored_as_the_model_scores_it(
    prompt: str | list[int], max_tokens: int, speculative: LiveServer, plain: LiveServer
) -> None:
    want = expected(plain, prompt, has_completion=max_tokens > 0)
    answer = speculative.client().completions.create(prompt=prompt, **{**ASK, "max_tokens": max_tokens})
    (choice,) = answer.choices
    assert_same(flat(choice), want)
    assert choice.finish_reason == "length"
    assert "prompt_logprobs" not in choice.to_dict()
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(want["tokens"]) - max_tokens, max_tokens)


@pytest.mark.parametrize("max_tokens", [12, 0])
def test_the_first_chunk_of_every_choice_has_all_of_the_prompt(max_tokens: int, speculative: LiveServer) -> None:
    more = {**ASK, "prompt": [CODE, IDS], "n": 2, "max_tokens": max_tokens}
    whole = speculative.client().completions.create(**more)
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(speculative.client().completions.create(**more, stream=True, stream_options=options))
    assert [chunk.usage.completion_tokens for chunk in chunks][-1] == whole.usage.completion_tokens == 4 * max_tokens
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {whole.usage.prompt_tokens}, "of both prompts"
    prompts = [CODE, speculative.engine.llm.decode(IDS)]
    for choice in whole.choices:
        parts = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        assert parts[0].text.startswith(prompts[choice.index // 2])
        count = sum(offset < len(prompts[choice.index // 2]) for offset in choice.logprobs.text_offset)
        assert parts[0].logprobs.tokens[:count] == choice.logprobs.tokens[:count]
        assert (len(parts) > 1) == (max_tokens > 0)
        assert "".join(part.text for part in parts) == choice.text
        for name, values in choice.logprobs.to_dict().items():
            assert [value for part in parts for value in getattr(part.logprobs, name)] == values
        assert parts[-1].finish_reason == choice.finish_reason


def test_completions_wait_for_the_scores_of_their_prompt() -> None:
    """A second completion goes on from what is cached, and is faster than the first one, which reads and scores all."""
    llm = LLM("models/tinycode", max_num_seqs=4)
    llm.target.prefill_chunk = 4
    with live_server(llm) as server:
        client = server.client().completions
        client.create(model="tinycode", prompt=CODE, max_tokens=1)
        params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2, prompt_logprobs=2, n=2)
        order = [chunk.index for chunk in llm.stream(CODE, params)]
        assert order[0] == 1, "else nothing has to wait here"
        first = [*client.create(prompt=CODE, stream=True, **{**ASK, "n": 2})][:2]
        for chunk in first:
            (choice,) = chunk.choices
            assert choice.text.startswith(CODE)
            assert choice.logprobs.tokens[0] == "class"
            assert choice.logprobs.token_logprobs[0] is None


def test_the_prompt_alone_without_log_probabilities(speculative: LiveServer) -> None:
    more = {**ASK, "prompt": CODE, "logprobs": None, "max_tokens": 0, "extra_body": {"return_token_ids": True}}
    answer = speculative.client().completions.create(**more)
    (choice,) = answer.choices
    assert (choice.text, choice.logprobs, choice.finish_reason) == (CODE, None, "length")
    assert choice.to_dict()["token_ids"] == []
    assert answer.usage.completion_tokens == 0
    chunks = [each for chunk in speculative.client().completions.create(**more, stream=True) for each in chunk.choices]
    assert [(each.text, each.finish_reason) for each in chunks] == [(CODE, "length")]


def test_scores_of_the_prompt_beside_it_come_where_they_are_asked_for(speculative: LiveServer) -> None:
    (choice,) = speculative.client().completions.create(**ASK, prompt=CODE, extra_body={"prompt_logprobs": 0}).choices
    beside = choice.to_dict()["prompt_logprobs"]
    told = choice.logprobs.token_logprobs
    assert [entry and next(iter(entry.values()))["logprob"] for entry in beside] == told[: len(beside)]
    assert {len(entry) for entry in choice.logprobs.top_logprobs[1 : len(beside)]} == {1}
    assert {len(entry) for entry in choice.logprobs.top_logprobs[len(beside) :]} <= {2, 3}


def test_a_first_token_that_is_no_part_of_the_text_takes_no_characters(plain: LiveServer) -> None:
    """As tokenizers begin a text with a special token of their own."""
    llm, text = plain.engine.llm, "class Node:"
    ids = [0, *llm.encode(text)]
    (output,) = llm.generate(ids, SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert output.prompt_logprobs is not None
    echo = EchoedPrompt.of_prompt(llm, text, ids).scored(output.prompt_logprobs, 1)
    assert echo.entries is not None
    assert echo.entries["tokens"] == ["<|endoftext|>", "class", " Node", ":"]
    assert echo.entries["text_offset"] == [0, 0, 5, 10]
