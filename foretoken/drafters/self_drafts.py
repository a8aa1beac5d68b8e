"""Drafts of the target for itself: through all of its blocks or the first ones, on its whole KV cache or a part of it.

Letters: B sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DrafterOptions
from foretoken.drafters.captured import Prefixes
from foretoken.drafters.guesses import Chain, fill_chains
from foretoken.drafters.levels import KeptDraws, SampleMethod, TreeDrafts
from foretoken.trees.dynamic import begin_expansion
from foretoken.trees.merge import Pruning

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.drafters.base import DraftContext, TargetHandle
    from foretoken.drafters.guesses import Guesses
    from foretoken.drafters.windows import PartialRows
    from foretoken.runner.runner import Runner
    from foretoken.trees.dynamic import AnyShape


class SelfOptions(DrafterOptions):
    """Options of targets that draft for themselves.

    Attributes:
        exit_layer: Number of the target's blocks that draft; None for the method's default.
        draft_sample_method: As for `draft_model`.
    """

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)

    exit_layer: int | None = Field(default=None, ge=1, le=1000)
    draft_sample_method: SampleMethod = "probabilistic"


def runner_of(target: TargetHandle) -> Runner:
    """Returns the target's runner; raises `ConfigError` for drafters that do not get it, and for recurrent targets."""
    if target.target_runner is None:
        raise ConfigError("the drafter runs the target itself, and it is not trusted. Set trust_drafter.")
    if target.target_runner.cache.states is not None:
        raise ConfigError(
            f"'{target.name}' has recurrent layers, whose states a part of the model or of its KV rows does not give. "
            "Expected attention in every layer. Use a lookup, a draft model or a head."
        )
    return target.target_runner


class SelfDrafts:
    """Drafts below the roots of a batch."""

    def __init__(
        self,
        target: TargetHandle,
        runner: Runner,
        rows: PartialRows,
        options: SelfOptions,
        num_layers: int,
        guesses: Guesses | None = None,
    ) -> None:
        """Prepares for passes of `runner` through the first `num_layers` blocks.

        `rows`: of its cache. `guesses`: for chains; None drafts level by level.
        """
        self._target, self._rows, self._guesses = target, rows, guesses
        self._trees = TreeDrafts(
            runner,
            vocab_size=target.vocab_size,
            num_layers=num_layers if num_layers < runner.model.num_layers else None,
        )
        self._draws = KeptDraws(options.draft_sample_method, options.pruning, options.stop)

    def propose(self, context: DraftContext, shapes: Sequence[AnyShape]) -> TokenTree:
        """Returns trees as deep as there is room; shapes: by depth."""
        target, lengths = self._target, [len(tokens) - 1 for tokens in context.tokens]
        room = [
            min(depth, target.context_len - 1 - length)
            for depth, length in zip(context.max_depth, lengths, strict=True)
        ]
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=target.device)
        slots, positions = [context.slots[row] for row in active], [lengths[row] for row in active]
        held = [self._rows.make_room(slot, length) for slot, length in zip(slots, positions, strict=True)]
        roots, draws = self._draws.of(context, active, target.device)
        shape = shapes[min(max(room), len(shapes) - 1)]
        if self._guesses is not None:
            chains = [
                Chain(slot, first, context.tokens[row], min(room[row], shape.depth))
                for slot, first, row in zip(slots, held, active, strict=True)
            ]
            begun = begin_expansion(shape, roots, draws)
            fill_chains(begun, draws, chains, self._guesses, self._trees.logits)
            return begun.finish(active, room, context.roots)
        work = Pass.of_chains(
            [context.tokens[row][-1:] for row in active],
            slots=slots, prefix_lens=held, first_positions=positions, device=target.device, has_last_logits=True,
        )  # fmt: skip
        prefixes = Prefixes(slots, [rows + 1 for rows in held], positions=[length + 1 for length in positions])
        expansion, _ = self._trees.draft(work, prefixes, shape, roots, draws)
        return expansion.finish(active, room, context.roots)
