"""Builds the kernels' tables of a packed pass on the device in one launch: visible rows, positions, rows to write.

The words are those that `ancestor_words` defines. One launch replaces thirty small ones of tensor operations, without
synchronising with the host.

Letters: S sequences, M tokens of the pass, W nodes, N32 = 2 * ceil(max_nodes / 64) words of 32 bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from foretoken.core.passes import PassTables

_FEWEST_NODES = 32  # of a block: the threads of a warp


def pass_tables(
    parents: Tensor,
    positions: Tensor,
    slots: Tensor,
    prefix: Tensor,
    starts: Tensor,
    node_starts: Tensor,
    *,
    num_tokens: int,
    max_prefix: int,
    max_tokens: int,
    max_nodes: int,
) -> tuple[PassTables, Tensor]:
    """Returns the tables of a pass with lengths on the device: one launch, no synchronisation with the host.

    Tokens from starts[S] up to M belong to no sequence. Nodes from node_starts[S] on belong to none and are not read. A
    sequence may have no token.

    Args:
        parents: (W,) int64, contiguous, see `Pass`.
        positions: (W,) int64, contiguous, see `Pass`.
        slots: (S,) int32, contiguous, cache slots.
        prefix: (S,) int32, contiguous, prefix lengths.
        starts: (S + 1,) int32, contiguous, where each sequence's tokens begin.
        node_starts: (S + 1,) int32, contiguous, where its nodes begin; its tokens are the last of them.
        num_tokens: M, at least starts[S].

    Returns:
        The tables, with words, and the (M,) int64 positions of the tokens, 0 for tokens of no sequence.
    """
    words = parents.new_empty(num_tokens, 2 * -(-max_nodes // 64), dtype=torch.int32)
    node_positions = positions.new_empty(positions.shape, dtype=torch.int32)
    token_positions, written_slots, written_rows = (parents.new_empty(num_tokens) for _ in range(3))
    block = max(triton.next_power_of_2(max_nodes), _FEWEST_NODES)
    _tables_kernel[(len(slots) + 1, words.shape[1])](
        parents, positions, slots, prefix, starts, node_starts,
        words, node_positions, token_positions, written_slots, written_rows, num_tokens,
        BLOCK=block, ROUNDS=(max_nodes - 1).bit_length(), num_warps=max(1, block // 128),
    )  # fmt: skip
    tables = PassTables(
        slots=slots, prefix=prefix, starts=starts, node_starts=node_starts, positions=node_positions, words=words,
        written_slots=written_slots, written_rows=written_rows, max_prefix=max_prefix, max_tokens=max_tokens,
        max_nodes=max_nodes,
    )  # fmt: skip
    return tables, token_positions


@triton.jit(do_not_specialize=["num_tokens"])
def _tables_kernel(
    parents: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    prefix: tl.tensor,
    starts: tl.tensor,
    node_starts: tl.tensor,
    words: tl.tensor,
    node_positions: tl.tensor,
    token_positions: tl.tensor,
    written_slots: tl.tensor,
    written_rows: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
) -> None:
    """Builds one word of all tokens of one sequence; the program of word 0 also fills the other tables.

    The grid is (S + 1, N32): the last sequence holds the tokens that belong to none.

    Pointer doubling: after r rounds `seen` holds the nodes up to 2^r - 1 edges above, and `ancestor` is the node 2^r
    edges above, or the topmost. A chain of N nodes has N - 1 edges, so bit_length(N - 1) rounds are enough. Nothing
    passes through memory between rounds: `tl.gather` works on registers, and the compiler inserts its exchanges and
    barriers.
    """
    sequence, word, num_words = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    node = tl.arange(0, BLOCK)
    first_token = tl.load(starts + sequence)
    if sequence == tl.num_programs(0) - 1:
        zero = tl.zeros((BLOCK,), dtype=tl.int64)
        for first in tl.range(first_token, num_tokens, BLOCK):
            token = first + node
            is_token = token < num_tokens
            tl.store(words + token * num_words + word, zero.to(tl.int32), mask=is_token)
            if word == 0:
                tl.store(token_positions + token, zero, mask=is_token)
                tl.store(written_slots + token, zero, mask=is_token)
                tl.store(written_rows + token, zero - 1, mask=is_token)
    else:
        first_node = tl.load(node_starts + sequence)
        num_nodes = tl.load(node_starts + sequence + 1) - first_node
        num_earlier = num_nodes - (tl.load(starts + sequence + 1) - first_token)
        is_node = node < num_nodes
        parent = tl.load(parents + first_node + node, mask=is_node, other=-1).to(tl.int32)
        seen = tl.where(node // 32 == word, 1 << (node % 32), 0)
        ancestor = tl.where(parent >= 0, parent, node)  # a node without a parent stays where it is
        for _ in tl.static_range(ROUNDS):
            seen |= tl.gather(seen, ancestor, 0)
            ancestor = tl.gather(ancestor, ancestor, 0)
        is_token = is_node & (node >= num_earlier)
        token = first_token + node - num_earlier
        tl.store(words + token * num_words + word, seen, mask=is_token)
        if word == 0:
            position = tl.load(positions + first_node + node, mask=is_node, other=0)
            tl.store(node_positions + first_node + node, position.to(tl.int32), mask=is_node)
            tl.store(token_positions + token, position, mask=is_token)
            slot, length = tl.load(slots + sequence).to(tl.int64), tl.load(prefix + sequence).to(tl.int64)
            tl.store(written_slots + token, tl.zeros((BLOCK,), dtype=tl.int64) + slot, mask=is_token)
            tl.store(written_rows + token, length + node, mask=is_token)
