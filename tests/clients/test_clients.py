"""Clients of others against a live server: a script each, which users may run too."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from server.live_server import LiveServer, live_server
from server.scripted_model import save_scripted_model

from foretoken import LLM

CALL = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
SCRIPTS = {
    "answer": "It rains.",
    "think": "<think>\nHm, Paris.\n</think>\n\nIt rains.",
    "weather": f"I look.\n<tool_call>\n{CALL}\n</tool_call>",
    "json": '{"city": "Paris", "days": 2}',
    "calls": '[{"name": "get_weather", "parameters": {"city": "Paris", "days": 2}}]',
}
pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} {{ c.function.arguments | tojson }}</tool_call>"
    "{% endfor %}{{ m.tool_call_id }}\n{% endfor %}<|begin:{{ messages[-1].content if messages[-1].role == 'user' else "
    "'answer' }}{# </think> #}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    tags = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
    folder = save_scripted_model(tmp_path_factory.mktemp("model"), SCRIPTS, TEMPLATE, plain=tags)
    config = {"method": "draft_model", "model": folder, "num_speculative_tokens": 5}
    with live_server(LLM(folder, speculative_config=config, max_num_seqs=4), names=["scripted"]) as live:
        yield live


@pytest.mark.parametrize("name", ["openai", "langchain", "litellm", "llm"])
def test_a_client_works(name: str, server: LiveServer) -> None:
    script = Path(__file__).parent / f"{name}_client.py"
    done = subprocess.run(
        [sys.executable, str(script), server.url, "scripted"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
