"""What drafting may lose against plain decoding, and when to try again what did not pay.

Drafts that turn out slower than plain decoding are paid for out of savings: a small credit to begin with, a small share
of all iterations without drafts, and what faster ones gained. So the loss over a whole run is bounded, whatever drafts
cost and however often they are judged wrongly. All amounts are in iterations of plain decoding.
"""

_FIRST, _LAST = 32, 512  # iterations between two probes, at least
_SHARE = 0.01  # of an iteration without drafts, which drafts may lose
_CREDIT = 8.0  # iterations that drafts that are expected to pay may lose at the beginning
_ENOUGH = 2.0  # savings with which drafting goes on after they were spent
_STAKE = 0.5  # of the savings, for one draft
_MOST = 20.0  # savings beyond which nothing is added, but for dear probes
WEIGHT_AT_PROBE = 8.0  # drafts that all earlier ones count as when probes begin: they are old


class ProbeSchedule:
    """Keeps account of what drafting lost, and says when to draft although it does not pay, to learn from it."""

    def __init__(self) -> None:
        self._idle, self._next = 0, _FIRST
        self._num_probes = 0  # in a row, up to this iteration
        self._is_promising = False  # whether the last probe's draft was accepted
        self._saved = _CREDIT  # below 0 a debt
        self._is_spent = False
        self._wanted = _CREDIT  # savings with which probes begin
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
    def is_spent(self) -> bool:
        """Whether drafts lost more than was saved: they do not pay, whatever is expected of them."""
        return self._is_spent

    @property
    def saved(self) -> float:
        """What drafts may still lose; below 0 a debt."""
        return self._saved

    @property
    def stake(self) -> float:
        """The most that one draft should be able to lose, so that a few bad ones in a row do not end drafting."""
        return _STAKE * self._saved

    @property
    def is_near(self) -> bool:
        """Whether the next iteration may be a probe."""
        return self._num_probes > 0 or (self._idle + 1 >= self._next and self._saved + 2 * _SHARE >= self._wanted)

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
        if self._num_probes == 1 or (self._num_probes and self._is_promising and self._saved >= _CREDIT + price):
            self._num_probes += 1
            return True
        if self._num_probes:  # in vain
            self._idle, self._next, self._num_probes = 0, min(2 * self._next, _LAST), 0
        self._idle += 1
        self._wanted = _CREDIT + 2 * price + self._catch_up * self._idle
        if self._idle >= self._next and self._saved >= self._wanted:
            self._num_probes = 1
        return self._num_probes > 0

    def save(self) -> None:
        """An iteration without a draft is over."""
        self._change(_SHARE, most=max(_MOST, self._wanted))

    def spend(self, loss: float, tokens: float) -> None:
        """An iteration with a draft is over, be it a probe.

        Args:
            loss: By how much it was slower than plain decoding of its tokens; below 0 where it was faster.
            tokens: It generated, for each sequence.
        """
        if not self._num_probes:
            loss = min(loss, self._saved + _MOST)  # nobody knew what it takes: the debt is limited
        self._change(-loss, most=_MOST)
        self._is_promising = tokens > 1.5
        if self._num_probes == 1:
            self._first_loss = loss
        elif self._num_probes == 2:
            self._catch_up = max(self._first_loss - loss, 0.0) / self._idle

    def _change(self, amount: float, *, most: float) -> None:
        """Adds to the savings, which stay below `most` where they are."""
        self._saved = min(self._saved + amount, max(self._saved, most))
        self._is_spent = self._saved < (_ENOUGH if self._is_spent else 0.0)
