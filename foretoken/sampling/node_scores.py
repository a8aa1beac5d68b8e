"""What may follow the nodes of a token tree: the target's distributions after each request's processors, and grammars.

Top-down acceptance visits one node per sequence and depth, so processors run on accepted + 1 rows instead of all N.

A grammar says which tokens may follow a text, where the text may end, and which tokens are forced. If only one
continuation is possible, its tokens are those of the tokenizer's split. A state belongs to one text and never changes;
one more token gives another state. The nodes of a tree thus share the states of the paths that they share, however
often acceptance, drafts and traces ask for a state. A matcher of llguidance parses; llguidance is not imported here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.core.backend import runs_cpu_kernels
from foretoken.sampling.batch import NodeView, apply_processors, best_possible, one_hot_log_probs, warp

if TYPE_CHECKING:
    from foretoken.core.token_tree import TokenTree
    from foretoken.sampling.batch import History, SamplingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeScores:
    """The target's logits at the nodes of a tree, with the requests' sampling parameters.

    Attributes:
        tree: The verified tree.
        logits: (R, V) float32, target logits at the nodes, without padding: each row predicts the token after a node.
        starts: (B,) int64, the row of each root; node i of a sequence has the i-th row after it.
        has_row_for_each: Whether the rows are all B N nodes in order, without padding and other sequences.
        batch: Sampling parameters of the B requests.
        history: Committed tokens of the B requests, the root included; may be None if no processor is in use.
        chosen: (R,) int64, `PassOutput.chosen` of the rows; None if the decoder chooses none.
    """

    tree: TokenTree
    logits: Tensor
    starts: Tensor
    has_row_for_each: bool = False
    batch: SamplingBatch
    history: History | None
    chosen: Tensor | None = None

    def select(self, rows: Tensor) -> NodeScores:
        """Returns the scores of some sequences of the batch; rows: (R,) int64."""
        return NodeScores(
            tree=self.tree.select(rows),
            logits=self.logits,
            starts=self.starts[rows],
            batch=self.batch.select(rows),
            history=self.history and self.history.select(rows),
            chosen=self.chosen,
        )

    def processed(self, nodes: Tensor) -> Tensor:
        """Returns (B, V) float32 logits after the processors, before temperature; nodes: (B,) int64, one a sequence."""
        rows = self.logits[self.starts + nodes]
        if self.history is None or not self.batch.processors:
            return rows
        path = self.tree.path_tokens(nodes)
        return apply_processors(self.batch.processors, rows, NodeView(self.history.extended(path), path))

    def log_probs(self, nodes: Tensor) -> Tensor:
        """Returns the warped distribution of the token after each node; one-hot for greedy requests.

        nodes: (B,) int64, one node per sequence; returns (B, V) float32 log-probabilities.
        """
        logits = self.processed(nodes)
        if self.batch.is_all_greedy:
            return one_hot_log_probs(logits)
        log_probs = warp(logits, self.batch)
        if not self.batch.is_any_greedy:
            return log_probs
        return torch.where(self.batch.greedy.unsqueeze(1), one_hot_log_probs(logits), log_probs)

    def argmax(self, nodes: Tensor) -> Tensor:
        """Returns the most probable token after each node, lowest id first, -1 if none is possible; (B,) int64."""
        return best_possible(self.processed(nodes))

    def argmax_everywhere(self) -> Tensor | None:
        """Returns `argmax` of all nodes at once, (B, N) int64; None if processors read the history of each node."""
        if self.history is not None and self.batch.processors:
            return None
        if runs_cpu_kernels(self.logits.device):  # numpy's argmax is vectorised along a row, torch's is not
            return self.by_node(torch.from_numpy(self.logits.numpy().argmax(-1)))
        return self.by_node(self.logits.argmax(-1))

    def by_node(self, values: Tensor) -> Tensor:
        """Returns values of the rows, (R, …), in the order of the nodes, (B, N, …); arbitrary at padding."""
        shape = self.tree.tokens.shape
        if self.has_row_for_each:
            return values.view(*shape, *values.shape[1:])
        rows = self.starts.unsqueeze(1) + torch.arange(shape[1], device=values.device)
        return values[rows.clamp_max(values.shape[0] - 1)]

    def drawn_everywhere(self, root_positions: Tensor) -> Tensor:
        """Returns the target's draw after every node: argmax of logits / temperature plus the noise of its position.

        For requests with temperature as the only change of the distribution. Each request must always use this
        function, or never: it rounds differently from the walk node by node, so two almost equal tokens could swap.

        root_positions: (B,) int64, absolute position of each root; returns (B, N) int64.
        """
        if self.chosen is not None:
            return self.by_node(self.chosen)
        from foretoken.sampling.triton_choice import chosen_tokens

        positions = root_positions.unsqueeze(1) + self.tree.depths + 1
        scales, seeds = self.batch.inverse_temperature, self.batch.noise.seeds
        return chosen_tokens(self.by_node(self.logits), scales, seeds, positions).tokens

    def unwarped_log_probs(self, nodes: Tensor) -> Tensor:
        """Returns processed log-probabilities at temperature 1, nothing cut off; (B, V) float32."""
        return self.processed(nodes).log_softmax(1)


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
