"""Tables that kernels read instead of masks: a few integers a token, built once a pass for all layers.

Letters: S sequences, M tokens of the pass, W nodes, N32 words of 32 bits that hold a bit for each node of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTables:
    """Where each sequence's keys lie and which of them each of its tokens sees.

    Row r of a slot holds position r for r < prefix; every token sees those rows, less what lies outside a sliding
    window. Row prefix + i is node i of the sequence; its tokens are the last of its nodes.

    Attributes:
        slots: (S,) int32, cache slots.
        prefix: (S,) int32, prefix lengths.
        starts: (S + 1,) int32, where each sequence's tokens begin.
        node_starts: (S + 1,) int32, where its nodes begin.
        positions: (W,) int32, of the nodes.
        words: (M, N32) int32, bit i % 32 of word i // 32 is set where the token sees node i of its sequence; None
            where every sequence is a chain: a token sees all nodes up to its own.
        written_slots: (M,) int64, the cache slot of each token.
        written_rows: (M,) int64, the cache row of each token; -1 for one of no sequence, which pads the pass.
        max_prefix: Upper bound of `prefix`, known on the host: launches depend on it, results do not.
        max_tokens: Likewise of the tokens of a sequence.
        max_nodes: Likewise of the nodes of a sequence.
    """

    slots: Tensor
    prefix: Tensor
    starts: Tensor
    node_starts: Tensor
    positions: Tensor
    words: Tensor | None
    written_slots: Tensor
    written_rows: Tensor
    max_prefix: int
    max_tokens: int
    max_nodes: int
