r"""Reads the vocabulary of a GGUF file, and builds its tokenizer with the `tokenizers` library, as llama.cpp does.

Token ids are those of llama.cpp. A file names how its text is split before merges, and `_SPLITS` says what each name
means. Some expressions of llama.cpp lack the classes \p{Lu} and \p{Ll}: where these occur, text is split as the
models' own tokenizers split it, as the models were trained.

Many files name one end token and have more. llama.cpp finds the others by their text, and gives them the type CONTROL:
they are matched whole in text, and are not printed.

Source: `llama_vocab::impl::load`, `llm_tokenizer_bpe` and `llm_tokenizer_spm_session` of ggml-org/llama.cpp,
src/llama-vocab.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, listed

if TYPE_CHECKING:
    from foretoken.models.stored.gguf_file import GgufFile

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

    Raises `ModelError` if the vocabulary is of an unknown kind, or damaged.
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


class _Split(NamedTuple):
    """How text is split before merges.

    Attributes:
        expressions: Each one splits the pieces of the one before; what it does not match are pieces too.
        ignore_merges: Whether a whole piece that is a token is taken, whatever the merges say.
        adds_bos: Whether texts begin with BOS unless the file says otherwise.
        marks_spaces: Whether spaces become \u2581 and tokens are text; otherwise each character of a token is a byte.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    marks_spaces: bool = False


_ADD_BOS = "tokenizer.ggml.add_bos_token"
_SUFFIXES = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"\s+(?!\S)|\s+"
_LINES = r"\s*[\r\n]+"


def _words(
    digits: str,
    *,
    suffixes: str = f"{_SUFFIXES}|",
    letters: str = r"\p{L}+",
    symbols: str = r"[^\s\p{L}\p{N}]+[\r\n]*",
    lines: str = _LINES,
    spaces: str = _SPACES,
) -> str:
    return rf"{suffixes}[^\r\n\p{{L}}\p{{N}}]?{letters}|{digits}| ?{symbols}|{lines}|{spaces}"


def _cased_words(digits: str, *, suffixes: str = f"{_SUFFIXES}?", after_symbols: str = r"[\r\n/]*") -> str:
    """Splits "iPhone" before the P."""
    upper, lower = (rf"[\p{{L{case}}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]" for case in "ul")
    lower = lower.replace(r"\p{Lt}", "")
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{upper}*{lower}+{suffixes}|{start}{upper}+{lower}*{suffixes}|{digits}"
        rf"| ?[^\s\p{{L}}\p{{N}}]+{after_symbols}|{_LINES}|{_SPACES}"
    )


_DIGIT, _DIGITS, _UP_TO_3 = r"\p{N}", r"\p{N}+", r"\p{N}{1,3}"
_GPT2 = rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|{_SPACES}"
_LLAMA3, _QWEN2 = _words(_UP_TO_3), _words(_DIGIT)
_PUNCTUATED = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
)
_DEEPSEEK = rf"{_PUNCTUATED}[\r\n]*|{_LINES}|{_SPACES}"
_CHINESE = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+"
_OLD_CHINESE = r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+"
_KOREAN = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+"
    r"|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}"
    r"\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+"
)
_ASIAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{F900}-\x{FAFF}\x{3040}-\x{30FF}\x{FF65}-\x{FF9F}\x{2F00}-\x{2FDF}"
    r"\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}\x{A9E0}-\x{A9FF}"
    r"\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
# The cased letters of an old version of Unicode.
_OLD_CASED = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10C7}\x{10CD}\x{10D0}-\x{10FF}\x{1C80}-\x{1C88}\x{2D00}-\x{2D2D}"
    r"\x{A790}-\x{A7FA}\x{AB30}-\x{AB68}\x{10570}-\x{105BC}\x{16E40}-\x{16E7F}\x{1D400}-\x{1DF1E}]]+"
)
_OLD_PUNCTUATION = r"[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3000}-\x{3002}]+"
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_FINNISH = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_NO_BREAKS = r"[^\n]+|[\n]+"
_MARKS = r"[\p{P}\$\+<=>\^~\|"

_SPLITS = {
    name: split
    for names, split in {
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _Split(
            (_LLAMA3,), ignore_merges=True, adds_bos=True
        ),
        "dbrx smaug-bpe chatglm-bpe": _Split((_LLAMA3,)),
        "glm4 glm5": _Split((_LLAMA3,), ignore_merges=True),
        "jais-2": _Split((
            _words(_UP_TO_3, spaces="|".join([
                *(rf"\s{{{2**power}}}(?!\S)" for power in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s{1}"
            ])),
        )),
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2": _Split((_QWEN2,)),
        "qwen35": _Split((
            _words(_DIGIT, letters=r"[\p{L}\p{M}]+", symbols=r"[^\s\p{L}\p{M}\p{N}]+[\r\n]*"),
        )),
        "seed-coder": _Split((_words(_DIGIT, symbols=r"[^\s\p{L}\p{N}\r\n]+"),)),
        "ufakzeka": _Split((_words(_DIGIT, suffixes=""),)),
        "laguna": _Split((_NO_BREAKS, _QWEN2)),
        "minicpm5": _Split((_UP_TO_3, _words(_DIGITS)), ignore_merges=True),
        "bailingmoe bailingmoe2 llada-moe": _Split((
            _words(_DIGIT, suffixes="'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|", lines=r"\s*[\r\n]"),
        )),
        "exaone-moe": _Split((
            _words(
                _DIGIT, letters=r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", symbols=r"[^\s\p{L}\p{N}]+[\r\n/]?",
                lines=r"\s*[\r\n]",
            ),
        )),
        "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de gigachat a.x-4.0 mellum modern-bert exaone4 mpt olmo jais "
        "trillion granite-docling jina-v1-en jina-v2-code roberta-bpe": _Split((_GPT2,)),
        "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2": _Split((_DIGIT, _GPT2)),
        "falcon": _Split((rf"{_MARKS}`]+", _GPT2, "[0-9][0-9][0-9]")),
        "default": _Split((f"{_MARKS}]+", _GPT2, _DIGITS, "[0-9][0-9][0-9]")),
        "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _Split((_UP_TO_3, _CHINESE, _DEEPSEEK)),
        "spark2_5": _Split((_UP_TO_3, _CHINESE, rf"{_PUNCTUATED}|[\r\n]|{_SPACES}", _DIGIT)),
        "afmoe": _Split((_THOUSANDS, _ASIAN, _DEEPSEEK)),
        "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OLD_CHINESE, _DIGIT)),
        "deepseek-llm": _Split((
            r"[\r\n]", rf"\s?{_OLD_CASED}", rf"\s?{_OLD_PUNCTUATION}", r"\s+$", _OLD_CHINESE, _DIGITS
        )),
        "tekken": _Split((_cased_words(_DIGIT, suffixes=""),), ignore_merges=True, adds_bos=True),
        "gpt-4o llama4 kanana2 talkie minimax-m2": _Split((_cased_words(_UP_TO_3),)),
        "granite-embed-multi-97m": _Split((_cased_words(_UP_TO_3),), ignore_merges=True),
        "tiny_aya cohere2moe": _Split((_THOUSANDS, _cased_words(_UP_TO_3))),
        "kimi-k2": _Split((r"\p{Han}+", _cased_words(_UP_TO_3, after_symbols=r"[\r\n]*"))),
        "youtu": _Split((f"{_KOREAN}|{_CHINESE}", _cased_words(_DIGIT)), ignore_merges=True),
        "superbpe": _Split((_DIGITS, "(?=([0-9]{3})+(?![0-9]))")),
        "chameleon": _Split(
            (
                "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", _DIGIT,
                r"[\p{P}!-/:-@\[-`{-~]", _GPT2,
            ),
            adds_bos=True,
        ),
        "poro-chat bloom gpt3-finnish": _Split((_FINNISH,)),
        "viking": _Split((_FINNISH, _DIGIT)),
        "gemma4 granite-embed-multi-311m": _Split((_NO_BREAKS,), adds_bos=True, marks_spaces=True),
        "sarvam-moe": _Split((_NO_BREAKS,), marks_spaces=True),
    }.items()
    for name in names.split()
}  # fmt: skip


class _Given:
    """Hands a tokenizer over to transformers, which would copy it for a second by way of JSON."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend

    def __deepcopy__(self, _: dict[int, Any]) -> Tokenizer:
        return self._backend


def build_tokenizer(file: GgufFile, vocabulary: GgufVocabulary) -> transformers.PreTrainedTokenizerFast:
    """Returns the tokenizer of a vocabulary, with the file's chat template.

    Raises `ModelError` if the split before merges is not known, or scores or merges are missing.
    """
    build = _sentence_pieces if vocabulary.model == "llama" else _byte_pairs
    backend, adds_bos = build(file, vocabulary)
    strips = "phi-3" in (name := str(file.values.get("general.name")).lower()) or "phi3" in name
    added = [
        AddedToken(
            text, normalized=False, special=kind != USER_DEFINED,
            rstrip=strips and text not in ("<unk>", "<s>", "<|endoftext|>"),
        )
        for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=False)
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    backend.add_tokens(added)
    begin, end = ([vocabulary.ids[name]] if adds and name in vocabulary.ids else [] for name, adds in (
        ("bos", adds_bos), ("eos", file.values.get("tokenizer.ggml.add_eos_token", False)),
    ))  # fmt: skip
    # By ids, because a file may give such a token the type of an ordinary one.
    backend.post_processor = processors.TemplateProcessing(
        single=[*(f"[{token}]" for token in begin), "$A", *(f"[{token}]" for token in end)],
        special_tokens=[(f"[{token}]", token) for token in {*begin, *end}],
    )
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    whole = {token.content for token in added}
    bos = vocabulary.tokens[begin[0]] if begin else None
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=_Given(backend),
        chat_template=_chat_template(file, bos if bos in whole else None),
        clean_up_tokenization_spaces=False,
        **{
            names[name]: vocabulary.tokens[token]
            for name, token in vocabulary.ids.items()
            if name in names and vocabulary.tokens[token] in whole
        },
    )


def _chat_template(file: GgufFile, bos: str | None) -> str | dict[str, str] | None:
    """Returns the template, or templates by their names; each begins with BOS if texts do, as llama.cpp has it."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(f"{key}."): text for name, text in file.values.items() if name.startswith(f"{key}.")}
    templates = {
        name: text if bos is None or bos in text or "bos_token" in text else f"{{{{- bos_token }}}}{text}"
        for name, text in ({"default": file.values.get(key)} | named).items()
        if isinstance(text, str)
    }
    return templates if len(templates) > 1 else templates.get("default")


def _byte_pairs(file: GgufFile, vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer that merges the pair of the lowest rank first, and whether texts begin with BOS."""
    name = "gemma4" if vocabulary.model == "gemma4" else file.values.get("tokenizer.ggml.pre") or "default"
    split = _SPLITS.get(name) if isinstance(name, str) else None
    if split is None:
        raise ModelError(
            f"the tokenizer of '{file.path}' splits text as {shown(name)}, which is not known. Expected one of "
            f"{listed(_SPLITS)}. Use safetensors of the model."
        )
    merges = file.array("tokenizer.ggml.merges")
    if merges is None:
        raise _missing(file, "merges")
    backend = Tokenizer(
        BPE(
            vocab={text: token for token, text in enumerate(vocabulary.tokens)},
            merges=[(merge[:at], merge[at + 1 :]) for merge in merges if (at := merge.find(" ", 1)) > 0],
            ignore_merges=split.ignore_merges,
            byte_fallback=split.marks_spaces,
        )
    )
    steps: list[Any] = [pre_tokenizers.Split(Regex(each), "isolated") for each in split.expressions]
    if split.marks_spaces:
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = _text_decoder(strips=False)
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    # As llama.cpp: published files of Gemma 4 switch BOS off by mistake.
    is_forced = split.adds_bos and split.marks_spaces
    return backend, is_forced or bool(file.values.get(_ADD_BOS, split.adds_bos))


def _sentence_pieces(file: GgufFile, vocabulary: GgufVocabulary) -> tuple[Tokenizer, bool]:
    """Returns a tokenizer that merges the pair of the highest score first, and whether texts begin with BOS."""
    scores = file.array("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(vocabulary.tokens):
        raise _missing(file, "scores")
    ids = {text: token for token, text in enumerate(vocabulary.tokens)}
    backend = Tokenizer(BPE(vocab=ids, merges=list(_merges(ids, scores)), byte_fallback=True))
    prefix = [normalizers.Prepend("\u2581")] if file.values.get("tokenizer.ggml.add_space_prefix", True) else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", "\u2581")])
    backend.decoder = _text_decoder(strips=bool(prefix))
    return backend, bool(file.values.get(_ADD_BOS, True))


def _merges(ids: dict[str, int], scores: list[float]) -> Iterable[tuple[str, str]]:
    for text in sorted(ids, key=lambda text: -scores[ids[text]]):
        for at in range(1, len(text)):
            if text[:at] in ids and text[at:] in ids:
                yield text[:at], text[at:]


def _text_decoder(*, strips: bool) -> Any:
    end = [decoders.Strip(content=" ", left=1)] if strips else []
    return decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *end])


def _missing(file: GgufFile, what: str) -> ModelError:
    return ModelError(
        f"the tokenizer of '{file.path}' has no {what}. Expected tokenizer.ggml.{what}. Use another file, or "
        "safetensors of the model."
    )
