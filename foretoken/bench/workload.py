"""Workloads: prompts and sampling parameters of a measurement or comparison."""

from __future__ import annotations

import gzip
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from io import BytesIO
from itertools import count, zip_longest
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from foretoken.bench.speed_report import NO_CATEGORY
from foretoken.core.errors import RequestError, one_line
from foretoken.core.sampling_params import SamplingParams
from foretoken.entrypoints.llm import LLM
from foretoken.files.bounded_reads import MIB, read_named, read_stream
from foretoken.text.prompt_rows import PromptRow, json_lines, read_prompt_row

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.models.loaded import LoadedModel

HELD_OUT = "heldout"
_BUNDLED = {HELD_OUT: "completion", "edit": "edits", "prose": "prose"}  # sets, and the category of their prompts
_ALL = "all"
_JSON_LINES = (".jsonl", ".jsonl.gz")
_MOST_BYTES = 512 * MIB  # largest file of prompts, unpacked too; a choice
_AT_ONCE = 8  # conversations whose first answers are written together; a choice


def load_prompts(source: str = HELD_OUT, *, limit: int | None = None) -> list[str]:
    """Returns the texts of `read_prompts`; arguments and errors are the same."""
    return [row.text for row in read_prompts(source, limit=limit)]


def read_prompts(
    source: str = HELD_OUT, *, limit: int | None = None, groups: Mapping[str, str] = MappingProxyType({})
) -> list[PromptRow]:
    """Reads prompts.

    Args:
        source: A bundled set, cut from Python files that the reference model never saw: "heldout" (code to be
            completed), "edit" (functions to be repeated with a name changed) or "prose" (docstrings to be completed),
            or "all" for the three. Or a `.jsonl` or `.jsonl.gz` file with rows as `foretoken.text.prompt_rows` reads
            them, or any other text file as one prompt.
        limit: Most rows, taken from each category in turn; None for all rows as they stand.
        groups: New names of categories.

    Raises:
        RequestError: When the file is missing, empty, too large or of another form.
    """
    if source in (*_BUNDLED, _ALL):
        rows = [row for name in (_BUNDLED if source == _ALL else (source,)) for row in _bundled(name)]
    else:
        rows = _from_file(source)
    rows = [replace(row, category=groups.get(row.category, row.category) or NO_CATEGORY) for row in rows]
    if limit is None:
        return rows
    by_category: dict[str, list[PromptRow]] = {}
    for row in rows:
        by_category.setdefault(row.category, []).append(row)
    return [row for in_turn in zip_longest(*by_category.values()) for row in in_turn if row is not None][:limit]


def _bundled(name: str) -> list[PromptRow]:
    data = (resources.files("foretoken.bench") / "prompts" / f"tinycode_{name}.jsonl").read_bytes()
    return [replace(row, category=_BUNDLED[name]) for row in _rows(data, name)]


def _from_file(source: str) -> list[PromptRow]:
    path = Path(source)
    if not os.path.exists(path):  # noqa: PTH110 - pathlib raises for some names
        names = ", ".join(map(repr, (*_BUNDLED, _ALL)))
        raise RequestError(f"there is no prompt file '{source}'. Expected {names}, a .jsonl or a text file.")
    try:
        data = read_named(path, limit=_MOST_BYTES)
        if path.suffix == ".gz":
            unpacked = cast("BinaryIO", gzip.GzipFile(fileobj=BytesIO(data)))
            data = read_stream(unpacked, f"'{source}'", limit=_MOST_BYTES)
        if path.name.endswith(_JSON_LINES):
            rows = _rows(data, source)
        else:
            rows = [PromptRow(where=source, raw=data.decode("utf-8"))]
    except UnicodeDecodeError as err:
        raise RequestError(f"'{source}' is not UTF-8 text: {err}. Expected UTF-8. Convert it first.") from err
    except (OSError, EOFError, zlib.error) as err:
        raise RequestError(f"'{source}' cannot be read: {one_line(err)}. Expected a .jsonl or a text file.") from err
    if not any(row.text for row in rows):
        raise RequestError(f"'{source}' holds no prompt. Expected at least one that is not empty.")
    return rows


def _rows(data: bytes, source: str) -> list[PromptRow]:
    rows = [read_prompt_row(row, where) for row, where, _ in json_lines(data.split(b"\n"), source)]
    for row in rows:
        if not row.text:
            raise RequestError(f"{row.where} holds no text. Expected a prompt that is not empty. Remove the line.")
    return rows


Asked = str | list[int]
"""A prompt to decode: text to continue, or the token ids of a conversation by the chat template."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Prompts decoded at several temperatures."""

    prompts: Sequence[Asked]
    temperatures: Sequence[float] = (0.0, 0.8)  # 0 for greedy; above, every request is sampled with its own seed
    max_tokens: int = 128  # output tokens a prompt; only answers of a conversation may end earlier
    seed: int = 0  # seed of the first prompt; the i-th gets `seed + i`
    categories: Sequence[str] = ()  # category of each prompt; empty if they have none
    questions: Sequence[int] = ()  # row of each prompt, the same for all turns; empty if each prompt is a row
    source: str = ""  # name of the prompt set or of its file; empty if it has none

    def params(self, temperature: float) -> list[SamplingParams]:
        """Returns the sampling parameters of every prompt."""
        return [
            SamplingParams(
                temperature=temperature, max_tokens=self.max_tokens, seed=self.seed + index,
                ignore_eos=isinstance(prompt, str),
            )
            for index, prompt in enumerate(self.prompts)
        ]  # fmt: skip

    def batches(self, batch_size: int) -> list[list[int]]:
        """Returns the indices of prompts that are decoded at once; the last batch may be smaller."""
        indices = list(range(len(self.prompts)))
        return [indices[begin : begin + batch_size] for begin in range(0, len(indices), batch_size)]


def make_workload(
    rows: Sequence[PromptRow], model: LoadedModel, tokenizer: Any, *, runner: str = "auto", **settings: Any
) -> Workload:
    """Returns the workload of some rows for a model: conversations by its chat template, if it has one.

    A further turn follows the model's own answers to the turns before: by greedy plain decoding, at most `max_tokens`
    tokens each. All setups therefore decode the same prompts. `settings` are fields of `Workload`. Raises
    `RequestError` for a conversation that the template refuses or that exceeds the context.
    """
    empty = Workload(prompts=[], **settings)
    prompts: list[list[Asked]] = [[] for _ in rows]
    llm: LLM | None = None
    now = list(enumerate(rows))
    while now:
        asked = [_asked(row, model, tokenizer) for _, row in now]
        for (index, _), prompt in zip(now, asked, strict=True):
            prompts[index].append(prompt)
        going_on = [at for at, (_, row) in enumerate(now) if row.later_turns]
        if not going_on:
            break
        llm = llm or LLM(model, tokenizer=tokenizer, max_num_seqs=_AT_ONCE, runner=runner)
        greedy = SamplingParams(temperature=0.0, max_tokens=empty.max_tokens)
        outputs = llm.generate([asked[at] for at in going_on], greedy)
        answers = [output.outputs[0].text.strip() for output in outputs]
        further = [(now[at][0], now[at][1].followed(answer)) for at, answer in zip(going_on, answers, strict=True)]
        now = [(index, row) for index, row in further if row is not None]
    questions = [index for index, turns in enumerate(prompts) for _ in turns]
    return replace(
        empty,
        prompts=[prompt for turns in prompts for prompt in turns],
        categories=[rows[index].category for index in questions],
        questions=questions,
    )


def _asked(row: PromptRow, model: LoadedModel, tokenizer: Any) -> Asked:
    ids = row.token_ids(tokenizer, model.vocab_size, model.context_len)
    return row.text if ids is None else ids


def prompt_token_ids(prompt: Asked, tokenizer: Any) -> list[int]:
    """Returns the token ids of a prompt."""
    return list(tokenizer(prompt)["input_ids"]) if isinstance(prompt, str) else list(prompt)


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


def counted(on_progress: Callable[[int, int], None], total: int) -> Callable[[], None]:
    """Returns a function that reports one more of `total` at each call."""
    numbers = count(1)
    return lambda: on_progress(next(numbers), total)
