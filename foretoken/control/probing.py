"""When to try again what did not pay: often at first, then less and less often."""

_FIRST, _LAST = 32, 512  # iterations without


class ProbeSchedule:
    """Counts iterations in which nothing is drafted, and says when to draft nevertheless, to learn from it."""

    def __init__(self) -> None:
        self._idle, self._next = 0, _FIRST

    @property
    def num_idle(self) -> int:
        """Iterations since something was drafted because it pays; 0 in such a one."""
        return self._idle

    def reset(self) -> None:
        """Drafting pays."""
        self._idle, self._next = 0, _FIRST

    def advance(self) -> bool:
        """Drafting does not pay; whether to draft in this iteration nevertheless."""
        self._idle += 1
        if self._idle > self._next + 1:  # in vain
            self._idle, self._next = 1, min(2 * self._next, _LAST)
        # Two in a row: the first catches up with what it missed, the second shows what a draft costs.
        return self._idle >= self._next
