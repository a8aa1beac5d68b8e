"""Builds answers in OpenAI's shapes: choices, log-probabilities, usage and draft metrics."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.server.message_parts import MessageForm, MessageReader, joined, whole_message

if TYPE_CHECKING:
    from foretoken.core.records import GenerationMetrics
    from foretoken.core.results import CompletionOutput, Logprob, RequestOutput, StreamChunk
    from foretoken.entrypoints.llm import LLM
    from foretoken.server.edge import ApiError
    from foretoken.server.request_fields import ServedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EchoedPrompt:
    """A prompt that its completions begin with.

    Attributes:
        first_token: The first token as text, for which there is no log-probability.
        entries: Tokens and log-probabilities, in the lists of `completion_entries`; None if unknown or not asked for.
    """

    text: str
    first_token: str
    entries: dict[str, Any] | None = None

    @classmethod
    def of_prompt(cls, llm: LLM, text: str | None, token_ids: list[int]) -> EchoedPrompt:
        """Returns a prompt without log-probabilities; raises `RequestError` if the tokenizer is missing or fails."""
        return cls(text=llm.decode(token_ids) if text is None else text, first_token=llm.decode(token_ids[:1]))

    def scored(self, logprobs: Sequence[dict[int, Logprob] | None], num_top: int) -> EchoedPrompt:
        """Returns the prompt with `RequestOutput.prompt_logprobs` and `num_top` alternatives for each token.

        Every token begins where the tokens before it end. A first token that the tokenizer adds has no characters.
        """
        begin = len(self.first_token) if self.text.startswith(self.first_token) else 0
        rest = completion_entries([entry for entry in logprobs if entry is not None], num_top, begin)
        return replace(self, entries={
            "tokens": [self.first_token, *rest["tokens"]],
            "token_logprobs": [None, *rest["token_logprobs"]],
            "top_logprobs": [None, *rest["top_logprobs"]],
            "text_offset": [0, *(min(offset, len(self.text)) for offset in rest["text_offset"])],
        })  # fmt: skip


_Part = TypeVar("_Part", "CompletionOutput", "StreamChunk")


def without_tokens(part: _Part, **more: Any) -> _Part:
    """Returns a completion or a chunk without its tokens; an error stays; more: further fields to replace."""
    reason = "length" if part.finish_reason in ("stop", "length") else part.finish_reason
    more["logprobs"] = None if part.logprobs is None else []
    return replace(part, text="", token_ids=[], finish_reason=reason, stop_reason=None, **more)


_LOWEST = -9999.0  # stands for minus infinity, which JSON does not have; OpenAI and vLLM write the same number


def seconds_since_1970() -> int:
    """Returns the `created` time of OpenAI's bodies."""
    return int(time.time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Builds the bodies of an answer to completions or a chat.

    `name` is unique, the end of the answer's id. `created` is in seconds since 1970. `readers` has the reader of each
    message of a stream, by the message's index.
    """

    request: ServedRequest
    model: str
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=seconds_since_1970)
    readers: dict[int, MessageReader] = field(default_factory=dict)

    def _body(self, choices: list[dict[str, Any]], *, is_chunk: bool = True, **more: Any) -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion") if self.request.is_chat else ("cmpl", "text_completion")
        return {
            "id": f"{prefix}-{self.name}", "object": f"{kind}.chunk" if is_chunk and self.request.is_chat else kind,
            "created": self.created, "model": self.model, "choices": choices, "system_fingerprint": None, **more,
        }  # fmt: skip

    def whole(self, outputs: Sequence[RequestOutput], echoes: Sequence[EchoedPrompt], /) -> dict[str, Any]:
        """Returns the body of an answer that is not streamed; echoes: empty unless completions echo their prompt."""
        n = self.request.params.n
        choices = []
        for at, output in enumerate(outputs):
            more: dict[str, Any] = {}
            if output.prompt_logprobs is not None and self.request.has_prompt_logprobs:  # built once for all n
                more["prompt_logprobs"] = [entry and _by_id(entry) for entry in output.prompt_logprobs]
            if self.request.has_token_ids and not self.request.is_chat:
                more["prompt_token_ids"] = output.prompt_token_ids
            echo = echoes[at] if echoes else None
            for each in output.outputs:
                choice = self._choice(at * n + each.index, each, 0 if echo is None else len(echo.text), echo)
                if self.request.is_chat:
                    self._add_message(choice, each)
                choices.append(choice | more)
        more = {"usage": usage(outputs, self.request.message_form), **self._metrics(outputs), **self._warning}
        if self.request.has_token_ids and self.request.is_chat:
            more["prompt_token_ids"] = outputs[0].prompt_token_ids
        return self._body(choices, is_chunk=False, **more)

    @property
    def _warning(self) -> dict[str, Any]:
        return {"metadata": self.request.warning} if self.request.warning else {}

    def _metrics(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        is_asked = self.request.has_draft_metrics
        return {"metrics": {"speculative_decoding": draft_metrics(outputs)}} if is_asked else {}

    def _choice(
        self, index: int, part: CompletionOutput | StreamChunk, offset: int, echo: EchoedPrompt | None
    ) -> dict[str, Any]:
        """Returns what whole answers and streams tell alike of a completion, or of its next part."""
        choice: dict[str, Any] = {
            "index": index, "finish_reason": part.finish_reason, "stop_reason": part.stop_reason,
            "logprobs": self._logprobs(part.logprobs, offset, echo),
        }  # fmt: skip
        if not self.request.is_chat:
            choice["text"] = ("" if echo is None else echo.text) + part.text
        if self.request.has_token_ids:
            choice["token_ids"] = part.token_ids
        return choice

    def _add_message(self, choice: dict[str, Any], completion: CompletionOutput) -> None:
        form, text = self.request.message_form, completion.text
        said = {"content": text} if form is None else whole_message(form, text).message()
        choice["message"] = {"role": "assistant", **said, "refusal": None}
        if "tool_calls" in said:
            choice["finish_reason"] = self._finish_reason(completion.finish_reason)

    def _logprobs(
        self, entries: Sequence[dict[int, Logprob]] | None, offset: int, echo: EchoedPrompt | None
    ) -> dict[str, Any] | None:
        num_top = self.request.num_top_logprobs
        if entries is None or num_top is None:
            return None
        if self.request.is_chat:
            return {"content": token_entries(entries, num_top), "refusal": None}
        told = completion_entries(entries, num_top, offset)
        before = {} if echo is None or echo.entries is None else echo.entries
        return {name: [*before.get(name, ()), *values] for name, values in told.items()}

    def _finish_reason(self, reason: str | None) -> str | None:
        """Returns "tool_calls" for a message with calls; a call of a named tool ends like text, as with OpenAI."""
        form = self.request.message_form
        return "tool_calls" if reason == "stop" and form is not None and form.forced is None else reason

    def _delta(self, index: int, chunk: StreamChunk, choice: dict[str, Any]) -> dict[str, Any]:
        form = self.request.message_form
        if form is None:
            return {"content": chunk.text}
        reader = self.readers.setdefault(index, MessageReader(form))
        parts = reader.push(chunk.text)
        delta = parts.delta()
        if chunk.finish_reason is not None:
            delta = joined(parts, reader.finish()).delta()
            if reader.num_calls:
                choice["finish_reason"] = self._finish_reason(chunk.finish_reason)
        return delta

    def first(self) -> list[dict[str, Any]]:
        """Returns the first chunk of every message; an empty list for completions."""
        if not self.request.is_chat:
            return []
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._body([{"index": index, **begun}], **self._warning) for index in range(self.request.params.n)]

    def part(
        self, index: int, chunk: StreamChunk, echo: EchoedPrompt | None, offset: int, /, **more: Any
    ) -> list[dict[str, Any]]:
        """Returns the chunks for one part of a stream.

        If a call and the end come together, there are two chunks: some clients expect the call first.

        Args:
            echo: The prompt, in the first chunk of a choice that echoes it.
            offset: Characters of the choice before this chunk, prompt included; for `text_offset`.
        """
        choice = self._choice(index, chunk, offset, echo)
        if self.request.is_chat:
            choice["delta"] = self._delta(index, chunk, choice)
        if self.request.has_origins:
            choice["token_origins"] = [
                {"text": each.text, "is_drafted": bool(each.accepted_from), "drafters": list(each.accepted_from)}
                for each in chunk.parts
            ]
        choices, end = [choice], {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
        if end["finish_reason"] is not None and "tool_calls" in choice.get("delta", ()):
            choices.append({"index": index, **end, "logprobs": None, "delta": {}})
            choice.update(finish_reason=None, stop_reason=None)
        return [self._body([each], **more) for each in choices]

    def last(self, outputs: Sequence[RequestOutput]) -> list[dict[str, Any]]:
        """Returns the last chunk of a stream, with usage and metrics; an empty list if neither is sent."""
        more = self._metrics(outputs)
        if self.request.has_usage:
            more["usage"] = usage(outputs, self.request.message_form)
        return [self._body([], **more)] if more else []

    def failed(self, error: ApiError) -> dict[str, Any]:
        """Returns the last chunk of a stream that failed."""
        return error.body


def usage(outputs: Sequence[RequestOutput], form: MessageForm | None) -> dict[str, Any]:
    """Returns `usage`: token counts, with cached prompt tokens, thoughts, and accepted and rejected predictions."""
    prompt = sum(len(output.prompt_token_ids) for output in outputs)
    each_ids = [each.token_ids for output in outputs for each in output.outputs]
    completion = sum(map(len, each_ids))
    thoughts = 0 if form is None else sum(map(form.num_thoughts, each_ids))
    shares = [output.metrics.by_drafter.get("prediction") for output in outputs]
    accepted = sum(share.num_accepted for share in shares if share)
    rejected = sum(share.num_drafted - share.num_accepted for share in shares if share)
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted, "rejected_prediction_tokens": rejected,
            "reasoning_tokens": thoughts,
        },
    }  # fmt: skip


def running_usage(num_prompt: int, num_completion: int) -> dict[str, int]:
    """Returns `usage` with the tokens so far."""
    total = num_prompt + num_completion
    return {"prompt_tokens": num_prompt, "completion_tokens": num_completion, "total_tokens": total}


def draft_metrics(outputs: Sequence[RequestOutput]) -> dict[str, Any] | None:
    """Returns vLLM's figures of speculative decoding; None for several completions, as in vLLM.

    Draft tokens are nodes of trees. Entry k of the histogram counts the passes that accepted k drafted tokens. Under
    synthetic acceptance `num_synthetic_steps` counts the passes with it.
    """
    if len(outputs) != 1 or len(outputs[0].outputs) != 1:
        return None
    metrics: GenerationMetrics = outputs[0].metrics
    deepest = max(metrics.drafted_at_depth, default=0)
    at_least = [metrics.steps, *(metrics.accepted_at_depth[depth] for depth in range(1, deepest + 1)), 0]
    return {
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "draft_acceptance_rate": metrics.tree_utilisation,
        "acceptance_histogram": [more - fewer for more, fewer in pairwise(at_least)],
        "num_spec_steps": metrics.drafted_at_depth[1],
        "num_accepted_draft_tokens": metrics.num_accepted,
        "num_draft_tokens": metrics.num_drafted,
        "num_spec_tokens": deepest,
        **({"num_synthetic_steps": metrics.num_synthetic} if metrics.num_synthetic else {}),
    }


def token_entries(entries: Sequence[dict[int, Logprob]], num_top: int) -> list[dict[str, Any]]:
    """Returns the log-probability of every token of a message, with its `num_top` most probable alternatives."""
    return [
        {**_named(next(iter(entry.values()))), "top_logprobs": [_named(each) for each in _best(entry, num_top)]}
        for entry in entries
    ]


def _named(logprob: Logprob) -> dict[str, Any]:
    text = logprob.decoded_token or ""
    return {"token": text, "logprob": _finite(logprob.logprob), "bytes": list(text.encode())}


def completion_entries(entries: Sequence[dict[int, Logprob]], num_top: int, offset: int) -> dict[str, Any]:
    """Returns the tokens of a completion, their log-probabilities and `num_top` alternatives, in lists of equal length.

    Each entry has its own log-probability first. offset: characters before the first token.
    """
    firsts = [next(iter(entry.values())) for entry in entries]
    tokens = [first.decoded_token or "" for first in firsts]
    return {
        "tokens": tokens,
        "token_logprobs": [_finite(first.logprob) for first in firsts],
        "top_logprobs": [
            {(each.decoded_token or ""): _finite(each.logprob) for each in (*_best(entry, num_top), first)}
            for entry, first in zip(entries, firsts, strict=True)
        ],
        "text_offset": list(accumulate(map(len, tokens[:-1]), initial=offset))[: len(tokens)],
    }


def _best(entry: dict[int, Logprob], num_top: int) -> list[Logprob]:
    return sorted(entry.values(), key=lambda each: each.rank)[:num_top]


def _by_id(entry: dict[int, Logprob]) -> dict[str, Any]:
    return {
        str(token): {"logprob": _finite(each.logprob), "rank": each.rank, "decoded_token": each.decoded_token}
        for token, each in entry.items()
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST)
