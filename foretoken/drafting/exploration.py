"""What the controller may lose: trials of choices that are not expected to pay, and reading before a draft.

Drafters with KV rows read what they missed of a text before they draft. That is paid off over the text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from foretoken.drafters.base import DraftContext, DraftRequest

SHARE = 0.01  # share of the iterations that may be lost to exploration and to wrong estimates
CREDIT = 4.0  # iterations without drafts that drafts may lose besides
_MOST = 12.0  # the account stops growing here: what earlier drafts gained does not pay for a long loss
_ENOUGH = 1.0  # with which drafting resumes after the account was empty
GAP = 32  # least iterations between two explorations
# Tokens of an output before any has ended, and weight of one that ends among those before; choices.
_USUAL_LEN, _LEN_RATE = 256.0, 0.1
_COPY_FADE = 0.99  # decay per token of the share of copied tokens; a choice: about the length of a text


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
        """Charges the `loss` of an iteration, see `Account.charge`; `reading`: also of what drafters read."""
        self._has_gained = loss < 0
        self.drafts.charge(loss)
        self.reading.charge(reading)


class Unread(NamedTuple):
    """Tokens that each drafter missed of the texts of a batch, and expected tokens that these still get, 1 or more."""

    missed: Mapping[int, int]
    remaining: float


class Reading:
    """Charges what drafters read to the tokens that are still to come, for it is read once for all of them.

    Tokens that lookups copy gain nothing from a drafter that had to read the text, and do not count.

    Attributes:
        unread: What drafters would have to read now.
        owed_s: Seconds in which drafters read, not charged yet.
    """

    def __init__(self) -> None:
        self.unread, self.owed_s = Unread({}, 1.0), 0.0
        self._copied = 0.0  # share of the tokens, fading

    def share(self, tokens: float) -> float:
        """Returns the share of some tokens in those that are still to come and not copied."""
        return tokens / max(self.unread.remaining * (1 - self._copied), tokens, 1.0)

    def pay(self, tokens: float) -> float:
        """Returns the seconds that are charged to some tokens, and owes them no longer."""
        paid_s = self.owed_s * self.share(tokens)
        self.owed_s -= paid_s
        return paid_s

    def saw(self, tokens: float, *, are_copied: bool) -> None:
        """Counts generated tokens of a sequence; `are_copied`: whether lookups alone drafted them."""
        self._copied += (1 - _COPY_FADE**tokens) * (are_copied - self._copied)


class _Text(NamedTuple):
    """A sequence: tokens of its prompt, and most tokens of its output."""

    prompt_len: int
    most: float


class Followed:
    """How far each drafter has followed the sequences, and how long these are."""

    def __init__(self) -> None:
        self._next: dict[tuple[int, int], int] = {}  # by drafter and slot: tokens that it has followed
        self._texts: dict[int, _Text] = {}
        self._lengths: dict[int, int] = {}  # by slot, of outputs
        self._usual = _USUAL_LEN

    @property
    def num_texts(self) -> int:
        """Sequences that have begun and not ended."""
        return len(self._texts)

    def missed(self, drafter: int, context: DraftContext, depth: int) -> int:
        """Returns the tokens of all sequences that a drafter missed; it is asked now, for `depth` levels."""
        missed = 0
        for slot, tokens in zip(context.slots, context.tokens, strict=True):
            missed += max(len(tokens) - self._next.get((drafter, slot), 0), 0)
            self._next[drafter, slot] = len(tokens) + depth + 1
        return missed

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts a sequence; drafters keep what they followed of a prefix."""
        self.release(slot)
        prefix, known = request.prefix, list(self._next.items())
        self._next = {key: length for key, length in known if key[1] != slot}
        if prefix is not None:
            kept = {(i, slot): min(length, prefix.length) for (i, source), length in known if source == prefix.slot}
            self._next |= kept
        self._texts[slot] = _Text(len(request.prompt), request.params.max_tokens or math.inf)

    def release(self, slot: int) -> float:
        """Ends a sequence, and learns how long outputs are; returns how many more tokens were expected of it."""
        text, length = self._texts.pop(slot, None), self._lengths.pop(slot, 0)
        if text is None or not length:
            return 0.0
        more = self._expected(text, length)
        self._usual += _LEN_RATE * (length - self._usual)
        return more

    def _expected(self, text: _Text, length: int) -> float:
        """Returns the tokens that an output still gets, at least one."""
        return max(min(text.most - length, max(self._usual - length, length)), 1.0)

    def unread(self, context: DraftContext, num_drafters: int) -> Unread:
        """Returns what drafters would have to read. An output goes on for as long as it did, or to the usual length."""
        missed, remaining = dict.fromkeys(range(num_drafters), 0), 0.0
        for slot, tokens in zip(context.slots, context.tokens, strict=True):
            for i in missed:
                missed[i] += max(len(tokens) - self._next.get((i, slot), 0), 0)
            text = self._texts.get(slot, _Text(len(tokens), math.inf))
            length = self._lengths[slot] = len(tokens) - text.prompt_len
            remaining += self._expected(text, length)
        return Unread(missed, remaining)
