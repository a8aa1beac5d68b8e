"""When to try again drafts that did not pay. All amounts are in iterations of plain decoding, see `savings`."""

import math

SHARE = 0.01  # of an iteration without drafts, which drafts may lose
CREDIT = 8.0  # iterations that drafts that are expected to pay may lose at the beginning
MOST = 20.0  # savings beyond which nothing is added, unless a caller needs more
ENOUGH = 2.0  # savings with which drafting goes on after they were spent
_STAKE = 0.5  # of the savings, for one draft


class Savings:
    """An account.

    Attributes:
        amount: What drafts may still lose; below 0 a debt.
        is_spent: Whether drafts lost more than was saved, and not enough was saved since: they do not pay, whatever is
            expected of them.
    """

    def __init__(self, credit: float = CREDIT) -> None:
        """What may be lost to begin with."""
        self.amount, self.is_spent = credit, False

    @property
    def stake(self) -> float:
        """The most that one draft should be able to lose, so that a few bad ones in a row do not end drafting."""
        return _STAKE * self.amount

    def save(self, most: float = MOST) -> None:
        """An iteration without a draft is over; most: beyond which nothing is added."""
        self._change(SHARE, most)

    def spend(self, loss: float, largest_debt: float) -> None:
        """An iteration with a draft is over.

        Args:
            loss: By how much it was slower than plain decoding of its tokens; below 0 where it was faster.
            largest_debt: That it leaves; what it exceeds it by is forgotten.
        """
        self._change(-min(loss, max(self.amount + largest_debt, 0.0)), MOST)

    def _change(self, amount: float, most: float) -> None:
        """Adds to the savings, which stay above `most` where they are."""
        self.amount = min(self.amount + amount, max(self.amount, most))
        self.is_spent = self.amount < (ENOUGH if self.is_spent else 0.0)


_FIRST, _LAST = 32, 512  # iterations between two probes, at least
WEIGHT_AT_PROBE = 8.0  # drafts that all earlier ones count as when probes begin: they are old


class ProbeSchedule:
    """Says when to draft although it does not pay, to learn from it, as far as savings allow.

    Attributes:
        savings: What drafts may lose.
    """

    def __init__(self) -> None:
        """Drafting pays until somebody asks whether to probe."""
        self.savings = Savings()
        self._idle, self._next = 0, _FIRST
        self._num_probes = 0  # in a row, up to this iteration
        self._is_promising = False  # whether the last probe's draft was accepted
        self._wanted = CREDIT  # savings with which probes begin
        self._first_loss = 0.0  # of the first of the last probes
        self._catch_up = 0.0  # by which the first one is dearer, for each iteration that it catches up with

    @property
    def num_idle(self) -> int:
        """Iterations since drafting last paid or the last probes were over; 0 while it pays."""
        return self._idle

    @property
    def is_beginning(self) -> bool:
        """Whether this iteration is the first of some probes."""
        return self._num_probes == 1

    @property
    def is_near(self) -> bool:
        """Whether the next iteration may be a probe."""
        return self._num_probes > 0 or (
            self._idle + 1 >= self._next and self.savings.amount + 2 * SHARE >= self._wanted
        )

    def reset(self) -> None:
        """Drafting pays."""
        self._idle, self._next, self._num_probes = 0, _FIRST, 0

    def advance(self, price: float) -> bool:
        """Drafting does not pay; whether to draft in this iteration nevertheless.

        Args:
            price: What a draft is expected to add to an iteration, once it has caught up.
        """
        # Two in a row: the first catches up with what it missed, the second shows what a draft costs. Further ones as
        # long as drafts are accepted, so that a change is believed soon.
        if self._num_probes == 1 or (self._num_probes and self._is_promising and self.savings.amount >= CREDIT + price):
            self._num_probes += 1
            return True
        if self._num_probes:  # in vain
            self._idle, self._next, self._num_probes = 0, min(2 * self._next, _LAST), 0
        self._idle += 1
        self._wanted = CREDIT + 2 * price + self._catch_up * self._idle
        if self._idle >= self._next and self.savings.amount >= self._wanted:
            self._num_probes = 1
        return self._num_probes > 0

    def save(self) -> None:
        """An iteration without a draft is over."""
        self.savings.save(max(MOST, self._wanted))

    def spend(self, loss: float, tokens: float) -> None:
        """An iteration with a draft is over, be it a probe.

        Args:
            loss: By how much it was slower than plain decoding of its tokens; below 0 where it was faster.
            tokens: It generated, for each sequence.
        """
        # The debt is limited but for probes: nobody knew what it takes.
        self.savings.spend(loss, math.inf if self._num_probes else MOST)
        self._is_promising = tokens > 1.5
        if self._num_probes == 1:
            self._first_loss = loss
        elif self._num_probes == 2:
            self._catch_up = max(self._first_loss - loss, 0.0) / self._idle
