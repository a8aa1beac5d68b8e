"""Streamed text is the full decoding, whatever bytes the tokens split, and no character is ever taken back."""

from __future__ import annotations

from typing import Any

import pytest
from end_to_end.tiny_llms import tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foretoken.engine.detokenizer import Detokenizer

IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
UNICODE = "naïve 😀 e\u0301 ß€\U0001f468\u200d\U0001f469 \ufffd 日本 \u2028 x"


def stream(codec: Any, prompt: list[int], ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """The pieces of text that each token made certain, and what `flush` adds."""
    detokenizer = Detokenizer(codec, prompt, skip_special_tokens=skip_special_tokens)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.flush()]
    assert detokenizer.text == "".join(pieces)
    return pieces


def byte_fallback_tokenizer() -> Any:
    """A SentencePiece-like tokenizer: words with their space, and one token for each byte."""
    pieces = ["<unk>", "▁na", "▁x", "▁", "a", "ve"] + [f"<0x{byte:02X}>" for byte in range(256)]
    inner = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")


@given(ids=IDS, skip=st.booleans())
def test_stream_is_the_full_decoding(ids: list[int], skip: bool) -> None:
    """Random ids of a byte-level tokenizer: most are pieces of characters in the wrong order."""
    whole = tokenizer().decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert "".join(stream(tokenizer(), [], ids, skip_special_tokens=skip)) == whole


@given(parts=st.lists(IDS, max_size=8), skip=st.booleans())
def test_several_tokens_at_once_give_the_same_text(parts: list[list[int]], skip: bool) -> None:
    detokenizer = Detokenizer(tokenizer(), [], skip_special_tokens=skip)
    certain = ""
    for part in parts:
        detokenizer.push_all(part)
        assert detokenizer.text.startswith(certain), "no character is ever taken back"
        certain = detokenizer.text
    detokenizer.flush()
    ids = [token for part in parts for token in part]
    assert detokenizer.text == tokenizer().decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@given(prompt=st.text("abc th.", min_size=1, max_size=9), ids=IDS)
def test_stream_goes_on_from_the_prompt(prompt: str, ids: list[int]) -> None:
    """The prompt's last tokens are context only, none of their text comes out."""
    context = tokenizer()(prompt)["input_ids"]
    before, whole = tokenizer().decode(context), tokenizer().decode([*context, *ids], skip_special_tokens=True)
    assert before + "".join(stream(tokenizer(), context, ids)) == whole


def test_a_character_comes_with_its_last_byte() -> None:
    ids = tokenizer()("a😀b€")["input_ids"]
    assert stream(tokenizer(), [], ids) == ["a", "", "", "", "😀", "b", "", "", "€", ""]


def test_flush_gives_an_incomplete_character_up() -> None:
    ids = tokenizer()("a😀")["input_ids"]
    assert stream(tokenizer(), [], ids[:-1]) == ["a", "", "", "", "\ufffd"]
    assert stream(tokenizer(), [], []) == [""]


@pytest.mark.parametrize("text", [UNICODE, "▁na ve", "plain", " leading"])
def test_byte_fallback_tokenizers(text: str) -> None:
    """Each character outside the vocabulary is a run of byte tokens; the first space of a text is not shown."""
    codec = byte_fallback_tokenizer()
    first = len(["<unk>", "▁na", "▁x", "▁", "a", "ve"])
    ids = [1] + [first + byte for byte in text.encode()] + [2, 5, 3, 4]
    pieces = stream(codec, [], ids)
    # This decoder spoils a run of bytes that ends inside a character, so nothing may come out before the end of one.
    assert "".join(pieces) == "na" + text + " xve a"
    assert "".join(pieces) == codec.decode(ids)


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = [4, 2, 5, 0]
    assert "".join(stream(tokenizer(), [], ids)) == "ab"
    assert "".join(stream(tokenizer(), [], ids, skip_special_tokens=False)) == "a</s>b<pad>"
