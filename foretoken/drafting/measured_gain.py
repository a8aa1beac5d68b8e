"""Decides by the clock whether drafting pays, and when drafts that did not pay are tried again."""

from __future__ import annotations

import math
from collections import deque
from statistics import median_low
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.records import Declined
from foretoken.drafting.base import Allotment

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.core.records import StepRecord
    from foretoken.core.token_tree import TokenTree
    from foretoken.drafting.base import Ask, Continue, Controller

SHARE = 0.01  # share of an iteration without drafts that drafts may lose
CREDIT = 8.0  # iterations that drafts may lose at the beginning
MOST = 20.0  # savings stop growing here, unless a caller needs more
ENOUGH = 2.0  # savings with which drafting resumes
_STAKE = 0.5  # largest share of the savings that one draft may risk


class Savings:
    """Budget for drafts that turn out slower than plain decoding.

    Attributes:
        amount: What drafts may still lose; below 0 a debt.
        is_spent: Whether drafts lost more than was saved, and too little was saved since. Drafts then do not pay,
            at any expected gain.
    """

    def __init__(self, credit: float = CREDIT) -> None:
        """Starts with `credit`."""
        self.amount, self.is_spent = credit, False

    @property
    def stake(self) -> float:
        """Largest loss that one draft may risk, so that a few bad drafts in a row do not end drafting."""
        return _STAKE * self.amount

    def save(self, most: float = MOST) -> None:
        """Adds the share of an iteration without a draft, up to `most`."""
        self._change(SHARE, most)

    def spend(self, loss: float, largest_debt: float) -> None:
        """Charges an iteration with a draft.

        Args:
            loss: Slower than plain decoding of its tokens by this; below 0 if it was faster.
            largest_debt: Cap on the recorded debt, so that drafting can resume.
        """
        self._change(-min(loss, max(self.amount + largest_debt, 0.0)), MOST)

    def _change(self, amount: float, most: float) -> None:
        self.amount = min(self.amount + amount, max(self.amount, most))
        self.is_spent = self.amount < (ENOUGH if self.is_spent else 0.0)


_FIRST, _LAST = 32, 512  # least and most iterations between two probes
WEIGHT_AT_PROBE = 8.0  # weight of all earlier drafts when probes begin, because they are old


class ProbeSchedule:
    """Decides when to draft although it does not pay, to learn from the draft, within the savings.

    Attributes:
        savings: Budget for drafts that turn out slower than plain decoding.
    """

    def __init__(self) -> None:
        self.savings = Savings()
        self._idle, self._next = 0, _FIRST
        self._num_probes = 0  # in a row, up to this iteration
        self._is_promising = False  # whether the last probe's draft was accepted
        self._wanted = CREDIT  # savings with which probes begin
        self._first_loss = 0.0  # loss of the first probe of the last group
        self._catch_up = 0.0  # extra loss of the first probe per iteration that it catches up with

    @property
    def num_idle(self) -> int:
        """Iterations since drafting last paid or the last probes ended; 0 while drafting pays."""
        return self._idle

    @property
    def is_beginning(self) -> bool:
        """Whether this iteration is the first of a group of probes."""
        return self._num_probes == 1

    def reset(self) -> None:
        """Notes that drafting pays."""
        self._idle, self._next, self._num_probes = 0, _FIRST, 0

    def advance(self, price: float) -> bool:
        """Counts an iteration in which drafting does not pay, and decides whether to draft nevertheless."""
        # Two in a row: the first catches up with missed tokens, the second shows the cost of a draft. More follow while
        # drafts are accepted, so that a change is believed soon.
        if self._num_probes == 1 or (self._num_probes and self._is_promising and self.savings.amount >= CREDIT + price):
            self._num_probes += 1
            return True
        if self._num_probes:  # the probes found nothing
            self._idle, self._next, self._num_probes = 0, min(2 * self._next, _LAST), 0
        self._idle += 1
        self._wanted = CREDIT + 2 * price + self._catch_up * self._idle
        if self._idle >= self._next and self.savings.amount >= self._wanted:
            self._num_probes = 1
        return self._num_probes > 0

    def save(self) -> None:
        """Saves the share of an iteration without a draft."""
        self.savings.save(max(MOST, self._wanted))

    def spend(self, loss: float, tokens: float) -> None:
        """Charges an iteration with a draft, probe or not.

        Args:
            loss: Slower than plain decoding of its tokens by this; below 0 if it was faster.
            tokens: Generated per sequence.
        """
        # The debt is capped, except for probes: their cost was unknown.
        self.savings.spend(loss, math.inf if self._num_probes else MOST)
        self._is_promising = tokens > 1.5
        if self._num_probes == 1:
            self._first_loss = loss
        elif self._num_probes == 2:
            self._catch_up = max(self._first_loss - loss, 0.0) / self._idle


_FIRST_LOOK = 4  # drafting iterations before the very first look, because the first ones warm up
_SELDOM, _OFTEN, _VERY_OFTEN = 256, 64, 4  # drafting iterations between looks: much gain, gain, loss
_MUCH = 1.5  # a gain above this times plain decoding's speed is much
_PUT_OFF, _LONGEST_PUT_OFF = 2, 16  # drafting iterations between two looks of one measurement
_NEW_EVERY = 32  # drafting iterations per look at a number of sequences without a measurement
_FRESH = 16  # iterations for which a look counts
_LEARN_EVERY = 4  # learns from every 4th iteration without a draft
_RECENT = 9  # most looks, and most seconds of drafting iterations, that are kept
_FEW = 3  # fewer drafting iterations do not show the usual seconds
_SMALLEST_DEBT = 4.0  # least cap on the debt when drafting stops, so that drafting can resume
_LONG_REST = 16  # iterations without drafts after which the next draft catches up with many tokens
_LARGEST_CATCH_UP = 10.0  # most iterations of catching up that are charged
_LONGER = 1.25  # clips outliers at 1.25 times the second longest recent iteration of the same kind
_ALIKE = 2.0  # greatest ratio of looks that agree
_FADE = 0.5 ** (1 / 16)  # decay per iteration


class _Sums(NamedTuple):
    """Fading sums over drafting iterations."""

    num: float = 0.0
    tokens: float = 0.0  # per sequence
    seconds: float = 0.0
    draft_s: float = 0.0
    width: float = 0.0
    drafted: float = 0.0  # shares of sequences with a draft
    accepted: float = 0.0  # shares of sequences with an accepted token

    def plus(self, new: _Sums) -> _Sums:
        return _Sums(*(each * _FADE + value for each, value in zip(self, new, strict=True)))


class _Measured:
    """Measured seconds of iterations over one number of sequences, with drafts and without.

    Attributes:
        plain_s: Seconds of an iteration without drafts; None before two looks.
        savings: Budget for drafts that turn out slower than plain decoding.
        owed: Loss of the first draft after a rest, which catches up; charged as soon as the savings allow.
    """

    def __init__(self, credit: float) -> None:
        self.plain_s: float | None = None
        self.savings, self.owed = Savings(credit), 0.0
        self._since_look = 0  # drafting iterations since `plain_s` was measured
        self._held_off, self._patience = 0, _PUT_OFF  # drafts until the next look, and after that look
        self._is_sure = False  # whether the last looks agree
        self._is_half = False  # whether the last look needs a second one
        self._age = 0
        self._looks: deque[tuple[int, float]] = deque(maxlen=_RECENT)  # iteration, seconds
        self._recent: deque[float] = deque(maxlen=_RECENT)  # seconds of drafting iterations
        # The same sums of narrow and of wide passes, split at the mean width.
        self._alike: tuple[deque[float], deque[float]] = deque(maxlen=_RECENT), deque(maxlen=_RECENT)
        self._sums = _Sums()

    @property
    def usual_s(self) -> float | None:
        recent = self._recent
        return (sum(recent) - max(recent)) / (len(recent) - 1) if len(recent) > _FEW else None

    @property
    def gain(self) -> float | None:
        """Returns the speed with drafts divided by the speed without; None before both were measured."""
        plain, usual, sums = self.plain_s, self.usual_s, self._sums
        return None if plain is None or not usual or not sums.num else sums.tokens / sums.num * plain / usual

    def is_look_due(self, *, is_new_allowed: bool) -> bool:
        """Decides whether to measure an iteration without drafts.

        Looks come in pairs, and the faster one counts, because the first pass of a width may be slow. Drafting
        iterations stand between the two, so that one busy moment of the machine does not slow both.
        """
        if self._held_off > 0 or self._is_half:
            return self._held_off <= 0
        gain = self.gain
        if gain is None:
            return is_new_allowed and self._since_look >= _FIRST_LOOK
        seldom = gain > _MUCH and self._is_sure
        return self._since_look >= (_SELDOM if seldom else _OFTEN if gain > 1 else _VERY_OFTEN)

    def put_off(self) -> None:
        self._held_off = self._patience
        self._patience = min(2 * self._patience, _LONGEST_PUT_OFF)

    def look(self, seconds: float) -> None:
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
            self.savings = Savings(ENOUGH)  # earlier drafts were compared with outdated seconds

    def learn_draft(self, record: StepRecord) -> float | None:
        """Learns from an iteration with drafts.

        Returns the loss against plain decoding of its tokens, in plain iterations; None while unknown. While plain
        decoding is measured anew, returns a lower bound of the loss, at least 0.
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
        # One of nine iterations may be an interruption; two long ones are usual.
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
        """Charges the loss of a drafting iteration, and the owed loss as soon as that is possible or necessary."""
        self.savings.spend(loss, max(_SMALLEST_DEBT, self.price(self.usual_s or 0.0)))
        if self.savings.is_spent or self.savings.amount > CREDIT + self.owed:
            self.savings.spend(self.owed, MOST)
            self.owed = 0.0

    def price(self, seconds: float) -> float:
        """Returns the seconds beyond an iteration without drafts, in such iterations."""
        return max(seconds / self.plain_s - 1, 0.0) if self.plain_s else 0.0

    def reason(self) -> Declined:
        num, _, seconds, draft_s, width, drafted, accepted = self._sums
        plain = num * self.plain_s if self.plain_s else seconds - draft_s
        return Declined(
            width=round(width / num), pass_cost=(seconds - draft_s) / plain, draft_cost=draft_s / plain,
            acceptance=accepted / drafted if drafted else None, hit_rate=drafted / num,
        )  # fmt: skip


class MeasuredGain:
    """A controller around another one that stops drafting when plain decoding measures faster.

    Attributes:
        inner: Decides while drafting pays.
    """

    def __init__(self, inner: Controller) -> None:
        self.inner = inner
        self._measured: dict[int, _Measured] = {}  # by the number of sequences
        self._now = _Measured(CREDIT)
        self._new_looks = 2.0  # looks that may be made at numbers of sequences without a measurement
        self._is_delegated = self._is_looking = False
        self._num_declined = 0  # iterations without a draft that did not measure plain decoding
        self._num_rested = 0  # iterations since the last draft
        self._declining: Allotment | None = None  # since drafting stopped

    def plain_seconds(self, batch_size: int) -> float | None:
        """Returns the measured seconds of an iteration without drafts for a batch size; None if not measured."""
        measured = self._measured.get(batch_size)
        return None if measured is None else measured.plain_s

    def allot(self, batch_size: int) -> Allotment:
        """Returns the inner controller's allotment, or no drafts: to measure plain decoding, or as drafts lose."""
        now = self._measured.get(batch_size)
        if now is None:  # other numbers of sequences get the savings that follow a rest
            now = self._measured[batch_size] = _Measured(ENOUGH if self._measured else CREDIT)
        self._now, self._is_delegated, self._is_looking = now, False, False
        if now.savings.is_spent:
            return self._decline(batch_size)
        self._declining = None
        is_new_allowed = self._new_looks >= 1 or any(each.savings.is_spent for each in self._measured.values())
        if now.is_look_due(is_new_allowed=is_new_allowed):
            now.put_off()
            self._is_looking = True
            return Allotment.nothing(batch_size)
        self._is_delegated = True
        return self.inner.allot(batch_size)

    def further(self, trees: Mapping[int, TokenTree]) -> Ask | None:
        """Returns the inner controller's answer."""
        return self.inner.further(trees)

    def select(self, trees: Mapping[int, TokenTree], continued: Continue | None = None) -> TokenTree:
        """Returns the inner controller's choice."""
        return self.inner.select(trees, continued)

    def learn_step(self, record: StepRecord) -> None:
        """Learns the seconds of the iteration, and tells the inner controller of iterations that it decided."""
        now, num_rested = self._now, self._num_rested
        self._num_rested = 0 if record.asked else num_rested + 1
        if self._is_delegated:
            self.inner.learn_step(record)
        if not self._is_looking and not record.asked:
            now.savings.save()
            self._num_declined += 1
            if self._num_declined % _LEARN_EVERY:  # every n-th is enough to learn from
                return
        if record.num_prompt_tokens or now is not self._measured.get(len(record.sequences)):
            return  # the pass also read prompts
        if not record.asked:
            if self._is_looking and now.plain_s is None:
                self._new_looks -= 1
            now.look(record.seconds.total)
        elif num_rested >= _LONG_REST:  # the draft catches up: slower than later drafts, no reason to stop at once
            now.owed = min(now.price(record.seconds.total), _LARGEST_CATCH_UP)
        else:
            self._new_looks = min(self._new_looks + 1 / _NEW_EVERY, 2.0)
            loss = now.learn_draft(record)
            if loss is not None:
                now.spend(loss)

    def _decline(self, batch_size: int) -> Allotment:
        known = self._declining
        if known is None or len(known.allowances) != batch_size:
            known = self._declining = Allotment.nothing(batch_size, self._now.reason())
        return known
