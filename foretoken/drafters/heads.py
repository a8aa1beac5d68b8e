"""Drafters over trained heads; `_DRAFTERS` names the class of each method. Falcon has a file of its own.

A method here is a network in `foretoken/heads/METHOD.py`.

Heads of the EAGLE family have a decoder block over pairs of a feature and the token after it, with a KV cache of its
own. Committed pairs are fed with the target's features, whatever was drafted at their positions. A level of a draft is
one pass of the block over the nodes that have children; it stands behind the committed pairs and the levels above.
There the head's own states replace features. Later passes overwrite these rows. A pair stands at the position of its
feature: nodes of depth d at the root's position plus d - 1.

SPiRe drafts with a few of the target's blocks, over first and last tokens and a feedback memory, see
`foretoken.heads.spire`. A slot has a KV row for each committed token. With feedback these rows come from the target's
features alone, so that committed tokens need no pass. A draft begins at the root: it gathers the rows within sight, at
most `sinks + window - 1` a sequence, and adds a row for each node that has children. Drafted rows never enter the slot.
Native kernels have neither sinks nor shared KV rows, so these drafts run on torch's operations, as CUDA graphs on GPUs.

Letters: B sequences, E hidden size, W width of a head's state, M positions of a pass or nodes of a level, F features of
a position, T rows within sight, C committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from typing_extensions import override

from foretoken.core.backend import integers_on, runs_cpu_kernels
from foretoken.core.passes import Pass
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.drafters.base import READ_SHARE, DraftContext, Drafter, TargetHandle
from foretoken.drafters.falcon import FalconDrafter
from foretoken.drafters.head_drafter import HeadDrafter, HeadOptions
from foretoken.drafters.head_features import CHUNK, LastFeatures, StackFeatures, WaitingFeatures
from foretoken.drafters.levels import CapturedExpansion, LevelPasses, Prefixes
from foretoken.drafters.native.heads import AutoregressiveKernels
from foretoken.heads.hydra import HydraConfig, HydraHeads
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import AnyShape, begin_expansion

if TYPE_CHECKING:
    from foretoken.heads.base import AutoregressiveHead, BlockInputs
    from foretoken.heads.decoder_layer import KeyValue
    from foretoken.heads.medusa import MedusaHeads
    from foretoken.heads.mlp_speculator import MlpSpeculatorHead
    from foretoken.heads.spire import SpireHead
    from foretoken.models.loaded import LoadedModel
    from foretoken.models.parts import TargetParts
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.expansion import Expansion

Options = HeadOptions
_APPENDED = 0.1  # `read_share` of a block that keeps keys and values alone: 0.03 to 0.05 ms a token of the 0.5B, Zen 4


class MedusaDrafter(HeadDrafter):
    """Drafts with independent heads on the last feature; head k guesses the token k positions ahead.

    Source: Cai et al. 2024 (arXiv 2401.10774).
    """

    head: MedusaHeads

    @override
    def fill(self, expansion: Expansion, state: Tensor) -> None:
        """Fills a tree from (B, E) features: one head drafts a whole level."""
        expansion.grow_levels(self.head.all_logits(state, self.parts, expansion.depth).float())


class HydraDrafter(HeadDrafter):
    """Drafts with heads that read earlier drafted tokens. Hydra++ reads features through a decoder block of its own.

    Source: Ankner et al. 2024 (arXiv 2402.05109).
    """

    head: HydraHeads

    def __init__(self, options: HeadOptions, model: LoadedModel) -> None:
        super().__init__(options, model)
        config = self.checkpoint.config
        if isinstance(config, HydraConfig) and config.prefix is not None:  # the block reads all positions
            self.reads = replace(self.reads, is_last_enough=False)
            self.read_share, self.has_window = _APPENDED, True

    @override
    def features_for(self, target: TargetHandle) -> LastFeatures | WaitingFeatures:
        if self.head.prefix is None:
            return super().features_for(target)
        stack = self.stack_of(self.head.prefix)
        width, rows = self.head.config.hidden_size, self.rows_of(stack)
        return StackFeatures(stack, target, width=width, dtype=self.dtype, rows=rows)


class MlpSpeculatorDrafter(HeadDrafter):
    """Drafts with a small recurrence over drafted tokens that starts from the last feature.

    Source: Wertheimer et al. 2024 (arXiv 2404.19124).
    """

    head: MlpSpeculatorHead

    @override
    def state_of(self, features: Tensor) -> Tensor:
        return self.head.encode(features)


class AutoregressiveDrafter(HeadDrafter):
    """Drafts with a head of the EAGLE family, see the module.

    On CPUs one native call feeds the committed pairs and drafts a whole tree (`AutoregressiveKernels`). The loop over
    levels here serves all other cases. EAGLE-2 drafts dynamic trees with the same weights, HASS has others.

    Source: Li et al. 2024 (arXiv 2401.15077 and 2406.16858) and 2025 (2503.01840), Zhang et al. 2024 (2408.15766).
    """

    reads_last = False
    read_share, has_window = _APPENDED, True
    head: AutoregressiveHead

    @override
    def features_for(self, target: TargetHandle) -> StackFeatures:
        head = self.head
        self._stack = self.stack_of(head.layer, self._most_fed())
        self._rows = self.rows_of(self._stack, self._most_fed())
        steps = head.native_steps(self.parts) if runs_cpu_kernels(target.device) else None
        self._whole_drafts: AutoregressiveKernels | None = None
        if steps is not None:
            with suppress(UnsuitableError):  # the kernels do not support the head or its block
                self._whole_drafts = AutoregressiveKernels(steps, self._stack)
        self._pairs = StackFeatures(
            self._stack, target, width=2 * head.config.width, dtype=self.dtype, rows=self._rows,
            pair=self._paired, finish=self._joined,
        )  # fmt: skip
        return self._pairs

    @property
    def follows_floors(self) -> bool:
        """See `FloorsFollower`."""
        return self.options.may_end_anywhere

    @override
    def _expansions(self) -> CapturedExpansion[None]:
        return CapturedExpansion(self._grow, self._target.device, is_capturable=self._stack.backend == "graphs")

    def _most_fed(self) -> int:
        """Returns the most nodes below the roots that a draft feeds; needed before drafts choose the tree.

        The nodes lie behind as many committed pairs as the context holds. No position lies further, because every fed
        level has a node.
        """
        options = self.options
        if options.tree == "tree":  # one of the trees of so many nodes, chosen by the seconds of a chain
            return max(options.max_nodes, self.head.config.steps)
        shape = self._asked_shape()
        return shape.num_nodes if isinstance(shape, TreeShape) else shape.num_expanded

    def _paired(self, features: Tensor, work: Pass) -> BlockInputs:
        """The block's inputs of committed pairs: (M, F E) features and the tokens of a pass."""
        return self._inputs(self.head.initial_state(features), work.tokens)

    def _inputs(self, states: Tensor, tokens: Tensor) -> BlockInputs:
        """The block's inputs of pairs of (M, W) states and (M,) tokens."""
        return self.head.paired(states, self.head.embed(tokens, self.parts).to(states.dtype))

    def _joined(self, outputs: Tensor) -> Tensor:
        """(M, 2 W), states beside the inputs of logits; outputs: (M, W) of the block."""
        return torch.cat(self.head.outputs(outputs), dim=-1)

    def _expanded(self, context: DraftContext, rows: Sequence[int], shape: AnyShape) -> Expansion:
        slots, texts = [context.slots[row] for row in rows], [context.tokens[row] for row in rows]
        roots, draws = self._draws.of(context, rows, self._target.device)
        if self._whole_drafts is not None:  # also feeds the pairs that wait
            begun = begin_expansion(shape, roots, draws)
            pairs = self._pairs.waiting(slots, texts) if self._whole_drafts.can_draft(begun) else None
            if pairs is not None:
                self._whole_drafts.draft(pairs.work, self.head.initial_state(pairs.features).float(), begun)
                self._pairs.have_fed(slots)
                return begun
        outputs, positions = self._pairs.of(slots, texts), [len(text) - 1 for text in texts]
        rows = [self._rows.row(*each) for each in zip(slots, positions, strict=True)]
        prefixes = Prefixes(slots, rows, positions=positions)
        return self._expansion.expand(shape, roots, draws, [outputs], prefixes)[0]

    def _grow(self, expansion: Expansion, outputs: Tensor, prefixes: Prefixes) -> None:
        """Fills trees level by level, without reading any tensor; outputs: (B, 2 W), of the last committed pairs."""
        head, parts, width = self.head, self.parts, self.head.config.width
        passes = LevelPasses(prefixes, outputs.device)
        level = outputs.unsqueeze(1)
        for depth in expansion.levels():
            if depth:
                frontier = expansion.frontier(depth)
                states = frontier.inherited(level)[..., :width]
                work = passes.next(frontier)
                inputs, side = self._inputs(states.flatten(0, 1), frontier.tokens.flatten())
                fed = self._joined(self._stack.run(inputs, work, side).to(states.dtype))
                level = fed.view(len(outputs), -1, 2 * width)
            expansion.grow(depth, head.logits(depth, level[..., width:], parts).float())

    @override
    def trial(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        width = self.head.config.width
        expansion = begin_expansion(shape, roots, draws)
        kernels = self._whole_drafts
        if kernels is not None and kernels.can_draft(expansion):
            work = Pass.of_chains([[0]], slots=[0], prefix_lens=[0], has_last_logits=True)
            kernels.draft(work, torch.zeros(1, width), expansion)
        else:
            outputs = torch.zeros(1, 2 * width, device=roots.device, dtype=self.dtype)
            self._expansion.expand(shape, roots, draws, [outputs], Prefixes([0], [0]))


class Sight:
    """The KV rows that new tokens of B sequences may see; later tokens see those of earlier ones too.

    Attributes:
        keys: (B, T, Hk, Dh) of each group of blocks with the same rows: one with feedback, else one for each block.
        values: As `keys`.
        seen: (B, M, T) bool, rows of the last M tokens and of those before them on their paths.
    """

    def __init__(self, head: SpireHead, cache: SlotCache, places: Tensor) -> None:
        """Gathers the committed rows in sight; places: (B, 2) int64, slots and their numbers of rows."""
        self._head = head
        slots, self._lengths = places.unbind(1)
        config, device = head.config, places.device
        lengths, recent = self._lengths.unsqueeze(1), min(config.window - 1, cache.capacity)
        sinks = torch.arange(config.sinks, device=device).expand(len(places), -1)
        first = (lengths - recent).clamp_min(config.sinks)
        rows = torch.cat([sinks, first + torch.arange(recent, device=device)], dim=1)
        is_row = rows < lengths
        rows = rows.where(is_row, 0)
        is_finite = is_row.unsqueeze(2).unsqueeze(3)  # others may hold anything, and masked values are multiplied by 0
        self.keys, self.values = (
            [store[slots.unsqueeze(1), :, rows].where(is_finite, 0) for store in stores]
            for stores in (cache.keys, cache.values)
        )
        self._positions, self.seen = rows, is_row.unsqueeze(1)

    def read(self, tokens: Tensor, depths: Tensor, parts: TargetParts, *, is_chain: bool = False) -> Tensor:
        """Computes new tokens, and adds their rows; returns (B, M, E), the inputs of the LM head.

        Args:
            tokens: (B, M) int64; `seen` has the rows of their paths, which their own follow.
            depths: (M,) int64, positions behind the committed rows.
            is_chain: Whether each token is the child of the one before; else they do not see each other.
        """
        head, num = self._head, tokens.shape[1]
        positions = self._lengths.unsqueeze(1) + depths
        own = torch.eye(num, dtype=torch.bool, device=tokens.device)
        if is_chain:
            own = torch.ones_like(own).tril()
        before, has_feedback = self._positions, head.config.has_feedback
        self._positions = torch.cat([before, positions], dim=1)
        path, seen = self.seen, torch.cat([self.seen.expand(-1, num, -1), own.expand(len(tokens), -1, -1)], dim=2)
        self.seen = seen
        keys_at, visible = (before, path) if has_feedback else (self._positions, seen)
        mask = (visible & head.config.in_sight(positions.unsqueeze(2), keys_at.unsqueeze(1))).unsqueeze(1)

        def attention(index: int, query: Tensor, new: KeyValue | None) -> Tensor:
            group = 0 if has_feedback else index
            if new is not None:
                self._add(group, new)
            query, key, value = (part.transpose(1, 2) for part in (query, self.keys[group], self.values[group]))
            is_grouped = query.shape[1] != key.shape[1]
            return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=is_grouped).transpose(
                1, 2
            )

        states = head.states(tokens, positions, attention, parts)
        if has_feedback:
            self._add(0, head.memory_rows(states, positions))
        return head.output(states, parts)

    def _add(self, group: int, new: KeyValue) -> None:
        self.keys[group] = torch.cat([self.keys[group], new.key.to(self.keys[group].dtype)], dim=1)
        self.values[group] = torch.cat([self.values[group], new.value.to(self.values[group].dtype)], dim=1)


class SpireRows(WaitingFeatures):
    """The KV rows of committed tokens."""

    def __init__(self, head: SpireHead, parts: TargetParts, target: TargetHandle, dtype: torch.dtype) -> None:
        """Allocates rows for the context."""
        layer, config = head.config.layer, head.config
        shape = LayerShape(layer.num_key_value_heads, layer.head_dim, layer.head_dim)
        cache = SlotCache(
            [shape] * (1 if config.has_feedback else config.num_layers), num_slots=target.num_slots,
            capacity=target.context_len, dtype=dtype, device=target.device,
        )  # fmt: skip
        super().__init__(cache, target, dtype)
        self._head, self._parts, self._device = head, parts, target.device

    @override
    def is_known(self, slot: int, length: int) -> bool:
        """Returns whether all features are here; a draft needs a row to see."""
        return length > 0 and super().is_known(slot, length)

    @override
    def of(self, slots: Sequence[int], texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, 2) int64, the slots and their numbers of rows; feeds what waits."""
        waiting = [(slot, text) for slot, text in zip(slots, texts, strict=True) if self._waiting[slot]]
        if waiting and self._head.config.has_feedback:
            self._feed_features(waiting)
        for slot, text in waiting:
            if not self._head.config.has_feedback:
                for begin in range(self._fed[slot], self._known[slot], CHUNK):
                    self._feed_tokens(slot, text[begin : min(begin + CHUNK, self._known[slot])], begin)
            self._waiting[slot], self._fed[slot] = [], self._known[slot]
        return integers_on([[slot, self._known[slot]] for slot in slots], self._device)

    def _feed_features(self, waiting: Sequence[tuple[int, Sequence[int]]]) -> None:
        """Writes the rows of the target's features: of C tokens of all these slots at once."""
        places = [(slot, at, text[at]) for slot, text in waiting for at in range(self._fed[slot], self._known[slot])]
        slots, at, tokens = integers_on(list(zip(*places, strict=True)), self._device).unbind()
        features = torch.cat([self._joined(slot) for slot, _ in waiting])
        rows = self._head.committed_rows(features.unsqueeze(0), tokens.unsqueeze(0), at.unsqueeze(0), self._parts)
        for store, new in zip((self.cache.keys[0], self.cache.values[0]), rows, strict=True):
            store[slots, :, at] = new[0].to(store.dtype)

    def _feed_tokens(self, slot: int, tokens: Sequence[int], begin: int) -> None:
        """Runs the blocks over C committed tokens of one slot, and keeps their rows."""
        ids = integers_on([tokens], self._device)
        sight = Sight(self._head, self.cache, integers_on([[slot, begin]], self._device))
        sight.read(ids, torch.arange(len(tokens), device=self._device), self._parts, is_chain=True)
        for stores, rows in ((self.cache.keys, sight.keys), (self.cache.values, sight.values)):
            for store, new in zip(stores, rows, strict=True):
                store[slot, :, begin : begin + len(tokens)] = new[0, -len(tokens) :].transpose(0, 1)


class SpireDrafter(HeadDrafter):
    """Drafts token by token from the rows in sight, every level of a tree at once."""

    reads_last = False
    read_share = READ_SHARE
    head: SpireHead

    @override
    def features_for(self, target: TargetHandle) -> SpireRows:
        self._rows = SpireRows(self.head, self.parts, target, self.dtype)
        return self._rows

    @override
    def fill(self, expansion: Expansion, state: Tensor) -> None:
        """Fills trees level by level, without reading any tensor; state: (B, 2), from `SpireRows.of`."""
        sight = Sight(self.head, self._rows.cache, state)
        for depth in expansion.levels():
            frontier = expansion.frontier(depth)
            sight.seen = frontier.inherited(sight.seen)
            depths = torch.full((frontier.tokens.shape[1],), depth, device=state.device)
            hidden = sight.read(frontier.tokens, depths, self.parts)
            expansion.grow(depth, self.head.logits(depth, hidden, self.parts).float())

    @override
    def trial(self, shape: TreeShape, roots: Tensor, draws: DraftDraws) -> None:
        self._expansion.expand(shape, roots, draws, [integers_on([[0, 1]], roots.device)])


_DRAFTERS: dict[str, type[HeadDrafter]] = {
    "eagle": AutoregressiveDrafter,
    "eagle3": AutoregressiveDrafter,
    "falcon": FalconDrafter,
    "hydra": HydraDrafter,
    "medusa": MedusaDrafter,
    "mlp_speculator": MlpSpeculatorDrafter,
    "mtp": AutoregressiveDrafter,
    "spire": SpireDrafter,
}


def create_for(options: HeadOptions, model: LoadedModel) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return _DRAFTERS[options.method](options, model)
