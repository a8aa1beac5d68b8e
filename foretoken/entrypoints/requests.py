"""Turns prompts and sampling parameters into checked sequences for the engine, and keeps results for readers."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import check_text, checked_token_ids, shown
from foretoken.core.errors import ForetokenError, RequestError, described
from foretoken.core.records import GenerationMetrics
from foretoken.core.results import RequestOutput, StreamChunk
from foretoken.core.sampling_params import MOST_BAD_WORD_TOKENS, RequestOutputKind, SamplingParams, bounded_bad_words
from foretoken.engine.sequence import Client, Sequence
from foretoken.grammars.compiling import Grammars
from foretoken.sampling.batch import SamplingRequest
from foretoken.sampling.noise import derive_seed
from foretoken.text.codec import Codec
from foretoken.text.prompts import ChatFormat, PromptReader, ReadPrompt, chat_prompts, split_prompts

if TYPE_CHECKING:
    from foretoken.runner.runner import Runner


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt with its n completions in the engine; prompt_text: None for a prompt of token ids."""

    request_id: str
    prompt_text: str | None
    sequences: Seq[Sequence]

    @property
    def is_over(self) -> bool:
        """Whether all completions are over."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    @property
    def has_begun(self) -> bool:
        """Whether any completion has or had a slot, or is over."""
        return any(s.has_begun or s.finish_reason is not None for s in self.sequences)

    @property
    def client(self) -> Client:
        """The client that sent it."""
        return self.sequences[0].client

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens."""
        return self.sequences[0].num_prompt

    def check_new_parts(self, call: str) -> None:
        """Raises `RequestError` if a call that yields new parts gets another `output_kind`."""
        kind = self.sequences[0].params.output_kind
        if kind not in (None, RequestOutputKind.DELTA):
            raise RequestError(
                f"output_kind is {kind.name}, but {call} gives new parts. Expected DELTA or None. Leave it out, or use "
                "generate."
            )

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt."""
        return self.sequences[0].tokens[: self.num_prompt]

    def output(self) -> RequestOutput:
        """Returns the result so far."""
        outputs = [sequence.output() for sequence in self.sequences]
        return replace(self.summary(), outputs=outputs, prompt_logprobs=self.sequences[0].prompt_logprobs())

    def summary(self) -> RequestOutput:
        """Returns the result without completions and log-probabilities, which grow with the text."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt_text,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[],
            metrics=GenerationMetrics.total(sequence.metrics for sequence in self.sequences),
            num_cached_tokens=self.sequences[0].metrics.num_cached_tokens if self.has_begun else None,
        )


class QueuedRequest:
    """A request, with the results that its readers have not taken yet.

    The engine's thread fills it, readers in any event loop empty it. Operations on the shared deques are atomic:
    neither side takes a lock or waits for the other.

    Attributes:
        chunks: Unread chunks.
        output: The whole result, once the request is over.
        error: The reason if there will be no result.
        is_read: Whether anybody reads chunks; if not, chunks are made only at the end.
        has_summaries: Whether a summary is made with chunks.
        summary: The request when chunks were last made, without its completions.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.chunks: deque[StreamChunk] = deque()
        self.output: RequestOutput | None = None
        self.error: ForetokenError | None = None
        self.is_read = self.has_summaries = False
        self.summary: RequestOutput | None = None
        self._num_made = [0] * len(request.sequences)  # for each completion the tokens that were put into chunks
        self._is_told = [False] * len(request.sequences)  # for each completion whether its last chunk was made
        self._readers: deque[asyncio.Future[None]] = deque()

    @property
    def is_complete(self) -> bool:
        """Whether nothing more will come."""
        return self.output is not None or self.error is not None

    @property
    def num_generated(self) -> int:
        """Output tokens so far, over all completions."""
        return sum(len(s.tokens) - s.num_prompt for s in self.request.sequences)

    def fill(self) -> str | None:
        """Makes chunks, and the whole result once the request is over; returns the description of an error, or None."""
        try:
            self._make_chunks()
            if self.request.is_over:
                self.output = self.request.output()
        except Exception as err:  # noqa: BLE001 - a tokenizer that fails must cost its request alone
            return described(err)
        return None

    def fill_at_last(self) -> None:
        """Gives readers the result of a finished request, or the reason why there is none."""
        error = self.fill()
        if error is not None:
            name = self.request.request_id
            self.error = ForetokenError(f"the result of request '{name}' cannot be made: {error}.")

    def _make_chunks(self) -> None:
        """Makes chunks of new tokens unless the reader still has unread ones; always makes the last chunk."""
        is_open, chunks = self.is_read and not self.chunks, []
        for sequence, made in zip(self.request.sequences, self._num_made, strict=True):
            index, is_over = sequence.index, sequence.finish_reason is not None
            sequence.tell_scores()
            count = len(sequence.tokens) - sequence.num_prompt
            if self._is_told[index] or not (is_over or (is_open and count > made)):
                continue
            chunks.append(sequence.chunk(0, made))
            self._num_made[index], self._is_told[index] = count, is_over
        if chunks and self.has_summaries:
            self.summary = self.request.summary()  # before the chunks, which wake the reader
        self.chunks.extend(chunks)

    def wake(self, *, is_forked: bool = False) -> None:
        """Wakes all readers; in a forked child directly: its event loops share wake-up channels with the parent."""
        while self._readers:
            reader = self._readers.popleft()
            with suppress(RuntimeError):  # the loop is closed: the reader is gone
                if is_forked:
                    _resolve(reader)
                else:
                    reader.get_loop().call_soon_threadsafe(_resolve, reader)

    async def wait(self, is_there: Callable[[], bool]) -> None:
        """Waits until `is_there()` is true."""
        while not is_there():
            reader = asyncio.get_running_loop().create_future()
            self._readers.append(reader)
            if not is_there():  # checked again: it may have come before the reader was in the queue
                await reader


def _resolve(reader: asyncio.Future[None]) -> None:
    if not reader.done():
        reader.set_result(None)


class RequestReader:
    """Makes requests for a target."""

    def __init__(
        self,
        target: Runner,
        tokenizer: Any,
        seed: int | None,
        defaults: Mapping[str, Any],
        *,
        has_target_text: bool = True,
    ) -> None:
        """Makes a reader.

        Args:
            target: Runs the requests.
            tokenizer: The target's, or None.
            seed: For requests without a seed; None for random ones.
            defaults: Fields of `SamplingParams`.
            has_target_text: False for synthetic acceptance: requests that promise anything of the text are refused.
        """
        self._has_target_text = has_target_text
        self._tokenizer, self._defaults = tokenizer, defaults
        self._target, self._codec = target, None if tokenizer is None else Codec(tokenizer, target.vocab_size)
        self._grammars = Grammars(tokenizer, target.vocab_size, target.model.eos_ids)
        self._prompts = PromptReader(self._codec, target.vocab_size, target.context_len)
        self._is_seeded, self._seeds = seed is not None, random.Random(seed)
        self._ids = itertools.count()

    def chats(self, messages: Any, form: ChatFormat) -> list[dict[str, Any]]:
        """Returns the prompts of conversations, see `chat_prompts`; raises `RequestError` for invalid ones."""
        return chat_prompts(messages, self._tokenizer, self._codec, form, self._target.context_len)

    def encode(self, text: Any, *, add_special_tokens: bool = True, most_tokens: int | None = None) -> list[int]:
        """Returns the token ids of text; see `LLM.encode`."""
        if self._codec is None:
            raise RequestError("the model has no tokenizer. Pass token ids.")
        check_text("the text", text)
        if most_tokens is not None:
            self._codec.check_length(text, "the text", most_tokens, "the context length")
        return self._codec.encode(text, "the text", add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Any) -> str:
        """Returns the text of token ids, special tokens included; raises `RequestError` for ids without a token."""
        if self._codec is None:
            raise RequestError("the model has no tokenizer to decode token ids.")
        return self._codec.decode(checked_token_ids(token_ids, self._target.vocab_size, "the token ids"))

    def read(self, prompts: Any, sampling_params: Any) -> list[Request]:
        """Returns a checked request for each prompt; `sampling_params` are one for all prompts, or one for each.

        Raises `RequestError` when a prompt cannot be served, or the numbers of parameters and prompts differ.
        """
        items = split_prompts(prompts)
        each = self._params_for_each(sampling_params, len(items))
        checked = [self._checked_prompt(i, item) for i, item in enumerate(items)]
        return [self._request(*parts, self.new_id()) for parts in zip(checked, each, strict=True)]

    def read_one(self, prompt: Any, sampling_params: Any, request_id: str) -> Request:
        """Returns one checked request for one prompt; raises `RequestError` as `read` does, and for several prompts."""
        items = split_prompts(prompt)
        if len(items) != 1:
            raise RequestError(f"there are {len(items)} prompts. Expected one. Submit a request for each.")
        (params,) = self._params_for_each(sampling_params, 1)
        return self._request(self._checked_prompt(0, items[0]), params, request_id)

    def new_id(self) -> str:
        """Returns a new request id."""
        return str(next(self._ids))

    def _checked_prompt(self, index: int, prompt: Any) -> ReadPrompt:
        read, limit = self._prompts.read_prompt(prompt), self._target.context_len
        if len(read.token_ids) >= limit:
            raise RequestError(
                f"prompt {index} has {len(read.token_ids)} tokens. Expected at most {limit - 1}, one less than the "
                "context length. Shorten it."
            )
        return read

    def _request(self, prompt: ReadPrompt, params: SamplingParams, request_id: str) -> Request:
        vocab_size, limit = self._target.vocab_size, self._target.context_len
        if not self._has_target_text:
            _check_promises_nothing(params)
        if params.stop_strings and self._codec is None:
            raise RequestError("stop holds text but the model has no tokenizer. Use stop_token_ids.")
        named = checked_token_ids(
            [*params.logit_bias, *params.stop_token_ids], vocab_size, "logit_bias or stop_token_ids"
        )
        eos_ids = list(self._target.model.eos_ids)
        bad_words = self._bad_words(params)
        grammar = None if params.structured_outputs is None else self._grammars.state_of(params)
        checked_token_ids(params.allowed_token_ids or (), vocab_size, "allowed_token_ids")
        seed = self._seeds.getrandbits(63) if params.seed is None else int(params.seed)
        sequences = [
            Sequence(
                request_id=request_id,
                index=index,
                prompt=prompt.token_ids,
                sampling=SamplingRequest(
                    params=params,
                    seed=derive_seed(seed, index),
                    terminators=[*eos_ids, *named[len(params.logit_bias) :]],
                    bad_words=bad_words,
                ),
                is_seeded=params.seed is not None or self._is_seeded,
                eos_ids=eos_ids,
                max_len=limit if params.max_tokens is None else min(limit, len(prompt.token_ids) + params.max_tokens),
                codec=self._codec,
                prediction=prompt.prediction,
                cache_salt=prompt.cache_salt,
                grammar=grammar,
                max_nodes=prompt.max_nodes,
            )
            for index in range(params.n)
        ]
        return Request(request_id=request_id, prompt_text=prompt.text, sequences=sequences)

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        """Returns forbidden sequences of token ids; text is forbidden with and without a space before it."""
        spelled = (
            each for word in params.bad_words for each in (_spellings(word) if isinstance(word, str) else [word])
        )
        return bounded_bad_words(map(self._bad_word, spelled))

    def _bad_word(self, word: str | Seq[int]) -> list[int]:
        if not isinstance(word, str):
            return checked_token_ids(word, self._target.vocab_size, "bad_words")
        if self._codec is None:
            raise RequestError("bad_words holds text but the model has no tokenizer. Pass token ids.")
        check_text("a word of bad_words", word)
        self._codec.check_length(word, "a word of bad_words", MOST_BAD_WORD_TOKENS, "for one word")
        ids = self._codec.encode(word, "bad_words", add_special_tokens=False)
        if not ids:
            raise RequestError(f"the tokenizer has no token for {shown(word)} of bad_words. Pass token ids.")
        return ids

    def default_params(self) -> SamplingParams:
        """Returns the parameters of a request without parameters."""
        return SamplingParams(**self._defaults)

    def _params_for_each(self, given: Any, count: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [self.default_params() if given is None else given.clone()] * count
        if not isinstance(given, Seq) or isinstance(given, str | bytes):
            raise RequestError(f"sampling_params is {shown(given)}. Expected SamplingParams, or one for each prompt.")
        if len(given) != count:
            raise RequestError(f"{count} prompts came with {len(given)} sampling parameters. Expected as many.")
        for params in given:
            if params is not None and not isinstance(params, SamplingParams):
                raise RequestError(f"an entry of sampling_params is {shown(params)}. Expected SamplingParams or None.")
        return [self.default_params() if params is None else params.clone() for params in given]


def _check_promises_nothing(params: SamplingParams) -> None:
    names = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens")
    promise = next((name for name in names if getattr(params, name)), None)
    if promise is not None:
        raise RequestError(
            f"{promise} cannot be kept: acceptance is synthetic, and texts are not the target's. Leave {promise} out, "
            "or run without rejection_sample_method 'synthetic'."
        )


def _spellings(word: str) -> list[str]:
    return [word] if word.isspace() else [word.lstrip(), f" {word.lstrip()}"]
