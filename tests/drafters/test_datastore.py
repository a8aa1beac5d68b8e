"""A datastore's look-ups against a search of the text, and its files when they are damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.core.errors import ConfigError, ForetokenError, RequestError
from foretoken.drafters import datastore
from foretoken.drafters.datastore import (
    INDEX,
    SUFFIXES,
    TOKENS,
    Datastore,
    DatastoreIndex,
    sorted_suffixes,
    write_datastore,
)

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


TOKENS_OF_3 = st.lists(st.integers(0, 2), min_size=1, max_size=50)


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
    wanted = sorted(continued(tokens, end, depth, eos_id) for end in ends)
    rows = store.continuations(found, depth, most).tolist()
    assert len(rows) == min(most, len(wanted))
    assert rows == (wanted if most >= len(wanted) else [wanted[i * len(wanted) // most] for i in range(most)])


def continued(tokens: list[int], begin: int, depth: int, eos_id: int | None) -> list[int]:
    """What follows at a place, -1 after the end of the document and of the text."""
    following = tokens[begin : begin + depth]
    if eos_id in following:
        following = following[: following.index(eos_id) + 1]
    return following + [-1] * (depth - len(following))


def test_tokens_that_the_corpus_does_not_have(tmp_path: Path) -> None:
    store = made(tmp_path / "d", TEXT, vocab_size=70_000)
    for context in ([9], [69_999], [10**12], [5, 9], [9, 9]):
        assert store.longest_match(context, shortest=1, longest=9) is None
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

    monkeypatch.setattr(datastore, "sorted_suffixes", fail)
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
    for context in ([5, 6], [5], [1, 5, 6], TEXT, [8, 8]):
        found = store.longest_match(context, shortest=1, longest=9)
        if found is not None:
            rows = store.continuations(found, 5, 3)
            assert len(rows) <= 3
            assert ((rows >= -1) & (rows < 9)).all()
