"""The outcome of one comparison, and the table of all."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = 1e-5  # of the largest number: float32, a handful of layers


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One row."""

    program: str  # whose code ran
    case: str  # the head, and the file that it lies in
    claimed: str | None  # what foretoken says of this reader: "same" or "not read"; None where it refuses to write
    found: str  # "same", "another network", "stops" or "skipped"
    difference: float | None = None  # largest of a number
    largest: float | None = None  # number of ours
    same_argmax: float | None = None  # share of positions whose most probable token agrees
    note: str = ""  # the error, or why it was skipped

    @property
    def is_as_stated(self) -> bool:
        """Whether the claim holds; what has no claim, and what did not run, holds."""
        if self.found == "skipped" or self.claimed is None:
            return True
        return (self.found == "same") == (self.claimed == "same")


def compared(
    program: str,
    case: str,
    *,
    claimed: bool | None,
    ours: Sequence[Tensor],
    theirs: Callable[[], Sequence[Tensor]],
    tolerance: float = TOLERANCE,
) -> Outcome:
    """Runs another project's code, `theirs`, and compares its tensors with ours.

    `claimed`: whether foretoken says that it computes the same; None where it refuses to write the file. `tolerance` is
    of the largest number.
    """
    said = None if claimed is None else "same" if claimed else "not read"
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(io.StringIO()):  # about other versions; progress
            found = list(theirs())
    except Exception as err:  # noqa: BLE001 - the outcome is that it stops
        note = f"{type(err).__name__}: {err}".splitlines()[0]
        return Outcome(program=program, case=case, claimed=said, found="stops", note=note[:160])
    pairs = list(zip(ours, found, strict=True))
    difference = max((a.float() - b.float()).abs().max().item() for a, b in pairs)
    hits = [(a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in pairs]
    largest = max(a.abs().max().item() for a, _ in pairs)
    word = "same" if difference <= tolerance * largest else "another network"
    return Outcome(
        program=program, case=case, claimed=said, found=word, difference=difference, largest=largest,
        same_argmax=sum(hits) / len(hits),
    )  # fmt: skip


def as_table(outcomes: Sequence[Outcome]) -> str:
    """Markdown."""
    lines = ["| program | head and file | foretoken says | found | difference | largest number | same argmax | |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for one in outcomes:
        difference = "" if one.difference is None else f"{one.difference:.1e}"
        largest = "" if one.largest is None else f"{one.largest:.1f}"
        argmax = "" if one.same_argmax is None else f"{one.same_argmax:.0%}"
        said = "refused" if one.claimed is None and one.found != "skipped" else one.claimed or ""
        note = one.note if one.is_as_stated else f"CONTRADICTS what foretoken says. {one.note}"
        cells = (one.program, one.case, said, one.found, difference, largest, argmax, note)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """JSON-ready."""
    return [asdict(one) | {"is_as_stated": one.is_as_stated} for one in outcomes]
