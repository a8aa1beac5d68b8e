"""A server of ours on a free port of the loopback device, under uvicorn in a thread, and clients for it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
from served_app import served, wait_until

from foretoken import LLM, AsyncLLM
from foretoken.server.app import ServerConfig, make_app

TEMPLATE = (
    "{% for m in messages %}# {{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}def {% endif %}"
)


class LiveServer:
    """A running server.

    Attributes:
        url: Where it listens.
        engine: What it serves requests with.
    """

    def __init__(self, url: str, engine: AsyncLLM) -> None:
        self.url, self.engine = url, engine
        self._clients: dict[str, openai.OpenAI] = {}

    def client(self, key: str = "none") -> openai.OpenAI:
        """OpenAI's own client, one for each key, which tries nothing twice."""
        if key not in self._clients:
            self._clients[key] = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)
        return self._clients[key]

    def close_clients(self) -> None:
        """Closes their connections."""
        for client in self._clients.values():
            client.close()

    def post(self, path: str, body: Any = None, **more: Any) -> httpx.Response:
        """Sends what OpenAI's client would not; body: as JSON unless `content` is given."""
        given = more if "content" in more else {"json": body, **more}
        return httpx.post(self.url + path, timeout=60, **given)

    def get(self, path: str, **more: Any) -> httpx.Response:
        """Likewise."""
        return httpx.get(self.url + path, timeout=60, **more)

    def complete(self, **fields: Any) -> str:
        """The text of a completion."""
        answer = self.post("/v1/completions", fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def figure(self, name: str, label: str = "") -> float:
        """The sum of a figure's samples that have a label."""
        lines = self.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name) and label in line)

    def wait_until_idle(self) -> None:
        """Returns once no request is served; fails after a minute."""
        wait_until(lambda: not (self.engine.num_running or self.engine.num_waiting))


@contextmanager
def live_server(llm: LLM, *, max_waiting_requests: int = 256, **config: Any) -> Iterator[LiveServer]:
    """Serves a model until the end of the block; config: of `ServerConfig`."""
    engine = AsyncLLM(llm, max_waiting_requests=max_waiting_requests)
    app = make_app(engine, ServerConfig(**{"names": ["tinycode"], **config}))
    try:
        with served(app) as url:
            server = LiveServer(url, engine)
            try:
                yield server
            finally:
                server.close_clients()
    finally:
        assert not engine.is_alive, "the engine's thread outlives the server"
