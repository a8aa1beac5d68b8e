"""Clients share slots and the queue, whatever one of them asks for, and every text is that of a request alone.

Slow because every slot writes hundreds of tokens.
"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from served_app import wait_until
from server.live_server import LiveServer, live_server

from foretoken import LLM

SLOTS = 8
KEYS = ["first-key", "second-key"]
LONG = {"max_tokens": 400, "ignore_eos": True}
SHORT = {"prompt": "def main():", "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
# By address, as a proxy on this machine tells it, and by key.
CLIENTS = {
    "address": [{"X-Forwarded-For": "192.0.2.1"}, {"X-Forwarded-For": "192.0.2.2"}],
    "network": [{"X-Forwarded-For": "2001:db8:1::1"}, {"X-Forwarded-For": "2001:db8:2::1"}],
    "key": [{"Authorization": f"Bearer {key}"} for key in KEYS],
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("models/tinycode", speculative_config={"method": "ngram"}, max_num_seqs=SLOTS)


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LiveServer]:
    with live_server(llm) as made:
        yield made


@pytest.fixture(scope="module")
def keyed(llm: LLM) -> Iterator[LiveServer]:
    with live_server(llm, api_keys=KEYS) as made:
        yield made


def texts(answer: Any) -> list[str]:
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]


def preemptions(server: LiveServer) -> float:
    values = {metric.name: metric for metric in server.engine.llm.get_metrics()}
    return getattr(values["vllm:num_preemptions"], "value", 0)


def long_requests() -> list[dict[str, Any]]:
    """As many as there are slots, greedy and sampled with a seed."""
    prompts = [f"class Queue{i}:\n    def push(self, item):\n" for i in range(SLOTS)]
    return [
        {"prompt": prompt, **LONG, **({"temperature": 0.8, "seed": i, "top_p": 0.9} if i % 2 else {"temperature": 0})}
        for i, prompt in enumerate(prompts)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("by", CLIENTS)
def test_a_client_with_all_slots_lets_another_in(by: str, request: pytest.FixtureRequest) -> None:
    server: LiveServer = request.getfixturevalue("keyed" if by == "key" else "server")
    many, one = CLIENTS[by]
    alone = [texts(server.post("/v1/completions", each, headers=many)) for each in long_requests()]
    expected, before = texts(server.post("/v1/completions", SHORT, headers=one)), preemptions(server)
    with ThreadPoolExecutor(SLOTS) as pool:
        sent = [pool.submit(server.post, "/v1/completions", each, headers=many) for each in long_requests()]
        wait_until(lambda: server.engine.num_running >= SLOTS)
        assert texts(server.post("/v1/completions", SHORT, headers=one)) == expected
        assert not any(each.done() for each in sent), "it waited for the requests of another client"
        assert [texts(each.result()) for each in sent] == alone, "texts of preempted requests are others"
    assert preemptions(server) == before + 1


@pytest.mark.parametrize("who", [0, pytest.param(1, marks=pytest.mark.slow)], ids=["same client", "another client"])
@pytest.mark.parametrize("num_prompts", [pytest.param(SLOTS, marks=pytest.mark.slow), SLOTS + 1, 3 * SLOTS])
def test_a_list_of_prompts_lets_others_in(num_prompts: int, who: int, server: LiveServer) -> None:
    many, other = CLIENTS["address"][0], CLIENTS["address"][who]
    body = {"prompt": ["def area(self):\n    "] * num_prompts, "temperature": 0, **LONG, "stream": True}
    has_ended = threading.Event()

    def read() -> None:
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, headers=many, timeout=60) as stream:
            for line in stream.iter_lines():
                if '"finish_reason":"length"' in line:
                    has_ended.set()
                    return

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        wait_until(lambda: server.engine.num_running >= SLOTS)
        for _ in range(3):
            assert len(texts(server.post("/v1/completions", SHORT, headers=other))) == 1
            assert not has_ended.is_set(), "it waited for a prompt of the list"
        reading.result()
    server.wait_until_idle()


def test_a_full_queue_of_one_client_refuses_no_other(llm: LLM) -> None:
    many, one = CLIENTS["address"]
    with live_server(llm, max_waiting_requests=2) as server, ThreadPoolExecutor(SLOTS + 2) as pool:
        body = {**long_requests()[0], "max_tokens": 200}
        sent = [pool.submit(server.post, "/v1/completions", body, headers=many) for _ in range(SLOTS + 2)]
        wait_until(lambda: (server.engine.num_running, server.engine.num_waiting) == (SLOTS, 2))
        refused = server.post("/v1/completions", SHORT, headers=many)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
        assert len(texts(server.post("/v1/completions", SHORT, headers=one))) == 1
        assert not any(each.done() for each in sent)
        assert len({text for each in sent for text in texts(each.result())}) == 1
