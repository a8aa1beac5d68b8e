"""A matrix of successors: which tokens were last seen as the most probable ones after each token.

Source: Luo et al. 2024, "Token Recycling" (arXiv 2408.08696), the adjacency matrix of section 3.1.

Letters: V vocabulary, W successors of a token, N nodes of a tree, M tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray


class SuccessorMatrix:
    """(V, W) token ids, the most probable first. Takes V * W * 4 bytes at most; pages never written to take none."""

    def __init__(self, vocab_size: int, width: int) -> None:
        """A matrix that knows no successors.

        Args:
            vocab_size: V.
            width: W.
        """
        # Every id is stored one greater, and so are the places of rows: 0 is an unknown token, as are its successors.
        self._rows: NDArray[np.int32] = np.zeros((vocab_size + 1, width), dtype=np.int32)

    def update(self, tokens: NDArray[np.int64], successors: NDArray[np.int64]) -> None:
        """Replaces the successors of some tokens; of a token that stands twice, the last ones stay.

        Args:
            tokens: (M,), each below V.
            successors: (M, at most W), the most probable first.
        """
        self._rows[tokens + 1, : successors.shape[1]] = successors + 1

    def of(self, token: int) -> list[int]:
        """The W successors of a token, -1 where none is known."""
        ids: list[int] = (self._rows[token + 1] - 1).tolist()
        return ids

    def fill(
        self, root: int, parents: NDArray[np.int64], ranks: NDArray[np.int64], levels: Sequence[slice]
    ) -> NDArray[np.int64]:
        """The tokens of a tree in which every node holds the successor of its parent's token with the node's rank.

        Args:
            root: Token of node 0.
            parents: (N,), in level order; the root's is not read.
            ranks: (N,), each below W.
            levels: The nodes of each depth below the root.

        Returns:
            (N,), -1 where no successor is known, and below such nodes.
        """
        ids = np.empty(len(parents), dtype=np.int64)
        ids[0] = root + 1
        for level in levels:
            ids[level] = self._rows[ids[parents[level]], ranks[level]]
        return ids - 1
