"""Two replicas under Ray Serve: one engine's text, a place for each prefix, and a killed replica that costs a retry."""

import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("ray", reason="needs the extra [ray]")

from served_app import wait_until
from server.live_server import TEMPLATE, LiveServer
from server.ray_cluster import kill_one, ray_cluster, workers
from server.test_openai_client import MIXED, choices_of, create, streamed

from foretoken.server.ray_deployment import RayArguments, app

REPLICA = "ray::ServeReplica:default:replica"
KEY = "the-key-of-this-test"
FIELDS: dict[str, Any] = {"max_tokens": 160, "temperature": 0.8, "seed": 7}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # Ray's own


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where two replicas answer."""
    place = tmp_path_factory.mktemp("ray")
    template, keys = place / "template", place / "keys"
    template.write_text(TEMPLATE)
    keys.write_text(KEY)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = RayArguments(
        model="models/tinycode", served_model_name="tinycode", speculative_config="ngram:num_speculative_tokens=6",
        num_replicas=2, chat_template=str(template), api_key_file=str(keys), ray_actor_options={"num_cpus": 1},
        allowed_origins=["https://app.example.org"], override_generation_config={"max_new_tokens": 200},
    )  # fmt: skip
    with ray_cluster(num_cpus=4):
        from ray import serve

        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app(arguments))
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client


def figures(url: str, name: str) -> dict[str, float]:
    """A figure of every replica."""
    page = httpx.get(f"{url}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=60).text
    found: dict[str, float] = {}
    for engine, value in re.findall(rf'^{name}{{.*?engine="([^"]+)".*?}} (\S+)$', page, re.MULTILINE):
        found[engine] = found.get(engine, 0) + float(value)
    return found


def test_answers_are_those_of_one_engine(client: openai.OpenAI, plain: LiveServer, url: str) -> None:
    expected = {name: choices_of(create(plain.client(), name)) for name in MIXED}
    with ThreadPoolExecutor(16) as pool:
        whole = {name: pool.submit(create, client, name) for name in MIXED}
        parts = {name: pool.submit(streamed, client, name) for name in MIXED}
    assert {name: choices_of(future.result()) for name, future in whole.items()} == expected
    assert {name: future.result()[0] for name, future in parts.items()} == expected
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    with pytest.raises(openai.BadRequestError, match="temperature"):
        create(client, "greedy", temperature=-1)
    answer = create(client, "greedy", max_tokens=900, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 200, "the most that the replicas were told"
    for origin, status in (("https://app.example.org", 200), ("https://evil.example", 400)):
        headers = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        answer = httpx.options(f"{url}/v1/models", headers=headers)
        assert (answer.status_code, "access-control-allow-origin" in answer.headers) == (status, status == 200)


def test_a_prefix_has_its_replica_and_prefixes_are_spread(client: openai.OpenAI, url: str) -> None:
    name = "foretoken:request_success_total"
    used = set()
    for number in range(12):
        before = figures(url, name)
        prefix = f"# module {number}\n" * 40
        for end in ("import os", "def main():", "class Queue:"):
            client.completions.create(model="tinycode", prompt=prefix + end, max_tokens=2, temperature=0)
        after = figures(url, name)
        served = {engine: after[engine] - before.get(engine, 0) for engine in after}
        assert sorted(served.values())[-1] == 3, served
        used.add(max(served, key=lambda engine: served[engine]))
        if len(used) == 2:
            return
    pytest.fail("all prefixes went to one replica")


def test_leaving_a_stream_ends_the_request(client: openai.OpenAI, url: str) -> None:
    stream = create(client, "greedy", max_tokens=900, stream=True)
    next(iter(stream))
    stream.close()
    wait_until(lambda: sum(figures(url, "foretoken:client_disconnects_total").values()))
    wait_until(lambda: not any(figures(url, "foretoken:num_requests_running").values()))


def test_a_killed_replica_costs_a_retry_and_no_wrong_text(client: openai.OpenAI, plain: LiveServer) -> None:
    prompts = [f"def function_{number}(self):" for number in range(24)]

    def text(client: openai.OpenAI, prompt: str) -> str:
        return str(client.completions.create(model="tinycode", prompt=prompt, **FIELDS).choices[0].text)

    def stream(prompt: str) -> tuple[str, bool]:
        written = ""
        try:
            for chunk in client.completions.create(model="tinycode", prompt=prompt, stream=True, **FIELDS):
                written += chunk.choices[0].text
        except openai.APIError:
            return written, False
        return written, True

    expected = [text(plain.client(), prompt) for prompt in prompts]
    victims = {process.pid for process in workers(REPLICA)}
    assert len(victims) == 2
    with ThreadPoolExecutor(32) as pool:
        whole = [pool.submit(text, client, prompt) for prompt in prompts]
        parts = [pool.submit(stream, prompt) for prompt in prompts[:8]]
        wait_until(lambda: sum(future.done() for future in whole) >= 2)
        assert not all(future.done() for future in whole)
        kill_one(REPLICA)
    assert [future.result() for future in whole] == expected
    for future, right in zip(parts, expected[:8], strict=True):
        written, is_whole = future.result()
        assert written == right if is_whole else right.startswith(written)
