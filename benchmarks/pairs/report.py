"""Tables of requests: a row for each contestant, medians over prompts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Runs = Mapping[str, Sequence[Mapping[str, Any]]]  # the requests of each contestant, in the same order


def tau(runs: Sequence[Mapping[str, Any]]) -> float:
    """Tokens of a verification."""
    return float(sum(len(run["ids"]) - 1 for run in runs) / max(sum(run["steps"] for run in runs), 1))


def over(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> float:
    """Median over prompts of the speed over another contestant's on the same prompt, in tokens/s."""
    pairs = zip(runs, base, strict=True)
    return statistics.median(speed(run) / speed(other) for run, other in pairs)


def speed(run: Mapping[str, Any]) -> float:
    """Tokens a second of a request."""
    return float(len(run["ids"]) / run["seconds"])


def same_texts(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> int:
    """How many texts are those of another contestant."""
    return sum(run["ids"] == other["ids"] for run, other in zip(runs, base, strict=True))


def table(found: Runs, bases: Mapping[str, str], groups: Sequence[str] = ()) -> str:
    """A row for each contestant; bases: the one that it is compared with; groups: categories, for `over` in each."""
    heads = ("tokens/s", "least to most", "over plain", "tau", "drafting, share", "declined", "same text", *groups)
    lines = [f"| | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, runs in found.items():
        base, rates = found[bases[name]], [speed(run) for run in runs]
        share = sum(run.get("draft_s", 0.0) for run in runs) / sum(run["seconds"] for run in runs)
        declined = sum(run.get("declined", 0) for run in runs) / max(sum(run["steps"] for run in runs), 1)
        lines.append(
            f"| {name} | {statistics.median(rates):.1f} | {min(rates):.1f} to {max(rates):.1f} | "
            f"{over(runs, base):.2f} | {tau(runs):.2f} | {share:.0%} | {declined:.0%} | "
            f"{same_texts(runs, base)}/{len(runs)} |" + "".join(f" {_over_in(group, runs, base)} |" for group in groups)
        )
    return "\n".join(lines)


def _over_in(category: str, *both: Sequence[Mapping[str, Any]]) -> str:
    runs, base = ([run for run in each if run["category"] == category] for each in both)
    return f"{over(runs, base):.2f}"
