"""A prepared call of transformers' `generate` as prompts and parameters, or why transformers has to serve it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from transformers.generation.stopping_criteria import EosTokenCriteria

from foretoken.core.errors import RequestError
from foretoken.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from transformers import GenerationConfig
    from transformers.generation.stopping_criteria import StoppingCriteriaList


class Unserved(Exception):
    """A call is left to transformers; its text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an engine can take.

    Attributes:
        context_len: Most tokens of a sequence.
        eos_ids: End-of-sequence tokens that its model was loaded with.
    """

    context_len: int
    eos_ids: Sequence[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What the engine is asked for.

    Attributes:
        prompts: Token ids of each row, without padding.
        params: The same for all rows. They end a row at the tokens and lengths at which transformers ends it, or later.
    """

    prompts: list[list[int]]
    params: SamplingParams


def read_request(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    criteria: StoppingCriteriaList,
    config: GenerationConfig,
    limits: EngineLimits,
) -> GenerateRequest:
    """Reads what `generate` prepared for its decoding loop.

    Args:
        input_ids: (B, T) int64, padded.
        attention_mask: (B, T), 0 where a row is padded; None where none is.
        criteria: All that may end a row.
        config: With defaults and `generate`'s own tensors of special tokens filled in.
        limits: Of the engine.

    Raises:
        Unserved: When transformers has to serve it.
    """
    prompts, width = _prompts(input_ids, attention_mask), input_ids.shape[1]
    if criteria.max_length is None:
        raise Unserved("nothing bounds the length")
    if getattr(config, "_pad_token_tensor", None) is None and any(hasattr(each, "eos_token_id") for each in criteria):
        raise Unserved("nothing says what rows that are over are padded with")
    num_new = max(criteria.max_length - width, 1)
    longest = max(map(len, prompts)) + num_new
    if longest > limits.context_len:
        raise Unserved(f"{longest} tokens are longer than the engine's context of {limits.context_len}")
    ends = [token for each in criteria if type(each) is EosTokenCriteria for token in each.eos_token_id.tolist()]
    eos = getattr(config, "_eos_token_tensor", None)
    eos_ids = [] if eos is None else eos.tolist()
    least = 0 if eos is None else min(max((config.min_length or 0) - width, config.min_new_tokens or 0), num_new)
    if least > 0 and not {*limits.eos_ids, *ends} <= set(eos_ids):
        raise Unserved("a minimum length holds back other end-of-sequence tokens than the model's")
    words = [list(word) for word in config.bad_words_ids or () if list(word) not in [[token] for token in eos_ids]]
    words += [[token] for token in config.suppress_tokens or ()]
    try:
        params = SamplingParams(
            max_tokens=num_new, min_tokens=max(least, 0), ignore_eos=True, stop_token_ids=ends, bad_words=words,
            repetition_penalty=config.repetition_penalty, **_sampling(config),
        )  # fmt: skip
    except RequestError as err:
        raise Unserved(str(err)) from err
    return GenerateRequest(prompts=prompts, params=params)


def _sampling(config: GenerationConfig) -> dict[str, Any]:
    """Temperature and truncation."""
    if not config.do_sample:
        return {"temperature": 0.0}
    return {"temperature": config.temperature, "top_k": config.top_k, "top_p": config.top_p, "min_p": config.min_p}


def _prompts(input_ids: Tensor, attention_mask: Tensor | None) -> list[list[int]]:
    """The rows without padding.

    Raises:
        Unserved: When something is masked that does not stand on the left, or nothing is left of a row.
    """
    rows: list[list[int]] = input_ids.tolist()
    if attention_mask is not None:
        if bool(((attention_mask != 0) & (attention_mask != 1)).any()):  # of which transformers makes positions
            raise Unserved("the attention mask holds other values than 0 and 1")
        mask = attention_mask.bool().tolist()
        if [len(row) for row in mask] != [len(row) for row in rows]:
            raise Unserved("the attention mask has another shape than the token ids")
        if any(sorted(row) != row for row in mask):
            raise Unserved("the attention mask hides more than padding on the left")
        rows = [row[len(row) - sum(real) :] for row, real in zip(rows, mask, strict=True)]
    if not all(rows):
        raise Unserved("a prompt is empty")
    return rows
