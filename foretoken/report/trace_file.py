"""Writes and reads the trace of a generation: JSON lines with conditions, one line an iteration, and the end.

A trace may come from anywhere: the models below check it, and errors name the damaged line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from foretoken.core.errors import ConfigError
from foretoken.core.records import GenerationMetrics, SequenceStep, StepRecord, TreeTrace
from foretoken.files.atomic_files import told_as, write_file
from foretoken.files.bounded_reads import MIB, read_named
from foretoken.text.codec import Codec, Detokenizer

FORMAT, VERSION = "foretoken trace", 1
MOST_TRACE_BYTES = 512 * MIB  # a choice: some hundred thousand iterations; the page holds all of them
_ADVICE = "Expected a place for a file that may be written to. Name another, or make room."


class _Line(BaseModel):
    """A line of the file; ignores keys that a later version may add."""

    model_config = ConfigDict(extra="ignore", frozen=True)


_LineT = TypeVar("_LineT", bound=_Line)


class Header(_Line):
    """The first line: format "foretoken trace", its version, the prompt, and conditions (model, machine, …)."""

    format: str
    version: int
    conditions: dict[str, Any]
    prompt: str
    prompt_token_ids: list[int]


class TreeLine(_Line):
    """The fields of `TreeTrace`."""

    rule: str
    position: int
    tokens: list[int] = Field(min_length=1)
    parents: list[int]
    depths: list[int]
    drafters: list[tuple[str, ...]]
    probes: frozenset[int]
    scores: list[float | None] | None
    draft_probs: list[float | None] | None
    token_probs: list[float | None]
    target_tokens: list[int]
    target_probs: list[float | None]
    path: list[int]
    next_token: int | None

    @model_validator(mode="after")
    def _is_a_tree(self) -> TreeLine:
        count = len(self.tokens)
        of_nodes = ("parents", "depths", "drafters", "scores", "draft_probs", "token_probs", "target_tokens")
        for name in (*of_nodes, "target_probs"):
            values = getattr(self, name)
            if values is not None and len(values) != count:
                raise ValueError(f"{name} has {len(values)} entries for {count} nodes")
        if self.parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise ValueError("parents are not those of a tree")
        if any(not 0 < node < count for node in self.path):
            raise ValueError("the path has nodes that are not there")
        return self


class Iteration(_Line):
    """One iteration of the generation.

    Attributes:
        tokens: Tokens added to the text: accepted ones, then the target's own if there was room.
        accepted_from: The drafters that proposed each accepted token.
        tree: The outcome of every node; None if the tree was not traced.
        texts: Text of each token of this line, by id, decoded alone.
    """

    tokens: list[int]
    accepted_from: list[tuple[str, ...]]
    num_drafted: int
    num_proposed: int | None
    seconds: dict[str, float]
    declined: str | None
    draft_error: str | None
    tree: TreeLine | None
    texts: dict[int, str]

    @model_validator(mode="after")
    def _accepts_what_it_has(self) -> Iteration:
        if len(self.accepted_from) > len(self.tokens):
            raise ValueError("more tokens are accepted than there are")
        return self


class End(_Line):
    """The last line; an interrupted generation has no `finish_reason`.

    `parts` are the texts that each output token added. `metrics` is `GenerationMetrics.as_dict`.
    """

    text: str
    parts: list[str]
    finish_reason: str | None
    metrics: dict[str, Any]


class Trace(_Line):
    """A whole file."""

    header: Header
    iterations: list[Iteration]
    end: End


class TraceRecorder:
    """Collects the iterations of one sequence as lines, and their metrics."""

    def __init__(self, codec: Codec, prompt: Sequence[int]) -> None:
        self._codec, self._prompt, self._lines = codec, list(prompt), list[str]()
        self._spans = Detokenizer(codec, prompt)
        self.metrics = GenerationMetrics()

    def add_step(self, record: StepRecord) -> None:
        """Adds an iteration of one sequence."""
        step, seconds = record.sequences[0], record.decode_seconds
        self.metrics.add_step(step, record)
        self._spans.push_all(step.tokens)
        named = set(step.tokens)
        if step.trace is not None:
            named |= {*step.trace.tokens, *step.trace.target_tokens}
        self._lines.append(
            _json({
                "tokens": list(step.tokens),
                "accepted_from": list(step.accepted_from),
                "num_drafted": step.num_drafted,
                "num_proposed": step.num_proposed,
                "seconds": {each.name: getattr(seconds, each.name) for each in fields(seconds)},
                "declined": None if record.declined is None else str(record.declined),
                "draft_error": record.draft_error,
                "tree": _tree(step),
                "texts": {
                    token: self._codec.alone(token, skip_special_tokens=False) for token in sorted(named) if token >= 0
                },
            })
        )  # fmt: skip

    def write_file(
        self, path: Path, *, conditions: dict[str, Any], prompt: str, text: str | None, finish_reason: str | None
    ) -> None:
        """Writes the file, whole or not at all; replaces an existing file. Arguments as in `Header` and `End`.

        `text` is None for the text so far. Raises `ConfigError` when the file cannot be written.
        """
        header = {
            "format": FORMAT, "version": VERSION, "conditions": conditions, "prompt": prompt,
            "prompt_token_ids": self._prompt,
        }  # fmt: skip
        text = self._spans.text if text is None else text
        end = {
            "text": text, "parts": self._spans.parts(text), "finish_reason": finish_reason,
            "metrics": self.metrics.as_dict(),
        }  # fmt: skip
        with told_as(ConfigError, f"'{path}'", _ADVICE):
            write_file(path, "".join(f"{line}\n" for line in [_json(header), *self._lines, _json(end)]))


def is_trace(path: Path) -> bool:
    """Returns whether a file begins like a trace."""
    with path.open("rb") as file:
        return f'"format": "{FORMAT}"'.encode() in file.read(200)


def read_trace(path: Path) -> Trace:
    """Reads and checks a trace.

    Raises `ConfigError` for a file that is no trace, of another version, or damaged; names the line. Raises `OSError`
    when the file cannot be read.
    """
    lines = read_named(path, limit=MOST_TRACE_BYTES, error=ConfigError).split(b"\n")
    lines = [line for line in lines if line.strip()]
    if len(lines) < 2:
        raise ConfigError(f"'{path}' has {len(lines)} lines. Expected a trace of `foretoken generate --trace`.")
    header = _parse_line(Header, lines[0], path, 1)
    if (header.format, header.version) != (FORMAT, VERSION):
        raise ConfigError(
            f"'{path}' is a '{header.format}' of version {header.version}. Expected a '{FORMAT}' of version {VERSION}. "
            "Write it again with this version of foretoken."
        )
    iterations = [_parse_line(Iteration, line, path, number) for number, line in enumerate(lines[1:-1], start=2)]
    end = _parse_line(End, lines[-1], path, len(lines))
    if len(end.parts) != sum(len(iteration.tokens) for iteration in iterations):
        raise ConfigError(f"'{path}' has {len(end.parts)} parts of text, not one a token. Write the trace again.")
    return Trace(header=header, iterations=iterations, end=end)


def tree_of(line: TreeLine) -> TreeTrace:
    """Returns the tree's trace in a line; scores that were not finite are minus infinity."""
    values = {each.name: getattr(line, each.name) for each in fields(TreeTrace)}
    if line.scores is not None:
        values["scores"] = [-math.inf if score is None else score for score in line.scores]
    return TreeTrace(**values)


def _parse_line(model: type[_LineT], line: bytes, path: Path, number: int) -> _LineT:
    try:
        return model.model_validate_json(line)
    except ValidationError as err:
        first = err.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"line {number} of '{path}' is no {model.__name__.lower()} of a trace: {first['msg']}"
            f"{where and f' ({where})'}. Expected a file that `foretoken generate --trace` wrote, whole."
        ) from err


def _tree(step: SequenceStep) -> dict[str, Any] | None:
    if step.trace is None:
        return None
    values = {each.name: getattr(step.trace, each.name) for each in fields(step.trace)}
    for name in ("scores", "draft_probs", "token_probs", "target_probs"):
        if values[name] is not None:
            values[name] = [_rounded(value) for value in values[name]]
    return {**values, "probes": sorted(step.trace.probes)}


def _rounded(value: float | None) -> float | None:
    """Rounds to six digits; None for values that are not finite, which JSON cannot express."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _json(value: Any) -> str:
    return json.dumps(value, allow_nan=False)
