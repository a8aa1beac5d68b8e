"""The most probable paths through a lattice of candidates, for drafters that know all depths at once.

The probability of a path is a product, so no node is more probable than its parent. The N most probable nodes of all
are therefore connected. All of them lie among the N most probable of their depth, and their parents among the N most
probable of the depth above. A search that keeps N nodes per depth is thus exact. It finds the trees of Ringel and
Romano 2026 (arXiv 2604.12989), who take nodes from a heap one by one.

Letters: B sequences, D depths, K candidates of each, P nodes of one depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class LatticeLevel(NamedTuple):
    """The most probable nodes of one depth, best first.

    Attributes:
        tokens: (B, P) int64.
        scores: (B, P) float32, log-probabilities of paths.
        parents: (B, P) int64, indices among the nodes of the depth above; 0 at the first depth.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DraftLattice:
    """Candidates of every depth below the roots.

    Attributes:
        ids: (B, D, K) int64.
        log_probs: (B, D, K) float32, at most 0 and never NaN; -inf for impossible candidates.
        pair_log_probs: (B, D, K, K) float32, at most 0 and never NaN. Entry (b, d, i, j) is the log-probability of
            candidate j of depth d after candidate i of depth d - 1; it replaces `log_probs[b, d, j]`. Entries of depth
            0 are not read. None if candidates are independent.
    """

    ids: Tensor
    log_probs: Tensor
    pair_log_probs: Tensor | None = None

    def best_nodes(self, count: int) -> list[LatticeLevel]:
        """Returns the most probable nodes of each depth; together they hold the `count` best. No synchronisation.

        Args:
            count: At least 1. A depth has fewer nodes if there are fewer paths.
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
