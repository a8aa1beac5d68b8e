"""One server with speculation and one without, for all tests of this folder."""

from collections.abc import Iterator

import pytest
from server.live_server import TEMPLATE, LiveServer, live_server

from foretoken import LLM

NGRAM = {"method": "ngram", "num_speculative_tokens": 6}


@pytest.fixture(scope="session")
def speculative() -> Iterator[LiveServer]:
    llm = LLM("models/tinycode", speculative_config=NGRAM, max_num_seqs=8)
    with live_server(llm, chat_template=TEMPLATE, has_vllm_metrics=True) as server:
        yield server


@pytest.fixture(scope="session")
def plain() -> Iterator[LiveServer]:
    with live_server(LLM("models/tinycode", max_num_seqs=8), chat_template=TEMPLATE) as server:
        yield server
