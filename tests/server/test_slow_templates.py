"""Chat templates are programs of unknown authors: none of them holds up other requests, and all of them end.

Slow because templates run to their limit of five seconds.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import pytest
from server.live_server import TEMPLATE, LiveServer, live_server
from transformers import AutoTokenizer

from foretoken import LLM, SamplingParams
from foretoken.core.errors import RequestError

# A user who says "forever" makes this template run for a quarter of a minute; nested once more, it would never end.
ENDLESS = (
    "{% if messages[-1].content == 'forever' %}"
    "{% for i in range(3000) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}" + TEMPLATE
)
ASK = {"prompt": "def main():", "max_tokens": 8, "temperature": 0.0}
TALK = [{"role": "user", "content": "hello"}]
GREEDY = SamplingParams(temperature=0.0, max_tokens=2)
MOST_S = 60  # of waiting, before a test fails


@pytest.fixture(scope="module")
def endless() -> Iterator[LiveServer]:
    with live_server(LLM("models/tinycode", max_num_seqs=2), chat_template=ENDLESS) as server:
        yield server


def chat(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 2, "temperature": 0.0}


FOREVER = [
    ("/v1/chat/completions", chat("forever")),
    ("/tokenize", {"messages": chat("forever")["messages"]}),
    ("/v1/responses", {"input": "forever"}),
]


@pytest.mark.slow
def test_a_template_that_does_not_end_stops_nobody(endless: LiveServer) -> None:
    assert endless.post("/v1/chat/completions", chat("hello")).status_code == 200
    with ThreadPoolExecutor(len(FOREVER)) as pool:
        chats = [pool.submit(endless.post, *each) for each in FOREVER]
        for _ in range(20):
            assert endless.post("/v1/completions", ASK).status_code == 200
            assert endless.get("/health").status_code == 200
        assert not any(each.done() for each in chats), "completions waited for conversations"
    for answer in [each.result() for each in chats]:
        assert answer.status_code == 400
        assert "the chat template takes more than 5 s for the conversation" in answer.json()["error"]["message"]
    assert endless.post("/v1/chat/completions", chat("hello")).status_code == 200


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("models/tinycode", max_num_seqs=2)


SLOW, LARGE = "takes more than 5 s", "refuses the conversation: it needs more than 512 MiB of memory"


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{{ '{:>2000000000}'.format(1) }}", LARGE),
        ("{% set n = namespace(x='ab') %}{% for i in range(40) %}{% set n.x = n.x + n.x %}{% endfor %}", LARGE),
        ("{{ 'a' * 40000000 }}", "refuses the conversation: it makes more than 33554432 characters of it"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "refuses the conversation: maximum recursion depth"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("{{ '%1000000000d' % 1 }}", LARGE),
                ("{{ 'a' * 500000000 }}", LARGE),
                ("{{ ('a b' * 90000000) | wordwrap(3) }}", f"{SLOW}|{LARGE}"),
                ("{{ (9**100000000) | string }}", SLOW),
                ("{{ lipsum(n=1000000) }}", SLOW),
                ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", SLOW),
            )
        ),
    ],
)
def test_a_template_has_limits_of_time_and_memory(template: str, sentence: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=sentence):
        llm.chat(TALK, GREEDY, chat_template=template)
    assert llm.chat(TALK, GREEDY, chat_template=TEMPLATE)[0].prompt == "# user: hello\ndef "


def test_a_tokenizer_that_is_slow_with_a_conversation_stops_no_other_call() -> None:
    """Neither where it renders, with code of its own, nor where it encodes."""
    begun, may_end = threading.Event(), threading.Event()
    tokens = AutoTokenizer.from_pretrained("models/tinycode")

    class Slow:
        def __call__(self, text: Any, **options: Any) -> Any:
            if text == "slow":
                begun.set()
                assert may_end.wait(MOST_S), "other calls waited"
            return tokens(text, **options)

        def apply_chat_template(self, messages: Any, **_: Any) -> Any:
            return self(messages[0]["content"]) and messages[0]["content"]

        def __getattr__(self, name: str) -> Any:
            return getattr(tokens, name)

    engine = LLM("models/tinycode", max_num_seqs=2, tokenizer=Slow())
    with ThreadPoolExecutor(2) as pool:
        slow = pool.submit(engine.chat, [{"role": "user", "content": "slow"}], GREEDY, chat_template="own")
        assert begun.wait(MOST_S)
        try:
            other = pool.submit(engine.generate, [5, 60, 700], GREEDY)
            assert len(other.result(MOST_S / 2)[0].outputs[0].token_ids) == 2
            assert not slow.done()
        finally:
            may_end.set()
        assert slow.result()[0].prompt == "slow"


def find(x: list[float], y: int = 1) -> str:
    """Finds a number.

    Args:
        x: Where to look.
        y: What to find.
    """
    return f"{x}{y}"


def test_functions_are_tools_and_other_objects_are_refused(llm: LLM) -> None:
    template = "{{ tools | tojson }}"
    (prompt,) = llm.chat_prompts(TALK, chat_template=template, tools=[find, MappingProxyType(TOOL)])
    expected = llm.get_tokenizer().apply_chat_template(TALK, chat_template=template, tools=[find, TOOL], tokenize=False)
    assert prompt["prompt"] == expected
    with pytest.raises(RequestError, match="multiple values for keyword argument 'tools'"):
        llm.chat_prompts(TALK, chat_template=template, chat_template_kwargs={"tools": []})
    with pytest.raises(RequestError, match="not text, a number, a list or a mapping"):
        llm.chat_prompts(TALK, chat_template=template, chat_template_kwargs={"x": object()})


CALLS = [{"id": "a", "type": "function", "function": {"name": "find", "arguments": {"x": [1, 2.5, None, "é\n"]}}}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"b": 1, "a": {}}, "description": "<é> & '"}}
LONG = [
    {"role": "system", "content": " Be brief.\n"},
    {"role": "user", "content": "Grüße \ud83d\ude00 </s> {{ 1 }}".encode("utf-16", "surrogatepass").decode("utf-16")},
    {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": CALLS},
    {"role": "tool", "content": "1", "tool_call_id": "a"},
]


@pytest.mark.parametrize(
    "template",
    [
        "{{ bos_token }}{% for m in messages %}\n    {{- m['role'] ~ m.content | trim }}\n{% endfor %}\n",
        "{%- if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% for m in messages %}{{ m | tojson }}{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls }}{% continue %}{% endif %}{{ m }}{% endfor %}",
        "{{ strftime_now('%Y') }}{% generation %}{{ messages[1].content }}{% endgeneration %}{{ enable_thinking }}",
        "{{ tools }}{{ messages[2].reasoning }}{{ undefined_name }}{{ eos_token }}{{ add_generation_prompt }}",
    ],
)
def test_the_text_is_that_of_transformers(template: str, llm: LLM) -> None:
    form = {"tools": [TOOL], "add_generation_prompt": True}
    (prompt,) = llm.chat_prompts(LONG, chat_template=template, chat_template_kwargs={"enable_thinking": False}, **form)
    expected = llm.get_tokenizer().apply_chat_template(
        LONG, chat_template=template, tokenize=False, enable_thinking=False, **form
    )
    assert prompt["prompt"] == expected
