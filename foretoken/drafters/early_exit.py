"""Early exit: the target's first blocks draft; their output goes directly through the final norm and the LM head.

Nothing is loaded and nothing is read twice. Drafts run on the target's KV cache, which holds the first blocks' rows of
all committed tokens; the verification overwrites the rows of drafts. Early exit pays on models that were trained for it
(LayerSkip).

Source: Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710); transformers calls the number of blocks
`assistant_early_exit`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DrafterOptions, TargetReads
from foretoken.drafters.captured import Prefixes
from foretoken.drafters.levels import KeptDraws, LevelPasses, SampleMethod, draft_by_levels
from foretoken.trees.dynamic import DynamicShape, begin_expansion
from foretoken.trees.merge import Pruning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle
    from foretoken.trees.dynamic import AnyShape


class Options(DrafterOptions):
    """Options of early exit; a third of the target's blocks drafts unless `exit_layer` says how many."""

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)

    exit_layer: int | None = Field(default=None, ge=1, le=1000)
    draft_sample_method: SampleMethod = "probabilistic"


class EarlyExitDrafter:
    """Drafts with the target's first blocks."""

    name = "early_exit"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options) -> None:
        self._options = options
        self._take_shape(options.language_model_shape())
        self._draws = KeptDraws(options.draft_sample_method, options.pruning, options.stop)

    def attach(self, target: TargetHandle) -> None:
        """Checks that the target has more blocks; raises `ConfigError` when no block would be left out."""
        num_layers, wanted = target.model.num_layers, self._options.exit_layer
        if (wanted or 1) >= num_layers:
            raise ConfigError(
                f"exit_layer is {wanted or 1}, and '{target.name}' has {num_layers} blocks. Expected fewer than these."
            )
        self._num_layers = wanted or max(1, num_layers // 3)
        self._target = target
        self._take_shape(self._options.language_model_shape(lambda: target.costs))

    def _take_shape(self, shape: AnyShape) -> None:
        """Sets the shape of later drafts, at most as large as a verified tree: the target's cache holds its nodes."""
        if isinstance(shape, DynamicShape):
            shape = shape.truncated(1 + (shape.max_nodes - 1) // shape.top_k)
        self._shape = shape
        self._shapes = [shape.truncated(depth) for depth in range(shape.depth + 1)]
        self.nodes_by_depth: Sequence[int] = [each.num_nodes for each in self._shapes]

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Prepares nothing: all state is in the target's KV cache."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns trees, expanded level by level in the shape of the options."""
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
        work = replace(work, num_layers=self._num_layers)
        if not target.draft_trees(work, expansion, vocab_size=target.vocab_size):
            prefixes = Prefixes(work.slots, [len(context.tokens[row]) for row in active])
            passes = LevelPasses(prefixes, target.device, last_position=target.context_len - 1)
            draft_by_levels(expansion, self._logits(work), passes, self._logits, num_layers=self._num_layers)
        return expansion.finish(active, room, context.roots)

    def commit(self, committed: Committed) -> None:
        """Learns nothing: all state is in the target's KV cache."""

    def release(self, slot: int) -> None:
        """Forgets nothing."""

    def _logits(self, work: Pass) -> Tensor:
        """(R, V), of a pass through the first blocks."""
        logits = self._target.run(work).logits
        assert logits is not None, "the pass asks for them"
        return logits


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return EarlyExitDrafter(options)
