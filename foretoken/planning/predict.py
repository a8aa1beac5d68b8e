"""Predicts tokens per second of every drafter, depth and batch, and says what to take, or that nothing pays.

There is one formula, `theory.goodput`: the expected tokens of a batch over the seconds of its pass, its drafts and the
host. Curves give the tokens, `IterationCosts` the seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import hypot
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from foretoken.planning.theory import goodput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.planning.acceptance import Curve

PLAIN = "plain"
# Half-width of an interval, in standard errors; a choice: four of five figures lie within.
INTERVAL_WIDTH = 1.28


class PlannedDraft(NamedTuple):
    """Drafts of one drafter for a batch.

    Attributes:
        name: The drafter, see `Curve.name`.
        depth: Levels; 0 for plain decoding.
        nodes: Mean drafted nodes of a sequence.
        tokens: Expected tokens of a sequence in a pass.
        asks: Share of the passes in which the drafter proposes anything.
    """

    name: str
    depth: int
    nodes: float
    tokens: float
    asks: float

    @property
    def method(self) -> str:
        """The method, without its tree."""
        return self.name.partition(":")[0]


NO_DRAFT = PlannedDraft(PLAIN, 0, 0.0, 1.0, 0.0)


class IterationCosts(Protocol):
    """Seconds of the parts of an iteration on a machine, for a batch of sequences with some committed tokens each."""

    @property
    def error(self) -> float:
        """Relative standard error of an iteration's seconds."""

    def verify(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """Returns the seconds of a pass over the drafts of the whole batch."""

    def draft(self, draft: PlannedDraft, batch: int, context: float) -> float:
        """Returns the seconds of drafting for the whole batch."""

    def host(self, draft: PlannedDraft, batch: int) -> float:
        """Returns the other seconds of an iteration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One drafter at one depth and batch.

    Attributes:
        draft: What is drafted.
        batch: Sequences decoded at once.
        tokens_per_s: Of the whole batch.
        low: Lower end of an 80 % interval of `tokens_per_s`.
        high: Its upper end.
        speed_up: Over plain decoding.
        seconds: Of verification, drafting and host, an iteration each.
        source: Of the acceptance.
    """

    draft: PlannedDraft
    batch: int
    tokens_per_s: float
    low: float
    high: float
    speed_up: float
    seconds: tuple[float, float, float]
    source: str = ""

    @property
    def setup(self) -> str:
        """The drafter with its depth, as `-s` takes it."""
        return f"{self.draft.name}:num_speculative_tokens={self.draft.depth}" if self.draft.depth else PLAIN

    @property
    def ms_per_token(self) -> float:
        """Milliseconds between tokens for one user."""
        return 1e3 * self.batch / self.tokens_per_s

    @property
    def speed_ups(self) -> tuple[float, float]:
        """The lower and the upper end of the interval, over plain decoding."""
        return self.low / self.tokens_per_s * self.speed_up, self.high / self.tokens_per_s * self.speed_up

    @property
    def pays(self) -> bool:
        """Whether drafting is faster than plain decoding in the whole interval."""
        return self.draft.depth > 0 and self.speed_ups[0] > 1

    def as_dict(self) -> dict[str, Any]:
        """Returns the prediction JSON-ready."""
        verify, draft, host = self.seconds
        return {
            "drafter": self.draft.name,
            "setup": self.setup,
            "depth": self.draft.depth,
            "nodes": self.draft.nodes,
            "batch_size": self.batch,
            "mean_acceptance_length": self.draft.tokens,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_low": self.low,
            "tokens_per_s_high": self.high,
            "speed_up": self.speed_up,
            "ms_per_token": self.ms_per_token,
            "verify_ms": verify * 1e3,
            "draft_ms": draft * 1e3,
            "host_ms": host * 1e3,
            "acceptance": self.source,
        }


def drafts_of(curve: Curve) -> list[PlannedDraft]:
    """Returns the drafts of all depths that may be drafted."""
    return [
        PlannedDraft(curve.name, depth, curve.nodes[depth - 1], curve.lengths[depth - 1], curve.asks[depth - 1])
        for depth in curve.depths
    ]


def predict(
    draft: PlannedDraft, costs: IterationCosts, *, batch: int, context: float, error: float = 0.0, source: str = ""
) -> Prediction:
    """Predicts one drafter at one depth and batch.

    Args:
        draft: What is drafted; `NO_DRAFT` for plain decoding.
        costs: Of the machine.
        batch: Sequences decoded at once.
        context: Committed tokens of each sequence.
        error: Relative standard error of `draft.tokens`.
        source: Of the acceptance.
    """
    rate, seconds = _rate(draft, costs, batch, context)
    plain, _ = _rate(NO_DRAFT, costs, batch, context)
    half = INTERVAL_WIDTH * hypot(error, costs.error)
    return Prediction(
        draft=draft,
        batch=batch,
        tokens_per_s=rate,
        low=rate / (1 + half),
        high=rate * (1 + half),
        speed_up=rate / plain,
        seconds=seconds,
        source=source,
    )


def _rate(
    draft: PlannedDraft, costs: IterationCosts, batch: int, context: float
) -> tuple[float, tuple[float, float, float]]:
    verify = costs.verify(draft, batch, context)
    drafting = costs.draft(draft, batch, context) if draft.depth else 0.0
    host = costs.host(draft, batch)
    rate = goodput(draft.tokens, batch=batch, verify=verify, draft=drafting, host=host)
    return rate, (verify, drafting, host)


def predictions(curves: Sequence[Curve], costs: IterationCosts, *, batch: int, context: float) -> list[Prediction]:
    """Returns plain decoding and every drafter at every depth, the fastest first."""
    found = [predict(NO_DRAFT, costs, batch=batch, context=context)]
    for curve in curves:
        found += [
            predict(draft, costs, batch=batch, context=context, error=curve.error, source=curve.source)
            for draft in drafts_of(curve)
        ]
    return sorted(found, key=lambda each: each.tokens_per_s, reverse=True)


def best_depths(found: Sequence[Prediction]) -> list[Prediction]:
    """Returns the fastest prediction of each drafter, of predictions with the fastest first."""
    best: dict[str, Prediction] = {}
    for each in found:
        best.setdefault(each.draft.name, each)
    return list(best.values())


class Advice(NamedTuple):
    """What to take at one batch.

    Attributes:
        batch: Sequences decoded at once.
        verdict: "take", "do not draft", or "not decided" for a gain in whose interval plain decoding lies.
        best: The fastest drafter that pays; None without one.
        second: The next drafter; None without a second that pays.
        reason: A sentence or two.
    """

    batch: int
    verdict: Literal["take", "do not draft", "not decided"]
    best: Prediction | None
    second: Prediction | None
    reason: str


def advise(found: Sequence[Prediction]) -> Advice:
    """Returns the advice for one batch, of its predictions with the fastest first."""
    ranks = best_depths(found)
    plain = next(each for each in ranks if not each.draft.depth)
    paying = [each for each in ranks if each.pays]
    drafting = [each for each in ranks if each.draft.depth]
    if not drafting:
        return Advice(plain.batch, "do not draft", None, None, "no drafter has a known acceptance.")
    shown = (paying or drafting)[0]
    verify, draft, host = (each / sum(plain.seconds) for each in shown.seconds)
    reason = (
        f"{shown.draft.name} gives {shown.draft.tokens:.2f} tokens a pass for {verify + draft + host:.2f} times the "
        f"seconds of a plain iteration (pass {verify:.2f}, drafts {draft:.2f}, host {host:.2f})."
    )
    if paying:
        return Advice(plain.batch, "take", paying[0], paying[1] if len(paying) > 1 else None, reason)
    low, high = shown.speed_ups
    if shown.speed_up <= 1:
        return Advice(plain.batch, "do not draft", None, None, f"The nearest: {reason}")
    interval = f"{shown.setup} may give {low:.2f}x to {high:.2f}x; `foretoken bench` on the machine decides."
    return Advice(plain.batch, "not decided", None, None, f"{interval} {reason}")


class Limits(NamedTuple):
    """Where the search for a break-even ends.

    Attributes:
        batch: Most sequences.
        context: Most committed tokens of a sequence.
    """

    batch: int
    context: int


def breaks_even_at(
    curves: Sequence[Curve], costs: IterationCosts, *, batch: int, context: float, limits: Limits
) -> tuple[int | None, int | None]:
    """Returns the least batch, and the least context, from which on no drafter pays, see `Prediction.pays`.

    Batches are tried at the given context, contexts at the given batch, both by doubling up to the limits. None where
    a drafter pays at all of them, and where none pays at the given batch and context.
    """

    def pays(at_batch: int, at_context: float) -> bool:
        return any(each.pays for each in predictions(curves, costs, batch=at_batch, context=at_context))

    if not pays(batch, context):
        return None, None
    batches, contexts = _doubled(batch, limits.batch), _doubled(max(int(context), 1), limits.context)
    return (
        next((each for each in batches if not pays(each, context)), None),
        next((each for each in contexts if not pays(batch, each)), None),
    )


def _doubled(first: int, last: int) -> list[int]:
    return [first << power for power in range(64) if first << power <= last]
