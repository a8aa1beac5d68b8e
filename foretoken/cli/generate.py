"""`foretoken generate`: complete one prompt, streaming."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import ConfigError
from foretoken.core.results import DrafterShares

if TYPE_CHECKING:
    from foretoken.core.records import Declined, StepRecord
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.engine.llm import LLM
    from foretoken.engine.prompts import Prompt


def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="Text to complete.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="File to complete.")] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(help="File with what the output probably repeats in part, which -s prediction drafts from."),
    ] = None,
    speculative_config: options.Drafter = None,
    spec_type: options.SpecType = None,
    max_tokens: options.MaxTokens = 128,
    temperature: Annotated[float, typer.Option(help="0 for greedy decoding.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Keep the k most probable tokens; 0 keeps all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Keep the smallest set that reaches this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Keep tokens with this fraction of the best one's probability.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampled text reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends the text; may be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    runner: options.RunnerName = "auto",
    threads: options.Threads = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Send control characters to a terminal as they are, not as escapes.")
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Say what loading took, which decoder runs passes and why, why passes were not drafted for, and what "
            "each drafter brought.",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Complete a prompt (--prompt, --file or standard input) and print the text as it comes.

    The text is what the target alone would have written; statistics go to standard error.
    """
    text = options.read_prompt(prompt, file)
    request = text if prediction is None else {"prompt": text, "prediction": options.read_text(prediction)}
    stops = [options.checked(one, "--stop") for one in stop or ()]
    speculative_config = options.drafter_texts(speculative_config, spec_type)
    if speculative_config is not None and len(speculative_config) > 1:
        raise ConfigError("generate takes one --speculative-config. To compare several, use `foretoken bench`.")
    clock = _LoadClock()
    from foretoken.bench.setups import parse_setup
    from foretoken.core.sampling_params import SamplingParams

    setup = parse_setup(speculative_config[0], target=model) if speculative_config else parse_setup("plain")
    if setup.needs_references:
        raise ConfigError("the drafter 'oracle' has to know the text beforehand. Use it with `foretoken bench`.")
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed, max_tokens=max_tokens,
        stop=stops, ignore_eos=ignore_eos,
    )  # fmt: skip
    from foretoken.engine.llm import LLM

    clock.mark("libraries")
    loaded, tokenizer = options.load_target(model, dtype, device, threads)
    options.check_max_tokens(max_tokens, loaded)
    clock.mark("weights and tokenizer")
    drafts = _Drafts()
    llm = LLM(
        loaded, speculative_config=setup.config, tokenizer=tokenizer, max_num_seqs=1, runner=runner, on_step=drafts.add
    )
    clock.mark("runner and drafter")
    if verbose:
        terminal.note(clock.line())
        terminal.note(f"[{llm.target.choice}]")
    if as_json:
        output = llm.generate(request, params)[0]
        completion = output.outputs[0]
        options.print_json({
            **options.run_header(loaded, runner=llm.target.name, setup=setup.name),
            "runner_choice": llm.target.choice,
            "load_seconds": clock.seconds,
            "prompt_token_ids": output.prompt_token_ids,
            "token_ids": completion.token_ids,
            "text": completion.text,
            "finish_reason": completion.finish_reason,
            "stop_reason": completion.stop_reason,
            "metrics": output.metrics.as_dict(),
            "not_drafted": drafts.as_dict() if setup.config is not None else None,
        })  # fmt: skip
        return
    _stream(llm, request, text, params, raw=raw)
    if drafts.declined is not None:
        terminal.note(f"[{drafts.declined_line()}]")
    if verbose and setup.config is not None:
        terminal.note(f"[{drafts.line()}]")
        terminal.note(f"[{drafts.shares_line()}]")


def _stream(llm: LLM, request: Prompt, text: str, params: SamplingParams, *, raw: bool) -> None:
    """Prints a prompt's text and what follows as it becomes certain, then a line of statistics, after Ctrl-C too."""
    begin = time.perf_counter()
    num_tokens = passes = 0
    ending: str | None = None
    chunks = llm.stream(request, params)  # refuses the prompt before anything is printed
    terminal.write(text, raw=raw)
    try:
        for chunk in chunks:
            num_tokens += len(chunk.token_ids)
            passes += 1
            terminal.write(chunk.text, raw=raw)
            ending = chunk.finish_reason
    except KeyboardInterrupt:
        _end(num_tokens, passes, time.perf_counter() - begin, ", interrupted")
        raise
    is_cut = ending == "length" and num_tokens < (params.max_tokens or 0)
    limit = f", ended by the context of {llm.target.context_len} tokens" if is_cut else ""
    _end(num_tokens, passes, time.perf_counter() - begin, limit)


def _end(num_tokens: int, passes: int, seconds: float, ending: str) -> None:
    """Ends the text and says what it took."""
    terminal.write("\n")
    terminal.note(
        f"[{num_tokens} tokens in {passes} target passes, {num_tokens / max(passes, 1):.2f} a pass, "
        f"{num_tokens / seconds:.1f} tokens/s, prefill included{ending}]"
    )


class _LoadClock:
    """Where the seconds before the first token go.

    Attributes:
        seconds: By what was loaded, in order.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def mark(self, what: str) -> None:
        """Ends the time of one part."""
        now = time.perf_counter()
        self.seconds[what] = round(now - self._last, 3)
        self._last = now

    def line(self) -> str:
        """The parts in words."""
        parts = ", ".join(f"{what} {seconds:.1f}" for what, seconds in self.seconds.items())
        return f"[loaded in {sum(self.seconds.values()):.1f} s: {parts}]"


class _Drafts:
    """Counts the passes in which nothing was drafted, by why.

    Attributes:
        declined: Why the engine last chose not to draft; None where it never did.
    """

    def __init__(self) -> None:
        self.declined: Declined | None = None
        self._error: str | None = None
        self._num_passes = 0
        self._shares = DrafterShares()
        self._reasons: Counter[str] = Counter()

    def add(self, record: StepRecord) -> None:
        """Counts an iteration, which is one of a single sequence."""
        self._num_passes += 1
        self.declined, self._error = record.declined or self.declined, record.draft_error or self._error
        self._shares += DrafterShares.of(record.sequences[0], record)
        if not record.sequences[0].num_drafted:
            self._reasons[_why_not(record)] += 1

    def declined_line(self) -> str:
        """In how many passes the engine chose not to draft, and why in the last one."""
        return f"did not draft in {self._reasons['declined']} of {self._num_passes} passes: {self.declined}"

    def line(self) -> str:
        """In how many passes nothing was drafted, by why."""
        counts = ", ".join(f"{reason} in {count}" for reason, count in self._reasons.most_common())
        error = "" if self._error is None else f"; the last failure: {self._error}"
        return (
            f"nothing drafted in {self._reasons.total()} of {self._num_passes} passes{counts and f': {counts}'}{error}"
        )

    def shares_line(self) -> str:
        """How often each drafter was asked, and what that brought."""
        return "; ".join(f"{name} {share}" for name, share in self._shares.items()) or "no drafter was asked"

    def as_dict(self) -> dict[str, object]:
        """JSON-ready: passes by why nothing was drafted in them, and the last reason of those that have one."""
        return {
            "passes": dict(self._reasons),
            "declined": None if self.declined is None else str(self.declined),
            "draft_error": self._error,
        }


def _why_not(record: StepRecord) -> str:
    """Why nothing was drafted in an iteration of one sequence."""
    num_proposed = record.sequences[0].num_proposed
    if record.declined is not None:
        return "declined"
    if record.draft_error is not None:
        return "failed"
    if num_proposed is None:
        return "not asked"
    return "all cut" if num_proposed else "found nothing"
