"""Verdicts on measured runs, one sentence each, in the words of `foretoken plan`: take, do not draft, not decided."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.records import StageSeconds, StepRecord
from foretoken.entrypoints.config import PLAIN
from foretoken.planning.plan import INTERVAL_WIDTH, Word

if TYPE_CHECKING:
    from foretoken.bench.compare import Measurement

_ONE_ROUND = 0.1  # relative standard error of a single speed-up; a choice
_ONE_RUN = 0.05  # the same of a run that was not compared with plain decoding; a choice
_MOST_DECLINED = 0.5  # a slower row with at least this share of declined passes counts as declined; a choice


class Verdict(NamedTuple):
    """What a comparison at one temperature and batch size says of the fastest drafter.

    `speed_up` is its median; `low` and `high` are the ends of an 80 % interval of its mean.
    """

    temperature: float
    batch_size: int
    verdict: Word
    drafter: str
    speed_up: float
    low: float
    high: float
    sentence: str


def declined_share(row: Measurement) -> float:
    """Returns the share of the passes in which the controller chose not to draft."""
    return row.metrics.num_declined / max(row.metrics.steps, 1)


def is_declined(row: Measurement) -> bool:
    """Whether a row is slower than plain decoding because the controller mostly chose not to draft."""
    return row.speed_up < 1 and declined_share(row) >= _MOST_DECLINED


def verdicts(rows: Sequence[Measurement], drafters: Collection[str]) -> list[Verdict]:
    """Returns a verdict for each temperature and batch size, in the order of the rows of `compare_setups`.

    `drafters` are the names of the setups that can be taken; an oracle cannot.
    """
    groups: dict[tuple[float, int], list[Measurement]] = {}
    for row in rows:
        groups.setdefault((row.temperature, row.batch_size), []).append(row)
    found = []
    for (temperature, batch_size), group in groups.items():
        plain = next(row for row in group if row.setup == PLAIN)
        drafting = [row for row in group if row.setup in drafters]
        if drafting:
            best = max(drafting, key=lambda row: row.speed_up)
            found.append(_verdict(plain, best, temperature, batch_size))
    return found


def _verdict(plain: Measurement, best: Measurement, temperature: float, batch_size: int) -> Verdict:
    mean, number = fmean(best.speed_ups), len(best.speed_ups)
    error = stdev(best.speed_ups) / number**0.5 if number > 1 else _ONE_ROUND * mean
    low, high = mean - INTERVAL_WIDTH * error, mean + INTERVAL_WIDTH * error
    word = _word(low, high)
    times = f"plain decoding takes {_ms(plain)} ms a token, {best.setup} {_ms(best)}"
    if word == "take":
        said = f"take {best.setup}, {best.speed_up:.2f}x: {times}"
    elif word == "not decided":
        said = f"not decided, {low:.2f}x to {high:.2f}x: {times}"
    else:
        share = declined_share(best)
        why = f"; the engine itself chose not to draft in {share:.0%} of the passes" if share else ""
        said = f"do not draft: {times}, the fastest drafter{why}"
    source = "measured, with synthetic acceptance" if best.metrics.num_synthetic else "measured"
    batch = "" if batch_size == 1 else f", batch {batch_size}"
    sentence = f"temperature {temperature:g}{batch}: {said} ({source})"
    return Verdict(temperature, batch_size, word, best.setup, best.speed_up, low, high, sentence)


def _word(low: float, high: float) -> Word:
    return "take" if low > 1 else "do not draft" if high <= 1 else "not decided"


def _ms(row: Measurement) -> str:
    return f"{1e3 / row.tokens_per_s:.2f}"


def next_step(model: str, found: Sequence[Verdict]) -> str:
    """Returns what to try after `foretoken bench`, as a command."""
    words = {each.verdict for each in found}
    plan = f"`foretoken plan {shlex.quote(model)} --measure`"
    if "take" in words:
        return f"next: {plan} says which depth is fastest, and from which batch on nothing pays"
    if "not decided" in words:
        return "next: more rounds decide: pass --num-prompts 32 --repeats 2"
    return f"next: {plan} compares all drafters of this model, and says if none pays"


@dataclass(slots=True)
class RunVerdict:
    """Compares one generation with plain decoding, which is not run, by the seconds of the generation's own passes.

    `add_step` goes to `LLM` as `on_step`, for an engine with one sequence.
    """

    _tokens: int = 0
    _seconds: StageSeconds = field(default_factory=StageSeconds)
    _plain: list[float] = field(default_factory=list)
    _told: float | None = None

    def add_step(self, record: StepRecord) -> None:
        """Counts a pass after the prompt's."""
        (step,) = record.sequences
        if step.ends_prompt:
            return
        self._tokens += step.num_emitted
        self._seconds += record.decode_seconds
        self._told = record.plain_seconds or self._told
        if record.num_tokens == 1 and not record.num_prompt_tokens:
            self._plain.append(record.seconds.total - record.seconds.draft)

    @property
    def plain_seconds(self) -> float | None:
        """Estimated seconds of plain decoding for the tokens after the first; None if no pass says how long one takes.

        A pass without drafts takes what the controller's cost model says, which it corrects by every pass; without a
        cost model, the mean of the passes without drafts.
        """
        each = self._told if self._told is not None else fmean(self._plain) if self._plain else None
        return None if each is None else each * self._tokens

    @property
    def speed_up(self) -> float | None:
        """Estimated speed-up over plain decoding; None if it is not known."""
        plain = self.plain_seconds
        return plain / self._seconds.total if plain and self._seconds.total else None

    def sentences(self, model: str, drafter: str | None, given: str = "") -> Iterator[str]:
        """Yields the verdict, and what to try next; nothing without a token after the first.

        `drafter` is the name of the setup, None for plain decoding; `given` is its text after -s.
        """
        took, plain, speed_up = self._seconds.total, self.plain_seconds, self.speed_up
        if not self._tokens:
            return
        if drafter is None:
            yield f"plain decoding took {took:.2f} s for {self._tokens} tokens after the first; nothing was drafted"
            yield f"next: add -s ngram, or let `foretoken plan {shlex.quote(model)} --measure` choose a drafter"
            return
        bench = f"`foretoken bench {shlex.quote(model)} -s {shlex.quote(given)}`"
        if plain is None or speed_up is None:
            yield (
                f"not decided: {drafter} took {took:.2f} s for {self._tokens} tokens after the first; no pass of this "
                "run went without drafts, to tell what plain decoding takes"
            )
            yield f"next: {bench} measures both"
            return
        word = _word(speed_up * (1 - _ONE_RUN), speed_up * (1 + _ONE_RUN))
        said = f"take {drafter}" if word == "take" else word
        yield (
            f"{said}, {speed_up:.2f}x: plain decoding would have taken {plain:.2f} s for {self._tokens} tokens after "
            f"the first, {drafter} took {took:.2f} s (estimated from passes of this run)"
        )
        yield f"next: {bench} measures it on more prompts, beside plain decoding"

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures JSON-ready."""
        return {
            "tokens": self._tokens, "seconds": self._seconds.total, "plain_seconds": self.plain_seconds,
            "speed_up": self.speed_up, "source": "estimated from passes of this run",
        }  # fmt: skip
