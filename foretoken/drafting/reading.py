"""What drafters read before they draft: how much they missed, and how it is paid off over the text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.drafters.base import DraftContext, DraftRequest

# Tokens of an output before any has ended, and weight of one that ends among those before; choices.
_USUAL_LEN, _LEN_RATE = 256.0, 0.1
_COPY_FADE = 0.99  # of the share of copied tokens, a token; a choice: about a text


class Unread(NamedTuple):
    """What drafters missed of the texts of a batch.

    Attributes:
        missed: Tokens by drafter, all sequences together.
        remaining: Expected tokens that the sequences still get, at least one.
    """

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
        """Counts tokens of a sequence, which came while lookups drafted alone or not."""
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
