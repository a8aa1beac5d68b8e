"""Early exit: the target's first blocks draft; their output goes directly through the final norm and the LM head.

Nothing is loaded and nothing is read twice. Drafts run on the target's KV cache, which holds the first blocks' rows of
all committed tokens; the verification overwrites the rows of drafts. Early exit pays on models that were trained for it
(LayerSkip).

Source: Elhoushi et al. 2024, LayerSkip (arXiv 2404.16710); transformers calls the number of blocks
`assistant_early_exit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads, by_depth
from foretoken.drafters.partial_reads import PartialRows
from foretoken.drafters.self_drafts import SelfDrafts, SelfOptions, runner_of
from foretoken.trees.dynamic import AnyShape, DynamicShape

if TYPE_CHECKING:
    from foretoken.core.token_tree import TokenTree


class Options(SelfOptions):
    """Options of early exit; a third of the target's blocks drafts unless `exit_layer` says how many."""


class EarlyExitDrafter:
    """Drafts with the target's first blocks."""

    name = "early_exit"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options) -> None:
        self._options = options
        self._take_shape(options.language_model_shape())

    def attach(self, target: TargetHandle) -> None:
        """Checks that the target has more blocks; raises `ConfigError` when no block would be left out."""
        num_layers, wanted = target.model.num_layers, self._options.exit_layer
        if (wanted or 1) >= num_layers:
            raise ConfigError(
                f"exit_layer is {wanted or 1}, and '{target.name}' has {num_layers} blocks. Expected fewer than "
                f"{num_layers}."
            )
        runner = runner_of(target)
        self._num_layers = wanted or max(1, num_layers // 3)
        self._drafts = SelfDrafts(target, runner, PartialRows(runner.cache, 0), self._options, self._num_layers)
        self._take_shape(self._options.language_model_shape(lambda: target.costs))

    def _take_shape(self, shape: AnyShape) -> None:
        """Sets the shape of later drafts, at most as large as a verified tree: the target's cache holds its nodes."""
        if isinstance(shape, DynamicShape):
            shape = shape.truncated(1 + (shape.max_nodes - 1) // shape.top_k)
        self._shapes = by_depth(shape)
        self.nodes_by_depth: Sequence[int] = [each.num_nodes for each in self._shapes]

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Prepares nothing: all state is in the target's KV cache."""

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns trees, expanded level by level in the shape of the options."""
        return self._drafts.propose(context, self._shapes)

    def commit(self, committed: Committed) -> None:
        """Learns nothing: all state is in the target's KV cache."""

    def release(self, slot: int) -> None:
        """Forgets nothing."""


create: Callable[[Options], Drafter] = EarlyExitDrafter  # see `foretoken.drafters.registry`
