"""Fields of vLLM's `SamplingParams` that ours lacks: ignored where they ask for nothing that is missing here."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import shown
from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


class OtherField(NamedTuple):
    """A field of vLLM's.

    Attributes:
        neutral: Values, besides None, that ask for nothing.
        instead: What there is instead of the others.
    """

    neutral: tuple[Any, ...]
    instead: str


OTHER_FIELDS: Mapping[str, OtherField] = MappingProxyType({
    "best_of": OtherField((1,), "Ask for n completions and choose among them."),
    "use_beam_search": OtherField((False,), "There is no beam search. Leave it out."),
    "length_penalty": OtherField((1, 1.0), "There is no beam search. Leave it out."),
    "early_stopping": OtherField((False,), "There is no beam search. Leave it out."),
    "logits_processors": OtherField((), "Use logit_bias, bad_words, allowed_token_ids and penalties."),
    "detokenize": OtherField((True,), "Text is decoded when it is read. Leave it out."),
    "spaces_between_special_tokens": OtherField((True, False), "Leave it out."),
    "truncate_prompt_tokens": OtherField((), "Shorten the prompt."),
    "flat_logprobs": OtherField((False,), "logprobs is a list with a mapping for each token. Leave it out."),
    "logprob_token_ids": OtherField((), "logprobs holds the most probable tokens. Leave it out."),
    "output_kind": OtherField((0,), "Use LLM.generate for whole outputs and LLM.stream for new parts."),
    "extra_args": OtherField(({},), "No plug-in reads them. Leave it out."),
    "skip_reading_prefix_cache": OtherField((True, False), "Set enable_prefix_caching of LLM."),
    "skip_clone": OtherField((True, False), "Leave it out."),
    "thinking_token_budget": OtherField((), "Set max_tokens."),
    "repetition_detection": OtherField((), "Use penalties or stop strings."),
})  # fmt: skip


def without_other_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are ours.

    Args:
        values: By name.

    Raises:
        RequestError: For a field of vLLM's with a value that asks for what there is not, with what there is instead.
    """
    for name, value in values.items():
        other = OTHER_FIELDS.get(name)
        if other is not None and value is not None and not _is_among(value, other.neutral):
            raise RequestError(f"{name} = {shown(value)} is not supported. {other.instead}")
    return {name: value for name, value in values.items() if name not in OTHER_FIELDS}


def _is_among(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of some; 1 and True are apart."""
    return any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral)
