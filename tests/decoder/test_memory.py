"""The cache never asks for more memory than there is."""

import logging
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from foretoken import LLM
from foretoken.core.errors import ConfigError, ModelError
from foretoken.decoder import slot_cache
from foretoken.decoder.slot_cache import LayerShape, affordable_rows
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner


def test_rows_are_counted_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "free_bytes", lambda device: 2 * 80_000)
    shapes = [LayerShape(2, 8, 8), LayerShape(1, 4, 4)]  # 32 + 8 numbers a row
    rows = affordable_rows(shapes, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert rows == 80_000 // (40 * 2)
    given = affordable_rows(shapes, dtype=torch.bfloat16, device=torch.device("cpu"), memory_bytes=1000)
    assert given == 1000 // (40 * 2)


def test_the_share_of_the_free_memory_can_be_lowered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "free_bytes", lambda device: 100_000)
    assert [slot_cache.share_of_free(torch.device("cpu"), most) for most in (0.25, 0.5, 0.9)] == [
        25_000,
        50_000,
        50_000,
    ]
    capacities = [
        LLM(tiny_model("llama"), max_num_seqs=2, **arguments).target.cache.capacity
        for arguments in ({"kv_cache_memory_bytes": 25_000}, {"gpu_memory_utilization": 0.25}, {})
    ]
    assert capacities[0] == capacities[1] < capacities[2]


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says what is available")
def test_memory_that_holds_files_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that has read many files has few unused pages; the system drops files when memory is asked for."""
    monkeypatch.setattr(slot_cache, "_CGROUP", tmp_path)
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available, unused = (int(lines[name].split()[0]) << 10 for name in ("MemAvailable", "MemFree"))
    found = slot_cache.free_bytes(torch.device("cpu"))
    assert abs(found - available) < 1 << 28, "as the system says, but for what others took meanwhile"
    assert found > unused - (1 << 28)


def test_the_limit_of_a_container_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_cache, "_CGROUP", tmp_path)
    whole = slot_cache.free_bytes(torch.device("cpu"))
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 500000\nactive_file 100000\ninactive_file 50000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert slot_cache.free_bytes(torch.device("cpu")) > whole / 2
    (tmp_path / "memory.max").write_text("1000000\n")
    assert slot_cache.free_bytes(torch.device("cpu")) == 250_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert slot_cache.free_bytes(torch.device("cpu")) == 0


def test_context_is_cut_to_what_fits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("foretoken.runner.runner.affordable_rows", lambda *args, **kwargs: 80)
    with caplog.at_level(logging.WARNING):
        runner = Runner(wrap_model(tiny_model("llama"), name="tiny"), num_slots=2, max_nodes=4)
    assert runner.context_len == 36
    assert "the context is cut to 36" in caplog.text


def test_an_explicit_context_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.runner.runner.affordable_rows", lambda *args, **kwargs: 40)
    with pytest.raises(ConfigError, match=r"max_model_len 50 needs more memory than there is\. Expected at most 15"):
        LLM(tiny_model("llama"), max_model_len=50)


def test_no_memory_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.runner.runner.affordable_rows", lambda *args, **kwargs: 15)
    with pytest.raises(ModelError, match="there is no memory for the KV cache"):
        LLM(tiny_model("llama"))
