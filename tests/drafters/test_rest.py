"""Retrieval from a datastore: what is drafted, its look-ups against a search of the text, and damaged files."""

import json
import math
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafting_contexts import attached, context, continued
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError, ForetokenError, RequestError
from foretoken.drafters import rest
from foretoken.drafters.registry import drafter_options
from foretoken.drafters.rest import (
    INDEX,
    SUFFIXES,
    TOKENS,
    Datastore,
    DatastoreIndex,
    FrequentPaths,
    create,
    likeliest_path,
    most_frequent,
    sorted_suffixes,
    write_datastore,
)
from tests.tree_checks import check_tree

TOKENS_OF_3 = st.lists(st.integers(0, 2), min_size=1, max_size=50)


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
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that examples write to one after another."""
    return tmp_path_factory.mktemp("rest") / "here"


@settings(max_examples=30)  # each writes files
@given(
    tokens=TOKENS_OF_3, text=TOKENS_OF_3, depth=st.integers(0, 6), max_nodes=st.integers(2, 20), is_chain=st.booleans()
)
def test_trees_are_the_most_frequent_continuations_of_the_longest_match(
    directory: Path, tokens: list[int], text: list[int], depth: int, max_nodes: int, is_chain: bool
) -> None:
    keys = {} if is_chain else {"tree": "tree", "max_nodes": max_nodes}
    lookup = drafter(datastore(directory, tokens), **keys, rest_max_match=5)
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
@given(tokens=TOKENS_OF_3, text=TOKENS_OF_3, path=TOKENS_OF_3, depth=st.integers(1, 6))
def test_a_path_is_continued_as_if_it_were_committed(
    directory: Path, tokens: list[int], text: list[int], path: list[int], depth: int
) -> None:
    lookup = drafter(datastore(directory, tokens))
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


ROWS = st.lists(st.lists(st.integers(0, 2), max_size=5), min_size=1, max_size=30)


def as_rows(lists: list[list[int]]) -> np.ndarray:
    """Sorted rows, some of which end sooner than others."""
    depth = max(map(len, lists))
    return np.array(sorted(row + [-1] * (depth - len(row)) for row in lists), dtype=np.int64).reshape(len(lists), depth)


def counted_paths(rows: np.ndarray) -> Counter[tuple[int, ...]]:
    """How many rows begin with each path."""
    paths = ([token for token in row if token >= 0] for row in rows.tolist())
    return Counter(tuple(path[:length]) for path in paths for length in range(1, len(path) + 1))


def paths_of(found: FrequentPaths) -> list[tuple[int, ...]]:
    """The path down to each node."""
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(found.tokens, found.parents, strict=True):
        assert parent < len(paths)
        paths.append((*paths[parent], token) if parent >= 0 else (token,))
    return paths


@given(lists=ROWS, most=st.integers(0, 20))
def test_the_most_frequent_beginnings(lists: list[list[int]], most: int) -> None:
    rows = as_rows(lists)
    counts, found = counted_paths(rows), most_frequent(rows, most)
    paths = paths_of(found)
    assert paths == sorted(counts, key=lambda path: (-counts[path], len(path), path))[:most]
    assert found.counts == [counts[path] for path in paths]


@given(lists=ROWS)
def test_the_likeliest_path(lists: list[list[int]]) -> None:
    """At each token the most frequent one after those so far, the smallest of equals."""
    rows = as_rows(lists)
    counts, path = counted_paths(rows), ()
    wanted = []
    while following := [(*path, token) for token in range(3) if (*path, token) in counts]:
        path = max(following, key=lambda each: (counts[each], -each[-1]))
        wanted.append(path)
    found = likeliest_path(rows)
    assert paths_of(found) == wanted
    assert found.counts == [counts[path] for path in wanted]


def test_rows_in_any_order_give_trees() -> None:
    """As of a damaged datastore: a sibling may come twice, every node comes after its parent."""
    rows = np.array([[1, 2], [0, 1], [1, 2], [1, 0]])
    found = most_frequent(rows, 9)
    assert [path for path in paths_of(found) if path == (1, 2)] == [(1, 2)] * 2
    assert likeliest_path(rows).tokens in ([1, 2], [1, 0])


TEXT = [5, 6, 7, 5, 6, 8, 5, 6, 7, 1, 5, 6]


def made(directory: Path, tokens: list[int], *, vocab_size: int = 9, eos_id: int | None = None) -> Datastore:
    """A datastore of some tokens."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    write_datastore(
        directory, np.array(tokens, dtype=dtype), vocab_size=vocab_size, eos_id=eos_id, tokenizer_sha="t",
        tokens_sha256="d", force=True,
    )  # fmt: skip
    return Datastore.open(directory)


def in_memory(tokens: list[int], *, vocab_size: int, eos_id: int | None, suffixes: Any = None) -> Datastore:
    """The same without files, which would be synced to disk for every example."""
    dtype: Any = "uint16" if vocab_size <= 1 << 16 else "uint32"
    index = DatastoreIndex(
        num_tokens=len(tokens), vocab_size=vocab_size, dtype=dtype, eos_id=eos_id, depth=64, tokenizer_sha="t",
        tokens_sha256="d",
    )  # fmt: skip
    array = np.array(tokens, dtype=dtype)
    order = sorted_suffixes(array, 64) if suffixes is None else suffixes
    return Datastore(index, array.astype(f">u{array.itemsize}").tobytes(), order)


@given(
    tokens=TOKENS_OF_3, context=TOKENS_OF_3, vocab_size=st.sampled_from([3, 70_000]), shortest=st.integers(1, 3),
    more=st.integers(0, 9), depth=st.integers(0, 5), most=st.integers(1, 60), eos_id=st.sampled_from([None, 0]),
)  # fmt: skip
def test_matches_and_continuations_are_those_of_a_search(
    tokens: list[int], context: list[int], vocab_size: int, shortest: int, more: int, depth: int, most: int,
    eos_id: int | None,
) -> None:  # fmt: skip
    store = in_memory(tokens, vocab_size=vocab_size, eos_id=eos_id)
    found = store.longest_match(context, shortest=shortest, longest=shortest + more)
    lengths = [
        length
        for length in range(shortest, min(shortest + more, len(context)) + 1)
        if any(tokens[at : at + length] == context[-length:] for at in range(len(tokens) - length + 1))
    ]
    assert (found is None) == (not lengths)
    if found is None:
        return
    assert found.length == max(lengths)
    run = context[-found.length :]
    ends = [at + len(run) for at in range(len(tokens)) if tokens[at : at + len(run)] == run]
    wanted = sorted(what_follows(tokens, end, depth, eos_id) for end in ends)
    rows = store.continuations(found, depth, most).tolist()
    assert len(rows) == min(most, len(wanted))
    assert rows == (wanted if most >= len(wanted) else [wanted[i * len(wanted) // most] for i in range(most)])


def what_follows(tokens: list[int], begin: int, depth: int, eos_id: int | None) -> list[int]:
    """What follows at a place, -1 after the end of the document and of the text."""
    following = tokens[begin : begin + depth]
    if eos_id in following:
        following = following[: following.index(eos_id) + 1]
    return following + [-1] * (depth - len(following))


def test_tokens_that_the_corpus_does_not_have(tmp_path: Path) -> None:
    store = made(tmp_path / "d", TEXT, vocab_size=70_000)
    for text in ([9], [69_999], [10**12], [5, 9], [9, 9]):
        assert store.longest_match(text, shortest=1, longest=9) is None
    found = store.longest_match([10**12, 5, 6], shortest=1, longest=9)
    assert found is not None
    assert found.length == 2
    assert store.longest_match([6], shortest=2, longest=9) is None
    assert store.longest_match([], shortest=1, longest=9) is None


def test_no_continuation_is_deeper_than_suffixes_are_sorted(tmp_path: Path) -> None:
    store = made(tmp_path / "d", [5, 6] * 99)
    found = store.longest_match([5, 6] * 20, shortest=2, longest=30)
    assert found is not None
    assert store.continuations(found, 99, 8).shape == (8, store.index.depth - 30)


@pytest.mark.parametrize(("vocab_size", "width"), [(1 << 16, 2), ((1 << 16) + 1, 4)])
def test_what_is_written(tmp_path: Path, vocab_size: int, width: int) -> None:
    made(tmp_path / "d", TEXT, vocab_size=vocab_size)
    assert {path.name: path.stat().st_size for path in (tmp_path / "d").iterdir() if path.name != INDEX} == {
        TOKENS: width * len(TEXT), SUFFIXES: 4 * len(TEXT),
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def test_what_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"vocab_size": 9, "eos_id": None, "tokenizer_sha": "t", "tokens_sha256": "d"}
    other, there = tmp_path / "other", tmp_path / "there"
    other.mkdir()
    (other / "file").write_text("")
    made(there, TEXT)
    before = (there / SUFFIXES).read_bytes()
    tokens = np.array(TEXT)
    with pytest.raises(RequestError, match="holds other files"):
        write_datastore(other, tokens, force=True, **facts)
    with pytest.raises(RequestError, match="is not a directory"):
        write_datastore(other / "file", tokens, **facts)
    with pytest.raises(RequestError, match=r"holds a datastore already.* Pass --force"):
        write_datastore(there, tokens, **facts)
    with pytest.raises(RequestError, match="holds token 8"):
        write_datastore(there, tokens, **(facts | {"vocab_size": 8}), force=True)
    with pytest.raises(RequestError, match="the data has 0 tokens"):
        write_datastore(tmp_path / "new", tokens[:0], **facts)

    def fail(*arguments: Any, **more: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(rest, "sorted_suffixes", fail)
    with pytest.raises(RequestError, match=r"sorting 12 tokens takes .* GiB of memory, and there is less"):
        write_datastore(there, tokens, **facts, force=True)
    assert (there / SUFFIXES).read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "there"]


def test_files_of_other_sizes_and_ids_out_of_range(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    made(directory, TEXT)
    whole = {path.name: path.read_bytes() for path in directory.iterdir()}
    too_large = np.array(TEXT, dtype=">u2")
    too_large[3] = 9
    far = np.frombuffer(whole[SUFFIXES], dtype="<u4").copy()
    far[5] = len(TEXT)
    damaged: list[tuple[str, bytes | None, str]] = [
        (TOKENS, whole[TOKENS][:-1], "has 23 bytes. Expected 24. It is damaged"),
        (TOKENS, b"", "has 0 bytes. Expected 24"),
        (TOKENS, whole[TOKENS] * 2, "has 48 bytes. Expected 24"),
        (TOKENS, None, "cannot be read: No such file or directory"),
        (TOKENS, too_large.tobytes(), "holds token 9, and ids are below 9. It is damaged"),
        (SUFFIXES, whole[SUFFIXES][4:], "has 44 bytes. Expected 48"),
        (SUFFIXES, None, "cannot be read"),
        (SUFFIXES, far.tobytes(), "holds 12. Expected places below 12, the number of tokens"),
        (SUFFIXES, b"\xff" * 48, "holds 4294967295. Expected places below 12"),
        (INDEX, None, "holds no datastore. Expected index.json, tokens.bin and suffixes.bin"),
        (INDEX, b"{", "is not valid JSON"),
        (INDEX, b"[]", "holds a JSON list. Expected an object"),
        (INDEX, b"{}", "has the format None. Expected 'foretoken-datastore'"),
    ]
    for name, content, sentence in damaged:
        (directory / name).unlink()
        if content is not None:
            (directory / name).write_bytes(content)
        with pytest.raises(ConfigError, match=sentence) as error:
            Datastore.open(directory)
        assert str(error.value).endswith("Make it with `foretoken data index`.")
        (directory / name).write_bytes(whole[name])
    Datastore.open(directory)
    for name in (TOKENS, SUFFIXES):  # a pipe without a writer, a directory
        (directory / name).unlink()
        os.mkfifo(directory / name)
        with pytest.raises(ConfigError, match="is a pipe"):
            Datastore.open(directory)
        (directory / name).unlink()
        (directory / name).mkdir()
        with pytest.raises(ConfigError, match="is a directory"):
            Datastore.open(directory)
        (directory / name).rmdir()
        (directory / name).write_bytes(whole[name])


NONSENSE = (None, "x", "uint8", "float32", -1, 0, 1, 13, 1.5, 2**31, 10**12, 10**400, True, [], [[1]], {}, {"a": []})


def test_values_of_index_json(tmp_path: Path) -> None:
    """Nonsense in any value: refused in one sentence, or a datastore that answers."""
    directory = tmp_path / "d"
    made(directory, TEXT)
    whole = json.loads((directory / INDEX).read_text())
    for key in (*whole, "more"):
        for value in NONSENSE:
            (directory / INDEX).write_text(json.dumps(whole | {key: value}))
            answered(directory)
        (directory / INDEX).write_text(json.dumps({name: whole[name] for name in whole if name != key}))
        answered(directory)


@given(suffixes=st.lists(st.integers(0, len(TEXT) - 1), min_size=len(TEXT), max_size=len(TEXT)))
def test_any_suffixes_that_are_in_range(suffixes: list[int]) -> None:
    """A file that was made for another text gives bad continuations, and nothing worse."""
    asked(in_memory(TEXT, vocab_size=9, eos_id=8, suffixes=np.array(suffixes, dtype=np.uint32)))


def answered(directory: Path) -> None:
    """Opens a datastore and asks it something; only our own errors may come."""
    try:
        store = Datastore.open(directory)
    except ForetokenError:
        return
    asked(store)


def asked(store: Datastore) -> None:
    """Looks for runs that are there and others."""
    for text in ([5, 6], [5], [1, 5, 6], TEXT, [8, 8]):
        found = store.longest_match(text, shortest=1, longest=9)
        if found is not None:
            rows = store.continuations(found, 5, 3)
            assert len(rows) <= 3
            assert ((rows >= -1) & (rows < 9)).all()


@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=60), depth=st.integers(1, 40),
    largest=st.sampled_from([2, 500, 65535]),
)  # fmt: skip
def test_order_is_that_of_sorting(tokens: list[int], depth: int, largest: int) -> None:
    """Of all tokens, or of the first ones and then the place; tokens of few and of many bits."""
    tokens = [*tokens, largest]
    order = sorted_suffixes(np.array(tokens, dtype=np.uint16), depth).tolist()
    assert sorted(order) == list(range(len(tokens)))
    beginnings = [tokens[begin : begin + depth] for begin in order]
    assert beginnings == sorted(beginnings)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32, np.int64])
def test_runs_that_repeat(dtype: Any) -> None:
    tokens, depths = np.array([5, 6] * 50, dtype=dtype), []
    order = sorted_suffixes(tokens, 64, on_round=depths.append)
    assert order.dtype == np.uint32
    assert depths == [depths[0] * 2**i for i in range(len(depths))]
    assert depths[-2] < 64 <= depths[-1]
    text = tokens.tolist()
    assert order.tolist() == sorted(range(100), key=lambda begin: (text[begin : begin + depths[-1]], begin))
    assert tokens.tolist() == text


def test_the_largest_ids_and_one_token() -> None:
    assert sorted_suffixes(np.array([7], dtype=np.uint32), 64).tolist() == [0]
    tokens = np.array([2**32 - 1, 0, 2**32 - 1, 0], dtype=np.uint32)
    assert sorted_suffixes(tokens, 64).tolist() == [3, 1, 2, 0]
