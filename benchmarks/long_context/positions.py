"""Measures the acceptance length against the position in the output."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord
    from foretoken.entrypoints.config import Setup
    from foretoken.files.atomic_files import JournalFile
    from foretoken.models.loading import LoadedModel

BIN = 512  # output tokens of a bin
_GRAM = 64  # tokens; a text that repeats so many at once loops
_EVERY, _SHORT = 64, 12  # tokens from one short output along a text to the next, and of the output; a choice
LOOPING = 0.5  # share of repeated 64-grams from which a text is left out of the verdict; a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One drafter at one temperature.

    Attributes:
        setup: Name of the drafter.
        temperature: Of all requests.
        emitted: Emitted tokens by bin of the position of the first of them, over all texts.
        passes: Passes of the target likewise, one for each text.
        repeated: Share of 64-grams of the texts that occur earlier in the same text.
        seconds: Of decoding all texts at once, prompts included.
    """

    setup: str
    temperature: float
    emitted: list[int]
    passes: list[int]
    repeated: float
    seconds: float

    @property
    def taus(self) -> list[float]:
        """Emitted tokens a pass, by bin."""
        return [emitted / passes for emitted, passes in zip(self.emitted, self.passes, strict=True)]

    @property
    def least_share(self) -> float:
        """The least tau of a bin, divided by that of the first."""
        return min(self.taus) / self.taus[0]

    @property
    def is_looping(self) -> bool:
        """Whether the texts repeat themselves, so that any drafter is right."""
        return self.repeated >= LOOPING


class Bins:
    """Adds up tokens and passes by the position in the output; `add` goes to `LLM` as `on_step`."""

    def __init__(self, num_bins: int) -> None:
        self.start = 0  # position of the first output token of requests that begin now
        self._at: dict[str, int] = defaultdict(int)
        self.emitted, self.passes = [0] * num_bins, [0] * num_bins

    def add(self, record: StepRecord) -> None:
        """Counts an iteration; the token that comes with the prompt was not drafted."""
        for step in record.sequences:
            if not step.ends_prompt:
                place = min((self.start + self._at[step.request_id]) // BIN, len(self.passes) - 1)
                self.emitted[place] += step.num_emitted
                self.passes[place] += 1
            self._at[step.request_id] += step.num_emitted


def repeated_share(tokens: Sequence[int]) -> float:
    """Returns the share of 64-grams that occur earlier in the text; 0 for a text without two of them."""
    grams = [tuple(tokens[at : at + _GRAM]) for at in range(len(tokens) - _GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured.

    Attributes:
        setups: Drafters.
        prompts: Token ids; all texts are decoded at once.
        following: Token ids that follow the prompts. If given, the model continues the texts for a few tokens behind
            every 64th token; a long output of its own would soon repeat itself.
        temperatures: Of the requests.
        max_tokens: Output tokens of each text, or those that follow.
        until: `time.monotonic()` after which nothing begins.
    """

    setups: Sequence[Setup]
    prompts: Sequence[list[int]]
    following: Sequence[list[int]]
    temperatures: Sequence[float]
    max_tokens: int
    until: float


def measure(model: LoadedModel, plan: Plan, journal: JournalFile, say: Callable[[str], None]) -> list[str]:
    """Measures what the journal lacks, and adds a line for each drafter and temperature; returns what was left out.

    Raises:
        ConfigError: When prompts and output exceed the positions of the model.
    """
    longest = _longest(plan)
    if longest > model.context_len:
        raise ConfigError(
            f"--tokens {plan.max_tokens} makes texts of {longest} tokens, and '{model.name}' has {model.context_len} "
            "positions. Expected no more. Lower --tokens."
        )
    known = {(line["setup"], line["temperature"]) for line in journal.lines}
    left_out = []
    for temperature in plan.temperatures:
        for setup in plan.setups:
            if (setup.name, temperature) in known:
                continue
            if time.monotonic() > plan.until:
                left_out.append(f"{setup.name}, T {temperature:g}: no time was left.")
                continue
            line = _measure_setup(model, plan, setup, temperature)
            journal.add(asdict(line))
            say(f"{setup.name}, T {temperature:g}: tau {line.taus[0]:.2f} at first, least {line.least_share:.0%} of it")
            gc.collect()
    return left_out


def _longest(plan: Plan) -> int:
    return max(map(len, plan.prompts)) + plan.max_tokens + _SHORT


def _measure_setup(model: LoadedModel, plan: Plan, setup: Setup, temperature: float) -> Line:
    bins = Bins(-(-plan.max_tokens // BIN))
    starts = range(0, plan.max_tokens, _EVERY) if plan.following else (0,)
    max_tokens = _SHORT if plan.following else plan.max_tokens
    params: Any = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=True, seed=seed)
        for seed in range(len(plan.prompts))
    ]  # fmt: skip
    outputs = []
    with LLM(
        model, speculative_config=setup.config, max_num_seqs=len(plan.prompts), max_model_len=_longest(plan),
        on_step=bins.add,
    ) as llm:  # fmt: skip
        begin = time.perf_counter()
        for bins.start in starts:
            texts = [
                [*prompt, *after[: bins.start]]
                for prompt, after in zip(plan.prompts, plan.following or plan.prompts, strict=True)
            ]
            outputs = llm.generate([{"prompt_token_ids": text} for text in texts], params)
        seconds = time.perf_counter() - begin
    shares = [repeated_share(output.outputs[0].token_ids) for output in outputs]
    return Line(setup=setup.name, temperature=temperature, emitted=bins.emitted, passes=bins.passes,
                repeated=sum(shares) / len(shares), seconds=seconds)  # fmt: skip
