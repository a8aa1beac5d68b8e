"""Whether drafting pays by the clock: drafts are given up where iterations without them wrote more tokens a second.

The controllers within reckon with what passes, drafts and the host are expected to take, and while they draft they see
nothing of plain decoding. Now and then an iteration therefore makes no draft, and its seconds are what the others are
held against: seldom while drafts gain much, often while they lose. What drafts lose is paid out of `Savings`; when
these are spent, drafting rests until enough was saved again. All of this for each number of sequences by itself.
Iterations whose pass reads prompts, or in which a grammar adds tokens, show neither and are not counted.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.records import Declined
from foretoken.drafting.base import Allotment, Allowance
from foretoken.drafting.probing import CREDIT, ENOUGH, MOST, Savings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.base import Ask, Continue, Controller

_FIRST_LOOK = 4  # iterations with drafts before the very first one without, as the first ones warm up
_SELDOM, _OFTEN, _VERY_OFTEN = 256, 64, 4  # iterations with drafts between two looks: drafts gain much, gain, and lose
_MUCH = 1.5  # times plain decoding's speed
_PUT_OFF, _LONGEST_PUT_OFF = 2, 16  # iterations with drafts between two looks that make one measurement
_NEW_EVERY = 32  # iterations with drafts for each look at a number of sequences that was not measured yet
_FRESH = 16  # iterations for which a look counts beside later ones
_LEARN_EVERY = 4  # iterations in which nothing was drafted as it does not pay
_RECENT = 9  # looks, and seconds of iterations with drafts, that are kept
_FEW = 3  # iterations with drafts that do not show yet what one usually takes
_SMALLEST_DEBT = 4.0  # that drafts are given up with at most, unless they cost more: texts change
_LARGEST_CATCH_UP = 10.0  # that is accounted for
_LONGER = 1.25  # than the second longest of recent iterations of its kind, at most: what one took counts so far
_ALIKE = 2.0  # ratio of looks that agree
_STAY_NEAR = 16  # iterations after which drafters need not hear of others, as no number of sequences is drafted for
_FADE = 0.5 ** (1 / 16)  # of what drafts brought and took, by iteration


class _Sums(NamedTuple):
    """Of iterations with drafts, fading."""

    num: float = 0.0
    tokens: float = 0.0  # a sequence
    seconds: float = 0.0
    draft_s: float = 0.0
    width: float = 0.0
    drafted: float = 0.0  # shares of sequences with a draft
    accepted: float = 0.0  # shares of sequences with an accepted token

    def plus(self, new: _Sums) -> _Sums:
        """With another iteration."""
        return _Sums(*(each * _FADE + value for each, value in zip(self, new, strict=True)))


class _Measured:
    """What iterations over one number of sequences took, with drafts and without.

    Attributes:
        plain_s: Seconds of an iteration without drafts; None before two were made.
        savings: What drafts may lose.
        owed: What the first draft after a rest lost by catching up, until there are savings for it.
    """

    def __init__(self, credit: float) -> None:
        """Nothing was measured yet; credit: that drafts may lose to begin with."""
        self.plain_s: float | None = None
        self.savings, self.owed = Savings(credit), 0.0
        self._since_look = 0  # iterations with drafts since `plain_s` was measured
        self._held_off, self._patience = 0, _PUT_OFF  # drafts until the next look may be made, and after that one
        self._is_sure = False  # whether the last looks agree
        self._is_half = False  # whether the last look is to be followed by another one
        self._age = 0
        self._looks: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # iteration, seconds
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of iterations with drafts
        # The same of narrow passes and of wide ones, by the mean width.
        self._alike: tuple[deque[float], deque[float]] = deque(maxlen=_RECENT), deque(maxlen=_RECENT)
        self._sums = _Sums()

    @property
    def usual_s(self) -> float | None:
        """Seconds of an iteration with drafts, the longest of the recent ones left out; None before there are some."""
        recent = self._recent
        return (sum(recent) - max(recent)) / (len(recent) - 1) if len(recent) > _FEW else None

    @property
    def gain(self) -> float | None:
        """Speed of recent iterations with drafts over that of iterations without; None before both were made."""
        plain, usual, sums = self.plain_s, self.usual_s, self._sums
        return None if plain is None or not usual or not sums.num else sums.tokens / sums.num * plain / usual

    def is_look_due(self, *, is_new_allowed: bool) -> bool:
        """Whether to see what an iteration without drafts takes.

        Looks come in twos, the faster of which counts, as the first pass of a width may be slow. They do not follow
        each other directly, so that a moment in which the machine was busy does not make both slow.

        Args:
            is_new_allowed: Whether a number of sequences may be looked at that was not measured yet.
        """
        if self._held_off > 0 or self._is_half:
            return self._held_off <= 0
        gain = self.gain
        if gain is None:
            return is_new_allowed and self._since_look >= _FIRST_LOOK
        seldom = gain > _MUCH and self._is_sure
        return self._since_look >= (_SELDOM if seldom else _OFTEN if gain > 1 else _VERY_OFTEN)

    def put_off(self) -> None:
        """A look is made. The next one is due a little later: to make two, or because this one cannot be counted."""
        self._held_off = self._patience
        self._patience = min(2 * self._patience, _LONGEST_PUT_OFF)

    def look(self, seconds: float) -> None:
        """Takes in an iteration without drafts."""
        self._age += 1
        self._patience = _PUT_OFF
        self._looks.append((self._age, seconds))
        fresh = [seconds for at, seconds in self._looks if at > self._age - _FRESH]
        if len(fresh) == 1:
            self._is_half = not self._is_half
            if self._is_half:
                return
            fresh = [seconds for _, seconds in self._looks][-2:]
        self._is_half = False
        self.plain_s, self._since_look = median_low(fresh), 0
        self._is_sure = max(fresh) < _ALIKE * min(fresh)
        if self.savings.is_spent and self._sums.tokens * self.plain_s > self._sums.seconds:
            self.savings = Savings(ENOUGH)  # drafts were held against an iteration of other times

    def learn(self, record: StepRecord) -> float | None:
        """Takes in an iteration with drafts.

        Returns:
            By how much it was slower than plain decoding of its tokens, in iterations of that; None while that is not
            known. While it is measured anew, by how much at least, and no gain.
        """
        self._age += 1
        self._since_look += 1
        self._held_off = max(self._held_off - 1, 0)
        sums, batch = self._sums, len(record.sequences)
        alike = self._alike[record.num_tokens * sums.num > sums.width]
        *_, second_longest, _ = [0.0, 0.0, *sorted(alike if len(alike) > 1 else self._recent)]
        self._recent.append(record.seconds.total)
        alike.append(record.seconds.total)
        if not self.plain_s or len(self._recent) <= _FEW:
            return None
        # Of nine iterations one may have been interrupted; two that are long are of a kind.
        seconds = min(record.seconds.total, _LONGER * second_longest)
        tokens = sum(step.num_emitted for step in record.sequences) / batch
        new = _Sums(
            num=1.0, tokens=tokens, seconds=seconds, draft_s=min(record.seconds.draft, seconds),
            width=record.num_tokens, drafted=sum(step.tree_depth > 0 for step in record.sequences) / batch,
            accepted=sum(step.num_accepted > 0 for step in record.sequences) / batch,
        )  # fmt: skip
        self._sums = sums.plus(new)
        if self._is_half:
            return max(seconds / max(self.plain_s, self._looks[-1][1]) - tokens, 0.0)
        return seconds / self.plain_s - tokens

    def spend(self, loss: float) -> None:
        """Pays for an iteration with a draft, and for having caught up as soon as that is possible or must be."""
        self.savings.spend(loss, max(_SMALLEST_DEBT, self.price(self.usual_s or 0.0)))
        if self.savings.is_spent or self.savings.amount > CREDIT + self.owed:
            self.savings.spend(self.owed, MOST)
            self.owed = 0.0

    def price(self, seconds: float) -> float:
        """What an iteration of so many seconds takes beyond one without drafts, in iterations of that."""
        return max(seconds / self.plain_s - 1, 0.0) if self.plain_s else 0.0

    def reason(self) -> Declined:
        """Why nothing is drafted, after some drafts."""
        num, _, seconds, draft_s, width, drafted, accepted = self._sums
        plain = num * self.plain_s if self.plain_s else seconds - draft_s
        return Declined(
            width=round(width / num), pass_cost=(seconds - draft_s) / plain, draft_cost=draft_s / plain,
            acceptance=accepted / drafted if drafted else None, hit_rate=drafted / num,
        )  # fmt: skip


class MeasuredGain:
    """A controller around another one.

    Attributes:
        inner: Decides as long as drafting pays.
    """

    def __init__(self, inner: Controller) -> None:
        """Nothing was measured yet."""
        self.inner = inner
        self._measured: dict[int, _Measured] = {}  # by the number of sequences
        self._now = _Measured(CREDIT)
        self._new_looks = 2.0  # that may be made at numbers of sequences that were not measured yet
        self._is_delegated = self._is_looking = False
        self._num_declined = 0  # iterations without a draft that were not made to measure plain decoding
        self._num_rested = 0  # iterations since the inner controller last decided
        self._is_unannounced = False  # whether drafters may not have heard of the last iteration
        self._is_catching_up = False  # whether the next draft is the first one after iterations that drafters missed
        self._declining: Allotment | None = None  # since drafting was given up
        self._reason: Declined | None = None  # of the last time

    def plain_seconds(self, batch_size: int) -> float | None:
        """Returns the seconds of an iteration without drafts for so many sequences; None if not measured."""
        measured = self._measured.get(batch_size)
        return None if measured is None else measured.plain_s

    def allot(self, batch_size: int) -> Allotment:
        """The inner controller's allotment, one that only measures plain decoding, or none while drafts do not pay."""
        now = self._measured.get(batch_size)
        if now is None:  # others may try as much as after a rest
            now = self._measured[batch_size] = _Measured(ENOUGH if self._measured else CREDIT)
        self._now, self._is_delegated, self._is_looking = now, False, False
        if now.savings.is_spent or self._is_unannounced:
            self._num_rested = self._num_rested + 1 if now.savings.is_spent else 0
            return self._decline(batch_size, may_draft_next=not now.savings.is_spent or self._num_rested < _STAY_NEAR)
        self._declining, self._num_rested = None, 0
        is_new_allowed = self._new_looks >= 1 or any(each.savings.is_spent for each in self._measured.values())
        if now.is_look_due(is_new_allowed=is_new_allowed):
            now.put_off()
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
        now = self._now
        if self._is_delegated:
            self.inner.learn(record)
        if not self._is_looking and not record.asked:
            now.savings.save()
            self._num_declined += 1
            if self._num_declined % _LEARN_EVERY:  # one of some is enough to learn from
                return
        if record.num_prompt_tokens or now is not self._measured.get(len(record.sequences)):
            return  # it took longer than its trees do
        if not record.asked:
            if self._is_looking and now.plain_s is None:
                self._new_looks -= 1
            now.look(record.seconds.total)
        elif self._is_catching_up:  # it took longer than the next ones, and is no reason to give up at once
            self._is_catching_up = False
            now.owed = min(now.price(record.seconds.total), _LARGEST_CATCH_UP)
        else:
            self._new_looks = min(self._new_looks + 1 / _NEW_EVERY, 2.0)
            loss = now.learn(record)
            if loss is not None:
                now.spend(loss)

    def _decline(self, batch_size: int, *, may_draft_next: bool) -> Allotment:
        """No draft for anyone, and why."""
        self._is_unannounced = not may_draft_next
        self._is_catching_up |= not may_draft_next
        known = self._declining
        if known is None or (len(known.allowances), known.may_draft_next) != (batch_size, may_draft_next):
            if self._now.savings.is_spent:  # else drafters are to hear of this iteration before the next one's draft
                self._reason = self._now.reason()
            known = self._declining = Allotment(
                allowances=_nothing(batch_size), declined=self._reason, may_draft_next=may_draft_next
            )
        return known


def _nothing(batch_size: int) -> list[Allowance]:
    """No draft for anyone."""
    return [Allowance(depth=0, nodes=1)] * batch_size
