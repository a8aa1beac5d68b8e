"""Tokens and their bytes, the tokens that two vocabularies share, and texts in the ids of the other."""

import random
from itertools import product

import pytest
import torch
from end_to_end.tiny_llms import OTHER_ORDER, other_tokenizer, tokenizer
from tokenizers import Tokenizer, models
from tokenizers_of_kinds import KINDS, TEXTS, bundled, byte_level, llama_like, vocabulary, without_bytes
from transformers import PreTrainedTokenizerFast

from foretoken.core.errors import ConfigError
from foretoken.drafters.vocabularies import Translation, Vocabulary, VocabularyMap


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_text_becomes_tokens_that_spell_it(kind: str, text: str) -> None:
    """From every byte on, inside of characters too; each piece is its token's bytes."""
    known, data = vocabulary(kind), TEXTS[text].encode()
    for start in range(0, len(data), 3):
        pieces = known.encode(data[start:])
        assert b"".join(piece.data for piece in pieces) == data[start:]
        assert all(known.spellings[piece.token] == piece.data for piece in pieces)


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_become_tokens(kind: str) -> None:
    known, draw = vocabulary(kind), random.Random(kind)
    for _ in range(30):
        data = draw.randbytes(draw.randrange(1, 30))
        assert b"".join(known.spellings[token] or b"" for token, _ in known.encode(data)) == data


@pytest.mark.parametrize("kind", KINDS)
def test_spellings_are_what_the_tokenizer_decodes(kind: str) -> None:
    """Random tokens, decoded behind a letter, as some decoders drop a space at the beginning."""
    known, tokenizer, draw = vocabulary(kind), KINDS[kind](), random.Random(kind)
    plain = [token for token, spelling in enumerate(known.spellings) if spelling]
    first = known.ids[b"x"]
    for _ in range(200):
        tokens = [first, *draw.choices(plain, k=4)]
        spelled = b"".join(known.spellings[token] or b"" for token in tokens)
        try:
            text = spelled.decode()
        except UnicodeDecodeError:  # decoders show such bytes as U+FFFD
            continue
        assert tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text


@pytest.mark.parametrize("text", ["prose", "languages", "emoji", "lines", "tabs", "code", "decomposed"])
def test_text_is_encoded_as_the_tokenizer_does(text: str) -> None:
    known = vocabulary("bundled")
    expected = bundled()(TEXTS[text], add_special_tokens=False)["input_ids"]
    assert [piece.token for piece in known.encode(TEXTS[text].encode())] == expected


@pytest.mark.parametrize("kind", ["byte_level", "llama_like"])
def test_no_space_is_put_before_text(kind: str) -> None:
    tokenizer = KINDS[kind]()
    assert tokenizer.tokenize("return")[0][0] in "\u2581\u0120", "by itself it does"
    assert vocabulary(kind).encode(b"return")[0].data[:1] == b"r"


def test_special_tokens_have_no_bytes_and_are_never_encoded() -> None:
    for kind in KINDS:
        known = vocabulary(kind)
        assert known.eos in known.specials
        assert all(known.spellings[token] is None for token in known.specials)
        data = "".join(known.specials.values()).encode()
        assert not {token for token, _ in known.encode(data)} & set(known.specials)
    assert set(vocabulary("bundled").specials) == set(range(8))


def test_bytes_that_no_token_spells_get_the_stand_in() -> None:
    tokenizer = without_bytes()
    known = Vocabulary(tokenizer, len(tokenizer), "few")
    pieces = known.encode("fox 中?".encode())
    assert b"".join(piece.data for piece in pieces) == "fox 中?".encode()
    strange = [piece for piece in pieces if piece.token == tokenizer.unk_token_id]
    assert b"".join(piece.data for piece in strange) == "中".encode()
    assert known.encode("\ufb01".encode())[0].token == tokenizer.unk_token_id, "not what normalisation makes of it"


def test_ids_past_the_model_s_are_left_out() -> None:
    tokenizer = byte_level()
    known = Vocabulary(tokenizer, 300, "small")
    assert len(known.spellings) == 300
    assert all(token < 300 for token, _ in known.encode(TEXTS["code"].encode()))


def test_a_plain_token_goes_before_one_for_its_byte() -> None:
    known = Vocabulary(llama_like(), len(llama_like()), "llama")
    assert llama_like().convert_ids_to_tokens(known.ids[b"e"]) == "e"
    assert llama_like().convert_ids_to_tokens(known.ids[b"\n"]) in ("\n", "<0x0A>")


def test_tokenizers_that_do_not_tell_bytes_are_refused() -> None:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    for other in (words, object()):
        with pytest.raises(ConfigError, match=r"^the tokenizer of 'words' does not tell the bytes .* Expected a fast"):
            Vocabulary(other, 2, "words")


CPU = torch.device("cpu")


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
