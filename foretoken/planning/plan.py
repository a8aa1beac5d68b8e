"""Puts a plan together: predictions by temperature and batch, advice, break-even points, memory and training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.planning.acceptance import Curve, nearest
from foretoken.planning.predict import (
    Advice,
    IterationCosts,
    Limits,
    Prediction,
    advise,
    breaks_even_at,
    predictions,
)
from foretoken.planning.sizes import drafter_sizes, training_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from foretoken.planning.theory import ModelSizes

_LARGEST_BATCH = 1024  # of the search for a break-even; a choice


class Page(NamedTuple):
    """What is planned for one temperature.

    Attributes:
        temperature: Of the requests.
        predictions: By batch: every drafter at every depth and plain decoding, the fastest first.
        advice: By batch.
        last_batch: Least batch from which on no drafter pays; None if there is none, or if none pays at all.
        last_context: Least context from which on no drafter pays at the smallest batch; None as above.
    """

    temperature: float
    predictions: Sequence[Sequence[Prediction]]
    advice: Sequence[Advice]
    last_batch: int | None
    last_context: int | None

    @property
    def pays(self) -> bool:
        """Whether some drafter pays at the smallest batch, from which the break-evens are searched."""
        return min(self.advice, key=lambda each: each.batch).best is not None


class Need(NamedTuple):
    """Memory of a method's drafter of the usual size, and the time to train it.

    Attributes:
        name: The method.
        weight_bytes: Bytes of the weights that it does not share with the target.
        training_s: Seconds to train it on this machine; None for a drafter that is not trained for a target.
    """

    name: str
    weight_bytes: float
    training_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan for one model on one machine.

    Attributes:
        pages: One for each temperature.
        context: Committed tokens of a sequence.
        limits: Where the search for a break-even ended.
        weight_bytes: Of the target.
        kv_bytes: Of the KV cache of one sequence with `context` tokens.
        most_sequences: Sequences that fit into memory beside the weights; None if the memory is not known.
        needs: Drafters with weights of their own.
        curves: The acceptance behind the plan, by temperature.
    """

    pages: Sequence[Page]
    context: float
    limits: Limits
    weight_bytes: float
    kv_bytes: float
    most_sequences: int | None
    needs: Sequence[Need]
    curves: Mapping[float, Sequence[Curve]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan JSON-ready."""
        return {
            "context": self.context,
            "tried_up_to": self.limits._asdict(),
            "memory": {
                "weight_bytes": self.weight_bytes,
                "kv_bytes_per_sequence": self.kv_bytes,
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
                        {
                            **each.as_dict(),
                            **(known[each.draft.name].nextn(each.draft.depth) if each.draft.depth else {}),
                        }
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
    """Makes a plan.

    Args:
        curves: Acceptance of the drafters, at any temperatures.
        costs: Of the machine, by the temperatures to plan for.
        target: Its sizes.
        batches: Sequences decoded at once.
        context: Committed tokens of a sequence.
        longest: Most tokens of a sequence.
        memory_bytes: For weights and KV cache; None if it is not known.
        peak_flops: Arithmetic of the machine, operations a second, for training.
    """
    kv_bytes = target.kv_bytes_per_token * context
    used = {temperature: nearest(curves, temperature) for temperature in costs}
    room = None if memory_bytes is None else max(int((memory_bytes - target.weights_bytes) // kv_bytes), 0)
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
