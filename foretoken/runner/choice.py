"""Chooses the decoder: the fastest at the widths of the engine's passes, by measured times.

"auto" promises that a token's logits have the same bits in every pass if an exact decoder fits the model (see
`Decoder`). It then compares exact decoders only. "fastest" compares all decoders. Where two tokens score nearly the
same, plain and speculative decoding may then choose differently; `foretoken verify` shows such cases. "lean" is "auto"
without the transformers model. Nothing is measured if only one decoder is left.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.backend import is_out_of_memory
from foretoken.core.errors import ConfigError, ModelError, PassError, nearest_name_hint
from foretoken.runner.decoders import DECODERS, EXACT, check_architecture, decoders_for, proven_decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from foretoken.core.passes import Tap
    from foretoken.decoder.base import Decoder
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loading import LoadedModel
    from foretoken.runner.costs import PassCosts

_TIE = 1.05  # costs within this ratio differ by noise alone; a choice, as repeated bursts scatter by a few percent
_TREE_TOKENS = 2  # of a verification; a choice: published acceptance lengths are 2 to 4, but not every tree is drafted


class PassWidths(NamedTuple):
    """The widths of a runner's passes.

    `max_nodes`: nodes of the widest tree of a sequence, root included; 1 for plain decoding.
    """

    num_slots: int
    max_nodes: int = 16
    prompt_chunk: int = 512

    def passes(self, costs: PassCosts) -> list[tuple[int, float]]:
        """Returns tokens and seconds of a plain step, of the widest verification (if any), and of a prompt chunk."""
        num_tokens = self.num_slots * self.max_nodes
        step, prompt = costs.step(self.num_slots), costs.prompt(self.prompt_chunk)
        trees = [(num_tokens, costs.verification(self.num_slots, num_tokens))] if self.max_nodes > 1 else []
        return [(self.num_slots, step), *trees, (self.prompt_chunk, prompt)]

    def seconds(self, costs: PassCosts) -> float:
        """Returns the cost by which decoders are compared: one step, one verification, and prompt tokens for both.

        The step generates one token a sequence and the verification about two. The prompt is assumed as long as the
        generated text. Without trees: one step, and one prompt token a sequence.
        """
        *decoding, (_, chunk_seconds) = self.passes(costs)
        generated = self.num_slots * (1 if self.max_nodes == 1 else 1 + _TREE_TOKENS)
        return sum(seconds for _, seconds in decoding) + generated * chunk_seconds / self.prompt_chunk


def ranked(costs: Mapping[str, PassCosts], widths: PassWidths) -> list[tuple[str, str]]:
    """Returns decoders, the fastest first, each with a sentence that compares pass times.

    Of costs that differ by noise alone, the earlier key comes first.
    """
    seconds = {name: widths.seconds(costs[name]) for name in costs}
    first = next((name for name in costs if seconds[name] <= _TIE * min(seconds.values())), None)
    order = sorted(costs, key=lambda name: (name != first, seconds[name]))
    return [(name, _comparison(name, costs, widths)) for name in order]


def _comparison(name: str, costs: Mapping[str, PassCosts], widths: PassWidths) -> str:
    def milliseconds(each: str) -> str:
        values = [1e3 * seconds for _, seconds in widths.passes(costs[each])]
        return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)

    if len(costs) == 1:
        return ""
    tokens = " / ".join(str(number) for number, _ in widths.passes(costs[name]))
    others = ", ".join(f"{other} {milliseconds(other)}" for other in costs if other != name)
    return f"{name} is used: passes of {tokens} tokens take {milliseconds(name)} ms ({others})"


RUNNERS = ("auto", "fastest", "lean", *DECODERS)
_log = logging.getLogger(__name__)
_said: set[str] = set()


class ChosenDecoder(NamedTuple):
    """The chosen decoder, and the reason as a sentence."""

    decoder: Decoder
    reason: str


def choose_decoder(
    model: LoadedModel,
    cache: SlotCache,
    taps: Sequence[Tap],
    *,
    runner: str,
    widths: PassWidths,
    context_len: int,
    costs: Callable[[str], PassCosts],
) -> ChosenDecoder:
    """Makes the fastest decoder that fits, and proves it on the model; says why others do not fit.

    Args:
        cache: For the decoder; no sequence is in it. Measured candidates have caches of their own.
        costs: Returns pass costs by decoder, see `pass_costs`; called only if there is a choice.

    Raises:
        ConfigError: If `runner` does not exist.
        ModelError: If no requested decoder fits the model.
    """
    candidates = _Candidates(model, runner, widths, costs)
    for name, reason in candidates.in_order():
        try:
            decoder = proven_decoder(name, model, cache, taps, context_len=context_len)
        except ModelError as err:
            candidates.refuse(name, err)
            continue
        if candidates.reasons:
            _say_once(logging.WARNING, f"{model.name} runs on the {name} runner. {candidates.refusals()}")
        if reason:
            _say_once(logging.INFO, f"{model.name}: {reason}")
        return ChosenDecoder(decoder, reason or f"{name} is used: {_why_alone(name, runner)}")
    raise candidates.failure()


def likely_decoder(model: LoadedModel, runner: str, widths: PassWidths, *, costs: Callable[[str], PassCosts]) -> str:
    """Returns what `choose_decoder` will probably choose, before a cache exists; arguments and errors are the same."""
    candidates = _Candidates(model, runner, widths, costs)
    for name, _ in candidates.in_order():
        try:
            costs(name)
        except ModelError as err:
            candidates.refuse(name, err)
            continue
        return name
    raise candidates.failure()


class _Candidates:
    """The decoders that may be used; `reasons` says why others may not, each with their names."""

    def __init__(self, model: LoadedModel, runner: str, widths: PassWidths, costs: Callable[[str], PassCosts]) -> None:
        if runner not in RUNNERS:
            raise ConfigError(f"runner '{runner}' does not exist. {nearest_name_hint(runner, RUNNERS)}")
        self._model, self._runner, self._widths, self._costs = model, runner, widths, costs
        self.reasons: dict[str, list[str]] = {}
        self._generic_error: ModelError | None = None

    def in_order(self) -> Iterator[tuple[str, str]]:
        for group in self._groups():
            fitting = [name for name in group if len(group) == 1 or self._is_known(name)]
            costs, unmeasured = {}, []
            for name in fitting if len(fitting) > 1 else []:
                try:
                    costs[name] = self._costs(name)
                except ModelError as err:
                    self.refuse(name, err)
                except (PassError, MemoryError, RuntimeError) as err:
                    if not isinstance(err, PassError) and not is_out_of_memory(err):
                        raise
                    _log.warning("passes of the %s runner cannot be timed: %s", name, err)
                    unmeasured.append(name)
            yield from ranked(costs, self._widths)
            yield from ((name, "") for name in fitting if len(fitting) == 1)
            yield from ((name, f"{name} is used: its passes could not be timed") for name in unmeasured)

    def refuse(self, name: str, err: ModelError) -> None:
        self.reasons.setdefault(str(err), []).append(name)
        if name == "generic":
            self._generic_error = err.with_traceback(None)  # the frames hold the decoder and its cache

    def refusals(self) -> str:
        return " ".join(f"{', '.join(names)}: {reason}" for reason, names in self.reasons.items())

    def failure(self) -> ModelError:
        return self._generic_error or ModelError(
            f"runner '{self._runner}' cannot run '{self._model.name}'. {self.refusals()}"
        )

    def _groups(self) -> list[list[str]]:
        """Returns names that are compared with each other; a later group only serves if no earlier decoder does."""
        if self._runner in DECODERS:
            return [[self._runner]]
        names = [name for name in decoders_for(self._model) if name != "generic" or self._runner != "lean"]
        if self._runner == "fastest":
            return [names]
        return [[name for name in names if name in EXACT], [name for name in names if name not in EXACT]]

    def _is_known(self, name: str) -> bool:
        try:
            check_architecture(name, self._model)
        except ModelError as err:
            self.refuse(name, err)
            return False
        return True


def _why_alone(name: str, runner: str) -> str:
    if name == runner:
        return "it was asked for"
    is_promised = name in EXACT and runner != "fastest"
    return "no other one gives a token the same bits in every pass" if is_promised else "no other one fits the model"


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.log(level, "%s", message)
