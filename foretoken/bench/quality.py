"""What quantized weights change, on held-out text: perplexity, KL divergence, and greedy tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.nn import functional

from foretoken.core.checks import validated
from foretoken.core.errors import ModelError, RequestError
from foretoken.core.passes import Pass
from foretoken.runner.runner import Runner

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

QUALITY_KEY = "rounding_quality"  # of config.json
_PIECE_TOKENS = 512  # a choice: logits of both models in float32 are in memory, 0.6 GB for 150,000 tokens of vocabulary


class Quality(BaseModel):
    """A quantized model beside its original."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    original: str
    num_tokens: int  # tokens of held-out text that both read
    perplexity: float  # of the quantized model
    original_perplexity: float
    kl_divergence: float  # of the next token's distribution from the original's, in nats, mean over tokens
    greedy_changes: float  # share of tokens after which the most probable token is another one

    def __str__(self) -> str:
        change = self.perplexity / self.original_perplexity - 1
        return (
            f"perplexity {self.perplexity:.3f} ({change:+.2%} of {self.original_perplexity:.3f}), KL divergence "
            f"{self.kl_divergence:.5f}, {self.greedy_changes:.2%} of greedy tokens changed ({self.num_tokens} tokens "
            f"of held-out text, beside '{self.original}')"
        )


def read_quality(values: Mapping[str, Any], name: str) -> Quality | None:
    """Returns the record in a configuration, or None; raises `ModelError` if it is invalid."""
    if values.get(QUALITY_KEY) is None:
        return None
    what = f"'{QUALITY_KEY}' in the config.json of '{name}'"
    return validated(Quality, values[QUALITY_KEY], what, error=ModelError, advice="Make it again.")


def compare_weights(
    quantized: LoadedModel,
    original: LoadedModel,
    texts: Sequence[Sequence[int]],
    on_progress: Callable[[int, int], None],
) -> Quality:
    """Compares a quantized model with its original, on token ids of held-out text in pieces of up to 512.

    `on_progress` is called with pieces done and pieces in all.

    Raises:
        ModelError: If vocabularies differ.
        RequestError: If no piece has two tokens, or a token is not in the vocabulary.
    """
    if quantized.vocab_size != original.vocab_size:
        raise ModelError(
            f"'{quantized.name}' has {quantized.vocab_size} tokens and '{original.name}' {original.vocab_size}. "
            "Expected the model that it was quantized from."
        )
    longest = min(quantized.context_len, original.context_len, _PIECE_TOKENS)
    pieces = [text[i : i + longest] for text in texts for i in range(0, len(text), longest)]
    pieces = [each for each in pieces if len(each) > 1]
    if not pieces or any(token >= original.vocab_size for each in pieces for token in each):
        raise RequestError(
            "the held-out text has fewer than two tokens of this model. Pass another text, or the model's tokenizer."
        )
    runners = [
        Runner(model, num_slots=1, context_len=longest, max_nodes=1, prefill_chunk=longest)
        for model in (quantized, original)
    ]
    sums, count = torch.zeros(4, dtype=torch.float64), 0
    for done, tokens in enumerate(pieces):
        ids = torch.tensor(tokens[1:])
        own, reference = (all_logits(runner, tokens[:-1]).float().log_softmax(1) for runner in runners)
        sums += torch.tensor([
            functional.nll_loss(own, ids, reduction="sum"),
            functional.nll_loss(reference, ids, reduction="sum"),
            (reference.exp() * (reference - own)).sum(),
            (own.argmax(1) != reference.argmax(1)).sum(),
        ])  # fmt: skip
        count += len(ids)
        on_progress(done + 1, len(pieces))
    loss, plain, divergence, changed = (sums / count).tolist()
    return Quality(
        original=original.name, num_tokens=count, perplexity=math.exp(loss), original_perplexity=math.exp(plain),
        kl_divergence=divergence, greedy_changes=changed,
    )  # fmt: skip


def all_logits(runner: Runner, tokens: Sequence[int]) -> Tensor:
    """Returns (T, V) logits after each token of a text."""
    logits = runner.run(Pass.of_chains([tokens], slots=[0], prefix_lens=[0]).with_all_logits()).logits
    assert logits is not None, "all were asked for"
    return logits
