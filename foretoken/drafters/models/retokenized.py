"""One text in the tokens of a target and of a draft model: what is committed goes one way, what is drafted the other.

Neither direction encodes a whole text anew: a few tokens before what is new are enough, as tokenizers look no further
than a word. What comes out spells the same bytes in any case.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from foretoken.drafters.models.vocab_map import shared_specials

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.models.token_bytes import Piece, Vocabulary

_LOOK_BEHIND = 12  # tokens before what is new that are encoded along with it


class Node(NamedTuple):
    """A token of the target that a draft's text gives.

    Attributes:
        token: Its id.
        num_drafted: Tokens of the draft that it takes.
    """

    token: int
    num_drafted: int


class Retokenizer:
    """Two vocabularies and what goes between them."""

    def __init__(self, target: Vocabulary, draft: Vocabulary) -> None:
        """Compares the special tokens of both."""
        self.target, self.draft = target, draft
        self.specials = shared_specials(target, draft)
        self._back = {theirs: ours for ours, theirs in self.specials.items()}

    def chain(self, committed: Sequence[int], drafted: Sequence[int]) -> list[Node]:
        """The target's tokens for what a draft model wrote.

        The last one is left out where the text may go on inside of it, unless it is the only one.

        Args:
            committed: The target's tokens.
            drafted: The draft model's tokens behind them.
        """
        data, end = b"", None
        ends: list[int] = []
        for token in drafted:
            spelling = self.draft.spellings[token]
            if spelling is None:
                end = self._back.get(token)
                break
            data += spelling
            ends.append(len(data))
        nodes: list[Node] = []
        position = num_drafted = 0
        data = _whole_characters(data) if end is None else data
        for token, part in self._behind(committed, data):
            if self.target.spellings[token] != part:
                return nodes  # bytes that the target has no token for
            position += len(part)
            while ends[num_drafted] < position:
                num_drafted += 1
            nodes.append(Node(token, num_drafted + 1))
        if end is not None and position == len(data):
            return [*nodes, Node(end, len(ends) + 1)]
        return nodes[:-1] if len(nodes) > 1 and _may_go_on(data) else nodes

    def _behind(self, committed: Sequence[int], data: bytes) -> list[Piece]:
        """The target's tokens for text behind committed tokens, which stay as they are."""
        before = b""
        for token in reversed(committed[-_LOOK_BEHIND:]):
            spelling = self.target.spellings[token] if token < len(self.target.spellings) else None
            if spelling is None:
                break
            before = spelling + before
        pieces, position = self.target.encode(before + data), 0
        for index, piece in enumerate(pieces):
            if position >= len(before):
                return pieces[index:] if position == len(before) else self.target.encode(data)
            position += len(piece.data)
        return self.target.encode(data) if position > len(before) else []


class DraftText:
    """A growing sequence of the target's tokens as the draft model reads it.

    Attributes:
        ids: The draft model's ids of what was read; at least one of them then.
    """

    def __init__(self, retokenizer: Retokenizer) -> None:
        """Nothing is read yet."""
        self._retokenizer = retokenizer
        self.ids: list[int] = []
        self._parts: list[bytes | None] = []  # bytes of each id; None for special tokens
        self._num_read = 0

    def read(self, tokens: Sequence[int]) -> int:
        """Reads what is new of a sequence; gives how many of the earlier ids stay as they were.

        Args:
            tokens: The target's, which continue those of the last call.
        """
        if self._num_read > len(tokens):
            self.ids, self._parts, self._num_read = [], [], 0
        if self._num_read == len(tokens):
            return len(self.ids)
        target, draft = self._retokenizer.target, self._retokenizer.draft
        start = self._window()
        earlier, data = self.ids[start:], b"".join(part or b"" for part in self._parts[start:])
        new: list[tuple[int, bytes | None]] = []
        for token in tokens[self._num_read :]:
            spelling = target.spellings[token] if token < len(target.spellings) else None
            if spelling is None:
                new += draft.encode(data)
                data = b""
                new.append((self._retokenizer.specials.get(token, draft.stand_in), None))
            else:
                data += spelling
        new += draft.encode(data)
        del self.ids[start:], self._parts[start:]
        self.ids += (token for token, _ in new or [(draft.stand_in, None)])
        self._parts += (part for _, part in new or [(draft.stand_in, None)])
        self._num_read = len(tokens)
        pairs = enumerate(zip(earlier, self.ids[start:], strict=False), start)
        return next((i for i, (old, now) in pairs if old != now), min(start + len(earlier), len(self.ids)))

    def _window(self) -> int:
        """The first of the ids that are encoded anew along with what follows; no special token is among them."""
        start = len(self._parts)
        while start and len(self._parts) - start < _LOOK_BEHIND and self._parts[start - 1] is not None:
            start -= 1
        return start


def _whole_characters(data: bytes) -> bytes:
    """Bytes without those of a character that is not over at their end."""
    for back in range(1, min(3, len(data)) + 1):
        lead = data[-back]
        if lead >= 0xC0:
            length = 2 + (lead >= 0xE0) + (lead >= 0xF0)
            return data[:-back] if back < length else data
        if lead < 0x80:
            break
    return data


def _may_go_on(data: bytes) -> bool:
    """Whether a text may end within a word: it ends in a letter, a digit or a part of a character."""
    return data[-1:].isalnum() or data[-1:] >= b"\x80"
