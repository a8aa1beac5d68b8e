"""Tool calls over HTTP: models that write each format, calls that are forced, and what is sent back to the model."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pairwise import slow_products
from server.live_server import LiveServer, live_server
from server.scripted_model import save_scripted_model

from foretoken import LLM
from foretoken.server.tools import TOOL_FORMATS

BAR = "\uff5c"
DEEPSEEK = [f"<{BAR}tool▁{name}{BAR}>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"$ref": "#/$defs/Days"}},
    "required": ["city", "days"], "additionalProperties": False,
    "$defs": {"Days": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
TIME = {"type": "object", "properties": {}, "additionalProperties": False}


def function(name: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


TOOLS = [function("get_weather", description="Of a city.", parameters=WEATHER), function("get_time", parameters=TIME)]
ASKED = [{"role": "user", "content": "Is it raining in Paris?"}]
GIVEN = {"city": "Paris", "days": 2}
CALL = json.dumps({"name": "get_weather", "arguments": GIVEN})
TWO = json.dumps([{"name": "get_weather", "arguments": GIVEN}, {"name": "get_time", "arguments": {}}])
# What stands before the messages, how a call and what it gave are shown, and what the model writes for two calls.
SHAPES: dict[str, tuple[str, str, str, dict[str, list[str]]]] = {
    "hermes": (
        "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}\n{% endfor %}</tools>{% endif %}",
        '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
        "</tool_call>",
        f'I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "get_time", "arguments": {{}}}}\n'
        "</tool_call>",
        {"plain": ["<tool_call>", "</tool_call>"]},
    ),
    "qwen3_coder": (
        "{% if tools %}{{ tools | tojson }}<IMPORTANT>{% endif %}",
        "<tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
        "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
        "I look.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
        {"plain": ["<tool_call>", "</tool_call>"]},
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}",
        "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
        "[TOOL_CALLS][{{ c.function | tojson }}]",
        f"I look. [TOOL_CALLS]{TWO}",
        {"special": ["[TOOL_CALLS]"]},
    ),
    "deepseek_v3": (
        "{% if tools %}{{ tools | tojson }}{% endif %}",
        f"{{{{ '{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}' + c.function.name + '\\n```json\\n' + "
        f"c.function.arguments + '\\n```{DEEPSEEK[3]}' }}}}",
        f"I look.{DEEPSEEK[0]}{DEEPSEEK[2]}function{DEEPSEEK[4]}get_weather\n```json\n{json.dumps(GIVEN)}\n```"
        f"{DEEPSEEK[3]}\n{DEEPSEEK[2]}get_time{DEEPSEEK[4]}{{}}{DEEPSEEK[3]}{DEEPSEEK[1]}",
        {"plain": DEEPSEEK},
    ),
    "pythonic": (
        "{% if tools %}Answer with [func_name1(params_name1=params_value1)]. {{ tools | tojson }}{% endif %}",
        "[{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }}{% endfor %})]",
        '[get_weather(city="Paris", days=2), get_time()]',
        {},
    ),
    "llama3_json": (
        '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary of argument name and '
        "its value}. {{ tools | tojson }}{% endif %}",
        '{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}',
        f'<|python_tag|>{CALL}; {{"name": "get_time", "parameters": {{}}}}',
        {"special": ["<|python_tag|>"]},
    ),
}  # fmt: skip
MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{% if m.reasoning_content %}<think>"
    "{{ m.reasoning_content }}</think>{% endif %}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "{{ m.tool_call_id }}\n{% endfor %}"
    "{% if add_generation_prompt %}{% if enable_thinking is false %}<think></think>{% endif %}<|begin:{{ 'answer' if "
    "messages[-1].role == 'tool' else messages[-1].content if messages[-1].content in ['think', 'broken'] else "
    "'calls' if tools else 'plain' }}{% endif %}"
)
SAID = "It rains."


def shaped(name: str, folder: Path, more: str = "") -> str:
    """A model that writes a format, with a chat template of its shape; more: behind the template."""
    before, call, text, markers = SHAPES[name]
    template = before + MESSAGES.replace("CALL", call) + more
    broken = text.replace('"name"', "name").replace("(", "(5, ").replace("<function=", "<function").replace(
        f"{DEEPSEEK[4]}", "")  # fmt: skip
    thought = f"<think>\nWhat now?\n</think>\n\n{text}"
    scripts = {"calls": text, "plain": text, "answer": SAID, "broken": broken, "think": thought}
    return save_scripted_model(folder, scripts, template, **markers)


@pytest.fixture(scope="module", params=SHAPES)
def written(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, LiveServer]]:
    folder = shaped(request.param, tmp_path_factory.mktemp(request.param))
    config = {"method": "draft_model", "model": folder, "num_speculative_tokens": 5}
    with live_server(LLM(folder, speculative_config=config, max_num_seqs=4), names=["scripted"]) as server:
        yield request.param, server


def ask(server: LiveServer, messages: Any = ASKED, **more: Any) -> Any:
    fields = {"model": server.client().models.list().data[0].id, "tools": TOOLS, "temperature": 0, **more}
    return server.client().chat.completions.create(messages=messages, **fields)


def put_together(stream: Any) -> dict[int, dict[str, Any]]:
    """The messages of a stream, as clients put them together, with why they ended."""
    made: dict[int, dict[str, Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            at = made.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "finish_reason": None})
            delta = choice.delta.to_dict()
            at["content"] += delta.get("content") or ""
            at["reasoning"] += delta.get("reasoning_content") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", []):
                if call["index"] == len(at["calls"]):
                    assert call["type"] == "function"
                    at["calls"].append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
                at["calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            at["finish_reason"] = choice.finish_reason or at["finish_reason"]
    return made


def same_of(choice: Any) -> dict[str, Any]:
    """The same of a whole answer's choice."""
    message = choice.message.to_dict()
    calls = [{"id": call["id"], **call["function"]} for call in message.get("tool_calls", [])]
    return {
        "content": message["content"] or "", "reasoning": message.get("reasoning_content", ""), "calls": calls,
        "finish_reason": choice.finish_reason,
    }  # fmt: skip


def without_ids(told: dict[str, Any]) -> dict[str, Any]:
    return {**told, "calls": [{key: value for key, value in call.items() if key != "id"} for call in told["calls"]]}


def choice_of(server: LiveServer, messages: Any = ASKED, **more: Any) -> Any:
    """The choice of a whole answer; a stream tells the same."""
    choice = ask(server, messages, **more).choices[0]
    assert without_ids(put_together(ask(server, messages, stream=True, **more))[0]) == without_ids(same_of(choice))
    return choice


def test_calls_are_parsed_whole_and_streamed(written: tuple[str, LiveServer]) -> None:
    name, server = written
    answer = ask(server, extra_body={"spec_decode_metrics": "summary"})
    (choice,) = answer.choices
    calls = [(call.type, call.function.name, json.loads(call.function.arguments)) for call in choice.message.tool_calls]
    assert calls == [("function", "get_weather", GIVEN), ("function", "get_time", {})]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == (None if name in ("pythonic", "llama3_json") else "I look.")
    assert answer.to_dict()["metrics"]["speculative_decoding"]["mean_acceptance_length"] > 2, "parts of several tokens"
    streamed = put_together(ask(server, stream=True))[0]
    assert without_ids(streamed) == without_ids(same_of(choice))
    assert len({call["id"] for call in [*streamed["calls"], *same_of(choice)["calls"]]}) == 4


def test_a_conversation_with_calls_goes_on(written: tuple[str, LiveServer]) -> None:
    """What an answer holds is sent back as it came, with what the tools gave; templates are as strict as real ones."""
    name, server = written
    message = ask(server).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "rain"} for call in message.tool_calls]
    sent = [*ASKED, message.to_dict(), *results]
    answer = ask(server, sent)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (SAID, "stop")
    assert answer.choices[0].message.tool_calls is None
    (prompt,) = server.engine.llm.chat_prompts([sent], tools=TOOLS)
    assert f"tool: rain{message.tool_calls[0].id}" in prompt["prompt"]
    marker = {"pythonic": '[get_weather(city="Paris"', "llama3_json": '{"name": "get_weather", "parameters": {"city"'}
    opens = next(list(form.opens) for form in TOOL_FORMATS if name in form.names)
    assert marker.get(name) or opens[0] in prompt["prompt"].partition("assistant:")[2]
    assert '"{' not in prompt["prompt"], "arguments were no text within JSON"


def test_choices_of_calls(written: tuple[str, LiveServer]) -> None:
    _, server = written
    text = ask(server, tool_choice="none").choices[0]
    assert (text.message.tool_calls, text.finish_reason) == (None, "stop")
    assert "get_weather" in text.message.content
    one = ask(server, parallel_tool_calls=False)
    assert [call.function.name for call in one.choices[0].message.tool_calls] == ["get_weather"]
    assert len(put_together(ask(server, parallel_tool_calls=False, stream=True))[0]["calls"]) == 1
    without = ask(server, tools=[]).choices[0].message
    assert without.tool_calls is None
    assert "get_weather" in without.content


def test_malformed_calls_are_content(written: tuple[str, LiveServer]) -> None:
    _, server = written
    choice = choice_of(server, said("broken"))
    assert choice.finish_reason == "stop"
    assert "get_weather" in choice.message.content
    assert not choice.message.tool_calls or [c.function.name for c in choice.message.tool_calls] == ["get_time"]


def test_calls_that_are_cut_are_content(written: tuple[str, LiveServer]) -> None:
    _, server = written
    for num in (4, 9, 14):
        choice = choice_of(server, max_tokens=num)
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    within_the_second = ask(server).usage.completion_tokens - 4
    assert choice_of(server, max_tokens=within_the_second).finish_reason == "length", "also behind a call that is whole"


@pytest.fixture(scope="module", params=["the model begins thoughts", "the template does"])
def thinking(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    scripts = {
        "thoughts": "<think>\nShould I?\n</think>\n\nYes.", "endless": "<think>And on, and on",
        "cut": f'<think>\nTwo.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{{"name": "get_',
        "calls": f"<think>\nA tool.\n</think>\n\n<tool_call>\n{CALL}\n</tool_call>",
        "form": f"<think>\nJSON {{ now.\n</think>\n\n{json.dumps(GIVEN)}",
        "list": f'<think>\nA list.\n</think>\n\n[{{"name": "get_weather", "parameters": {json.dumps(GIVEN)}}}]',
    }  # fmt: skip
    begun = ""
    if request.param == "the template does":
        scripts = {f"{name}<think>": text.removeprefix("<think>") for name, text in scripts.items()}
        begun = "<think>"
    scripts["none</think>"] = "No thoughts."
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if tools %}<tool_call>"
        "{{ tools | tojson }}{% endif %}<|begin:{{ messages[-1].content }}"
        "{% if enable_thinking is false %}</think>{% else %}" + begun + "{% endif %}"
    )
    tags = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    folder = save_scripted_model(tmp_path_factory.mktemp("thinking"), scripts, template, plain=tags)
    config = {"method": "draft_model", "model": folder, "num_speculative_tokens": 5}
    with live_server(LLM(folder, speculative_config=config, max_num_seqs=4), names=["scripted"]) as server:
        yield server


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize(
    ("script", "more", "content", "thoughts"),
    [
        ("thoughts", {"tools": []}, "Yes.", "Should I?"),
        ("endless", {"tools": []}, "", "And on, and on"),
        ("calls", {}, None, "A tool."),
        ("calls", {"tool_choice": "none"}, f"<tool_call>\n{CALL}\n</tool_call>", "A tool."),
        ("list", {"tool_choice": "required"}, None, "A list."),
        ("form", {"tool_choice": function("get_weather")}, None, "JSON { now."),
        ("form", {"tools": [], "response_format": {"type": "json_schema", "json_schema": {"schema": WEATHER}}},
         json.dumps(GIVEN), "JSON { now."),
        ("form", {"tools": [], "extra_body": {"structured_outputs": {"regex": r"\{.*\}"}}}, json.dumps(GIVEN),
         "JSON { now."),
    ],
)  # fmt: skip
def test_thoughts_come_before_content_calls_and_forms(
    script: str, more: dict[str, Any], content: str | None, thoughts: str, thinking: LiveServer
) -> None:
    choice = choice_of(thinking, said(script), **more)
    told = choice.message.to_dict()
    assert (told["content"], told["reasoning_content"], told["reasoning"]) == (content, thoughts, thoughts)
    for call in choice.message.tool_calls or []:
        assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", GIVEN)
    assert bool(choice.message.tool_calls) is (content is None)
    answer = ask(thinking, said(script), **more)
    tokens = ask(thinking, said(script), extra_body={"return_token_ids": True}, tools=more.get("tools", TOOLS))
    ids, text = tokens.choices[0].to_dict()["token_ids"], thinking.engine.llm.decode
    count = answer.usage.completion_tokens_details.reasoning_tokens
    assert "</think>" not in text(ids[: count - 1])
    assert "</think>" in text(ids[:count]) or script == "endless"
    *_, last = ask(thinking, said(script), stream=True, stream_options={"include_usage": True}, **more)
    assert last.usage.completion_tokens_details == answer.usage.completion_tokens_details


def test_there_may_be_no_thoughts(thinking: LiveServer) -> None:
    off = {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}, "tools": []}
    answer = ask(thinking, said("none"), **off)
    assert answer.choices[0].message.content == "No thoughts."
    assert "reasoning_content" not in answer.choices[0].message.to_dict()
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    whole = {"structured_outputs": {"regex": "No thoughts[.]"}, **off["extra_body"]}
    assert ask(thinking, said("none"), tools=[], extra_body=whole).choices[0].message.content == "No thoughts."


@pytest.fixture(scope="module")
def continuing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    scripts = {"hm": "What else?</think>\nYes, it is.", "answer": "<think> is a tag"}
    template = (
        "<think></think>{% for m in messages %}[{{ m.role }}] {{ m.content }}{% if not loop.last %}\n{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    folder = save_scripted_model(tmp_path_factory.mktemp("on"), scripts, template, plain=["<think>", "</think>"])
    with live_server(LLM(folder, max_num_seqs=1), names=["scripted"]) as server:
        yield server


@pytest.mark.parametrize(
    ("begun", "script", "thoughts", "content"),
    [
        ("Let me think: <think>\nHm.", "hm", "What else?", "Yes, it is."),  # thoughts that the message opens
        ("<think>\nHm.\n</think>\n\nThe answer:", "answer", "", "<think> is a tag"),  # thoughts that it closes
        ("The answer:", "answer", "", "<think> is a tag"),
    ],
)
@pytest.mark.parametrize("asked", ["Why?", "What does <think> mean?", "What does </think> mean?", "<think>"])
def test_thoughts_of_a_message_that_is_continued(
    begun: str, script: str, thoughts: str, content: str, asked: str, continuing: LiveServer
) -> None:
    """Tags of the user's text change nothing. The tags are tokens here, as in real models."""
    talk = [*said(asked), {"role": "assistant", "content": f"{begun}<|begin:{script}"}]
    fields: dict[str, Any] = {"continue_final_message": True}
    for form in ({}, {"structured_outputs": {"regex": "Yes, .*"}}) if thoughts else ({},):
        message = ask(continuing, talk, extra_body={**fields, **form}, tools=[]).choices[0].message.to_dict()
        assert (message.get("reasoning_content", ""), message["content"]) == (thoughts, content)


def test_tags_that_a_user_writes_change_no_thoughts(thinking: LiveServer) -> None:
    talk = [*said("<think>"), {"role": "assistant", "content": "<think>a</think>b"}, *said("thoughts")]
    for messages in (talk, [*said("What is </think>?"), *said("thoughts")], [*said("a <think> b"), *said("thoughts")]):
        message = ask(thinking, messages, tools=[]).choices[0].message
        assert (message.to_dict()["reasoning_content"], message.content) == ("Should I?", "Yes.")


def test_tags_that_are_special_tokens(tmp_path: Path) -> None:
    """Mistral's, which texts leave out where a request does not say otherwise."""
    scripts = {"text": f"[THINK]Hm.[/THINK] {json.dumps(GIVEN)}"}
    template = "{{ messages[-1].content }}<|begin:text{# [THINK][/THINK] #}"
    folder = save_scripted_model(tmp_path, scripts, template, special=["[THINK]", "[/THINK]"])
    with live_server(LLM(folder, max_num_seqs=1), names=["scripted"]) as server:
        form = {"response_format": {"type": "json_schema", "json_schema": {"schema": WEATHER}}}
        for more in ({}, form):
            message = ask(server, tools=[], **more).choices[0].message
            assert (message.content, message.to_dict()["reasoning_content"]) == (json.dumps(GIVEN), "Hm.")


def test_a_form_is_followed_behind_thoughts_with_drafts_as_without(speculative: LiveServer, plain: LiveServer) -> None:
    """A model that has never seen a tag writes thoughts at random, and the form behind them."""
    form = {"regex": "[0-9]{3}", "reasoning": ["", ":"]}
    for seed in range(4):
        fields = {"messages": ASKED, "seed": seed, "max_tokens": 300, "structured_outputs": form}
        texts = [
            server.post("/v1/chat/completions", fields).json()["choices"][0]["message"]["content"]
            for server in (speculative, plain)
        ]
        assert texts[0] == texts[1]
        assert re.fullmatch(r"[^:]*:[ \n]{0,4}[0-9]{3}", texts[0]), texts[0]


FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


def respond(server: LiveServer, script: str, **more: Any) -> Any:
    fields = {"model": "scripted", "input": script, "tools": FLAT, "temperature": 0, **more}
    return server.client().responses.create(**fields)


def items_of(response: Any) -> list[dict[str, Any]]:
    """The items of a response without what names them."""
    return [
        {key: value for key, value in item.items() if key not in ("id", "call_id")}
        for item in response.to_dict()["output"]
    ]


@pytest.mark.parametrize(
    ("script", "more", "kinds"),
    [
        ("thoughts", {"tools": []}, ["reasoning", "message"]),
        ("thoughts", {"tools": [], "include": ["message.output_text.logprobs"]}, ["reasoning", "message"]),
        ("cut", {}, ["reasoning", "function_call", "message"]),
        ("endless", {}, ["reasoning"]),
        ("calls", {}, ["reasoning", "function_call"]),
        ("list", {"tool_choice": "required"}, ["reasoning", "function_call"]),
        ("form", {"tool_choice": {"type": "function", "name": "get_weather"}}, ["reasoning", "function_call"]),
    ],
)
def test_items_of_responses_whole_and_as_events(
    script: str, more: dict[str, Any], kinds: list[str], thinking: LiveServer
) -> None:
    whole = respond(thinking, script, **more)
    assert [item.type for item in whole.output] == kinds
    call = whole.output[-1]
    if call.type == "function_call":
        assert (call.name, json.loads(call.arguments), call.status) == ("get_weather", GIVEN, "completed")
    assert whole.to_dict()["tools"] == more.get("tools", FLAT)
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    events = list(respond(thinking, script, stream=True, **more))
    assert items_of(events[-1].response) == items_of(whole)
    for index, item in enumerate(events[-1].response.output):
        its = [event for event in events if getattr(event, "output_index", None) == index]
        assert its[0].type == "response.output_item.added"
        assert its[-1].type == "response.output_item.done"
        assert its[-1].item == item
        deltas = "".join(event.delta for event in its if event.type.endswith(".delta"))
        assert deltas == (item.arguments if item.type == "function_call" else item.content[0].text)
        if item.type == "message":
            entries = [entry for event in its if event.type == "response.output_text.delta" for entry in event.logprobs]
            assert [each.to_dict() for each in entries] == item.content[0].to_dict()["logprobs"]
            assert bool(entries) == ("include" in more)
        assert {event.item_id for event in its[1:-1]} == {item.id}


def test_items_of_a_response_are_sent_back(written: tuple[str, LiveServer]) -> None:
    name, server = written
    response = respond(server, "Is it raining in Paris?")
    calls = [item for item in response.output if item.type == "function_call"]
    assert [call.name for call in calls] == ["get_weather", "get_time"]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    asked = {"role": "user", "content": "Is it raining in Paris?"}
    thoughts = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Hm."}],
    }
    sent = [asked, thoughts, *(item.to_dict() for item in response.output), *results]
    answer = respond(server, sent)
    assert answer.output_text == SAID
    message = {
        "role": "assistant", "content": None if name in ("pythonic", "llama3_json") else "I look.",
        "reasoning_content": "Hm.", "tool_calls": [
            {"id": c.call_id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls
        ],
    }  # fmt: skip
    tools = [{"role": "tool", "tool_call_id": call.call_id, "content": "rain"} for call in calls]
    chat = ask(server, [asked, message, *tools])
    assert chat.usage.prompt_tokens == answer.usage.input_tokens, "the same conversation"


def forced(server: LiveServer, choice: Any, **more: Any) -> Any:
    return ask(server, tool_choice=choice, **{"max_tokens": 500, "temperature": 1.0, "seed": 5, **more})


NAMED = function("get_weather")


# With seed 2 the model goes on calling until its tokens run out.
@pytest.mark.parametrize(("choice", "seed"), slow_products(["required", NAMED], [0, 1, 3], each=1))
def test_calls_that_are_forced_are_valid(choice: Any, seed: int, speculative: LiveServer, plain: LiveServer) -> None:
    """By a model that never saw a tool, whose every answer the form makes a call; drafts change none."""
    answers = [forced(server, choice, seed=seed) for server in (speculative, plain)]
    told = [without_ids(same_of(answer.choices[0])) for answer in answers]
    assert told[0] == told[1]
    message = answers[0].choices[0].message
    assert message.content is None
    assert answers[0].choices[0].finish_reason == ("tool_calls" if choice == "required" else "stop")
    for call in message.tool_calls:
        given = json.loads(call.function.arguments)
        assert call.function.name in ("get_weather", "get_time")
        if call.function.name == "get_weather":
            assert given["city"] in ("Paris", "Rome")
            assert 0 <= given["days"] <= 9
    assert without_ids(put_together(forced(speculative, choice, seed=seed, stream=True))[0]) == told[0]


def test_one_call_that_is_forced(plain: LiveServer) -> None:
    for seed in range(6):
        calls = forced(plain, "required", seed=seed, parallel_tool_calls=False).choices[0].message.tool_calls
        assert len(calls) == 1


def test_several_choices_have_their_own_calls(plain: LiveServer) -> None:
    answer = forced(plain, NAMED, n=3)
    streamed = put_together(forced(plain, NAMED, n=3, stream=True))
    assert [without_ids(streamed[index]) for index in range(3)] == [
        without_ids(same_of(choice)) for choice in answer.choices
    ]
    assert len({choice.message.tool_calls[0].id for choice in answer.choices}) == 3


def test_arguments_of_a_named_call_that_is_cut_are_still_its_arguments(plain: LiveServer) -> None:
    choice = forced(plain, NAMED, max_tokens=3).choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith("{")


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"tools": {}}, "tools", "tools is {}. Expected a list of functions."),
        ({"tools": [5]}, "tools", "tools has the item 5. Expected {'type': 'function'"),
        ({"tools": [{"type": "function"}]}, "tools", "Expected {'type': 'function'"),
        ({"tools": [{"name": "f"}]}, "tools", "Expected {'type': 'function'"),
        ({"tools": [{"type": "mcp"}], "tool_choice": "required"}, "tool_choice", "no function, only mcp. Pass"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", "Expected 'none', 'auto'"),
        ({"tools": [function("a b")]}, "tools", "the name 'a b'. Expected 1 to 64"),
        ({"tools": [function("a" * 65)]}, "tools", "Expected 1 to 64"),
        ({"tools": [function("a\n")]}, "tools", "Expected 1 to 64"),
        ({"tools": [function(None)]}, "tools", "Expected 1 to 64"),
        ({"tools": [function("a", parameters=[])]}, "tools", "parameters []"),
        ({"tools": TOOLS[:1] * 2}, "tools", "two tools have the same name"),
        ({"tools": [function(f"a{i}") for i in range(129)]}, "tools", "at most 128"),
        ({"tools": [function("a", description="x" * 600_000)]}, "tools", "tools have more than 524288 characters"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice is 'any'. Expected 'none', 'auto', 'required', or"),
        ({"tool_choice": {"type": "function"}}, "tool_choice", "Expected 'none', 'auto'"),
        ({"tool_choice": ["auto"]}, "tool_choice", "Expected 'none', 'auto'"),
        ({"tool_choice": function("get_rain")}, "tool_choice",
         "names the unknown tool 'get_rain'. Expected one of get_weather, get_time."),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "without tools. Pass tools."),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls", "Expected True or False."),
        ({"tool_choice": "required", "structured_outputs": {"regex": "a"}}, None, "exclude each other"),
        ({"tool_choice": "required", "tools": [function("a", parameters={"properties": {"b": {"type": "text"}}})]},
         "tools", "the schema of the tool a at properties.b.type does not compile: Invalid type: text. Leave"),
        ({"functions": [TOOLS[0]["function"]]}, "functions", "Pass tools."),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, None, "the tool_calls of a message are [5]."),
        ({"messages": [{"role": "assistant", "tool_calls": "x"}]}, None, "the tool_calls of a message are 'x'."),
    ],
)  # fmt: skip
def test_fields_that_do_not_fit(fields: dict[str, Any], param: str | None, part: str, plain: LiveServer) -> None:
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 4, **fields}
    for is_streamed in (False, True):
        answer = plain.post("/v1/chat/completions", {**body, "stream": is_streamed})
        error = answer.json()["error"]
        assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param), error
        assert part in error["message"]


REFUSED_KEYS = {
    "uniqueItems": {"type": "array", "uniqueItems": True}, "not": {"not": {"type": "string"}},
    "if": {"if": {}, "then": {}}, "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "contains": {"type": "array", "contains": {}}, "pattern": {"type": "string", "pattern": "^(?=a)b"},
    "patternProperties": {"type": "object", "patternProperties": {"a(?!b)": {}}}, "$ref": {"$ref": "#/$defs/none"},
}  # fmt: skip


@pytest.mark.parametrize("key", REFUSED_KEYS)
def test_a_schema_that_is_not_followed_is_named_as_the_client_sent_it(key: str, plain: LiveServer) -> None:
    schema = {
        "type": "object",
        "properties": {"tags": {"anyOf": [REFUSED_KEYS[key]]}, "uniqueItems": {"enum": ["not"]}},
    }
    tool = function("find", parameters=schema)
    body = {"messages": ASKED, "max_tokens": 4}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    place = f"at properties.tags.anyOf.0.{key} does not compile: "
    named = function("find")
    for path, fields, param, begin in (
        ("chat/completions", {"tools": [*TOOLS, tool], "tool_choice": "required"}, "tools", "schema of the tool find"),
        ("chat/completions", {"tools": [tool, *TOOLS], "tool_choice": named}, "tools", "schema of the tool find"),
        ("chat/completions", {"response_format": form}, "response_format", "schema of response_format"),
        ("responses", {"messages": None, "max_tokens": None, "input": "x", "text": {"format": {
            "type": "json_schema", "name": "x", "schema": schema}}}, "text", "schema of text.format"),
        ("chat/completions", {"structured_outputs": {"json": schema}}, None, "json of structured_outputs"),
    ):  # fmt: skip
        answer = plain.post(f"/v1/{path}", {**body, **fields})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, param), error
        assert f"{begin} {place}" in error["message"]
    assert plain.post("/v1/chat/completions", {**body, "tools": [tool]}).status_code == 200, "nothing follows it"


def test_tools_with_the_same_id_have_their_own_references(plain: LiveServer) -> None:
    tools = [
        function(name, parameters={
            "$id": "https://example.com/a.json", "type": "object", "properties": {"a": {"$ref": f"#/$defs/{name}"}},
            "required": ["a"], "additionalProperties": False, "$defs": {name: {"const": name}},
        })
        for name in ("f", "g")
    ]  # fmt: skip
    for call in forced(plain, "required", tools=tools).choices[0].message.tool_calls:
        assert json.loads(call.function.arguments) == {"a": call.function.name}


def test_a_schema_of_a_tool_that_is_too_large(plain: LiveServer) -> None:
    tool = function("find", parameters={"properties": {"a": {"enum": [str(number) for number in range(3000)]}}})
    body = {"messages": ASKED, "tools": [*TOOLS, tool], "tool_choice": "required"}
    error = plain.post("/v1/chat/completions", body).json()["error"]
    assert error["param"] == "tools"
    assert error["message"].startswith("the schema of the tool find cannot be followed: json holds a list of 3000")


ITEM = {"type": "integer", "minimum": 1, "maximum": 3}
OWN_REFERENCES: list[dict[str, Any]] = [
    {"$id": "https://example.com/a.json", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": ITEM}},
    {"$id": "a.json", "properties": {"a": {"$ref": "a.json#/$defs/A"}}, "$defs": {"A": ITEM}},
    {"$id": "https://example.com/a.json", "properties": {"a": {"$ref": "b.json"}},
     "$defs": {"A": {"$id": "b.json", **ITEM}}},
    {"$schema": "http://json-schema.org/draft-07/schema#", "properties": {"a": {"$ref": "#/definitions/A"}},
     "definitions": {"A": ITEM}},
    {"properties": {"a": {"$ref": "#A"}}, "$defs": {"A": {"$anchor": "A", **ITEM}}},
    {"properties": {"a": ITEM, "b": {"const": {"$ref": "#/x"}}, "c": {"enum": [{"$ref": "#/y", "$id": "z"}]}}},
    {"properties": {"a": ITEM, "const": {"$ref": "#/$defs/A"}, "$ref": {"type": "null"}}, "$defs": {"A": ITEM}},
    {"properties": {"a": {**ITEM, "format": "int32"}, "s": {"type": "string", "format": "my-own", "maxLength": 3}}},
]  # fmt: skip


@pytest.mark.parametrize("at", range(len(OWN_REFERENCES)))
def test_schemas_that_refer_to_themselves_or_hold_data(at: int, plain: LiveServer) -> None:
    inner = OWN_REFERENCES[at]
    schema = {"type": "object", "additionalProperties": False, **inner, "required": list(inner["properties"])}
    tools = [function(name, parameters=schema) for name in ("f", "g")]
    for choice in ("required", function("g")):
        calls = forced(plain, choice, tools=tools if choice != "required" else [*tools[:1], *TOOLS[1:]],
                       parallel_tool_calls=False).choices[0].message.tool_calls  # fmt: skip
        given = json.loads(calls[0].function.arguments)
        if calls[0].function.name in ("f", "g"):
            assert 1 <= given["a"] <= 3
            for key, value in (("b", {"$ref": "#/x"}), ("c", {"$ref": "#/y", "$id": "z"})):
                assert given.get(key, value) == value


BUILT_IN: list[dict[str, Any]] = [
    {"type": "web_search"}, {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
    {"type": "mcp", "server_label": "x"}, {"type": "local_shell"}, {"type": "text_editor_20250728", "name": "edit"},
]  # fmt: skip
LEFT_OUT = (
    "tools that this server does not run were left out: custom, local_shell, mcp, text_editor_20250728, web_search"
)


@pytest.mark.parametrize("written", ["hermes"], indirect=True)
def test_tools_that_nobody_here_runs_are_left_out(written: tuple[str, LiveServer]) -> None:
    _, server = written
    answer = ask(server, tools=[*BUILT_IN, *TOOLS])
    assert answer.to_dict()["metadata"] == {"warning": LEFT_OUT}
    assert answer.usage.prompt_tokens == ask(server).usage.prompt_tokens, "the template does not show them"
    assert [call.function.name for call in answer.choices[0].message.tool_calls] == ["get_weather", "get_time"]
    first, *others = ask(server, tools=[*BUILT_IN, *TOOLS], stream=True)
    assert first.to_dict()["metadata"] == {"warning": LEFT_OUT}
    assert not any("metadata" in chunk.to_dict() for chunk in others)
    response = respond(server, ASKED[0]["content"], tools=[*BUILT_IN, *FLAT], metadata={"a": "b"})
    assert response.metadata == {"a": "b", "warning": LEFT_OUT}
    assert [item.type for item in response.output] == ["message", "function_call", "function_call"]
    *_, last = respond(server, ASKED[0]["content"], tools=[*BUILT_IN, *FLAT], stream=True)
    assert last.response.metadata == {"warning": LEFT_OUT}
    alone = ask(server, tools=BUILT_IN)
    assert (alone.choices[0].message.tool_calls, alone.to_dict()["metadata"]) == (None, {"warning": LEFT_OUT})
    assert "metadata" not in ask(server).to_dict()
