"""`foretoken serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import json
import socket
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.files.processes import run_lock
from foretoken.models.names import resolve_model
from foretoken.server.edge import KEY_VARIABLE, api_keys
from foretoken.server.tools import TAGS, TOOL_FORMATS, thinking_tags, tool_format

if TYPE_CHECKING:
    from collections.abc import Iterable

    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.entrypoints.config import Setup


_batches = partial(typer.Option, rich_help_panel="Batches and memory")
_network = partial(typer.Option, rich_help_panel="Network")
_distillation = partial(typer.Option, rich_help_panel="Training the draft model on requests")
_VLLMS_NAME = "--per-request-spec-decode-metrics"  # too long for a column at 80 characters


def serve(
    model: Annotated[str, typer.Argument(help=f"Target: {options.MODEL_FORMS}.")],
    *,
    drafter: options.DrafterChoice,
    synthetic_acceptance: options.SyntheticAcceptance = None,
    host: Annotated[str, _network(help="Address to listen on; 0.0.0.0 for all of this machine.")] = "127.0.0.1",
    port: Annotated[int, _network(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Name of the model in requests; may be repeated. Default: MODEL.")
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Jinja template of conversations, instead of the tokenizer's own."),
    ] = None,
    tool_call_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"How the model writes tool calls: {', '.join(form.names[0] for form in TOOL_FORMATS)}, none, or auto "
            "for what its chat template shows.",
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help=f"How it writes its thoughts: {', '.join(tags.names[0] for tags in TAGS)}, none, or auto.",
        ),
    ] = "auto",
    api_key_file: Annotated[
        Path | None,
        _network(metavar="PATH", help=f"File with API keys, one a line. {KEY_VARIABLE} may hold one too."),
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _network(
            metavar="URL",
            help="Origins whose pages may read answers (CORS), as https://example.org, or '*'; a JSON list, or "
            "repeated. Default: the server's own page alone.",
        ),
    ] = None,
    max_num_seqs: Annotated[int, _batches(min=1, help="Sequences decoded at once.")] = 8,
    max_model_len: Annotated[int | None, _batches(min=2, help="Most tokens of a sequence.")] = None,
    max_num_batched_tokens: Annotated[int | None, _batches(min=1, help="Most tokens of a pass.")] = None,
    enable_prefix_caching: Annotated[
        bool,
        _batches(
            help="Reuse the KV rows of a prompt's prefix, unless --no-enable-prefix-caching is given. "
            "Never across cache salts.",
            show_default=False,
        ),
    ] = True,
    kv_cache_memory_bytes: Annotated[
        int | None,
        _batches(min=1, help="Memory for the KV rows of all sequences (default: half of the free memory)."),
    ] = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    max_waiting_requests: Annotated[int, _batches(min=0, help="More are answered with 429.")] = 256,
    max_waiting_tokens: Annotated[int | None, _batches(min=0, help="In prompt tokens; more get 429.")] = None,
    distill_to: Annotated[
        Path | None,
        _distillation(
            metavar="PATH",
            help="Train the draft model on the requests that are served, beside the server, and swap better weights "
            "in. Keeps token ids of prompts and answers in this directory. Default: nothing is kept.",
        ),
    ] = None,
    distill_tokens: Annotated[
        int, _distillation(min=1 << 16, help="Most tokens of requests in that directory; the oldest leave.")
    ] = 1_000_000,  # 3 MB with 16-bit ids; a choice
    metrics_compat: Annotated[
        str | None, typer.Option(metavar="NAME", help="vllm: show figures at /metrics under vLLM's names too.")
    ] = None,
    per_request_spec_decode_metrics: Annotated[
        str,
        typer.Option(
            "--spec-decode-metrics",
            _VLLMS_NAME,
            metavar="NAME",
            help=f"summary: answers say how drafting went. vLLM's {_VLLMS_NAME} is the same.",
        ),
    ] = "none",
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    seed: Annotated[
        int | None, typer.Option(help="Makes requests without a seed reproducible, in their order.")
    ] = None,
    loading: options.LoadOptions,
    verbose: options.Verbose = False,
) -> None:
    """Serve a model over HTTP with OpenAI's API: completions, chat, streaming, structured outputs, metrics.

    Answers are the text of the target alone, unless a lossy acceptance rule is named. After SIGTERM or Ctrl-C, running
    requests have 30 seconds to end. Options of `vllm serve` are accepted at values that change nothing here; other
    values are refused with a hint.
    """
    clock = terminal.StartClock()
    names, model = served_model_name or [model], resolve_model(model)
    with clock.stage("libraries"):
        from foretoken.entrypoints.async_llm import AsyncLLM
        from foretoken.entrypoints.llm import LLM

    setup = drafter.setup("serve", model, "Merge several with +, as ngram+hydra.")
    if synthetic_acceptance is not None and setup.config is None:
        raise ConfigError("--synthetic-acceptance needs a drafter. Pass one with --speculative-config.")
    setup = options.with_synthetic_acceptance(setup, synthetic_acceptance, model)
    if metrics_compat not in (None, "vllm"):
        raise ConfigError(f"--metrics-compat is '{metrics_compat}'. Expected vllm.")
    if per_request_spec_decode_metrics not in ("none", "summary"):
        raise ConfigError(
            f"--per-request-spec-decode-metrics is '{per_request_spec_decode_metrics}'. Expected none or summary."
        )
    if distill_to is not None and loading.quantization is not None:
        raise ConfigError(
            "--distill-to trains against the model's weights as they are, and --quantization serves others. Pass one."
        )
    if distill_to is not None and setup.is_synthetic:
        raise ConfigError("--distill-to learns the target's texts, and synthetic acceptance writes others. Pass one.")
    tool_format(tool_call_parser, ""), thinking_tags(reasoning_parser, "")  # refuse unknown names first
    keys, template = api_keys(api_key_file), None if chat_template is None else options.read_text(chat_template)
    try:
        from foretoken.server.app import ServerConfig, make_app
    except ImportError as err:
        raise ConfigError(
            "the server's libraries are not installed. Run in foretoken's repository: pip install '.[serve]'."
        ) from err
    draft = None if distill_to is None else _trained_draft(setup, model, distill_to)
    config = ServerConfig(
        names=names, api_keys=keys, allowed_origins=_origins(allowed_origins or ()),
        has_vllm_metrics=metrics_compat == "vllm",
        has_draft_metrics=per_request_spec_decode_metrics == "summary", chat_template=template,
        tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser,
    )  # fmt: skip
    lock = nullcontext() if distill_to is None else run_lock(distill_to, option="--distill-to")
    with lock, _listen(host, port) as listening:  # before the slow loading of the model
        loaded, tokenizer = loading.load(model, clock=clock)
        with options.runner_stage(clock, loaded):
            llm = LLM(
                loaded, speculative_config=setup.config, tokenizer=tokenizer, max_num_seqs=max_num_seqs,
                max_model_len=max_model_len, max_num_batched_tokens=max_num_batched_tokens, seed=seed,
                enable_prefix_caching=enable_prefix_caching, kv_cache_memory_bytes=kv_cache_memory_bytes,
                gpu_memory_utilization=gpu_memory_utilization, runner=loading.runner,
                generation_config=generation_config, override_generation_config=override_generation_config,
            )  # fmt: skip
        if verbose:
            options.note_start(clock, llm)
        options.note_sampling(llm.sampling_defaults)
        engine = AsyncLLM(llm, max_waiting_requests=max_waiting_requests, max_waiting_tokens=max_waiting_tokens)
        distillation = None
        if distill_to is not None and draft is not None:
            from foretoken.server.distillation import OnlineDistillation

            distillation = OnlineDistillation(engine, distill_to, draft=draft, most_tokens=distill_tokens)
        drafters = " + ".join(drafter.name for drafter in llm.drafters) or "no drafter"
        address = listening.getsockname()
        terminal.print_note(f"serving {config.names[0]} with {drafters} on http://{address[0]}:{address[1]}")
        _serve_until_stopped(make_app(engine, config, distillation), engine, listening)


def _trained_draft(setup: Setup, model: str, directory: Path) -> str:
    from foretoken.server.distillation import check_directory, trained_draft

    draft = trained_draft(setup.config, target=model)
    check_directory(directory)
    return draft


def _origins(given: Iterable[str]) -> list[str]:
    found: list[str] = []
    for text in given:
        try:
            listed = json.loads(text) if text.lstrip().startswith("[") else [text]
        except (ValueError, RecursionError):
            listed = [None]
        if not all(isinstance(each, str) for each in listed):
            raise ConfigError(f"--allowed-origins is {shown(text)}. Expected an origin, or a JSON list of origins.")
        found += listed
    return found


def _serve_until_stopped(app: Any, engine: AsyncLLM, listening: socket.socket) -> None:
    """Serves until a signal comes; exits with code 1 if the engine fails, so that a supervisor restarts it."""
    import asyncio
    import gc

    from foretoken.server.http_server import http_server

    server = http_server(app)
    gc.collect()
    gc.freeze()  # a full collection over all loaded libraries stops every client for 0.3 s

    async def serve_while_alive() -> bool:
        task = asyncio.ensure_future(server.serve(sockets=[listening]))
        has_failed = False
        while not task.done():
            await asyncio.wait((task,), timeout=0.5)
            if not engine.is_alive and not server.should_exit:
                server.should_exit = has_failed = True
        await task
        return has_failed

    if asyncio.run(serve_while_alive()):
        terminal.print_note(
            "error: the engine failed and serves no requests any more; the log says why. Start it again."
        )
        raise typer.Exit(1)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(1024)
    except OSError as err:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {err.strerror or err}. Choose another with --host or --port."
        ) from err
    return listening
