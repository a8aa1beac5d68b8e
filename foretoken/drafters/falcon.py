"""Falcon: drafts blocks of several tokens per pass; the tokens of a block are independent.

Within a block the children of a node do not depend on its token, so a tree is the cross product of the block's best
tokens, within its shape. Each node that ends a block and has children gets a block of its own.

Source: Gao et al. 2024 (arXiv 2412.12639).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from foretoken.core.backend import integers_on
from foretoken.core.passes import Pass
from foretoken.decoder.block_stack import BlockStack
from foretoken.drafters.base import TargetReads
from foretoken.drafters.head_features import rows_at
from foretoken.drafters.heads import HeadDrafter, HeadOptions
from foretoken.heads.falcon import NUM_LAYERS, FalconHead, paired
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import begin_expansion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.decoder.native_linear import Quantization
    from foretoken.drafters.base import Committed, DraftContext, Drafter, Prefix, TargetHandle
    from foretoken.models.parts import TargetParts
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.dynamic import AnyShape
    from foretoken.trees.expansion import Expansion

_TOGETHER = 32  # positions of a sequence that are fed in one pass with other sequences; longer parts are fed alone
_CHUNK = 512  # positions of a long part per pass


class BlockPlan(NamedTuple):
    """The nodes of one block, see the module; all lists but the last have G entries.

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


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBlocks:
    """The last block of each path.

    Attributes:
        outputs: (B, P, K, W), features that the block estimates.
        state: (B, P, L, 2, W), of the LSTM after the block.
        ends: (B, P) int64, the last node of its chain in order, among the nodes of its sequence; -1 for committed
            blocks.
    """

    outputs: Tensor
    state: Tensor
    ends: Tensor


class _Nodes:
    """All nodes of a draft fed so far, (B, N) each: rotary positions, and parents among the nodes of the sequence."""

    def __init__(self, slots: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        self.slots, self.lengths = slots, lengths
        self.next_positions = integers_on(lengths, device).view(-1, 1, 1)
        self.positions = self.parents = torch.empty(len(slots), 0, dtype=torch.int64, device=device)

    def add(self, positions: Tensor, parents: Tensor) -> Pass:
        """Returns the pass over new nodes, (B, M) each."""
        num_earlier, num = self.positions.shape[1], positions.shape[1]
        self.positions = torch.cat([self.positions, positions], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        batch = len(self.slots)
        return Pass(
            tokens=torch.zeros_like(positions).flatten(),
            positions=self.positions.flatten(),
            parents=self.parents.flatten(),
            slots=self.slots,
            prefix_lens=self.lengths,
            offsets=range(0, batch * num + 1, num),
            num_earlier=[num_earlier] * batch,
            logit_rows=None,
        )


class FalconBlocks:
    """The network's state of every slot, and drafts from it.

    Committed features wait until the next proposal, as in `StackFeatures`.

    Attributes:
        stack: The decoder block with its KV rows by slot.
    """

    def __init__(
        self,
        head: FalconHead,
        parts: TargetParts,
        target: TargetHandle,
        *,
        dtype: torch.dtype,
        num_expanded: int,
        capture: GraphCapture | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Starts without features.

        Args:
            head: The network.
            parts: Modules that it shares with the target.
            target: Gives slots, context and device.
            dtype: Of the network.
            num_expanded: Most nodes of a tree, below its root, that blocks belong to.
            capture: See `BlockStack`.
            quantization: Of the decoder block's matrices, see `BlockStack`.
        """
        self._head, self._parts, self._block = head, parts, head.config.block
        self._plan = block_plan(self._block)
        group = len(self._plan.positions)
        capacity = target.context_len + group * max(num_expanded, 1)
        self.stack = BlockStack(
            head.as_blocks(capacity), num_slots=target.num_slots, capacity=capacity, capture=capture,
            quantization=quantization,
        )  # fmt: skip
        size, slots, device = head.config.hidden_size, target.num_slots, target.device
        self._dtype, self._device = dtype, device
        self._last = torch.zeros(slots, self._block, size, device=device, dtype=dtype)  # the LSTM's outputs
        self._state = torch.zeros(slots, NUM_LAYERS, 2, size, device=device, dtype=dtype)
        self._fed = [0] * slots  # positions that went through the LSTM, with rows in the cache
        self._known = [0] * slots  # these, and positions with waiting features
        self._waiting: list[list[Tensor]] = [[] for _ in range(slots)]  # (T, E) each

    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether all features of positions 0 … `length` - 1 are here, and at least one block of them."""
        # After a failed pass there are fewer: the slot gets no draft until it begins anew.
        here = self._fed[slot] + sum(map(len, self._waiting[slot]))
        return self._known[slot] == here == length >= self._block

    def learn(self, committed: Committed) -> None:
        """Takes what entered the target's KV cache."""
        assert committed.features is not None, "the drafter taps features"
        parts = committed.features[:, 0].split(committed.lengths)
        for slot, start, features in zip(committed.slots, committed.starts, parts, strict=True):
            if start == 0:
                self.begin(slot, None)
            if start == self._known[slot]:  # else a part is missing: the slot gets no draft
                self._waiting[slot].append(features)
                self._known[slot] += len(features)

    def reusable(self, slot: int, length: int) -> int:
        """See `StackFeatures.reusable`; 0 if more went through the LSTM, which keeps its last state alone."""
        fed = self._fed[slot]
        return min(length, fed + sum(map(len, self._waiting[slot]))) if fed <= length else 0

    def begin(self, slot: int, prefix: Prefix | None) -> None:
        """Starts a sequence in a slot, with a prefix as `reusable` allowed; None for nothing."""
        source, length = prefix or (slot, 0)
        fed = min(self._fed[source], length)
        waiting = torch.cat(self._waiting[source])[: length - fed] if fed < length else None
        if source != slot and fed:
            self._last[slot], self._state[slot] = self._last[source], self._state[source]
            self.stack.cache.copy_rows(source, slot, fed)
        self._fed[slot], self._known[slot], self._waiting[slot] = fed, length, [] if waiting is None else [waiting]

    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, K, W), the block of features estimated from the last K committed positions; feeds what waits.

        Args:
            slots: B slots for which `is_known` holds.
            texts: The committed tokens of each, one more than features.
        """
        ends = [self._known[slot] for slot in slots]
        lengths = [self._feed_early(slot, text) for slot, text in zip(slots, texts, strict=True)]
        fused = self._fuse(slots, texts, lengths) if max(lengths) else rows_at(self._last, slots)
        chains = [max(length, self._block) for length in lengths]
        outputs = self.stack.run(self._nodes_of(fused, lengths, chains), self._pass_of(slots, ends, chains))
        for slot, end in zip(slots, ends, strict=True):
            self._fed[slot] = end
        sizes = [chain - self._block + len(self._plan.positions) for chain in chains]
        places = [end - len(self._plan.positions) + own for end in accumulate(sizes) for own in self._plan.ends]
        return outputs[integers_on(places, self._device)].view(len(slots), self._block, -1).to(self._dtype)

    def fill(self, expansion: Expansion, slots: Sequence[int], outputs: Tensor) -> None:
        """Fills trees of roots, without reading any tensor.

        Args:
            expansion: Trees of roots; changed.
            slots: Of the B sequences.
            outputs: (B, K, W), from `of`.
        """
        nodes = _Nodes(slots, [self._fed[slot] for slot in slots], self._device)
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
                blocks = self._further(_picked(blocks, places), paths[..., -self._block :], nodes)
                places = torch.arange(places.shape[1], device=self._device).expand_as(places)
                logits = self._logits(blocks, expansion.depth - depth)
            of_slot = logits[:, :, slot]
            expansion.grow(depth, of_slot if of_slot.shape[1] == 1 else _rows(of_slot, places))

    def _further(self, before: LastBlocks, tokens: Tensor, nodes: _Nodes) -> LastBlocks:
        """Returns the blocks after some nodes; tokens: (B, P, K) int64, drafted from the block before, node last."""
        batch, width, _ = tokens.shape
        pairs = paired(before.outputs, self._parts.embed(tokens).to(before.outputs.dtype))
        fused, states = self._head.lstm.run(pairs, before.state)
        own, parents = integers_on([self._plan.positions, self._plan.parents], self._device).unbind()
        begin = nodes.positions.shape[1] + len(own) * torch.arange(width, device=self._device).unsqueeze(1)
        is_first = (parents < 0).expand(batch, width, -1)
        new_parents = torch.where(is_first, before.ends.unsqueeze(2), begin + parents)
        positions = (nodes.next_positions + own).expand(batch, width, -1)
        nodes.next_positions = nodes.next_positions + self._block
        work = nodes.add(positions.flatten(1), new_parents.flatten(1))
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
        if waiting <= _TOGETHER:
            return waiting
        features = torch.cat(self._waiting[slot])
        self._waiting[slot] = []
        for part in features[: -self._block].split(_CHUNK):
            start = self._fed[slot]
            state = rows_at(self._state, [slot]) if start else None
            fused, states = self._head.lstm.run(self._pairs(part, text, start).unsqueeze(0), state)
            self._state[slot] = states[0, -1]
            self._last[slot] = torch.cat([self._last[slot], fused[0]])[-self._block :]
            work = Pass.of_chains([[0] * len(part)], slots=[slot], prefix_lens=[start], device=self._device)
            self.stack.append(fused[0], work)
            self._fed[slot] += len(part)
        self._waiting[slot] = [features[-self._block :]]
        return self._block

    def _fuse(self, slots: Sequence[int], texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> Tensor:
        """Runs the LSTM over what waits; (B, K + T, W), the last K outputs before it first, padded at the end."""
        most, parts = max(lengths), []
        for slot, text, length in zip(slots, texts, lengths, strict=True):
            pairs = self._last.new_zeros(most, 2 * self._last.shape[2])
            if length:
                pairs[:length] = self._pairs(torch.cat(self._waiting[slot]), text, self._fed[slot])
                self._waiting[slot] = []
            parts.append(pairs)
        state, last = rows_at(self._state, slots), rows_at(self._last, slots)
        is_new = integers_on([self._fed[slot] == 0 for slot in slots], self._device).bool()
        state = torch.where(is_new.view(-1, 1, 1, 1), 0.0, state)
        fused, states = self._head.lstm.run(torch.stack(parts), state)
        fused, states = torch.cat([last, fused], dim=1), torch.cat([state.unsqueeze(1), states], dim=1)
        rows, ends = torch.arange(len(slots), device=self._device), integers_on(lengths, self._device)
        index = integers_on(slots, self._device)
        self._state[index] = states[rows, ends]
        self._last[index] = fused[rows.unsqueeze(1), ends.unsqueeze(1) + torch.arange(self._block, device=self._device)]
        return fused

    def _pairs(self, features: Tensor, text: Sequence[int], start: int) -> Tensor:
        """(T, 2 W), the pairs of positions from `start` on, from (T, E) features and all committed tokens."""
        following = integers_on(text[start + 1 : start + 1 + len(features)], self._device)
        return paired(features.to(self._dtype), self._parts.embed(following).to(self._dtype))

    def _nodes_of(self, fused: Tensor, lengths: Sequence[int], chains: Sequence[int]) -> Tensor:
        """(M, W), inputs of the decoder block: each sequence's last positions as a chain, then the rest of the plan."""
        width, places = fused.shape[1], list[int]()
        for row, (length, chain) in enumerate(zip(lengths, chains, strict=True)):
            end = row * width + self._block + length
            places += range(end - chain, end)
            places += [end - self._block + position for position in self._plan.positions[self._block :]]
        return fused.flatten(0, 1)[integers_on(places, self._device)]

    def _pass_of(self, slots: Sequence[int], ends: Sequence[int], chains: Sequence[int]) -> Pass:
        """Returns the pass of `of`: `chains` last positions of each sequence, then the rest of the plan."""
        block, positions, parents = self._block, list[int](), list[int]()
        offsets, prefix_lens = [0], [end - chain for end, chain in zip(ends, chains, strict=True)]
        for end, chain in zip(ends, chains, strict=True):
            lead = chain - block
            positions += range(end - chain, end)
            parents += range(-1, chain - 1)
            positions += [end - block + position for position in self._plan.positions[block:]]
            parents += [parent + lead for parent in self._plan.parents[block:]]
            offsets.append(len(positions))
        packed = integers_on([positions, parents], self._device)
        return Pass(
            tokens=torch.zeros_like(packed[0]), positions=packed[0], parents=packed[1], slots=slots,
            prefix_lens=prefix_lens, offsets=offsets, logit_rows=None,
        )  # fmt: skip


def _rows(values: Tensor, places: Tensor) -> Tensor:
    """(B, P, …), rows of (B, P', …) by (B, P) indices."""
    batch = torch.arange(len(values), device=values.device).unsqueeze(1)
    return values[batch, places]


def _picked(blocks: LastBlocks, places: Tensor) -> LastBlocks:
    """(B, P, …), the block of each node by (B, P) indices."""
    return LastBlocks(
        outputs=_rows(blocks.outputs, places), state=_rows(blocks.state, places), ends=_rows(blocks.ends, places)
    )


class Options(HeadOptions):
    """Options of Falcon."""


class FalconDrafter(HeadDrafter):
    """Drafts a block of levels at once."""

    name = "falcon"
    reads = TargetReads(taps=("final",))  # the network reads all positions

    @property
    def head(self) -> FalconHead:
        """The network."""
        head = self.loaded.head
        assert isinstance(head, FalconHead), "`load_head` checks the method"
        return head

    def features_for(self, target: TargetHandle) -> FalconBlocks:
        """Returns the network's state of every slot."""
        loaded = self.loaded
        self._blocks = FalconBlocks(
            self.head, loaded.parts, target, dtype=loaded.dtype, num_expanded=self._most_blocks(),
            quantization=loaded.quantization,
        )  # fmt: skip
        return self._blocks

    def _most_blocks(self) -> int:
        """Returns the most blocks of a draft, timed chains included."""
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
        outputs = torch.zeros(1, config.block, config.hidden_size, device=roots.device, dtype=self.loaded.dtype)
        self._blocks.fill(begin_expansion(shape, roots, draws), [0], outputs)


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return FalconDrafter(options)
