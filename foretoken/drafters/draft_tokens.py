"""Which tokens draft models and heads draft: the most frequent ones, and those that the texts had lately.

The LM head is a large part of a small model with a large vocabulary, and most of a head that shares its target's.
Drafts of a part of the vocabulary read a part of it; the target verifies over all tokens, so texts do not change. Most
tokenizers number tokens by frequency, and texts repeat rare words: on texts of other authors a quarter of Qwen's
vocabulary held 94.3 % of the tokens by number, and 97.3 % with those of prompt and text, see "A draft vocabulary" in
`benchmarks/NOTES.md`.

Source: FR-Spec (arXiv 2502.14856), with a fixed vocabulary from a corpus.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from pydantic import Field

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import ConfigError
from foretoken.drafters.windows import WindowOptions
from foretoken.formats.draft_vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretoken.decoder.native_linear import HeadRows
    from foretoken.models.loaded import LoadedModel

VocabSize = Annotated[int, Field(ge=1)] | Literal["auto", "all"]
_SHARE = 4  # of a large vocabulary one token in so many is drafted; see the notes
_RECENT = 4  # one drafted token in so many is exchanged for those of the texts; see the notes


class VocabularyOptions(WindowOptions):
    """Options of drafters that may draft a part of the vocabulary.

    Attributes:
        draft_vocab_size: Tokens that are drafted: the most frequent ones, and those that texts had lately. Rows of
            other tokens in the LM head are not read. "all" for the whole vocabulary; "auto" for a quarter of a large
            one, or those that a head learned over, on CPUs where the decoder can. Heads with an LM head of their own
            draft its tokens.
        draft_vocab: File of `foretoken data vocab` with the most frequent tokens. Without it the first ids count as
            such, which is so in most tokenizers.
    """

    large_vocabulary: ClassVar[int] = 1 << 16  # tokens; a choice: the LM head of a smaller one costs little

    draft_vocab_size: VocabSize = "auto"
    draft_vocab: str | None = None

    def drafted_tokens(self, model: LoadedModel, learned: Sequence[int] | None = None) -> DraftTokens | None:
        """Returns the tokens of an LM head that are drafted; None for all. Raises `ConfigError` as `DraftTokens.of`."""
        large = self.large_vocabulary
        return DraftTokens.of(model, self.draft_vocab_size, self.draft_vocab, large=large, learned=learned)


class DraftTokens:
    """The tokens that a drafter drafts.

    Attributes:
        ids: One for each row of its LM head.
        is_required: Whether the caller asked for them; otherwise all tokens are drafted where a part cannot be.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int, *, is_required: bool = True) -> None:
        """Starts with different ids below `vocab_size`, the most frequent first: the last quarter is exchanged."""
        self.ids, self._num_recent, self.is_required = list(ids), max(1, len(ids) // _RECENT), is_required
        self._next = 0  # of the recent ones
        self._has = bytearray(vocab_size)
        for token in ids:
            self._has[token] = 1

    @classmethod
    def of(
        cls,
        model: LoadedModel,
        size: VocabSize,
        place: str | None,
        *,
        large: int,
        learned: Sequence[int] | None = None,
    ) -> DraftTokens | None:
        """Returns the tokens that options ask for; None for all.

        Args:
            model: The draft model, or the target whose LM head drafts.
            size: Of the draft vocabulary.
            place: File of `foretoken data vocab` with the most frequent tokens; None takes the first ones.
            large: Least vocabulary that "auto" drafts in part.
            learned: Tokens that a head learned over, which "auto" drafts.

        Raises:
            ConfigError: If the file is missing or damaged, or has tokens that the model has not; or `size` is larger
                than the vocabulary.
        """
        listed: Sequence[int] = () if place is None else DraftVocabulary.read(Path(place)).token_ids
        is_required, total = size != "auto" or bool(listed), model.vocab_size
        if not is_required and learned is not None and runs_cpu_kernels(model.device):
            listed = learned
        if listed and max(listed) >= total:
            raise ConfigError(
                f"'draft_vocab' names token {max(listed)}, and the model '{model.name}' has ids below {total}. "
                "Expected the vocabulary of its own tokenizer. Make it with `foretoken data vocab`."
            )
        if isinstance(size, int) and size > total:
            raise ConfigError(
                f"'draft_vocab_size' is {size}, and the model '{model.name}' has {total} tokens. Expected at "
                'most as many, or "all".'
            )
        if size == "auto":
            is_large = total >= large and runs_cpu_kernels(model.device)  # elsewhere it was not measured
            size = len(listed) or (total // _SHARE if is_large else total)
        if size in ("all", total):
            return None
        order = dict.fromkeys(chain((each for each in model.eos_ids if each < total), listed, range(total)))
        return cls(list(order)[: int(size)], total, is_required=is_required)

    def learn(self, tokens: Iterable[int], rows: HeadRows) -> None:
        """Exchanges the oldest recent tokens for those of a text, in the rows of `ids` of an LM head."""
        new = [token for token in dict.fromkeys(tokens) if not self._has[token]][-self._num_recent :]
        if not new:
            return
        first = len(self.ids) - self._num_recent
        places = [first + (self._next + i) % self._num_recent for i in range(len(new))]
        self._next = (self._next + len(new)) % self._num_recent
        for place, token in zip(places, new, strict=True):
            self._has[self.ids[place]] = 0
            self.ids[place] = token
            self._has[token] = 1
        rows.exchange(*(torch.tensor(each, device=rows.tokens.device) for each in (places, new)))
