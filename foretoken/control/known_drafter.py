"""What a controller knows of one drafter: its nodes and levels, how often it is right, and what it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from foretoken.control.calibration import Calibration
from foretoken.control.draft_seconds import DraftSeconds
from foretoken.control.probing import WEIGHT_AT_PROBE, ProbeSchedule
from foretoken.control.reach import Reach

if TYPE_CHECKING:
    from collections.abc import Sequence

_DEEPEST = 64  # levels that are told apart


class KnownDrafter:
    """What is known of one drafter.

    Attributes:
        deepest: Levels of its deepest drafts, as far as they are told apart.
        nodes_by_depth: See `foretoken.drafters.base.Drafter`.
        calibration: Of the nodes that it proposes.
        grafts: Of the chains that it proposes below drafts of others.
        seconds: Of its proposals.
        probes: When it is tried, while it is not asked.
        widths: (D,) nodes bought a level, at first a chain.
    """

    def __init__(self, nodes_by_depth: Sequence[int], timed: Sequence[tuple[int, float]]) -> None:
        """Nothing is known of its acceptance yet; timed: see `DraftSeconds`."""
        self.deepest, self.nodes_by_depth = min(len(nodes_by_depth) - 1, _DEEPEST), nodes_by_depth
        self.calibration, self.grafts = Calibration(), Calibration()
        self.seconds = DraftSeconds(self.deepest, timed)
        self.probes = ProbeSchedule()
        self.widths = np.minimum(np.diff(nodes_by_depth)[: self.deepest], 1.0)
        self._reach = {frozenset[int](): Reach(self.deepest)}

    @property
    def first_reach(self) -> Reach:
        """Its reach where only drafters that cost nothing were asked before."""
        return self._reach[frozenset()]

    def reach(self, before: frozenset[int]) -> Reach:
        """Its reach after some others that cost something; to begin with, half of what it is without them."""
        known = self._reach.get(before)
        if known is None:
            known = self._reach[before] = Reach(self.deepest)
            guess = self.first_reach.rates()
            guess[0] *= 0.5
            known.restore(WEIGHT_AT_PROBE * np.stack([np.ones(self.deepest), guess]))
        return known
