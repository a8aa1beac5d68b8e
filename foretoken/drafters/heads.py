"""Drafters over trained heads; `_DRAFTERS` names the class of each method. Falcon and SPiRe have files of their own.

A method here is a network in `foretoken/heads/METHOD.py`.

Heads of the EAGLE family have a decoder block over pairs of a feature and the token after it, with a KV cache of its
own. Committed pairs are fed with the target's features, whatever was drafted at their positions. A level of a draft is
one pass of the block over the nodes that have children; it stands behind the committed pairs and the levels above.
There the head's own states replace features. Later passes overwrite these rows. A pair stands at the position of its
feature: nodes of depth d at the root's position plus d - 1.

Letters: B sequences, E hidden size, W width of a head's state, M positions of a pass, F features of a position.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import override

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.passes import Pass
from foretoken.decoder.base import UnsuitableError
from foretoken.drafters.captured import CapturedExpansion, Prefixes
from foretoken.drafters.falcon import FalconDrafter
from foretoken.drafters.head_drafter import HeadDrafter, HeadOptions
from foretoken.drafters.head_features import StackFeatures
from foretoken.drafters.levels import LevelPasses
from foretoken.drafters.native.heads import AutoregressiveKernels
from foretoken.drafters.spire import SpireDrafter
from foretoken.heads.hydra import HydraConfig
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import begin_expansion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import DraftContext, Drafter, TargetHandle
    from foretoken.drafters.head_features import LastFeatures, WaitingFeatures
    from foretoken.heads.base import AutoregressiveHead, BlockInputs
    from foretoken.heads.hydra import HydraHeads
    from foretoken.heads.medusa import MedusaHeads
    from foretoken.heads.mlp_speculator import MlpSpeculatorHead
    from foretoken.models.loaded import LoadedModel
    from foretoken.sampling.draft_draws import DraftDraws
    from foretoken.trees.dynamic import AnyShape, ShapedExpansion
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

    @property
    @override
    def read_share(self) -> float:
        return super().read_share if self.reads.is_last_enough else _APPENDED

    @override
    def features_for(self, target: TargetHandle) -> LastFeatures | WaitingFeatures:
        if self.head.prefix is None:
            return super().features_for(target)
        stack = self.stack_of(self.head.prefix)
        width, rows = self.head.config.hidden_size, self.rows_of(stack)
        return StackFeatures(stack, target, width=width, dtype=self.dtype, rows=rows)

    @property
    @override
    def has_window(self) -> bool:
        config = self.checkpoint.config
        return isinstance(config, HydraConfig) and config.prefix is not None


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
    head: AutoregressiveHead

    @property
    @override
    def read_share(self) -> float:
        return _APPENDED

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
    @override
    def has_window(self) -> bool:
        return True

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
        if self._whole_drafts is not None:
            expansion = begin_expansion(shape, roots, draws)
            if self._has_drafted(self._whole_drafts, expansion, slots, texts):
                return expansion
        outputs, positions = self._pairs.of(slots, texts), [len(text) - 1 for text in texts]
        rows = [self._rows.row(*each) for each in zip(slots, positions, strict=True)]
        prefixes = Prefixes(slots, rows, positions=positions)
        return self._expansion.expand(shape, roots, draws, [outputs], prefixes)[0]

    def _has_drafted(
        self,
        kernels: AutoregressiveKernels,
        expansion: ShapedExpansion,
        slots: Sequence[int],
        texts: Sequence[Sequence[int]],
    ) -> bool:
        """Fills trees in one native call, which also feeds waiting pairs; False if the loop over levels is needed."""
        if not kernels.can_draft(expansion):
            return False
        pairs = self._pairs.waiting(slots, texts)
        if pairs is None:
            return False
        kernels.draft(pairs.work, self.head.initial_state(pairs.features).float(), expansion)
        self._pairs.have_fed(slots)
        return True

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


_DRAFTERS: dict[str, type[HeadDrafter]] = {
    "eagle": AutoregressiveDrafter,
    "eagle3": AutoregressiveDrafter,
    "falcon": FalconDrafter,
    "hydra": HydraDrafter,
    "medusa": MedusaDrafter,
    "mlp_speculator": MlpSpeculatorDrafter,
    "spire": SpireDrafter,
}


def create_for(options: HeadOptions, model: LoadedModel) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return _DRAFTERS[options.method](options, model)
