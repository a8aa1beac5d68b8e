"""Lookahead decoding against the published layout and against its steps written down once more."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafting_contexts import attached, context
from greedy_steps import Ranking, step
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import EOS_ID

from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow, ancestor_mask
from foretoken.drafters.base import DraftRequest
from foretoken.drafters.lookahead import LookaheadDrafter, NgramPool, create
from foretoken.drafters.registry import drafter_options
from foretoken.trees.merge import merge_trees
from tests.tree_checks import check_tree

SIZES = [(7, 5), (1, 2), (4, 2), (1, 4), (3, 3), (2, 6)]


def drafter(prompt: Sequence[int] = range(20, 60), *, seed: int | None = None, **options: Any) -> LookaheadDrafter:
    """An attached drafter with a sequence in slot 0."""
    made = create(drafter_options({"method": "lookahead", **options}))  # type: ignore[arg-type]
    attached(made, model=SimpleNamespace(eos_ids=(EOS_ID,)))
    params = SamplingParams(temperature=0.0 if seed is None else 1.0, seed=seed)
    made.begin(0, DraftRequest(request_id="0", prompt=list(prompt), params=params))
    assert isinstance(made, LookaheadDrafter)
    return made


def ranking(text: Sequence[int]) -> list[int]:
    """A target whose text repeats itself for a while, and then changes."""
    return [(2 * text[-1] + (text[-2] % 5 == 0) + len(text) // 60) % 13 + 3]


def long_memory(text: Sequence[int]) -> list[int]:
    """A target that every token of the text matters to: one that is shown another text answers something else."""
    return [sum((place + 1) * token * token for place, token in enumerate(text)) % 61 + 3]


def published_sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
    """Whether a token of the window sees another, as (level, column): level 0 is causal, others see its diagonal."""
    (level, column), (key_level, key_column) = query, key
    if key_level == 0:
        return key_column <= column
    return key_column == column and key_level <= level


@pytest.mark.parametrize(("width", "ngram"), SIZES)
def test_a_full_window_is_the_published_one(width: int, ngram: int) -> None:
    """Mask and positions of W columns and N - 1 levels; for W = 7 and N = 5 that are 28 nodes."""
    made = drafter(lookahead_window=width, lookahead_ngram=ngram)
    window = made._windows[0]
    # Different tokens, as two equal ones after the same text are one node; column 0 has the root in its place.
    window.columns = [[100 * j + level for level in range(ngram - 1)] for j in range(width)]
    tree = made.propose(context([[9, 0]], max_depth=64))
    check_tree(tree)
    assert tree.width == width * (ngram - 1)
    assert (width, ngram) != (7, 5) or tree.width == 28
    places = [divmod(token, 100)[::-1] for token in tree.tokens[0].tolist()]  # (level, column)
    assert sorted(places) == sorted((level, column) for level in range(ngram - 1) for column in range(width))
    sees = [[published_sees(query, key) for key in places] for query in places]
    assert torch.equal(ancestor_mask(tree.parents)[0], torch.tensor(sees))
    assert tree.depths[0].tolist() == [level + column for level, column in places]  # positions after the root's
    assert tree.source is not None
    assert tree.source[0].tolist() == [0] + [PROBE] * (tree.width - 1)


class Published:
    """The steps of the paper's code on lists of levels, with the bonus token."""

    def __init__(self, target: Ranking, first_level: list[int], width: int, ngram: int, num_guesses: int) -> None:
        self.target, self.levels = target, [first_level]
        self.width, self.num_levels, self.num_guesses = width, ngram - 1, num_guesses
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def answer(self, text: list[int], level: int, column: int) -> int:
        """The target's most probable token after a token of the window; column 0 of level 0 is the text's last one."""
        seen = [*text, *self.levels[0][:column], *(self.levels[i][column] for i in range(1, level + 1))]
        return self.target(seen)[0]

    def step(self, text: list[int]) -> None:
        """One iteration; the text grows."""
        last, before = text[-1], list(text)
        best: list[int] = []
        for guess in self.pool.get(last, []):
            hits: list[int] = []
            while len(hits) < len(guess) and guess[len(hits)] == self.target([*text, *hits])[0]:
                hits.append(guess[len(hits)])
            best = max(best, hits, key=len)
        text += best
        text.append(self.target(text)[0])
        filled = len(self.levels)
        if filled < self.num_levels:
            num_columns = len(self.levels[0]) + 1
            answers = [self.answer(before, filled - 1, column) for column in range(1, num_columns)]
            self.levels = [*([level[1:] for level in self.levels]), answers]
            return
        results = [self.answer(before, filled - 1, column) for column in range(self.width)]
        for column, result in enumerate(results):
            key = self.levels[0][column - 1] if column else last
            guess = (*(level[column] for level in self.levels[1:]), result)
            others = [other for other in self.pool.get(key, []) if other != guess]
            self.pool[key] = [*others, guess][-self.num_guesses :]
        if self.num_levels == 1:
            self.levels = [results[1:]]
        else:
            self.levels = [self.levels[1][1:], *self.levels[2:], results]


@pytest.mark.parametrize("target", [ranking, long_memory])
@pytest.mark.parametrize(("width", "ngram"), SIZES)
def test_text_window_and_pool_are_those_of_the_published_steps(width: int, ngram: int, target: Ranking) -> None:
    made = drafter(lookahead_window=width, lookahead_ngram=ngram, lookahead_guesses=3)
    window = made._windows[0]
    first_level = [token for (token,) in window.columns[1:]]
    assert len(first_level) == width + ngram - 3
    model = Published(target, first_level, width, ngram, 3)
    text, expected = [5, 6, 7], [5, 6, 7]
    lengths = set()
    for _ in range(150):
        before = len(text)
        step(made, [text], target, max_depth=99)
        model.step(expected)
        assert text == expected
        lengths.add(len(text) - before)
        levels = [list(level) for level in zip(*window.columns, strict=True)]
        assert [levels[0][1:], *levels[1:]] == model.levels
        for key, ngrams in model.pool.items():
            assert list(window.pool.after(key)) == ngrams[::-1]
        assert window.pool.num_ngrams == sum(map(len, model.pool.values()))
    assert target is long_memory or lengths >= {1, ngram}, "whole guesses are accepted"


def test_a_step_writes_up_to_n_tokens() -> None:
    """N - 1 guesses and the bonus token."""
    made = drafter(lookahead_ngram=4)
    made._windows[0].pool.add(7, (8, 9, 10))
    text = [6, 7]
    step(made, [text], lambda seen: [seen[-1] + 1])
    assert text == [6, 7, 8, 9, 10, 11]


def test_guesses_share_prefixes_and_stand_before_the_window() -> None:
    made = drafter(lookahead_window=2, lookahead_ngram=4, lookahead_guesses=3)
    window = made._windows[0]
    for guess in ((9, 9, 9), (1, 2, 3), (1, 2, 4), (1, 5, 6)):  # the first is the oldest
        window.pool.add(7, guess)
    window.columns = [[0, 1, 2], [1, 8, 8]]  # the chain's 1 and column 0's 1 and 2 are guesses, too
    tree = made.propose(context([[7]]))
    assert tree.rows()[0] == TreeRow([7, 1, 5, 6, 2, 4, 3, 8, 8], [-1, 0, 1, 2, 1, 4, 4, 1, 7])
    assert tree.source is not None
    assert (tree.source[0] == PROBE).tolist() == [False] * 7 + [True] * 2
    chain = drafter(lookahead_window=2, lookahead_ngram=4, tree="chain", num_speculative_tokens=2)
    chain._windows[0].pool.add(7, (1, 2, 3))
    chain._windows[0].pool.add(7, (1, 5, 6))
    chain._windows[0].columns = [[0, 11, 12], [13, 14, 15]]
    assert chain.propose(context([[7]])).rows()[0].tokens == [7, 1, 5, 11, 12, 13, 14, 15]


def test_answers_are_found_in_merged_trees() -> None:
    """Whatever else is verified, in front of the window or in its midst, the window moves the same way."""
    alone, merged = (drafter(lookahead_window=3, lookahead_ngram=4) for _ in range(2))
    texts = [[5, 6, 7], [5, 6, 7]]
    for _ in range(30):
        columns = alone._windows[0].columns
        other = TokenTree.from_rows([TreeRow([texts[0][-1], columns[1][0], 4, 6, 5], [-1, 0, 1, 1, 0])])
        step(alone, texts[:1], ranking, max_depth=99)
        step(merged, texts[1:], ranking, max_depth=99, change=lambda tree, first=other: merge_trees([first, tree]))
        texts[0] = list(texts[1])  # the other tree's tokens may be accepted, too
        assert merged._windows[0].columns == alone._windows[0].columns
        assert all(
            list(merged._windows[0].pool.after(key)) == list(alone._windows[0].pool.after(key)) for key in range(67)
        )


def test_without_answers_the_window_stays() -> None:
    """Nothing was proposed, or what was proposed has been cut off: while it fills, and when it is full."""
    made, roots_alone = (
        drafter(lookahead_window=3, lookahead_ngram=4),
        lambda tree: TokenTree.roots([tree.tokens[0, 0]]),
    )
    text = [5, 6, 7]
    for _ in range(6):
        before = [list(column) for column in made._windows[0].columns]
        step(made, [text], ranking, change=roots_alone)
        assert made._windows[0].columns == before
        first = made.propose(context([text]))
        assert made.propose(context([text])).rows() == first.rows(), "a proposal may be thrown away"
        assert made._windows[0].columns == before
        step(made, [text], ranking)
        assert made._windows[0].columns != before


def test_columns_without_an_answer_are_kept_or_start_anew() -> None:
    """As where a merged tree has no room for the last probes."""
    made = drafter(lookahead_window=3, lookahead_ngram=4)
    window, text = made._windows[0], [5, 6, 7]
    columns = [list(column) for column in window.columns]
    step(made, [text], ranking, change=lambda tree: tree.first_nodes(tree.width - 2))
    assert [column[0] for column in window.columns] == [column[0] for column in columns[1:]]
    assert [len(column) for column in window.columns] == [2] * 4
    assert all(column[1] in range(20, 60) for column in window.columns[-2:]), "tokens of the prompt"
    assert not any(column[1] in range(20, 60) for column in window.columns[:-2]), "answers"
    step(made, [text], ranking)
    columns = [list(column) for column in window.columns]
    assert [len(column) for column in columns] == [3, 3, 3]
    step(made, [text], ranking, change=lambda tree: tree.first_nodes(tree.width - 1))
    assert window.columns[2] == columns[2]
    assert [column[:2] for column in window.columns[:2]] == [column[1:] for column in columns[:2]]
    assert made._windows[0].pool.num_ngrams == 2


@pytest.mark.parametrize("depth", range(6))
def test_columns_are_proposed_whole_or_not_at_all(depth: int) -> None:
    made = drafter(lookahead_window=3, lookahead_ngram=4)
    made._windows[0].columns = [[0, 11, 12], [13, 14, 15], [16, 17, 18]]
    tree = made.propose(context([[7]], max_depth=depth))
    assert tree.max_depth <= depth
    expected = [7, 11, 12, 13, 14, 15, 16, 17, 18]
    assert tree.rows()[0].tokens == expected[: {0: 1, 1: 1, 2: 3, 3: 6}.get(depth, 9)]
    few = made.propose(context([[7]], max_nodes=depth + 1))
    assert few.rows()[0].tokens == expected[: {0: 1, 1: 1, 5: 6}.get(depth, 3)]


def test_ends_of_text_are_replaced_in_the_window_alone() -> None:
    made = drafter(lookahead_window=2, lookahead_ngram=2, prompt=[EOS_ID, 30, EOS_ID])
    window = made._windows[0]
    assert all(column == [30] for column in window.columns)
    step(made, [[5, 6]], lambda text: [EOS_ID])
    assert all(column == [30] for column in window.columns)
    assert list(window.pool.after(6)) == [(EOS_ID,)], "a text may well end there"


def test_the_seed_chooses_the_first_tokens() -> None:
    first = [drafter(seed=seed)._windows[0].columns for seed in (None, None, 3, 3, -(1 << 60))]
    assert first[0] == first[1]
    assert first[2] == first[3]
    assert first[0] != first[2] != first[4]


def test_ngrams_of_prompt_and_output() -> None:
    prompt = [10, 11, 12, 13, 14]
    made = drafter(prompt, lookahead_ngram=3, lookahead_pool_from_prompt=True)
    pool = made._windows[0].pool
    text = list(prompt)
    for _ in range(3):
        made.propose(context([text]))
        ngrams = {(text[end - 3], *text[end - 2 : end]) for end in range(3, len(text) + 1)}
        assert {(key, *ngram) for key in range(67) for ngram in pool.after(key)} == ngrams
        text += [text[-1] + 1, text[-1] + 2, text[-1] + 3]
    unread = drafter(prompt, lookahead_ngram=3)
    unread.propose(context([text]))
    assert unread._windows[0].pool.num_ngrams == 0


@pytest.mark.parametrize("size", [*SIZES, (1, 9)])
@pytest.mark.parametrize("tree", ["chain", "tree"])
def test_no_tree_is_wider_or_deeper_than_announced(size: tuple[int, int], tree: str) -> None:
    made = drafter(lookahead_window=size[0], lookahead_ngram=size[1], lookahead_guesses=4, tree=tree, max_nodes=40)
    assert made.nodes_by_depth[-1] <= 40
    widest, text = 0, [5, 6, 7]
    for count in range(40):
        for guess in range(count % 5):
            made._windows[0].pool.add(text[-1], (*range(60 + guess, 59 + guess + size[1]),))
        verified = step(made, [text], ranking, max_depth=99)
        widest = max(widest, verified.width)
        assert verified.max_depth < len(made.nodes_by_depth)
    assert size[0] * (size[1] - 1) <= made._options.window_nodes <= widest <= made.nodes_by_depth[-1]


def test_a_released_slot_starts_anew() -> None:
    made = drafter()
    for _ in range(9):
        step(made, [[5, 6, 7]], ranking)
    made.release(0)
    assert 0 not in made._windows
    made.begin(0, DraftRequest(request_id="1", prompt=list(range(20, 60)), params=SamplingParams(temperature=0.0)))
    assert made._windows[0].columns == drafter()._windows[0].columns
    assert made._windows[0].pool.num_ngrams == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lookahead_window": 0}, "lookahead_window.*0.*greater than or equal to 1"),
        ({"lookahead_ngram": 1}, "lookahead_ngram.*1.*greater than or equal to 2"),
        ({"lookahead_guesses": 0}, "lookahead_guesses.*0"),
        ({"lookahead_pool_from_prompt": 1}, "lookahead_pool_from_prompt"),
        ({"tree": {"widths": [2]}}, "'lookahead' has no static trees.*Expected 'tree' to be"),
        ({"tree": "mc_sim_7b_63"}, "'lookahead' has no static trees"),
        ({"tree": "dynamic"}, "'lookahead' has no dynamic trees"),
        ({"lookahead_window": 60, "lookahead_ngram": 8}, "have 427 nodes, more than max_nodes, 64. Raise max_nodes"),
        ({"max_nodes": 31}, "have 32 nodes, more than max_nodes, 31"),
        ({"window": 7}, "has no key 'window'"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_options({"method": "lookahead", **options})


def test_defaults_are_those_of_the_authors_example() -> None:
    options: Any = drafter_options({"method": "lookahead"})
    assert (options.lookahead_window, options.lookahead_ngram, options.lookahead_guesses) == (7, 5, 7)
    assert options.is_adaptive
    assert not drafter_options({"method": "lookahead", "tree": "chain"}).is_adaptive
    assert create(options).nodes_by_depth[-1] == 28 + 28


NGRAMS = st.tuples(st.integers(0, 3), st.tuples(st.integers(0, 1), st.integers(0, 1)))


@given(seen=st.lists(NGRAMS, max_size=60), per_key=st.integers(1, 3), room=st.integers(0, 4))
def test_it_keeps_what_was_seen_last(seen: list[tuple[int, tuple[int, int]]], per_key: int, room: int) -> None:
    pool, model = NgramPool(per_key=per_key, max_ngrams=per_key + room), list[tuple[int, tuple[int, int]]]()
    for entry in seen:
        pool.add(*entry)
        model = [entry, *(other for other in model if other != entry)]  # the most recent first
        same_key = [other for other in model if other[0] == entry[0]]
        model = [other for other in model if other not in same_key[per_key:]]
        while len(model) > per_key + room:  # the key that was seen longest ago goes with all it has
            stale = list(dict.fromkeys(key for key, _ in model))[-1]
            model = [other for other in model if other[0] != stale]
        for key in range(4):
            assert list(pool.after(key)) == [ngram for other, ngram in model if other == key]
        assert pool.num_ngrams == len(model) <= per_key + room
