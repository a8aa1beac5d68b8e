"""Grammars on token trees: which tokens may follow a text, where it may end, and which tokens are forced.

If only one continuation is possible, its tokens are those of the tokenizer's split. A state belongs to one text and
never changes; one more token gives another state. The nodes of a tree thus share the states of the paths that they
share, however often acceptance, drafts and traces ask for a state.

A matcher of llguidance parses. This file calls its methods and does not import llguidance.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.sampling.batch import NodeView


class Ends(NamedTuple):
    """Tokens that may end a text; `unwanted` are impossible while the text can continue."""

    token_ids: Sequence[int]
    unwanted: Sequence[int] = ()


class GrammarState:
    """The grammar's state after one text."""

    def __init__(self, matcher: Any, *, vocab_size: int, ends: Ends) -> None:
        """Takes a matcher, which nobody else may advance from now on."""
        self._matcher, self._vocab_size, self._ends = matcher, vocab_size, ends
        self._after: dict[int, GrammarState | None] = {}

    def after(self, token: int) -> GrammarState | None:
        """Returns the state after one more token; None if the token is impossible."""
        if token not in self._after:
            self._after[token] = self._next(token)
        return self._after[token]

    def after_all(self, tokens: Sequence[int]) -> GrammarState | None:
        """Returns the state after some tokens, up to the first negative (padding); None if a token is impossible."""
        state: GrammarState | None = self
        for token in tokens:
            if token < 0 or state is None:
                break
            state = state.after(token)
        return state

    @cached_property
    def allowed(self) -> Tensor:
        """(V,) bool on the CPU, the tokens that may follow."""
        allowed = self._possible.copy()
        if not self.is_over:
            allowed[list(self._ends.unwanted)] = False
        return torch.from_numpy(allowed)

    @cached_property
    def forced(self) -> list[int]:
        """Returns the tokens of the only possible continuation, as the tokenizer splits it."""
        if self.error is not None or self.is_over:
            return []
        # On a copy: work of the matcher counts towards its limits, which may end requests.
        tokens = self._matcher.deep_copy().compute_ff_tokens()
        return [token for token in tokens if token < self._vocab_size]

    @cached_property
    def is_over(self) -> bool:
        """Whether the text is complete and nothing can follow."""
        return self.error is None and not self._goes_on

    @cached_property
    def error(self) -> str | None:
        """Reason why nothing can follow an incomplete text; None in all other states."""
        ends = self._possible[list(self._ends.token_ids)]
        if self._matcher.is_error():
            return str(self._matcher.get_error() or self._matcher.stop_reason())
        return None if self._goes_on or ends.any() else "no token of the vocabulary continues the text"

    @cached_property
    def _possible(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """(V,) the tokens that the grammar allows; none after an error."""
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        possible = np.zeros(self._vocab_size, dtype=bool)
        if not self._matcher.is_error():
            possible[: len(bits)] = bits[: self._vocab_size]
        return possible

    @cached_property
    def _goes_on(self) -> bool:
        """Whether a token may follow that does not end the text."""
        others = self._possible.copy()
        others[list(self._ends.token_ids)] = False
        return bool(others.any())

    def _next(self, token: int) -> GrammarState | None:
        if not bool(self.allowed[token]):
            return None
        matcher = self._matcher.deep_copy()
        matcher.consume_token(token)  # may reach a limit, which `error` reports
        return GrammarState(matcher, vocab_size=self._vocab_size, ends=self._ends)


@dataclass(frozen=True, slots=True)
class GrammarMask:
    """Forbids tokens by each request's grammar after the path down to a node; states are None without a grammar."""

    states: Sequence[GrammarState | None]
    reads_counts = False
    tail_len = 0

    def select(self, rows: Tensor) -> GrammarMask:
        """Returns the mask of some of its requests, which may repeat; rows: (R,) int64. Synchronises with the host."""
        return GrammarMask([self.states[row] for row in rows.tolist()])

    def apply(self, logits: Tensor, nodes: NodeView) -> Tensor:
        """Forbids all tokens that are not allowed. Synchronises with the host."""
        allowed = torch.ones(logits.shape, dtype=torch.bool)
        for row, (root, path) in enumerate(zip(self.states, nodes.path.tolist(), strict=True)):
            if root is not None:
                state = root.after_all(path)
                allowed[row] = False if state is None else state.allowed
        return logits.masked_fill(~allowed.to(logits.device), -inf)
