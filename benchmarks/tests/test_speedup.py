"""`python -m benchmarks.speedup`: real runs over a tiny model and its cost twin, and figures from known lines.

Slow because each run makes a cost twin and its drafters.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters.autoregressive_heads import directory
from tiny_models import tiny_model

from benchmarks.speedup import __main__ as command
from benchmarks.speedup import measure as measuring
from benchmarks.speedup.report import as_markdown
from benchmarks.speedup.rows import Journal, Line, pays_from, rows_of
from benchmarks.speedup.sizes import Size, methods_of
from foretoken.bench.plots import in_order
from foretoken.bench.sweep import Quartiles
from foretoken.core.errors import ConfigError
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.conversion import head_shapes
from foretoken.heads.medusa import MedusaConfig
from foretoken.models.loading import load_model

pytestmark = pytest.mark.slow

MODEL = Path(__file__).resolve().parents[2] / "models" / "tinycode"
NAMES = ["plain", "ngram", "draft_model", "medusa"]
ROUNDS = (2 + 1) * 2  # prompts of both sizes at two temperatures


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A tiny target with the bundled tokenizer, a draft model and a head."""
    place = tmp_path / "small"
    for name, num_layers in (("small", 2), ("small-draft", 1)):
        model = tiny_model("llama", vocab_size=6144, num_hidden_layers=num_layers, max_position_embeddings=1024)
        model.save_pretrained(tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(MODEL / file, tmp_path / name / file)
    write_head(place, seed=0)
    return place


def write_head(place: Path, seed: int) -> None:
    config = MedusaConfig(hidden_size=32, vocab_size=6144, num_heads=2, num_layers=1)
    generator = torch.Generator().manual_seed(seed)
    weights = {key: torch.randn(shape, generator=generator) for key, shape in head_shapes(config).items()}
    target = TargetFingerprint.of(load_model(place, device="cpu"))
    head = HeadCheckpoint(config=config, weights=weights, target=target)
    native.write_checkpoint(head, place.with_name("small-medusa"), replaces=True)


def test_methods_are_what_lies_beside_the_model(small: Path) -> None:
    assert in_order(methods_of(small)) == ["ngram", "draft_model", "medusa"]
    for name, kind in (("hass", "eagle"), ("eagle", "eagle"), ("eagle3", "eagle3")):
        small.with_name(f"small-{name}").symlink_to(directory(kind))
    small.with_name("small-notes").mkdir()
    assert in_order(methods_of(small)) == ["ngram", "draft_model", "eagle3", "eagle", "hass", "medusa"]


def run(small: Path, *more: str) -> int:
    places = ["--model", str(small), "--runs", str(small.parent / "runs"), "--out", str(small.parent / "out" / "name")]
    return command.main([*places, "--sizes", "2x32:2,3x128:1", "--max-tokens", "3", "--dtype", "float32", *more])


def lines_of(small: Path) -> list[dict[str, Any]]:
    text = (small.parent / "runs" / "name.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()[1:]]


def test_one_command_makes_twins_measures_every_method_and_reports(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(small) == 0
    said = capsys.readouterr()
    lines = lines_of(small)
    assert len(lines) == ROUNDS * len(NAMES)
    assert [line["method"] for line in lines[:4]] == NAMES
    assert [line["method"] for line in lines if (line["size"], line["prompt"]) == ("2 x 32", 1)][:4] == [
        *NAMES[1:],
        "plain",
    ]  # another one begins with every prompt
    record = json.loads((small.parent / "out" / "name.json").read_text())
    assert {row["method"] for row in record["rows"]} == set(NAMES)
    for row in record["rows"]:
        assert row["num_prompts"] == (2 if row["size"] == "2 x 32" else 1)
        assert row["num_same_text"] == row["num_prompts"], row
        assert row["pass_ms"] > 0
    assert record["conditions"]["cost_twins"][0].startswith("3 x 128 of small")
    assert record["conditions"]["torch"] == torch.__version__
    report = (small.parent / "out" / "name.md").read_text()
    assert report == said.out.removesuffix("\n")
    assert "cost twins of it (3 x 128 of small" in report
    assert "prompt 1 of 1" in said.err


def test_an_interrupted_run_goes_on_and_a_finished_one_only_reports(
    small: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    real = measuring.Line.of

    def interrupted(measurement: Any, size: str, prompt: int, *seconds: float) -> Line:
        asked.append(size)
        if len(asked) == 6:
            raise KeyboardInterrupt
        return real(measurement, size, prompt, *seconds)

    with monkeypatch.context() as patch:
        patch.setattr(measuring.Line, "of", interrupted)
        assert run(small) == 130
    assert "goes on" in capsys.readouterr().err
    journal = small.parent / "runs" / "name.jsonl"
    before = lines_of(small)
    assert len(before) == 5  # one round, and the first decoding of another
    with journal.open("a") as file:
        file.write('{"size": "3 x 128", "met')  # an interruption in the middle of writing
    made = (small.parent / "runs" / "small-3x128" / "twin" / "config.json").stat().st_mtime_ns
    assert run(small) == 0
    after = lines_of(small)
    assert after[:5] == before
    assert len(after) == 5 + (ROUNDS - 1) * len(NAMES)  # that other round is measured as a whole
    assert made == (small.parent / "runs" / "small-3x128" / "twin" / "config.json").stat().st_mtime_ns

    monkeypatch.setattr(measuring, "load_model", None)
    assert run(small) == 0
    assert lines_of(small) == after


def test_other_conditions_are_refused_and_other_drafters_make_another_twin(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(small, "--temperatures", "0", "--methods", "ngram") == 0
    assert run(small, "--temperatures", "0", "--methods", "ngram", "--seed", "5") == 2
    assert "was measured with seed 0, and seed is 5 now" in capsys.readouterr().err
    write_head(small, seed=1)
    assert run(small) == 2
    assert "model_sha256" in capsys.readouterr().err
    (small.parent / "runs" / "name.jsonl").unlink()
    assert run(small, "--temperatures", "0", "--methods", "ngram") == 0
    assert "making the cost twin" in capsys.readouterr().err
    assert run(small, "--sizes", "2x64") == 2
    assert "power of four" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["24", "24x", "0x256", "24x1024:", "24 x 1024"])
def test_sizes_are_spelled_one_way(text: str) -> None:
    with pytest.raises(ConfigError, match="LAYERSxHIDDEN"):
        Size.parse(text, 8)
    assert Size.parse("24x1024", 8) == Size(24, 1024, 8)
    assert Size.parse("24x1024:16", 8).with_at_most(9) == Size(24, 1024, 9)


def line(**changes: Any) -> Line:
    base = Line(
        size="2 x 32", method="plain", temperature=0.0, prompt=0, runner="lean-native", seconds=8.0, tokens=8, tau=1.0,
        pass_ms=1.0, draft_ms=0.0, host_ms=0.5, declined=0.0, text=[1, 2],
        wall_s=10.0, foreign_s=0.5,
    )  # fmt: skip
    return replace(base, **changes)


def known_journal(path: Path) -> Journal:
    """Greedy; ngram is 1, 2, 3, 4 and 5 times as fast on five prompts of the larger size, 0.5 times on the smaller."""
    journal = Journal(path, {"seed": 0})
    for prompt in range(5):
        journal.add(line(size="4 x 64", prompt=prompt, pass_ms=4.0))
        ratio = prompt + 1
        journal.add(
            line(size="4 x 64", method="ngram", prompt=prompt, seconds=8.0 / ratio, tau=5.0, pass_ms=6.0, draft_ms=0.2)
        )
    journal.add(line(text=[9]))
    journal.add(line(method="ngram", seconds=16.0, text=[8], declined=0.5))
    journal.add(line(prompt=1))  # half a round
    return journal


def test_rows_relate_the_same_prompts(tmp_path: Path) -> None:
    names = ["plain", "ngram"]
    known_journal(tmp_path / "lines.jsonl")
    journal = Journal(tmp_path / "lines.jsonl", {"seed": 0})  # as it is read back
    rows = {(row.size, row.method): row for row in rows_of(journal, ["2 x 32", "4 x 64"], [0.0], names)}
    large, little = rows["4 x 64", "ngram"], rows["2 x 32", "ngram"]
    assert large.speed_up == Quartiles(3.0, 2.0, 4.0)
    assert large.efficiency.median == pytest.approx(0.6)
    assert (large.plain_pass_ms, large.pass_ms, large.draft_ms, large.num_same_text) == (4.0, 6.0, 0.2, 5)
    assert little.speed_up == Quartiles(0.5, 0.5, 0.5)
    assert (little.num_prompts, little.num_same_text, little.declined) == (1, 0, 0.5)
    # From 0.5 at 1 ms to 3 at 4 ms, along the logarithm: 1 is a fifth of the way.
    assert pays_from(list(rows.values()), "ngram", 0.0) == pytest.approx(4.0**0.2)
    report = as_markdown(list(rows.values()), ["Conditions."])
    assert "| prompt lookup | 1.32 ms |" in report
    assert "| 0 | 1.0 tokens/s | **3.00** (5.00) |" in report
    assert "| prompt lookup | 0 | 3.0 | 3.00 (2.00-4.00) | 5.00 (5.00-5.00) | 0.60 (0.40-0.80) |" in report
    assert "Other processes kept 0.05 cores busy." in report


@pytest.mark.parametrize(("speed_ups", "expected"), [((1.2, 2.0), 0.0), ((2.0, 0.9), None), ((2.0, 0.5, 1.5), 8.0)])
def test_where_it_pays_is_behind_the_last_size_that_does_not(
    speed_ups: tuple[float, ...], expected: float | None, tmp_path: Path
) -> None:
    journal = Journal(tmp_path / "lines.jsonl", {})
    sizes = [f"{number} x 1" for number, _ in enumerate(speed_ups)]
    for number, (size, speed_up) in enumerate(zip(sizes, speed_ups, strict=True)):
        journal.add(line(size=size, pass_ms=4.0**number))
        journal.add(line(size=size, method="ngram", seconds=8.0 / speed_up))
    rows = rows_of(journal, sizes, [0.0], ["plain", "ngram"])
    found = pays_from(rows, "ngram", 0.0)
    assert found == (expected if expected is None else pytest.approx(expected))
