"""Small tokenizers of the kinds that there are, trained on a few lines, and texts that are hard on them."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from foretoken.drafters.vocabularies import Vocabulary

BUNDLED = Path(__file__).parents[2] / "models/tinycode"
TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog.\nIt's 12:30, isn't it?",
    "languages": "Größe, señor, naïve café | 東京タワー Москва नमस्ते العربية",
    "emoji": "ok 😀👩‍👩‍👧 fine 🇩🇪!",
    "lines": "first\r\n\r\nsecond\rthird\n\n\n  end  ",
    "tabs": "\tif x:\n\t\treturn\ty  # two\t tabs",
    "code": "def add(self, x: int = 10) -> str:\n    return f'{x + 1:>8}'  # noqa\n",
    "markup": "a<|endoftext|>b </s> <0x41> \u2581 \u0120 </unk>",
    "decomposed": "e\u0301 \ufb01 \u212b",  # what Unicode normalisation would change
}
_LINES = [*TEXTS.values(), *(f"def name_{i}(value):\n    return value * {i}" for i in range(40))]
_SPECIALS = ["<unk>", "<s>", "</s>"]


def _wrapped(inner: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@cache
def byte_level() -> Any:
    """Byte-level BPE, as GPT-2's, with a space before every text."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    inner.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    inner.train_from_iterator(
        _LINES, trainers.BpeTrainer(vocab_size=500, special_tokens=_SPECIALS, initial_alphabet=alphabet)
    )
    return _wrapped(inner)


@cache
def llama_like() -> Any:
    """A unigram model with a marker for spaces, put before every text too, and tokens for bytes."""
    trained = Tokenizer(models.Unigram())
    trained.normalizer = normalizers.Replace(" ", "\u2581")
    trained.train_from_iterator(
        _LINES, trainers.UnigramTrainer(vocab_size=300, special_tokens=_SPECIALS, unk_token="<unk>")
    )
    entries = [tuple(entry) for entry in json.loads(trained.to_str())["model"]["vocab"]]
    bytes_ = [(f"<0x{byte:02X}>", -100.0) for byte in range(256)]
    inner = Tokenizer(models.Unigram([*entries[:3], *bytes_, *entries[3:]], unk_id=0, byte_fallback=True))
    inner.add_special_tokens(_SPECIALS)
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    inner.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    ])  # fmt: skip
    return _wrapped(inner)


@cache
def without_bytes() -> Any:
    """A unigram model that knows some characters only, and normalises text."""
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    inner.train_from_iterator(
        _LINES[:2], trainers.UnigramTrainer(vocab_size=120, special_tokens=_SPECIALS, unk_token="<unk>")
    )
    return _wrapped(inner)


@cache
def bundled() -> Any:
    """The tokenizer of the bundled models, byte-level without a space before the text."""
    return AutoTokenizer.from_pretrained(BUNDLED)


KINDS = {"bundled": bundled, "byte_level": byte_level, "llama_like": llama_like}


def vocabulary(kind: str) -> Vocabulary:
    """All tokens of a tokenizer."""
    return Vocabulary(KINDS[kind](), len(KINDS[kind]()), kind)
