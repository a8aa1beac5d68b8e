"""Faults that other servers had, by the number under which they were published: none of them may come back here.

Fields that such requests had are in the tables of `test_hostile_requests`, each beside its number.
"""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from inspect import signature
from typing import Any

import pytest
from drafters.adversarial import BEHAVIOURS
from server.live_server import LiveServer, live_server
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from foretoken import LLM

CODE = "class Queue:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self"
ASK = {"prompt": CODE, "max_tokens": 16, "temperature": 0.0}
TALK = [{"role": "user", "content": "A queue."}]


@contextmanager
def others_served(server: LiveServer) -> Iterator[None]:
    """Another client's requests get the same answer before, during and after what is done in the block."""
    expected, answers, is_over = server.complete(**ASK), list[str](), threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            answers.append(server.complete(**ASK))

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask)
        try:
            yield
        finally:
            is_over.set()
            asking.result()
    assert answers
    assert {*answers, server.complete(**ASK)} == {expected}
    server.wait_until_idle()


# The others by default in tests of the engine alone.
SERVED = ("random", "raises")


@pytest.mark.parametrize(
    "behaviour", [each if each in SERVED else pytest.param(each, marks=pytest.mark.slow) for each in BEHAVIOURS]
)
def test_cve_2026_44223_a_drafter_that_returns_rubbish_beside_penalties(behaviour: Any, plain: LiveServer) -> None:
    rubbish = {"method": "drafters.adversarial", "behaviour": behaviour}
    llm = LLM("models/tinycode", speculative_config=rubbish, max_num_seqs=2)
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    with live_server(llm) as server:
        for more in ({}, penalties, {**penalties, "temperature": 0.8, "seed": 3}):
            assert server.complete(**{**ASK, **more}) == plain.complete(**{**ASK, **more})
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize(
    "regex", ["(a+)+$", "(a|a)*b", "(.*)*(.*)*(.*)*x", "((a{1,100}){1,100}){1,100}", "[a-z]{1,9999}" * 9, "(?=a)a"]
)
def test_cve_2026_55574_expressions_that_take_long_to_compile(regex: str, speculative: LiveServer) -> None:
    with others_served(speculative):
        answer = speculative.post("/v1/completions", {**ASK, "structured_outputs": {"regex": regex}})
        assert answer.status_code in (200, 400), answer.text


def test_cve_2025_62426_all_arguments_of_the_renderer(speculative: LiveServer) -> None:
    functions = (PreTrainedTokenizerBase.apply_chat_template, render_jinja_template)
    for name in {name for each in functions for name in signature(each).parameters} - {"kwargs"}:
        answer = speculative.post("/tokenize", {"messages": TALK, "chat_template_kwargs": {name: True}})
        assert answer.json()["error"]["param"] == "chat_template_kwargs", name


def test_cve_2026_24779_and_116176_nothing_in_a_request_is_fetched(speculative: LiveServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as trap:
        trap.settimeout(0.2)
        url = f"http://127.0.0.1:{trap.getsockname()[1]}/"
        image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
        schema = {"json": {"$ref": url, "$schema": url, "$id": url}}
        assert speculative.post("/v1/chat/completions", {"messages": image}).status_code == 400
        markdown = [{"role": "user", "content": f"![picture]({url})"}]
        headers = {"X-Request-Id": url, "Referer": url, "X-Forwarded-Host": url}
        answer = speculative.post("/v1/chat/completions", {"messages": markdown, "max_tokens": 2}, headers=headers)
        assert answer.status_code == 200
        assert speculative.post("/v1/completions", {**ASK, "structured_outputs": schema}).status_code == 400
        with pytest.raises(TimeoutError):
            trap.accept()


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": 100, "frequency_penalty": -100, "repetition_penalty": 100},
        {"repetition_penalty": 1e-6, "temperature": 1.5, "seed": 1}, {"logit_bias": {"0": -100, "6143": 100}},
        {"presence_penalty": -100, "n": 8}, {"prompt": [6143] * 900, "repetition_penalty": 2.0},
    ],
)  # fmt: skip
def test_cve_2026_105922_penalties_at_their_limits(
    fields: dict[str, Any], speculative: LiveServer, plain: LiveServer
) -> None:
    with others_served(speculative):
        assert speculative.complete(**{**ASK, **fields}) == plain.complete(**{**ASK, **fields})


def test_cve_2025_62727_ranges(speculative: LiveServer) -> None:
    headers = {"Range": "bytes=" + ",".join(f"{i}-" for i in range(5000))}
    with others_served(speculative):
        assert speculative.get("/metrics", headers=headers).status_code in (200, 400, 431)
