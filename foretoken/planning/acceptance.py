"""Acceptance curves: how many tokens of a draft are accepted, by depth; from measurements, our library, or files.

Files are those of other projects. InferenceX keeps golden acceptance lengths in YAML: model, mode of thinking, depth
and mean tokens of a pass. NVIDIA's AIConfigurator takes `nextn` (depth) with `nextn_accepted` (mean accepted tokens of
a pass, without the target's own), formerly `nextn_accept_rates` (one conditional rate for each position).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from itertools import accumulate, pairwise
from math import inf, isfinite
from operator import mul
from pathlib import Path
from typing import Any

import yaml

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.files.bounded_reads import MIB, read_named

_MOST_BYTES = MIB  # largest file of curves; a choice
_DEEPEST = 64  # levels of a draft, as `num_speculative_tokens`
_GOLDEN = (
    "Expected golden acceptance lengths, as {model: {thinking_off: {1: 1.8, 2: 2.4}}}, or AIConfigurator's keys nextn "
    "with nextn_accepted, or nextn_accept_rates."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """How far the drafts of one drafter are accepted, by their depth."""

    name: str  # the drafter as `-s` takes it, without the depth: "hass:chain", "eagle:dynamic"
    temperature: float | None  # of the requests; None if it is not known
    lengths: Sequence[float]  # expected tokens of a pass, the target's own included, for drafts 1, 2, … levels deep
    nodes: Sequence[float]  # mean drafted nodes of a sequence for these drafts, root excluded
    asks: Sequence[float]  # share of the passes in which these drafts have a node
    depths: Sequence[int]  # the depths that may be drafted; a tree has one
    error: float  # relative standard error of the lengths
    source: str  # where the figures come from

    @property
    def method(self) -> str:
        """The method, without its tree."""
        return self.name.partition(":")[0]

    @property
    def is_chain(self) -> bool:
        """Whether the drafts have one node at each depth."""
        return self.name.partition(":")[2] in ("", "chain")

    @classmethod
    def of_lengths(
        cls,
        name: str,
        temperature: float | None,
        lengths: Sequence[float],
        *,
        tree_nodes: float | None = None,
        error: float,
        source: str,
    ) -> Curve:
        """Returns the curve of a drafter that always drafts: a chain, or a tree of `tree_nodes` nodes."""
        deepest = len(lengths)
        return cls(
            name=name,
            temperature=temperature,
            lengths=lengths,
            nodes=[*range(1, deepest + 1)] if tree_nodes is None else [tree_nodes] * deepest,
            asks=[1.0] * deepest,
            depths=range(1, deepest + 1) if tree_nodes is None else [deepest],
            error=error,
            source=source,
        )

    def nextn(self, depth: int) -> dict[str, Any]:
        """Returns the keys of AIConfigurator that describe drafts of a depth."""
        return {"nextn": depth, "nextn_accepted": round(self.lengths[depth - 1] - 1, 4)}


def survivals(rates: Sequence[float]) -> list[float]:
    """Returns P(at least k tokens are accepted), k = 1, 2, …, from P(token k is accepted | those before it are)."""
    return list(accumulate(rates, mul))


def expected_tokens(survived: Sequence[float]) -> float:
    """Returns the expected tokens of a pass from the survivals of a chain's depths, or of all nodes of a tree.

    Any dependence between tokens is allowed: the number of accepted tokens is the number of accepted nodes.

    Source: linearity of expectation; for trees Chen et al. 2024 (Sequoia, arXiv 2402.12374), section 3.1.
    """
    return 1.0 + sum(survived)


def lengths_of_rates(rates: Sequence[float]) -> list[float]:
    """Returns the expected tokens of a pass over chains 1, 2, … deep from conditional rates, see `survivals`."""
    survived = survivals(rates)
    return [expected_tokens(survived[:depth]) for depth in range(1, len(rates) + 1)]


def filled(lengths: Mapping[int, float]) -> list[float]:
    """Returns the acceptance lengths of all depths up to the greatest; between two known depths the rate is constant.

    `lengths` are mean tokens of a pass, the target's own included, by depth; raises `ConfigError` for impossible ones.
    """
    found: list[float] = []
    last = 1.0  # survival of the last known depth
    for (before, least), (depth, length) in pairwise([(0, 1.0), *sorted(lengths.items())]):
        if not 1 <= length <= depth + 1:
            raise ConfigError(f"depth {depth} has {length:g} tokens a pass. Expected 1 to {depth + 1}.")
        gains = _evenly(last, max(length - least, 0.0), depth - before)
        found += [*[*accumulate(gains[:-1], initial=least)][1:], length]
        last = gains[-1]
    return found


def _evenly(last: float, gain: float, levels: int) -> list[float]:
    """Returns falling survivals of some levels with a constant rate, at most 1, whose sum is nearest to `gain`."""
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        if last * sum(survivals([rate] * levels)) < gain:
            low = rate
        else:
            high = rate
    return [last * each for each in survivals([high] * levels)]


@cache
def library(num_weights: float = inf) -> Sequence[Curve]:
    """Returns the curves of `curves.yaml`, one for each drafter and temperature: the mean of its entries.

    Entries for small targets alone replace the others where a target has so few weights.
    """
    text = (resources.files("foretoken.planning") / "curves.yaml").read_text(encoding="utf-8")
    groups: dict[tuple[str, float], dict[bool, list[dict[str, Any]]]] = {}
    for entry in yaml.safe_load(text):
        if num_weights < entry.get("below", inf) or "below" not in entry:
            group = groups.setdefault((entry["drafter"], entry["temperature"]), {})
            group.setdefault("below" in entry, []).append(entry)
    return [_mean_curve(*key, group.get(True) or group[False]) for key, group in groups.items()]


def _mean_curve(name: str, temperature: float, entries: Sequence[Mapping[str, Any]]) -> Curve:
    rows = [lengths_of_rates(each["rates"]) if "rates" in each else filled(each["lengths"]) for each in entries]
    depth = min(map(len, rows))
    last = [row[depth - 1] for row in rows]
    source = "; ".join(f"{each['target']}, {each['text']}: {each['source']}" for each in entries)
    mean = Curve.of_lengths(
        name,
        temperature,
        _means([row[:depth] for row in rows]),
        tree_nodes=entries[0].get("tree_nodes"),
        error=max((max(last) - min(last)) / (max(last) + min(last)), _OF_ANOTHER_MODEL),
        source=source,
    )
    if "nodes" not in entries[0]:
        return mean
    nodes, asks = (_means([each[key][:depth] for each in entries]) for key in ("nodes", "asks"))
    return replace(mean, nodes=nodes, asks=asks)


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]


# Relative error of a figure that was measured with another target and text. A choice: the figures of one method differ
# by as much between the tasks and targets of one paper (EAGLE-2, table 1: 4.0 to 5.5 tokens).
_OF_ANOTHER_MODEL = 0.15


def nearest(curves: Sequence[Curve], temperature: float) -> list[Curve]:
    """Returns for each drafter the curve with the nearest temperature.

    Curves of greedy text are not used for sampled text, or the other way round: drafters are right less often there.
    Curves without a temperature fit all.
    """

    def distance(curve: Curve) -> float:
        return 0.0 if curve.temperature is None else abs(curve.temperature - temperature)

    best: dict[str, Curve] = {}
    for curve in sorted(curves, key=distance):
        if curve.temperature is None or (curve.temperature > 0) == (temperature > 0):
            best.setdefault(curve.name, curve)
    return list(best.values())


def read_curves(path: Path, name: str) -> list[Curve]:
    """Reads curves of one drafter from a file of golden acceptance lengths, or of AIConfigurator's keys.

    Args:
        path: YAML, or JSON, which is YAML too.
        name: The drafter, which such files do not name.

    Raises:
        ConfigError: If the file is missing, too large or of another form, or its figures are impossible.
    """
    try:
        given = yaml.safe_load(read_named(path, limit=_MOST_BYTES, error=ConfigError).decode("utf-8"))
    except OSError as err:
        raise ConfigError(f"'{path}' cannot be read: {err.strerror}. {_GOLDEN}") from err
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as err:
        raise ConfigError(f"'{path}' is not valid YAML. {_GOLDEN}") from err
    found = {str(path): given} if _is_nextn(given) else _cells(given)
    if not found:
        raise ConfigError(f"'{path}' holds {shown(given)}. {_GOLDEN}")
    return [
        Curve.of_lengths(name, None, _lengths(cell, path), error=_OF_ANOTHER_MODEL, source=f"{path}, {where}")
        for where, cell in found.items()
    ]


def _is_nextn(given: Any) -> bool:
    return isinstance(given, dict) and "nextn" in given


def _cells(given: Any) -> dict[str, dict[Any, Any]]:
    """Returns the tables of lengths in a golden file, by model and mode of thinking."""
    cells: dict[str, dict[Any, Any]] = {}
    for model, modes in given.items() if isinstance(given, dict) else ():
        if str(model).startswith("_") or not isinstance(modes, dict):
            continue
        for mode, lengths in modes.items():
            if isinstance(lengths, dict) and lengths:
                cells[f"{model} {mode}"] = lengths
    return cells


def _lengths(cell: Mapping[Any, Any], path: Path) -> list[float]:
    if not _is_nextn(cell):
        lengths = {depth: length for depth, length in cell.items() if _is_depth(depth) and _is_number(length)}
        if len(lengths) == len(cell):
            return filled(lengths)
    elif _is_depth(depth := cell["nextn"]):
        rates, accepted = cell.get("nextn_accept_rates"), cell.get("nextn_accepted")
        if isinstance(rates, list) and len(rates) >= depth and all(_is_number(r) and 0 <= r <= 1 for r in rates):
            return lengths_of_rates(rates[:depth])
        if accepted is not None and _is_number(accepted):
            return filled({depth: accepted + 1})
    raise ConfigError(f"'{path}' holds {shown(cell)}. {_GOLDEN}")


def _is_depth(value: Any) -> bool:
    return type(value) is int and 1 <= value <= _DEEPEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and isfinite(value)


def golden_yaml(curves: Sequence[Curve], model: str, conditions: str) -> str:
    """Returns chains as a file of golden acceptance lengths, with one model entry a drafter and temperature.

    Trees are left out: the form has none. `conditions`, how the lengths were measured, becomes a comment.
    """
    cells: dict[str, Any] = {}
    for curve in curves:
        if curve.is_chain:
            name = f"{model}-{curve.method}" + (f"-t{curve.temperature:g}" if curve.temperature else "")
            cells[name] = {"thinking_off": {depth: round(curve.lengths[depth - 1], 4) for depth in curve.depths}}
    head = "# Acceptance lengths: mean tokens of a target pass, the target's own included, by num_speculative_tokens.\n"
    comment = "".join(f"# {line}\n" for line in conditions.splitlines())
    return head + comment + str(yaml.safe_dump(cells, sort_keys=False, width=120))
