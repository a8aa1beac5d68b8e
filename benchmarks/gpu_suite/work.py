"""The sections of the suite, and what each is given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


_HERE = "benchmarks.gpu_suite."


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the suite."""

    name: str  # in results
    module: str
    seconds: float  # its share of the time
    shards: int = 1  # processes that divide its work; 1 where it times anything, so that nothing disturbs it
    rehearsal_seconds: float = 6.0


# In order of importance. Shares add up to less than the whole, and what one leaves the next ones get.
SECTIONS: tuple[Section, ...] = (
    Section("ceilings", _HERE + "ceilings", 30.0, rehearsal_seconds=2.0),
    Section("attention", _HERE + "attention", 110.0),
    Section("states", _HERE + "states", 20.0),
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
    """What a section does its work with; what is not done by the deadline is left out and said so."""

    device: torch.device  # a GPU, or the CPU in a rehearsal
    is_rehearsal: bool  # toy sizes and wall-clock times: everything runs and nothing counts
    seed: int  # of all random inputs
    shard: int = 0  # which share of the section is this process's
    num_shards: int = 1
    deadline: Deadline = field(default_factory=lambda: Deadline(60.0))
    emit: Callable[[str, Mapping[str, Any]], None]  # takes a table's name and a row, which is kept whatever happens

    def left_out(self, what: str, why: str) -> None:
        """Says that something was not done."""
        self.emit("left_out", {"what": what, "why": why})


def section_module(name: str) -> Any:
    """The module of a section, by its full name: its `run` takes `Work`. Importing it touches no GPU."""
    return import_module(name)
