"""Predicts tokens per second of every drafter, depth and batch, and puts a plan together.

There is one formula, `goodput`: the expected tokens of a batch over the seconds of its pass, its drafts and the host.
Curves give the tokens, `IterationCosts` the seconds. A plan has predictions by temperature and batch, advice,
break-even points, memory and training.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import hypot
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from foretoken.entrypoints.config import PLAIN
from foretoken.planning.acceptance import Curve, nearest
from foretoken.planning.sizes import ModelSizes, drafter_sizes, training_seconds

if TYPE_CHECKING:
    from foretoken.models.recurrent import RecurrentSizes

# Half-width of an interval, in standard errors; a choice: four of five figures lie within.
INTERVAL_WIDTH = 1.28


class PlannedDraft(NamedTuple):
    """Drafts of one drafter for a batch."""

    name: str  # the drafter, see `Curve.name`
    depth: int  # levels; 0 for plain decoding
    nodes: float  # mean drafted nodes of a sequence
    tokens: float  # expected tokens of a sequence in a pass
    asks: float  # share of the passes in which the drafter proposes anything

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
    """One drafter at one depth and batch."""

    draft: PlannedDraft
    batch: int  # sequences decoded at once
    tokens_per_s: float  # of the whole batch; `low` and `high` are the ends of an 80 % interval
    low: float
    high: float
    speed_up: float  # over plain decoding
    seconds: tuple[float, float, float]  # of verification, drafting and host, an iteration each
    source: str = ""  # of the acceptance

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


def goodput(tokens: float, *, batch: int, verify: float, draft: float, host: float) -> float:
    """Returns the tokens per second of a batch. Controllers and plans maximise this number.

    `tokens` are expected of one sequence in a pass; the others are seconds of an iteration of the whole batch.

    Source: Liu et al. 2024 (SmartSpec, arXiv 2406.14066), its goodput: accepted and bonus tokens over step time.
    """
    return batch * tokens / (verify + draft + host)


def drafts_of(curve: Curve) -> list[PlannedDraft]:
    """Returns the drafts of all depths that may be drafted."""
    return [
        PlannedDraft(curve.name, depth, curve.nodes[depth - 1], curve.lengths[depth - 1], curve.asks[depth - 1])
        for depth in curve.depths
    ]


def predict(
    draft: PlannedDraft, costs: IterationCosts, *, batch: int, context: float, error: float = 0.0, source: str = ""
) -> Prediction:
    """Predicts one drafter, or `NO_DRAFT`, at one depth, batch and `context`, the committed tokens of each sequence.

    `error` is the relative standard error of `draft.tokens`; `source` says where the acceptance comes from.
    """
    plain = sum(_seconds(NO_DRAFT, costs, batch, context))
    verify, drafting, host = _seconds(draft, costs, batch, context)
    host = max(host, plain - verify - drafting)  # an iteration with drafts takes no less: other figures are noise
    rate = goodput(draft.tokens, batch=batch, verify=verify, draft=drafting, host=host)
    half = INTERVAL_WIDTH * hypot(error, costs.error)
    return Prediction(
        draft=draft,
        batch=batch,
        tokens_per_s=rate,
        low=rate / (1 + half),
        high=rate * (1 + half),
        speed_up=rate * plain / batch,
        seconds=(verify, drafting, host),
        source=source,
    )


def _seconds(draft: PlannedDraft, costs: IterationCosts, batch: int, context: float) -> tuple[float, float, float]:
    drafting = costs.draft(draft, batch, context) if draft.depth else 0.0
    return costs.verify(draft, batch, context), drafting, costs.host(draft, batch)


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
    """Returns the fastest prediction of each drafter; `found` is sorted, the fastest first."""
    best: dict[str, Prediction] = {}
    for each in found:
        best.setdefault(each.draft.name, each)
    return list(best.values())


Word = Literal["take", "do not draft", "not decided"]


class Advice(NamedTuple):
    """What to take at one batch."""

    batch: int
    verdict: Word  # "take", "do not draft", or "not decided" for a gain in whose interval plain decoding lies
    best: Prediction | None  # the fastest drafter that pays; None without one
    second: Prediction | None  # the next drafter; None without a second that pays
    reason: str  # a sentence or two


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
    """Where the search for a break-even ends: most sequences, and most committed tokens of a sequence."""

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


_LARGEST_BATCH = 1024  # of the search for a break-even; a choice


class Page(NamedTuple):
    """What is planned for one temperature."""

    temperature: float
    predictions: Sequence[Sequence[Prediction]]  # by batch; the fastest first, with plain decoding
    advice: Sequence[Advice]  # by batch
    last_batch: int | None  # least batch from which on no drafter pays; None if there is none, or if none pays at all
    last_context: int | None  # least context from which on no drafter pays at the smallest batch; None as above

    @property
    def pays(self) -> bool:
        """Whether some drafter pays at the smallest batch, from which the break-evens are searched."""
        return min(self.advice, key=lambda each: each.batch).best is not None


class Need(NamedTuple):
    """Memory of a method's drafter of the usual size, and the time to train it."""

    name: str
    weight_bytes: float  # bytes of the weights that it does not share with the target
    training_s: float | None  # seconds to train it on this machine; None for a drafter that is not trained for a target


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan for one model on one machine, with a page for each temperature."""

    pages: Sequence[Page]
    context: float  # committed tokens of a sequence
    limits: Limits
    weight_bytes: float  # of the target
    kv_bytes: float  # of the KV cache of one sequence with `context` tokens
    recurrent: RecurrentSizes | None  # of the target; None if all layers have attention
    most_sequences: int | None  # sequences that fit into memory beside the weights; None if the memory is not known
    needs: Sequence[Need]  # drafters with weights of their own
    curves: Mapping[float, Sequence[Curve]] = field(default_factory=dict)  # by temperature

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan JSON-ready."""
        return {
            "context": self.context,
            "tried_up_to": self.limits._asdict(),
            "memory": {
                "weight_bytes": self.weight_bytes,
                "kv_bytes_per_sequence": self.kv_bytes,
                **({} if self.recurrent is None else {"recurrent_layers": self.recurrent._asdict()}),
                "most_sequences": self.most_sequences,
            },
            "drafters": [need._asdict() for need in self.needs],
            "temperatures": [self._page(page) for page in self.pages],
        }

    def _page(self, page: Page) -> dict[str, Any]:
        known = {curve.name: curve for curve in self.curves[page.temperature]}
        return {
            "temperature": page.temperature,
            "no_gain_from_batch": page.last_batch,
            "no_gain_from_context": page.last_context,
            "batches": [
                {
                    "batch_size": advice.batch,
                    "verdict": advice.verdict,
                    "best": None if advice.best is None else advice.best.setup,
                    "second": None if advice.second is None else advice.second.setup,
                    "reason": advice.reason,
                    "predictions": [
                        each.as_dict() | (known[each.draft.name].nextn(each.draft.depth) if each.draft.depth else {})
                        for each in found
                    ],
                }
                for advice, found in zip(page.advice, page.predictions, strict=True)
            ],
        }


def make_plan(
    curves: Sequence[Curve],
    costs: Mapping[float, IterationCosts],
    target: ModelSizes,
    *,
    batches: Sequence[int],
    context: float,
    longest: int,
    memory_bytes: float | None,
    peak_flops: float,
) -> Plan:
    """Makes a plan for the temperatures of `costs`.

    Args:
        curves: Acceptance of the drafters, at any temperatures.
        costs: Of the machine, by temperature.
        target: Sizes of the target.
        batches: Sequences decoded at once.
        context: Committed tokens of a sequence.
        longest: Most tokens of a sequence.
        memory_bytes: For weights and KV cache; None if it is not known.
        peak_flops: Arithmetic of the machine, operations a second, for training.
    """
    kv_bytes = target.kv_bytes_per_token * context
    sequence = kv_bytes + target.state_bytes
    used = {temperature: nearest(curves, temperature) for temperature in costs}
    room = None if memory_bytes is None else max(int((memory_bytes - target.weights_bytes) // sequence), 0)
    limits = Limits(_LARGEST_BATCH if room is None else min(room, _LARGEST_BATCH), longest)
    pages = []
    for temperature, its_costs in costs.items():
        own = used[temperature]
        found = [predictions(own, its_costs, batch=batch, context=context) for batch in batches]
        ends = breaks_even_at(own, its_costs, batch=min(batches), context=context, limits=limits)
        pages.append(Page(temperature, found, [advise(each) for each in found], *ends))
    return Plan(
        pages=pages,
        context=context,
        limits=limits,
        weight_bytes=target.weights_bytes,
        kv_bytes=kv_bytes,
        recurrent=target.recurrent,
        most_sequences=room,
        needs=_needs(dict.fromkeys(each.method for own in used.values() for each in own), target, peak_flops),
        curves=used,
    )


def _needs(methods: Iterable[str], target: ModelSizes, flops: float) -> list[Need]:
    needs = []
    for method in methods:
        sizes = drafter_sizes(method, target)
        if sizes is not None:
            is_trained = method != "draft_model" and sizes.own_weights > 0
            seconds = training_seconds(target, sizes, flops) if is_trained else None
            needs.append(Need(method, sizes.own_weights * sizes.reads.weight_bytes, seconds))
    return needs
