"""Sampling defaults of a model's generation_config.json: who has them, what comes before them, what is refused."""

import asyncio
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.command_line import MODEL, done, run
from server.live_server import TEMPLATE, LiveServer, live_server
from transformers import AutoModelForCausalLM

import foretoken.hf
from foretoken import LLM, AsyncLLM, SamplingParams
from foretoken.core.errors import ConfigError, ModelError

PROMPT = "class Queue:\n"
TALK = [{"role": "user", "content": "A queue."}]
CONFIG = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "max_new_tokens": 12}
DEFAULTS: dict[str, Any] = {name: value for name, value in CONFIG.items() if name != "max_new_tokens"}
SEEDED = {"seed": 3, **DEFAULTS}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


def copied(place: Path, config: dict[str, Any]) -> str:
    """The bundled model with another generation configuration."""
    shutil.copytree(MODEL, place, copy_function=os.link)
    (place / "generation_config.json").unlink()
    (place / "generation_config.json").write_text(json.dumps({"do_sample": True, "eos_token_id": 0, **config}))
    return str(place)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return copied(tmp_path_factory.mktemp("models") / "own", CONFIG)


@pytest.fixture(scope="module")
def own(model: str) -> LLM:
    return LLM(model, speculative_config={"method": "ngram"})


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(MODEL)


def text(outputs: Any) -> str:
    return str(outputs[0].outputs[0].text)


def test_a_call_without_parameters_has_the_models(model: str) -> None:
    """Three calls of equally seeded engines: the second one names what the first one has by itself."""
    named = SamplingParams(**DEFAULTS, max_tokens=12)
    calls: list[tuple[dict[str, Any], Any]] = [({}, None), ({}, named), ({"generation_config": "vllm"}, None)]
    engines = [LLM(model, seed=7, **more) for more, _ in calls]
    outputs = [
        engine.generate([PROMPT, "import os"], params) for engine, (_, params) in zip(engines, calls, strict=True)
    ]
    texts = [[output.outputs[0].text for output in each] for each in outputs]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert len(outputs[0][0].outputs[0].token_ids) == 12
    assert engines[0].get_default_sampling_params() == named
    assert engines[2].get_default_sampling_params() == SamplingParams()


def test_chats_entries_of_none_and_async_calls_have_them_too(own: LLM) -> None:
    assert [len(own.chat(TALK, chat_template=TEMPLATE)[0].outputs[0].token_ids)] == [12]
    both = own.generate([PROMPT, PROMPT], [None, GREEDY])
    assert [len(output.outputs[0].token_ids) for output in both] == [12, 24]

    async def submitted() -> int:
        async with AsyncLLM(own) as engine:
            return len((await engine.submit(PROMPT).output()).outputs[0].token_ids)

    assert asyncio.run(submitted()) == 12


def test_nothing_of_them_is_in_calls_with_parameters(own: LLM, plain: LLM) -> None:
    """As those of bench, verify and sweep: a repetition penalty of the model would change their texts."""
    assert text(own.generate(PROMPT, GREEDY)) == text(plain.generate(PROMPT, GREEDY))
    changed = own.get_default_sampling_params()
    changed.temperature = 0.0
    assert own.get_default_sampling_params().temperature == 0.7


def test_a_model_in_memory_has_its_own_and_an_accelerated_one_those_of_transformers() -> None:
    module = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32")
    module.generation_config.update(temperature=0.6, top_k=7)
    assert LLM(module).sampling_defaults == {"temperature": 0.6, "top_k": 7}
    with foretoken.hf.accelerate(module) as handle:
        assert handle.llm.sampling_defaults == {}


def test_another_configuration_and_values_that_come_before_it(model: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 9, "min_p": 0.5}')
    override = {"top_k": 4, "min_p": None}
    assert LLM(model, generation_config=tmp_path).sampling_defaults == {"top_k": 9, "min_p": 0.5}
    assert LLM(model, generation_config=str(tmp_path), override_generation_config=override).sampling_defaults == {
        "top_k": 4
    }
    assert LLM(MODEL, override_generation_config='{"max_new_tokens": 3}').sampling_defaults == {"max_tokens": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"override_generation_config": {"top_p": 2}}, "top_p is 2. Expected above 0 and at most 1. Correct them"),
        ({"override_generation_config": {"temprature": 1}}, "'temprature', which says nothing of sampling. Did you"),
        ({"override_generation_config": "{"}, "override_generation_config is '{'. Expected a mapping"),
        ({"override_generation_config": [1]}, "Expected a mapping"),
        ({"generation_config": 5}, "generation_config is 5. Expected 'auto', 'vllm', or a directory"),
        ({"generation_config": "/nowhere at all"}, "the generation configuration of '/nowhere at all' cannot be read"),
    ],
)
def test_what_does_not_fit(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, ModelError)) as caught:
        LLM(MODEL, **arguments)
    assert message in str(caught.value)


def test_a_file_with_impossible_values_is_named_and_can_be_left_out(tmp_path: Path) -> None:
    model = copied(tmp_path / "hot", {"temperature": "hot"})
    with pytest.raises(ConfigError, match=r"sampling defaults of '.*hot' do not fit: temperature is 'hot'"):
        LLM(model)
    assert LLM(model, generation_config="vllm").sampling_defaults == {}


@pytest.fixture(scope="module")
def server(own: LLM) -> Iterator[LiveServer]:
    with live_server(own, chat_template=TEMPLATE) as one:
        yield one


def answers(server: LiveServer, **fields: Any) -> list[str]:
    """The texts of a completion, a chat and a response with these fields."""
    most = fields.pop("most", None)
    bodies = {
        "/v1/completions": {"prompt": PROMPT, "max_tokens": most},
        "/v1/chat/completions": {"messages": TALK, "max_tokens": most},
        "/v1/responses": {"input": "A queue.", "max_output_tokens": most},
    }  # fmt: skip
    told = [server.post(path, {**body, **fields}).json() for path, body in bodies.items()]
    (completion,), (chat,) = told[0]["choices"], told[1]["choices"]
    return [completion["text"], chat["message"]["content"], told[2]["output"][0]["content"][0]["text"]]


def test_requests_have_what_they_do_not_say(server: LiveServer, own: LLM) -> None:
    params = SamplingParams(**SEEDED, max_tokens=12)
    chat = text(own.chat(TALK, params, chat_template=TEMPLATE))
    expected = [text(own.generate(PROMPT, params)), chat, chat]
    assert answers(server, seed=3) == expected
    assert answers(server, seed=3, temperature=None, top_k=None) == expected, "null is as if it were not there"


def test_a_field_of_a_request_comes_first(server: LiveServer, own: LLM) -> None:
    params = SamplingParams(**{**SEEDED, "top_k": 0, "repetition_penalty": 1.0}, max_tokens=6)
    chat = text(own.chat(TALK, params, chat_template=TEMPLATE))
    got = answers(server, seed=3, top_k=0, repetition_penalty=1.0, most=6)
    assert got == [text(own.generate(PROMPT, params)), chat, chat]


def test_no_request_gets_more_tokens_than_the_model_says(server: LiveServer) -> None:
    for path, body in (("/v1/completions", {"prompt": PROMPT}), ("/v1/chat/completions", {"messages": TALK})):
        for more in ({}, {"max_tokens": 40}):
            told = server.post(path, {**body, **more, "ignore_eos": True}).json()
            assert (told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]) == (12, "length")


def generated(*arguments: str) -> tuple[str, str]:
    """What `foretoken generate` says of the text, and on standard error."""
    finished = done("generate", *arguments, "-p", PROMPT, "--seed", "3", "--json")
    return json.loads(finished.stdout)["text"], finished.stderr


def test_commands_have_them_and_say_so(model: str, own: LLM, plain: LLM, tmp_path: Path) -> None:
    said = "[the model's sampling defaults: temperature 0.7, top_k 5, top_p 0.9, min_p 0.01, repetition_penalty 1.3, "
    got, told = generated(model)
    assert got == text(own.generate(PROMPT, SamplingParams(**SEEDED, max_tokens=12)))
    assert said in told
    assert "max_tokens 12]" in told
    got, told = generated(model, "--temperature", "0", "--generation-config", "vllm", "--max-tokens", "24")
    assert (got, "defaults" in told) == (text(plain.generate(PROMPT, GREEDY)), False)
    got, told = generated(model, "--top-k", "2", "--override-generation-config", '{"min_p": null}')
    params = {**SEEDED, "top_k": 2, "min_p": 0.0}
    assert got == text(own.generate(PROMPT, SamplingParams(**params, max_tokens=12)))
    assert "defaults: temperature 0.7, top_p 0.9, repetition_penalty 1.3, max_tokens 12]" in told
    (tmp_path / "template").write_text(TEMPLATE)
    chat = run("chat", model, "--seed", "3", "--chat-template", str(tmp_path / "template"), stdin="A queue.\n")
    params = SamplingParams(**SEEDED, max_tokens=12)
    assert chat.stdout.rstrip("\n") == text(own.chat(TALK, params, chat_template=TEMPLATE)).rstrip("\n")
    assert said in chat.stderr


def test_a_batch_has_them(model: str, own: LLM, tmp_path: Path) -> None:
    body = {"prompt": PROMPT, "seed": 3}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in").write_text(json.dumps(line))
    finished = run("batch", str(tmp_path / "in"), str(tmp_path / "out"), "--model", model)
    assert "the model's sampling defaults: temperature 0.7" in finished.stderr
    (answer,) = [json.loads(each) for each in (tmp_path / "out").read_text().splitlines()]
    expected = text(own.generate(PROMPT, SamplingParams(**SEEDED, max_tokens=12)))
    assert answer["response"]["body"]["choices"][0]["text"] == expected


def test_the_bundled_model_has_none(plain: LLM) -> None:
    assert plain.sampling_defaults == {}
    assert plain.get_default_sampling_params() == SamplingParams()
    assert "defaults" not in generated(MODEL)[1]
