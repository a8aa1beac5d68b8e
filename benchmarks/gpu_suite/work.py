"""The sections of the suite, and what each is given."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import torch


_HERE = "benchmarks.gpu_suite."


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the suite.

    Attributes:
        name: In results.
        module: Name of its module.
        seconds: Its share of the time.
        shards: Processes that divide its work among them; 1 where it times anything, so that nothing disturbs it.
        rehearsal_seconds: Its share in a rehearsal.
    """

    name: str
    module: str
    seconds: float
    shards: int = 1
    rehearsal_seconds: float = 6.0


# In order of importance. Shares add up to less than the whole, and what one leaves the next ones get.
SECTIONS: tuple[Section, ...] = (
    Section("parity", _HERE + "parity", 85.0, shards=6),
    Section("ceilings", _HERE + "ceilings", 30.0, rehearsal_seconds=2.0),
    Section("attention", _HERE + "attention", 110.0),
    Section("step", _HERE + "step", 110.0),
    Section("lossless", _HERE + "lossless", 85.0, shards=4, rehearsal_seconds=8.0),
    Section("twin", _HERE + "twin", 80.0, rehearsal_seconds=10.0),
)
# Sections whose figures are fractions of what another one measures.
NEEDS: Mapping[str, tuple[str, ...]] = {"attention": ("ceilings",), "step": ("ceilings",)}


class Deadline:
    """When a section should have ended."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds left, below 0 when it has passed."""
        return self._end - time.monotonic()

    def allows(self, seconds: float) -> bool:
        """Whether that much is left."""
        return self.left > seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a section does its work with.

    Attributes:
        device: A GPU, or the CPU in a rehearsal.
        is_rehearsal: Toy sizes and wall-clock times, on the CPU: everything runs and nothing counts.
        seed: Of all random inputs.
        shard: Which share of the section is this process's.
        num_shards: How many there are.
        deadline: When to end; what is not done by then is left out and said so.
        emit: Takes a table's name and a row, which is kept whatever happens afterwards.
    """

    device: torch.device
    is_rehearsal: bool
    seed: int
    shard: int = 0
    num_shards: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(60.0))
    emit: Callable[[str, Mapping[str, Any]], None]

    def left_out(self, what: str, why: str) -> None:
        """Says that something was not done."""
        self.emit("left_out", {"what": what, "why": why})


class SectionModule(Protocol):
    """What a section's module holds."""

    def run(self, work: Work) -> None:
        """Does the work and emits rows; raises whatever stops it."""


def section_module(name: str) -> SectionModule:
    """A section's module, by its full name; importing it touches no GPU."""
    module: Any = import_module(name)
    return module  # type: ignore[no-any-return]
