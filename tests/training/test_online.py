"""Traffic on disk stays within its bound, and a round of training publishes only what drafts better."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import training_runs
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB_SIZE

from foretoken.core.errors import ConfigError
from foretoken.models.generic import run_plain
from foretoken.models.loading import load_model
from foretoken.training import online
from foretoken.training.data.packed import Document, PackedForm, PackedTokens
from foretoken.training.evaluation import acceptance_rates

FORM = PackedForm(VOCAB_SIZE, None, "sha")
MODEL, DRAFT = "models/tinycode", "models/tinycode-draft"


def test_acceptance_rates_behind_given_text() -> None:
    target, student = training_runs.target(), training_runs.student()
    tokens = torch.randint(3, VOCAB_SIZE, (3, 16), generator=torch.Generator().manual_seed(5))
    is_label = torch.zeros_like(tokens, dtype=torch.bool)
    is_label[:, 7:] = True
    p, q = (run_plain(model.module, tokens).logits.softmax(-1)[:, 6:-1] for model in (target, student))
    greedy, drawn = acceptance_rates(student, target, tokens, is_label, dtype=torch.float32)
    assert greedy == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert drawn == pytest.approx(float(torch.minimum(p, q).sum(-1).mean()), abs=1e-5)
    assert 0 < drawn < 1


# --- the ring


def test_the_oldest_text_leaves_a_full_ring(tmp_path: Path) -> None:
    ring = online.TrafficRing(tmp_path, FORM, most_tokens=320)
    for number in range(100):
        ring.add(Document([number % VOCAB_SIZE] * 7))
        held = [len(PackedTokens.open(place).tokens) for place in online.numbered(tmp_path)]
        assert sum(held) <= 320
    ring.flush()
    text = online.read_traffic(tmp_path)
    assert text is not None
    assert 320 - 2 * 21 <= len(text.tokens) <= 320, "full, but for the part that just left"
    assert text.tokens[-7:].tolist() == [99 % VOCAB_SIZE] * 7
    assert online.numbered(tmp_path)[0].name != "00000001"


def test_one_text_beyond_the_bound_is_not_kept(tmp_path: Path) -> None:
    ring = online.TrafficRing(tmp_path, FORM, most_tokens=64)
    ring.add(Document([5] * 65))
    assert online.read_traffic(tmp_path) is None


def test_a_large_text_does_not_empty_the_ring(tmp_path: Path) -> None:
    ring = online.TrafficRing(tmp_path, FORM, most_tokens=64)
    for document in ([5] * 20, [6] * 33, [7] * 32):
        ring.add(Document(document))
    text = online.read_traffic(tmp_path)
    assert text is not None
    assert text.tokens.tolist() == [5] * 20 + [7] * 32


def test_text_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    online.TrafficRing(tmp_path, FORM, most_tokens=64).add(Document([5] * 20))
    with pytest.raises(ConfigError, match="holds text of a target with another tokenizer"):
        online.TrafficRing(tmp_path, FORM._replace(tokenizer_sha="other"), most_tokens=64)


def test_names_that_are_no_numbers(tmp_path: Path) -> None:
    for name in ("00000004", "5", "00000003.bak", "00000010"):
        (tmp_path / name).mkdir()
    assert [place.name for place in online.numbered(tmp_path)] == ["00000004", "5", "00000010"]


def test_a_ring_goes_on_where_an_earlier_server_ended(tmp_path: Path) -> None:
    (tmp_path / ".00000007-abcd" / "new").mkdir(parents=True)  # of a process that was killed
    for token in (4, 5):
        ring = online.TrafficRing(tmp_path, FORM, most_tokens=64)
        ring.add(Document([token] * 4))
    text = online.read_traffic(tmp_path)
    assert text is not None
    assert text.tokens.tolist() == [4] * 4 + [5] * 4
    assert [place.name for place in tmp_path.iterdir() if place.name.startswith(".")] == []


def test_damaged_text_is_left_out_until_it_leaves(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As a process leaves it that was killed while it removed the oldest text."""
    ring = online.TrafficRing(tmp_path, FORM, most_tokens=64)
    for token in (4, 5, 6):
        ring.add(Document([token] * 4))
    (tmp_path / "00000001" / "meta.json").unlink()
    (tmp_path / "00000002" / "tokens.bin").write_bytes(b"")
    ring = online.TrafficRing(tmp_path, FORM, most_tokens=64)
    assert sorted(record.getMessage() for record in caplog.records) == [
        f"the collected text in '{tmp_path}/0000000{number}' is damaged and not learned" for number in (1, 2)
    ]
    text = online.read_traffic(tmp_path)
    assert text is not None
    assert text.tokens.tolist() == [6] * 4
    for _ in range(16):
        ring.add(Document([7] * 4))
    assert [place.name for place in online.numbered(tmp_path)] == [f"{number:08d}" for number in range(4, 20)]


def test_equal_prompts_are_on_one_side_and_outputs_are_labels(tmp_path: Path) -> None:
    traffic, random = online.Traffic(tmp_path, FORM, most_tokens=10_000), np.random.default_rng(0)
    prompts = [tuple(random.integers(3, VOCAB_SIZE - 1, 4)) for _ in range(50)]
    for output in (2, 3):
        for prompt in prompts:
            traffic.add(prompt, [VOCAB_SIZE - output] * 2)
    traffic.flush()
    sides = [online.read_traffic(tmp_path / online.TRAFFIC / part) for part in ("train", "held_out")]
    found = []
    for side in sides:
        assert side is not None
        assert side.supervised is not None
        texts = side.tokens.reshape(-1, 6)
        assert side.supervised.reshape(-1, 6).tolist() == [[False] * 4 + [True] * 2] * len(texts)
        found.append({tuple(text[:4]) for text in texts.tolist()})
    assert found[0] | found[1] == set(prompts)
    assert not found[0] & found[1]
    assert 0 < len(found[1]) < len(found[0])


# --- rounds


def test_training_begins_with_the_newest_draft_model_that_is_not_damaged(tmp_path: Path) -> None:
    weights = {name: value + 1 for name, value in load_file(f"{DRAFT}/model.safetensors").items()}
    spoilt = weights | {"model.norm.weight": weights["model.norm.weight"] * float("nan")}
    for number, each in enumerate([{"x": torch.ones(1)}, weights, spoilt, {}, {"x": torch.ones(1)}]):
        place = tmp_path / online.DRAFTS / str(number)
        place.mkdir(parents=True)
        if each:
            save_file(each, place / "model.safetensors")
    found = online.OnlineTraining.of_files(MODEL, DRAFT, tmp_path, dtype="float32", pause=lambda _: None)
    for name, value in found.student.module.named_parameters():
        assert torch.equal(value, weights[name].float()), name


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> online.OnlineTraining:
    """Short rounds on the code of this file."""
    for name, value in {"_LENGTH": 64, "_BATCH_SIZE": 4, "_STEPS": 6, "_HELD_OUT_WINDOWS": 6}.items():
        monkeypatch.setattr(online, name, value)
    made = online.OnlineTraining.of_files(MODEL, DRAFT, tmp_path, dtype="float32", pause=lambda _: None)
    traffic = online.Traffic(tmp_path, PackedForm.of(made.tokenizer), most_tokens=100_000)
    ids = made.tokenizer(Path(__file__).read_text(encoding="utf-8"), verbose=False).input_ids
    for begin in range(0, len(ids) - 64, 64):
        traffic.add(ids[begin : begin + 16], ids[begin + 16 : begin + 64])
    traffic.flush()
    return made


def test_what_drafts_better_is_published_and_the_next_process_begins_with_it(
    training: online.OnlineTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model that was spoiled has much to learn."""
    monkeypatch.setattr(online, "_RATE", 1e-3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in training.student.module.parameters():
            weight.add_(0.06 * torch.randn(weight.shape, generator=generator))
    before = training_runs.weights_of(training.student)
    rounds = [training.round() for _ in range(3)]
    for one in rounds:
        assert one is not None
        assert one.draft is not None
        assert sum(one.alpha_after) > sum(one.alpha_before)
        assert one.tokens == 6 * 4 * 64
    drafts = [place.name for place in online.numbered(tmp_path / online.DRAFTS)]
    assert drafts == ["00000002", "00000003"], "the first one has left"
    assert not (tmp_path / online.RUN).exists()
    now = training_runs.weights_of(training.student)
    assert any(not torch.equal(now[name], weight) for name, weight in before.items())
    again = online.OnlineTraining.of_files(MODEL, DRAFT, tmp_path, dtype="float32", pause=lambda _: None)
    published = load_model(str(tmp_path / online.DRAFTS / "00000003"), dtype="float32")
    for student in (again.student, published):
        for name, weight in training_runs.weights_of(student).items():
            assert torch.equal(weight, now[name]), name


def test_what_drafts_worse_is_undone(
    training: online.OnlineTraining, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online, "_RATE", 0.5)
    before = training_runs.weights_of(training.student)
    result = training.round()
    assert result is not None
    assert result.draft is None
    assert sum(result.alpha_after) <= sum(result.alpha_before)
    assert online.numbered(tmp_path / online.DRAFTS) == []
    for name, weight in training_runs.weights_of(training.student).items():
        assert torch.equal(weight, before[name]), name


def test_without_held_out_text_there_is_no_round(training: online.OnlineTraining, tmp_path: Path) -> None:
    for place in online.numbered(tmp_path / online.TRAFFIC / "held_out"):
        place.rename(tmp_path / place.name)
    assert training.round() is None


# --- the process


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server's end of standard input."""
    reading, writing = os.pipe()
    with os.fdopen(reading) as stdin, os.fdopen(writing, "wb", buffering=0) as server:
        monkeypatch.setattr(sys, "stdin", stdin)
        yield server


def test_work_pauses_only_while_requests_run(pipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    signals, waited, wait = online.ServerSignals(), [], online.ServerSignals.wait

    def waiting(self: online.ServerSignals, seconds: float) -> None:
        waited.append(seconds)
        wait(self, seconds)

    monkeypatch.setattr(online.ServerSignals, "wait", waiting)
    signals.pause()
    assert waited == [0]
    pipe.write(b"1")
    sum(range(100_000))  # some work
    signals.pause()
    assert waited[:2] == [0, 0]
    assert len(waited) > 2, "it waited"
    pipe.write(b"10")
    signals.pause()
    assert waited[-1] == 0


def test_the_end_of_the_server_ends_the_process(pipe: Any) -> None:
    signals = online.ServerSignals()
    pipe.close()
    with pytest.raises(SystemExit):
        signals.wait(60)
