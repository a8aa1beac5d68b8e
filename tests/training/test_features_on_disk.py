"""The cache of features: bounded, damaged entries made anew, and a run with it the same as one without."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import training_runs
from safetensors.torch import save_file

from foretoken.training.teacher import FeatureCache, Teacher

ENTRY = torch.arange(600, dtype=torch.float32).view(2, 10, 30)
ENTRY_BYTES = 2400
HEADER_BYTES = 200  # at most, of one small safetensors file


def cache(directory: Path, key: str = "key", max_bytes: int = 10 * ENTRY_BYTES) -> FeatureCache:
    return FeatureCache(directory, key=key, max_bytes=max_bytes)


def bytes_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_entries_come_back_and_only_under_their_key(tmp_path: Path) -> None:
    one = cache(tmp_path)
    assert one.get("a") is None
    one.put("a", ENTRY)
    one.put("b", 2 * ENTRY)
    for opened in (one, cache(tmp_path)):
        a, b = opened.get("a"), opened.get("b")
        assert a is not None
        assert b is not None
        assert torch.equal(a, ENTRY)
        assert torch.equal(b, 2 * ENTRY)
    assert cache(tmp_path, "other key").get("a") is None


def test_bounded_also_when_opened_again(tmp_path: Path) -> None:
    first = cache(tmp_path, max_bytes=4 * ENTRY_BYTES)
    for name in "abc":
        first.put(name, ENTRY)
    again = cache(tmp_path, max_bytes=4 * ENTRY_BYTES)
    for name in "defg":
        again.put(name, ENTRY)
    kept = [name for name in "abcdefg" if again.get(name) is not None]
    assert kept[:3] == ["a", "b", "c"]
    assert 3 <= len(kept) <= 4
    assert bytes_of(tmp_path) <= 4 * (ENTRY_BYTES + HEADER_BYTES)


@pytest.mark.parametrize("damage", ["cut", "empty", "garbage", "another name"])
def test_damaged_entries_are_none_and_can_be_made_anew(tmp_path: Path, damage: str) -> None:
    store = cache(tmp_path)
    store.put("a", ENTRY)
    (path,) = tmp_path.rglob("a.safetensors")
    whole = path.read_bytes()
    if damage == "another name":
        save_file({"something": ENTRY}, path)
    else:
        path.write_bytes({"cut": whole[: len(whole) // 2], "empty": b"", "garbage": b"\xff" * 4096}[damage])
    assert store.get("a") is None
    store.put("a", ENTRY)
    again = store.get("a")
    assert again is not None
    assert torch.equal(again, ENTRY)


@pytest.mark.parametrize("call", ["os.open", "foretoken.training.teacher.save_file"])
def test_a_full_disk_costs_only_time(
    tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = cache(tmp_path)

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(call, full)
        store.put("a", ENTRY)
        store.put("b", ENTRY)
    assert store.get("a") is None
    assert caplog.text.count("No space left on device") == 1
    assert bytes_of(tmp_path) == 0


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sequences of every batch whose features the target computes."""
    found: list[int] = []
    features = Teacher.features

    def watched(self: Teacher, tokens: torch.Tensor) -> torch.Tensor:
        found.append(len(tokens))
        return features(self, tokens)

    monkeypatch.setattr(Teacher, "features", watched)
    return found


def test_cached_runs_are_the_same_run(tmp_path: Path, computed: list[int]) -> None:
    plain = training_runs.trained(tmp_path / "plain").weights
    kept = tmp_path / "cache"
    training_runs.same_weights(training_runs.trained(tmp_path / "cold", cache=kept).weights, plain)
    computed.clear()
    training_runs.same_weights(training_runs.trained(tmp_path / "warm", cache=kept).weights, plain)
    assert computed == []  # else the test above compares nothing
    damaged = sorted(kept.rglob("*.safetensors"))[2]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    training_runs.same_weights(training_runs.trained(tmp_path / "damaged", cache=kept).weights, plain)
    assert computed == [4]
    tiny = training_runs.trained(tmp_path / "no room", cache=tmp_path / "tiny", cache_bytes=5000)
    training_runs.same_weights(tiny.weights, plain)
    # Another seed cuts other windows.
    computed.clear()
    training_runs.trained(tmp_path / "other seed", cache=kept, seed=1)
    assert computed == [4] * 6


def test_epochs_that_repeat_their_windows_run_no_target(tmp_path: Path, computed: list[int]) -> None:
    """Whatever the size of a batch; heads with the same taps and other batches share the windows."""
    text = replace(training_runs.batches(16 * 8 + 3), repeats_windows=True)  # two batches an epoch
    training_runs.trained(tmp_path / "run", text=text, cache=tmp_path / "cache")
    assert computed == [4, 4]
    training_runs.trained(tmp_path / "hydra", "hydra", text=text, cache=tmp_path / "cache", batch_size=2)
    assert computed == [4, 4]
    moving = replace(text, repeats_windows=False)
    training_runs.trained(tmp_path / "moving", text=moving, cache=tmp_path / "cache")
    assert computed == [4] * 6
