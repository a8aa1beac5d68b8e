"""The target's own first blocks draft: their output goes through the final norm and the LM head at once.

Nothing is loaded and nothing is read twice: drafts run on the target's KV cache, where the first blocks' keys and
values of all committed tokens lie already, and what a draft writes behind them is written anew by the verification.
It pays on models that were trained for it (LayerSkip), whose early blocks already say what the last one will.

Source: Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710); transformers calls the number of blocks
`assistant_early_exit`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from pydantic import Field

from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads
from foretoken.drafters.options import DrafterOptions
from foretoken.drafters.shared.drafts import KeptDraws, LevelPasses
from foretoken.trees.dynamic import DynamicShape, begin_expansion
from foretoken.trees.pruning import Pruning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.trees.dynamic import AnyShape, ShapedExpansion


class Options(DrafterOptions):
    """Options of self-drafting.

    Attributes:
        exit_layer: After how many of the target's blocks a draft ends; None for a third of them.
        draft_sample_method: See `foretoken.drafters.draft_model`.
    """

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)

    exit_layer: int | None = Field(default=None, ge=1, le=1000)
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"


class EarlyExitDrafter:
    """Drafts with the target's first blocks."""

    name = "early_exit"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options) -> None:
        self._options = options
        self._take_shape(options.language_model_shape())
        self._draws = KeptDraws(greedy=options.draft_sample_method == "greedy", pruning=options.pruning)

    def attach(self, target: TargetHandle) -> None:
        """Learns how deep the target is.

        Raises:
            ConfigError: When no block would be left out.
        """
        num_layers, wanted = target.model.num_layers, self._options.exit_layer
        if (wanted or 1) >= num_layers:
            raise ConfigError(
                f"exit_layer is {wanted or 1}, and '{target.name}' has {num_layers} blocks. Expected fewer than these."
            )
        self._num_layers = wanted or max(1, num_layers // 3)
        self._target = target
        self._take_shape(self._options.language_model_shape(lambda: target.costs))

    def _take_shape(self, shape: AnyShape) -> None:
        """Drafts trees of this shape from now on, cut off at the depth that is allowed.

        Drafted nodes lie in the target's cache, which has room for as many as a verified tree has.
        """
        if isinstance(shape, DynamicShape):
            shape = shape.truncated(1 + (shape.max_nodes - 1) // shape.top_k)
        self._shape = shape
        self._shapes = [shape.truncated(depth) for depth in range(shape.depth + 1)]
        self.nodes_by_depth: Sequence[int] = [each.num_nodes for each in self._shapes]

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Nothing to prepare: the target's KV cache is all there is."""

    def propose(self, context: DraftContext) -> TokenTree:
        """The shape, expanded level by level."""
        target = self._target
        room = [
            min(depth, target.context_len - len(tokens))
            for depth, tokens in zip(context.max_depth, context.tokens, strict=True)
        ]
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=target.device)
        roots, draws = self._draws.of(context, active, target.device)
        expansion = begin_expansion(self._shapes[min(max(room), self._shape.depth)], roots, draws)
        work = Pass.of_chains(
            [context.tokens[row][-1:] for row in active],
            slots=[context.slots[row] for row in active],
            prefix_lens=[len(context.tokens[row]) - 1 for row in active],
            device=target.device,
            has_last_logits=True,
        )
        self._fill(replace(work, num_layers=self._num_layers), expansion)
        return expansion.finish(active, room, context.roots)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn: what was committed lies in the target's KV cache."""

    def release(self, slot: int) -> None:
        """Nothing to forget."""

    def _fill(self, work: Pass, expansion: ShapedExpansion) -> None:
        """Fills trees, in one call where the decoder can; work: the pass over their roots."""
        if self._target.draft_trees(work, expansion, vocab_size=self._target.vocab_size):
            return
        passes = LevelPasses(work.slots, [length + 1 for length in work.prefix_lens], self._target.device)
        for depth in expansion.levels():
            if not depth:
                expansion.grow(depth, self._logits(work).unsqueeze(1))
                continue
            level = passes.next(expansion.frontier(depth))
            logits = self._logits(
                replace(
                    level,
                    # As in a draft model: what is drafted past the context's end is cut off.
                    positions=level.positions.clamp_max(self._target.context_len - 1),
                    logit_rows=torch.arange(level.num_tokens, device=level.tokens.device),
                    num_layers=self._num_layers,
                )
            )
            expansion.grow(depth, logits.view(level.num_sequences, -1, logits.shape[-1]))

    def _logits(self, work: Pass) -> Tensor:
        """(R, V), of a pass through the first blocks."""
        logits = self._target.run(work).logits
        assert logits is not None, "the pass asks for them"
        return logits


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return EarlyExitDrafter(options)
