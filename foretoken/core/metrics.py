"""Figures of a running engine by name, in the shape of vLLM's `LLM.get_metrics()`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure.

    Attributes:
        name: vLLM's name where it has one, as "vllm:generation_tokens", else ours, as "foretoken:target_passes".
        labels: What it is of.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A number of things so far."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """A number of things at this moment."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Numbers of things so far, by position from 0."""

    values: list[int]
