"""Reads the vocabulary of a GGUF file as llama.cpp does: its tokens, their types, and all tokens that end a text.

Many files name one end token and have more. llama.cpp finds the others by their text, and gives them the type CONTROL:
they are matched whole in text, and are not printed.

Source: `llama_vocab::impl::load` of ggml-org/llama.cpp, src/llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from foretoken.models.quantization.gguf_file import GgufFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of `tokenizer.ggml.token_type`
_TOKENS, _TYPES, _MODEL = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.model"
_DEFAULT_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unknown": 0},
    "gpt2": {"bos": 11, "eos": 11},
    "gemma4": {},
}
_NO_MODELS = ("none", "no_vocab")
_END_IDS = ("eos", "eot", "eom")
_END_TEXTS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~["),
}
# Tokens for filling in the middle: the first one there is that kind's, unless the file names another one by its id.
_FILLS = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<\uff5cfim\u2581begin\uff5c>", "<PRE>", "\u2581<PRE>"),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<\uff5cfim\u2581hole\uff5c>", "<SUF>", "\u2581<SUF>"),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<\uff5cfim\u2581end\uff5c>", "<MID>", "\u2581<MID>"),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_ENDING_FILLS = ("fim_pad", "fim_rep", "fim_sep")
_OLD_NAMES = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_PRINTED = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")  # parts of gpt-oss's format


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufVocabulary:
    """The tokens of a file.

    Attributes:
        model: `tokenizer.ggml.model`, a key of `_DEFAULT_IDS`.
        tokens: The text of each token; all differ.
        types: The type of each token, as llama.cpp corrects it.
        ids: Ids of "bos", "eos", "unknown" and "padding", if there are such tokens.
        ends: All tokens that end a text or a turn, the file's own first.
    """

    model: str
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    ends: list[int]


def read_vocabulary(file: GgufFile) -> GgufVocabulary:
    """Returns the vocabulary of a file; if the file has no tokens, the ids that it names all the same.

    Raises:
        ModelError: If the vocabulary is of an unknown kind, or damaged.
    """
    model, tokens = file.values.get(_MODEL), _tokens(file)
    defaults = _DEFAULT_IDS.get(model) if isinstance(model, str) else None
    if tokens and defaults is None:
        raise ModelError(
            f"'{file.path}' has a vocabulary of the kind {shown(model)}. Expected one of {', '.join(_DEFAULT_IDS)}. "
            "Use safetensors of the model."
        )
    types = list(file.array(_TYPES) or ()) if _TYPES in file.values else [NORMAL] * len(tokens)
    if len(types) < len(tokens):
        raise _damaged(file, f"{_TYPES} has {len(types)} entries for {len(tokens)} tokens")
    by_text = {token: index for index, token in enumerate(tokens)}
    if len(by_text) < len(tokens):
        twice = next(token for index, token in enumerate(tokens) if by_text[token] != index)
        raise _damaged(file, f"the token {shown(twice)} is there twice")
    ids = {name: token for name, token in (defaults or {}).items() if token < len(tokens)}
    for name in ("bos", *_END_IDS, "unknown", "padding", *_FILLS):
        token = _named_token(file, name)
        if token is not None and (not tokens or token < len(tokens)):
            ids[name] = token
    return GgufVocabulary(model=str(model), tokens=tokens, types=types, ids=ids, ends=_find_ends(by_text, types, ids))


def _tokens(file: GgufFile) -> list[str]:
    if _TOKENS not in file.values or file.values.get(_MODEL) in _NO_MODELS:
        return []
    tokens = file.array(_TOKENS)
    if not tokens or not all(isinstance(token, str) for token in tokens):
        raise _damaged(file, f"{_TOKENS} is no list of texts")
    return [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]


def _named_token(file: GgufFile, name: str) -> int | None:
    for each in (name, _OLD_NAMES.get(name, name)):
        key = f"tokenizer.ggml.{each}_token_id"
        token = file.values.get(key)
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise _damaged(file, f"{key} is {shown(token)}, and no token id")
        if token is not None:
            return token
    return None


def _find_ends(by_text: dict[str, int], types: list[int], ids: dict[str, int]) -> list[int]:
    """Returns all tokens that end a text; changes the types of tokens that are found by their text."""
    found = [by_text[text] for text in _END_TEXTS if text in by_text]
    for name, texts in _FILLS.items():
        token = ids.get(name)
        if token is None and (token := next((by_text[each] for each in texts if each in by_text), None)) is not None:
            types[token] = CONTROL
        if token is not None and name in _ENDING_FILLS:
            found.append(token)
    for text in _END_TEXTS & by_text.keys():
        types[by_text[text]] = CONTROL
    for text in _PRINTED:
        if text in by_text:
            types[by_text[text]] = USER_DEFINED
    named = [ids[name] for name in _END_IDS if name in ids]
    ends = list(dict.fromkeys([*named, *sorted(found)]))

    def end_with(*texts: str) -> bool:
        return any(by_text.get(text) in ends for text in texts)

    is_harmony = end_with("<|call|>", "<|calls|>") and end_with("<|return|>", "<|flush|>")
    for text, kind, is_no_end in (
        ("<|end|>", USER_DEFINED, is_harmony),  # ends a part of an answer there
        ("</s>", NORMAL, end_with("<|tool_response>", "<|plamo:eos|>")),  # a tag of HTML there
    ):
        if is_no_end and by_text.get(text) in ends:
            ends.remove(by_text[text])
            types[by_text[text]] = kind
    return ends


def _damaged(file: GgufFile, why: str) -> ModelError:
    return ModelError(f"the vocabulary of '{file.path}' is damaged: {why}. Copy or download the file again.")
