"""Predicted output: a request brings a text that its output probably repeats in part, and that is drafted.

An edit of a file repeats most of it, and so does a form that is filled in. The prediction comes with the prompt:
`{"prompt": ..., "prediction": ...}`; a request without one is not drafted for. Engines with other drafters, or none,
have this one besides, and ask it only while a request of the batch brings a prediction. The output's place in the
prediction is followed, and found again after every change (`foretoken.lookups.followed_text`).

What OpenAI counts as `accepted_prediction_tokens` is `accepted_by["prediction"]` of a request's metrics.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from pydantic import Field, model_validator

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads
from foretoken.drafters.options import DrafterOptions
from foretoken.lookups.followed_text import FollowedText
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from collections.abc import Sequence

_MOST_PLACES = 4  # of the prediction that a tree goes on from


class Options(DrafterOptions):
    """Options of predicted output.

    Attributes:
        prediction_max_match: Tokens that are compared at most where a place is sought after a change.
        prediction_min_match: Shortest match that is trusted.
    """

    is_trusted: ClassVar[bool] = True
    can_prune_tree: ClassVar[bool] = True
    reads_predictions: ClassVar[bool] = True

    prediction_max_match: int = Field(default=16, ge=1, le=64)
    prediction_min_match: int = Field(default=2, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        """The shortest match cannot be longer than the longest."""
        if self.prediction_min_match > self.prediction_max_match:
            raise ValueError(
                f"prediction_min_match must not be above prediction_max_match, {self.prediction_max_match}"
            )
        return self


class _Predicted(NamedTuple):
    """A request's prediction, the place in it, and where the output begins."""

    prediction: Sequence[int]
    followed: FollowedText
    begin: int


class PredictionDrafter:
    """Proposes what follows in the request's prediction."""

    name = "prediction"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options) -> None:
        self._options = options
        self._num_places = 1 if options.tree == "chain" else _MOST_PLACES
        self.nodes_by_depth: Sequence[int] = range(1, options.chain_len + 2)
        if options.tree != "chain":
            self.nodes_by_depth = (1, *[options.max_nodes] * options.chain_len)
        self._predicted: dict[int, _Predicted] = {}

    def attach(self, target: TargetHandle) -> None:
        """Learns where trees lie."""
        self._device = target.device

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Takes the prediction, where there is one."""
        if request.prediction is None:
            self._predicted.pop(slot, None)
            return
        options = self._options
        followed = FollowedText(
            request.prediction, shortest=options.prediction_min_match, longest=options.prediction_max_match
        )
        self._predicted[slot] = _Predicted(request.prediction, followed, len(request.prompt))

    def propose(self, context: DraftContext) -> TokenTree:
        """What follows in the prediction, or at several places of it that share a tree; roots alone without any."""
        if not self._predicted:
            return TokenTree.roots(context.roots, device=self._device)
        each = zip(context.slots, context.tokens, context.max_depth, context.max_nodes, strict=True)
        rows = [
            self._row(slot, tokens, min(depth, self._options.chain_len), min(nodes, self.nodes_by_depth[-1]))
            for slot, tokens, depth, nodes in each
        ]
        return TokenTree.from_rows(rows, device=self._device)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> Sequence[int]:
        """What follows in the prediction if a path is generated; see `Lookup`."""
        predicted = self._predicted.get(slot)
        if predicted is None:
            return ()
        prediction, followed, begin = predicted
        followed.follow(tokens, begin)
        first = max(len(tokens) - self._options.prediction_max_match, 0)  # of the tokens that matches look at
        text, begin = [*tokens[first:], *path], begin - first
        ahead = followed.branch()
        ahead.follow(text, begin)
        place = next(ahead.places(text, begin), None)
        return () if place is None else prediction[place : place + depth]

    def commit(self, committed: Committed) -> None:
        """Nothing to learn: the place follows the committed tokens when it proposes."""

    def release(self, slot: int) -> None:
        """Forgets the prediction."""
        self._predicted.pop(slot, None)

    def _row(self, slot: int, tokens: Sequence[int], depth: int, max_nodes: int) -> TreeRow:
        """One sequence's tree."""
        trie = Trie(tokens[-1])
        predicted = self._predicted.get(slot)
        if predicted is not None and depth > 0:
            prediction, followed, begin = predicted
            followed.follow(tokens, begin)
            for place in islice(followed.places(tokens, begin), self._num_places):
                trie.add_path(prediction[place : place + depth], max_nodes)
        return trie.row()


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`."""
    return PredictionDrafter(options)
