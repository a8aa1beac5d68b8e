"""Falcon: drafts blocks of several tokens per pass; the tokens of a block are independent.

Within a block the children of a node do not depend on its token, so a tree is the cross product of the block's best
tokens, within its shape. Each node that ends a block and has children gets a block of its own.

Source: Gao et al. 2024 (arXiv 2412.12639).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from foretoken.core.backend import integers_on
from foretoken.core.passes import Pass
from foretoken.drafters.base import READ_SHARE, DraftContext, Prefix, TargetHandle
from foretoken.drafters.head_drafter import HeadDrafter
from foretoken.drafters.head_features import CHUNK, TOGETHER, WaitingFeatures, rows_at
from foretoken.drafters.levels import NodePasses, Prefixes
from foretoken.heads.falcon import NUM_LAYERS, FalconHead, paired
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import AnyShape, begin_expansion

if TYPE_CHECKING:
    from foretoken.decoder.block_stack import BlockStack
    from foretoken.models.parts import TargetParts
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.expansion import Expansion


class BlockPlan(NamedTuple):
    """The nodes of one block, see the module.

    Attributes:
        positions: Which of the K positions each node is.
        parents: The node before each; -1 for the end of the block before.
        ends: K, the node at which each position's output is taken.
    """

    positions: list[int]
    parents: list[int]
    ends: list[int]


@lru_cache(maxsize=8)
def block_plan(block: int) -> BlockPlan:
    """Returns the nodes of a block of K positions."""
    positions, parents, ends = list(range(block)), list(range(-1, block - 1)), []
    for own in range(block - 1):
        for place, position in enumerate([*range(own + 1, block), own]):
            parents.append(len(positions) - 1 if place else own - 1)
            positions.append(position)
        ends.append(len(positions) - 1)
    return BlockPlan(positions, parents, [*ends, block - 1])


class LastBlocks(NamedTuple):
    """The last block of each path.

    Attributes:
        outputs: (B, P, K, W), features that the block estimates.
        state: (B, P, L, 2, W), state of the LSTM after the block.
        ends: (B, P) int64, index of the block's last node among the nodes of its sequence; -1 for committed blocks.
    """

    outputs: Tensor
    state: Tensor
    ends: Tensor


class FalconBlocks(WaitingFeatures):
    """The network's state of every slot, and drafts from it."""

    def __init__(
        self, head: FalconHead, parts: TargetParts, target: TargetHandle, stack: BlockStack, dtype: torch.dtype
    ) -> None:
        """Starts without features; `stack` runs the decoder block, with rows for the context and drafted blocks."""
        super().__init__(stack.cache, target, dtype)
        self.stack = stack
        self._head, self._parts, self._block = head, parts, head.config.block
        self._plan = block_plan(self._block)
        size, slots, device = head.config.hidden_size, target.num_slots, target.device
        self._device = device
        self._last = torch.zeros(slots, self._block, size, device=device, dtype=dtype)  # the LSTM's outputs
        self._state = torch.zeros(slots, NUM_LAYERS, 2, size, device=device, dtype=dtype)

    @override
    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether all features of positions 0 … `length` - 1 are here, and at least one block of them."""
        return super().is_known(slot, length) and length >= self._block

    @override
    def reusable(self, slot: int, length: int) -> int:
        """Returns 0 if more positions went through the LSTM, which keeps its last state alone."""
        return super().reusable(slot, length) if self._fed[slot] <= length else 0

    @override
    def begin(self, slot: int, prefix: Prefix | None) -> None:
        super().begin(slot, prefix)
        if prefix is not None and prefix.slot != slot and self._fed[slot]:
            self._last[slot], self._state[slot] = self._last[prefix.slot], self._state[prefix.slot]

    @override
    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, K, W), the block of features estimated from the last K committed positions; feeds what waits."""
        ends = [self._known[slot] for slot in slots]
        lengths = [self._feed_early(slot, text) for slot, text in zip(slots, texts, strict=True)]
        fused = self._fuse(slots, texts, lengths) if max(lengths) else rows_at(self._last, slots)
        work, inputs = self._pass_of(slots, ends, lengths, fused.shape[1])
        outputs = self.stack.run(fused.flatten(0, 1)[inputs], work)
        for slot, end in zip(slots, ends, strict=True):
            self._fed[slot] = end
        block_ends = [end - len(self._plan.positions) + own for end in work.offsets[1:] for own in self._plan.ends]
        return outputs[integers_on(block_ends, self._device)].view(len(slots), self._block, -1).to(self._dtype)

    def fill(self, expansion: Expansion, slots: Sequence[int], outputs: Tensor) -> None:
        """Fills trees of roots in place, without reading any tensor; outputs: (B, K, W), from `of`."""
        lengths = [self._fed[slot] for slot in slots]
        nodes, first = NodePasses(Prefixes(slots, lengths), self._device), integers_on(lengths, self._device)
        places = torch.zeros(len(slots), 1, dtype=torch.int64, device=self._device)  # of nodes among the blocks
        state = rows_at(self._state, slots).unsqueeze(1)
        blocks = LastBlocks(outputs=outputs.unsqueeze(1), state=state, ends=places - 1)
        paths = places.unsqueeze(2)[..., :0]
        logits = self._logits(blocks, expansion.depth)
        for depth in expansion.levels():
            frontier, slot = expansion.frontier(depth), depth % self._block
            places = frontier.inherited(places)
            paths = torch.cat([frontier.inherited(paths), frontier.tokens.unsqueeze(2)], dim=2)
            if depth and not slot:
                tokens = paths[..., -self._block :]
                above = LastBlocks(*(_rows(part, places) for part in blocks))
                blocks = self._further(above, tokens, nodes, first + (depth - self._block))
                places = torch.arange(places.shape[1], device=self._device).expand_as(places)
                logits = self._logits(blocks, expansion.depth - depth)
            of_slot = logits[:, :, slot]
            expansion.grow(depth, of_slot if of_slot.shape[1] == 1 else _rows(of_slot, places))

    def _further(self, before: LastBlocks, tokens: Tensor, nodes: NodePasses, first: Tensor) -> LastBlocks:
        """Returns the blocks after some nodes; tokens: (B, P, K) int64, the node last; first: (B,) first position."""
        batch, width, _ = tokens.shape
        pairs = paired(before.outputs, self._parts.embed(tokens).to(before.outputs.dtype))
        fused, states = self._head.lstm.feed_pairs(pairs, before.state)
        own, parents = integers_on([self._plan.positions, self._plan.parents], self._device).unbind()
        begin = nodes.positions.shape[1] + len(own) * torch.arange(width, device=self._device).unsqueeze(1)
        is_first = (parents < 0).expand(batch, width, -1)
        new_parents = torch.where(is_first, before.ends.unsqueeze(2), begin + parents).flatten(1)
        positions = (first.view(-1, 1, 1) + own).expand(batch, width, -1).flatten(1)
        work = nodes.add(torch.zeros_like(positions), positions, new_parents)
        outputs = self.stack.run(fused[:, :, own].reshape(batch * width * len(own), -1), work).to(self._dtype)
        return LastBlocks(
            outputs=outputs.view(batch, width, len(own), -1)[:, :, self._plan.ends],
            state=states[:, :, -1],
            ends=(begin[:, 0] + self._block - 1).expand(batch, -1),
        )

    def _logits(self, blocks: LastBlocks, num_slots: int) -> Tensor:
        """(B, P, K, V) float32 logits of some blocks; with `num_slots` only of their first positions."""
        return self._head.logits(0, blocks.outputs[:, :, : min(num_slots, self._block)], self._parts).float()

    def _feed_early(self, slot: int, text: Sequence[int]) -> int:
        """Feeds all but the last K positions of a slot if many wait; returns how many wait then."""
        waiting = self._known[slot] - self._fed[slot]
        if waiting <= TOGETHER:
            return waiting
        features = self._joined(slot)
        self._waiting[slot] = []
        for part in features[: -self._block].split(CHUNK):
            start = self._fed[slot]
            state = rows_at(self._state, [slot]) if start else None
            fused, states = self._head.lstm.feed_pairs(self._pairs(part, text, start).unsqueeze(0), state)
            self._state[slot] = states[0, -1]
            self._last[slot] = torch.cat([self._last[slot], fused[0]])[-self._block :]
            work = Pass.of_chains([[0] * len(part)], slots=[slot], prefix_lens=[start], device=self._device)
            self.stack.append(fused[0], work)
            self._fed[slot] += len(part)
        self._waiting[slot] = [features[-self._block :].unsqueeze(1)]
        return self._block

    def _fuse(self, slots: Sequence[int], texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Runs the LSTM over what waits; (B, K + T, W), the last K outputs before it first, padded at the end."""
        most, parts = max(lengths), []
        for slot, text, length in zip(slots, texts, lengths, strict=True):
            pairs = self._last.new_zeros(most, 2 * self._last.shape[2])
            if length:
                pairs[:length] = self._pairs(self._joined(slot), text, self._fed[slot])
                self._waiting[slot] = []
            parts.append(pairs)
        state, last = rows_at(self._state, slots), rows_at(self._last, slots)
        is_new = integers_on([self._fed[slot] == 0 for slot in slots], self._device).bool()
        state = torch.where(is_new.view(-1, 1, 1, 1), 0.0, state)
        fused, states = self._head.lstm.feed_pairs(torch.stack(parts), state)
        fused, states = torch.cat([last, fused], dim=1), torch.cat([state.unsqueeze(1), states], dim=1)
        rows, ends = torch.arange(len(slots), device=self._device), integers_on(lengths, self._device)
        index = integers_on(slots, self._device)
        self._state[index] = states[rows, ends]
        self._last[index] = fused[rows.unsqueeze(1), ends.unsqueeze(1) + torch.arange(self._block, device=self._device)]
        return fused

    def _pairs(self, features: Tensor, text: Sequence[int], start: int) -> Tensor:
        """(T, 2 W), the pairs of positions from `start` on, from (T, E) features and all committed tokens."""
        following = integers_on(text[start + 1 : start + 1 + len(features)], self._device)
        return paired(features, self._parts.embed(following).to(self._dtype))

    def _pass_of(
        self, slots: Sequence[int], ends: Sequence[int], lengths: Sequence[int], width: int
    ) -> tuple[Pass, Tensor]:
        """Returns the pass of `of`: a chain of new positions of each sequence that ends in the block, then the plan.

        Also (M,) int64, the rows of its inputs among the (B, `width`) outputs of `_fuse`.
        """
        positions, parents, inputs, offsets = list[int](), list[int](), list[int](), [0]
        chains = [max(length, self._block) for length in lengths]
        for row, (end, length, chain) in enumerate(zip(ends, lengths, chains, strict=True)):
            lead = chain - self._block
            own = [*range(lead), *(lead + position for position in self._plan.positions)]
            first = row * width + self._block + length - chain
            positions += [end - chain + position for position in own]
            inputs += [first + position for position in own]
            parents += [*range(-1, lead - 1), *(lead + parent for parent in self._plan.parents)]
            offsets.append(len(positions))
        packed = integers_on([positions, parents, inputs], self._device)
        work = Pass(
            tokens=torch.zeros_like(packed[0]), positions=packed[0], parents=packed[1], slots=slots,
            prefix_lens=[end - chain for end, chain in zip(ends, chains, strict=True)], offsets=offsets,
            logit_rows=None,
        )  # fmt: skip
        return work, packed[2]


def _rows(values: Tensor, places: Tensor) -> Tensor:
    """(B, P, …), rows of (B, P', …) by (B, P) indices."""
    batch = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[batch, places]


class FalconDrafter(HeadDrafter):
    """Drafts a block of levels at once."""

    reads_last = False
    read_share = READ_SHARE
    head: FalconHead

    @override
    def features_for(self, target: TargetHandle) -> FalconBlocks:
        num_nodes = len(block_plan(self.head.config.block).positions) * max(self._most_blocks(), 1)
        stack = self.stack_of(self.head.layer, num_nodes)
        self._blocks = FalconBlocks(self.head, self.parts, target, stack, self.dtype)
        return self._blocks

    def _most_blocks(self) -> int:
        options, config = self.options, self.head.config
        if options.tree == "dynamic":
            shape = options.dynamic_shape(config.steps)  # as wide as the widest trees that may be chosen
            of_trees = shape.top_k * (shape.depth // config.block)
        else:  # every block but the first begins below K nodes and ends above one
            of_trees = max(options.shape(lambda: TreeShape(())).num_nodes, options.max_nodes) // 2
        return max(of_trees, config.steps // config.block)

    def _expanded(self, context: DraftContext, rows: Sequence[int], shape: AnyShape) -> Expansion:
        slots, texts = [context.slots[row] for row in rows], [context.tokens[row] for row in rows]
        outputs = self._features.of(slots, texts)
        roots, draws = self._draws.of(context, rows, self._target.device)
        expansion = begin_expansion(shape, roots, draws)
        self._blocks.fill(expansion, slots, outputs)
        return expansion

    @override
    def trial(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        config = self.head.config
        outputs = torch.zeros(1, config.block, config.hidden_size, device=roots.device, dtype=self.dtype)
        self._blocks.fill(begin_expansion(shape, roots, draws), [0], outputs)
