"""The HTTP server as a Ray Serve application: replicas of one model behind one address.

`serve run foretoken.server.ray_deployment:app model=MODEL num_replicas=2`, the same fields in a file for `serve
run FILE`, or `ray.serve.run(app(RayArguments(model=MODEL)))`. Ray starts, watches, scales and replaces the replicas.
Every replica runs the server of `foretoken serve`. The fronts before the replicas hold no model.

Requests with the same beginning go to the same replica. If the replica ends before the client received anything,
another replica gets the whole request. A stream that has begun ends with an error: no text comes from two replicas.
"""

# Ray Serve and pydantic read annotations at run time.
import asyncio
import hashlib
import json
import logging
import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foretoken.core.errors import ConfigError, ModelError
from foretoken.server import edge

_ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
# Any replica with room, if the replica of the prefix has none; more than a cluster has.
_ROUTING = {"num_fallback_replicas": 1 << 16}
# Times the sequences that a replica decodes at once; further requests of its prefixes go to other replicas. A choice:
# more keep a prefix on one replica, fewer wait less.
_ONGOING = 2

_OF_THE_ENGINE = {  # fields that are arguments of `LLM`
    "dtype", "device", "max_num_seqs", "max_model_len", "runner", "max_num_batched_tokens", "enable_prefix_caching",
    "kv_cache_memory_bytes", "generation_config", "override_generation_config", "gpu_memory_utilization",
    "quantization", "kv_cache_dtype",
}  # fmt: skip


class RayArguments(BaseModel):
    """The options of `foretoken serve`, under their names and with their meaning, and of Ray Serve.

    Attributes:
        model: Target: a model directory on every machine, or a hub id.
        speculative_config: The text that `-s` takes, or its JSON as a mapping; None for no drafts.
        served_model_name: Name of the model in requests, or several; None for `model`.
        chat_template: Path of a Jinja template on the machine that builds the application; None for the tokenizer's
            own.
        api_key_file: Path of a file with API keys, one a line, on every machine; `FORETOKEN_API_KEY` may hold one too.
        max_num_seqs: Sequences that a replica decodes at once.
        max_waiting_requests: Requests that may wait in each front for a replica; further ones are answered with 429.
        max_waiting_tokens: Prompt tokens that may wait in a replica; further requests are answered with 429.
        threads: CPU threads of a replica; also its `num_cpus` for Ray.
        num_replicas: Replicas, or "auto" for Ray Serve's autoscaling.
        autoscaling_config: Options of Ray Serve's autoscaling.
        ray_actor_options: Options of Ray for every replica, such as `{"num_gpus": 1}`.
        num_fronts: Processes that receive requests and forward them.
        prefix_characters: The number of first characters of a prompt that choose its replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str
    speculative_config: str | dict[str, Any] | None = None
    served_model_name: str | list[str] | None = None
    chat_template: str | None = None
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    api_key_file: str | None = None
    allowed_origins: list[str] = []
    max_num_seqs: int = Field(8, ge=1)
    max_model_len: int | None = Field(None, ge=2)
    max_num_batched_tokens: int | None = Field(None, ge=1)
    enable_prefix_caching: bool = True
    kv_cache_memory_bytes: int | None = Field(None, ge=1)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    max_waiting_requests: int = Field(256, ge=1)
    max_waiting_tokens: int | None = Field(None, ge=0)
    generation_config: str = "auto"
    override_generation_config: dict[str, Any] | str | None = None
    metrics_compat: Literal["vllm"] | None = None
    per_request_spec_decode_metrics: Literal["none", "summary"] = "none"
    dtype: str = "auto"
    device: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    runner: str = "auto"
    threads: int | None = Field(None, ge=1)
    num_replicas: int | Literal["auto"] | None = None
    autoscaling_config: dict[str, Any] | None = None
    ray_actor_options: dict[str, Any] = {}
    num_fronts: int = Field(1, ge=1)
    prefix_characters: int = Field(256, ge=1)


class Replica:
    """One engine with its server, in its own process."""

    def __init__(
        self, arguments: RayArguments, speculative_config: dict[str, Any] | None, template: str | None
    ) -> None:
        """Loads the model; the drafter comes as `LLM` takes it, the chat template in Jinja.

        Raises `ConfigError` when an option is invalid, `ModelError` when the model cannot be loaded, or has no
        tokenizer.
        """
        from ray import serve

        from foretoken.core.backend import set_num_threads
        from foretoken.entrypoints.async_llm import AsyncLLM
        from foretoken.entrypoints.llm import LLM
        from foretoken.server.app import ServerConfig, make_app

        if arguments.threads is not None:
            set_num_threads(arguments.threads)
        options = arguments.model_dump(include=_OF_THE_ENGINE)
        llm = LLM(arguments.model, speculative_config=speculative_config, **options)
        if llm.tokenizer is None:
            raise ModelError(f"'{arguments.model}' has no tokenizer. Expected tokenizer files beside the weights.")
        self._engine = AsyncLLM(
            llm, max_waiting_requests=arguments.max_waiting_requests, max_waiting_tokens=arguments.max_waiting_tokens
        )
        names = arguments.served_model_name or arguments.model
        self._app = make_app(
            self._engine,
            ServerConfig(
                names=[names] if isinstance(names, str) else names, chat_template=template,
                tool_call_parser=arguments.tool_call_parser, reasoning_parser=arguments.reasoning_parser,
                has_vllm_metrics=arguments.metrics_compat == "vllm",
                has_draft_metrics=arguments.per_request_spec_decode_metrics == "summary",
                engine_name=serve.get_replica_context().replica_tag,
            ),
        )  # fmt: skip

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[dict[str, Any]]:
        """Yields the server's answer as ASGI messages; see `answer_messages`."""
        async for message in answer_messages(self._app, scope, body):
            yield dict(message)

    async def metrics_page(self) -> str:
        """Returns the figures of this replica."""
        scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [], "query_string": b""}
        messages = [message async for message in self.answer(scope, b"")]
        return b"".join(message.get("body", b"") for message in messages).decode()

    def check_health(self) -> None:
        """Raises `ModelError` if the engine has stopped; Ray then starts another replica."""
        if not self._engine.is_alive:
            raise ModelError("the engine serves no requests any more.")


_log = logging.getLogger(__name__)
_MOST_ATTEMPTS = 4  # a choice: a request that crashes replicas cannot crash all of them
_METRICS_SECONDS = 10.0  # for the figures of all replicas; the default timeout of Prometheus
_RETRY = {"Retry-After": "1"}
_NONE_COULD_SERVE = edge.ApiError("No replica could serve the request. Send it again.", status=503, headers=_RETRY)
_TOO_MANY_WAIT = edge.ApiError("Too many requests wait.", status=429, code="queue_full", headers=_RETRY)


class _Stopped(Exception):
    """The replica has stopped and serves no requests."""


class Front:
    """Receives requests and forwards every one to a replica."""

    def __init__(self, replicas: Any, arguments: RayArguments) -> None:
        """Reads the API keys; raises `ConfigError` when an API key or an allowed origin is invalid."""
        from ray import exceptions

        edge.check_origins(arguments.allowed_origins)
        self._replicas, self._length, self._origins = replicas, arguments.prefix_characters, arguments.allowed_origins
        self._keys = edge.api_keys(None if arguments.api_key_file is None else Path(arguments.api_key_file))
        self._lost = exceptions.RayActorError, exceptions.ObjectLostError, exceptions.WorkerCrashedError

    def __serve_build_asgi_app__(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Mount

        guarded = edge.Guards(self._serve, api_keys=self._keys, refused=lambda _: None)
        return Starlette(routes=[Mount("/", app=edge.open_to(self._origins, guarded))])

    async def _serve(self, scope: edge.Scope, receive: edge.Receive, send: edge.Send) -> None:
        """Answers one request; its body comes in one message."""
        body = (await receive()).get("body", b"")
        is_page = scope["path"] == "/metrics"
        answer = self._page(send) if is_page else self._answered(portable_scope(scope), body, send)
        answering = await edge.run_while_connected(answer, receive)
        if not answering.cancelled():
            answering.result()

    async def _page(self, send: edge.Send) -> None:
        response = self._replicas.broadcast("metrics_page")
        pages = await response.results_async(timeout_s=_METRICS_SECONDS, return_exceptions=True)
        page = merged_pages(page for page in pages if isinstance(page, str)).encode()
        headers = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": page})

    async def _answered(self, scope: dict[str, Any], body: bytes, send: edge.Send) -> None:
        """Forwards the answer of a replica; holds the status until the first part of the body, to be able to retry."""
        from ray.exceptions import RayError
        from ray.serve.exceptions import BackPressureError, RayServeException

        key, error = prefix_key(body, self._length) or uuid.uuid4().hex, _NONE_COULD_SERVE
        for attempt in range(_MOST_ATTEMPTS):
            held: list[edge.Message] = []
            has_begun = False
            try:
                async with aclosing(self._messages(key, scope, body)) as messages:
                    async for message in messages:
                        held.append(message)
                        if message.get("status") == 503:
                            raise _Stopped
                        if message["type"] == "http.response.body":
                            has_begun = True
                            while held:
                                await send(held.pop(0))
                return
            except (*self._lost, _Stopped) as err:
                if has_begun:
                    await self._break_off(scope["path"], send)
                    return
                _log.warning("a replica ended while it served a request (%s)", type(err).__name__)
                key = uuid.uuid4().hex  # another replica
                await asyncio.sleep(0.2 * (attempt + 1))
            except BackPressureError:
                error = _TOO_MANY_WAIT
                break
            except (RayError, RayServeException):
                _log.exception("a request could not be served")
                break
        await edge.send_json(send, error.body, error.status, error.headers)

    async def _messages(self, key: str, scope: dict[str, Any], body: bytes) -> AsyncGenerator[edge.Message]:
        """Yields the messages of the replica for this key; tells the replica if the reader stops."""
        handle = self._replicas.options(stream=True, method_name="answer", session_id=key)
        response = handle.remote(scope, body)
        try:
            async for message in response:
                yield message
        finally:
            response.cancel()

    async def _break_off(self, path: str, send: edge.Send) -> None:
        error = edge.ApiError("The server that wrote this answer ended. Send the request again.", status=503)
        told, name = error.body, ""
        if path.endswith("/responses"):
            told, name = {"type": "error", "code": "server_error", "message": error.message, "param": None}, "error"
        event = (f"event: {name}\n" if name else "") + f"data: {json.dumps(told)}\n\n"
        await send({"type": "http.response.body", "body": event.encode(), "more_body": False})


def prefix_key(body: bytes, length: int) -> str | None:
    """Returns a key that prompts with the same first characters and the same `cache_salt` share.

    Only the beginning of a conversation counts, up to the first user message: all its turns have one key. `length`
    counts characters; for prompts of token ids, tokens. The key is a hash, which reveals nothing of the prompt; None
    for a body without a prompt.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):  # the engine's server reports the error
        return None
    beginning = _beginning(asked, length) if isinstance(asked, dict) else None
    if not beginning:
        return None
    told = json.dumps([asked.get("cache_salt"), beginning])
    return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()


def _beginning(asked: dict[str, Any], length: int) -> Any:
    messages = asked.get("messages", asked.get("input"))
    if isinstance(messages, list) and messages and isinstance(messages[0], dict):
        at = next((at for at, each in enumerate(messages) if isinstance(each, dict) and each.get("role") == "user"), 0)
        opening = [asked.get("instructions"), asked.get("tools"), messages[: at + 1]]
        return json.dumps(opening, ensure_ascii=False)[:length]
    prompt = asked.get("prompt", messages)
    while isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
        prompt = prompt[0]  # all prompts of a request go to one replica
    if isinstance(prompt, str) and isinstance(asked.get("instructions"), str):
        prompt = asked["instructions"] + prompt
    return prompt[:length] if isinstance(prompt, str | list) else None


_PASSED_ON = (
    "http_version",
    "method",
    "scheme",
    "path",
    "raw_path",
    "root_path",
    "query_string",
    "headers",
    edge.CLIENT,
)


def portable_scope(scope: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parts of an ASGI scope that another process can use."""
    return {"type": "http", **{key: scope[key] for key in _PASSED_ON if key in scope}}


async def answer_messages(app: edge.App, scope: dict[str, Any], body: bytes) -> AsyncGenerator[edge.Message]:
    """Yields an application's messages; closing the iterator tells it that the client disconnected."""
    sent: asyncio.Queue[edge.Message | None] = asyncio.Queue()
    given: list[edge.Message] = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def receive() -> edge.Message:
        if given:
            return given.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    task = asyncio.ensure_future(app(scope, receive, sent.put))
    task.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            yield message
        await task
    finally:
        gone.set()
        await asyncio.wait((task,))


def merged_pages(pages: Iterable[str]) -> str:
    """Merges pages in Prometheus' text format: each family appears once, with the samples of all pages."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for page in pages:
        name = ""
        for line in page.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            heading, samples = families.setdefault(name, ([], []))
            if not line.startswith("#"):
                samples.append(line)
            elif line not in heading:
                heading.append(line)
    return "".join(f"{line}\n" for heading, samples in families.values() for line in (*heading, *samples))


def app(arguments: RayArguments) -> Any:
    """Returns the application for `serve run`, `serve deploy` and `ray.serve.run`.

    Raises `ConfigError` when Ray Serve is not installed, the drafter is invalid, or the template cannot be read.
    """
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as err:
        raise ConfigError(
            "Ray Serve is not installed. Run in foretoken's repository: pip install '.[serve,ray]'."
        ) from err
    deployment: Any = serve.deployment  # Ray's annotations leave out options that it accepts
    router_config: Any = RequestRouterConfig  # and classes by name
    scaling = {"num_replicas": arguments.num_replicas, "autoscaling_config": arguments.autoscaling_config}
    replicas = deployment(
        Replica, name="replica", ray_actor_options=arguments.ray_actor_options,
        max_ongoing_requests=_ONGOING * arguments.max_num_seqs, max_queued_requests=arguments.max_waiting_requests,
        request_router_config=router_config(request_router_class=_ROUTER, request_router_kwargs=_ROUTING),
        **{name: value for name, value in scaling.items() if value is not None},
    ).bind(arguments, _drafter(arguments), _template(arguments))  # fmt: skip
    front = deployment(
        serve.ingress()(Front), name="front", num_replicas=arguments.num_fronts, max_ongoing_requests=1 << 16
    )
    return front.bind(replicas, arguments)


def _drafter(arguments: RayArguments) -> dict[str, Any] | None:
    from foretoken.entrypoints.config import checked_setup

    if not isinstance(arguments.speculative_config, str):
        return arguments.speculative_config
    setup = checked_setup(arguments.speculative_config, target=arguments.model)
    if setup.needs_references:
        raise ConfigError("the drafter 'oracle' must know the text beforehand. Use it with `foretoken bench`.")
    return None if setup.config is None else dict(setup.config)


def _template(arguments: RayArguments) -> str | None:
    if arguments.chat_template is None:
        return None
    try:
        return Path(arguments.chat_template).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ConfigError(f"'{arguments.chat_template}' cannot be read: {err}. Expected a text file.") from err
