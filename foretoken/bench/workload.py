"""Workloads: prompts and sampling parameters of a measurement or comparison."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from foretoken.core.checks import check_text, shown
from foretoken.core.errors import RequestError
from foretoken.core.sampling_params import SamplingParams
from foretoken.files.bounded_reads import MIB, read_named

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.core.records import StepRecord

HELD_OUT = "heldout"
_BUNDLED = (HELD_OUT, "edit", "prose")
_MOST_BYTES = 512 * MIB


def load_prompts(source: str = HELD_OUT, *, limit: int | None = None) -> list[str]:
    """Reads prompts.

    Args:
        source: A bundled set, cut from Python files that the reference model never saw: "heldout" (code to be
            completed), "edit" (functions to be repeated with a name changed) or "prose" (docstrings to be completed).
            Or a `.jsonl` file with a `prompt` string in every line, or any other text file as one prompt.
        limit: Most prompts.

    Raises:
        RequestError: When the file is missing, empty, too large or of another form.
    """
    if source in _BUNDLED:
        text = (resources.files("foretoken.bench") / "prompts" / f"tinycode_{source}.jsonl").read_text(encoding="utf-8")
        return _from_jsonl(text, source)[:limit]
    path = Path(source)
    if not path.exists():
        raise RequestError(
            f"there is no prompt file '{source}'. Expected {', '.join(map(repr, _BUNDLED))}, a .jsonl or a text file."
        )
    try:
        text = read_named(path, limit=_MOST_BYTES).decode("utf-8")
    except UnicodeDecodeError as err:
        raise RequestError(f"'{source}' is not UTF-8 text: {err}. Expected UTF-8. Convert it first.") from err
    except OSError as err:
        raise RequestError(f"'{source}' cannot be read: {err.strerror}. Expected a .jsonl or a text file.") from err
    prompts = _from_jsonl(text, source) if path.suffix == ".jsonl" else [text]
    if not any(prompts):
        raise RequestError(f"'{source}' holds no prompt. Expected at least one that is not empty.")
    return prompts[:limit]


def _from_jsonl(text: str, source: str) -> list[str]:
    prompts = []
    for number, line in enumerate(text.split("\n"), start=1):  # splitlines would cut strings at U+2028
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, KeyError, TypeError, RecursionError) as err:
            raise RequestError(f'{source}:{number} is not an object with "prompt". Expected one a line.') from err
        if not isinstance(prompt, str) or not prompt:
            raise RequestError(f'{source}:{number}: "prompt" is {shown(prompt)}. Expected a string that is not empty.')
        check_text(f'"prompt" of {source}:{number}', prompt)
        prompts.append(prompt)
    return prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts decoded at several temperatures.

    Attributes:
        prompts: The prompts.
        temperatures: 0 for greedy; above, every request is sampled with its own seed.
        max_tokens: Output tokens a prompt; the end-of-sequence token does not stop.
        seed: Seed of the first prompt; the i-th gets `seed + i`.
    """

    prompts: Sequence[str]
    temperatures: Sequence[float] = (0.0, 0.8)
    max_tokens: int = 128
    seed: int = 0

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
    """Counts output tokens over several runs of a workload; `add` goes to `LLM` as `on_step`.

    Attributes:
        workload: The workload of one run, at one temperature.
        num_runs: Runs in all.
        report: Called with tokens done and tokens in all.
    """

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
