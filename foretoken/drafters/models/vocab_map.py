"""The tokens that two vocabularies share, and one vocabulary's tokens in the ids of another.

A draft model that knows other tokens than the target drafts those that both have (token-level intersection): its
distribution is restricted to them, renormalised, and stated over the target's ids, so that every acceptance rule works
as with one vocabulary. Tokens are the same that stand for the same bytes; special tokens, that have the same role or
content.

Source: Timor et al. 2025 (arXiv 2502.05202), algorithm 4 (TLI).

Letters: V vocabulary of the target, D of the draft model, K shared tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from foretoken.drafters.models.token_bytes import Vocabulary


class VocabularyMap:
    """Tokens of a target in ids of a draft model, and distributions of a draft model in ids of a target.

    Attributes:
        pairs: The draft model's id of each of the K shared tokens by the target's; no id occurs twice.
        share: K by the number of the target's tokens, 0 to 1.
    """

    def __init__(self, target: Vocabulary, draft: Vocabulary, device: torch.device) -> None:
        """Finds the shared tokens.

        Args:
            target: Of V ids.
            draft: Of D ids.
            device: Where distributions lie.
        """
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
        """A draft model's logits over the target's ids, -inf at those that are not shared.

        Softmax makes them the draft distribution, restricted to the shared tokens and renormalised.

        Args:
            logits: (R, D).

        Returns:
            (R, V).
        """
        return logits.index_select(1, self._fed).masked_fill_(self._is_absent, float("-inf"))

    def shared_probability(self, logits: Tensor) -> float:
        """How probable shared tokens are to the target, which no acceptance rate exceeds.

        Args:
            logits: (R, V), the target's; the mean over rows is taken.
        """
        return float(logits.softmax(1).masked_fill(self._is_absent, 0.0).sum(1).mean())

    def fed(self, tokens: Tensor) -> Tensor:
        """The draft model's ids of drafted tokens, in their shape; its stand-in for those that are not shared.

        Args:
            tokens: Int64, of any shape, below V.
        """
        return self._fed[tokens]

    def translated(self, token: int) -> tuple[int, ...]:
        """The draft model's ids of a token of the target, one at least: of its bytes where the token is not shared."""
        ids = self._translated.get(token)
        if ids is None:
            spelling = self._target.spellings[token] if token < len(self._target.spellings) else None
            pieces = self._draft.encode(spelling or b"")
            ids = self._translated[token] = tuple(piece.token for piece in pieces) or (self._draft.stand_in,)
        return ids

    def of_text(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's ids of a text, encoded as a whole between special tokens; one id at least.

        Args:
            tokens: The target's.
        """
        ids: list[int] = []
        data = b""
        for token in tokens:
            spelling = self._target.spellings[token] if token < len(self._target.spellings) else None
            if spelling is None:
                ids += [*(piece.token for piece in self._draft.encode(data)), *self.translated(token)]
                data = b""
            else:
                data += spelling
        ids += (piece.token for piece in self._draft.encode(data))
        return ids or [self._draft.stand_in]


class Translation:
    """A growing sequence of the target's tokens in ids of the draft model.

    The prompt is encoded as a text, which gives the draft model the tokens that it was trained on; what follows token
    by token, so that nothing changes that was translated before.
    """

    def __init__(self, mapping: VocabularyMap, prompt_len: int) -> None:
        """Nothing is translated yet; prompt_len: tokens of the prompt."""
        self._mapping, self._prompt_len = mapping, prompt_len
        self._ids: list[int] = []
        self._num_read = 0

    def of(self, tokens: Sequence[int]) -> list[int]:
        """The draft model's ids of the whole sequence; not to be changed, and valid until the next call.

        Args:
            tokens: The target's, which continue those of the last call.
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
    """The draft model's special token for each of the target's: of the same role, else of the same content.

    Args:
        target: Of the target.
        draft: Of the draft model.
    """
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
