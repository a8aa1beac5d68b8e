"""The draft lattice: per-depth candidates, which a shape turns into a token tree."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLattice:
    """Candidates at each depth that do not depend on the branch taken (Medusa-like heads, lookup tables).

    Attributes:
        ids: (B, D, K) int64, the K candidates at depth 1..D, best first.
        log_probs: (B, D, K) float32, their draft log-probabilities.
        pair_log_probs: (B, D, K, K) float32 or None; entry (b, d, i, j) is the log-probability of candidate j at depth
            d + 1 after candidate i at depth d (the first depth's predecessor is the root, index 0).
    """

    ids: Tensor
    log_probs: Tensor
    pair_log_probs: Tensor | None = None
