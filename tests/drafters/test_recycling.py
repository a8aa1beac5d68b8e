"""Token recycling against dictionaries that are walked node by node."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from drafting_contexts import GREEDY, attached, context, continued
from end_to_end.tiny_llms import config, llm
from greedy_steps import step, texts_of
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import PROBE, TokenTree, TreeRow
from foretoken.drafters import recycling
from foretoken.drafters.base import DraftRequest
from foretoken.drafters.recycling import RankRates, RecyclingDrafter, SuccessorMatrix, create
from foretoken.drafters.registry import drafter_options
from foretoken.drafting.acceptance import NodeAcceptance
from foretoken.drafting.host_trees import read_rows
from foretoken.trees.choices import TreeShape
from foretoken.trees.merge import merge_trees
from tests.tree_checks import check_tree

CHOICES = [[0], [1], [7], [0, 0], [0, 3], [1, 0], [0, 0, 2], [0, 0, 2, 0]]


def drafter(**options: Any) -> RecyclingDrafter:
    """An attached drafter with a sequence in every slot."""
    made = attached(create(drafter_options({"method": "recycling", **options})))  # type: ignore[arg-type]
    assert isinstance(made, RecyclingDrafter)
    return made


def ranking(text: Sequence[int]) -> list[int]:
    """A target whose favourite changes with the token before, among tokens that follow the last one."""
    first = (3 * text[-1] + 7 * (text[-2] % 3 if len(text) > 1 else 0)) % VOCAB_SIZE
    return [(first + 5 * rank) % VOCAB_SIZE for rank in range(40)]


class Plain:
    """The method in dictionaries, with rates counted in a list."""

    def __init__(self, *, refresh: int) -> None:
        self.matrix: dict[int, list[int]] = {}
        self.before: dict[int, list[int]] = {}  # of each sequence: successors of its last committed token
        self.observed: list[int | None] = []  # ranks of the text's tokens, None for none of them
        self.refresh, self.num_steps, self.rates = refresh, 0, self.estimates()

    def estimates(self) -> list[float]:
        """How often each rank was right, the start counting as 32 tokens, one 500 tokens old as half a token."""
        ages = range(len(self.observed) - 1, -1, -1)
        weights = [0.5 ** (age / 500) for age in ages]
        rates = []
        for rank in range(8):
            hits = sum(weight for weight, seen in zip(weights, self.observed, strict=True) if seen == rank)
            rates.append((hits + 32 * 0.35 / (rank + 1) ** 1.3) / (sum(weights) + 32))
        return rates

    def draft(self, root: int, choices: Sequence[Sequence[int]]) -> dict[tuple[int, ...], float]:
        """Paths of tokens with their log-probabilities."""
        paths = {}
        for choice in choices:
            tokens, score, last = [], 0.0, root
            for rank in choice:
                if last not in self.matrix:
                    break
                last = self.matrix[last][rank]
                tokens.append(last)
                score += math.log(self.rates[rank])
            else:
                paths[tuple(tokens)] = score
        return paths

    def value(self, choices: Sequence[Sequence[int]]) -> float:
        """Tokens that a tree of ranks is expected to have accepted."""
        return sum(math.prod(self.rates[rank] for rank in choice) for choice in choices)

    def best_value(self, depth: int, max_nodes: int) -> float:
        """The greatest value of all trees of a size: that of the nodes with the greatest products."""
        every = [choice for length in range(1, depth + 1) for choice in product(range(8), repeat=length)]
        return sum(sorted((self.value([choice]) for choice in every), reverse=True)[: max_nodes - 1])

    def learn(self, tree: TokenTree, earlier: Sequence[list[int]], texts: Sequence[list[int]]) -> None:
        """Takes in what was verified and written."""
        for row, (before, text) in enumerate(zip(earlier, texts, strict=True)):
            known = self.before.get(row)
            for token in text[len(before) - 1 : -1]:
                if known is not None:
                    self.observed.append(known.index(token) if token in known else None)
                known = self.matrix.get(token)
            self.before[row] = known  # type: ignore[assignment]
        for row, (before, text) in enumerate(zip(earlier, texts, strict=True)):
            seen = texts_of(tree, row, before)[1:] + [text[:end] for end in range(len(before), len(text))]
            self.matrix.update({each[-1]: ranking(each)[:8] for each in seen})
        self.num_steps += 1
        if self.num_steps % self.refresh == 0:
            self.rates = self.estimates()


def paths_of(tree: TokenTree, row: int) -> dict[tuple[int, ...], float]:
    """Paths of tokens of one tree with their scores."""
    assert tree.scores is not None
    texts = texts_of(tree, row, [])
    return {tuple(text): score for text, score in zip(texts[1:], tree.scores[row, 1:].tolist(), strict=False)}


def choices_of(made: RecyclingDrafter) -> list[list[int]]:
    """The drafter's tree of ranks."""
    choices: list[list[int]] = []
    for parent, rank in zip(made._template.parents[1:], made._template.ranks[1:], strict=True):
        choices.append([*(choices[parent - 1] if parent else []), int(rank)])
    return choices


def test_a_path_is_continued_as_a_chain_after_its_last_token() -> None:
    made, text = drafter(tree="chain", num_speculative_tokens=5), [5, 6, 7]
    for _ in range(12):
        step(made, [text], lambda text: [(text[-1] + 1 + rank) % VOCAB_SIZE for rank in range(40)])
    lengths = set()
    for token in range(VOCAB_SIZE):
        found = continued(made, text, [3, token], 5)
        assert found == list(made.propose(context([[*text, 3, token]])).rows()[0].tokens[1:])
        lengths.add(len(found))
    assert {0, 1, 5} <= lengths


@pytest.mark.parametrize(
    ("options", "expected_choices"),
    [
        ({"tree": CHOICES}, CHOICES),
        ({"tree": "chain", "num_speculative_tokens": 3}, [[0], [0, 0], [0, 0, 0]]),
        ({"num_speculative_tokens": 3, "max_nodes": 24}, None),
    ],
    ids=["static", "chain", "best"],
)
def test_drafts_are_those_of_a_plain_implementation(
    options: dict[str, Any], expected_choices: list[list[int]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sequences that share the matrix; tokens, ranks' scores, and the tree that pays best."""
    monkeypatch.setattr(recycling, "_REFRESH", 8)
    made, plain = drafter(**options), Plain(refresh=8)
    texts = [[5, 6], [9, 8, 7]]
    num_drafted = 0
    for _ in range(60):
        choices = expected_choices or choices_of(made)
        assert expected_choices or plain.value(choices) == pytest.approx(plain.best_value(3, 24))
        earlier = [list(text) for text in texts]
        tree = step(made, texts, ranking)
        check_tree(tree)
        for row, before in enumerate(earlier):
            expected, got = plain.draft(before[-1], choices), paths_of(tree, row)
            assert got == pytest.approx(expected, rel=1e-5)
            assert int(tree.num_nodes[row]) == len(expected) + 1
            num_drafted += len(expected)
        plain.learn(tree, earlier, texts)
    assert num_drafted > 60 * len(choices)
    assert sum(map(len, texts)) > 5 + 2 * 60 + 10, "drafts are accepted"


def test_the_best_tree_follows_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the third rank is always right, the tree becomes a chain of it."""
    monkeypatch.setattr(recycling, "_REFRESH", 1)
    made = drafter(max_nodes=6)
    made._shared.update(np.arange(10), (np.arange(10)[:, None] + np.array([3, 5, 1, 4, 2, 6, 7, 8])) % 10)
    made._rates._hits, made._rates._seen = np.array([0.0, 0, 9000, 0, 0, 0, 0, 0]), 9000.0
    step(made, [[0]], lambda text: [(text[-1] + other) % 10 for other in (3, 5, 1, 4, 2, 6, 7, 8)])
    assert made.propose(context([[1]])).rows()[0].tokens[:4] == [1, 2, 3, 4]


def test_every_verified_node_is_learned_from() -> None:
    """Other drafters' nodes and probes, too, and of more answers than were asked for as many as there is room for."""
    made, text = drafter(tree=CHOICES), [5, 6]
    other = TokenTree.from_rows([TreeRow([6, 30, 31, 32], [-1, 0, 1, 0])])
    probes = TokenTree(
        **{name: getattr(other, name) for name in ("tokens", "parents", "depths", "num_nodes", "max_depth")},
        source=PROBE * (other.tokens == 32),
    )
    step(made, [text], ranking, change=lambda tree: merge_trees([tree, probes]), num_ids=11)
    for path in ([], [30], [30, 31], [32]):
        assert made._shared.of([6, *path][-1]) == ranking([5, 6, *path])[:8]
    assert made._shared.of(33) == [-1] * 8


def test_of_equal_tokens_the_accepted_one_counts() -> None:
    made, text = drafter(tree=CHOICES), [5, 6]
    right = ranking(text)[0]
    tree = TokenTree.from_rows([TreeRow([6, right, 40, right], [-1, 0, 0, 2])])
    step(made, [text], ranking, change=lambda _: tree)
    assert text[2] == right
    assert made._shared.of(right) == ranking([5, 6, right])[:8] != ranking([5, 6, 40, right])[:8]


def test_a_salt_is_a_matrix_of_its_own() -> None:
    made = drafter(tree="chain", num_speculative_tokens=2)

    def begin(slot: int, salt: str | None) -> None:
        made.begin(slot, DraftRequest(request_id="r", prompt=[5], params=GREEDY, cache_salt=salt))

    def drafts(slot: int) -> bool:
        return made.propose(context([[5, 6]], slots=[slot])).width > 1

    begin(0, "a")
    step(made, [[5, 6]], ranking)
    for slot, salt in enumerate(["a", "b", None, "a"]):
        begin(slot, salt)
    assert [drafts(slot) for slot in range(4)] == [True, False, False, True]
    begin(0, None)
    step(made, [[5, 6]], ranking)
    assert [drafts(slot) for slot in range(4)] == [True, False, True, True]
    for index in range(recycling._MOST_SALTS):
        begin(5, f"other {index}")
    assert drafts(3), "requests that run keep theirs"
    begin(3, "a")
    assert not drafts(3)
    assert len(made._salted) == recycling._MOST_SALTS


def test_bounds_are_kept() -> None:
    made = drafter(max_nodes=20)
    assert made.nodes_by_depth == (1, *[20] * 16)
    made._shared.update(np.arange(VOCAB_SIZE), (np.arange(VOCAB_SIZE)[:, None] + np.arange(8)) % VOCAB_SIZE)
    for depth, nodes in product((0, 1, 2, 50), (1, 2, 9, 512)):
        tree = made.propose(context([[5], [6]], max_depth=[depth, 50], max_nodes=nodes))
        check_tree(tree)
        counts = tree.num_nodes.tolist()
        assert max(counts) <= min(nodes, 20)
        assert int((tree.depths[0]).max()) <= depth
        assert counts[1] == min(nodes, 20)
    assert made.propose(context([[5]])).rows() == made.propose(context([[5]])).rows(), "a proposal may be thrown away"


def test_a_released_slot_forgets_its_text_alone() -> None:
    made, text = drafter(tree="chain"), [5, 6]
    step(made, [text], ranking)
    made.release(0)
    assert not made._known
    assert 0 not in made._matrices
    made.begin(0, DraftRequest(request_id="r", prompt=[5], params=GREEDY))
    assert made.propose(context([[5, 6]])).width > 1


def test_rates_are_probabilities() -> None:
    """Before anything was seen, and whatever is seen; of any number of ranks."""
    for num_ranks in (8, 32):
        rates = RankRates(num_ranks)
        assert rates.estimates() == sorted(rates.estimates(), reverse=True)
        for token in (0, 0, 3, 99, num_ranks - 1):
            rates.learn_successor(range(num_ranks), token)
            rates.learn_successor([-1] * num_ranks, token)
            assert min(rates.estimates()) > 0
            assert sum(rates.estimates()) <= 1
    assert rates._seen == pytest.approx(5, rel=0.01)


def test_scores_calibrate() -> None:
    """As controllers read them: log-probabilities, none above its parent's."""
    made = drafter()
    made._shared.update(np.arange(VOCAB_SIZE), (np.arange(VOCAB_SIZE)[:, None] + np.arange(8)) % VOCAB_SIZE)
    tree = made.propose(context([[5]], max_depth=16))
    assert tree.scores is not None
    above = tree.scores[0].gather(0, tree.parents[0].clamp_min(0))
    assert (tree.scores[0] <= above).all()
    assert all(0 < value < 1 for value in read_rows(tree, NodeAcceptance())[0].values[1:])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tree": [[0], [32]]}, "a node of rank 32. Expected ranks below 32: method 'recycling' keeps no more"),
        ({"tree": "dynamic"}, "'recycling' has no dynamic trees"),
        ({"matrix": 3}, "has no key 'matrix'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        drafter_options({"method": "recycling", **options})


def test_static_trees_may_name_further_successors() -> None:
    assert drafter().reads.top_k == 8
    assert drafter(tree={"widths": [12]}).reads.top_k == 12
    assert drafter(tree={"widths": [12]}).nodes_by_depth == [1, 13]
    assert drafter(tree={"widths": [12]}, max_nodes=5).nodes_by_depth == [1, 5]


def test_vocabularies_smaller_than_what_is_read() -> None:
    """The target has four tokens, and eight successors are read."""
    module, params = (
        tiny_model("llama", vocab_size=4, num_hidden_layers=1),
        SamplingParams(temperature=0.0, ignore_eos=True),
    )
    plain = llm({}, module=module).generate([[1, 3]], params)[0]
    got = llm(config("recycling", num_speculative_tokens=3)([]), module=module).generate([[1, 3]], params)[0]
    assert got.outputs[0].token_ids == plain.outputs[0].token_ids
    assert got.metrics.draft_errors == 0
    assert got.metrics.num_accepted > 0


VOCAB, WIDTH = 5, 3
UPDATES = st.lists(st.tuples(st.integers(0, VOCAB - 1), st.permutations(range(VOCAB))), max_size=20)
SHAPE = TreeShape.from_choices([[0], [2], [0, 0], [0, 1], [2, 1], [0, 1, 2]])


@given(updates=UPDATES, size=st.integers(1, 4), root=st.integers(0, VOCAB - 1))
def test_trees_are_filled_by_rank(updates: list[tuple[int, list[int]]], size: int, root: int) -> None:
    """Whatever is written together: of a token that stands twice, the last entry counts."""
    matrix, model = SuccessorMatrix(VOCAB, WIDTH), {}
    for begin in range(0, len(updates), size):
        part = updates[begin : begin + size]
        matrix.update(np.array([token for token, _ in part]), np.array([ids[:WIDTH] for _, ids in part]))
        model.update({token: ids[:WIDTH] for token, ids in part})

    def token_at(choice: tuple[int, ...]) -> int:
        token = root
        for rank in choice:
            token = model.get(token, [-1] * WIDTH)[rank]
        return token

    assert all(matrix.of(token) == list(model.get(token, [-1] * WIDTH)) for token in range(VOCAB))
    levels = [slice(1, 3), slice(3, 6), slice(6, 7)]
    filled = matrix.fill(root, np.array(SHAPE.parents), np.array(SHAPE.ranks), levels)
    assert filled.tolist() == [root, *map(token_at, SHAPE.choices)]


def test_large_vocabularies() -> None:
    matrix = SuccessorMatrix(152_064, 8)
    assert matrix._rows.nbytes == 152_065 * 8 * 4
    last = 152_063
    matrix.update(np.array([last]), np.array([[last, 0]]))
    assert matrix.of(last)[:3] == [last, 0, -1]
    assert matrix.of(0) == [-1] * 8


@pytest.mark.parametrize("count", [1, 3])
def test_fewer_successors_than_there_is_room_for(count: int) -> None:
    """As where the vocabulary is smaller."""
    matrix = SuccessorMatrix(VOCAB, 4)
    matrix.update(np.array([1]), np.arange(count)[None])
    assert matrix.of(1) == [*range(count), *[-1] * (4 - count)]
