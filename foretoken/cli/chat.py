"""`foretoken chat`: a conversation in the terminal, with every accepted token in its drafter's colour.

`foretoken generate --show` prints texts in the same way.
"""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from foretoken.cli import options, terminal
from foretoken.core.errors import RequestError
from foretoken.files.bounded_reads import MOST_TEXT_BYTES

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.core.results import StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.entrypoints.llm import LLM

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
    clock = options.started_clock()
    setup = drafter.setup("chat", model)
    stops = [options.checked(one, "--stop") for one in stop or ()]
    given = sampling.given(seed=seed, max_tokens=max_tokens, stop=stops)
    template = None if chat_template is None else options.read_text(chat_template)
    told = None if system is None else options.checked(system, "--system")
    loaded, tokenizer = loading.load(model, clock=clock)
    params = sampling.params(loaded, given, temperature=0.0, max_tokens=None)
    answers = _Answers(params, template, wished_colour(color=color, no_color=no_color))
    answers.llm = loading.make_llm(
        loaded, tokenizer, setup, clock, verbose=verbose, max_num_seqs=1, on_step=answers.add_step
    )
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
    llm: LLM  # set once it is made: it needs `add_step`

    def __init__(self, params: SamplingParams, template: str | None, colour: bool | None) -> None:
        self._params, self._template, self._colour = params, template, colour
        self._shown: ShownTokens | None = None

    def add_step(self, record: StepRecord) -> None:
        if self._shown is not None:
            self._shown.add_step(record)

    def check_start(self, beginning: list[dict[str, str]]) -> None:
        self._prompt([*beginning, {"role": "user", "content": "?"}])

    def print_answer(self, messages: list[dict[str, str]]) -> str:
        chunks = self.llm.stream(self._prompt(messages), self._params)  # refuses the prompt before anything is printed
        self._shown = ShownTokens(self._colour, raw=False)
        parts: list[str] = []
        ending: str | None = "interrupted"
        try:
            for chunk in chunks:
                self._shown.write(chunk)
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
            return self.llm.chat_prompts(messages, chat_template=self._template)[0]
        except RequestError as err:
            if self._template is None and "no chat template" in str(err):
                raise RequestError(
                    "the tokenizer has no chat template: the model was not trained for conversations. Expected a "
                    "template. Pass --chat-template FILE, or use `foretoken generate`."
                ) from err
            raise


DIM = "2"
COLOURS = ("32", "36", "35", "33", "34", "31", "92", "96", "95", "93", "94", "91")  # SGR codes
_JOINER = "\u200d"


def wished_colour(*, color: bool, no_color: bool) -> bool | None:
    """Returns the wish of --color and --no-color, the stronger one; None to decide by the streams."""
    return color and not no_color if color or no_color else None


def has_colours(stream: TextIO, wish: bool | None) -> bool:
    """Decides whether to colour a stream; without the user's `wish` by the stream and https://no-color.org."""
    if wish is not None:
        return wish
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, colour: str | None) -> str:
    """Returns a text in a colour; None for no colour."""
    return text if colour is None or not text else f"\x1b[{colour}m{text}\x1b[0m"


def runs(characters: Iterable[tuple[str, str | None]]) -> list[tuple[str, str | None]]:
    """Groups characters with their colours into runs of one colour.

    A character that a terminal joins to the previous one (a combining mark, a variation selector, a part of an emoji)
    has the same colour: an escape sequence between them would separate them.
    """
    found: list[tuple[str, str | None]] = []
    last = ""
    for char, colour in characters:
        is_joined = _JOINER in (last, char) or unicodedata.category(char) in {"Mn", "Me", "Mc"}
        if found and (found[-1][1] == colour or is_joined):
            found[-1] = (found[-1][0] + char, found[-1][1])
        else:
            found.append((char, colour))
        last = char
    return found


def safe_and_painted(characters: Iterable[tuple[str, str | None]], *, is_visible: bool) -> str:
    """Returns coloured text; `is_visible` turns control characters into escapes."""
    return "".join(painted(terminal.visible(text) if is_visible else text, colour) for text, colour in runs(characters))


class ShownTokens:
    """Prints one completion: the target's own tokens are plain, accepted tokens have their drafter's colour."""

    def __init__(self, colour: bool | None, *, raw: bool) -> None:
        """Begins a text.

        `colour` is the wish of the command line, None to decide by the streams. `raw` shows control characters
        unescaped on a terminal.
        """
        self._counts: Counter[tuple[str, ...]] = Counter()  # tokens by their drafters; none for the target's own
        self._colours: dict[tuple[str, ...], str] = {}
        self._passes = 0
        self._is_coloured = has_colours(sys.stdout, colour)
        self._is_legend_coloured = has_colours(sys.stderr, colour)
        self._is_visible = sys.stdout.isatty() and not raw

    def add_step(self, record: StepRecord) -> None:
        """Takes note of an iteration; called before the iteration's text is written."""
        step = record.sequences[0]
        self._passes += 1
        self._counts[()] += max(len(step.tokens) - step.num_accepted, 0)
        self._counts.update(step.accepted_from)
        for origin in step.accepted_from:
            self._colours.setdefault(origin, COLOURS[len(self._colours) % len(COLOURS)])

    def write_prompt(self, text: str) -> None:
        """Writes the prompt, dimmed."""
        self._write([(char, DIM) for char in text])

    def write(self, chunk: StreamChunk) -> None:
        """Writes the text of a chunk."""
        self._write([(char, self._colours.get(part.accepted_from)) for part in chunk.parts for char in part.text])

    def note_summary(self) -> None:
        """Prints on standard error the legend of the colours, and how many tokens came from each drafter."""
        num_tokens = self._counts.total()
        shares = {origin: f"{count} ({count / max(num_tokens, 1):.0%})" for origin, count in self._counts.items()}
        parts = [
            f"{painted(terminal.visible(' and '.join(origin)), colour if self._is_legend_coloured else None)} "
            f"{shares[origin]}"
            for origin, colour in self._colours.items()
        ]
        own = f"tokens: the target's own {shares.get((), '0 (0%)')}"
        tau = num_tokens / max(self._passes, 1)
        terminal.side_output(f"[{', '.join([own, *parts])}; tau {tau:.2f}]\n")

    def _write(self, characters: list[tuple[str, str | None]]) -> None:
        if not self._is_coloured:
            characters = [(char, None) for char, _ in characters]
        sys.stdout.write(safe_and_painted(characters, is_visible=self._is_visible))
        sys.stdout.flush()
