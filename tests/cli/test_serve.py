"""`foretoken serve` as a process: what it says, how it ends, and what it refuses before it loads anything."""

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from cli.command_line import MODEL, assert_refused, refused
from forked import ForkedCommand

from foretoken import LLM
from foretoken.core.errors import ConfigError


def wait_for(url: str) -> None:
    """Returns once a server answers; fails after a minute."""
    end = time.monotonic() + 60
    while True:
        try:
            assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        except httpx.TransportError:
            assert time.monotonic() < end
            time.sleep(0.02)
        else:
            return


@contextmanager
def serving(port: int = 0) -> Iterator[tuple[ForkedCommand, str]]:
    """A process that serves, and its address."""
    arguments = ("-s", "ngram", "--port", str(port), "--threads", "1", "--served-model-name", "tiny")
    with ForkedCommand("serve", MODEL, *arguments) as process:
        told = lines_until_serving(process)
        assert told[-1].startswith("serving tiny with ngram on http://127.0.0.1:"), told
        assert "parsers, by the chat template or the options: tool calls none, thoughts none\n" in told
        url = told[-1].split()[-1]
        wait_for(url)
        yield process, url


def lines_until_serving(process: ForkedCommand) -> list[str]:
    """What it says first: a machine compiles the kernels and times passes once."""
    told = []
    for line in process.stderr:
        told.append(line)
        if line.startswith("serving ") or process.poll() is not None:
            break
    return told


@pytest.fixture
def server() -> Iterator[tuple[ForkedCommand, str]]:
    """One of them."""
    with serving() as one:
        yield one


def test_sigterm_lets_running_requests_end(server: tuple[ForkedCommand, str]) -> None:
    process, url = server
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        stream = client.completions.create(
            model="tiny", prompt="def main():", max_tokens=60, temperature=0, stream=True
        )
        text = next(iter(stream)).choices[0].text
        process.send_signal(signal.SIGTERM)
        reasons = [choice.finish_reason for chunk in stream for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert text
    assert process.wait(60) == -signal.SIGTERM, "the signal is passed on once all is done"


@pytest.mark.slow
def test_a_killed_server_starts_again_on_its_port() -> None:
    """kill -9 in the middle of streams: clients see that their answers broke off; nothing is left behind."""
    asked: dict[str, Any] = {"model": "tiny", "prompt": "def main():", "temperature": 0}
    with serving() as (process, url), openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        whole = client.completions.create(**asked, max_tokens=40).choices[0].text
        streams = [client.completions.create(**asked, max_tokens=600, stream=True) for _ in range(3)]
        for stream in streams:
            next(iter(stream))
        process.send_signal(signal.SIGKILL)
        for stream in streams:
            with pytest.raises((openai.APIError, httpx.TransportError)):
                for _ in stream:
                    pass
        assert process.wait(60) == -signal.SIGKILL
    with serving(urlsplit(url).port or 0) as (_, again):
        assert again == url
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(**asked, max_tokens=40).choices[0].text == whole


@pytest.mark.slow
def test_a_failed_engine_ends_the_process() -> None:
    """Its thread fails at the first request; whatever watches over the process sees that by the exit code."""
    setup = (
        "from foretoken.engine.loop import Engine\n"
        "def fail(self): raise KeyboardInterrupt('as a thread may meet it')\n"
        "Engine.step = fail\n"
    )
    with ForkedCommand("serve", MODEL, "--port", "0", "--threads", "1", setup=setup) as process:
        url = lines_until_serving(process)[-1].split()[-1]
        wait_for(url)
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "def main():"}, timeout=60)
        assert answer.status_code == 500
        assert process.wait(60) == 1
        assert "error: the engine failed and serves no requests any more" in process.stderr.read()


@pytest.mark.slow
def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with ForkedCommand("serve", MODEL, "--port", str(port)) as process:
            _, errors = process.communicate()
    assert process.returncode == 2
    assert f"error: cannot listen on 127.0.0.1, port {port}: Address already in use" in errors


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["-s", "ngram", "-s", "hydra"], "serve takes one --speculative-config"),
        (["-s", "oracle"], "must know the text beforehand"),
        (["--metrics-compat", "tgi"], "--metrics-compat is 'tgi'. Expected vllm."),
        (["--tool-call-parser", "herms"], "--tool-call-parser is 'herms'. Did you mean 'hermes'?"),
        (["--reasoning-parser", "qwen"], "--reasoning-parser is 'qwen'. Did you mean 'qwen3'?"),
        (["--per-request-spec-decode-metrics", "all"], "Expected none or summary."),
        (["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
        (["--allowed-origins", '["https://a.example", "b"]'], "an allowed origin is 'b'. Expected '*'"),
        (["--allowed-origins", "https://a.example", "--allowed-origins", "[1]"], "--allowed-origins is '[1]'"),
        (["--api-key-file", "KEYS"], "'KEYS' has no API key. Expected one a line."),
    ],
)
def test_what_does_not_fit(more: list[str], message: str, tmp_path: Path) -> None:
    empty = tmp_path / "KEYS"
    empty.write_text("\n\n", encoding="utf-8")
    given = (str(empty) if each == "KEYS" else each for each in more)
    assert_refused(message.replace("KEYS", str(empty)), "serve", MODEL, *given)


@pytest.mark.parametrize(
    ("option", "argument"),
    [
        (["--tensor-parallel-size", "2"], {"tensor_parallel_size": 2}),
        (["-tp", "2"], {"tensor_parallel_size": 2}),
        (["--pipeline_parallel_size=4"], {"pipeline_parallel_size": 4}),
        (["--calculate-kv-scales"], {"calculate_kv_scales": True}),
        (["--hf-overrides", '{"a": 1}'], {"hf_overrides": {"a": 1}}),
        (["--no-enforce-eager", "--enable-lora"], {"enforce_eager": False, "enable_lora": True}),
    ],
)
@pytest.mark.parametrize("command", [("serve", MODEL), ("batch", "in", "out", "--model", MODEL)])
def test_options_of_vllm_get_the_sentence_of_its_arguments(
    command: tuple[str, ...], option: list[str], argument: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as caught:
        LLM(MODEL, **argument)
    told = refused(*command, *option)
    assert told.startswith("error: -")
    assert told.rstrip().endswith(str(caught.value).split(" is not supported")[1])


@pytest.mark.parametrize(
    ("option", "advice"),
    [
        (["--api-key", "secret"], "--api-key-file"),
        (["--ssl-keyfile", "key"], "reverse proxy"),
        (["-tp"], "one device"),
    ],
)
def test_options_of_vllms_server_alone_are_refused_with_what_to_do(option: list[str], advice: str) -> None:
    told = refused("serve", MODEL, *option)
    assert advice in told
    assert "No such option" not in told


def test_options_of_vllm_that_ask_for_nothing_are_taken() -> None:
    taken = (
        "-tp 1 --gpu-memory-utilization 0.9 --disable-log-requests --max-log-len 80 --block_size=16 --enforce-eager "
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning_parser deepseek_r1 "
        "--enable-prompt-tokens-details --host 127.0.0.1 --max_num_seqs 2 --metrics-compat tgi"
    )
    assert refused("serve", MODEL, *taken.split()) == "error: --metrics-compat is 'tgi'. Expected vllm.\n"
    assert_refused("No such option: --tensor-paralel-size", "serve", MODEL, "--tensor-paralel-size", "2")
