"""Passes in the form in which a CUDA graph runs them: few shapes, and all else in two tensors that are filled anew.

Numbers of sequences, tokens and nodes are rounded up to powers of two, the context to a bound. What is added belongs to
no sequence: such tokens write nothing to the cache, and no token sees them. So a pass fits wherever its own nodes do.

Letters: S sequences, M tokens, W nodes, each rounded up.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass
from foretoken.decoder.cuda_graphs import bound_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class PassShape(NamedTuple):
    """What a captured graph is made for; all but the bound of the prefix are powers of two.

    Attributes:
        num_sequences: S.
        num_tokens: M.
        num_nodes: W.
        max_tokens: Bound of the tokens of one sequence.
        max_nodes: Bound of the nodes of one sequence.
        max_prefix: Bound of the prefix lengths.
    """

    num_sequences: int
    num_tokens: int
    num_nodes: int
    max_tokens: int
    max_nodes: int
    max_prefix: int


def shape_of(work: Pass) -> PassShape:
    """The smallest shape that holds a pass."""
    return PassShape(
        num_sequences=_rounded_up(work.num_sequences),
        num_tokens=_rounded_up(work.num_tokens),
        num_nodes=_rounded_up(work.node_offsets[-1]),
        max_tokens=_rounded_up(max(end - start for start, end in pairwise(work.offsets))),
        max_nodes=_rounded_up(max(end - start for start, end in pairwise(work.node_offsets))),
        max_prefix=bound_of(max(work.prefix_lens)),
    )


def padded_inputs(work: Pass, shape: PassShape) -> list[Tensor]:
    """What has to be filled in before a graph of that shape is replayed; of equal sizes for all passes of the shape.

    Args:
        work: The pass.
        shape: At most twice as many tokens and nodes as the pass has.

    Returns:
        Tokens, positions and parents in one (M + 2 W,) int64 tensor, made in one launch on the device of the pass; and
        slots, prefix lengths, and where the tokens and the nodes of each sequence begin in one (4, S + 1 or more) int32
        tensor on the host.
    """
    parts: list[Tensor] = []
    sized = ((work.tokens, shape.num_tokens), (work.positions, shape.num_nodes), (work.parents, shape.num_nodes))
    for part, size in sized:
        # Tokens of no sequence are embedded as well, so that each has to be in the vocabulary.
        parts += [part, part[: size - len(part)]] if size > len(part) else [part]
    width = _places_width(shape)
    rows = (work.slots, work.prefix_lens, work.offsets, work.node_offsets)
    # Sequences that are added begin where the last one ends.
    places = [[*row, *[row[-1]] * (width - len(row))] for row in rows]
    return [torch.cat(parts), torch.tensor(places, dtype=torch.int32)]


def captured_pass(shape: PassShape, inputs: Sequence[Tensor]) -> tuple[Pass, AttentionLayout]:
    """The pass that lies in `inputs` whenever the graph runs; for functions under capture, so nothing is looked at.

    Args:
        shape: What the graph is made for.
        inputs: As `padded_inputs` gives them, all on the device.

    Returns:
        A pass of M tokens, without logits, whose positions are those of its tokens, and what each token sees. Lengths
        and slots of the pass mean nothing; they are read from the layout's tables.
    """
    from foretoken.attention.triton_tables import pass_tables

    packed, places = inputs
    tokens, positions, parents = packed.split([shape.num_tokens, shape.num_nodes, shape.num_nodes])
    num = shape.num_sequences
    tables, token_positions = pass_tables(
        parents, positions, places[0, :num], places[1, :num], places[2, : num + 1], places[3, : num + 1],
        num_tokens=shape.num_tokens, max_prefix=shape.max_prefix, max_tokens=shape.max_tokens,
        max_nodes=shape.max_nodes,
    )  # fmt: skip
    work = Pass(
        tokens=tokens, positions=token_positions, parents=parents, slots=range(num),
        prefix_lens=[shape.max_prefix] * num, offsets=[*range(num), shape.num_tokens], logit_rows=None,
    )  # fmt: skip
    return work, AttentionLayout.of_tables(work, tables)


def _places_width(shape: PassShape) -> int:
    """Entries of a row of places: S + 1 or a few more, so that every row begins at a multiple of 16 bytes."""
    return -(-(shape.num_sequences + 1) // 4) * 4


def _rounded_up(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
