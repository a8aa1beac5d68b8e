"""Turns lines of the journal into rows: medians and quartiles over prompts, one row a size, temperature and method."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from statistics import median
from typing import TYPE_CHECKING

from foretoken.bench.sweep import Quartiles
from foretoken.entrypoints.config import PLAIN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks.speedup.journal import Journal, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One method on one target at one temperature, over its prompts.

    Attributes:
        size: Of the target.
        temperature: Of the requests.
        method: Of drafting, or "plain".
        runner: Of the target.
        num_prompts: Prompts that all methods have decoded.
        tokens_per_s: Output tokens per second of decoding.
        speed_up: That rate over plain decoding's, prompt by prompt.
        tau: Tokens per target pass, the target's own included.
        efficiency: Speed-up over tau of the same prompt.
        plain_pass_ms: Milliseconds of a target pass in plain decoding, median; the same for all methods.
        pass_ms: Of a target pass, median.
        draft_ms: Of drafting per pass, median.
        host_ms: Of everything else per pass, median.
        declined: Share of the passes in which the controller chose not to draft, mean.
        num_same_text: Prompts whose text equals plain decoding's, token for token.
        num_as_smallest: Of the prompts that the smallest target has decoded too: those with the same text by plain
            decoding. A cost twin writes what its original writes.
        num_shared: How many those are.
        foreign_cores: Cores that others kept busy meanwhile, mean; None where the system does not tell.
    """

    size: str
    temperature: float
    method: str
    runner: str
    num_prompts: int
    tokens_per_s: Quartiles
    speed_up: Quartiles
    tau: Quartiles
    efficiency: Quartiles
    plain_pass_ms: float
    pass_ms: float
    draft_ms: float
    host_ms: float
    declined: float
    num_same_text: int
    num_as_smallest: int
    num_shared: int
    foreign_cores: float | None


def rows_of(journal: Journal, sizes: Sequence[str], temperatures: Sequence[float], methods: Sequence[str]) -> list[Row]:
    """Rows of everything that is measured whole.

    Args:
        journal: Read.
        sizes: Names of the targets' sizes, the smallest first.
        temperatures: In the order of the tables.
        methods: Plain decoding among them.
    """
    rows = []
    for temperature in temperatures:
        rounds = {size: journal.rounds(size, temperature, methods) for size in sizes}
        originals = {own[PLAIN].prompt: own[PLAIN].text for own in rounds[sizes[0]]}
        rows += [_row(rounds[size], method, originals) for size in sizes if rounds[size] for method in methods]
    return rows


def _row(rounds: Sequence[Mapping[str, Line]], method: str, originals: Mapping[int, Sequence[int]]) -> Row:
    """One row; originals: plain decoding's text on the smallest target, by prompt."""
    own, plain = [found[method] for found in rounds], [found[PLAIN] for found in rounds]
    ratios = [_rate(mine) / _rate(theirs) for mine, theirs in zip(own, plain, strict=True)]
    return Row(
        size=own[0].size,
        temperature=own[0].temperature,
        method=method,
        runner=own[0].runner,
        num_prompts=len(own),
        tokens_per_s=Quartiles.of_values(map(_rate, own)),
        speed_up=Quartiles.of_values(ratios),
        tau=Quartiles.of_values(line.tau for line in own),
        efficiency=Quartiles.of_values(ratio / line.tau for ratio, line in zip(ratios, own, strict=True)),
        plain_pass_ms=median(line.pass_ms for line in plain),
        pass_ms=median(line.pass_ms for line in own),
        draft_ms=median(line.draft_ms for line in own),
        host_ms=median(line.host_ms for line in own),
        declined=sum(line.declined for line in own) / len(own),
        num_same_text=sum(mine.text == theirs.text for mine, theirs in zip(own, plain, strict=True)),
        num_as_smallest=sum(line.text == originals.get(line.prompt) for line in plain),
        num_shared=sum(line.prompt in originals for line in plain),
        foreign_cores=_foreign_cores(own),
    )


def _foreign_cores(lines: Sequence[Line]) -> float | None:
    """Over all lines; single ones are shorter than the ticks in which systems count."""
    known = [(line.foreign_s, line.wall_s) for line in lines if line.foreign_s is not None]
    return max(0.0, sum(s for s, _ in known) / sum(wall for _, wall in known)) if known else None


def _rate(line: Line) -> float:
    """Tokens per second of decoding."""
    return line.tokens / line.seconds


def pays_from(rows: Sequence[Row], method: str, temperature: float) -> float | None:
    """The plain pass, in milliseconds, from which on a method is faster than plain decoding.

    Between two sizes the speed-up is taken to go along a line over the logarithm of the pass.

    Returns:
        0 where it is faster at every size that was measured, None where it is not faster at the largest.
    """
    points = sorted(
        (row.plain_pass_ms, row.speed_up.median)
        for row in rows
        if row.method == method and row.temperature == temperature
    )
    if not points or points[-1][1] <= 1.0:
        return None
    below = [number for number, (_, speed_up) in enumerate(points) if speed_up <= 1.0]
    if not below:
        return 0.0
    (left, under), (right, over) = points[below[-1]], points[below[-1] + 1]
    return exp(log(left) + (log(right) - log(left)) * (1.0 - under) / (over - under))
