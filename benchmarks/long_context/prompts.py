"""Prompts of a given length that share all but their last tokens, so that a batch reads one of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Tokens that a prompt does not share. With the token before them they are the 32 that SnapKV observes, and those of
# 16 prompts are one pass of 512 prompt tokens, so that a batch begins to decode at once.
TAIL = 31


def prompts_of(texts: Sequence[Sequence[int]], length: int, number: int) -> list[list[int]]:
    """Returns different prompts of `length` tokens that share all but their last `TAIL` tokens.

    The shared tokens are the last ones of the first texts, joined. The first prompts end as these texts do: they ask
    again what the texts ask. Further prompts end as other texts do, then with tokens further back in other texts.

    Args:
        texts: Token ids of long prompts.

    Raises:
        RequestError: When all texts together are too short.
    """
    shared: list[int] = []
    used = 0
    while len(shared) < length - TAIL and used < len(texts):
        shared += texts[used]
        used += 1
    found = list(dict.fromkeys(_tails(texts[:used], texts[used:])))[:number]
    if len(shared) < length - TAIL or length <= TAIL or len(found) < number:
        raise RequestError(
            f"the prompts hold {sum(map(len, texts))} tokens, from which {number} prompts of {length} tokens cannot be "
            f"made. Expected more tokens, and prompts longer than {TAIL} tokens. Give fewer rows or longer prompts."
        )
    return [[*shared[len(shared) - (length - TAIL) :], *tail] for tail in found]


def _tails(shared: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    yield from (tuple(text[-TAIL:]) for text in reversed(shared))
    for back in range(max(map(len, others), default=0) // TAIL):
        for text in others:
            end = len(text) - TAIL * back
            if end >= TAIL:
                yield tuple(text[end - TAIL : end])
