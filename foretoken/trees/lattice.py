"""The most probable paths through a lattice of candidates, for drafters that know all depths at once.

With the candidates of every depth given, the probability of a path is a product, and no node is more probable than its
parent. So the N most probable nodes are connected, and all of them lie among the N most probable of their depth, whose
parents lie among the N most probable of the depth above: a search that keeps as many nodes a depth as are wanted in
all is exact (the trees of Ringel and Romano 2026, arXiv 2604.12989, which a heap finds there one node after another).

Letters: B sequences, D depths, K candidates of each, P nodes of one depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class LatticeLevel(NamedTuple):
    """The most probable nodes of one depth, the best first.

    Attributes:
        tokens: (B, P) int64.
        scores: (B, P) float32, log-probabilities of paths.
        parents: (B, P) int64, places among the nodes of the depth above; 0 at the first depth.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLattice:
    """Candidates of every depth below the roots.

    Attributes:
        ids: (B, D, K) int64.
        log_probs: (B, D, K) float32, at most 0 and never NaN; -inf for candidates that are impossible.
        pair_log_probs: (B, D, K, K) float32, likewise: entry (b, d, i, j) is the log-probability of candidate j of
            depth d after candidate i of depth d - 1, instead of `log_probs[b, d, j]`. Those of depth 0 are not read.
            None where candidates do not depend on each other.
    """

    ids: Tensor
    log_probs: Tensor
    pair_log_probs: Tensor | None = None

    def best_nodes(self, count: int) -> list[LatticeLevel]:
        """The most probable nodes of each depth, among them the `count` most probable of all. No synchronisation.

        Args:
            count: At least 1. A depth has fewer where there are no more paths.
        """
        num_candidates = self.ids.shape[2]
        scores, ranks = self.log_probs.new_zeros(len(self.ids), 1), None
        levels = []
        for depth in range(self.ids.shape[1]):
            gains = self.log_probs[:, depth].unsqueeze(1)
            if self.pair_log_probs is not None and ranks is not None:
                gains = self.pair_log_probs[:, depth].gather(1, ranks.unsqueeze(2).expand(-1, -1, num_candidates))
            paths = (scores.unsqueeze(2) + gains).flatten(1)
            scores, order = paths.topk(min(count, paths.shape[1]), dim=1)
            ranks = order % num_candidates
            levels.append(LatticeLevel(self.ids[:, depth].gather(1, ranks), scores, order // num_candidates))
        return levels
