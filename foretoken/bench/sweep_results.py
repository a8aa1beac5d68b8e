"""Results of a sweep: kept as lines of a journal, one a point, and compared among the points of one serving."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from foretoken.bench.grid import Serving
from foretoken.core.errors import ConfigError
from foretoken.files.journal import JournalFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from foretoken.bench.grid import Point, Refused
    from foretoken.bench.measurement import Measurement


@dataclass(frozen=True, slots=True)
class Quartiles:
    """A median between the first and the third quartile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Quartiles:
        """Returns the quartiles of at least one value, with linear interpolation between values."""
        known = list(values)
        if len(known) == 1:
            return cls(known[0], known[0], known[0])
        low, middle, high = quantiles(known, n=4, method="inclusive")
        return cls(middle, low, high)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the points that no other point beats.

    A point beats another when it costs no more and brings no less, and is better in one of the two. Points that are
    equal in both do not beat each other.

    Args:
        points: (cost, value) pairs, all finite; lower costs and higher values are better.

    Returns:
        Indices into `points`, by ascending cost; equal points in their order.

    Raises:
        ValueError: For a number that is not finite.
    """
    if not all(math.isfinite(number) for point in points for number in point):
        raise ValueError("points of a Pareto front must be finite")
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1])):
        if not front or points[index][1] > points[front[-1]][1] or points[index] == points[front[-1]]:
            front.append(index)
    return front


RESULTS = "results.jsonl"
TAU_FRONT, SPEED_FRONT = "tau", "tokens/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """The measurement of one point. A round is a batch of prompts; figures with quartiles are medians over rounds.

    Attributes:
        name: The unique name of the point.
        method: The drafter before the axes changed it.
        changes: The values that the axes set in it, by dotted key.
        serving: The requested settings of decoding.
        speculative_config: The drafter.
        runner: The target's runner.
        runner_choice: Why that runner, in a sentence.
        num_rounds: Batches of prompts, over all repeats.
        tokens_per_s: Output tokens per second of decoding, without prefill.
        plain_tokens_per_s: The same for plain decoding in the same rounds.
        speed_up: Ratio of the two, round by round.
        tau: Tokens per target pass over all passes, the target's own included.
        tau_by_round: The same round by round.
        nodes: Drafted nodes per target pass, mean.
        tree_utilisation: Accepted share of the drafted nodes.
        acceptance_by_depth: P(accepted at depth d | the tree reached depth d), from depth 1.
        declined: Share of the passes in which the controller chose not to draft.
        efficiency: Speed-up over tau.
        shares: Shares of the time of decoding in "draft", "verify" and "host".
        num_identical: Texts equal to plain decoding's.
        num_texts: Texts in all.
        nats_per_token: See `Measurement`.
        draft_errors: Passes whose draft was dropped because the drafter failed.
    """

    name: str
    method: str
    changes: dict[str, Any]
    serving: Serving
    speculative_config: dict[str, Any]
    runner: str
    runner_choice: str
    num_rounds: int
    tokens_per_s: Quartiles
    plain_tokens_per_s: Quartiles
    speed_up: Quartiles
    tau: float
    tau_by_round: Quartiles
    nodes: float
    tree_utilisation: float
    acceptance_by_depth: list[float] = field(default_factory=list)
    declined: float
    efficiency: float
    shares: dict[str, float]
    num_identical: int
    num_texts: int
    nats_per_token: float | None
    draft_errors: int

    @classmethod
    def of(cls, point: Point, measured: Measurement, plain: Measurement) -> PointResult:
        """Makes the result from the rounds of a point and of plain decoding."""
        metrics = measured.metrics
        return cls(
            name=point.setup.name,
            method=point.method,
            changes=dict(point.changes),
            serving=point.serving,
            speculative_config=dict(point.setup.config or {}),
            runner=measured.runner,
            runner_choice=measured.runner_choice,
            num_rounds=len(measured.seconds),
            tokens_per_s=Quartiles.of(measured.rates),
            plain_tokens_per_s=Quartiles.of(plain.rates),
            speed_up=Quartiles.of(measured.speed_ups),
            tau=measured.tau,
            tau_by_round=Quartiles.of(measured.taus),
            nodes=metrics.tree_nodes,
            tree_utilisation=metrics.tree_utilisation,
            acceptance_by_depth=metrics.acceptance_by_depth,
            declined=metrics.num_declined / max(metrics.steps, 1),
            efficiency=measured.efficiency,
            shares=measured.wall_shares,
            num_identical=measured.num_identical or 0,
            num_texts=len(measured.texts),
            nats_per_token=measured.nats_per_token,
            draft_errors=metrics.draft_errors,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PointResult:
        """Reads a line of the journal; raises `TypeError` for any other mapping."""
        quartiles = ("tokens_per_s", "plain_tokens_per_s", "speed_up", "tau_by_round")
        read: dict[str, Any] = {key: Quartiles(**values[key]) for key in quartiles if key in values}
        if "serving" in values:
            read["serving"] = Serving(**values["serving"])
        return cls(**{**values, **read})

    def as_columns(self) -> dict[str, Any]:
        """Returns all values under dotted names, for tables: numbers, text, and one list of numbers."""
        return _flat(asdict(self))


class SweepResults:
    """The results of a sweep in its directory.

    Attributes:
        conditions: The conditions that all points share.
        date: The day on which the sweep began.
        points: Measured points, in the order of measuring.
        refused: Name and reason of points that cannot be measured, each once.
    """

    def __init__(self, directory: Path, conditions: Mapping[str, Any] | None = None) -> None:
        """Opens or creates the results; removes a line that an interruption cut off.

        Args:
            directory: The directory of the sweep.
            conditions: JSON-ready; None for existing results with any conditions.

        Raises:
            ConfigError: When there are results of other conditions, none although conditions are None, or damaged ones.
        """
        path = directory / RESULTS
        self._file = JournalFile(path, conditions, advice="Choose another directory, or remove this one.")
        self.conditions, self.date = self._file.conditions, self._file.date
        self.points: list[PointResult] = []
        self.refused: dict[str, str] = {}
        self._done: set[str] = set()
        try:
            for line in self._file.lines:
                self._keep(line)
        except (TypeError, KeyError) as err:
            raise ConfigError(
                f"'{path}' has a line that is not a point of a sweep. Expected results that this version wrote. Choose "
                "another directory, or remove this one."
            ) from err

    def holds(self, point: Point) -> bool:
        """Returns whether a point is measured."""
        return point.key in self._done

    def add(self, point: Point, result: PointResult) -> None:
        """Writes a point's result to disk."""
        self._add({"key": point.key, "result": asdict(result)})

    def refuse(self, refused: Refused) -> None:
        """Writes why a point cannot be measured, unless that is known; a later run may measure the point."""
        name = refused.point.setup.name
        if self.refused.get(name) != refused.reason:
            self._add({"refused": name, "reason": refused.reason})

    def by_serving(self) -> dict[Serving, list[PointResult]]:
        """Returns comparable points, the fastest first; servings in the order of measuring."""
        found: dict[Serving, list[PointResult]] = {}
        for result in self.points:
            found.setdefault(result.serving, []).append(result)
        return {key: sorted(each, key=lambda r: -r.tokens_per_s.median) for key, each in found.items()}

    def _add(self, line: dict[str, Any]) -> None:
        self._file.add(line)
        self._keep(self._file.lines[-1])

    def _keep(self, line: Mapping[str, Any]) -> None:
        if "refused" in line:
            self.refused[str(line["refused"])] = str(line["reason"])
            return
        result = PointResult.from_dict(line["result"])
        self._done.add(str(line["key"]))
        self.refused.pop(result.name, None)
        self.points.append(result)


def fronts(results: Sequence[PointResult]) -> dict[str, list[int]]:
    """Returns the Pareto fronts over drafted nodes per pass, for points of one serving.

    Returns:
        Indices into `results` by ascending nodes: "tau" for the points that reach their tau with the fewest nodes,
        "tokens/s" for those that reach their speed with the fewest.
    """
    return {
        TAU_FRONT: pareto_front([(result.nodes, result.tau) for result in results]),
        SPEED_FRONT: pareto_front([(result.nodes, result.tokens_per_s.median) for result in results]),
    }


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings under dotted names."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
