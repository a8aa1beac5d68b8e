"""Token trees as kernels read them, made in one launch: ancestor words, depths and positions.

What the words are is defined by `TokenTree.ancestor_words`; here they are made without a host synchronisation and
without the thirty small launches that tensor operations take.

Letters: B sequences, N nodes, N32 = 2 * ceil(N / 64) words of 32 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class TreeTables(NamedTuple):
    """What a pass over token trees reads.

    Attributes:
        words: (B, N, N32) int32, bit j % 32 of word j // 32 of node i is set when j is i or an ancestor of i.
        depths: (B, N) int64, 0 at the root and at padding.
        positions: (B, N) int32, prefix + depth, at most the last position.
    """

    words: Tensor
    depths: Tensor
    positions: Tensor

    @classmethod
    def empty(cls, batch: int, nodes: int, *, device: torch.device | str) -> TreeTables:
        """Buffers to be filled."""
        return cls(
            words=torch.empty(batch, nodes, 2 * -(-nodes // 64), dtype=torch.int32, device=device),
            depths=torch.empty(batch, nodes, dtype=torch.int64, device=device),
            positions=torch.empty(batch, nodes, dtype=torch.int32, device=device),
        )


def tree_tables(parents: Tensor, prefix: Tensor, last_position: int, *, out: TreeTables | None = None) -> TreeTables:
    """The tables of a batch of trees: one launch, no synchronisation with the host.

    Args:
        parents: (B, N) int64, contiguous, of valid trees: -1 at the root and at padding, else below the node.
        prefix: (B,) int32, contiguous, the position of each root.
        last_position: Greatest position; nodes that would lie beyond it get it.
        out: Contiguous buffers to fill, as `TreeTables.empty` makes them; None allocates them.

    Returns:
        `out`, or what was allocated.
    """
    batch, nodes = parents.shape
    tables = out or TreeTables.empty(batch, nodes, device=parents.device)
    block = triton.next_power_of_2(nodes)
    _tables_kernel[(batch, tables.words.shape[2])](
        parents, prefix, tables.words, tables.depths, tables.positions, nodes, last_position,
        BLOCK_N=block, ROUNDS=(nodes - 1).bit_length(), num_warps=max(1, block // 128),
    )  # fmt: skip
    return tables


@triton.jit(do_not_specialize=["nodes", "last_position"])
def _tables_kernel(  # noqa: PLR0913, PLR0917 - a kernel takes all that it reads
    parents: tl.tensor,
    prefix: tl.tensor,
    words: tl.tensor,
    depths: tl.tensor,
    positions: tl.tensor,
    nodes: tl.tensor,
    last_position: tl.tensor,
    BLOCK_N: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    """One word of all nodes of one sequence; the program of word 0 also makes depths and positions.

    Pointer doubling: after r rounds `seen` holds the nodes up to 2^r - 1 edges above, `ancestor` is the one 2^r edges
    above, or the topmost where there is none, and `depth` counts the edges in between. A chain of N nodes has N - 1
    edges, so bit_length(N - 1) rounds are enough. Nothing passes through memory between rounds: `tl.gather` is a
    function of register values, and its exchange between threads, with the barriers that needs, is the compiler's.
    """
    sequence, word = tl.program_id(0), tl.program_id(1)
    node = tl.arange(0, BLOCK_N)
    is_node = node < nodes
    first = sequence.to(tl.int64) * nodes
    parent = tl.load(parents + first + node, mask=is_node, other=-1).to(tl.int32)
    seen = tl.where(node // 32 == word, 1 << (node % 32), 0)
    depth = (parent >= 0).to(tl.int32)
    ancestor = tl.where(parent >= 0, parent, node)  # one without a parent stays where it is, and adds depth 0
    for _ in tl.static_range(ROUNDS):
        seen |= tl.gather(seen, ancestor, 0)
        depth += tl.gather(depth, ancestor, 0)
        ancestor = tl.gather(ancestor, ancestor, 0)
    tl.store(words + (first + node) * tl.num_programs(1) + word, seen, mask=is_node)
    if word == 0:
        tl.store(depths + first + node, depth.to(tl.int64), mask=is_node)
        position = tl.minimum(tl.load(prefix + sequence) + depth, last_position)
        tl.store(positions + first + node, position, mask=is_node)
