"""`foretoken chat`: a conversation in the terminal, with every accepted token in its drafter's colour."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import RequestError
from foretoken.files.bounded_reads import MOST_TEXT_BYTES

if TYPE_CHECKING:
    from foretoken.cli.shown_tokens import ShownTokens
    from foretoken.core.records import StepRecord
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.llm import LLM
    from foretoken.text.codec import Codec

_PROMPT = "> "
_HELP = "/reset forgets the conversation, /exit or Ctrl-D ends it, Ctrl-C ends an answer."


def chat(
    model: options.Model,
    *,
    drafter: options.DrafterChoice,
    system: Annotated[str | None, typer.Option(help="What the model is told before the conversation.")] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="File with a Jinja template, for a tokenizer without one or instead of its own.")
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Most tokens of an answer. Default: the model's max_new_tokens, else the context."),
    ] = None,
    sampling: options.SamplingOptions,
    seed: Annotated[int | None, typer.Option(help="Makes sampled answers reproducible.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="String that ends an answer; may be repeated.")] = None,
    loading: options.LoadOptions,
    verbose: options.Verbose = False,
    color: Annotated[bool, typer.Option("--color", help="Colour answers also in a pipe.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Leave colours out, as NO_COLOR does.")] = False,
) -> None:
    """Talk with a model, one message a line. Every accepted token has the colour of its drafter.

    /reset forgets the conversation, /exit or Ctrl-D ends it, and Ctrl-C ends an answer.
    """
    clock = terminal.StartClock()
    with clock.stage("libraries"):
        from foretoken.entrypoints.llm import LLM
        from foretoken.text.codec import Codec

    setup = drafter.setup("chat", model)
    stops = [options.checked(one, "--stop") for one in stop or ()]
    given = sampling.given(seed=seed, max_tokens=max_tokens, stop=stops)
    template = None if chat_template is None else options.read_text(chat_template)
    told = None if system is None else options.checked(system, "--system")
    loaded, tokenizer = loading.load(model, clock=clock)
    params = sampling.params(loaded, given, temperature=0.0, max_tokens=None)
    answers = _Answers((color and not no_color) if color or no_color else None)
    with options.runner_stage(clock, loaded):
        llm = LLM(
            loaded, speculative_config=setup.config, tokenizer=tokenizer, max_num_seqs=1, runner=loading.runner,
            on_step=answers.add_step,
        )  # fmt: skip
    if verbose:
        options.note_start(clock, llm)
    answers.use_model(llm, Codec(tokenizer, loaded.vocab_size), params, template)
    _talk(answers, [] if told is None else [{"role": "system", "content": told}])


def _talk(answers: _Answers, beginning: list[dict[str, str]]) -> None:
    answers.check_start(beginning)
    terminal.print_note(_HELP)
    messages = list(beginning)
    while (line := _next_line()) is not None:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = list(beginning)
            continue
        if not text:
            continue
        try:
            answer = answers.print_answer([*messages, {"role": "user", "content": text}])
        except RequestError as err:
            terminal.print_note(f"error: {err} /reset forgets the conversation.")
            continue
        messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def _next_line() -> str | None:
    """Returns the user's next line; None at the end. Ctrl-C discards the line."""
    if not sys.stdin.isatty():
        line = sys.stdin.readline(MOST_TEXT_BYTES + 1)
        if len(line) > MOST_TEXT_BYTES:
            raise RequestError(f"a line of standard input is longer than {MOST_TEXT_BYTES} characters. Shorten it.")
        return options.checked(line, "standard input") or None
    try:
        return options.checked(input(_PROMPT), "the message")
    except EOFError:
        terminal.print_text("\n")
        return None
    except KeyboardInterrupt:
        terminal.print_note(f"\n{_HELP}")
        return ""


class _Answers:
    def __init__(self, colour: bool | None) -> None:
        self._colour = colour
        self._shown: ShownTokens | None = None

    def use_model(self, llm: LLM, codec: Codec, params: SamplingParams, template: str | None) -> None:
        self._llm, self._codec, self._params, self._template = llm, codec, params, template

    def add_step(self, record: StepRecord) -> None:
        if self._shown is not None:
            self._shown.add_step(record)

    def check_start(self, beginning: list[dict[str, str]]) -> None:
        self._prompt([*beginning, {"role": "user", "content": "?"}])

    def print_answer(self, messages: list[dict[str, str]]) -> str:
        from foretoken.cli.shown_tokens import ShownTokens

        prompt = self._prompt(messages)
        chunks = self._llm.stream(prompt, self._params)  # refuses the prompt before anything is printed
        self._shown = ShownTokens(self._codec, prompt["prompt_token_ids"], colour=self._colour, raw=False)
        parts: list[str] = []
        ending: str | None = "interrupted"
        try:
            for chunk in chunks:
                self._shown.write_text(chunk.text)
                parts.append(chunk.text)
                ending = chunk.finish_reason
        except KeyboardInterrupt:
            ending = "interrupted"
        finally:
            chunks.close()
        terminal.print_text("\n")
        if ending != "stop":
            terminal.print_note(f"[ended: {ending}]")
        self._shown.note_summary()
        return "".join(parts)

    def _prompt(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        try:
            return self._llm.chat_prompts(messages, chat_template=self._template)[0]
        except RequestError as err:
            if self._template is None and "no chat template" in str(err):
                raise RequestError(
                    "the tokenizer has no chat template: the model was not trained for conversations. Expected a "
                    "template. Pass --chat-template FILE, or use `foretoken generate`."
                ) from err
            raise
