"""Exports figures of a running server to Prometheus, under our names and, on request, under vLLM's as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from foretoken.core import results as engine_metrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from foretoken.core.results import RequestOutput
    from foretoken.entrypoints.async_llm import AsyncLLM

_Family = GaugeMetricFamily | CounterMetricFamily
# Upper bounds of the buckets of histograms. Choices: spans that servers have, two or three buckets a decade.
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 50_000)
_PASSES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 12, 16)
_HELP = {
    "num_requests_running": "Sequences that have a slot.",
    "num_requests_waiting": "Requests that wait for a slot.",
    "num_preemptions": "Sequences that gave up their KV rows to others and were read again.",
    "kv_cache_usage_perc": "Share of the KV rows that running sequences fill, 0 to 1.",
    "prompt_tokens": "Prompt tokens of sequences that ran.",
    "generation_tokens": "Tokens written.",
    "prefix_cache_queries": "Prompt tokens that were looked for among the prefixes that slots hold.",
    "prefix_cache_hits": "Those of them that were found, and not read again.",
    "prefix_cache_lost": "Those of them that were found and read again, for want of a state of recurrent layers.",
    "spec_decode_num_drafts": "Trees that were verified, one a sequence and pass.",
    "spec_decode_num_draft_tokens": "Nodes of these trees.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that were accepted, without the target's own one of every pass.",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted drafted tokens by depth in the tree, from 0.",
    "target_passes": "Passes of the target after prompts were read.",
    "synthetic_passes": "Those of them with synthetic acceptance, which writes other texts than the target's.",
    "request_success": "Sequences that ended, by how.",
    "distill_tokens_collected": "Tokens of finished requests that were kept to train the draft model.",
    "distill_tokens_dropped": "Tokens of finished requests that were not kept: the queue was full, or the disk failed.",
    "distill_rounds": "Rounds of training of the draft model.",
    "distill_swaps": "Published draft models that were swapped in.",
    "distill_alpha_before": "Acceptance rate on held-out traffic before the last round, by temperature.",
    "distill_alpha_after": "Acceptance rate on held-out traffic after the last round, by temperature.",
    "distill_weights_age_seconds": "Seconds since the draft model's weights were swapped in or loaded.",
}


class ServerMetrics:
    """Counts requests, and exports the engine's own counts."""

    def __init__(
        self,
        engine: AsyncLLM,
        model: str,
        *,
        has_vllm_names: bool = False,
        name: str = "0",
        more: Callable[[], Sequence[engine_metrics.Metric]] = tuple,
    ) -> None:
        """Starts all counts at zero.

        `has_vllm_names` also shows figures that vLLM has under its names. `more` returns further figures.
        """
        self._engine, self._more = engine, more
        self._labels = {"model_name": model, "engine": name}
        self._prefixes = ("foretoken:", "vllm:") if has_vllm_names else ("foretoken:",)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._to_first = self._histograms("time_to_first_token_seconds", "Seconds to the first token.", _SECONDS)
        self._between = self._histograms("inter_token_latency_seconds", "Seconds between tokens.", _BETWEEN_TOKENS)
        self._latency = self._histograms("e2e_request_latency_seconds", "Seconds of a request.", _SECONDS)
        self._prompt = self._histograms("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._generated = self._histograms("request_generation_tokens", "Tokens written for a request.", _TOKENS)
        self._accepted_length = self._histogram(
            "foretoken:request_acceptance_length", "Tokens a target pass of a request.", _PASSES
        )
        self._drafted = self._counter("drafter_draft_tokens", "Nodes verified, by drafter.", "drafter")
        self._accepted = self._counter("drafter_accepted_tokens", "Tokens accepted, by drafter.", "drafter")
        self._refused = self._counter("http_errors", "Answers that were errors, by status.", "status")
        dropped = self._counter("draft_errors", "Passes whose draft was dropped because the drafter failed.")
        left = self._counter("client_disconnects", "Requests that were ended because the client went away.")
        self._errors, self._disconnects = dropped.labels(**self._labels), left.labels(**self._labels)

    def _counter(self, name: str, text: str, *more: str) -> Counter:
        return Counter(f"foretoken:{name}", text, [*self._labels, *more], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(name, text, self._labels, buckets=buckets, registry=self._registry)
        return made.labels(**self._labels)

    def _histograms(self, name: str, text: str, buckets: Sequence[float]) -> list[Histogram]:
        return [self._histogram(prefix + name, text, buckets) for prefix in self._prefixes]

    def saw_tokens(self, count: int, seconds: float, *, is_first: bool) -> None:
        """Counts the tokens of a chunk; `seconds`: since the request or the chunk before."""
        times = 1 if is_first else count
        for histogram in self._to_first if is_first else self._between:
            for _ in range(times):
                histogram.observe(seconds / times)

    def ended(self, outputs: Sequence[RequestOutput], seconds: float) -> None:
        """Counts a finished request; outputs: one for each of its prompts."""
        counts = (
            (self._latency, seconds),
            (self._prompt, sum(len(output.prompt_token_ids) for output in outputs)),
            (self._generated, sum(len(each.token_ids) for output in outputs for each in output.outputs)),
        )
        for histograms, value in counts:
            for histogram in histograms:
                histogram.observe(value)
        for output in outputs:
            if output.metrics.steps:
                self._accepted_length.observe(output.metrics.mean_acceptance_length)
            self._errors.inc(output.metrics.draft_errors)
            for name, share in output.metrics.by_drafter.items():
                self._drafted.labels(**self._labels, drafter=name).inc(share.num_drafted)
                self._accepted.labels(**self._labels, drafter=name).inc(share.num_accepted)

    def refused(self, status: int) -> None:
        """Counts an error answer."""
        self._refused.labels(**self._labels, status=str(status)).inc()

    def count_disconnect(self) -> None:
        """Counts a client that disconnected before the end of its answer."""
        self._disconnects.inc()

    def page(self) -> bytes:
        """Returns all figures as text; waits for the end of an iteration."""
        page: bytes = generate_latest(self._registry)
        return page

    def describe(self) -> Iterator[Metric]:
        """Returns nothing, to Prometheus' registry: the names are known only at the first export."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's figures, to Prometheus' registry."""
        families: dict[str, _Family] = {}
        for figure in (*self._engine.llm.get_metrics(), *self._more()):
            origin, name = figure.name.split(":", 1)
            for prefix in self._prefixes if origin == "vllm" else ("foretoken:",):
                self._add_figure(families, prefix + name, figure)
        for prefix in self._prefixes:
            name = f"{prefix}num_requests_waiting"
            families.pop(name, None)  # the server's queue replaces the engine's, which is empty here
            self._add(families, GaugeMetricFamily, name, {}, self._engine.num_waiting)
        yield from families.values()

    def _add_figure(self, families: dict[str, _Family], name: str, figure: engine_metrics.Metric) -> None:
        more = {key: value for key, value in figure.labels.items() if key not in self._labels}
        if isinstance(figure, engine_metrics.Vector):
            for position, value in enumerate(figure.values):
                self._add(families, CounterMetricFamily, name, {**more, "position": str(position)}, value)
        elif isinstance(figure, engine_metrics.Counter):
            self._add(families, CounterMetricFamily, name, more, figure.value)
        elif isinstance(figure, engine_metrics.Gauge):
            self._add(families, GaugeMetricFamily, name, more, figure.value)

    def _add(
        self, families: dict[str, _Family], family: type[_Family], name: str, more: dict[str, str], value: float
    ) -> None:
        if name not in families:
            text = _HELP.get(name.split(":", 1)[1], name)
            families[name] = family(name, text, labels=[*self._labels, *more])
        families[name].add_metric([*self._labels.values(), *more.values()], value)
