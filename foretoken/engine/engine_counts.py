"""Counts of an engine over all requests."""

from __future__ import annotations

from collections import Counter as Counts
from typing import TYPE_CHECKING

from foretoken.core.results import Counter, Gauge, Metric, Vector

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.engine.sequence import Sequence


class EngineCounts:
    """Counts of one engine.

    `num_drafts` counts trees, one for each sequence and pass. `num_draft_tokens` counts verified nodes, not depths.
    `num_accepted_tokens` excludes the target's own token of every pass, as in vLLM.
    """

    def __init__(self) -> None:
        self._counts: Counts[str] = Counts()
        self._ended: Counts[str] = Counts()
        self._accepted_at: list[int] = []  # by position from 0

    def begin(self, sequence: Sequence) -> None:
        """Counts a sequence that begins to run."""
        self._counts["vllm:prompt_tokens"] += sequence.num_prompt
        self._counts["vllm:prefix_cache_queries"] += sequence.metrics.num_prefix_queries
        self._counts["vllm:prefix_cache_hits"] += sequence.metrics.num_cached_tokens

    def add(self, record: StepRecord) -> None:
        """Counts an iteration."""
        self._counts["foretoken:target_passes"] += not all(step.ends_prompt for step in record.sequences)
        for step in record.sequences:
            self._counts["vllm:generation_tokens"] += step.num_emitted
            self._counts["vllm:spec_decode_num_drafts"] += step.num_drafted > 0
            self._counts["vllm:spec_decode_num_draft_tokens"] += step.num_drafted
            self._counts["vllm:spec_decode_num_accepted_tokens"] += step.num_accepted
            self._accepted_at += [0] * (step.tree_depth - len(self._accepted_at))
            for position in range(step.num_accepted):
                self._accepted_at[position] += 1

    def preempt(self) -> None:
        """Counts a preempted sequence."""
        self._counts["vllm:num_preemptions"] += 1

    def end(self, sequence: Sequence) -> None:
        """Counts a finished sequence."""
        self._ended[sequence.finish_reason or ""] += 1

    def metrics(
        self, *, model_name: str, num_running: int, num_waiting: int, kv_usage: float, num_out_of_memory: int
    ) -> list[Metric]:
        """Returns all figures; `kv_usage` is the share of all KV rows that running sequences fill, 0 to 1."""
        labels = {"model_name": model_name, "engine": "0"}
        names = (
            "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:prefix_cache_queries", "vllm:prefix_cache_hits",
            "vllm:num_preemptions", "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens", "foretoken:target_passes",
        )  # fmt: skip
        return [
            Gauge(name="vllm:num_requests_running", labels=labels, value=num_running),
            Gauge(name="vllm:num_requests_waiting", labels=labels, value=num_waiting),
            Gauge(name="vllm:kv_cache_usage_perc", labels=labels, value=kv_usage),
            *(Counter(name=name, labels=labels, value=self._counts[name]) for name in names),
            Counter(name="foretoken:out_of_memory", labels=labels, value=num_out_of_memory),
            Vector(name="vllm:spec_decode_num_accepted_tokens_per_pos", labels=labels, values=list(self._accepted_at)),
            *(
                Counter(name="vllm:request_success", labels={**labels, "finished_reason": reason}, value=count)
                for reason, count in sorted(self._ended.items())
            ),
        ]
