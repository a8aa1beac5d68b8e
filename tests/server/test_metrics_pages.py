"""Figures of several servers on one page, read back by Prometheus' own parser."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("ray.serve", reason="needs the extra [ray]")

from foretoken.server.ray_forwarding import merged_pages


def page(engine: str, count: int, reason: str) -> str:
    registry = CollectorRegistry()
    Counter("requests", "How many.", ["engine", "reason"], registry=registry).labels(engine, reason).inc(count)
    Histogram("seconds", "How long.", ["engine"], registry=registry).labels(engine).observe(count)
    return generate_latest(registry).decode()


def test_every_family_stands_once_with_the_samples_of_all() -> None:
    merged = merged_pages([page("a", 2, "stop"), page("b", 3, "length")])
    families = {family.name: family for family in text_string_to_metric_families(merged)}
    assert merged.count("# TYPE requests_total ") == merged.count("# TYPE seconds ") == 1
    told = {sample.labels["engine"]: sample.value for sample in families["requests"].samples if "total" in sample.name}
    assert told == {"a": 2, "b": 3}
    sums = {each.labels["engine"]: each.value for each in families["seconds"].samples if each.name == "seconds_sum"}
    assert sums == {"a": 2, "b": 3}
    assert merged_pages([]) == ""
