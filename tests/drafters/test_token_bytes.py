"""Tokens and their bytes: what is encoded spells the same bytes, and tokenizers decode what spellings say."""

from __future__ import annotations

import random

import pytest
from tokenizers import Tokenizer, models
from tokenizers_of_kinds import KINDS, TEXTS, bundled, byte_level, llama_like, without_bytes
from transformers import PreTrainedTokenizerFast

from foretoken.core.errors import ConfigError
from foretoken.drafters.vocabularies import Vocabulary


def vocabulary(kind: str) -> Vocabulary:
    """All tokens of a tokenizer."""
    tokenizer = KINDS[kind]()
    return Vocabulary(tokenizer, len(tokenizer), kind)


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
    for tokenizer in (words, object()):
        with pytest.raises(ConfigError, match=r"^the tokenizer of 'words' does not tell the bytes .* Expected a fast"):
            Vocabulary(tokenizer, 2, "words")
