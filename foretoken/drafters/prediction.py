"""Predicted output: a request brings a text that its output probably repeats in part, and that is drafted.

An edit of a file repeats most of it, and so does a form that is filled in. The prediction comes with the prompt:
`{"prompt": ..., "prediction": ...}`; a request without one is not drafted for. Engines with other drafters, or none,
have this one besides, and ask it only while a request of the batch brings a prediction. The output's place in the
prediction is followed, and found again after every change (`foretoken.drafters.prediction`).

What OpenAI counts as `accepted_prediction_tokens` is `accepted_by["prediction"]` of a request's metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from copy import copy
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle, TargetReads
from foretoken.drafters.options import DrafterOptions
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOST_REPLACED = 4  # tokens after a change for which as many tokens of the text are taken for replaced
_NEAREST = 8  # matches looked at on each side of the last place


class FollowedText:
    """A text, and the place in it where an output goes on.

    While the output repeats the text, the place moves along. A token that differs ends that: the place is then sought
    among the matches of the output's last tokens nearest to where it was lost, until one is found. Meanwhile the first
    few tokens are taken to stand for as many tokens of the text, as after a name that was replaced.
    """

    def __init__(self, text: Sequence[int], *, shortest: int, longest: int) -> None:
        """An output that begins with the text.

        Args:
            text: Token ids. Not copied, and not to be changed.
            shortest: Tokens that a match has at least.
            longest: Tokens of a match that are compared at most.
        """
        self._text, self._shortest, self._longest = text, shortest, longest
        self._ends: dict[tuple[int, ...], list[int]] | None = None  # of each run of `shortest` tokens; made when needed
        self._place = 0  # of the token that comes next, or came next when the place was lost
        self._num_lost = 0  # output tokens since the place was lost; 0 while the text is followed
        self._num_seen = 0

    def branch(self) -> Self:
        """One that stands at the same place and may follow another output from here on; both share what is known."""
        if self._ends is None:
            self._ends = _ends_of_runs(self._text, self._shortest)
        return copy(self)

    def follow(self, output: Sequence[int], begin: int = 0) -> None:
        """Moves on by the tokens not seen yet.

        Args:
            output: The whole output so far, perhaps with a prompt before it; or its end, from `longest` tokens before
                those not seen yet on.
            begin: Where the output begins in it; what is before is matched with nothing. Below 0 where its first
                tokens are missing.
        """
        for size in range(begin + self._num_seen + 1, len(output) + 1):
            expected = self._expected()
            if expected is not None and self._text[expected] == output[size - 1]:
                self._place, self._num_lost = expected + 1, 0
                continue
            self._num_lost += 1
            found = next(self._matches(output, begin, size), None)
            if found is not None:
                self._place, self._num_lost = found, 0
        self._num_seen = len(output) - begin

    def places(self, output: Sequence[int], begin: int = 0) -> Iterator[int]:
        """Places at which the output may go on, the most likely first, each once.

        Args:
            output: What was last followed.
            begin: Where the output begins in it.

        Yields:
            Indices into the text, less than its length: where it is followed or taken to be; then where the output's
            last tokens are found, the longest match first, of equally long ones the nearest ahead, then the nearest
            before.
        """
        expected = self._expected()
        if expected is not None:
            yield expected
        for place in self._matches(output, begin, len(output)):
            if place not in (expected, len(self._text)):
                yield place

    def _expected(self) -> int | None:
        """Place of the token that comes next if the text is followed, or was changed in a few tokens; None if not."""
        place = self._place + self._num_lost
        return place if self._num_lost <= _MOST_REPLACED and place < len(self._text) else None

    def _matches(self, output: Sequence[int], begin: int, size: int) -> Iterator[int]:
        """Ends in the text of matches of the last of `size` tokens, in the order of `places`."""
        shortest = self._shortest
        if size - begin < shortest:
            return
        if self._ends is None:
            self._ends = _ends_of_runs(self._text, shortest)
        ends = self._ends.get(tuple(output[size - shortest : size]), [])
        nearest = bisect_left(ends, self._place)
        near = [*islice(ends, nearest, nearest + _NEAREST), *reversed(ends[max(0, nearest - _NEAREST) : nearest])]
        most = min(self._longest, size - begin)
        yield from sorted(near, key=lambda end: -self._match_len(output, size, end, most))

    def _match_len(self, output: Sequence[int], size: int, end: int, most: int) -> int:
        """Tokens before `end` in the text that are the last ones of `size` tokens, `most` at most."""
        length, most = self._shortest, min(most, end)
        while length < most and self._text[end - length - 1] == output[size - length - 1]:
            length += 1
        return length


def _ends_of_runs(text: Sequence[int], length: int) -> dict[tuple[int, ...], list[int]]:
    """Where each run of so many tokens ends, ascending; as many numbers as the text has tokens at most."""
    ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for end in range(length, len(text) + 1):
        ends[tuple(text[end - length : end])].append(end)
    return ends


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
