"""Two vocabularies: the shared tokens, distributions over them, and texts in the ids of the other."""

from __future__ import annotations

import random
from itertools import product

import pytest
import torch
from end_to_end.tiny_llms import OTHER_ORDER, other_tokenizer, tokenizer
from tokenizers_of_kinds import KINDS, TEXTS

from foretoken.drafters.vocabularies import Translation, Vocabulary, VocabularyMap

CPU = torch.device("cpu")


def vocabulary(kind: str) -> Vocabulary:
    """All tokens of a tokenizer."""
    return Vocabulary(KINDS[kind](), len(KINDS[kind]()), kind)


def tiny_map() -> VocabularyMap:
    """From the tiny targets to the other tokenizer."""
    return VocabularyMap(Vocabulary(tokenizer(), 67, "ours"), Vocabulary(other_tokenizer(), 65, "theirs"), CPU)


def test_the_shared_tokens_are_all_that_both_have() -> None:
    mapping = tiny_map()
    assert mapping.pairs == {token: index for index, token in enumerate(OTHER_ORDER)}
    assert mapping.share == pytest.approx(len(OTHER_ORDER) / 67)


@pytest.mark.parametrize(("ours", "theirs"), [pair for pair in product(KINDS, KINDS) if pair[0] != pair[1]])
def test_pairs_spell_the_same(ours: str, theirs: str) -> None:
    target, draft = vocabulary(ours), vocabulary(theirs)
    mapping = VocabularyMap(target, draft, CPU)
    assert len(set(mapping.pairs.values())) == len(mapping.pairs)
    plain = {a: b for a, b in mapping.pairs.items() if a not in target.specials}
    assert all(target.spellings[a] == draft.spellings[b] is not None for a, b in plain.items())
    shared = set(filter(None, target.spellings)) & set(filter(None, draft.spellings))
    assert len(plain) == len(shared) > 256, "every byte, and more"
    assert mapping.pairs[target.eos] == draft.eos


def test_the_draft_distribution_is_restricted_and_renormalised() -> None:
    """By the plain formula, token by token."""
    mapping = tiny_map()
    logits = torch.randn(3, 65, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q = mapping.to_target(logits).softmax(1)
    for row, scores in zip(q.tolist(), logits.exp().tolist(), strict=True):
        total = sum(scores[theirs] for theirs in mapping.pairs.values())
        assert sum(row) == pytest.approx(1.0)
        for token in range(67):
            expected = scores[mapping.pairs[token]] / total if token in mapping.pairs else 0.0
            assert row[token] == pytest.approx(expected, rel=1e-12, abs=0.0)


@pytest.mark.parametrize(("ours", "theirs"), [pair for pair in product(KINDS, KINDS) if pair[0] != pair[1]])
def test_texts_in_the_other_s_tokens_spell_the_same(ours: str, theirs: str) -> None:
    """Prompts as a whole and later tokens by themselves, special tokens among them; nothing changes afterwards."""
    target, draft = vocabulary(ours), vocabulary(theirs)
    mapping, draw = VocabularyMap(target, draft, CPU), random.Random(ours)
    for text in TEXTS.values():
        pieces = target.encode(text.encode())
        tokens = [target.eos or 0, *(piece.token for piece in pieces), target.eos or 0]
        prompt_len = draw.randrange(len(tokens))
        translation, ids = Translation(mapping, prompt_len), list[int]()
        for end in range(1, len(tokens) + 1):
            before, ids = list(ids), list(translation.of(tokens[:end]))
            if end > prompt_len + 1:
                assert ids[: len(before)] == before
                assert len(ids) > len(before)
        assert ids[0] == ids[-1] == draft.eos
        assert b"".join(draft.spellings[token] or b"" for token in ids) == text.encode()
        whole = [piece.token for piece in draft.encode(text.encode())]
        assert mapping.of_text(tokens) == [draft.eos, *whole, draft.eos]


def test_tokens_that_are_not_shared() -> None:
    mapping = tiny_map()
    theirs = other_tokenizer()
    names = theirs.convert_ids_to_tokens(mapping.translated(tokenizer().convert_tokens_to_ids("th")))
    assert names == ["t", "h"]
    assert mapping.translated(0) == mapping.translated(1000) == (theirs.eos_token_id,), "a stand-in, never nothing"
    assert mapping.of_text([]) == [theirs.eos_token_id]
    fed = mapping.fed(torch.tensor([[5, 0]]))
    assert fed.tolist() == [[mapping.pairs[5], theirs.eos_token_id]]
