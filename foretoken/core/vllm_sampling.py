"""Fields of vLLM's requests that do not exist here: ignored at neutral values, else refused."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from foretoken.core.checks import shown
from foretoken.core.errors import RequestError, nearest_name_hint

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


class OtherField(NamedTuple):
    """A field that only vLLM has.

    Attributes:
        neutral: Values, besides None, with no effect.
        instead: Advice for all other values.
    """

    neutral: tuple[Any, ...]
    instead: str

    def check(self, name: str, value: Any) -> None:
        """Raises `RequestError` for a value that is not neutral; the message has the advice."""
        is_neutral = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in self.neutral)
        if value is not None and not is_neutral:
            raise RequestError(f"{name} = {shown(value)} is not supported. {self.instead}")


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
    "prompt_logprob_token_ids": OtherField((), "prompt_logprobs holds the most probable tokens. Leave it out."),
    "prompt_logprob_start": OtherField((0,), "prompt_logprobs begins with the prompt. Leave it out."),
    "stream_interval": OtherField((1,), "A part is handed out after every pass. Leave it out."),
    "output_text_buffer_length": OtherField((0,), "Leave it out."),
    "watermarking": OtherField((False,), "Outputs have no watermark. Leave it out."),
    "guided_decoding": OtherField((), "Pass structured_outputs=StructuredOutputsParams(...)."),
    "routed_experts_prompt_start": OtherField((0,), "Outputs do not hold experts. Leave it out."),
    "trace_decode_token_ids": OtherField((), "Tokens are always chosen by the model. Leave it out."),
    "extra_args": OtherField(({},), "No plug-in reads them. Leave it out."),
    "skip_reading_prefix_cache": OtherField((True, False), "Set enable_prefix_caching of LLM."),
    "skip_clone": OtherField((True, False), "Leave it out."),
    "thinking_token_budget": OtherField((), "Set max_tokens."),
    "repetition_detection": OtherField((), "Use penalties or stop strings."),
})  # fmt: skip

OTHER_KEYWORDS: Mapping[str, OtherField] = MappingProxyType(
    {
        "lora_request": OtherField((), "Merge the adapter into the model first."),
        "priority": OtherField((0,), "Requests are served in the order in which they come. Leave it out."),
        "tokenization_kwargs": OtherField(({},), "Pass token ids."),
        "mm_processor_kwargs": OtherField(({},), "Prompts are text or token ids. Leave it out."),
    }
)


def without_other_fields(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that foretoken has; raises `RequestError` for vLLM's other fields unless neutral."""
    for name, value in values.items():
        other = OTHER_FIELDS.get(name)
        if other is not None:
            other.check(name, value)
    return {name: value for name, value in values.items() if name not in OTHER_FIELDS}


def check_other_keywords(call: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises `RequestError` for keywords of a call that vLLM lacks too, and for values that are not neutral."""
    for name, value in given.items():
        if name not in OTHER_KEYWORDS:
            raise RequestError(f"{call} has no argument {shown(name)}. {nearest_name_hint(name, known)}")
        OTHER_KEYWORDS[name].check(name, value)
