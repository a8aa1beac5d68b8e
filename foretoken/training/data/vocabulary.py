"""Draft vocabularies: the most frequent tokens of training data, for heads whose LM head covers no others.

Only labels are counted, since drafts never contain tokens of prompts alone.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.validation import validated
from foretoken.files.atomic_files import told_as, write_file
from foretoken.files.bounded_reads import read_json_object

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from foretoken.training.data.packed import PackedTokens

_FORMAT = "foretoken-draft-vocabulary"
_COUNTED_AT_ONCE = 1 << 22
_ADVICE = "Make it with `foretoken data vocab`."


class DraftVocabulary(BaseModel):
    """The tokens of a draft vocabulary, and their source.

    Attributes:
        token_ids: Ascending.
        coverage: Share of the data's labels that are in the vocabulary.
        tokenizer_sha: Hash of the tokenizer, see `foretoken.core.token_ids`.
        tokens_sha256: Hash of the data.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    format: Literal["foretoken-draft-vocabulary"] = "foretoken-draft-vocabulary"
    version: Literal[1] = 1
    token_ids: tuple[Annotated[int, Field(ge=0, strict=True)], ...] = Field(min_length=1)
    coverage: float = Field(ge=0, le=1)
    tokenizer_sha: str
    tokens_sha256: str

    @model_validator(mode="after")
    def _check(self) -> Self:
        if any(one >= other for one, other in zip(self.token_ids, self.token_ids[1:], strict=False)):
            raise ValueError("token_ids are not ascending. Expected each id once, the lowest first")
        return self

    @classmethod
    def read(cls, path: Path) -> DraftVocabulary:
        """Reads a file of `write`; raises `ConfigError` when the file is missing or damaged, or holds other data."""
        if not path.exists():
            raise ConfigError(f"there is no file '{path}'. Expected a draft vocabulary. {_ADVICE}")
        values = read_json_object(path, error=ConfigError, advice=_ADVICE)
        if values.get("format") != _FORMAT:
            raise ConfigError(f"'{path}' holds no draft vocabulary. Expected the format '{_FORMAT}'. {_ADVICE}")
        return validated(cls, values, f"the draft vocabulary '{path}'", advice=_ADVICE)

    def write(self, path: Path) -> None:
        """Writes a file, whole or not at all; raises `ConfigError` if that fails."""
        with told_as(ConfigError, f"'{path}'", "Expected a new file in a directory that may be written to."):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, json.dumps(self.model_dump(mode="json")) + "\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedVocabulary:
    """A new vocabulary.

    Attributes:
        vocabulary: The tokens.
        num_labels: Labels that were counted.
        num_filled: Tokens that are not labels, which fill the vocabulary to its size.
    """

    vocabulary: DraftVocabulary
    num_labels: int
    num_filled: int


def count_vocabulary(packed: PackedTokens, size: int) -> CountedVocabulary:
    """Returns the most frequent labels of packed tokens; of equally frequent ones the lower id.

    Args:
        packed: The data, read once from its beginning to its end.
        size: Tokens to choose. If fewer are labels, the lowest other ids fill the vocabulary.

    Raises:
        RequestError: When the tokenizer has fewer tokens, or the data is damaged.
    """
    missing = {"vocab_size", "tokenizer_sha", "tokens_sha256"} - packed.meta.keys()
    if missing:
        raise RequestError(f"the data does not tell its {', '.join(sorted(missing))}. It is damaged: make it again.")
    total = int(packed.meta["vocab_size"])
    if not 1 <= size <= total:
        raise RequestError(f"a draft vocabulary of {size} tokens was asked for. Expected 1 to {total}.")
    counts = np.zeros(total, dtype=np.int64)
    for begin in range(0, len(packed.tokens), _COUNTED_AT_ONCE):
        part = slice(begin, begin + _COUNTED_AT_ONCE)
        tokens = packed.tokens[part]
        if int(tokens.max()) >= total:
            raise RequestError(
                f"the data holds token {int(tokens.max())}. Expected ids below {total}. It is damaged: make it again."
            )
        counts += np.bincount(tokens if packed.supervised is None else tokens[packed.supervised[part]], minlength=total)
    chosen = np.argsort(-counts, kind="stable")[:size]
    found, labels = counts[chosen], int(counts.sum())
    vocabulary = DraftVocabulary(
        token_ids=tuple(np.sort(chosen).tolist()),
        coverage=float(found.sum() / max(labels, 1)),
        tokenizer_sha=packed.meta["tokenizer_sha"],
        tokens_sha256=packed.meta["tokens_sha256"],
    )
    return CountedVocabulary(vocabulary=vocabulary, num_labels=labels, num_filled=int((found == 0).sum()))
