"""The vocabulary of drafts: the most frequent labels, and files that say what they are of."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import VOCAB_SIZE

from foretoken.core.errors import ConfigError, RequestError
from foretoken.formats.draft_vocabulary import DraftVocabulary
from foretoken.training.data import packed as packed_module
from foretoken.training.data.packed import PackedTokens, count_vocabulary

META: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "tokenizer_sha": "words", "tokens_sha256": "text"}


def packed(tokens: list[int], labels: list[bool] | None = None) -> PackedTokens:
    return PackedTokens(np.array(tokens, np.uint16), None if labels is None else np.array(labels), META)


@pytest.mark.parametrize("is_partial", [False, True])
@pytest.mark.parametrize("size", [1, 10, 40])
def test_the_most_frequent_labels(size: int, is_partial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_module, "_COUNTED_AT_ONCE", 97)  # several portions
    generator = np.random.default_rng(5)
    tokens = generator.integers(3, VOCAB_SIZE, 1500)
    flags = generator.random(1500) < (0.67 if is_partial else 1.0)
    labels = Counter(tokens[flags].tolist())
    expected = sorted(labels, key=lambda token: (-labels[token], token))[:size]
    counted = count_vocabulary(packed(tokens.tolist(), flags.tolist() if is_partial else None), size)
    assert counted.vocabulary.token_ids == tuple(sorted(expected))
    assert counted.vocabulary.coverage == pytest.approx(sum(labels[token] for token in expected) / labels.total())
    assert (counted.num_labels, counted.num_filled) == (labels.total(), 0)


def test_ties_go_to_the_lower_id_and_gaps_are_filled_from_below() -> None:
    tokens = [9, 9, 5, 5, 7, 3, 3, 3, 3]
    labels = [True] * 5 + [False] * 4
    ids = [count_vocabulary(packed(tokens, labels), size).vocabulary.token_ids for size in (1, 2, 3, 5)]
    assert ids == [(5,), (5, 9), (5, 7, 9), (0, 1, 5, 7, 9)]
    filled = count_vocabulary(packed(tokens, labels), 5)
    assert (filled.num_filled, filled.vocabulary.coverage) == (2, 1.0)
    assert count_vocabulary(packed(tokens), VOCAB_SIZE).vocabulary.token_ids == tuple(range(VOCAB_SIZE))


def test_what_cannot_be_counted() -> None:
    for size in (0, VOCAB_SIZE + 1):
        with pytest.raises(RequestError, match=f"of {size} tokens was asked for. Expected 1 to {VOCAB_SIZE}"):
            count_vocabulary(packed([1]), size)
    with pytest.raises(RequestError, match=f"holds token {VOCAB_SIZE}. Expected ids below"):
        count_vocabulary(packed([1, VOCAB_SIZE]), 1)


def test_files(tmp_path: Path) -> None:
    made = count_vocabulary(packed([4, 4, 8]), 2).vocabulary
    made.write(tmp_path / "deep" / "vocab.json")
    assert DraftVocabulary.read(tmp_path / "deep" / "vocab.json") == made
    with pytest.raises(ConfigError, match="there is no file"):
        DraftVocabulary.read(tmp_path / "none.json")
    good = made.model_dump(mode="json")
    for change, sentence in (
        ({"format": "other"}, "holds no draft vocabulary"),
        ({"token_ids": [4, 4]}, "are not ascending"),
        ({"token_ids": []}, "'token_ids' of the draft vocabulary"),
        ({"token_ids": [1.5]}, "token_ids.0"),
        ({"version": 2}, "'version' of the draft vocabulary"),
    ):
        path = tmp_path / "damaged.json"
        path.write_text(json.dumps(good | change))
        with pytest.raises(ConfigError, match=sentence):
            DraftVocabulary.read(path)
