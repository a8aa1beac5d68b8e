"""Loading a draft model, and how its vocabulary goes with the target's."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from foretoken.core.errors import ConfigError, PassError
from foretoken.core.passes import Pass
from foretoken.drafters.models.token_bytes import Vocabulary
from foretoken.drafters.models.vocab_map import VocabularyMap
from foretoken.models.loading import load_model, load_tokenizer

if TYPE_CHECKING:
    from foretoken.drafters.base import TargetHandle
    from foretoken.models.loading import LoadedModel

VocabMatch = Literal["auto", "same", "intersection", "text"]
_LEAST_SHARE = 0.1  # of the target's tokens, below which a draft of shared tokens is refused
_LEAST_SHARE_UNASKED = 0.5  # below which "auto" does not choose it
_BY_TEXT = "'text', which drafts text"
_OTHERWISE = f"'intersection', which drafts the tokens that both have, or to {_BY_TEXT}"
# On which an upper bound of acceptance is measured: prose and code.
_SAMPLE = b"""The library opens at nine. "Is it far from here?" she asked, and he showed her the way on a map.

def mean(values: list[float]) -> float:
    return sum(values) / len(values)
"""
_SAMPLE_LEN = 64  # tokens of it, at most
_log = logging.getLogger(__name__)


class DraftModelFiles:
    """A draft model in a directory or on the hub."""

    def __init__(self, name: str, revision: str | None) -> None:
        """Loads nothing yet; revision: of the hub, or None."""
        self.name, self._revision = name, revision

    def model(self, target: TargetHandle | LoadedModel) -> LoadedModel:
        """The model, where and in what dtype the target is.

        Raises:
            ModelError: When it cannot be loaded.
        """
        dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
        return load_model(self.name, dtype=dtype, device=device, revision=self._revision)

    def tokenizer(self) -> Any | None:
        """Its tokenizer, or None where there is none.

        Raises:
            ModelError: When it cannot be loaded.
        """
        return load_tokenizer(self.name, self._revision)


def vocabulary_map(
    match: VocabMatch, target: TargetHandle, model: LoadedModel, tokenizer: Any | None
) -> VocabularyMap | None:
    """How a draft model's tokens become the target's.

    Args:
        match: "same", "intersection", or "auto" for the first of these that goes.
        target: The target.
        model: The draft model.
        tokenizer: Its tokenizer, or None.

    Returns:
        None where the vocabularies are the same.

    Raises:
        ConfigError: When they are not and should be, when they have too little in common, or when the tokenizers do not
            tell.
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
        differing = len(set(ours.get_vocab().items()) ^ set(tokenizer.get_vocab().items()))
        raise ConfigError(
            f"draft model '{model.name}' has another vocabulary than '{target.name}': {differing} entries "
            "differ. Expected the same tokenizer. Use a draft model of the same family, or set 'vocab_match' to "
            f"{_OTHERWISE}."
        )
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


def _bound(mapping: VocabularyMap, known: Vocabulary, target: TargetHandle) -> str:
    """How probable shared tokens are to the target, in words; nothing where the target may not be run.

    Args:
        mapping: Knows the shared tokens.
        known: The target's tokens.
        target: Runs one pass; the rows of slot 0 are written.
    """
    tokens = [piece.token for piece in known.encode(_SAMPLE)][: min(_SAMPLE_LEN, target.context_len)]
    work = Pass.of_chains([tokens], slots=[0], prefix_lens=[0], device=target.device)
    try:
        logits = target.run(replace(work, logit_rows=torch.arange(len(tokens), device=target.device))).logits
    except PassError:  # an untrusted drafter's
        return ""
    assert logits is not None, "the pass asks for them"
    bound = mapping.shared_probability(logits)
    return f"; to the target they are {100 * bound:.1f} % probable on a few lines, which bounds acceptance"


def vocabularies(target: TargetHandle, model: LoadedModel, tokenizer: Any | None) -> tuple[Vocabulary, Vocabulary]:
    """The target's tokens and the draft model's by their bytes.

    Raises:
        ConfigError: When there is no tokenizer, or it does not tell.
    """
    for name, each in ((target.name, target.tokenizer), (model.name, tokenizer)):
        if each is None:
            raise ConfigError(f"'{name}' has no tokenizer, which tells what its tokens spell. Expected one.")
    return (
        Vocabulary(target.tokenizer, target.vocab_size, target.name),
        Vocabulary(tokenizer, model.vocab_size, model.name),
    )
