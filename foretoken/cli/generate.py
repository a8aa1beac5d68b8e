"""`foretoken generate` completes a prompt, and prints the text as it comes; `foretoken report` shows its traces."""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.cli.chat import ShownTokens, wished_colour
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.records import Declined, DrafterShares, StepRecord
from foretoken.files.bounded_reads import read_stream

if TYPE_CHECKING:
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
        typer.Option(help="Write the fate of every drafted token, one JSON line an iteration, for `foretoken report`."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of --trace.")] = False,
    as_json: options.AsJson = False,
) -> None:
    """Complete a prompt (--prompt, --file or standard input) and print the text as it comes.

    The text is the text of the target alone. Statistics go to standard error. The last two lines compare the run with
    plain decoding, which is not run: its seconds are estimated from passes of this run.
    """
    text = _read_prompt(prompt, file)
    request = text if prediction is None else {"prompt": text, "prediction": options.read_text(prediction)}
    stops = [options.checked(one, "--stop") for one in stop or ()]
    if show and as_json:
        raise ConfigError("--show and --json exclude each other. Pass one of them.")
    if trace is not None:
        options.check_new_file(trace, "--trace", force=force)
    clock = options.started_clock()
    setup = drafter.setup("generate", model)
    given = sampling.given(min_p=min_p, seed=seed, max_tokens=max_tokens, stop=stops, ignore_eos=ignore_eos)
    loaded, tokenizer = loading.load(model, clock=clock)
    if max_tokens is not None:
        options.check_max_tokens(max_tokens, loaded)
    params = sampling.params(loaded, given, temperature=0.0, max_tokens=128)
    watch = _Watch(loaded, tokenizer, text, trace=trace)
    if show:
        watch.shown = ShownTokens(wished_colour(color=color, no_color=no_color), raw=raw)
    llm = loading.make_llm(
        loaded, tokenizer, setup, clock, verbose=verbose, max_num_seqs=1, on_step=watch.add_step,
        trace=trace is not None,
    )  # fmt: skip
    header = options.run_header(loaded, runner=llm.target.name, setup=setup.name)
    names = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")
    watch.conditions = {
        **header, "drafters": [each.name for each in llm.drafters], **{name: getattr(params, name) for name in names},
    }  # fmt: skip
    has_drafter = setup.config is not None
    if as_json:
        options.print_json({
            **header, "runner_choice": llm.target.choice, "load_seconds": clock.seconds,
            **_answer(llm, request, params, watch), "verdict": watch.verdict.as_dict(),
            "not_drafted": watch.drafts.as_dict() if has_drafter else None,
        })  # fmt: skip
        return
    _stream(llm, request, text, params, watch, raw=raw)
    watch.drafts.note(is_verbose=verbose and has_drafter)
    asked = " ".join(drafter.texts or ())
    for sentence in watch.verdict.sentences(model, setup.name if has_drafter else None, asked):
        terminal.print_note(f"[{sentence}]")


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    if prompt is not None and file is not None:
        raise RequestError("a prompt came both as text and as --file. Pass one of them.")
    if file is not None:
        return options.read_text(file)
    if prompt is not None:
        return options.checked(prompt, "--prompt")
    if sys.stdin.isatty():
        raise RequestError("there is no prompt. Pass --prompt, --file, or text on standard input.")
    return options.decode(read_stream(sys.stdin.buffer, "standard input"), "standard input")


def _answer(llm: LLM, request: Prompt, params: SamplingParams, watch: _Watch) -> dict[str, Any]:
    output = llm.generate(request, params)[0]
    completion = output.outputs[0]
    watch.write_trace(completion.text, completion.finish_reason)
    return {
        "prompt_token_ids": output.prompt_token_ids,
        **{name: getattr(completion, name) for name in ("token_ids", "text", "finish_reason", "stop_reason")},
        "metrics": output.metrics.as_dict(),
    }


def _stream(llm: LLM, request: Prompt, text: str, params: SamplingParams, watch: _Watch, *, raw: bool) -> None:
    """Prints a prompt, its completion and statistics, and writes the trace; after Ctrl-C too."""
    begin, shown, num_tokens = time.perf_counter(), watch.shown, 0
    parts: list[str] = []
    ending: str | None = None
    chunks = llm.stream(request, params)  # refuses the prompt before anything is printed
    if shown is None:
        terminal.print_text(text, raw=raw)
    else:
        shown.write_prompt(text)
    try:
        for chunk in chunks:
            num_tokens += len(chunk.token_ids)
            parts.append(chunk.text)
            ending = chunk.finish_reason
            if shown is None:
                terminal.print_text(chunk.text, raw=raw)
            else:
                shown.write(chunk)
    except KeyboardInterrupt:
        watch.print_summary(num_tokens, len(parts), time.perf_counter() - begin, ", interrupted")
        watch.write_trace(None, None)
        raise
    is_cut = ending == "length" and num_tokens < (params.max_tokens or 0)
    limit = f", ended by the context of {llm.target.context_len} tokens" if is_cut else ""
    watch.print_summary(num_tokens, len(parts), time.perf_counter() - begin, limit)
    watch.write_trace("".join(parts), ending)


class _Watch:
    """Gets the iterations: for the statistics, for the colours of `shown`, and for a trace."""

    def __init__(self, loaded: LoadedModel, tokenizer: Any, prompt: str, *, trace: Path | None) -> None:
        from foretoken.planning.verdict import RunVerdict

        self.drafts, self.verdict = _Drafts(), RunVerdict()
        self.shown: ShownTokens | None = None
        self.conditions: dict[str, Any] = {}
        self._trace, self._prompt = trace, prompt
        self._recorder: TraceRecorder | None = None
        if trace is not None:
            from foretoken.report.trace_file import TraceRecorder
            from foretoken.text.codec import Codec
            from foretoken.text.prompts import PromptReader

            codec = Codec(tokenizer, loaded.vocab_size)
            reader = PromptReader(codec, loaded.vocab_size, loaded.context_len)
            self._recorder = TraceRecorder(codec, reader.read_prompt(prompt).token_ids)

    def add_step(self, record: StepRecord) -> None:
        for each in (self.drafts, self.verdict, self.shown, self._recorder):
            if each is not None:
                each.add_step(record)

    def print_summary(self, num_tokens: int, passes: int, seconds: float, ending: str) -> None:
        terminal.print_text("\n")
        terminal.print_note(
            f"[{num_tokens} tokens in {passes} target passes, {num_tokens / max(passes, 1):.2f} a pass, "
            f"{num_tokens / seconds:.1f} tokens/s, prefill included{ending}]"
        )
        if self.shown is not None:
            self.shown.note_summary()

    def write_trace(self, text: str | None, finish_reason: str | None) -> None:
        if self._recorder is not None and self._trace is not None:
            self._recorder.write_file(
                self._trace, conditions=self.conditions, prompt=self._prompt, text=text, finish_reason=finish_reason
            )


class _Drafts:
    """Counts the passes without a draft, by their reason."""

    def __init__(self) -> None:
        self._declined: Declined | None = None
        self._error: str | None = None
        self._num_passes = 0
        self._shares = DrafterShares()
        self._reasons: Counter[str] = Counter()

    def add_step(self, record: StepRecord) -> None:
        if record.sequences[0].ends_prompt:
            return
        self._num_passes += 1
        self._declined, self._error = record.declined or self._declined, record.draft_error or self._error
        self._shares += DrafterShares.of_step(record.sequences[0], record)
        if not record.sequences[0].num_drafted:
            self._reasons[_why_not(record)] += 1

    def note(self, *, is_verbose: bool) -> None:
        """Says why passes had no draft; `is_verbose` also counts every reason, and what each drafter brought."""
        if self._declined is not None:
            skipped = f"{self._reasons['declined']} of {self._num_passes} passes"
            terminal.print_note(f"[did not draft in {skipped}: {self._declined}]")
        if is_verbose:
            counts = ", ".join(f"{reason} in {count}" for reason, count in self._reasons.most_common())
            error = "" if self._error is None else f"; the last failure: {self._error}"
            passes = f"{self._reasons.total()} of {self._num_passes} passes{counts and f': {counts}'}"
            terminal.print_note(f"[nothing drafted in {passes}{error}]")
            shares = "; ".join(f"{name} {share}" for name, share in self._shares.items())
            terminal.print_note(f"[{shares or 'no drafter was asked'}]")

    def as_dict(self) -> dict[str, object]:
        return {
            "passes": dict(self._reasons),
            "declined": None if self._declined is None else str(self._declined),
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
        typer.Option(help="The page. Default: RUN with the ending .html, or RUN/report.html."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the page.")] = False,
) -> None:
    """Show a generation token by token, with the tree of every iteration and why its nodes were rejected.

    The page is one file that needs no network: summary, text, trees, and the results and pictures of sweeps in RUN.
    """
    from foretoken.files.atomic_files import told_as, write_file
    from foretoken.report.page import read_run, render

    page = out or (run / "report.html" if run.is_dir() else run.with_suffix(".html"))
    found = read_run(run)
    options.check_new_file(page, "the page", force=force)
    with told_as(ConfigError, f"'{page}'", "Expected a place for a file that may be written to. Name one with --out."):
        write_file(page, render(found))
    terminal.print_line(str(page))
