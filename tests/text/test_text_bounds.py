"""No token stands for more bytes of a text than is said, and nothing is said where that is not known."""

import json
import unicodedata
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
from end_to_end.tiny_llms import tokenizer as without_all_bytes
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foretoken.text.codec import longest_token_bytes


@cache
def bundled() -> dict[str, Any]:
    """The bundled model's tokenizer, which is byte-level."""
    return dict(json.loads(AutoTokenizer.from_pretrained("models/tinycode").backend_tokenizer.to_str()))


@cache
def with_fallback(kind: str) -> dict[str, Any]:
    """One that marks spaces as SentencePiece does, and falls back to bytes."""
    model: dict[str, Any]
    pieces = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581\u2581\u2581", "ab"]
    if kind == "BPE":
        model = {"type": kind, "vocab": {piece: index for index, piece in enumerate(pieces)}, "merges": []}
    else:
        model = {"type": kind, "vocab": [[piece, -1.0 * len(piece)] for piece in pieces], "unk_id": 0}
    marked = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    parts = deepcopy(bundled())
    parts.update(
        model={**model, "byte_fallback": True}, normalizer={"type": "Sequence", "normalizers": marked},
        pre_tokenizer=None, post_processor=None, added_tokens=[],
    )  # fmt: skip
    return parts


def made(parts: dict[str, Any], **changes: Any) -> Any:
    """A tokenizer of transformers."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps({**deepcopy(parts), **changes})))


TEXTS = [
    " " * 4000, "\u2581" * 4000, "\u212a\u0327" * 1000, "\u1fbe\u0308\u0301" * 1000, "\u1fef" * 900, "\U0001f600" * 900,
    "def f(x):\n    return x\n" * 200, "=" * 4000, "<|endoftext|>" * 300, "\u3042\u0000\uffff" * 300,
]  # fmt: skip
NFC = {"type": "NFC"}
BOUNDED = {
    "byte-level": lambda: made(bundled()),
    "byte-level, NFC": lambda: made(bundled(), normalizer=NFC),
    "BPE with bytes": lambda: made(with_fallback("BPE")),
    "unigrams with bytes": lambda: made(with_fallback("Unigram")),
}


@pytest.mark.parametrize("kind", BOUNDED)
def test_no_text_makes_fewer_tokens(kind: str) -> None:
    tokenizer = BOUNDED[kind]()
    longest = longest_token_bytes(tokenizer)
    assert longest is not None
    for text in TEXTS:
        assert len(tokenizer(text)["input_ids"]) * longest >= len(text.encode())


def test_nfc_makes_at_most_a_quarter_of_any_character() -> None:
    alone: dict[str, int] = {}
    characters = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]
    for character in characters:
        parts = unicodedata.normalize("NFD", character)
        if len(parts) == 1:
            alone[parts] = max(alone.get(parts, 0), len(character.encode()), len(parts.encode()))
    for character in characters:
        if unicodedata.is_normalized("NFC", character):
            longest = sum(alone[part] for part in unicodedata.normalize("NFD", character))
            assert longest <= 4 * len(character.encode())


ADDED = {"id": 6143, "content": "<gap>", "single_word": False, "lstrip": True, "rstrip": False, "normalized": False,
         "special": False}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Sequence", "normalizers": [NFC, {"type": "NFKC"}]}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "  "}, "content": " "}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "    "}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": None},
        {"added_tokens": [ADDED]},
    ],
    ids=str,
)
def test_tokenizers_that_may_drop_text_have_no_bound(changes: dict[str, Any]) -> None:
    assert longest_token_bytes(made(bundled(), **changes)) is None


def test_other_tokenizers_have_no_bound() -> None:
    class Raising:
        @property
        def backend_tokenizer(self) -> Any:
            return self

        def to_str(self) -> str:
            raise KeyError("of its own")

    assert longest_token_bytes(without_all_bytes()) is None
    assert longest_token_bytes(Raising()) is None
    assert longest_token_bytes(None) is None
