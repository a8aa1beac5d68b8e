"""Tokens and end tokens of GGUF files are llama.cpp's.

The recorded ids come from a program on llama.cpp's own sources, see "source" in the JSON files. Those of real files are
compared if FORETOKEN_REAL_MODELS names a folder with the files.
"""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter, TokenType
from gguf_files import add_pairs, add_tokens, write_header
from gguf_texts import SHORT_TEXTS, texts
from test_gguf import refusal

from foretoken.models.stored.gguf import gguf_tokenizer
from foretoken.models.stored.gguf_file import read_gguf
from foretoken.models.stored.gguf_tokenizer import GgufVocabulary, read_vocabulary

_SPLITS = json.loads((Path(__file__).parent / "gguf_ids_of_splits.json").read_text())
SPLITS = _SPLITS["ids"]
NAMES = [(each, name) for name in SPLITS for each in (name, *_SPLITS["same"].get(name, ()))]  # with llama.cpp's ids
REAL = json.loads((Path(__file__).parent / "gguf_ids_of_real_files.json").read_text())["vocabularies"]
CASED = ("tekken", "gpt-4o", "kimi-k2")  # split at case, where llama.cpp does not
ADDS_BOS = ("llama3", "tekken", "chameleon")
CONTROL, USER_DEFINED, UNKNOWN = TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN


def tokenizer_of(path: Path, *adds: Callable[[GGUFWriter], None]) -> Any:
    return gguf_tokenizer(write_header(path / "model.gguf", *adds))


@pytest.mark.parametrize(("name", "recorded"), NAMES)
def test_text_is_split_as_by_llama_cpp(tmp_path: Path, name: str, recorded: str) -> None:
    tokenizer = tokenizer_of(tmp_path, lambda writer: add_pairs(writer, SHORT_TEXTS, name))
    expected = {
        text: ids
        for text, ids in zip(SHORT_TEXTS, SPLITS[recorded], strict=True)
        if recorded not in CASED or (text.isascii() and text == text.lower())
    }
    assert {text: tokenizer.encode(text) for text in expected} == expected
    assert all(tokenizer.decode(ids) == text for text, ids in expected.items() if recorded not in ADDS_BOS)


def test_the_recorded_splits_differ() -> None:
    assert len(NAMES) == 87  # all of llama.cpp's but three that mark spaces, and one that is refused
    assert len({json.dumps(ids) for ids in SPLITS.values()}) >= 28  # some differ for rare texts alone


def test_words_are_split_at_case_where_the_models_were_trained_so(tmp_path: Path) -> None:
    for name, expected in (("tekken", ["i", "Phone"]), ("tiny_aya", ["i", "Phone"]), ("qwen2", ["iPhone"])):
        tokenizer = tokenizer_of(tmp_path, lambda writer, name=name: add_pairs(writer, ["iPhone"], name))
        pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("iPhone")
        assert [text for text, _ in pieces] == expected


def test_a_missing_name_of_the_split_is_the_default(tmp_path: Path) -> None:
    def encoded(split: str | None) -> list[int]:
        add = partial(add_tokens, tokens=[*"1234", "34"], merges=["3 4"], split=split)
        return tokenizer_of(tmp_path, add).encode("1234")

    assert encoded(None) == encoded("default") == [0, 1, 2, 3]
    assert encoded("gpt-2") == [0, 1, 4]


LETTERS = [*"abcdefgh", "gh"]
add_letters = partial(add_tokens, tokens=LETTERS, merges=["g h"])


@pytest.mark.parametrize(
    ("special", "ids", "ends"),
    [
        # As Qwen2.5: one id is named, the others are found by their texts.
        (
            ["</s>", "<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|fim_middle|>"],
            {"eos": "<|im_end|>"},
            ["<|im_end|>", "</s>", "<|endoftext|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"],
        ),
        # As SmolLM2.
        (
            ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<reponame>"],
            {"eos": "<|im_end|>", "pad": "<|im_end|>"},
            ["<|im_end|>", "<|endoftext|>", "<reponame>"],
        ),
        # As Gemma 3.
        (
            ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>", "</s>"],
            {"eos": "<eos>"},
            ["<eos>", "<end_of_turn>", "</s>"],
        ),
        # As Phi-3 and Llama 3.
        (
            ["</s>", "<|endoftext|>", "<|end|>", "<|user|>"],
            {"eos": "<|endoftext|>"},
            ["<|endoftext|>", "</s>", "<|end|>"],
        ),
        (
            ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
            {"eos": "<|end_of_text|>", "eot": "<|eot_id|>"},
            ["<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"],
        ),
        # As gpt-oss and Solar: <|end|> ends a part of an answer.
        (
            ["<|return|>", "<|end|>", "<|call|>", "<|start|>"],
            {"eos": "<|return|>", "eot": "<|end|>"},
            ["<|return|>", "<|call|>"],
        ),
        (["<|flush|>", "<|end|>", "<|calls|>"], {"eos": "<|flush|>"}, ["<|flush|>", "<|calls|>"]),
        (["<|call|>", "<|end|>"], {"eos": "<|call|>"}, ["<|call|>", "<|end|>"]),
        # As Gemma 4: </s> is a tag of HTML.
        (["<eos>", "<turn|>", "<|tool_response>", "</s>"], {"eos": "<eos>"}, ["<eos>", "<turn|>", "<|tool_response>"]),
    ],
)
def test_texts_end_at_all_of_llama_cpps_tokens(
    tmp_path: Path, special: list[str], ids: dict[str, str], ends: list[str]
) -> None:
    add = partial(add_ends, special=special, ids=ids)
    vocabulary, tokenizer = vocabulary_of(tmp_path, add), tokenizer_of(tmp_path, add)
    assert [vocabulary.tokens[token] for token in vocabulary.ends] == ends
    for text in ends:
        encoded = tokenizer.encode(f"ab{text}a", add_special_tokens=False)
        assert encoded == [0, 1, vocabulary.tokens.index(text), 0]
        assert tokenizer.decode(encoded, skip_special_tokens=True) == "aba"
        assert tokenizer.decode(encoded) == f"ab{text}a"


def add_ends(writer: GGUFWriter, special: list[str], ids: dict[str, str]) -> None:
    """Adds tokens of which the file says nothing but some ids, as faulty files do."""
    add_letters(writer, tokens=[*LETTERS, *special])
    for name, token in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", len(LETTERS) + special.index(token))


def vocabulary_of(path: Path, *adds: Callable[[GGUFWriter], None]) -> GgufVocabulary:
    return read_vocabulary(read_gguf(write_header(path / "model.gguf", *adds)))


def test_a_fill_that_an_id_names_comes_before_those_found_by_text(tmp_path: Path) -> None:
    def ends(special: list[str], ids: dict[str, str]) -> list[str]:
        vocabulary = vocabulary_of(tmp_path, partial(add_ends, special=special, ids=ids))
        return [vocabulary.tokens[token] for token in vocabulary.ends]

    assert ends(["<PAD>", "x", "y"], {"eos": "x", "fim_pad": "y"}) == ["x", "y"]
    assert ends(["<PAD>", "<fim_pad>", "x"], {"eos": "x"}) == ["x", "<fim_pad>"]
    assert ends(["<fim_prefix>", "<|fim_middle|>", "x"], {"eos": "x"}) == ["x"]


@pytest.mark.parametrize(
    ("special", "text", "is_whole"),
    [
        (["<|return|>", "<|end|>", "<|call|>"], "<|end|>", True),
        (["<|channel|>", "<|end|>"], "<|channel|>", True),
        (["<|tool_response>", "</s>"], "</s>", False),
    ],
)
def test_tokens_that_are_no_ends_are_printed(tmp_path: Path, special: list[str], text: str, is_whole: bool) -> None:
    kinds = dict.fromkeys(special, CONTROL)
    tokenizer = tokenizer_of(tmp_path, lambda writer: add_letters(writer, tokens=[*LETTERS, *"<>|/s"], special=kinds))
    whole = tokenizer.convert_tokens_to_ids(text)
    assert (whole in tokenizer.encode(text, add_special_tokens=False)) == is_whole
    assert tokenizer.decode([0, whole, 0], skip_special_tokens=True) == f"a{text}a"


def test_default_ids_are_llama_cpps(tmp_path: Path) -> None:
    vocabulary = vocabulary_of(tmp_path, lambda writer: add_tokens(writer, map(str, range(20))))
    assert (vocabulary.ids, vocabulary.ends) == ({"bos": 11, "eos": 11}, [11])
    vocabulary = vocabulary_of(tmp_path, add_letters)  # no token 11
    assert (vocabulary.ids, vocabulary.ends) == ({}, [])
    vocabulary = vocabulary_of(tmp_path, lambda writer: add_tokens(writer, LETTERS, model="llama"))
    assert (vocabulary.ids, vocabulary.ends) == ({"bos": 1, "eos": 2, "unknown": 0}, [2])
    wrong = partial(add_ends, special=["x"], ids={"eos": "x"})
    vocabulary = vocabulary_of(tmp_path, wrong, lambda writer: writer.add_uint32("tokenizer.ggml.eot_token_id", 99))
    assert vocabulary.ends == [len(LETTERS)]


PIECES = ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\n", "\u2581a", "ab", "\u2581ab", "\u2581\u2581"]
BYTES = {f"<0x{byte:02X}>": TokenType.BYTE for byte in range(256)}


def add_pieces(writer: GGUFWriter, name: str = "", special: dict[str, int] | None = None, **values: bool) -> None:
    """Adds a vocabulary of SentencePiece: "ab" is better than "\u2581a", which is better than "\u2581ab"."""
    scores = [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -2.0, -1.0, -3.0, -4.0]
    kinds = BYTES | {"<|end|>": CONTROL, "<|user|>": CONTROL, "<tag>": USER_DEFINED}
    add_tokens(writer, PIECES, special=kinds | (special or {}), model="llama", scores=scores, split=None)
    types = [UNKNOWN, CONTROL, CONTROL, *[TokenType.NORMAL] * (len(PIECES) - 3), *kinds.values()]
    writer.kv_data[0].pop("tokenizer.ggml.token_type")
    writer.add_token_types(types)
    if name:
        writer.add_name(name)
    for key, value in values.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)


def pieces(tokenizer: Any, text: str, **options: Any) -> list[str]:
    return tokenizer.convert_ids_to_tokens(tokenizer.encode(text, **options))


def test_sentence_pieces_are_merged_by_score(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, add_pieces)
    assert pieces(tokenizer, "ab") == ["<s>", "\u2581ab"]
    assert pieces(tokenizer, " ab") == ["<s>", "\u2581", "\u2581ab"]  # Metaspace swallows the space
    assert pieces(tokenizer, "aé</s>a<unk>") == [*("<s>", "\u2581a", "<0xC3>", "<0xA9>", "</s>", "\u2581a", "<unk>")]
    assert pieces(tokenizer, "a<tag>a") == ["<s>", "\u2581a", "<tag>", "\u2581a"]
    assert pieces(tokenizer, "") == ["<s>"]
    assert tokenizer.decode(tokenizer.encode(" ab<tag>é"), skip_special_tokens=True) == " ab<tag> é"
    plain = tokenizer_of(tmp_path, partial(add_pieces, add_space_prefix=False, add_bos_token=False))
    assert pieces(plain, "ab a</s>a") == ["ab", "\u2581a", "</s>", "a"]
    assert plain.decode(plain.encode(" ab")) == " ab"


def test_special_tokens_of_phi3_eat_white_space(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(tmp_path, partial(add_pieces, name="Phi 3 Mini Phi-3"))
    assert pieces(tokenizer, "<|end|>\n a", add_special_tokens=False) == ["<|end|>", "\u2581a"]
    assert pieces(tokenizer, "<s>\na", add_special_tokens=False) == ["<s>", "\u2581", "\n", "a"]
    other = tokenizer_of(tmp_path, partial(add_pieces, name="Other"))
    assert pieces(other, "<|end|>\na", add_special_tokens=False) == ["<|end|>", "\u2581", "\n", "a"]


def test_gemma_4_has_text_in_byte_pairs(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        tokens = ["a", "b", "\n", "\u2581", "\u2581a", "\n\n"]
        special = {"<bos>": CONTROL} | BYTES
        add_tokens(writer, tokens, special=special, merges=["\u2581 a", "\n \n"], model="gemma4", split=None)
        writer.add_bos_token_id(len(tokens))

        writer.add_add_bos_token(False)  # a fault of published files, which llama.cpp knows

    tokenizer = tokenizer_of(tmp_path, add)
    assert pieces(tokenizer, "a a\n\nbé") == ["<bos>", "a", "\u2581a", "\n\n", "b", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("a aé"), skip_special_tokens=True) == "a aé"


def test_bos_and_eos_are_added_by_their_ids(tmp_path: Path) -> None:
    """llama.cpp adds them also if the file calls them ordinary tokens; they are then not found in text."""

    def add(writer: GGUFWriter, **values: bool) -> None:
        add_letters(writer, tokens=[*LETTERS, "<b>", "<e>"])
        writer.add_bos_token_id(len(LETTERS))
        writer.add_eos_token_id(len(LETTERS) + 1)
        for key, value in values.items():
            writer.add_bool(f"tokenizer.ggml.{key}", value)

    assert pieces(tokenizer_of(tmp_path, add), "a") == ["a"]
    assert pieces(tokenizer_of(tmp_path, partial(add, add_bos_token=True)), "a") == ["<b>", "a"]
    both = tokenizer_of(tmp_path, partial(add, add_bos_token=True, add_eos_token=True))
    assert pieces(both, "a") == ["<b>", "a", "<e>"]
    assert pieces(both, "a", add_special_tokens=False) == ["a"]


def chat(tokenizer: Any, **options: Any) -> str:
    return tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, **options)


def test_chat_templates_by_name(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        add_letters(writer)
        texts = {"default": "d", "tool_use": "t", "rag": "r"}
        writer.add_chat_template([{"name": name, "template": text} for name, text in texts.items()])

    tokenizer = tokenizer_of(tmp_path, add)
    tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert (chat(tokenizer), chat(tokenizer, tools=[tool])) == ("d", "t")
    assert chat(tokenizer, chat_template="rag") == "r"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", "<s>hi"),
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("<s>{{ messages[0].content }}", "<s>hi"),
    ],
)
def test_conversations_begin_with_one_bos(tmp_path: Path, template: str, expected: str) -> None:
    def add(writer: GGUFWriter, **values: bool) -> None:
        add_pieces(writer, **values)
        writer.add_chat_template(template)

    assert chat(tokenizer_of(tmp_path, add)) == expected
    plain = tokenizer_of(tmp_path, partial(add, add_bos_token=False))
    assert chat(plain) == (expected if "s>" in template or "bos" in template else "hi")


def add_kinds(writer: GGUFWriter) -> None:
    writer.add_token_list(LETTERS)
    writer.add_array("tokenizer.ggml.model", [1, 2])


@pytest.mark.parametrize(
    ("add", "part"),
    [
        (
            partial(add_letters, split="qwen9"),
            "splits text as 'qwen9', which is not known. Expected one of",
        ),
        (
            partial(add_letters, model="t5"),
            "a vocabulary of the kind 't5'. Expected one of llama, gpt2, gemma4",
        ),
        (partial(add_tokens, tokens=["a"]), "has no merges. Expected tokenizer.ggml.merges"),
        (partial(add_tokens, tokens=["a", "a"]), "is damaged: the token 'a' is there twice"),
        (partial(add_tokens, tokens=["a"], merges=["a b"]), "the tokenizer of"),
        (partial(add_letters, model="llama"), "has no scores. Expected tokenizer.ggml.scores"),
        (lambda writer: writer.add_token_list(LETTERS), "a vocabulary of the kind None"),
        (add_kinds, "a vocabulary of the kind [1, 2]"),
    ],
)
def test_vocabularies_that_are_refused(path: Path, add: Callable[[GGUFWriter], None], part: str) -> None:
    write_header(path, add)
    assert part in refusal(path, gguf_tokenizer)


@pytest.mark.parametrize("vocabulary", REAL, ids=lambda each: each["files"][0])
def test_real_files_have_llama_cpps_tokens(vocabulary: dict[str, Any]) -> None:
    folder = os.environ.get("FORETOKEN_REAL_MODELS")
    found = [path for name in vocabulary["files"] if folder and (path := Path(folder) / name).exists()]
    if not found:
        pytest.skip("FORETOKEN_REAL_MODELS names no folder with these files")
    for path in found:
        assert sorted(read_vocabulary(read_gguf(path)).ends) == vocabulary["ends"]
        tokenizer = gguf_tokenizer(path)
        different = [
            (text, ids) for text, ids in zip(texts(), vocabulary["ids"], strict=True) if tokenizer.encode(text) != ids
        ]
        assert not different
