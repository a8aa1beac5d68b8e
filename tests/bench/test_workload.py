"""Workloads of prompt sets: what a model with and without a chat template is asked, and when its answers end."""

from collections.abc import Iterator
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from foretoken.bench.workload import Workload, make_workload
from foretoken.core.errors import RequestError
from foretoken.entrypoints.model_arguments import load_target
from foretoken.text.prompt_rows import read_prompt_row

TEMPLATE = "{% for m in messages %}# {{ m.role }}:\n{{ m.content }}\n{% endfor %}# you:"
ROWS = [
    {"turns": ["class Queue:", "class Stack:"], "category": "writing"},
    {"prompt": "import os\n", "category": "coding"},
    {"question": "def f(x):"},
]


@pytest.fixture(scope="module")
def target() -> tuple[Any, Any]:
    return load_target("models/tinycode")


@pytest.fixture
def chat(target: tuple[Any, Any]) -> Iterator[tuple[Any, Any]]:
    """The same target with a chat template."""
    model, tokenizer = target
    tokenizer.chat_template = TEMPLATE
    yield model, tokenizer
    tokenizer.chat_template = None


def workload(target: tuple[Any, Any], rows: list[dict[str, Any]] = ROWS, **settings: Any) -> Workload:
    read = [read_prompt_row(row, f"rows.jsonl:{number}") for number, row in enumerate(rows, start=1)]
    return make_workload(read, *target, max_tokens=12, **settings)


def greedy(target: tuple[Any, Any], prompt: Any, **more: Any) -> str:
    """The target's answer by plain decoding."""
    llm = LLM(target[0], tokenizer=target[1])
    return llm.generate([prompt], SamplingParams(temperature=0, max_tokens=12, **more))[0].outputs[0].text.strip()


def test_conversations_go_through_the_chat_template(chat: tuple[Any, Any]) -> None:
    """A raw prompt stays raw; a second turn follows the model's own answer; the turns of a row belong together."""
    found, encode = workload(chat), chat[1].encode
    first = "# user:\nclass Queue:\n# you:"
    answer = greedy(chat, encode(first, add_special_tokens=False))
    second = f"# user:\nclass Queue:\n# assistant:\n{answer}\n# user:\nclass Stack:\n# you:"
    third = "# user:\ndef f(x):\n# you:"
    assert [each if isinstance(each, str) else chat[1].decode(each) for each in found.prompts] == [
        first, second, "import os\n", third,
    ]  # fmt: skip
    assert found.prompts[0] == encode(first, add_special_tokens=False)
    assert (found.categories, found.questions) == (["writing", "writing", "coding", ""], [0, 0, 1, 2])
    assert [each.ignore_eos for each in found.params(0.0)] == [False, False, True, False]


def test_a_model_without_a_template_gets_text(target: tuple[Any, Any]) -> None:
    answer = greedy(target, "class Queue:")
    assert workload(target).prompts == [
        "class Queue:", f"class Queue:\n\n{answer}\n\nclass Stack:", "import os\n", "def f(x):",
    ]  # fmt: skip


def test_a_refused_conversation_names_its_row(chat: tuple[Any, Any]) -> None:
    rows = [{"prompt": "x"}, {"question": " ".join(map(str, range(1000)))}]
    with pytest.raises(RequestError, match=r"^rows\.jsonl:2: the conversation has \d{4} tokens. Expected at most 1023"):
        workload(chat, rows)
    chat[1].chat_template = "{{ raise_exception('users first') }}"
    with pytest.raises(RequestError, match=r"^rows\.jsonl:2: the chat template refuses .* users first"):
        workload(chat, [{"prompt": "x"}, {"question": "y"}])
