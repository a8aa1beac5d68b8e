"""`foretoken generate` completes a prompt, and prints the text as it comes; `foretoken report` shows its traces."""

from __future__ import annotations

import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError
from foretoken.core.records import DrafterShares

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.cli.shown_tokens import ShownTokens
    from foretoken.core.records import Declined, StepRecord
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.llm import LLM
    from foretoken.models.loaded import LoadedModel
    from foretoken.report.trace_file import TraceRecorder
    from foretoken.text.prompts import Prompt


def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to complete.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File to complete.")] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(help="File with text that the output probably repeats in part. Any drafter uses it."),
    ] = None,
    *,
    drafter: options.DrafterChoice,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens. Default: the model's max_new_tokens, else 128.")
    ] = None,
    sampling: options.SamplingOptions,
    min_p: Annotated[
        float | None,
        typer.Option(
            help="Keep tokens with this fraction of the best one's probability. Default: the model's, else 0."
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    loading: options.LoadOptions,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send control characters to a terminal as they are, not as escapes.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Print the load time, which decoder runs and why, why passes had no drafts, and what "
            "each drafter brought.",
        ),
    ] = False,
    show: Annotated[
        bool,
        typer.Option("--show", help="Colour every accepted token by its drafter, as the text comes."),
    ] = False,
    color: Annotated[bool, typer.Option("--color", help="Colour --show also in a pipe.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Leave colours out, as NO_COLOR does.")] = False,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Write the fate of every drafted token, one JSON line an iteration, for `foretoken report`.",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --trace.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Complete a prompt (--prompt, --file or standard input) and print the text as it comes.

    The text is the text of the target alone. Statistics go to standard error. The last two lines compare the run with
    plain decoding, which is not run: its seconds are estimated from passes of this run.
    """
    text = options.read_prompt(prompt, file)
    request = text if prediction is None else {"prompt": text, "prediction": options.read_text(prediction)}
    stops = [options.checked(one, "--stop") for one in stop or ()]
    if show and as_json:
        raise ConfigError("--show and --json exclude each other. Pass one of them.")
    if trace is not None:
        options.check_new_file(trace, "--trace", force=force)
    clock = terminal.StartClock()
    with clock.stage("libraries"):
        from foretoken.entrypoints.llm import LLM

    setup = drafter.setup("generate", model)
    given = sampling.given(min_p=min_p, seed=seed, max_tokens=max_tokens, stop=stops, ignore_eos=ignore_eos)
    loaded, tokenizer = loading.load(model, clock=clock)
    if max_tokens is not None:
        options.check_max_tokens(max_tokens, loaded)
    params = sampling.params(loaded, given, temperature=0.0, max_tokens=128)
    watch = _Watch(
        loaded,
        tokenizer,
        text,
        show=show,
        color=(color and not no_color) if color or no_color else None,
        raw=raw,
        trace=trace,
    )
    with options.runner_stage(clock, loaded):
        llm = LLM(
            loaded, speculative_config=setup.config, tokenizer=tokenizer, max_num_seqs=1, runner=loading.runner,
            on_step=watch.add_step, trace=trace is not None,
        )  # fmt: skip
    drafts = watch.drafts
    if verbose:
        options.note_start(clock, llm)
    header = options.run_header(loaded, runner=llm.target.name, setup=setup.name)
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    conditions = {
        **header, "drafters": [each.name for each in llm.drafters], **{name: getattr(params, name) for name in names},
    }  # fmt: skip
    if as_json:
        output = llm.generate(request, params)[0]
        completion = output.outputs[0]
        watch.write_trace(conditions, completion.text, completion.finish_reason)
        options.print_json({
            **header, "runner_choice": llm.target.choice, "load_seconds": clock.seconds,
            "prompt_token_ids": output.prompt_token_ids,
            **{name: getattr(completion, name) for name in ("token_ids", "text", "finish_reason", "stop_reason")},
            "metrics": output.metrics.as_dict(), "verdict": watch.verdict.as_dict(),
            "not_drafted": drafts.as_dict() if setup.config is not None else None,
        })  # fmt: skip
        return
    try:
        written, ending = _stream(llm, request, text, params, watch)
    except KeyboardInterrupt:
        watch.write_trace(conditions, None, None)
        raise
    watch.write_trace(conditions, written, ending)
    if drafts.declined is not None:
        terminal.print_note(f"[{drafts.declined_line()}]")
    if verbose and setup.config is not None:
        terminal.print_note(f"[{drafts.line()}]")
        terminal.print_note(f"[{drafts.shares_line()}]")
    asked = " ".join(drafter.texts or ())
    for sentence in watch.verdict.sentences(model, None if setup.config is None else setup.name, asked):
        terminal.print_note(f"[{sentence}]")


def _stream(llm: LLM, request: Prompt, text: str, params: SamplingParams, watch: _Watch) -> tuple[str, str | None]:
    """Prints a prompt, its completion and statistics, after Ctrl-C too; returns the text and its finish reason."""
    begin = time.perf_counter()
    num_tokens = passes = 0
    parts: list[str] = []
    ending: str | None = None
    chunks = llm.stream(request, params)  # refuses the prompt before anything is printed
    watch.print_prompt(text)
    try:
        for chunk in chunks:
            num_tokens += len(chunk.token_ids)
            passes += 1
            parts.append(chunk.text)
            watch.print(chunk.text)
            ending = chunk.finish_reason
    except KeyboardInterrupt:
        watch.print_summary(num_tokens, passes, time.perf_counter() - begin, ", interrupted")
        raise
    is_cut = ending == "length" and num_tokens < (params.max_tokens or 0)
    limit = f", ended by the context of {llm.target.context_len} tokens" if is_cut else ""
    watch.print_summary(num_tokens, passes, time.perf_counter() - begin, limit)
    return "".join(parts), ending


class _Watch:
    def __init__(
        self,
        loaded: LoadedModel,
        tokenizer: Any,
        prompt: str,
        *,
        show: bool,
        color: bool | None,
        raw: bool,
        trace: Path | None,
    ) -> None:
        from foretoken.planning.verdict import RunVerdict

        self.drafts, self.verdict = _Drafts(), RunVerdict()
        self._trace, self._prompt = trace, prompt
        self._shown: ShownTokens | None = None
        self._recorder: TraceRecorder | None = None
        self.print_prompt: Callable[[str], None] = partial(terminal.print_text, raw=raw)
        self.print: Callable[[str], None] = self.print_prompt
        if not show and trace is None:
            return
        from foretoken.cli.shown_tokens import ShownTokens
        from foretoken.report.trace_file import TraceRecorder
        from foretoken.text.codec import Codec
        from foretoken.text.prompts import PromptReader

        codec = Codec(tokenizer, loaded.vocab_size)
        prompt_ids = PromptReader(codec, loaded.vocab_size, loaded.context_len).read_prompt(prompt).token_ids
        if show:
            self._shown = ShownTokens(codec, prompt_ids, colour=color, raw=raw)
            self.print_prompt, self.print = self._shown.write_prompt, self._shown.write_text
        if trace is not None:
            self._recorder = TraceRecorder(codec, prompt_ids)

    def add_step(self, record: StepRecord) -> None:
        for each in (self.drafts, self.verdict, self._shown, self._recorder):
            if each is not None:
                each.add_step(record)

    def print_summary(self, num_tokens: int, passes: int, seconds: float, ending: str) -> None:
        terminal.print_text("\n")
        terminal.print_note(
            f"[{num_tokens} tokens in {passes} target passes, {num_tokens / max(passes, 1):.2f} a pass, "
            f"{num_tokens / seconds:.1f} tokens/s, prefill included{ending}]"
        )
        if self._shown is not None:
            self._shown.note_summary()

    def write_trace(self, conditions: dict[str, Any], text: str | None, finish_reason: str | None) -> None:
        if self._recorder is not None and self._trace is not None:
            self._recorder.write_file(
                self._trace, conditions=conditions, prompt=self._prompt, text=text, finish_reason=finish_reason
            )


class _Drafts:
    def __init__(self) -> None:
        self.declined: Declined | None = None
        self._error: str | None = None
        self._num_passes = 0
        self._shares = DrafterShares()
        self._reasons: Counter[str] = Counter()

    def add_step(self, record: StepRecord) -> None:
        if record.sequences[0].ends_prompt:
            return
        self._num_passes += 1
        self.declined, self._error = record.declined or self.declined, record.draft_error or self._error
        self._shares += DrafterShares.of_step(record.sequences[0], record)
        if not record.sequences[0].num_drafted:
            self._reasons[_why_not(record)] += 1

    def declined_line(self) -> str:
        return f"did not draft in {self._reasons['declined']} of {self._num_passes} passes: {self.declined}"

    def line(self) -> str:
        counts = ", ".join(f"{reason} in {count}" for reason, count in self._reasons.most_common())
        error = "" if self._error is None else f"; the last failure: {self._error}"
        return (
            f"nothing drafted in {self._reasons.total()} of {self._num_passes} passes{counts and f': {counts}'}{error}"
        )

    def shares_line(self) -> str:
        return "; ".join(f"{name} {share}" for name, share in self._shares.items()) or "no drafter was asked"

    def as_dict(self) -> dict[str, object]:
        return {
            "passes": dict(self._reasons),
            "declined": None if self.declined is None else str(self.declined),
            "draft_error": self._error,
        }


def _why_not(record: StepRecord) -> str:
    num_proposed = record.sequences[0].num_proposed
    if record.declined is not None:
        return "declined"
    if record.draft_error is not None:
        return "failed"
    if num_proposed is None:
        return "not asked"
    return "all cut" if num_proposed else "found nothing"


def report(
    run: Annotated[
        Path,
        typer.Argument(help="A file of `foretoken generate --trace`, or a directory with such files or with sweeps."),
    ],
    out: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The page. Default: RUN with the ending .html, or RUN/report.html."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page.")] = False,
) -> None:
    """Show a generation token by token, with the tree of every iteration and why its nodes were rejected.

    The page is one file that needs no network: summary, text, trees, and the results and pictures of sweeps in RUN.
    """
    from foretoken.core.errors import ConfigError
    from foretoken.files.atomic_files import told_as, write_file
    from foretoken.report.page import read_run, render

    place = out or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    found = read_run(run)
    options.check_new_file(place, "the page", force=force)
    with told_as(ConfigError, f"'{place}'", "Expected a place for a file that may be written to. Name one with --out."):
        write_file(place, render(found))
    terminal.print_line(str(place))
