"""Results of a request, and metrics of a running engine, as in vLLM."""

from __future__ import annotations

import collections
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.records import SequenceStep, StageSeconds, StepRecord

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric; the name is vLLM's ("vllm:generation_tokens") or our own ("foretoken:target_passes")."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter(Metric):
    """A count so far."""

    value: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge(Metric):
    """A value at this moment."""

    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Vector(Metric):
    """Counts so far by position, from 0."""

    values: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShare:
    """Counts of one drafter over some passes.

    Attributes:
        num_asked: Passes before which it was asked for a draft.
        num_drafted: Its verified nodes; a node that two drafters proposed counts for both.
        num_accepted: Accepted tokens among these.
        seconds: Wall-clock seconds of its proposals.
    """

    num_asked: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    def __add__(self, other: DrafterShare) -> DrafterShare:
        return DrafterShare(
            num_asked=self.num_asked + other.num_asked,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            seconds=self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        return f"asked in {self.num_asked} passes, {self.num_accepted} tokens accepted, {self.seconds:.2f} s"


class DrafterShares(dict[str, DrafterShare]):
    """Shares by drafter name, which can be added."""

    @classmethod
    def of_step(cls, step: SequenceStep, record: StepRecord) -> DrafterShares:
        """Returns the shares of one sequence in an iteration; drafters with the same name count together."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for asked in record.asked:
            seconds[asked.name] += asked.seconds
        shares = cls()
        for name, each in seconds.items():
            drafted, accepted = step.drafted_by.get(name, 0), step.accepted_by.get(name, 0)
            shares[name] = DrafterShare(num_asked=1, num_drafted=drafted, num_accepted=accepted, seconds=each)
        return shares

    def __add__(self, other: DrafterShares) -> DrafterShares:
        total = DrafterShares(self)
        for name, share in other.items():
            total[name] = total[name] + share if name in total else share
        return total


@dataclass(slots=True, kw_only=True)
class GenerationMetrics:
    """Counts and seconds of one request, or the sum over several.

    `steps` counts target passes after prefill. The last pass of prefill gives the first token, unless nothing was left
    to read or the prompt was scored. `mean_acceptance_length` (tau) counts the correction or bonus token: the mean
    number of tokens per such pass, 1.0 for plain decoding.

    Attributes:
        steps: Target passes after prefill in which the sequence took part.
        num_prefill_emitted: Output tokens that prefill gave: the first one, and one more after every preemption.
        drafted_at_depth: Passes with a tree that reached depth d, by d (1-based).
        accepted_at_depth: Passes that accepted at least d drafted tokens, by d (1-based).
        accepted_by: Accepted tokens by drafter name.
        by_drafter: Calls, nodes, accepted tokens and seconds of each drafter.
        draft_errors: Passes with a draft that was dropped because the drafter failed.
        num_declined: Passes for which the controller chose not to draft.
        seconds: Wall-clock seconds in draft / verify / accept / commit of these passes, without the prompt tokens'
            share of verify.
        prefill_seconds: Seconds of prefill: the prompt tokens' share of each pass, and the whole of a pass without
            decoding sequences in which prompts ended.
        num_prefix_queries: Prompt tokens that were looked up in the prefix cache.
        num_cached_tokens: Prompt tokens that were found there and not read again.
        num_preemptions: Number of preemptions; after each all tokens were read again.
        lossy_tv: Sum of `StepRecord.lossy_tv`; 0 for lossless rules, NaN where a lossy rule does not know it.
        num_synthetic: Passes with synthetic acceptance, see `StepRecord.is_synthetic`.
        compared_seconds: Seconds of passes without prompt tokens, if the engine had measured plain decoding by then.
        plain_seconds: Seconds that plain decoding takes for the tokens of these passes, by that measurement.
    """

    steps: int = 0
    num_emitted: int = 0
    num_prefill_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at_depth: collections.Counter[int] = field(default_factory=collections.Counter)
    accepted_at_depth: collections.Counter[int] = field(default_factory=collections.Counter)
    accepted_by: collections.Counter[str] = field(default_factory=collections.Counter)
    by_drafter: DrafterShares = field(default_factory=DrafterShares)
    draft_errors: int = 0
    num_declined: int = 0
    seconds: StageSeconds = field(default_factory=StageSeconds)
    prefill_seconds: float = 0.0
    num_prefix_queries: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    lossy_tv: float = 0.0
    num_synthetic: int = 0
    compared_seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass after prefill (tau), the correction or bonus token included."""
        return (self.num_emitted - self.num_prefill_emitted) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of target passes after prefill, for each sequence; 0 without such passes."""
        seconds = self.seconds.total
        return (self.num_emitted - self.num_prefill_emitted) / seconds if seconds else 0.0

    @property
    def speedup(self) -> float | None:
        """Speed divided by that of plain decoding, over the passes of `compared_seconds`; None without such passes."""
        return self.plain_seconds / self.compared_seconds if self.compared_seconds else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """P(accepted at depth d | the tree reached depth d), from depth 1."""
        return [self.accepted_at_depth[d] / n for d, n in sorted(self.drafted_at_depth.items())]

    @property
    def tree_nodes(self) -> float:
        """Drafted nodes per target pass."""
        return self.num_drafted / self.steps if self.steps else 0.0

    @property
    def tree_utilisation(self) -> float:
        """Share of the drafted nodes that was accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def add_step(self, step: SequenceStep, record: StepRecord) -> None:
        """Adds one iteration. Changes this object."""
        self.add_sequence(step)
        if step.ends_prompt:  # drafts of this pass belong to other sequences
            if all(each.ends_prompt for each in record.sequences):
                self.prefill_seconds += record.decode_seconds.total / len(record.sequences)
            return
        self.seconds += record.decode_seconds
        self.lossy_tv += record.lossy_tv
        self.num_synthetic += record.is_synthetic
        if record.asked:
            self.by_drafter += DrafterShares.of_step(step, record)
        self.draft_errors += record.draft_error is not None
        self.num_declined += record.declined is not None
        if record.plain_seconds is not None and not record.num_prompt_tokens:
            self.compared_seconds += record.seconds.total
            self.plain_seconds += step.num_emitted * record.plain_seconds

    def add_sequence(self, step: SequenceStep) -> None:
        """Adds one sequence's part of an iteration, without the time. Changes this object."""
        self.num_emitted += step.num_emitted
        if step.ends_prompt:
            self.num_prefill_emitted += step.num_emitted
            return
        self.steps += 1
        self.num_drafted += step.num_drafted
        self.num_accepted += step.num_accepted
        if step.tree_depth:
            self.drafted_at_depth.update(range(1, step.tree_depth + 1))
            self.accepted_at_depth.update(range(1, step.num_accepted + 1))
            self.accepted_by.update(step.accepted_by)

    @classmethod
    def total(cls, parts: Iterable[GenerationMetrics]) -> GenerationMetrics:
        """Returns the sum over several requests; seconds of shared passes count once for each request."""
        total = cls()
        for part in parts:
            for field_ in fields(cls):
                setattr(total, field_.name, getattr(total, field_.name) + getattr(part, field_.name))
        return total

    def as_dict(self) -> dict[str, object]:
        """Returns a JSON-ready dictionary with the names of the attributes."""
        return {
            "steps": self.steps,
            "num_emitted": self.num_emitted,
            "num_prefill_emitted": self.num_prefill_emitted,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tree_nodes": self.tree_nodes,
            "tree_utilisation": self.tree_utilisation,
            "acceptance_by_depth": self.acceptance_by_depth,
            "drafted_at_depth": [count for _, count in sorted(self.drafted_at_depth.items())],
            "accepted_at_depth": [self.accepted_at_depth[depth] for depth in sorted(self.drafted_at_depth)],
            "accepted_by": dict(self.accepted_by),
            "by_drafter": {name: asdict(share) for name, share in self.by_drafter.items()},
            "draft_errors": self.draft_errors,
            "num_declined": self.num_declined,
            "draft_seconds": self.seconds.draft,
            "verify_seconds": self.seconds.verify,
            "accept_seconds": self.seconds.accept,
            "commit_seconds": self.seconds.commit,
            "prefill_seconds": self.prefill_seconds,
            "num_prefix_queries": self.num_prefix_queries,
            "num_cached_tokens": self.num_cached_tokens,
            "num_preemptions": self.num_preemptions,
            "lossy_tv": None if math.isnan(self.lossy_tv) else self.lossy_tv,
            "num_synthetic": self.num_synthetic,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """Log-probability of a token under the target, before temperature and processors.

    Attributes:
        logprob: Natural logarithm of the probability.
        rank: Rank by probability, from 1; equal tokens share the best rank.
        decoded_token: The token alone as text, or None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: 0..n-1.
        text: Decoded output, without the prompt and without the stop string or stop token.
        token_ids: Output tokens, including the end-of-sequence token if it was generated.
        cumulative_logprob: Sum of the output tokens' log-probabilities, or None without `logprobs`.
        logprobs: For each output token a mapping from token id to `Logprob`: the output token first, then the most
            probable ones, best first. None if not requested.
        finish_reason: "stop", "length", "error" (see `error`), or "abort" (the request was aborted).
        stop_reason: The stop string or token id that ended the text, or None.
        error: The reason for "error": the target's logits were not finite, no token was possible, or decoding failed.
            None otherwise.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None = None

    def finished(self) -> bool:
        """Whether the completion is over; a method, as in vLLM."""
        return self.finish_reason is not None


class TextPart(NamedTuple):
    """The certain text of one token, and the names of the drafters that proposed the token, if any.

    If several tokens make one character, the last token has the character.
    """

    text: str
    accepted_from: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChunk:
    """New text of one completion.

    Attributes:
        request_id: Unique within the `LLM`.
        prompt_index: Position of the prompt in the call.
        index: Index among its n completions.
        text: Text that became certain since the last chunk.
        token_ids: Tokens generated since the last chunk.
        finish_reason: Set in the last chunk, with `stop_reason` and `error`; see `CompletionOutput`.
        stop_reason: The stop string or token id that ended the text, or None.
        logprobs: One entry for each of its tokens, see `CompletionOutput`; None if not requested.
        error: The reason for "error", or None.
        is_drafted: For each of its tokens whether it was an accepted draft.
        parts: Its text by token; joined they are `text`.
        prompt_logprobs: In the first chunk of the first completion, see `RequestOutput`. None in all others, if not
            requested, and if the prompt was not read to its end.
    """

    request_id: str
    prompt_index: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    error: str | None = None
    is_drafted: Sequence[bool] = ()
    parts: Sequence[TextPart] = ()
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The result of one prompt.

    Attributes:
        request_id: Unique within the `LLM`.
        prompt: The prompt as text; None for a prompt of token ids.
        prompt_token_ids: The prompt as token ids.
        outputs: n completions.
        metrics: Counts and seconds over all n completions.
        prompt_logprobs: For each prompt token a mapping as in `CompletionOutput.logprobs`; None for the first token.
            None as a whole if not requested.
        num_cached_tokens: Prompt tokens of the first completion that the prefix cache held; None before it began.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: Sequence[CompletionOutput]
    metrics: GenerationMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether all completions are over."""
        return all(output.finish_reason is not None for output in self.outputs)
