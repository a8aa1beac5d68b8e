"""One sequence while it is decoded; the sampling state of all, by slot; failures that end one sequence alone."""

import logging
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.core.errors import RequestError, described, one_line
from foretoken.core.records import GenerationMetrics, SequenceStep
from foretoken.core.results import CompletionOutput, Logprob, StreamChunk, TextPart
from foretoken.sampling.batch import History, HistoryTable, SamplingBatch, SamplingRequest
from foretoken.sampling.node_scores import GrammarMask, GrammarState
from foretoken.text.codec import Codec, Detokenizer, StopStrings

Client = tuple[Hashable, ...]
"""A client, and perhaps a part of its requests; empty for calls that share nothing."""

NOT_FOLLOWED = "the grammar cannot be followed any further"


class TokenScores(NamedTuple):
    """Log-probabilities at one output token, its rank from 1, and the most probable tokens, best first."""

    token: int
    logprob: float
    rank: int
    top: dict[int, float]


class Sequence:
    """State of one completion.

    Attributes:
        index: Index among the request's n completions.
        sampling: Parameters resolved against the tokenizer.
        params: Parameters of the request, from `sampling`.
        is_seeded: Whether the request gave a seed.
        tokens: Prompt and output; the last token is the root.
        num_cached: Filled KV rows of the target, a reused prefix included; `len(tokens) - 1` after prefill.
        slot: Cache slot while running, else None.
        has_begun: Whether the sequence ever had a slot.
        accepted_from: For each output token the names of the drafters that proposed it; empty for the target's own.
        scores: Log-probabilities of output tokens, if requested.
        prompt_scores: Log-probabilities of the cached prompt tokens after the first, if requested.
        prediction: Token ids that the output probably repeats in part, for drafters; None for none.
        cache_salt: See `foretoken.drafters.base.DraftRequest`.
        grammar: State of the grammar after the output; None without a grammar.
        max_nodes: Cap on the nodes of a tree, root included; None for no cap.
        client: The client, for sharing slots among clients; empty for no client.
        cuts: Prompt tokens behind which a chunk of the prompt ends: recurrent layers then keep the state before the
            last of them, at which other texts begin.
    """

    def __init__(  # noqa: PLR0913 - facts of a completion, each by its name
        self,
        *,
        request_id: str,
        index: int,
        prompt: Seq[int],
        sampling: SamplingRequest,
        is_seeded: bool,
        eos_ids: Seq[int],
        max_len: int,
        codec: Codec | None = None,
        prediction: Seq[int] | None = None,
        cache_salt: str | None = None,
        grammar: GrammarState | None = None,
        max_nodes: int | None = None,
    ) -> None:
        """Begins a sequence that may grow to `max_len` tokens, prompt included."""
        self.params = params = sampling.params
        self.prediction, self.cache_salt = prediction, cache_salt
        self.grammar, self.max_nodes = grammar, max_nodes
        self.request_id, self.index, self.sampling, self.is_seeded = request_id, index, sampling, is_seeded
        self.tokens, self.num_prompt, self.num_cached = list(prompt), len(prompt), 0
        self.slot: int | None = None
        self.client: Client = ()
        self.cuts = set[int]()
        self.has_begun = False
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None
        self.metrics = GenerationMetrics()
        self.accepted_from: list[tuple[str, ...]] = []
        self.scores: list[TokenScores] = []
        self.prompt_scores: list[TokenScores] = []
        self._told: list[dict[int, Logprob]] = []
        self._told_of_prompt: list[dict[int, Logprob]] = []
        self._max_len, self._codec = max_len, codec
        self._eos_ids = set() if params.ignore_eos else set(eos_ids)
        self._stop_ids = self._eos_ids | set(params.stop_token_ids)
        self._detokenizer = (
            None if codec is None else Detokenizer(codec, prompt, skip_special_tokens=params.skip_special_tokens)
        )
        self._stops = StopStrings(params.stop_strings, keep=params.include_stop_str_in_output)
        self._shown = 0
        self._unread: list[int] = []  # tokens without text yet

    @property
    def output_ids(self) -> list[int]:
        """Output tokens."""
        return self.tokens[self.num_prompt :]

    @property
    def wants_prompt_scores(self) -> bool:
        """Whether prompt tokens must still be scored; only the first of several completions of a prompt scores them."""
        return self.params.prompt_logprobs is not None and self.index == 0 and not self.has_prompt_scores

    @property
    def has_prompt_scores(self) -> bool:
        """Whether all prompt tokens but the first are scored."""
        return len(self.prompt_scores) == self.num_prompt - 1

    @property
    def remaining(self) -> int:
        """Number of tokens that the sequence may still emit."""
        return self._max_len - len(self.tokens)

    @property
    def text(self) -> str:
        """Output text so far."""
        self._read()
        return "" if self._detokenizer is None else self._detokenizer.text

    def emit(self, tokens: Seq[int]) -> int:
        """Appends accepted tokens and the correction or bonus token until one ends the sequence; returns how many."""
        for count, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            if token in self._stop_ids or self.grammar is not None or not self._stops.is_empty:
                self._check_stop(token)
            elif self._detokenizer is not None:
                self._unread.append(token)
            if self.finish_reason is None and len(self.tokens) >= self._max_len:
                self._finish("length", None)
            if self.finish_reason is not None:
                return count
        return len(tokens)

    def until_stop(self, path: list[int], tokens: Seq[int]) -> list[int]:
        """Returns the nodes of an accepted path before the token that ends the text: the cached text ends there."""
        end = next((at for at, token in enumerate(tokens) if token in self._stop_ids), len(tokens))
        if path and self._detokenizer is not None and not self._stops.is_empty:
            ahead = self._detokenizer.copy()
            with suppress(RequestError):  # `emit` ends the sequence with it
                for at, token in enumerate(tokens[:end]):
                    if (new := ahead.push(token)) and self._stops.find(ahead.text, len(new)) is not None:
                        return path[:at]
        return path[:end]

    def credit(self, step: SequenceStep) -> None:
        """Records who proposed the tokens that an iteration appended."""
        self.accepted_from += step.accepted_from
        self.accepted_from += [()] * (len(step.tokens) - len(step.accepted_from))

    def take_new_text(self) -> str:
        """Returns text that has become certain since the last call, without text that a stop string could still cut."""
        text = self.text
        end = len(text) if self.finish_reason is not None else self._stops.showable(text)
        new = text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def preempt(self) -> None:
        """Frees the slot. Another slot reads the tokens that are in no cached prefix again."""
        self.slot, self.num_cached = None, 0
        self.metrics.num_preemptions += 1
        if not self.has_prompt_scores:
            self.prompt_scores, self._told_of_prompt = [], []

    def abort(self) -> None:
        """Ends the sequence from outside, with `finish_reason` "abort"."""
        self._finish("abort", None)

    def fail(self, error: str) -> None:
        """Ends the sequence with an error, in whole sentences; keeps its text if new tokens cannot be decoded."""
        self.finish_reason, self.stop_reason, self.error = "error", None, error
        try:
            self._finish("error", None)
        except Exception as err:  # noqa: BLE001 - the tokenizer itself may be what failed
            self._unread = []
            self.error = f"{error} Its last tokens could not be decoded: {described(err)}."
        self.finish_reason, self.stop_reason = "error", None  # `_finish` may have found a stop string in held-back text

    def output(self) -> CompletionOutput:
        """Returns the result so far."""
        self.tell_scores()
        scores = None if self.params.logprobs is None else self.scores[: len(self.output_ids)]
        return CompletionOutput(
            index=self.index,
            text=self.text,
            token_ids=self.output_ids,
            cumulative_logprob=None if scores is None else sum(score.logprob for score in scores),
            logprobs=None if scores is None else self._told[: len(scores)],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Returns the log-probabilities of the scored prompt tokens; None if not requested."""
        self.tell_scores()
        return None if self.params.prompt_logprobs is None else [None, *self._told_of_prompt]

    def tell_scores(self) -> None:
        """Makes log-probabilities for callers from new scores; one call an iteration spreads this slow work."""
        for scores, told in ((self.scores, self._told), (self.prompt_scores, self._told_of_prompt)):
            told.extend(map(self._logprobs, scores[len(told) :]))

    def chunk(self, prompt_index: int, given: int) -> StreamChunk:
        """Returns the tokens after the first `given` output tokens, and the text that has become certain."""
        self.tell_scores()
        token_ids = self.output_ids[given:]
        begin, text = self._shown, self.take_new_text()
        told = None if self.params.logprobs is None else self._told[given : given + len(token_ids)]
        return StreamChunk(
            request_id=self.request_id,
            prompt_index=prompt_index,
            index=self.index,
            text=text,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=told,
            error=self.error,
            is_drafted=[bool(origin) for origin in self.accepted_from[given : given + len(token_ids)]],
            parts=self._parts(begin, text),
            prompt_logprobs=None if given or self.index or not self.has_prompt_scores else self.prompt_logprobs(),
        )

    def _parts(self, begin: int, text: str) -> list[TextPart]:
        if self._detokenizer is None or not text:
            return []
        ends, parts, at = self._detokenizer.ends, [], 0
        last = len(ends) - 1  # held-back text belongs to the last token
        for token in range(min(bisect_right(ends, begin), last), last + 1):
            end = len(text) if token == last else min(ends[token] - begin, len(text))
            if end > at:
                parts.append(TextPart(text[at:end], self.accepted_from[token]))
            at = end
        return parts

    def _logprobs(self, scores: TokenScores) -> dict[int, Logprob]:
        own = {scores.token: (scores.logprob, scores.rank)}  # the first entry, also where it is among the best
        ranked = {token: (value, rank) for rank, (token, value) in enumerate(scores.top.items(), start=1)}
        return {
            token: Logprob(logprob=value, rank=rank, decoded_token=self._decoded(token))
            for token, (value, rank) in (own | ranked | own).items()
        }

    def _decoded(self, token: int) -> str | None:
        return None if self._codec is None else self._codec.alone(token, skip_special_tokens=False)

    def _check_stop(self, token: int) -> None:
        is_stop_id = token in self._stop_ids
        is_hidden = is_stop_id and not self.params.include_stop_str_in_output
        new_text = ""
        if self._detokenizer is not None and not is_hidden:
            if self._stops.is_empty:
                self._unread.append(token)
            else:
                new_text = self._detokenizer.push(token)
        if is_stop_id:
            self._finish("stop", None if token in self._eos_ids else token)
            return
        if new_text and self._cut_at_stop_string(len(new_text)):
            return
        if self.grammar is not None:
            self._follow_grammar(self.grammar, token)

    def _follow_grammar(self, grammar: GrammarState, token: int) -> None:
        following = self.grammar = grammar.after(token)
        if following is None:
            raise RuntimeError(f"token {token} was generated against the grammar")
        if following.error is not None:
            self.fail(f"{NOT_FOLLOWED}: {one_line(ValueError(following.error))}.")
        elif following.is_over:
            self._finish("stop", None)

    def _read(self) -> None:
        if self._unread and self._detokenizer is not None:
            self._detokenizer.push_all(self._unread)
            self._unread = []

    def _cut_at_stop_string(self, num_new: int) -> bool:
        found = self._stops.find(self.text, num_new)
        if found is None or self._detokenizer is None:
            return False
        stop, end = found
        self.finish_reason, self.stop_reason = "stop", stop
        self._detokenizer.text = self._detokenizer.text[:end]
        return True

    def _finish(self, reason: str, stop: int | str | None) -> None:
        """Ends the sequence and its text; held-back bytes may complete a stop string."""
        self.finish_reason, self.stop_reason = reason, stop
        if self._detokenizer is not None:
            self._read()
            held_back = self._detokenizer.flush()
            if held_back:
                self._cut_at_stop_string(len(held_back))


def slot_of(sequence: Sequence) -> int:
    """Returns the slot of a running sequence."""
    if sequence.slot is None:
        raise RuntimeError(f"request {sequence.request_id} has no slot: only running sequences are decoded")
    return sequence.slot


T = TypeVar("T")
_log = logging.getLogger(__name__)


def contained(sequence: Sequence, work: Callable[..., T], *arguments: Any) -> T | None:
    """Calls `work(sequence, *arguments)` and returns its result; an error ends that sequence alone and returns None."""
    try:
        return work(sequence, *arguments)
    except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
        fail(sequence, err)
        return None


def fail(sequence: Sequence, error: Exception) -> None:
    """Ends a sequence with an error, and logs it."""
    sequence.fail(f"decoding failed: {described(error)}.")
    _log.warning("request %s failed and was ended; others go on: %s", sequence.request_id, sequence.error)
    _log.debug("where request %s failed", sequence.request_id, exc_info=error)


def token_scores(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenScores]:
    """Returns log-probabilities at K tokens, by (K, V) logits, and of the `count` best; one transfer to the host."""
    log_probs = logits.log_softmax(1)
    top = log_probs.topk(min(count, logits.shape[1]), dim=1)
    chosen = log_probs.gather(1, torch.tensor(tokens, dtype=torch.int64, device=logits.device).unsqueeze(1))
    ranks = (log_probs > chosen).sum(1) + 1
    return [
        TokenScores(token=token, logprob=value, rank=rank, top=dict(zip(ids, values, strict=True)))
        for token, value, rank, ids, values in zip(
            tokens, chosen[:, 0].tolist(), ranks.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
        )
    ]


_MOST_FAILURES = 3  # within `_WATCHED_SECONDS`; a choice: other programs may cause one failure
_WATCHED_SECONDS = 60.0  # a choice, see `_MOST_FAILURES`
_OFF_SECONDS = 60.0  # a choice: the speed-up of a minute against passes that fail again


class MemoryPressure:
    """Counts passes that ran out of memory; after three within a minute, drafting is off for a minute."""

    def __init__(self, device: torch.device, *, now: Callable[[], float] = time.monotonic) -> None:
        """Starts without failures; `device` is the target's, `now` a monotonic clock in seconds."""
        self.num_failures = 0
        self._device, self._now = device, now
        self._recent: deque[float] = deque(maxlen=_MOST_FAILURES)
        self._off_until = float("-inf")

    @property
    def allows_drafts(self) -> bool:
        """Whether drafting is on."""
        return self._now() >= self._off_until

    def note_failure(self) -> None:
        """Counts a failed pass. Call it when nothing refers to the tensors of the pass any more."""
        self.num_failures += 1
        if has_cuda_runtime(self._device):
            torch.cuda.empty_cache()
        now = self._now()
        self._recent.append(now)
        if len(self._recent) == _MOST_FAILURES and now - self._recent[0] <= _WATCHED_SECONDS:
            self._off_until = now + _OFF_SECONDS
            self._recent.clear()
            _log.warning(
                "memory did not hold %d passes within %.0f seconds: nothing is drafted for %.0f seconds. Lower "
                "max_num_seqs, max_model_len or the nodes of a tree.", _MOST_FAILURES, _WATCHED_SECONDS, _OFF_SECONDS,
            )  # fmt: skip


class SamplingState:
    """Tensors of the sequences in slots, kept between iterations: a `table` of tokens that processors read."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.table = HistoryTable(num_slots, vocab_size, device)
        self._vocab_size, self._device = vocab_size, device
        self._sequences: list[Sequence] = []  # those of `_batch`
        self._batch: SamplingBatch | None = None
        self.has_grammars = False

    def batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Returns the parameters as tensors; rebuilds them only when the batch changes."""
        if self._batch is None or self._sequences != sequences:
            self._batch = None  # in case `build` raises
            self._batch = SamplingBatch.build([s.sampling for s in sequences], self._vocab_size, self._device)
            self._sequences, self.has_grammars = list(sequences), any(s.grammar is not None for s in sequences)
        return self._batch

    def masked(self, batch: SamplingBatch) -> SamplingBatch:
        """Returns the last `batch` with the present masks of its sequences' grammars."""
        if not self.has_grammars:
            return batch
        mask = GrammarMask([s.grammar for s in self._sequences])
        return replace(batch, processors=(mask, *batch.processors))

    def histories(self, sequences: list[Sequence], batch: SamplingBatch) -> History | None:
        """Returns the tokens that processors of a batch read; None without processors."""
        if not batch.processors:
            return None
        return self.table.view(
            [slot_of(s) for s in sequences], [s.tokens for s in sequences], [s.num_prompt for s in sequences],
            batch.tail_len,
        )  # fmt: skip
