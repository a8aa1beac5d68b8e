"""Retrieval from a datastore: what is drafted, its scores, and datastores that do not fit."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting_contexts import attached, context, continued
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError
from foretoken.drafters.datastore import write_datastore
from foretoken.drafters.registry import drafter_options
from foretoken.drafters.rest import create
from tests.tree_checks import check_tree

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=50)


def datastore(directory: Path, tokens: list[int], **facts: Any) -> str:
    """A datastore of some tokens."""
    values: dict[str, Any] = {"vocab_size": 60, "eos_id": None, "tokenizer_sha": "t", "tokens_sha256": "d", **facts}
    write_datastore(directory, np.array(tokens, dtype=np.uint16), force=True, **values)
    return str(directory)


def drafter(directory: str, *, tokenizer: Any = None, **keys: Any) -> Any:
    """An attached drafter."""
    options: Any = drafter_options({"method": "rest", "datastore": directory, **keys})
    return attached(create(options), tokenizer=tokenizer)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that examples write to one after another."""
    return tmp_path_factory.mktemp("rest") / "here"


@settings(max_examples=30)  # each writes files
@given(tokens=TOKENS, text=TOKENS, depth=st.integers(0, 6), max_nodes=st.integers(2, 20), is_chain=st.booleans())
def test_trees_are_the_most_frequent_continuations_of_the_longest_match(
    place: Path, tokens: list[int], text: list[int], depth: int, max_nodes: int, is_chain: bool
) -> None:
    keys = {} if is_chain else {"tree": "tree", "max_nodes": max_nodes}
    lookup = drafter(datastore(place, tokens), **keys, rest_max_match=5)
    tree = lookup.propose(context([text, [1, 0]], max_depth=[depth, 0]))
    check_tree(tree)
    counts, total = counted(tokens, text, depth)
    row = tree.rows()[0]
    paths = [path_of(node, row.tokens, row.parents) for node in range(1, len(row.tokens))]
    likeliest: list[tuple[int, ...]] = [()]
    while following := [(*likeliest[-1], token) for token in range(3) if (*likeliest[-1], token) in counts]:
        likeliest.append(max(following, key=lambda path: (counts[path], -path[-1])))
    most_frequent = sorted(counts, key=lambda path: (-counts[path], len(path), path))[: max_nodes - 1]
    assert paths == (likeliest[1:] if is_chain else most_frequent)
    assert tree.scores is not None
    wanted = [0.0, *(math.log(counts[path] / total) for path in paths)]
    assert tree.scores[0, : len(wanted)].tolist() == pytest.approx(wanted, abs=1e-6)
    assert tree.rows()[1].tokens == [0]


def counted(tokens: list[int], text: list[int], depth: int) -> tuple[Counter[tuple[int, ...]], int]:
    """How often each path follows the longest match of 2 to 5 tokens, by a search, and the number of matches."""
    for length in range(min(5, len(text)), 1, -1):
        ends = [at + length for at in range(len(tokens)) if tokens[at : at + length] == text[-length:]]
        if ends:
            cut = [tuple(tokens[end : end + depth]) for end in ends]
            return Counter(path[:size] for path in cut for size in range(1, len(path) + 1)), len(ends)
    return Counter(), 1


def path_of(node: int, ids: Any, parents: Any) -> tuple[int, ...]:
    """Tokens from below the root to a node."""
    return (*path_of(parents[node], ids, parents), ids[node]) if node else ()


@settings(max_examples=30)
@given(tokens=TOKENS, text=TOKENS, path=TOKENS, depth=st.integers(1, 6))
def test_a_path_is_continued_as_if_it_were_committed(
    place: Path, tokens: list[int], text: list[int], path: list[int], depth: int
) -> None:
    lookup = drafter(datastore(place, tokens))
    committed = lookup.propose(context([[*text, *path]], max_depth=depth)).rows()[0].tokens[1:]
    assert continued(lookup, text, path, depth, is_kept=False) == committed


def test_continuations_end_with_their_document(tmp_path: Path) -> None:
    directory = datastore(tmp_path / "d", [5, 6, 7, 2, 8, 9, 5, 6, 7, 2, 9], eos_id=2)
    assert drafter(directory).propose(context([[5, 6]])).rows()[0].tokens == [6, 7, 2]


def test_few_of_many_matches_are_looked_at(tmp_path: Path) -> None:
    directory = datastore(tmp_path / "d", [*[5, 6, 7] * 300, *[5, 6, 8] * 100])
    tree = drafter(directory, rest_max_matches=8, tree="tree").propose(context([[5, 6]], max_depth=1))
    assert tree.rows()[0].tokens == [6, 7, 8]
    assert tree.scores is not None
    assert tree.scores[0].exp().tolist() == pytest.approx([1.0, 0.75, 0.25])


class Words:
    """A tokenizer with a vocabulary of its own."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0, "b": 1}


def test_datastores_that_do_not_fit(tmp_path: Path) -> None:
    """Another tokenizer's, or ids that the target does not have; without a vocabulary to compare only these count."""
    directory = datastore(tmp_path / "d", [5, 6, 7], tokenizer_sha="another")
    with pytest.raises(ConfigError, match=r"the datastore '.*' was not made with the tokenizer of 'target'. Expected"):
        drafter(directory, tokenizer=Words())
    drafter(directory, tokenizer=object())
    drafter(directory)
    with pytest.raises(ConfigError, match="was not made with the tokenizer of 'target'"):
        drafter(datastore(tmp_path / "d", [5, 67], vocab_size=70))
    drafter(datastore(tmp_path / "d", [5, 66], vocab_size=70))
    for missing in ({"datastore": str(tmp_path / "none")}, {"datastore": str(tmp_path)}):
        with pytest.raises(ConfigError, match="holds no datastore"):
            create(drafter_options({"method": "rest", **missing}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rest_max_match": 33}, "'rest_max_match' of method 'rest' is 33"),
        ({"rest_min_match": 0}, "'rest_min_match' of method 'rest' is 0"),
        ({"rest_min_match": 17}, "rest_min_match must not be above rest_max_match, 16"),
        ({"rest_max_matches": 5001}, "'rest_max_matches' of method 'rest' is 5001"),
        ({"rest_max_matches": 0}, "is 0"),
        ({"rest_max_matches": 2.0}, "is 2.0"),
        ({"datastore": 5}, "'datastore' of method 'rest' is 5"),
        ({"datastore": "x", "tree": "dynamic"}, "has no dynamic trees"),
    ],
)
def test_limits_of_options(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        drafter_options({"method": "rest", **keys})
