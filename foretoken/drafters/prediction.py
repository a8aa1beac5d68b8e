"""Predicted output: a request brings a text that its output probably repeats in part; that text is drafted.

An edit of a file repeats most of the file; so does a form that is filled in. The prediction comes with the prompt:
`{"prompt": ..., "prediction": ...}`. A request without a prediction gets no draft. Every engine has this drafter, and
asks it only while a request of the batch brings a prediction. The drafter follows the output's place in the prediction,
and finds the place again after every change.

OpenAI's `accepted_prediction_tokens` is `accepted_by["prediction"]` of a request's metrics.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from itertools import islice
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from pydantic import Field, model_validator

from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import LookupOptions, TargetReads
from foretoken.trees.merge import Trie

if TYPE_CHECKING:
    from foretoken.drafters.base import Committed, DraftContext, Drafter, DraftRequest, TargetHandle

_MOST_REPLACED = 4  # after a change of at most so many tokens, as many tokens of the text count as replaced
_NEAREST = 8  # matches examined on each side of the last place


class FollowedText:
    """A text, and the place in it where an output continues.

    While the output repeats the text, the place moves along. After a differing token, the place is searched among the
    matches of the output's last tokens, nearest to the old place first. Until it is found, the first few tokens count
    as replacements of as many tokens of the text, as when a name was replaced.
    """

    def __init__(self, text: Sequence[int], *, shortest: int, longest: int) -> None:
        """Starts at the beginning of a text, which must not be changed; compares `shortest` to `longest` tokens."""
        self._text, self._shortest, self._longest = text, shortest, longest
        self._ends: dict[tuple[int, ...], list[int]] | None = None  # of each run of `shortest` tokens; made when needed
        self._place = 0  # of the token that comes next, or came next when the place was lost
        self._num_lost = 0  # output tokens since the place was lost; 0 while the text is followed
        self._num_seen = 0

    def branch(self) -> Self:
        """Returns a copy at the same place, which may follow another output; both share the index."""
        if self._ends is None:
            self._ends = _ends_of_runs(self._text, self._shortest)
        return copy(self)

    def follow(self, output: Sequence[int], begin: int = 0) -> None:
        """Advances by the new tokens of an output, which begins at `begin`; earlier tokens are not matched.

        `output` may lack its first tokens, and `begin` is then below 0, but has `longest` tokens before the new ones.
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
        """Yields places at which the output may continue, the most likely first, each once.

        A place is an index into the text: first the followed or assumed place, then matches of the output's last
        tokens. The longest match comes first, among equals the nearest ahead, then the nearest behind. `begin` is where
        the output begins in `output`, the tokens that were last followed.
        """
        expected = self._expected()
        if expected is not None:
            yield expected
        for place in self._matches(output, begin, len(output)):
            if place not in (expected, len(self._text)):
                yield place

    def _expected(self) -> int | None:
        """Returns the place of the next token if the text is followed, or was changed in a few tokens; else None."""
        place = self._place + self._num_lost
        return place if self._num_lost <= _MOST_REPLACED and place < len(self._text) else None

    def _matches(self, output: Sequence[int], begin: int, size: int) -> Iterator[int]:
        """Yields ends in the text of matches of the last of `size` tokens, in the order of `places`."""
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
        """Returns how many tokens before `end` in the text equal the last of `size` tokens, at most `most`."""
        length, most = self._shortest, min(most, end)
        while length < most and self._text[end - length - 1] == output[size - length - 1]:
            length += 1
        return length


def _ends_of_runs(text: Sequence[int], length: int) -> dict[tuple[int, ...], list[int]]:
    ends: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for end in range(length, len(text) + 1):
        ends[tuple(text[end - length : end])].append(end)
    return ends


_MOST_PLACES = 4  # of the prediction in one tree


class Options(LookupOptions):
    """Options of predicted output: the longest and the shortest match of a search after a change, in tokens."""

    reads_predictions: ClassVar[bool] = True

    prediction_max_match: int = Field(default=16, ge=1, le=64)
    prediction_min_match: int = Field(default=2, ge=1, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> Options:
        if self.prediction_min_match > self.prediction_max_match:
            raise ValueError(
                f"prediction_min_match must not be above prediction_max_match, {self.prediction_max_match}"
            )
        return self


class _Predicted(NamedTuple):
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
        self.nodes_by_depth = options.nodes_by_depth
        self._predicted: dict[int, _Predicted] = {}

    def attach(self, target: TargetHandle) -> None:
        """Stores the device on which trees are made."""
        self._device = target.device

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Takes the request's prediction, if it has one."""
        if request.prediction is None:
            self._predicted.pop(slot, None)
            return
        options = self._options
        followed = FollowedText(
            request.prediction, shortest=options.prediction_min_match, longest=options.prediction_max_match
        )
        self._predicted[slot] = _Predicted(request.prediction, followed, len(request.prompt))

    def propose(self, context: DraftContext) -> TokenTree:
        """Returns what follows in the prediction, at one place or at several in one tree; roots alone without any."""
        if not self._predicted:
            return TokenTree.roots(context.roots, device=self._device)
        each = zip(context.slots, context.tokens, context.max_depth, context.max_nodes, strict=True)
        rows = [
            self._row(slot, tokens, min(depth, self._options.chain_len), min(nodes, self.nodes_by_depth[-1]))
            for slot, tokens, depth, nodes in each
        ]
        return TokenTree.from_rows(rows, device=self._device)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> Sequence[int]:
        """See `Lookup`."""
        predicted = self._predicted.get(slot)
        if predicted is None:
            return ()
        prediction, followed, begin = predicted
        followed.follow(tokens, begin)
        first = max(len(tokens) - self._options.prediction_max_match, 0)  # of the tokens that matches compare
        text, begin = [*tokens[first:], *path], begin - first
        ahead = followed.branch()
        ahead.follow(text, begin)
        place = next(ahead.places(text, begin), None)
        return () if place is None else prediction[place : place + depth]

    def commit(self, committed: Committed) -> None:
        """Learns nothing: `propose` follows the committed tokens."""

    def release(self, slot: int) -> None:
        """Forgets the prediction."""
        self._predicted.pop(slot, None)

    def _row(self, slot: int, tokens: Sequence[int], depth: int, max_nodes: int) -> TreeRow:
        trie = Trie(tokens[-1])
        predicted = self._predicted.get(slot)
        if predicted is not None and depth > 0:
            prediction, followed, begin = predicted
            followed.follow(tokens, begin)
            for place in islice(followed.places(tokens, begin), self._num_places):
                trie.add_path(prediction[place : place + depth], max_nodes)
        return trie.row()


create: Callable[[Options], Drafter] = PredictionDrafter  # see `foretoken.drafters.registry`
