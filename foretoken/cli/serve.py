"""`foretoken serve`, an OpenAI-compatible HTTP server, and `foretoken batch`, which answers a file of requests."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import closing, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, RequestError
from foretoken.files.processes import run_lock
from foretoken.models.names import resolve_model
from foretoken.server.edge import KEY_VARIABLE, api_keys
from foretoken.server.tools import TAGS, TOOL_FORMATS, thinking_tags, tool_format

if TYPE_CHECKING:
    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.entrypoints.config import Setup
    from foretoken.server.app import ServerConfig
    from foretoken.server.batch import BatchCounts
    from foretoken.server.distillation import OnlineDistillation


_batches = partial(typer.Option, rich_help_panel="Batches and memory")
_network = partial(typer.Option, rich_help_panel="Network")
_distillation = partial(typer.Option, rich_help_panel="Training the draft model on requests")
_VLLMS_NAME = "--per-request-spec-decode-metrics"  # too long for a column at 80 characters


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """What bounds the sequences of a server and their memory; the fields are as in `LLM`."""

    max_num_seqs: Annotated[int, _batches(min=1, help="Sequences decoded at once.")] = 8
    max_model_len: Annotated[int | None, _batches(min=2, help="Most tokens of a sequence.")] = None
    max_num_batched_tokens: Annotated[int | None, _batches(min=1, help="Most tokens of a pass.")] = None
    enable_prefix_caching: Annotated[
        bool,
        _batches(
            help="Reuse the KV rows of a prompt's prefix, unless --no-enable-prefix-caching is given. "
            "Never across cache salts.",
            show_default=False,
        ),
    ] = True
    kv_cache_memory_bytes: Annotated[
        int | None,
        _batches(min=1, help="Memory for the KV rows of all sequences (default: half of the free memory)."),
    ] = None
    gpu_memory_utilization: options.GpuMemoryUtilization = None


@dataclass(frozen=True, kw_only=True)
class DistillOptions:
    """The training of the draft model on requests."""

    distill_to: Annotated[
        Path | None,
        _distillation(
            help="Train the draft model on the requests that are served, beside the server, and swap better weights "
            "in. Keeps token ids of prompts and answers in this directory. Default: nothing is kept."
        ),
    ] = None
    distill_tokens: Annotated[
        int, _distillation(min=1 << 16, help="Most tokens of requests in that directory; the oldest leave.")
    ] = 1_000_000  # 3 MB with 16-bit ids; a choice

    def draft(self, setup: Setup, model: str, quantization: str | None) -> str | None:
        """Returns the path of the draft model to train; None without --distill-to.

        Raises `ConfigError` for options that do not fit, and for a directory with other files.
        """
        if self.distill_to is None:
            return None
        if quantization is not None:
            raise ConfigError(
                "--distill-to trains against the model's weights as they are, and --quantization serves others. Pass "
                "one."
            )
        if setup.is_synthetic:
            raise ConfigError(
                "--distill-to learns the target's texts, and synthetic acceptance writes others. Pass one."
            )
        from foretoken.server.distillation import check_directory, trained_draft

        draft = trained_draft(setup.config, target=model)
        check_directory(self.distill_to)
        return draft

    def begin(self, engine: AsyncLLM, draft: str | None) -> OnlineDistillation | None:
        """Begins the training of `draft` beside an engine."""
        if self.distill_to is None or draft is None:
            return None
        from foretoken.server.distillation import OnlineDistillation

        return OnlineDistillation(engine, self.distill_to, draft=draft, most_tokens=self.distill_tokens)


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
        Path | None, typer.Option(help="Jinja template of conversations, instead of the tokenizer's own.")
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
        Path | None, _network(help=f"File with API keys, one a line. {KEY_VARIABLE} may hold one too.")
    ] = None,
    allowed_origins: Annotated[
        list[str] | None,
        _network(
            metavar="URL",
            help="Origins whose pages may read answers (CORS), as https://example.org, or '*'; a JSON list, or "
            "repeated. Default: the server's own page alone.",
        ),
    ] = None,
    batches: BatchOptions,
    max_waiting_requests: Annotated[int, _batches(min=0, help="More are answered with 429.")] = 256,
    max_waiting_tokens: Annotated[int | None, _batches(min=0, help="In prompt tokens; more get 429.")] = None,
    distilling: DistillOptions,
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
    names, model, clock = served_model_name or [model], resolve_model(model), options.started_clock()
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
    tool_format(tool_call_parser, ""), thinking_tags(reasoning_parser, "")  # refuse unknown names first
    config = _server_config(
        names=names, api_keys=api_keys(api_key_file), allowed_origins=_origins(allowed_origins or ()),
        has_vllm_metrics=metrics_compat == "vllm", has_draft_metrics=per_request_spec_decode_metrics == "summary",
        chat_template=None if chat_template is None else options.read_text(chat_template),
        tool_call_parser=tool_call_parser, reasoning_parser=reasoning_parser,
    )  # fmt: skip
    draft, directory = distilling.draft(setup, model, loading.quantization), distilling.distill_to
    lock = nullcontext() if directory is None else run_lock(directory, option="--distill-to")
    with lock, _listen(host, port) as listening:  # before the slow loading of the model
        loaded, tokenizer = loading.load(model, clock=clock)
        llm = loading.make_llm(
            loaded, tokenizer, setup, clock, verbose=verbose, seed=seed, generation_config=generation_config,
            override_generation_config=override_generation_config, **vars(batches),
        )  # fmt: skip
        options.note_sampling(llm.sampling_defaults)
        from foretoken.entrypoints.async_llm import AsyncLLM
        from foretoken.server.app import make_app

        engine = AsyncLLM(llm, max_waiting_requests=max_waiting_requests, max_waiting_tokens=max_waiting_tokens)
        drafters = " + ".join(each.name for each in llm.drafters) or "no drafter"
        app = make_app(engine, config, distilling.begin(engine, draft))
        address = listening.getsockname()
        terminal.print_note(f"serving {names[0]} with {drafters} on http://{address[0]}:{address[1]}")
        _serve_until_stopped(app, engine, listening)


def _server_config(**fields: Any) -> ServerConfig:
    try:
        from foretoken.server.app import ServerConfig
    except ImportError as err:
        raise ConfigError(
            "the server's libraries are not installed. Run in foretoken's repository: pip install '.[serve]'."
        ) from err
    return ServerConfig(**fields)


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


def batch(
    source: Annotated[Path, typer.Argument(help="Requests: a line each, with custom_id, method, url and body.")],
    out: Annotated[Path, typer.Argument(help="File to make: an answer a line, in the order of completion.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help=f"Target: {options.MODEL_FORMS}.")],
    *,
    drafter: options.DrafterChoice,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in requests. Default: MODEL.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja template of conversations.")] = None,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Sequences decoded at once.")] = 8,
    max_in_flight: Annotated[
        int | None, typer.Option(min=1, help="Lines in memory at once. Default: twice --max-num-seqs.")
    ] = None,
    num_workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Answer with N engines on a Ray cluster: the one that RAY_ADDRESS names, else one on this machine. "
            "Bounds on sequences, lines and threads hold for each engine.",
        ),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Most tokens of a sequence.")] = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a complete OUT.")] = False,
    loading: options.LoadOptions,
) -> None:
    """Answer a file of requests to /v1/completions, /v1/chat/completions and /v1/responses, in OpenAI's batch format.

    Answers go to OUT.part, which becomes OUT when every line has an answer: OUT is always complete. The same command
    continues an interrupted run; each custom_id is answered once. A line that cannot be served is answered with its
    status and message, and other lines go on.
    """
    from foretoken.server.batch import AnswerFile, RayWorkers, count_lines, held, run_batch, run_ray_batch
    from foretoken.server.request_fields import MOST_CHOICES

    name, model = served_model_name or model, resolve_model(model)
    setup = drafter.setup("batch", model, "Merge several with +, as ngram+hydra.")
    template = None if chat_template is None else options.read_text(chat_template)
    total = count_lines(source)
    if not total:
        raise RequestError(f"'{source}' has no lines. Expected one request a line.")
    number = min(num_workers or 1, total)
    # No worker takes lines that others could answer.
    in_flight = min(max_in_flight or 2 * max_num_seqs, -(-total // number))
    make_engine = partial(
        _engine, model, setup, loading, max_waiting_requests=in_flight * MOST_CHOICES, max_num_seqs=max_num_seqs,
        max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization,
        generation_config=generation_config, override_generation_config=override_generation_config,
    )  # fmt: skip
    with held(out):
        options.check_new_file(out, "OUT", force=force)
        with closing(AnswerFile(out, name)) as answers, terminal.renewed_line() as (say, every):
            shown = _Progress(total, number * in_flight, say, every)
            asked: dict[str, Any] = {"model": name, "chat_template": template, "on_answer": shown.show}
            if num_workers is None:
                say("loading the model")
                with closing(make_engine()) as engine:
                    shown.begin()
                    counts = asyncio.run(run_batch(engine, source, answers, max_in_flight=in_flight, **asked))
            else:
                workers = RayWorkers(
                    number=number, make_engine=make_engine, max_in_flight=in_flight, num_cpus=loading.threads or 1,
                    uses_gpu=None if loading.device == "auto" else loading.device != "cpu", on_start=shown.starting,
                )  # fmt: skip
                counts = run_ray_batch(workers, source, answers, **asked)
            answers.finish()
    kept = f", {counts.kept} of an earlier run" if counts.kept else ""
    terminal.print_line(
        f"{out}: {counts.answered} lines answered, {counts.failed} of them with errors{kept}{shown.took()}"
    )


def _engine(
    model: str, setup: Setup, loading: options.LoadOptions, *, max_waiting_requests: int, **more: Any
) -> AsyncLLM:
    from foretoken.entrypoints.async_llm import AsyncLLM

    llm = loading.make_llm(*loading.load(model), setup, **more)
    options.note_sampling(llm.sampling_defaults)
    return AsyncLLM(llm, max_waiting_requests=max_waiting_requests)


class _Progress:
    """Shows the progress of a batch. Rates and the time left do not count the seconds of starting."""

    def __init__(self, total: int, at_once: int, say: Callable[[str], None], every: float) -> None:
        self.say, self._total, self._at_once, self._every = say, total, at_once, every
        self._made = self._last = time.perf_counter()
        self._begun: float | None = None
        self._refused = 0  # lines refused before an engine answered any

    def starting(self, ready: int, number: int) -> None:
        if self._begun is None or ready == number:
            self.say(f"starting {number} worker{'s' * (number > 1)}, {ready} ready")
        if ready:
            self.begin()

    def begin(self) -> None:
        if self._begun is None:
            self._begun = self._last = time.perf_counter()

    def show(self, counts: BatchCounts) -> None:
        now = time.perf_counter()
        if self._begun is None:
            self._refused = counts.answered
        elif now - self._last >= self._every:
            self._last = now
            self.say(self._line(counts, now - self._begun))

    def _line(self, counts: BatchCounts, seconds: float) -> str:
        """Returns the line of progress. Rates begin once as many lines are answered as were started together."""
        done, measured = counts.kept + counts.answered, counts.answered - self._refused
        parts = [f"{done} of {self._total} lines", f"{counts.failed} with errors"]
        if measured >= self._at_once:
            left = timedelta(seconds=round((self._total - done) * seconds / measured))
            parts += [f"{measured / seconds:.1f} lines/s", f"{counts.tokens / seconds:.0f} tokens/s", f"{left} left"]
        return ", ".join(parts)

    def took(self) -> str:
        if self._begun is None:
            return ""
        now = time.perf_counter()
        return f"; {self._begun - self._made:.1f} s to start, {now - self._begun:.1f} s to answer"
