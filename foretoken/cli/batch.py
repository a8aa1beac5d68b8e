"""`foretoken batch`: answers a file of requests in OpenAI's batch format, without a server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import RequestError
from foretoken.models.names import resolve_model

if TYPE_CHECKING:
    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.server.batch import BatchCounts


def batch(
    source: Annotated[Path, typer.Argument(help="Requests: a line each, with custom_id, method, url and body.")],
    out: Annotated[Path, typer.Argument(help="File to make: an answer a line, in the order of completion.")],
    model: Annotated[str, typer.Option(metavar="MODEL", help=f"Target: {options.MODEL_FORMS}.")],
    *,
    drafter: options.DrafterChoice,
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
    in_flight = min(
        max_in_flight or 2 * max_num_seqs, -(-total // number)
    )  # no worker takes lines that others could answer
    with held(out):
        options.check_new_file(out, "OUT", force=force)
        answers = AnswerFile(out, name)
        try:
            make_engine = partial(
                _engine, model, setup.config, loading, max_waiting_requests=in_flight * MOST_CHOICES,
                max_num_seqs=max_num_seqs, max_model_len=max_model_len, gpu_memory_utilization=gpu_memory_utilization,
                generation_config=generation_config, override_generation_config=override_generation_config,
            )  # fmt: skip
            with terminal.renewed_line() as (say, every):
                shown = _Progress(total, number * in_flight, say, every)
                if num_workers is None:
                    shown.say("loading the model")
                    with closing(make_engine()) as engine:
                        shown.begin()
                        run = run_batch(
                            engine, source, answers, model=name, max_in_flight=in_flight, chat_template=template,
                            on_answer=shown.show,
                        )  # fmt: skip
                        counts = asyncio.run(run)
                else:
                    workers = RayWorkers(
                        number=number, make_engine=make_engine, max_in_flight=in_flight, num_cpus=loading.threads or 1,
                        uses_gpu=None if loading.device == "auto" else loading.device != "cpu", on_start=shown.starting,
                    )  # fmt: skip
                    counts = run_ray_batch(
                        workers, source, answers, model=name, chat_template=template, on_answer=shown.show
                    )
            answers.finish()
        finally:
            answers.close()
    kept = f", {counts.kept} of an earlier run" if counts.kept else ""
    terminal.print_line(
        f"{out}: {counts.answered} lines answered, {counts.failed} of them with errors{kept}{shown.took()}"
    )


def _engine(
    model: str, config: Mapping[str, Any] | None, loading: options.LoadOptions, *, max_waiting_requests: int,
    **more: Any,
) -> AsyncLLM:  # fmt: skip
    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.entrypoints.llm import LLM

    loaded, tokenizer = loading.load(model)
    llm = LLM(loaded, speculative_config=config, tokenizer=tokenizer, runner=loading.runner, **more)
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
