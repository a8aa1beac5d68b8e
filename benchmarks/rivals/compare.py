"""Runs the comparison: loading, interleaved rounds, passes of chosen width.

One question at a time; every other worker is stopped. Within a round each prompt is decoded by everybody in turn, and
the turn moves on by one from prompt to prompt, so that a drift of the machine's speed hits all alike. A contestant that
fails is left out with a sentence, and the others go on.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.rivals.contestants import references
from benchmarks.rivals.environments import install_command, python_of, run_settings
from benchmarks.rivals.machine import Disturbance, DisturbanceWatch, available_bytes
from benchmarks.rivals.messages import Generation, Loaded, LoadRequest
from benchmarks.rivals.prepared import PreparationError, checkpoints
from benchmarks.rivals.worker_process import WorkerError, WorkerProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from benchmarks.rivals.contestants import Contestant

_SPARE_TOKENS = 64  # behind the longest sequence, for drafts that reach past its end
# Room a contestant must find: weights as read, converted and packed at the same time, and libraries.
_WEIGHT_COPIES, _LIBRARIES_BYTES = 3, 2**30
_ELEMENT_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What is compared on.

    Attributes:
        model: Directory of the target.
        draft_model: Directory of the draft model, or None.
        dtype: "bfloat16" or "float32".
        bits: Of rounded weights, for the report; the contestants hold each engine's format. None for `dtype`.
        threads: Compute threads of every contestant.
        prompts: Token ids.
        max_tokens: Output tokens of every request.
        temperature: Of every request; 0 is greedy. The i-th prompt is sampled with seed i.
        first_prompts: Token ids of prompts of which one token is asked for; none when empty.
        rounds: How often everything is measured.
        widths: Tokens per pass, for the timing of single passes; none when empty.
        context: Tokens in the cache while passes are timed.
        repeats: Passes timed at each width and round, the median of which counts.
        options: Free options by rival or contestant name.
        env_dir: Where the rivals' environments lie.
        timeout_s: Longest that one answer may take.
    """

    model: str
    draft_model: str | None = None
    dtype: str
    bits: int | None = None
    threads: int
    prompts: Sequence[Sequence[int]]
    max_tokens: int
    temperature: float = 0.0
    first_prompts: Sequence[Sequence[int]] = ()
    rounds: int = 1
    widths: Sequence[int] = ()
    context: int = 256
    repeats: int = 5
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    env_dir: Path
    timeout_s: float = 1800.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One request of one contestant."""

    contestant: str
    round: int
    prompt: int
    generation: Generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardRun:
    """Passes of one width by one contestant.

    Attributes:
        contestant: Its name.
        round: Which round.
        width: Tokens per pass.
        seconds: Median over the round's repeats.
    """

    contestant: str
    round: int
    width: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenRun:
    """One request for a single token.

    Attributes:
        contestant: Its name.
        round: Which round.
        prompt: Index into the prompts of that kind.
        seconds: Of the whole request.
    """

    contestant: str
    round: int
    prompt: int
    seconds: float


@dataclass(slots=True, kw_only=True)
class Comparison:
    """Everything that was measured.

    Attributes:
        is_greedy: Whether everybody is to write the same text.
        contestants: Those that finished, in table order.
        loaded: What each of them said when it was loaded.
        runs: Their requests.
        forwards: Their single passes.
        first_tokens: Their requests for a single token.
        skipped: Sentences on engines that are not installed.
        failures: Sentences on engines that broke down.
        disturbance: What else the machine did.
    """

    is_greedy: bool = True
    contestants: list[Contestant] = field(default_factory=list)
    loaded: dict[str, Loaded] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    forwards: list[ForwardRun] = field(default_factory=list)
    first_tokens: list[FirstTokenRun] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    disturbance: Disturbance | None = None


def compare(settings: Settings, contestants: Sequence[Contestant], say: Callable[[str], None]) -> Comparison:
    """Measures.

    Args:
        settings: On what.
        contestants: Which.
        say: Gets progress, a line at a time.

    Raises:
        ValueError: When prompts or passes do not fit into the model's context.
    """
    request_len = _sequence_len(settings)
    contest = _Contest(settings, say)
    try:
        # References come first, so that they do not find the memory full.
        first = references(contestants)
        for contestant in sorted(contestants, key=lambda contestant: contestant not in first):
            contest.admit(contestant, request_len)
        contest.result.contestants.sort(key=contestants.index)
        watch = DisturbanceWatch()
        for number in range(settings.rounds):
            contest.decode(number, watch)
            contest.time_first_tokens(number, watch)
            contest.time_passes(number, watch)
        contest.result.disturbance = watch.finish()
    finally:
        contest.close()
    return contest.result


class _Contest:
    """The contestants that are still in it, and what they are asked."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self.settings, self.say = settings, say
        self.result = Comparison(is_greedy=settings.temperature == 0)
        self.workers: dict[str, WorkerProcess] = {}

    def admit(self, contestant: Contestant, max_len: int) -> None:
        """Starts, loads and warms up a contestant, or notes why not."""
        settings, name = self.settings, contestant.name
        if why_not := self._why_not(contestant):
            self.result.skipped.append(f"{name} is skipped: {why_not}")
            self.say(self.result.skipped[-1])
            return
        self.say(f"{name}: loading")
        cache_dir = str(settings.env_dir / "converted")
        model = str(Path(settings.model).resolve())
        draft_model = str(Path(settings.draft_model).resolve()) if settings.draft_model else None
        try:
            model, draft_model = checkpoints(contestant, model, draft_model, cache_dir)
        except PreparationError as err:
            self.result.failures.append(f"{name} is left out: {err}")
            self.say(self.result.failures[-1])
            return
        logs = settings.env_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        worker = WorkerProcess(
            name,
            [str(python_of(contestant.rival, settings.env_dir)), "-m", f"benchmarks.rivals.workers.{contestant.rival}"],
            threads=settings.threads,
            log=logs / f"{name}.log",
            timeout_s=settings.timeout_s,
            settings=run_settings(contestant.rival, settings.env_dir),
        )
        self.workers[name] = worker
        request = LoadRequest(
            mode=contestant.mode,
            model=model,
            draft_model=draft_model,
            dtype=settings.dtype,
            weights=contestant.weights,
            threads=settings.threads,
            max_len=max_len,
            max_width=max(settings.widths, default=1),
            cache_dir=cache_dir,
            options={k: v for key in contestant.selectors for k, v in settings.options.get(key, {}).items()},
        )
        try:
            self.result.loaded[name] = worker.load(request)
            for prompt, max_tokens in (
                (settings.prompts[0], settings.max_tokens),
                *_one_each(settings.first_prompts[:1]),
            ):
                worker.generate(prompt, max_tokens, temperature=settings.temperature)  # warms up: caches, compilation
        except WorkerError as err:
            self._drop(name, err)
            return
        self.result.contestants.append(contestant)

    def _why_not(self, contestant: Contestant) -> str | None:
        """Why a contestant cannot take part on this machine; None where it can."""
        if python_of(contestant.rival, self.settings.env_dir) is None:
            command = install_command(contestant.rival, self.settings.env_dir)
            return f"{contestant.rival} is not installed. Run: {command}"
        free, needed = available_bytes(), _needed_bytes(self.settings)
        if free is not None and free < needed:
            return (
                f"{free / 2**30:.1f} GiB of memory are free and it may need {needed / 2**30:.1f}. "
                "Compare fewer at a time with --only."
            )
        return None

    def decode(self, number: int, watch: DisturbanceWatch) -> None:
        """One round of requests."""
        for index, prompt in enumerate(self.settings.prompts):
            self.say(f"round {number + 1} of {self.settings.rounds}, prompt {index + 1}")
            for name, worker in self._in_turn(number + index):
                try:
                    with watch.during(worker.pid):
                        generation = worker.generate(
                            prompt, self.settings.max_tokens, temperature=self.settings.temperature, seed=index
                        )
                except WorkerError as err:
                    self._drop(name, err)
                    continue
                self.result.runs.append(Run(contestant=name, round=number, prompt=index, generation=generation))

    def time_first_tokens(self, number: int, watch: DisturbanceWatch) -> None:
        """One round of requests for a single token."""
        if self.settings.first_prompts:
            self.say(f"round {number + 1} of {self.settings.rounds}, first tokens")
        for index, (prompt, max_tokens) in enumerate(_one_each(self.settings.first_prompts)):
            for name, worker in self._in_turn(number + index):
                try:
                    with watch.during(worker.pid):
                        seconds = worker.generate(prompt, max_tokens).seconds
                except WorkerError as err:
                    self._drop(name, err)
                    continue
                run = FirstTokenRun(contestant=name, round=number, prompt=index, seconds=seconds)
                self.result.first_tokens.append(run)

    def time_passes(self, number: int, watch: DisturbanceWatch) -> None:
        """One round of single passes, by those that can."""
        settings = self.settings
        for index, width in enumerate(settings.widths):
            self.say(f"round {number + 1} of {settings.rounds}, passes of {width}")
            for name, worker in self._in_turn(number + index):
                if not self.result.loaded[name].can_forward:
                    continue
                try:
                    with watch.during(worker.pid):
                        seconds = worker.forward(width=width, context=settings.context, repeats=settings.repeats)
                except WorkerError as err:
                    self._drop(name, err)
                    continue
                self.result.forwards.append(ForwardRun(contestant=name, round=number, width=width, seconds=seconds))

    def close(self) -> None:
        """Ends all workers."""
        for worker in self.workers.values():
            worker.close()

    def _in_turn(self, shift: int) -> Iterator[tuple[str, WorkerProcess]]:
        """Everybody still in it, beginning with another one each time."""
        items = list(self.workers.items())
        start = shift % len(items) if items else 0
        yield from items[start:] + items[:start]

    def _drop(self, name: str, err: WorkerError) -> None:
        """Takes a contestant out; the others go on."""
        self.result.failures.append(f"{err}. It is left out.")
        self.say(f"{self.result.failures[-1]} Its log: {err.log}")
        self.workers.pop(name).close()
        self.result.contestants = [c for c in self.result.contestants if c.name != name]
        self.result.runs = [run for run in self.result.runs if run.contestant != name]
        self.result.forwards = [run for run in self.result.forwards if run.contestant != name]
        self.result.first_tokens = [run for run in self.result.first_tokens if run.contestant != name]


def _one_each(prompts: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], int]]:
    """Requests for a single token: prompts with the number of tokens that are asked for."""
    return [(prompt, 1) for prompt in prompts]


def _needed_bytes(settings: Settings) -> int:
    """Memory that loading one contestant may take."""
    config = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
    stored = sum(file.stat().st_size for file in Path(settings.model).glob("*.safetensors"))
    weights = stored * _ELEMENT_BYTES[settings.dtype] // _ELEMENT_BYTES.get(config.get("dtype"), 2)
    return _WEIGHT_COPIES * weights + _LIBRARIES_BYTES


def _sequence_len(settings: Settings) -> int:
    """Tokens that every contestant makes room for."""
    request = max(len(prompt) for prompt in settings.prompts) + settings.max_tokens
    request = max([request, *(len(prompt) + 1 for prompt in settings.first_prompts)])
    needed = max(request, settings.context + max(settings.widths)) if settings.widths else request
    config = json.loads((Path(settings.model) / "config.json").read_text(encoding="utf-8"))
    limit = int(config.get("max_position_embeddings", needed + _SPARE_TOKENS))
    if needed > limit:
        raise ValueError(
            f"{needed} tokens are needed (prompt and output, or context and width), but the model embeds {limit} "
            "positions. Lower --max-tokens or --context, or choose shorter prompts."
        )
    return min(limit, needed + _SPARE_TOKENS)
