"""The window of lookahead decoding: guesses of the text ahead, improved by the target's own answers (Jacobi steps).

For W = 3 columns and n-grams of N = 4 tokens, a full window has N - 1 rows (the levels of the paper's code)::

    row 0    root ── a1 ─── a2        a chain: the guesses of 1 and 2 positions after the root
              │      │      │
    row 1     b0     b1     b2        b1 was the target's answer after a1, one iteration ago
              │      │      │
    row 2     c0     c1     c2        c1 was its answer after b1 in the last one

The node of row l in column j stands j + l positions after the root and sees the root, the columns before it in row 0,
and its own column above it: it is a tree, of W (N - 1) nodes. The target's answers d0, d1, d2 below the last row make
the n-grams (root: b0 c0 d0), (a1: b1 c1 d1), … of the pool, and every column moves up by one: its answer enters at the
bottom and its top leaves, which in column 0 is the root's place.

The window starts with row 0 alone, W + N - 3 guesses wide besides the root, and takes N - 2 iterations to fill; in each
of them it gains a row and loses column 0.

What an answer that did not come leaves behind: a column of a full window stays as it is, and goes on when an answer
comes; in a window that is filling, its new row holds a token of the prompt, as row 0 did; and where no column has an
answer, as where nothing was proposed, the whole window stays.

Source: Fu et al. 2024, "Lookahead Decoding" (arXiv 2402.02057), and the code of its authors (LADE).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Mapping, Sequence

    from foretoken.core.token_tree import TreeRow
    from foretoken.trees.merge import Trie


class Ngram(NamedTuple):
    """Tokens that the window expects after a token."""

    key: int
    tokens: tuple[int, ...]


def most_nodes(width: int, ngram: int) -> int:
    """Nodes of a window, root included, when it is largest: full, or while it fills where it is narrow."""
    return max(rows * (width + ngram - 1 - rows) for rows in range(1, ngram))


class Answers:
    """The target's most probable token after every path of a verified tree.

    Equal paths have equal answers, so it does not matter whose node is looked at, nor what a tree was merged with.
    """

    def __init__(self, row: TreeRow, answers: Sequence[int]) -> None:
        """Reads a tree.

        Args:
            row: The tree; a node without a parent, as one that was cut off, is left out with all below it.
            answers: The target's most probable token after each node.
        """
        self._children: dict[tuple[int, int], int] = {}
        self._answers = answers
        first: dict[int, int] = {0: 0}  # of the nodes with the same path
        for node in range(1, len(row.tokens)):
            parent = first.get(row.parents[node])
            if parent is not None:
                first[node] = self._children.setdefault((parent, row.tokens[node]), node)

    def below(self, node: int, tokens: Sequence[int]) -> int | None:
        """The node that some tokens lead to from a node; None where that was not verified."""
        children: Mapping[tuple[int, int], int] = self._children
        for token in tokens:
            found = children.get((node, token))
            if found is None:
                return None
            node = found
        return node

    def at(self, node: int) -> int:
        """The answer after a node."""
        return self._answers[node]


class Window:
    """The window of one sequence.

    Attributes:
        columns: Tokens of each column by row, as many in each; the first of column 0 stands in the root's place.
    """

    def __init__(self, width: int, ngram: int, *, prompt: Sequence[int], unwanted: Container[int], seed: int) -> None:
        """A window that guesses tokens of the prompt.

        Args:
            width: W.
            ngram: N.
            prompt: Where guesses come from that the target did not make.
            unwanted: Tokens that end a text, which the window does not hold unless the prompt has no others.
            seed: Chooses them.
        """
        self._num_rows = ngram - 1
        self._unwanted, self._random = unwanted, random.Random(seed)
        self._spare = [token for token in prompt if token not in unwanted] or list(prompt) or [0]
        self.columns = [[self._random.choice(self._spare)] for _ in range(width + ngram - 2)]

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree that the window is, root included."""
        return len(self.columns) * len(self.columns[0])

    def add_to(self, trie: Trie, *, max_depth: int, max_nodes: int) -> None:
        """Adds the window below a root: as many columns, from the first on, as fit as a whole.

        Args:
            trie: Where to.
            max_depth: How deep nodes may lie.
            max_nodes: Most nodes of the trie.
        """
        top, num_rows = 0, len(self.columns[0])
        for index, column in enumerate(self.columns):
            if index + num_rows - 1 > max_depth or len(trie.tokens) + num_rows - (index == 0) > max_nodes:
                return
            top = node = trie.add(top, column[0]) if index else 0
            for token in column[1:]:
                node = trie.add(node, token)

    def learn(self, root: int, answers: Answers) -> list[Ngram]:
        """Moves on by the target's answers.

        Args:
            root: The root's token.
            answers: Of the tree that was verified.

        Returns:
            The n-grams that full columns with an answer gave, from the first column on.
        """
        found = self._answers(answers)
        if len(self.columns[0]) < self._num_rows:
            if any(answer is not None for answer in found[1:]):
                self.columns = [
                    [*column, self._guess(answer)] for column, answer in zip(self.columns[1:], found[1:], strict=True)
                ]
            return []
        ngrams = []
        for index, answer in enumerate(found):
            if answer is not None:
                top, *others = self.columns[index]
                ngrams.append(Ngram(top if index else root, (*others, answer)))
                self.columns[index] = [*others, self._guess(answer)]
        return ngrams

    def _answers(self, answers: Answers) -> list[int | None]:
        """The target's answer below the last row of each column; None where it was not verified."""
        found: list[int | None] = []
        top: int | None = 0
        for index, column in enumerate(self.columns):
            if index and top is not None:
                top = answers.below(top, column[:1])
            last = None if top is None else answers.below(top, column[1:])
            found.append(None if last is None else answers.at(last))
        return found

    def _guess(self, answer: int | None) -> int:
        """An answer, or a token of the prompt where there is none or it would end the text."""
        return self._random.choice(self._spare) if answer is None or answer in self._unwanted else answer
