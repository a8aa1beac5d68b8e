"""Decides when to try a choice that is not expected to pay, and bounds what such trials may lose."""

from __future__ import annotations

SHARE = 0.01  # share of the iterations that may be lost to exploration and to wrong estimates
CREDIT = 4.0  # iterations without drafts that drafts may lose besides
_MOST = 12.0  # the account stops growing here: what earlier drafts gained does not pay for a long loss
_ENOUGH = 1.0  # with which drafting resumes after the account was empty
GAP = 32  # least iterations between two explorations


class Account:
    """What may still be lost: `CREDIT` at first, and `SHARE` of all iterations. Losses are in plain iterations.

    Attributes:
        amount: What may still be lost.
        is_spent: Whether the account is empty, or was emptied and has not been refilled.
    """

    def __init__(self) -> None:
        self.amount, self.is_spent = CREDIT, False

    def charge(self, loss: float) -> None:
        """Charges an iteration: slower than plain decoding of its tokens by `loss`, below 0 if it was faster."""
        self.amount = min(self.amount + SHARE - loss, _MOST)
        self.is_spent = self.amount < (_ENOUGH if self.is_spent else 0.0)


class Exploration:
    """Decides when to do what is not expected to pay, in order to measure it; and stops drafts that lose.

    The rule: a choice is tried again when its expected loss is at most `SHARE` of the iterations since it was last
    tried. Losses are in iterations of plain decoding.

    The bound: all drafts together lose at most `CREDIT`, one iteration's loss, and `SHARE` of all iterations. The bound
    holds for any expected acceptance, because the account counts measured seconds. An interrupted iteration counts at
    most `costs.LONGEST` times its expected seconds. While the account is empty, no drafter is asked.

    What drafters read before they draft is charged to an account of its own, besides what the drafts of such drafters
    lose. While that one is empty, no drafter reads a text; those that have read it go on.

    Attributes:
        count: Iterations.
        next_try: First iteration in which a refused choice can be due.
        drafts: The account of drafts.
        reading: The account of drafts and of what they read first.
    """

    def __init__(self) -> None:
        self.drafts, self.reading, self._has_gained = Account(), Account(), False
        self.count, self.next_try = 0, 0
        self._tried: dict[object, tuple[int, int]] = {}  # by choice: iteration, and times in a row

    def next(self) -> None:
        """Begins an iteration."""
        self.count += 1
        self.next_try = self.count + GAP

    def note(self, choice: object) -> None:
        """Notes that a choice is made anyway."""
        self._tried[choice] = self.count, 0

    def is_due(self, choice: object, loss: float, *, goes_on: bool = True) -> bool:
        """Decides whether to try a choice in this iteration, for an expected loss.

        Two tries follow each other. With `goes_on` more follow while drafts gain.
        """
        last, num = self._tried.setdefault(choice, (self.count - 1, 0))
        since = self.count - last
        if (since <= 2 and num == 1) or (goes_on and since == 1 and num > 1 and self._has_gained):
            self._tried[choice] = self.count, num + 1
            return True
        if since < GAP or SHARE * since < 2 * loss:
            self.next_try = min(self.next_try, last + max(GAP, int(2 * loss / SHARE)))
            return False
        self._tried[choice] = self.count, 1
        return True

    def may_lose(self, loss: float) -> bool:
        """Decides whether a small loss leaves half of the first credit for other reasons."""
        return loss <= CREDIT / 8 and self.drafts.amount - loss > CREDIT / 2

    def is_beginning(self, choice: object) -> bool:
        """Whether the choice is tried for the first time after a rest."""
        return self._tried.get(choice) == (self.count, 1)

    def charge(self, loss: float, reading: float = 0.0) -> None:
        """Charges an iteration.

        Args:
            loss: Plain iterations by which it was slower than plain decoding of its tokens; below 0 if it was faster.
            reading: The same of drafters that read, with its share of what they read.
        """
        self._has_gained = loss < 0
        self.drafts.charge(loss)
        self.reading.charge(reading)
