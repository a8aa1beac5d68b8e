"""Seconds by amount of work, estimated from recent observations."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_FADE = 0.5 ** (1.0 / 40.0)  # an observation counts half after 40 others


class FadingLine:
    """A rising line through observations, the older ones counting less: least squares."""

    def __init__(self) -> None:
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, x: float, y: float) -> None:
        """Adds an observation."""
        self._count = self._count * _FADE + 1
        self._x = self._x * _FADE + x
        self._y = self._y * _FADE + y
        self._xx = self._xx * _FADE + x * x
        self._xy = self._xy * _FADE + x * y

    @property
    def line(self) -> tuple[float, float]:
        """Its height at 0, and its slope; 0 before anything was observed."""
        if not self._count:
            return 0.0, 0.0
        mean_x, mean_y = self._x / self._count, self._y / self._count
        variance = self._xx / self._count - mean_x**2
        slope = (self._xy / self._count - mean_x * mean_y) / variance if variance > 1e-6 else 0.0
        steepest = mean_y / mean_x if mean_x > 0 else 0.0
        slope = min(max(slope, 0.0), steepest)  # neither falls nor starts below 0
        return mean_y - slope * mean_x, slope

    def __call__(self, x: float | np.ndarray) -> float | np.ndarray:
        """The line's height."""
        start, slope = self.line
        return start + slope * x
