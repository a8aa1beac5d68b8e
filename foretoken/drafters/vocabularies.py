"""Draft models with another tokenizer: the bytes of each token, and the map from one vocabulary to another.

Works on bytes, not on decoded text: a token may hold a part of a character, and tokenizers write spaces differently (Ġ,
▁). Encoding adds no special tokens and no space before the text. If a tokenizer still changes text, for example by
Unicode normalisation, the longest tokens that spell the bytes are used instead.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError, PassError, described, foreign_errors_as
from foretoken.core.passes import Pass
from foretoken.core.token_ids import byte_alphabet
from foretoken.models.describe import listed_tokens
from foretoken.models.loading import load_model, load_tokenizer
from foretoken.models.names import resolve_model

if TYPE_CHECKING:
    from foretoken.drafters.base import TargetHandle
    from foretoken.models.loaded import LoadedModel

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # invalid bytes as "surrogateescape" decodes them
_NEUTRAL_DECODERS = {"Fuse", "Strip"}  # these change no token inside a text


class Piece(NamedTuple):
    """A token and its bytes in a text: the token's own bytes, except for `Vocabulary.stand_in`."""

    token: int
    data: bytes


class Vocabulary:
    """The tokens of a tokenizer by their bytes.

    Attributes:
        spellings: Bytes of every id; None for special tokens and ids without a token.
        specials: Content of each special token by id.
        bos: Token that begins texts, or None.
        eos: Token that ends texts, or None.
        ids: Token by bytes; an ordinary token is preferred to a byte token (<0x41>) of the same bytes.
        stand_in: Token for bytes that no token spells, and for missing special tokens.
    """

    def __init__(self, tokenizer: Any, size: int, name: str) -> None:
        """Reads a fast tokenizer of transformers without changing it; leaves out ids from `size` on.

        Raises `ConfigError` when the bytes of its tokens are unknown.
        """
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        with foreign_errors_as(
            ConfigError,
            lambda err: (
                f"the tokenizer of '{name}' does not tell the bytes of its tokens: {described(err)}. Expected a fast "
                "tokenizer that is byte-level, or marks spaces as SentencePiece does."
            ),
        ):
            parts = json.loads(backend.to_str())
            rules = _Rules.read(parts["decoder"])
            for key in ("normalizer", "pre_tokenizer"):
                parts[key] = _without_prefix(parts[key])
            parts.update(truncation=None, padding=None)
            self._backend = type(backend).from_str(json.dumps(parts))
            self._backend.encode_special_tokens = True  # "</s>" in a text is text
        added = self._backend.get_added_tokens_decoder()
        self.specials: Mapping[int, str] = {
            token: self._backend.id_to_token(token)
            for token in {*tokenizer.all_special_ids, *(token for token, entry in added.items() if entry.special)}
            if token < size
        }
        self.bos, self.eos = (
            token if token in self.specials else None for token in (tokenizer.bos_token_id, tokenizer.eos_token_id)
        )
        spellings: list[bytes | None] = [None] * size
        self.ids: dict[bytes, int] = {}
        for text, token in sorted(self._backend.get_vocab().items(), key=lambda item: item[1]):
            if token < size and token not in self.specials:
                data = text.encode() if token in added else rules.spelling(text)
                spellings[token] = data
                if data and (data not in self.ids or _BYTE_TOKEN.fullmatch(self._backend.id_to_token(self.ids[data]))):
                    self.ids[data] = token
        self.spellings: Sequence[bytes | None] = spellings
        self._longest = max(map(len, self.ids), default=0)
        known = (tokenizer.unk_token_id, self.eos, self.bos, 0)
        self.stand_in: int = next(token for token in known if token is not None and token < size)

    def spelling(self, token: int) -> bytes | None:
        """Returns the bytes of an id; None for special tokens and ids without a token."""
        return self.spellings[token] if token < len(self.spellings) else None

    def encode(self, data: bytes) -> list[Piece]:
        """Returns tokens that together spell some bytes: the tokenizer's own if the bytes are characters."""
        pieces: list[Piece] = []
        for part in _NOT_UTF8.split(data.decode("utf-8", "surrogateescape")):
            if part:
                raw = part.encode("utf-8", "surrogateescape")
                is_text = not _NOT_UTF8.fullmatch(part)
                pieces += (self._tokenized(part, raw) if is_text else None) or self._longest_tokens(raw)
        return pieces

    def _tokenized(self, text: str, data: bytes) -> list[Piece] | None:
        ids = self._backend.encode(text, add_special_tokens=False).ids
        pieces = [Piece(token, self.spelling(token) or b"") for token in ids]
        return pieces if b"".join(piece.data for piece in pieces) == data and all(p.data for p in pieces) else None

    def _longest_tokens(self, data: bytes) -> Iterator[Piece]:
        start = 0
        while start < len(data):
            ends = range(min(len(data), start + self._longest), start, -1)
            end = next((end for end in ends if data[start:end] in self.ids), start + 1)
            yield Piece(self.ids.get(data[start:end], self.stand_in), data[start:end])
            start = end


class _Rules(NamedTuple):
    """How a tokenizer writes bytes.

    Byte-level tokenizers have an `alphabet`. Others have `replacements`, such as ▁ for a space, or byte tokens: <0x0A>
    stands for one byte.
    """

    alphabet: Mapping[str, int] | None
    replacements: Sequence[tuple[str, str]]
    has_byte_tokens: bool

    @classmethod
    def read(cls, decoder: Any) -> _Rules:
        steps = decoder["decoders"] if decoder is not None and decoder["type"] == "Sequence" else [decoder]
        kinds = {"none" if step is None else step["type"] for step in steps}
        replacements = []
        for step in steps:
            if step is not None and step["type"] == "Metaspace":
                replacements.append((step["replacement"], " "))
            elif step is not None and step["type"] == "Replace":
                replacements.append((step["pattern"]["String"], step["content"]))
        other = sorted(kinds - _NEUTRAL_DECODERS - {"ByteLevel", "ByteFallback", "Metaspace", "Replace"})
        if other or not kinds - _NEUTRAL_DECODERS:
            raise ValueError(f"its decoder is of type {', '.join(other or kinds)}")
        return cls(byte_alphabet() if "ByteLevel" in kinds else None, replacements, "ByteFallback" in kinds)

    def spelling(self, text: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(text) if self.has_byte_tokens else None
        if byte:
            return bytes([int(byte[1], 16)])
        if self.alphabet is not None and all(character in self.alphabet for character in text):
            return bytes(self.alphabet[character] for character in text)
        for marker, content in self.replacements:
            text = text.replace(marker, content)
        return text.encode()


def _without_prefix(step: Any) -> Any:
    if step is None or step["type"] == "Prepend":
        return None
    changed = dict(step)
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            changed[key] = [part for part in map(_without_prefix, step[key]) if part is not None]
    if "add_prefix_space" in step:
        changed["add_prefix_space"] = False
    if step["type"] == "Metaspace":
        changed["prepend_scheme"] = "never"
    return changed


class VocabularyMap:
    """Maps tokens of a target to ids of a draft model, and distributions of the draft model to ids of the target.

    Attributes:
        pairs: The draft model's id of each of the K shared tokens by the target's; no id occurs twice.
        share: K divided by the number of the target's tokens, 0 to 1.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, device: torch.device) -> None:
        self._target, self._draft = target, draft
        self.pairs = {
            target.ids[data]: token for data, token in draft.ids.items() if data in target.ids
        } | shared_specials(target, draft)  # fmt: skip
        num_tokens = len(target.ids) + len(target.specials)
        self.share = len(self.pairs) / num_tokens if num_tokens else 0.0
        size = len(target.spellings)
        self._is_absent = torch.ones(size, dtype=torch.bool)
        self._fed = torch.full((size,), draft.stand_in)
        ours, theirs = torch.tensor(list(self.pairs)), torch.tensor(list(self.pairs.values()))
        if self.pairs:
            self._is_absent[ours] = False
            self._fed[ours] = theirs
        self._is_absent, self._fed = self._is_absent.to(device), self._fed.to(device)
        self._translated: dict[int, tuple[int, ...]] = {token: (other,) for token, other in self.pairs.items()}

    def to_target(self, logits: Tensor) -> Tensor:
        """Turns logits of a draft model, (R, D), into logits over the target's ids, (R, V), -inf at unshared ids.

        Softmax makes the result the draft distribution, restricted to the shared tokens and renormalised.
        """
        return logits.index_select(1, self._fed).masked_fill_(self._is_absent, float("-inf"))

    def shared_probability(self, logits: Tensor) -> float:
        """Returns the target's mean probability of shared tokens, which bounds the acceptance rate; logits: (R, V)."""
        return float(logits.softmax(1).masked_fill(self._is_absent, 0.0).sum(1).mean())

    def fed(self, tokens: Tensor) -> Tensor:
        """Returns the draft model's ids of drafted tokens, int64 below V; a stand-in for tokens that are not shared."""
        return self._fed[tokens]

    def translated(self, token: int) -> tuple[int, ...]:
        """Returns the draft model's ids of a token of the target, at least one; of its bytes if it is not shared."""
        ids = self._translated.get(token)
        if ids is None:
            pieces = self._draft.encode(self._target.spelling(token) or b"")
            ids = self._translated[token] = tuple(piece.token for piece in pieces) or (self._draft.stand_in,)
        return ids

    def of_text(self, tokens: Sequence[int]) -> list[int]:
        """Returns the draft model's ids of target tokens, encoded as text between special tokens; at least one."""
        ids: list[int] = []
        data = b""
        for token in tokens:
            spelling = self._target.spelling(token)
            if spelling is None:
                ids += [*(piece.token for piece in self._draft.encode(data)), *self.translated(token)]
                data = b""
            else:
                data += spelling
        ids += (piece.token for piece in self._draft.encode(data))
        return ids or [self._draft.stand_in]


class Translation:
    """A growing sequence of the target's tokens in ids of the draft model.

    The prompt is encoded as a text, which gives the tokens that the draft model was trained on. Later tokens are
    translated one by one, so that earlier ids never change.
    """

    def __init__(self, mapping: VocabularyMap, prompt_len: int) -> None:
        self._mapping, self._prompt_len = mapping, prompt_len
        self._ids: list[int] = []
        self._num_read = 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        """Returns the draft model's ids of the whole sequence, valid until the next call; not to be changed.

        The tokens continue those of the last call.
        """
        if self._num_read > len(tokens):
            self._ids, self._num_read = [], 0
        if not self._num_read and self._prompt_len:
            self._num_read = min(self._prompt_len, len(tokens))
            self._ids = self._mapping.of_text(tokens[: self._num_read])
        for token in tokens[self._num_read :]:
            self._ids += self._mapping.translated(token)
        self._num_read = len(tokens)
        return self._ids


def shared_specials(target: Vocabulary, draft: Vocabulary) -> dict[int, int]:
    """Returns the draft model's special token for each of the target's: of the same role, else of the same content."""
    pairs: dict[int, int] = {}
    for ours, theirs in ((target.eos, draft.eos), (target.bos, draft.bos)):
        if ours is not None and theirs is not None and ours not in pairs and theirs not in pairs.values():
            pairs[ours] = theirs
    by_content = {content: token for token, content in draft.specials.items()}
    for token, content in target.specials.items():
        other = by_content.get(content)
        if other is not None and token not in pairs and other not in pairs.values():
            pairs[token] = other
    return pairs


VocabMatch = Literal["auto", "same", "intersection", "text"]
_LEAST_SHARE = 0.1  # of the target's tokens: drafts of shared tokens are refused below this share
_LEAST_SHARE_UNASKED = 0.5  # "auto" does not choose them below this share
_BY_TEXT = "'text', which drafts text"
_OTHERWISE = f"'intersection', which drafts the tokens that both have, or to {_BY_TEXT}"
# Prose and code, for an upper bound of acceptance.
_SAMPLE = b"""The library opens at nine. "Is it far from here?" she asked, and he showed her the way on a map.

def mean(values: list[float]) -> float:
    return sum(values) / len(values)
"""
_SAMPLE_LEN = 64  # tokens of the sample
_log = logging.getLogger(__name__)


class DraftModelFiles:
    """A draft model in a directory or on the hub."""

    def __init__(self, name: str, revision: str | None, *, rounds_inputs: bool = True) -> None:
        """Finds the model; raises `ModelError` if there is none, see `resolve_model`.

        `rounds_inputs`: whether matrices that are stored in integers round their inputs to 8 bits, where kernels can.
        """
        self.name, self._revision = resolve_model(name, revision), revision
        self._rounds_inputs = None if rounds_inputs else False

    def model(self, target: TargetHandle | LoadedModel) -> LoadedModel:
        """Loads the model on the target's device, in the target's dtype; raises `ModelError` if that fails."""
        dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
        return load_model(
            self.name, dtype=dtype, device=device, revision=self._revision, rounds_inputs=self._rounds_inputs
        )

    def tokenizer(self) -> Any | None:
        """Loads its tokenizer, None if there is none; raises `ModelError` if it cannot be loaded."""
        return load_tokenizer(self.name, self._revision)

    def check_vocabulary(self, target: str | None, match: VocabMatch | None) -> None:
        """Compares the vocabulary with the target's before any weights are read, as `vocabulary_map` does later.

        `target` is a path, or None for a target in memory, which is left to `vocabulary_map`; so are files without a
        list of tokens. Raises `ConfigError` if the vocabularies differ and `match` is "same".
        """
        known = [listed_tokens(each) for each in (target or "", self.name)]
        if target is None or match != "same" or None in known or known[0] == known[1]:
            return
        ours, theirs = load_tokenizer(target), self.tokenizer()
        if ours is not None and theirs is not None and ours.get_vocab() != theirs.get_vocab():
            raise _another_vocabulary(self.name, theirs, target, ours)


def vocabulary_map(
    match: VocabMatch, target: TargetHandle, model: LoadedModel, tokenizer: Any | None
) -> VocabularyMap | None:
    """Returns the map from a draft model's tokens to the target's; None if the vocabularies are the same.

    `match`: "same", "intersection", or "auto" for the first of these that works. Raises `ConfigError` when the
    vocabularies differ and must not, have too little in common, or a tokenizer does not list its tokens.
    """
    ours = target.tokenizer
    if tokenizer is None or not hasattr(ours, "get_vocab"):
        if model.vocab_size != target.vocab_size:
            raise ConfigError(
                f"draft model '{model.name}' has {model.vocab_size} tokens, the target {target.vocab_size}, and there "
                "are no tokenizers to compare. Expected the same vocabulary."
            )
        return None
    if ours.get_vocab() == tokenizer.get_vocab():
        return None
    if match == "same":
        raise _another_vocabulary(model.name, tokenizer, target.name, ours)
    known = vocabularies(target, model, tokenizer)
    mapping = VocabularyMap(*known, target.device)
    least = _LEAST_SHARE_UNASKED if match == "auto" else _LEAST_SHARE
    if mapping.share < least:
        others = _OTHERWISE if match == "auto" else _BY_TEXT
        raise ConfigError(
            f"draft model '{model.name}' has {100 * mapping.share:.1f} % of the tokens of '{target.name}'. Expected "
            f"at least {100 * least:.0f} % with 'vocab_match' at '{match}'. Set it to {others}."
        )
    if _log.isEnabledFor(logging.INFO):
        _log.info(
            "draft model '%s' shares %d tokens with '%s', %.1f %% of them%s", model.name, len(mapping.pairs),
            target.name, 100 * mapping.share, _bound(mapping, known[0], target),
        )  # fmt: skip
    return mapping


def _another_vocabulary(name: str, tokenizer: Any, target: str, ours: Any) -> ConfigError:
    differing = len(set(ours.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
    return ConfigError(
        f"draft model '{name}' has another vocabulary than '{target}': {differing} entries differ. Expected the same "
        f"tokenizer. Use a draft model of the same family, or set 'vocab_match' to {_OTHERWISE}."
    )


def _bound(mapping: VocabularyMap, known: Vocabulary, target: TargetHandle) -> str:
    """Returns the target's probability of shared tokens in words; one pass writes the rows of slot 0."""
    tokens = [piece.token for piece in known.encode(_SAMPLE)][: min(_SAMPLE_LEN, target.context_len)]
    work = Pass.of_chains([tokens], slots=[0], prefix_lens=[0], device=target.device)
    try:
        logits = target.run(replace(work, logit_rows=torch.arange(len(tokens), device=target.device))).logits
    except PassError:  # the drafter is not trusted
        return ""
    assert logits is not None, "the pass asks for them"
    bound = mapping.shared_probability(logits)
    return f"; to the target they are {100 * bound:.1f} % probable on a few lines, which bounds acceptance"


def vocabularies(target: TargetHandle, model: LoadedModel, tokenizer: Any | None) -> tuple[Vocabulary, Vocabulary]:
    """Returns the tokens of target and draft model by bytes; raises `ConfigError` if a tokenizer does not list them."""
    for name, each in ((target.name, target.tokenizer), (model.name, tokenizer)):
        if each is None:
            raise ConfigError(
                f"'{name}' has no tokenizer, and 'vocab_match' compares what tokens spell. Expected tokenizer files "
                "beside the weights. Pass tokenizer=... for a model in memory."
            )
    return (
        Vocabulary(target.tokenizer, target.vocab_size, target.name),
        Vocabulary(tokenizer, model.vocab_size, model.name),
    )
