"""Workloads: prompts and sampling parameters of a measurement or comparison."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib import resources
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.bench.measurement import Measurement
from foretoken.bench.speed_report import NO_CATEGORY, RunLog
from foretoken.core.checks import check_text, shown
from foretoken.core.errors import RequestError
from foretoken.core.results import GenerationMetrics, RequestOutput
from foretoken.core.sampling_params import SamplingParams
from foretoken.entrypoints.config import PLAIN, Setup
from foretoken.entrypoints.llm import LLM
from foretoken.files.bounded_reads import MIB, read_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord
    from foretoken.models.loading import LoadedModel

HELD_OUT = "heldout"
_BUNDLED = {HELD_OUT: "completion", "edit": "edits", "prose": "prose"}  # sets, and the category of their prompts
_ALL = "all"
_MOST_BYTES = 512 * MIB  # largest file of prompts; a choice


class Prompt(NamedTuple):
    """A prompt and its category, as SPEED-Bench's "coding"; `NO_CATEGORY` if it has none."""

    text: str
    category: str


def load_prompts(source: str = HELD_OUT, *, limit: int | None = None) -> list[str]:
    """Returns the texts of `categorised_prompts`; arguments and errors are the same."""
    return [prompt.text for prompt in categorised_prompts(source, limit=limit)]


def categorised_prompts(source: str = HELD_OUT, *, limit: int | None = None) -> list[Prompt]:
    """Reads prompts.

    Args:
        source: A bundled set, cut from Python files that the reference model never saw: "heldout" (code to be
            completed), "edit" (functions to be repeated with a name changed) or "prose" (docstrings to be completed),
            or "all" for the three in turn. Or a `.jsonl` file with a `prompt` string in every line and perhaps a
            `category` string, or any other text file as one prompt.
        limit: Most prompts.

    Raises:
        RequestError: When the file is missing, empty, too large or of another form.
    """
    if source == _ALL:
        sets = [categorised_prompts(each) for each in _BUNDLED]
        return [prompt for in_turn in zip_longest(*sets) for prompt in in_turn if prompt is not None][:limit]
    if source in _BUNDLED:
        text = (resources.files("foretoken.bench") / "prompts" / f"tinycode_{source}.jsonl").read_text(encoding="utf-8")
        return _from_jsonl(text, source, _BUNDLED[source])[:limit]
    path = Path(source)
    if not path.exists():
        names = ", ".join(map(repr, (*_BUNDLED, _ALL)))
        raise RequestError(f"there is no prompt file '{source}'. Expected {names}, a .jsonl or a text file.")
    try:
        text = read_named(path, limit=_MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"'{source}' is not UTF-8 text: {err}. Expected UTF-8. Convert it first.") from err
    except OSError as err:
        raise RequestError(f"'{source}' cannot be read: {err.strerror}. Expected a .jsonl or a text file.") from err
    prompts = _from_jsonl(text, source) if path.suffix == ".jsonl" else [Prompt(text, NO_CATEGORY)]
    if not any(prompt.text for prompt in prompts):
        raise RequestError(f"'{source}' holds no prompt. Expected at least one that is not empty.")
    return prompts[:limit]


def _from_jsonl(text: str, source: str, otherwise: str = NO_CATEGORY) -> list[Prompt]:
    """Returns the prompts of a file; `otherwise` is the category of lines without one."""
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut strings at U+2028
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            prompt, category = entry["prompt"], entry.get("category")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise RequestError(f'{source}:{number} is not an object with "prompt". Expected one a line.') from err
        for name, value in (("prompt", prompt), ("category", otherwise if category is None else category)):
            if not isinstance(value, str) or not value:
                raise RequestError(
                    f'{source}:{number}: "{name}" is {shown(value)}. Expected a string that is not empty.'
                )
            check_text(f'"{name}" of {source}:{number}', value)
        prompts.append(Prompt(prompt, category or otherwise))
    return prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts decoded at several temperatures.

    Attributes:
        temperatures: 0 for greedy; above, every request is sampled with its own seed.
        max_tokens: Output tokens a prompt; the end-of-sequence token does not stop.
        seed: Seed of the first prompt; the i-th gets `seed + i`.
        categories: Category of each prompt; empty if they have none.
    """

    prompts: Sequence[str]
    temperatures: Sequence[float] = (0.0, 0.8)
    max_tokens: int = 128
    seed: int = 0
    categories: Sequence[str] = ()

    def params(self, temperature: float) -> list[SamplingParams]:
        """Returns the sampling parameters of every prompt."""
        return [
            SamplingParams(temperature=temperature, max_tokens=self.max_tokens, seed=self.seed + index, ignore_eos=True)
            for index in range(len(self.prompts))
        ]

    def batches(self, batch_size: int) -> list[list[int]]:
        """Returns the indices of prompts that are decoded at once; the last batch may be smaller."""
        indices = list(range(len(self.prompts)))
        return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]


@dataclass(slots=True)
class TokenProgress:
    """Counts output tokens over several runs of a workload, of one temperature; `add` goes to `LLM` as `on_step`."""

    workload: Workload
    num_runs: int
    report: Callable[[int, int], None]
    _tokens: int = 0
    _runs: int = 0

    def add(self, record: StepRecord) -> None:
        """Counts an iteration."""
        self._tokens += sum(step.num_emitted for step in record.sequences)
        self._show()

    def end_run(self) -> None:
        """Counts a run as complete, even if its texts ended early."""
        self._runs += 1
        self._tokens = 0
        self._show()

    def _show(self) -> None:
        size = len(self.workload.prompts) * self.workload.max_tokens
        self.report(self._runs * size + min(self._tokens, size), self.num_runs * size)


def no_progress(done: int, total: int) -> None:
    """Shows nothing."""
    del done, total


# A choice: several iterations, so that buffers exist and kernels are compiled before the clock starts.
_WARM_UP_TOKENS = 8


class SetupEngines:
    """One engine a setup, over weights that are loaded once; plain decoding is always included, as the first."""

    def __init__(
        self,
        model: LoadedModel,
        tokenizer: Any,
        setups: Sequence[Setup],
        workload: Workload,
        *,
        batch_size: int = 1,
        runner: str = "auto",
    ) -> None:
        self.workload, self._batch_size = workload, batch_size
        self._engines: dict[str, LLM] = {}
        self._on_step: Callable[[StepRecord], None] = _ignore  # one engine runs at a time
        self._create = partial(
            LLM, model, tokenizer=tokenizer, max_num_seqs=batch_size, runner=runner, on_step=self._note_step,
            enable_prefix_caching=False,  # a repeated prompt must cost as much as a new one
        )  # fmt: skip
        for setup in [Setup(PLAIN, None), *(setup for setup in setups if setup.config is not None)]:
            self.add(setup)

    @property
    def names(self) -> list[str]:
        """The names of the setups, in order."""
        return list(self._engines)

    def add(self, setup: Setup) -> None:
        """Makes or replaces the engine of a setup; raises `ForetokenError` if the drafter does not fit the target."""
        config = setup.with_references(self._plain_texts() if setup.needs_references else ())
        self._engines[setup.name] = self._create(speculative_config=config)

    def remove(self, name: str) -> None:
        """Frees the engine of a setup, with its memory."""
        del self._engines[name]

    @property
    def is_lossy(self) -> bool:
        """Whether the text of any setup may differ from plain decoding's."""
        return any(engine.is_lossy for engine in self._engines.values())

    def empty(self, name: str, temperature: float) -> Measurement:
        """Returns an empty measurement of a setup."""
        target = self._engines[name].target
        return Measurement(name, temperature, target.name, target.choice, batch_size=self._batch_size)

    def warm_up(self, temperature: float) -> None:
        """Decodes a few tokens with every setup, untimed."""
        params = replace(
            self.workload.params(temperature)[0], max_tokens=min(_WARM_UP_TOKENS, self.workload.max_tokens)
        )
        for engine in self._engines.values():
            engine.generate(self.workload.prompts[0], params)

    def measure(self, name: str, temperature: float, batch: Sequence[int]) -> Measurement:
        """Decodes one batch, indices into the workload's prompts, with one setup and returns the round."""
        row, params = self.empty(name, temperature), self.workload.params(temperature)
        categories, log = self.workload.categories, RunLog()

        def note(record: StepRecord) -> None:
            now = time.perf_counter()
            row.add_step(record, now)
            log.add(record, now)

        self._on_step = note
        begin = time.perf_counter()
        results = self._engines[name].generate([self.workload.prompts[i] for i in batch], [params[i] for i in batch])
        seconds = time.perf_counter() - begin
        self._on_step = _ignore
        row.metrics = GenerationMetrics.total(result.metrics for result in results)
        row.runs = [
            log.run_of(result.request_id, categories[index] if categories else NO_CATEGORY)
            for result, index in zip(results, batch, strict=True)
        ]
        row.wall_seconds = seconds
        row.seconds.append(seconds - row.metrics.prefill_seconds)
        decoded = row.metrics.num_emitted - row.metrics.num_prefill_emitted
        row.tokens.append(decoded or row.metrics.num_emitted)  # with one token a prompt, prefill's tokens count
        row.taus.append(row.tau)
        row.texts.extend(list(result.outputs[0].token_ids) for result in results)
        return row

    def _note_step(self, record: StepRecord) -> None:
        self._on_step(record)

    def _plain_texts(self) -> list[RequestOutput]:
        plain, workload = self._engines[PLAIN], self.workload
        return [
            output
            for temperature in workload.temperatures
            for output in plain.generate(list(workload.prompts), workload.params(temperature))
        ]


def _ignore(record: StepRecord) -> None:
    del record
