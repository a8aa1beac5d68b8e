"""Predicted output: what is drafted from it, and what it brings."""

from contextlib import ExitStack
from typing import Any
from unittest import mock

import pytest
from drafting_contexts import GREEDY, attached, context, continued
from end_to_end.tiny_llms import llm
from hypothesis import given
from hypothesis import strategies as st

from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.records import StepRecord
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DraftRequest
from foretoken.drafters.ngram import NgramDrafter
from foretoken.drafters.ngram import Options as NgramOptions
from foretoken.drafters.prediction import FollowedText, PredictionDrafter, create
from foretoken.drafters.registry import drafter_options
from foretoken.drafting.exploration import Exploration
from foretoken.drafting.goodput import Goodput
from tests.tree_checks import check_tree


def drafter(*predictions: list[int] | None, prompt: list[int], **keys: Any) -> PredictionDrafter:
    """A drafter with a request for each prediction, in slots 0, 1, …"""
    options: Any = drafter_options({"method": "prediction", **keys})
    made = attached(create(options))
    for slot, prediction in enumerate(predictions):
        made.begin(slot, DraftRequest(request_id="0", prompt=prompt, params=GREEDY, prediction=prediction))
    assert isinstance(made, PredictionDrafter)
    return made


def drafted(lookup: PredictionDrafter, *tokens: list[int], **bounds: Any) -> list[list[int]]:
    """Tokens of each drafted tree, without the roots."""
    tree = lookup.propose(context(tokens, **bounds))
    check_tree(tree)
    return [list(row.tokens[1:]) for row in tree.rows()]


def test_the_prediction_is_drafted_from_its_beginning() -> None:
    text, prompt = list(range(20, 40)), [1, 2]
    lookup = drafter(text, None, prompt=prompt, num_speculative_tokens=4)
    assert drafted(lookup, prompt, prompt) == [text[:4], []]
    assert drafted(lookup, prompt, prompt, max_depth=[2, 3]) == [text[:2], []]
    assert drafted(lookup, [*prompt, *text[:9]], [*prompt, *text[:9]]) == [text[9:13], []]
    assert drafted(lookup, [*prompt, *text[:9], 50], prompt) == [text[10:14], []]
    assert drafted(lookup, [*prompt, *text[:9], 50, 51, *text[3:5]], prompt) == [text[5:9], []]
    assert drafted(lookup, [*prompt, *text[:9], 50, 51, *text[3:19]], prompt) == [[39], []]


FEW = st.lists(st.integers(0, 2), max_size=30)


@given(
    text=FEW, prompt=st.lists(st.integers(0, 2), min_size=1, max_size=5), output=FEW,
    path=st.lists(st.integers(0, 2), min_size=1, max_size=12), is_repeated=st.integers(0, 20),
    depth=st.integers(1, 6), longest=st.integers(2, 5),
)  # fmt: skip
def test_a_path_is_continued_as_if_it_were_committed(
    text: list[int], prompt: list[int], output: list[int], path: list[int], is_repeated: int, depth: int, longest: int
) -> None:
    """Whether the output repeats the prediction, as its first tokens do here, or not."""
    tokens, keys = [*prompt, *text[:is_repeated], *output], {"prediction_max_match": longest}
    found = continued(drafter(text, prompt=prompt, **keys), tokens, path, depth)
    assert [found] == drafted(drafter(text, prompt=prompt, **keys), [*tokens, *path], max_depth=depth)
    assert continued(drafter(None, prompt=prompt), tokens, path, depth) == []


def test_a_released_slot_starts_anew() -> None:
    lookup = drafter([5, 6, 7], prompt=[1])
    assert drafted(lookup, [1]) == [[5, 6, 7]]
    lookup.release(0)
    assert drafted(lookup, [1]) == [[]]
    lookup.begin(0, DraftRequest(request_id="1", prompt=[1, 5], params=GREEDY, prediction=[8, 9]))
    assert drafted(lookup, [1, 5]) == [[8, 9]]
    lookup.begin(0, DraftRequest(request_id="2", prompt=[1, 5], params=GREEDY))
    assert drafted(lookup, [1, 5]) == [[]]


def test_without_predictions_nothing_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """No request brings one: the roots as they are."""
    lookup = drafter(None, None, prompt=[1])
    monkeypatch.setattr(TokenTree, "from_rows", None)
    assert lookup.propose(context([[1], [1]])).width == 1


TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


@given(text=TOKENS, prompt=TOKENS, output=TOKENS, depth=st.integers(0, 6), max_nodes=st.integers(2, 20))
def test_a_tree_holds_what_follows_at_several_places(
    text: list[int], prompt: list[int], output: list[int], depth: int, max_nodes: int
) -> None:
    tokens = [*prompt, *output]
    lookup = drafter(text, prompt=prompt, tree="tree", max_nodes=max_nodes)
    tree = lookup.propose(context([tokens], max_depth=depth))
    check_tree(tree)
    followed = FollowedText(text, shortest=2, longest=16)
    followed.follow(tokens, len(prompt))
    places = list(followed.places(tokens, len(prompt)))[:4]
    wanted = [tuple(text[place : place + depth]) for place in places]
    ids, parents = tree.rows()[0]
    paths = {path_of(node, ids, parents) for node in range(1, len(ids))}
    prefixes = {path[:length] for path in wanted for length in range(1, len(path) + 1)}
    assert paths <= prefixes
    assert len(paths) == len(ids) - 1 == min(len(prefixes), max_nodes - 1)
    assert not wanted or wanted[0][: max_nodes - 1] in {*paths, ()}


def path_of(node: int, ids: Any, parents: Any) -> tuple[int, ...]:
    """Tokens from below the root to a node."""
    return (*path_of(parents[node], ids, parents), ids[node]) if node else ()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"prediction_min_match": 0}, "'prediction_min_match' of method 'prediction' is 0"),
        ({"prediction_max_match": 65}, "'prediction_max_match' of method 'prediction' is 65"),
        ({"prediction_min_match": "2"}, "is '2'"),
        ({"prediction_min_match": True}, "is True"),
        ({"prediction_min_match": 17}, "prediction_min_match must not be above prediction_max_match, 16"),
        ({"prediction": "abc"}, "method 'prediction' has no key 'prediction'"),
        ({"tree": "dynamic"}, "has no dynamic trees"),
    ],
)
def test_limits_of_options(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        drafter_options({"method": "prediction", **keys})


@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_tokens_of_a_prediction_that_are_accepted_are_counted(tree: str) -> None:
    """What OpenAI calls accepted_prediction_tokens; drafted and not accepted are the rejected ones."""
    params, prompt = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), [5, 6, 7]
    ids = llm({}).generate(prompt, params)[0].outputs[0].token_ids
    engine = llm({"speculative_config": {"method": "prediction", "num_speculative_tokens": 9, "tree": tree}})
    whole, edited, other, none = engine.generate(
        [
            {"prompt_token_ids": prompt, "prediction": ids},
            {"prompt_token_ids": prompt, "prediction": [*ids[:9], 3, *ids[10:]]},
            {"prompt_token_ids": prompt, "prediction": [(token + 1) % 60 for token in ids]},
            prompt,
        ],
        params,
    )
    assert all(output.outputs[0].token_ids == ids for output in (whole, edited, other, none))
    assert dict(whole.metrics.accepted_by) == {"prediction": 26}  # prefill gives the first token, each pass one
    assert (whole.metrics.steps, whole.metrics.num_drafted - whole.metrics.num_accepted) == (3, 0)
    assert 20 < edited.metrics.accepted_by["prediction"] < 29
    assert edited.metrics.num_drafted > edited.metrics.num_accepted
    assert other.metrics.num_accepted < 10 < other.metrics.num_drafted
    assert (none.metrics.num_drafted, none.metrics.steps) == (0, 29)


SETUPS: dict[str, Any] = {
    "no drafters": {},
    "plain": {"speculative_config": "plain"},
    "a lookup": {"speculative_config": "ngram"},
    "a fixed depth": {"speculative_config": "ngram:num_speculative_tokens=3"},
    "two lookups": {"speculative_config": "ngram+suffix"},
    "one of the caller's": {"drafter": lambda: NgramDrafter(NgramOptions(method="ngram"))},
}


@pytest.mark.parametrize("setup", SETUPS)
def test_a_prediction_drafts_whatever_the_drafters(setup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It did so only where the method was chosen at the start. Requests without one are drafted for as before."""
    monkeypatch.setattr(Goodput, "_is_look_due", lambda *_: False)  # no draft depends on the clock
    monkeypatch.setattr(Exploration, "charge", lambda *_: None)
    params, prompts = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True), [[5, 6, 7], [8, 9]]
    plain = [output.outputs[0] for output in llm({}).generate(prompts, params)]
    engine = llm(SETUPS[setup], max_num_seqs=2)
    predicted = {"prompt_token_ids": prompts[0], "prediction": plain[0].token_ids}
    got = engine.generate([predicted, prompts[1]], params)
    assert [output.outputs[0] for output in got] == plain
    assert got[0].metrics.accepted_by["prediction"] > 0
    assert "prediction" not in got[1].metrics.by_drafter or not got[1].metrics.by_drafter["prediction"].num_drafted
    again = engine.generate({**predicted, "speculative": {"enabled": False}}, params)[0]
    assert (again.outputs[0], again.metrics.num_drafted) == (plain[0], 0)


@pytest.mark.parametrize("setup", SETUPS)
def test_requests_without_predictions_pay_nothing(setup: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafter of predictions is called for nothing, no iteration has more tokens, others are asked alike."""
    monkeypatch.setattr(Goodput, "_is_look_due", lambda *_: False)  # no draft depends on the clock
    monkeypatch.setattr(Exploration, "charge", lambda *_: None)
    params, prompts = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True), [[5, 6, 5, 6, 5], [8, 9]]
    records: list[StepRecord] = []
    engine = llm(SETUPS[setup], max_num_seqs=2, on_step=records.append)
    methods = ("begin", "propose", "commit", "release", "continue_from")
    with ExitStack() as stack:
        calls = [stack.enter_context(mock.patch.object(PredictionDrafter, name)) for name in methods]
        engine.generate(prompts, params)
    assert not any(call.called for call in calls)
    asked = {each.name for record in records for each in record.asked}
    assert asked == {drafter.name for drafter in engine.drafters}
    if not engine.drafters:
        assert all(record.num_tokens == len(record.sequences) for record in records[1:])


FEW_TOKENS = st.lists(st.integers(0, 2), max_size=60)


class Slow:
    """The same by going through the whole text for every token."""

    def __init__(self, text: list[int], shortest: int, longest: int) -> None:
        self.text, self.shortest, self.longest = text, shortest, longest
        self.place = self.num_lost = 0

    def expected(self) -> int | None:
        place = self.place + self.num_lost
        return place if self.num_lost <= 4 and place < len(self.text) else None

    def matches(self, output: list[int]) -> list[int]:
        """All ends of matches of `shortest` tokens, of these the eight nearest on each side, best first."""
        lengths = {end: self.match_len(output, end) for end in range(len(self.text) + 1)}
        ends = [end for end, length in lengths.items() if length >= self.shortest]
        ahead = sorted(end for end in ends if end >= self.place)[:8]
        before = sorted((end for end in ends if end < self.place), reverse=True)[:8]
        rank = {end: index for index, end in enumerate([*ahead, *before])}
        return sorted(rank, key=lambda end: (-lengths[end], rank[end]))

    def match_len(self, output: list[int], end: int) -> int:
        longest = min(self.longest, len(output), end)
        return max(n for n in range(longest + 1) if self.text[end - n : end] == output[len(output) - n :])

    def add(self, output: list[int]) -> None:
        """The output has one more token."""
        expected = self.expected()
        if expected is not None and self.text[expected] == output[-1]:
            self.place, self.num_lost = expected + 1, 0
            return
        self.num_lost += 1
        found = self.matches(output)
        if found:
            self.place, self.num_lost = found[0], 0

    def places(self, output: list[int]) -> list[int]:
        wanted = [self.expected(), *self.matches(output)]
        return list(dict.fromkeys(place for place in wanted if place is not None and place < len(self.text)))


@given(
    text=FEW_TOKENS, prompt=FEW_TOKENS, output=FEW_TOKENS, copied=st.tuples(st.integers(0, 60), st.integers(0, 60)),
    shortest=st.integers(1, 3), more=st.integers(0, 4), steps=st.lists(st.integers(0, 7)),
)  # fmt: skip
def test_places_are_those_of_a_search(
    text: list[int], prompt: list[int], output: list[int], copied: tuple[int, int], shortest: int, more: int,
    steps: list[int],
) -> None:  # fmt: skip
    """However the output grew: one token at a time, or by accepted paths of any length."""
    begin, at = copied
    output = [*output[:at], *text[begin:], *output[at:]]
    followed, slow = (
        FollowedText(text, shortest=shortest, longest=shortest + more),
        Slow(text, shortest, shortest + more),
    )
    ends = {min(sum(steps[:count]), len(output)) for count in range(len(steps) + 1)} | {len(output)}
    for size in range(len(output) + 1):
        if size:
            slow.add(output[:size])
        if size in ends:
            tokens = [*prompt, *output[:size]]
            for _ in range(2):  # a proposal may be thrown away
                followed.follow(tokens, len(prompt))
                assert list(followed.places(tokens, len(prompt))) == slow.places(output[:size])


def after(text: list[int], output: list[int], shortest: int = 2) -> list[int]:
    """What the text says next at the likeliest place."""
    followed = FollowedText(text, shortest=shortest, longest=16)
    followed.follow(output)
    return text[next(followed.places(output), len(text)) :]


def test_changes_of_every_kind() -> None:
    text = list(range(10, 40))
    assert after(text, []) == text
    assert after(text, text[:7]) == text[7:]
    assert after(text, [*text[:7], 99]) == text[8:], "one token replaced by another"
    assert after(text, [*text[:7], 99, 98, text[9]]) == text[10:], "two of them"
    assert after(text, [*text[:7], *range(80, 90), *text[7:9]]) == text[9:], "ten put in"
    assert after(text, [*text[:7], *text[20:22]]) == text[22:], "thirteen left out"
    assert after(text, [*text[:7], *text[3:5]]) == text[5:], "a part of it again"
    assert after(text, [*text[:7], *range(80, 90)]) == [], "text of its own"
    assert after(text, text) == [], "its end"
    assert after([5], []) == [5]


def test_of_equal_lines_the_nearest_ahead() -> None:
    """A text of many equal lines: the place moves on, and once at its end goes back by one line at most."""
    line = [1, 2, 3, 4]
    text, output = line * 6, [*line * 2, 9, 1, 2]
    assert after(text, output) == text[10:]
    changed = [1, 2, 9, 4]
    for num_lines in range(1, 30):
        assert len(after(text, changed * num_lines)) <= max(len(line) * (6 - num_lines), len(line))


def test_looking_for_a_place_is_bounded() -> None:
    """Among thousands of matches sixteen are looked at."""
    compared = 0

    class Counted(int):
        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return int(self) == other

        __hash__ = int.__hash__

    text = [Counted(7)] * 5000
    followed = FollowedText(text, shortest=2, longest=16)
    output = [7] * 100 + [9] + [7] * 2
    followed.follow(output[:-1])
    compared = 0
    followed.follow(output)
    list(followed.places(output))
    assert 16 < compared < 3 * 16 * 16
