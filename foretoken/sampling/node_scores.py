"""Target distributions at tree nodes after each request's processors, computed only for requested nodes.

Top-down acceptance visits one node per sequence and depth, so processors run on accepted + 1 rows instead of all N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

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
