"""Packing is exact, directories appear whole or not at all, and batches are a pure function of (seed, step)."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from data_tokenizers import EOS, letter_tokenizer
from packed_data import write_packed

from foretoken.core.errors import RequestError
from foretoken.training.data.packed import Document, PackedTokens, shuffled


def counted(size: int) -> PackedTokens:
    """Tokens 0..size-1, so that a window tells where it comes from."""
    return PackedTokens(np.arange(size, dtype=np.uint32), None, {})


def test_documents_are_reproduced(tmp_path: Path) -> None:
    documents = [
        Document([10, 11, 12]),
        Document([]),
        Document([13, EOS]),  # ends with its EOS already
        Document([14, 15, 16], [False, True, True]),
        Document([17, 18], [True, False]),
    ]
    packed = write_packed(tmp_path / "out", documents, tokenizer=letter_tokenizer(), sources=["five"])
    assert packed.tokens.dtype == np.uint16
    assert packed.tokens.tolist() == [10, 11, 12, EOS, 13, EOS, 14, 15, 16, EOS, 17, 18, EOS]
    assert packed.supervised is not None
    # An added EOS is a label exactly when the token before it is.
    assert packed.supervised.tolist() == [1, 1, 1, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]
    assert isinstance(packed.tokens, np.memmap)
    assert {key: packed.meta[key] for key in ("num_documents", "num_tokens", "num_supervised", "vocab_size")} == {
        "num_documents": 4, "num_tokens": 13, "num_supervised": 10, "vocab_size": 50,
    }  # fmt: skip
    assert packed.meta["sources"] == ["five"]
    assert packed.meta["largest_token_id"] == 18
    again = PackedTokens.open(tmp_path / "out")
    assert again.meta == packed.meta
    assert np.array_equal(again.tokens, packed.tokens)


def test_all_supervised_needs_no_flags_and_large_ids_need_more_bytes(tmp_path: Path) -> None:
    documents = [Document([10, 70_000])]
    packed = write_packed(tmp_path / "out", documents, tokenizer=letter_tokenizer(eos=False), vocab_size=70_001)
    assert packed.supervised is None
    assert packed.tokens.dtype == np.uint32
    assert packed.tokens.tolist() == [10, 70_000]
    assert not (tmp_path / "out" / "supervised.bin").exists()


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([], "there is no document"),
        ([Document([])], "there is no document"),
        ([Document([10, 11], [False, False])], "none of 3 tokens is supervised"),
        ([Document([10]), Document([50])], r"document 1 holds token id 50. Expected 0\.\.49"),
        ([Document([-1])], "holds token id -1"),
    ],
)
def test_bad_documents_leave_nothing(tmp_path: Path, documents: list[Document], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        write_packed(tmp_path / "out", documents, tokenizer=letter_tokenizer())
    assert list(tmp_path.iterdir()) == []


def test_flags_must_match_tokens() -> None:
    with pytest.raises(RequestError, match="2 tokens and 1 flags"):
        Document([1, 2], [True])


def full_disk() -> Iterator[Document]:
    yield Document([20, 21])
    raise OSError(28, "No space left on device")


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(RequestError, match="cannot be written"):
        write_packed(tmp_path / "file" / "out", [Document([10])], tokenizer=letter_tokenizer())
    with pytest.raises(RequestError, match="is not a directory"):
        write_packed(tmp_path / "file", [Document([10])], tokenizer=letter_tokenizer(), force=True)
    with pytest.raises(RequestError, match=r"cannot be written: .*No space left"):
        write_packed(tmp_path / "out", full_disk(), tokenizer=letter_tokenizer())
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("years of work")
    with pytest.raises(RequestError, match="holds other files"):
        write_packed(precious, [Document([11])], tokenizer=letter_tokenizer(), force=True)
    assert (precious / "thesis.txt").read_text() == "years of work"


def test_damaged_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="holds no packed tokens"):
        PackedTokens.open(tmp_path)
    write_packed(tmp_path / "out", [Document([10, 11, 12])], tokenizer=letter_tokenizer())
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    (tmp_path / "out" / "tokens.bin").write_bytes(b"\0" * 6)
    with pytest.raises(RequestError, match=r"has 6 bytes. Expected 8"):
        PackedTokens.open(tmp_path / "out")
    (tmp_path / "out" / "meta.json").write_text(json.dumps({**meta, "version": 99}))
    with pytest.raises(RequestError, match="of another kind"):
        PackedTokens.open(tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_tokens", "4"), ("num_tokens", None), ("num_tokens", [4]), ("num_tokens", 1e400), ("num_tokens", 4.0),
        ("num_tokens", 0), ("num_supervised", "x"), ("dtype", ["uint16"]), ("largest_token_id", None),
        ("vocab_size", 10**18), ("vocab_size", "x"), ("eos_id", "x"), ("tokenizer_sha", 3), ("tokens_sha256", None),
    ],
)  # fmt: skip
def test_damaged_facts_are_refused(key: str, value: object, tmp_path: Path) -> None:
    write_packed(tmp_path / "out", [Document([10, 11, 12])], tokenizer=letter_tokenizer())
    file = tmp_path / "out" / "meta.json"
    meta = json.loads(file.read_text())
    file.write_text(json.dumps({**meta, key: value}))
    with pytest.raises(RequestError, match=f"^'{key}' of '.*meta.json' is .* It is damaged: make the data again"):
        PackedTokens.open(tmp_path / "out")
    file.write_text(json.dumps({name: each for name, each in meta.items() if name != key}))
    with pytest.raises(RequestError, match=f"^'{key}' of '.*meta.json' is missing"):
        PackedTokens.open(tmp_path / "out")


def test_damaged_tokens_are_refused(tmp_path: Path) -> None:
    write_packed(tmp_path / "out", [Document([10, 11, 12])], tokenizer=letter_tokenizer())
    (tmp_path / "out" / "tokens.bin").write_bytes(b"\xff" * 8)
    with pytest.raises(RequestError, match=r"holds token 65535, but meta\.json has none so large\. It is damaged"):
        PackedTokens.open(tmp_path / "out").batch(0, batch_size=1, length=4, seed=0)


@pytest.mark.parametrize("repeats_windows", [False, True])
def test_an_epoch_takes_every_window_once_and_the_next_one_another_way(repeats_windows: bool) -> None:
    length, batch_size = 5, 3
    packed = replace(counted(5 * 12 + 2), repeats_windows=repeats_windows)  # 12 windows: 4 batches an epoch
    assert packed.num_windows(length) == 12
    epochs = []
    for epoch in range(3):
        rows = torch.cat([
            packed.batch(epoch * 4 + step, batch_size=batch_size, length=length, seed=7)[0] for step in range(4)
        ])  # fmt: skip
        assert torch.equal(rows, (rows[:, :1] + torch.arange(length)) % 62)  # each is one run of tokens
        assert len({*rows.flatten().tolist()}) == 60  # no token twice
        starts = rows[:, 0].tolist()
        ordered = sorted((start - starts[0]) % 62 for start in starts)
        assert {b - a for a, b in pairwise(ordered)} <= {5, 7}  # one grid; the 2 tokens left over are one gap
        epochs.append(starts)
    assert epochs[0] != epochs[1] != epochs[2]
    assert len({frozenset(starts) for starts in epochs}) == (1 if repeats_windows else 3)  # whether the grid moved


def test_batches_are_pure_and_span_epochs() -> None:
    packed = counted(37)
    one_by_one = [packed.batch(row, batch_size=1, length=5, seed=3)[0] for row in range(20)]
    for step in (4, 0, 2, 4):  # in any order, again and again; 7 windows an epoch, so batches cross the border
        tokens, supervised = packed.batch(step, batch_size=4, length=5, seed=3)
        assert tokens.dtype == torch.int64
        assert supervised.dtype == torch.bool
        assert bool(supervised.all())
        assert torch.equal(tokens, torch.cat(one_by_one[step * 4 : step * 4 + 4]))
    other = packed.batch(0, batch_size=4, length=5, seed=4)[0]
    assert not torch.equal(other, packed.batch(0, batch_size=4, length=5, seed=3)[0])


def test_two_processes_share_a_batch(tmp_path: Path) -> None:
    documents = [Document([10 + (start + place) % 40 for place in range(9)]) for start in range(8)]
    write_packed(tmp_path / "out", documents, tokenizer=letter_tokenizer())
    halves = [
        PackedTokens.open(tmp_path / "out").batch(2, batch_size=6, length=4, seed=0)[0][rank::2] for rank in range(2)
    ]
    whole = PackedTokens.open(tmp_path / "out").batch(2, batch_size=6, length=4, seed=0)[0]
    assert torch.equal(torch.stack(halves, dim=1).flatten(0, 1), whole)


def test_flags_stay_with_their_tokens() -> None:
    tokens = np.arange(50, dtype=np.uint16)
    packed = PackedTokens(tokens, tokens % 3 == 0, {})
    for step in range(6):
        batch, supervised = packed.batch(step, batch_size=4, length=7, seed=1)
        assert torch.equal(supervised, batch % 3 == 0)


def test_one_window_is_enough_and_less_is_an_error() -> None:
    assert sorted(counted(5).batch(3, batch_size=1, length=5, seed=0)[0][0].tolist()) == list(range(5))
    with pytest.raises(RequestError, match="has 5 tokens and a window 6"):
        counted(5).batch(0, batch_size=1, length=6, seed=0)
    with pytest.raises(RequestError, match="step -1"):
        counted(5).batch(-1, batch_size=1, length=5, seed=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 17, 64, 1000])
def test_shuffled_is_a_permutation(count: int) -> None:
    positions = np.arange(count)
    orders = [shuffled(positions, count, key).tolist() for key in range(5)]
    assert all(sorted(order) == positions.tolist() for order in orders)
    if count > 16:
        assert len({tuple(order) for order in orders}) == 5
        fixed = np.mean([np.sum(np.array(order) == positions) for order in orders])
        assert fixed < 5  # a random permutation keeps one number in place on average


def test_shuffled_stays_what_it_is() -> None:
    """A resumed run must see the same order with every library version."""
    assert shuffled(np.arange(10), 10, 1).tolist() == [1, 6, 8, 0, 3, 5, 2, 7, 4, 9]
