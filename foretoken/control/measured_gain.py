"""Whether drafting pays by the clock: drafts are given up where iterations without them wrote more tokens a second.

The controllers within reckon with what passes, drafts and the host are expected to take, and while they draft they see
nothing of plain decoding. Now and then an iteration therefore makes no draft, and its seconds are what the others are
held against: seldom while drafts gain much, often while they lose. What drafts may lose is `ProbeSchedule`'s matter.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING

from foretoken.control.base import Allotment, Allowance
from foretoken.control.probing import ProbeSchedule
from foretoken.core.records import Declined

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.control.base import Ask, Continue, Controller
    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree

_FIRST_LOOK = 4  # iterations with drafts before the very first one without, as the first ones warm up
_SELDOM, _OFTEN, _VERY_OFTEN = 256, 32, 4  # iterations between two looks: while drafts gain much, gain, and lose
_MUCH = 1.5  # times plain decoding's speed
_FRESH = 16  # iterations for which a look counts beside later ones
_LOOKS_KEPT = 9
_LARGEST_DEBT = 4.0  # that drafts are given up with, in iterations of plain decoding: texts change
_LARGEST_RATIO = 2.0  # of an iteration to recent ones: one that was interrupted says little
_FADE = 0.5 ** (1 / 16)  # of what drafts brought and took, by iteration


class _Measured:
    """What iterations over one number of sequences took, with drafts and without."""

    def __init__(self) -> None:
        self.since_look = 0  # iterations with drafts since the last one without
        self._age = 0
        self._looks: deque[tuple[int, float]] = deque(maxlen=_LOOKS_KEPT)  # iteration, seconds
        # Of iterations with drafts, fading: how many, tokens a sequence, seconds, those of drafts among them, widths,
        # and how many had their first drafted token accepted.
        self._drafted = [0.0] * 6

    @property
    def plain_s(self) -> float | None:
        """Seconds of an iteration without drafts; None before one was made."""
        fresh = [seconds for at, seconds in self._looks if at > self._age - _FRESH]
        return median_low(fresh) if fresh else self._looks[-1][1] if self._looks else None

    @property
    def drafted_s(self) -> float:
        """Seconds of a recent iteration with drafts; 0 before one was made."""
        return self._drafted[2] / max(self._drafted[0], 1.0)

    @property
    def gain(self) -> float | None:
        """Speed of recent iterations with drafts over that of iterations without; None before both were made."""
        plain, (_, tokens, seconds, *_) = self.plain_s, self._drafted
        return None if plain is None or not seconds else tokens * plain / seconds

    @property
    def price(self) -> float:
        """What drafting adds to an iteration, in iterations without drafts."""
        plain = self.plain_s
        return 0.0 if plain is None else max(self.drafted_s / plain - 1, 0.0)

    def is_look_due(self, *, is_first: bool) -> bool:
        """Whether to see what an iteration without drafts takes; is_first: no batch of any size was looked at yet."""
        gain = self.gain
        if gain is None:
            return self.since_look >= (_FIRST_LOOK if is_first else _OFTEN)
        return self.since_look >= (_SELDOM if gain > _MUCH else _OFTEN if gain > 1 else _VERY_OFTEN)

    def learn(self, record: StepRecord) -> None:
        """Takes in an iteration."""
        self._age += 1
        batch, seconds = len(record.sequences), record.seconds
        if not record.asked:
            self._looks.append((self._age, seconds.total))
            self.since_look = 0
            return
        self.since_look += 1
        if not self._looks:  # it warms up, and is held against nothing
            return
        tokens = sum(step.num_emitted for step in record.sequences) / batch
        first = sum(step.num_accepted > 0 for step in record.sequences) / batch
        new = (1.0, tokens, seconds.total, seconds.draft, record.num_tokens, first)
        self._drafted = [each * _FADE + value for each, value in zip(self._drafted, new, strict=True)]

    def reason(self) -> Declined:
        """Why nothing is drafted."""
        count, _, seconds, drafts, width, first = (each / max(self._drafted[0], 1.0) for each in self._drafted)
        plain = self.plain_s or max(seconds - drafts, 1e-9)
        return Declined(
            width=round(width), pass_cost=(seconds - drafts) / plain, draft_cost=drafts / plain,
            acceptance=first if count else None, hit_rate=1.0,
        )  # fmt: skip


class MeasuredGain:
    """A controller around another one.

    Attributes:
        inner: Decides as long as drafting pays.
    """

    def __init__(self, inner: Controller) -> None:
        """Nothing was measured yet."""
        self.inner = inner
        self._probes = ProbeSchedule()
        self._measured: dict[int, _Measured] = {}  # by the number of sequences
        self._now = _Measured()
        self._is_delegated = self._is_looking = self._has_looked = False
        self._is_unannounced = False  # whether drafters may not have heard of the last iteration
        self._declining: tuple[_Measured, Allotment] | None = None  # since drafting was given up

    def allot(self, batch_size: int) -> Allotment:
        """The inner controller's allotment, one that only measures plain decoding, or none while drafts do not pay."""
        self._now = self._measured.setdefault(batch_size, _Measured())
        self._is_delegated = self._is_looking = False
        if self._probes.is_spent:
            if not self._probes.advance(self._now.price):
                return self._decline(batch_size, may_draft_next=self._probes.is_near)
        elif self._is_unannounced:
            return self._decline(batch_size, may_draft_next=True)
        else:
            self._probes.reset()
            self._declining = None
            if self._now.is_look_due(is_first=not self._has_looked):
                self._is_looking = True
                return Allotment(allowances=_nothing(batch_size), measures_plain=True)
        self._is_delegated = True
        return self.inner.allot(batch_size)

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """The inner controller's answer."""
        return self.inner.further(trees)

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """The inner controller's choice."""
        return self.inner.select(trees, continued)

    def learn(self, record: StepRecord) -> None:
        """Counts what the iteration took, and tells the inner controller of those that it decided on."""
        if self._is_delegated:
            self.inner.learn(record)
        now = self._now
        if record.num_prompt_tokens or now is not self._measured.get(len(record.sequences)):
            return
        now.learn(record)
        self._has_looked |= not record.asked
        if record.asked:
            plain, batch = now.plain_s, len(record.sequences)
            if plain is not None:
                tokens = sum(step.num_emitted for step in record.sequences) / batch
                loss = min(record.seconds.total, _LARGEST_RATIO * now.drafted_s) / plain - tokens
                self._probes.spend(min(loss, self._probes.saved + _LARGEST_DEBT), tokens)
        elif not self._is_looking:
            self._probes.save()

    def _decline(self, batch_size: int, *, may_draft_next: bool) -> Allotment:
        """No draft for anyone, and why."""
        self._is_unannounced = not may_draft_next
        if self._declining is not None:
            measured, known = self._declining
            if measured is self._now and known.may_draft_next == may_draft_next:
                return known
        known = Allotment(
            allowances=_nothing(batch_size), declined=self._now.reason(), may_draft_next=may_draft_next
        )  # fmt: skip
        self._declining = self._now, known
        return known


def _nothing(batch_size: int) -> list[Allowance]:
    """No draft for anyone."""
    return [Allowance(depth=0, nodes=1)] * batch_size
