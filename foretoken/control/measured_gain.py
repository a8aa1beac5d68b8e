"""Whether drafting pays by the clock: drafts are given up where iterations without them wrote more tokens a second.

The controllers within reckon with what passes, drafts and the host are expected to take, and while they draft they see
nothing of plain decoding. Now and then an iteration therefore makes no draft, and its seconds are what the others are
held against: seldom while drafts gain much, often while they lose. What drafts lose is paid out of `Savings`; when
these are spent, drafting rests until enough was saved again.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING

from foretoken.control.base import Allotment, Allowance
from foretoken.control.savings import CREDIT, MOST, Savings
from foretoken.core.records import Declined

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.control.base import Ask, Continue, Controller
    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree

_FIRST_LOOK = 4  # iterations with drafts before the very first one without, as the first ones warm up
_SELDOM, _OFTEN, _VERY_OFTEN = 256, 64, 4  # iterations between two looks: while drafts gain much, gain, and lose
_MUCH = 1.5  # times plain decoding's speed
_PUT_OFF = 2  # iterations with drafts between two looks that make one measurement, at least
_NEW_EVERY = 32  # iterations with drafts for each look at a number of sequences that was not looked at enough
_FRESH = 16  # iterations for which a look counts beside later ones
_RECENT = 9  # looks, and seconds of iterations with drafts, that are kept
_FEW = 3  # iterations with drafts that do not show yet what one usually takes
_SMALLEST_DEBT = 4.0  # that drafts are given up with at most, unless they cost more: texts change
_LARGEST_CATCH_UP = 10.0  # that is accounted for
_LARGEST_RATIO = 2.0  # of an iteration to what one usually takes: one that was interrupted says little
_FADE = 0.5 ** (1 / 16)  # of what drafts brought and took, by iteration


class _Measured:
    """What iterations over one number of sequences took, with drafts and without.

    Attributes:
        plain_s: Seconds of an iteration without drafts; None before two were made.
        since_look: Iterations with drafts since it was last measured.
    """

    def __init__(self) -> None:
        self.plain_s: float | None = None
        self.since_look = 0
        self._is_sure = False  # whether the last looks agree
        self._is_half = False  # whether the last look is to be followed by another one
        self._patience = _PUT_OFF  # iterations with drafts until a look that was not counted is made again
        self._age = 0
        self._looks: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # iteration, seconds
        self._usual: deque[float] = deque(maxlen=_RECENT)  # seconds of iterations with drafts
        # Of iterations with drafts, fading: how many, tokens a sequence, seconds, those of drafts among them, widths,
        # and the shares of sequences with a draft, and with an accepted token.
        self._drafted = [0.0] * 7

    @property
    def usual_s(self) -> float | None:
        """Seconds of an iteration with drafts; None after a few."""
        return median_low(self._usual) if len(self._usual) > _FEW else None

    @property
    def gain(self) -> float | None:
        """Speed of recent iterations with drafts over that of iterations without; None before both were made."""
        plain, usual, (count, tokens, *_) = self.plain_s, self.usual_s, self._drafted
        return None if plain is None or usual is None or not count else tokens / count * plain / usual

    def is_look_due(self, *, is_new_allowed: bool) -> bool:
        """Whether to see what an iteration without drafts takes.

        Looks come in twos, the faster of which counts, as the first pass of a width may be slow. They do not follow
        each other directly, so that a moment in which the machine was busy does not make both slow.

        Args:
            is_new_allowed: Whether a number of sequences may be looked at that was not looked at enough.
        """
        gain = self.gain
        if gain is None:
            return is_new_allowed and self.since_look >= _FIRST_LOOK
        seldom = gain > _MUCH and self._is_sure
        return self.since_look >= (_SELDOM if seldom else _OFTEN if gain > 1 else _VERY_OFTEN)

    def put_off(self) -> None:
        """The next look is due a little later: to make two, or because the present one could not be counted."""
        self.since_look -= self._patience
        self._patience = min(2 * self._patience, _OFTEN)

    def look(self, seconds: float) -> None:
        """Takes in an iteration without drafts."""
        self._age += 1
        self._patience = _PUT_OFF
        self._looks.append((self._age, seconds))
        fresh = [seconds for at, seconds in self._looks if at > self._age - _FRESH]
        self._is_half = len(fresh) == 1
        if not self._is_half:
            self.plain_s, self.since_look = median_low(fresh), 0
            self._is_sure = max(fresh) < _LARGEST_RATIO * min(fresh)

    def learn(self, record: StepRecord) -> float | None:
        """Takes in an iteration with drafts.

        Returns:
            By how much it was slower than plain decoding of its tokens, in iterations of that; None while that is not
            known, or just measured anew.
        """
        self._age += 1
        self.since_look += 1
        usual, batch = self.usual_s, len(record.sequences)
        self._usual.append(record.seconds.total)
        if usual is None or self.plain_s is None:
            return None
        tokens, drafted, accepted = (
            sum(each) / batch
            for each in zip(
                *((step.num_emitted, step.tree_depth > 0, step.num_accepted > 0) for step in record.sequences),
                strict=True,
            )
        )
        seconds = min(record.seconds.total, _LARGEST_RATIO * usual)
        new = (1.0, tokens, seconds, min(record.seconds.draft, seconds), record.num_tokens, drafted, accepted)
        self._drafted = [each * _FADE + value for each, value in zip(self._drafted, new, strict=True)]
        return None if self._is_half else seconds / self.plain_s - tokens

    def price(self, seconds: float) -> float:
        """What an iteration of so many seconds takes beyond one without drafts, in iterations of that."""
        return max(seconds / self.plain_s - 1, 0.0) if self.plain_s else 0.0

    def reason(self) -> Declined:
        """Why nothing is drafted; of one that has drafted."""
        count, _, seconds, drafts, width, drafted, accepted = self._drafted
        plain = count * self.plain_s if self.plain_s else seconds - drafts
        return Declined(
            width=round(width / count), pass_cost=(seconds - drafts) / plain, draft_cost=drafts / plain,
            acceptance=accepted / drafted if drafted else None, hit_rate=drafted / count,
        )  # fmt: skip


class MeasuredGain:
    """A controller around another one.

    Attributes:
        inner: Decides as long as drafting pays.
    """

    def __init__(self, inner: Controller) -> None:
        """Nothing was measured yet."""
        self.inner = inner
        self._savings = Savings()
        self._measured: dict[int, _Measured] = {}  # by the number of sequences
        self._now = self._drafted = _Measured()  # of the present number, and of the last one with a draft
        self._new_looks = 2.0  # that may be made at numbers of sequences that were not looked at enough
        self._is_delegated = self._is_looking = False
        self._is_unannounced = False  # whether drafters may not have heard of the last iteration
        self._is_catching_up = False  # whether the next draft is the first one since drafting was given up
        self._owed = 0.0  # what that draft lost, until there are savings for it
        self._declining: Allotment | None = None  # since drafting was given up

    def allot(self, batch_size: int) -> Allotment:
        """The inner controller's allotment, one that only measures plain decoding, or none while drafts do not pay."""
        now = self._now = self._measured.setdefault(batch_size, _Measured())
        self._is_delegated = self._is_looking = False
        if self._savings.is_spent or self._is_unannounced:
            return self._decline(batch_size, may_draft_next=not self._savings.is_spent)
        self._declining = None
        if now.is_look_due(is_new_allowed=self._new_looks >= 1):
            now.put_off()
            self._new_looks -= now.gain is None
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
        if not record.asked:
            now.look(record.seconds.total)
            if not self._is_looking:
                self._savings.save()
        elif self._is_catching_up:  # it took longer than the next ones, and is no reason to give up at once
            self._is_catching_up = False
            self._owed = min(now.price(record.seconds.total), _LARGEST_CATCH_UP)
        else:
            self._new_looks = min(self._new_looks + 1 / _NEW_EVERY, 2.0)
            loss, usual = now.learn(record), now.usual_s
            if loss is not None and usual is not None:
                self._drafted = now
                self._spend(loss, max(_SMALLEST_DEBT, now.price(usual)))

    def _spend(self, loss: float, largest_debt: float) -> None:
        """Pays for an iteration with a draft, and for having caught up as soon as that is possible or must be."""
        savings = self._savings
        savings.spend(loss, largest_debt)
        if savings.is_spent or savings.amount > CREDIT + self._owed:
            savings.spend(self._owed, MOST)
            self._owed = 0.0

    def _decline(self, batch_size: int, *, may_draft_next: bool) -> Allotment:
        """No draft for anyone, and why."""
        self._is_unannounced, self._is_catching_up = not may_draft_next, True
        known = self._declining
        if known is None or (len(known.allowances), known.may_draft_next) != (batch_size, may_draft_next):
            reason = self._drafted.reason() if known is None else known.declined
            known = self._declining = Allotment(
                allowances=_nothing(batch_size), declined=reason, may_draft_next=may_draft_next
            )
        return known


def _nothing(batch_size: int) -> list[Allowance]:
    """No draft for anyone."""
    return [Allowance(depth=0, nodes=1)] * batch_size
