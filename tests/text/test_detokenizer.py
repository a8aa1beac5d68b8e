"""Streamed text is the full decoding, whatever bytes the tokens split, and no character is ever taken back."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from end_to_end.tiny_llms import tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import VOCAB_SIZE
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, PythonBackend

from foretoken import SamplingParams
from foretoken.engine.sequence import Sequence
from foretoken.sampling.batch import SamplingRequest
from foretoken.text.codec import Codec, Detokenizer

IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)
UNICODE = "naïve 😀 e\u0301 ß€\U0001f468\u200d\U0001f469 \ufffd 日本 \u2028 x"


def detokenizer_of(codec: Any, prompt: list[int], skip: bool) -> Detokenizer:
    return Detokenizer(Codec(codec, 1 << 20), prompt, skip_special_tokens=skip)


def stream(codec: Any, prompt: list[int], ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    """The pieces of text that each token made certain, and what `flush` adds."""
    detokenizer = detokenizer_of(codec, prompt, skip_special_tokens)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.flush()]
    assert detokenizer.text == "".join(pieces)
    return pieces


WORDS = ["<unk>", "▁na", "▁x", "▁", "a", "ve", "\ufffd", "日", "e\u0301", "▁."]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LLAMA = (decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
SHORT_RUNS = [0x41, 0x20, 0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xFF]  # bytes that make characters


def tokenizer_of(model: Any, decoder: Any) -> Any:
    """With an end-of-sequence token behind what the model has."""
    inner = Tokenizer(model)
    inner.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="</s>")


def bpe(pieces: list[str], **options: Any) -> Any:
    return models.BPE({piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>", **options)


def byte_fallback_tokenizer() -> Any:
    """A SentencePiece-like tokenizer: words with their space, and one token for each byte."""
    return tokenizer_of(
        bpe(["<unk>", "▁na", "▁x", "▁", "a", "ve", *BYTES], byte_fallback=True), decoders.Sequence([*LLAMA])
    )


def slow_tokenizer() -> Any:
    """One written in Python, which puts a space beside added tokens and between others where its class says so."""

    class Slow(PythonBackend):
        def __init__(self, **options: Any) -> None:
            self.pieces = ["<unk>", "a", "b", " c", "'s"]
            super().__init__(unk_token="<unk>", eos_token="</s>", **options)
            self.add_tokens(["<tool>"])

        @property
        def vocab_size(self) -> int:
            return len(self.pieces)

        def get_vocab(self) -> dict[str, int]:
            return {piece: i for i, piece in enumerate(self.pieces)} | self.added_tokens_encoder

        def _convert_token_to_id(self, token: str) -> int:
            return self.pieces.index(token)

        def _convert_id_to_token(self, index: int) -> str:
            return self.pieces[index]

    return Slow()


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level": tokenizer,
    "byte fallback": lambda: tokenizer_of(bpe([*WORDS, *BYTES], byte_fallback=True), decoders.Sequence([*LLAMA])),
    "byte fallback, runs of bytes": lambda: tokenizer_of(
        bpe(["<unk>", "a", "▁b", *(f"<0x{byte:02X}>" for byte in SHORT_RUNS)], byte_fallback=True),
        decoders.Sequence([*LLAMA]),
    ),
    "unigram with byte fallback": lambda: tokenizer_of(
        models.Unigram([(piece, -1.0) for piece in [*WORDS, *BYTES]], unk_id=0, byte_fallback=True),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
    ),
    "metaspace": lambda: tokenizer_of(bpe(WORDS), decoders.Metaspace()),
    "word pieces": lambda: tokenizer_of(
        models.WordPiece(
            {p: i for i, p in enumerate(["<unk>", "do", "n't", "##ing", ".", "##.", "'s", "日"])}, unk_token="<unk>"
        ),
        decoders.WordPiece(cleanup=True),
    ),
    "CTC": lambda: tokenizer_of(bpe(["<unk>", "<pad>", "a", "b", "|"]), decoders.CTC()),
    "Python": slow_tokenizer,
}
kind = cache(lambda name: KINDS[name]())


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=60)
@given(data=st.data())
def test_text_does_not_depend_on_how_tokens_come(name: str, data: st.DataObject) -> None:
    """Drafting decides how many tokens an iteration brings: text and its state are those of one at a time."""
    codec = kind(name)
    tokens = st.integers(0, len(codec) - 1)
    prompt, skip = data.draw(st.lists(tokens, max_size=6)), data.draw(st.booleans())
    groups = data.draw(st.lists(st.lists(tokens, max_size=9), max_size=6))
    single, grouped = detokenizer_of(codec, prompt, skip), detokenizer_of(codec, prompt, skip)
    for group in groups:
        for token in group:
            single.push(token)
        grouped.push_all(group)
        assert grouped.text == single.text
    assert grouped.flush() == single.flush()
    assert grouped.text == single.text
    ids = [token for group in groups for token in group]
    whole = codec.decode([*prompt[-5:], *ids], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    start = codec.decode(prompt[-5:], skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    if name != "CTC" and "\ufffd" not in start + whole:
        assert start + single.text == whole, "without broken characters it is the whole decoding"


def test_bytes_that_spoil_what_was_shown() -> None:
    """`A` is whole before the byte comes that spoils the run; together they are two broken characters."""
    codec = byte_fallback_tokenizer()
    ids = codec.convert_tokens_to_ids(["▁na", "<0x41>", "<0xC3>", "ve"])
    assert codec.decode(ids) == "na\ufffd\ufffdve"
    for groups in ([[token] for token in ids], [ids], [ids[:2], ids[2:]], [ids[:3], ids[3:]]):
        detokenizer = detokenizer_of(codec, [], True)
        for group in groups:
            detokenizer.push_all(group)
        assert detokenizer.text == "naA\ufffdve"


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=30)
@given(data=st.data())
def test_sequences_end_at_the_same_place_with_the_same_text(name: str, data: st.DataObject) -> None:
    """Stop strings, end tokens and limits; and somebody may read along, or not."""
    codec = kind(name)
    prompt = data.draw(st.lists(st.integers(0, len(codec) - 1), min_size=1, max_size=4))
    groups = data.draw(st.lists(st.lists(st.integers(0, len(codec) - 1), min_size=1, max_size=6), max_size=6))
    ids = [token for group in groups for token in group]
    text = codec.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    at = data.draw(st.integers(0, len(text)))
    stop = [part for part in (text[at : at + data.draw(st.integers(0, 3))],) if part]

    def run(parts: list[list[int]], *, is_read: bool) -> tuple[Any, ...]:
        params = SamplingParams(stop=stop, max_tokens=20)
        sequence = Sequence(
            request_id="0", index=0, prompt=prompt, is_seeded=False, eos_ids=[3], max_len=len(prompt) + 20,
            sampling=SamplingRequest(params=params, seed=0, terminators=[3], bad_words=[]),
            codec=Codec(codec, 1 << 20),
        )  # fmt: skip
        pieces = ""
        for part in parts:
            if sequence.finish_reason is None:
                sequence.emit(part)
            pieces += sequence.take_new_text() if is_read else ""
        sequence.abort() if sequence.finish_reason is None else None
        pieces += sequence.take_new_text()
        assert pieces == sequence.text
        return sequence.text, sequence.output_ids, sequence.finish_reason, sequence.stop_reason

    expected = run([[token] for token in ids], is_read=True)
    assert run(groups, is_read=True) == expected
    assert run(groups, is_read=False) == expected
    assert run([ids], is_read=True) == expected


@given(ids=IDS, skip=st.booleans())
def test_stream_is_the_full_decoding(ids: list[int], skip: bool) -> None:
    """Random ids of a byte-level tokenizer: most are pieces of characters in the wrong order."""
    whole = tokenizer().decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
    assert "".join(stream(tokenizer(), [], ids, skip_special_tokens=skip)) == whole


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
