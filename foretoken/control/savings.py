"""What drafting may lose against plain decoding.

Drafts that turn out slower than plain decoding are paid for out of savings: a small credit to begin with, a small share
of all iterations without drafts, and what faster drafts gained. So the loss over a whole run is bounded, whatever
drafts are expected to bring, as far as it is known and no debt is forgotten (`largest_debt`). All amounts are in
iterations of plain decoding.
"""

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
