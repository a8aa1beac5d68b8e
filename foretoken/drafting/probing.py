"""Decides when to try drafts again that did not pay. All amounts are in iterations of plain decoding."""

import math

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

    @property
    def is_near(self) -> bool:
        """Whether the next iteration may be a probe."""
        return self._num_probes > 0 or (
            self._idle + 1 >= self._next and self.savings.amount + 2 * SHARE >= self._wanted
        )

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
