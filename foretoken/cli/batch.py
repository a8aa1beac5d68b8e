"""`foretoken batch`: a file of requests in OpenAI's batch format, answered without a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from foretoken.engine.async_llm import AsyncLLM
    from foretoken.server.batch import BatchCounts

_LINE_EVERY = 30.0  # seconds between progress lines where there is no terminal


def batch(
    source: Annotated[Path, typer.Argument(help="Requests: a line each, with custom_id, method, url and body.")],
    out: Annotated[Path, typer.Argument(help="File to make: an answer a line, in the order in which they are ready.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help="Target: a model directory or a hub id.")],
    speculative_config: options.Drafter = None,
    spec_type: options.SpecType = None,
    served_model_name: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model in requests. Default: MODEL.")
    ] = None,
    chat_template: Annotated[Path | None, typer.Option(metavar="PATH", help="Jinja template of conversations.")] = None,
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
            "What bounds sequences, lines and threads bounds each of them.",
        ),
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(min=2, help="Most tokens of a sequence.")] = None,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a complete OUT.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runner: options.RunnerName = "auto",
    threads: options.Threads = None,
) -> None:
    """Answer a file of requests to /v1/completions, /v1/chat/completions and /v1/responses, in OpenAI's batch format.

    Answers gather in OUT.part, which becomes OUT when every line has one: what is called OUT is complete. A run that
    was broken off, however it ended, goes on when the same command is given again; each custom_id is answered once. A
    line that cannot be served is answered with its status and message, and ends nothing.
    """
    from foretoken.server.batch import run_batch
    from foretoken.server.batch_files import AnswerFile, count_lines, held
    from foretoken.server.ray_batch import RayWorkers, run_ray_batch
    from foretoken.server.request_fields import MOST_CHOICES

    setup = options.one_setup("batch", model, speculative_config, spec_type, "Merge several with +, as ngram+hydra.")
    template = None if chat_template is None else options.read_text(chat_template)
    total = count_lines(source)
    if not total:
        raise RequestError(f"'{source}' has no lines. Expected a request in each.")
    name, in_flight = served_model_name or model, min(max_in_flight or 2 * max_num_seqs, total)
    with held(out):
        options.check_new_file(out, "OUT", force=force)
        answers = AnswerFile(out, name)
        try:
            make_engine = partial(
                _engine, model, setup.config, max_waiting_requests=in_flight * MOST_CHOICES, dtype=dtype,
                device=device, threads=threads, max_num_seqs=max_num_seqs, max_model_len=max_model_len, runner=runner,
                generation_config=generation_config, override_generation_config=override_generation_config,
            )  # fmt: skip
            with _shown(total) as show:
                if num_workers is None:
                    with closing(make_engine()) as engine:
                        run = run_batch(
                            engine, source, answers, model=name, max_in_flight=in_flight, chat_template=template,
                            on_answer=show,
                        )  # fmt: skip
                        counts = asyncio.run(run)
                else:
                    workers = RayWorkers(
                        number=min(num_workers, total), make_engine=make_engine, max_in_flight=in_flight,
                        num_cpus=threads or 1, uses_gpu=None if device == "auto" else device != "cpu",
                    )  # fmt: skip
                    counts = run_ray_batch(workers, source, answers, model=name, chat_template=template, on_answer=show)
            answers.finish()
        finally:
            answers.close()
    kept = f", {counts.kept} of an earlier run" if counts.kept else ""
    terminal.say(f"{out}: {counts.answered} lines answered, {counts.failed} of them with errors{kept}")


def _engine(
    model: str, config: Mapping[str, Any] | None, *, dtype: str, device: str, threads: int | None,
    max_waiting_requests: int, **more: Any,
) -> AsyncLLM:  # fmt: skip
    """The engine of this process or of a worker; more: of `LLM`."""
    from foretoken.engine.async_llm import AsyncLLM
    from foretoken.engine.llm import LLM

    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    llm = LLM(loaded, speculative_config=config, tokenizer=tokenizer, **more)
    options.note_sampling(llm.sampling_defaults)
    return AsyncLLM(llm, max_waiting_requests=max_waiting_requests)


@contextmanager
def _shown(total: int) -> Iterator[Callable[[BatchCounts], None]]:
    """Shows progress on standard error: a living line on a terminal, else a line every 30 seconds."""
    begin = last = time.perf_counter()
    if sys.stderr.isatty():
        from rich.console import Console

        with Console(stderr=True).status("reading") as status:
            yield lambda counts: status.update(_line(counts, total, time.perf_counter() - begin))
        return

    def show(counts: BatchCounts) -> None:
        nonlocal last
        if time.perf_counter() - last >= _LINE_EVERY:
            last = time.perf_counter()
            terminal.note(_line(counts, total, last - begin))

    yield show


def _line(counts: BatchCounts, total: int, seconds: float) -> str:
    """How far the work is, in words."""
    done, rate = counts.kept + counts.answered, counts.answered / seconds
    left = timedelta(seconds=round((total - done) / rate))
    return (
        f"{done} of {total} lines, {counts.failed} with errors, {rate:.1f} lines/s, {counts.tokens / seconds:.0f} "
        f"tokens/s, {left} left"
    )
