"""`accept_chosen` as one Triton launch, if the target's token after every node is known.

Serves greedy requests, coupled requests and all requests with one-hot drafts.

Letters: B sequences, N nodes, D greatest depth.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Walk(NamedTuple):
    """The result of the walk; fields as in `Acceptance`."""

    path: Tensor
    num_accepted: Tensor
    next_token: Tensor

    @classmethod
    def empty(cls, batch: int, max_depth: int, *, device: torch.device | str) -> Walk:
        """Allocates buffers to be filled."""
        return cls(
            path=torch.empty(batch, max_depth, dtype=torch.int64, device=device),
            num_accepted=torch.empty(batch, dtype=torch.int64, device=device),
            next_token=torch.empty(batch, dtype=torch.int64, device=device),
        )


def walk_chosen(tokens: Tensor, parents: Tensor, chosen: Tensor, max_depth: int, *, out: Walk | None = None) -> Walk:
    """Descends from each root while a child holds the chosen token, to the first such child.

    One launch, no synchronisation with the host. All tensors are contiguous.

    Args:
        tokens: (B, N) int64.
        parents: (B, N) int64 of valid trees: -1 at the root and at padding, else below the node's index.
        chosen: (B, N) int64, the target's token after each node.
        max_depth: D, upper bound of the depths; 0 accepts nothing.
        out: Buffers to fill, from `Walk.empty`; None allocates them.
    """
    batch, nodes = tokens.shape
    walk = out or Walk.empty(batch, max_depth, device=tokens.device)
    _walk_kernel[(batch,)](
        tokens, parents, chosen, walk.path, walk.num_accepted, walk.next_token, nodes, max_depth,
        BLOCK_N=triton.next_power_of_2(nodes), BLOCK_D=triton.next_power_of_2(max(1, max_depth)), num_warps=1,
    )  # fmt: skip
    return walk


@triton.jit(do_not_specialize=["nodes", "max_depth"])
def _walk_kernel(
    tokens: tl.tensor,
    parents: tl.tensor,
    chosen: tl.tensor,
    path: tl.tensor,
    num_accepted: tl.tensor,
    next_token: tl.tensor,
    nodes: tl.tensor,
    max_depth: tl.tensor,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
) -> None:
    """Walks one sequence in one warp: a step is a minimum over registers and a few exchanges within the warp.

    All edges are matched beforehand. The path stays in registers and is stored once, so that no store follows another
    to the same address.
    """
    sequence = tl.program_id(0)
    node = tl.arange(0, BLOCK_N)
    first = sequence.to(tl.int64) * nodes
    is_node = node < nodes
    parent = tl.load(parents + first + node, mask=is_node, other=-1)
    is_drafted = is_node & (parent >= 0)  # neither root nor padding
    token = tl.load(tokens + first + node, mask=is_drafted, other=0)
    wanted = tl.load(chosen + first + parent, mask=is_drafted, other=0)
    leads_from = tl.where(is_drafted & (token == wanted), parent, -1).to(tl.int32)

    depth = tl.arange(0, BLOCK_D)
    walked = tl.full((BLOCK_D,), -1, tl.int64)
    last = tl.full((), 0, tl.int32)  # the root
    count = tl.full((), 0, tl.int32)
    child = tl.min(tl.where(leads_from == last, node, BLOCK_N), 0)
    while (child < BLOCK_N) & (count < max_depth):
        walked = tl.where(depth == count, child.to(tl.int64), walked)
        last = child
        count += 1
        child = tl.min(tl.where(leads_from == last, node, BLOCK_N), 0)
    tl.store(path + sequence.to(tl.int64) * max_depth + depth, walked, mask=depth < max_depth)
    tl.store(num_accepted + sequence, count.to(tl.int64))
    tl.store(next_token + sequence, tl.load(chosen + first + last))
