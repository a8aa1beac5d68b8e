"""Which tokens a draft model drafts: the most frequent ones, and those that the texts had lately.

The LM head is a large part of a small model with a large vocabulary. Drafts of a part of the vocabulary read a part of
it; the target verifies over all tokens, so texts do not change. Most tokenizers number tokens by frequency, and texts
repeat rare words: on texts of other authors a quarter of Qwen's vocabulary held 94.3 % of the tokens by number, and
97.3 % with those of prompt and text, see "A draft vocabulary" in `benchmarks/NOTES.md`.

Source: FR-Spec (arXiv 2502.14856), with a fixed vocabulary from a corpus.
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import ConfigError
from foretoken.formats.draft_vocabulary import DraftVocabulary

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from foretoken.models.loading import LoadedModel
    from foretoken.runner.runner import Runner

VocabSize = int | Literal["auto", "all"]
_LARGE = 1 << 16  # tokens; a choice: the LM head of a smaller vocabulary costs little
_SHARE = 4  # of a large vocabulary one token in so many is drafted; see the notes
_RECENT = 4  # one drafted token in so many is exchanged for those of the texts; see the notes


class DraftTokens:
    """The tokens that a draft model drafts.

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
    def of(cls, model: LoadedModel, size: VocabSize, place: str | None) -> DraftTokens | None:
        """Returns the tokens that options ask for; None for all.

        Args:
            model: The draft model.
            size: Of the draft vocabulary.
            place: File of `foretoken data vocab` with the most frequent tokens; None takes the first ones.

        Raises:
            ConfigError: If the file is missing or damaged, or has tokens that the model has not; or `size` is larger
                than the vocabulary.
        """
        listed = () if place is None else DraftVocabulary.read(Path(place)).token_ids
        total = model.vocab_size
        if listed and listed[-1] >= total:
            raise ConfigError(
                f"'draft_vocab' names token {listed[-1]}, and the draft model '{model.name}' has ids below {total}. "
                "Expected the vocabulary of its own tokenizer. Make it with `foretoken data vocab`."
            )
        if isinstance(size, int) and size > total:
            raise ConfigError(
                f"'draft_vocab_size' is {size}, and the draft model '{model.name}' has {total} tokens. Expected at "
                'most as many, or "all".'
            )
        is_required = size != "auto" or bool(listed)
        if size == "auto":
            is_large = total >= _LARGE and runs_cpu_kernels(model.device)  # elsewhere it was not measured
            size = len(listed) or (total // _SHARE if is_large else total)
        if size in ("all", total):
            return None
        order = dict.fromkeys(chain((each for each in model.eos_ids if each < total), listed, range(total)))
        return cls(list(order)[: int(size)], total, is_required=is_required)

    def learn(self, tokens: Iterable[int], runner: Runner) -> None:
        """Exchanges the oldest recent tokens for those of a text, in the LM head of a runner that drafts `ids`."""
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
        assert runner.head_rows is not None, "it drafts these tokens"
        runner.head_rows.exchange(*(torch.tensor(each, device=runner.device) for each in (places, new)))
