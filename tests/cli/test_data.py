"""`foretoken data` makes what it says, and says what is wrong."""

import json
import shutil
import signal
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, ROOT, assert_refused, output_of, report_of
from forked import ForkedCommand
from tiny_models import tiny_model

from foretoken.cli import data
from foretoken.models.loading import load_tokenizer
from foretoken.training.data.corpus import DataProgress
from foretoken.training.data.packed import PackedTokens

SOURCES = ["def add(a, b):\n    return a + b\n", "import os\n\nprint(os.getcwd())\n", "x = [1, 2, 3]\n"]
EOS = 0


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A directory of three Python files."""
    directory = tmp_path / "texts"
    directory.mkdir()
    for number, source in enumerate(SOURCES):
        (directory / f"{number}.py").write_text(source)
    return directory


def made(*arguments: str) -> dict[str, Any]:
    return report_of("data", MODEL, *arguments)


def test_text_files(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = made("--out", str(out), "--text", str(texts))
    tokenizer = load_tokenizer(str(ROOT / MODEL))
    assert tokenizer is not None
    expected = [token for source in SOURCES for token in [*tokenizer(source)["input_ids"], EOS]]
    packed = PackedTokens.open(out / "train")
    assert packed.tokens.tolist() == expected
    assert report["train"]["documents"] == 3
    assert report["train"]["tokens"] == len(expected)
    assert report["train"]["supervised_share"] == 1.0
    assert report["tokens_per_s"] > 0
    assert packed.meta["target"] == MODEL
    assert not (out / "held_out").exists()


@pytest.mark.parametrize("config", [None, {"model_type": "unheard_of"}])
def test_weights_are_not_needed(texts: Path, tmp_path: Path, config: dict[str, str] | None) -> None:
    """Nor a model that transformers knows."""
    target = tmp_path / "tokenizer"
    target.mkdir()
    if config is not None:
        (target / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).symlink_to(ROOT / MODEL / name)
    told = output_of("data", str(target), "--out", str(tmp_path / "out"), "--text", str(texts / "0.py"))
    assert "1 documents" in told
    assert "100.0% supervised" in told


def test_held_out_file_and_force(texts: Path, tmp_path: Path) -> None:
    lines = tmp_path / "rows.jsonl"
    lines.write_text(json.dumps({"prompt": "x = ", "completion": "1\n"}) + "\n")
    out = str(tmp_path / "out")
    report = made("--out", out, "--jsonl", str(lines), "--held-out", str(texts / "2.py"))
    assert 0 < report["train"]["supervised_share"] < 1
    assert report["held_out"]["supervised_share"] == 1.0
    assert_refused("holds packed tokens already", "data", MODEL, "--out", out, "--text", str(texts))
    report = made("--out", out, "--text", str(texts), "--force")
    assert "held_out" not in report
    assert not (tmp_path / "out" / "held_out").exists()


def distil(out: Path, texts: Path, *arguments: str) -> list[str]:
    return [
        "--out", str(out), "--text", str(texts), "--self-distill", "--prompt-tokens", "4", "--max-new-tokens", "6",
        "--temperature", "0.8", "--seed", "3", "--batch-size", "2", "--threads", "1", *arguments,
    ]  # fmt: skip


def test_self_distillation(texts: Path, tmp_path: Path) -> None:
    report = made(*distil(tmp_path / "plain", texts))
    drafted = made(*distil(tmp_path / "drafted", texts, "-s", "ngram"))
    assert drafted["train"] == report["train"]  # a drafter changes the time, no token
    again = made(*distil(tmp_path / "plain", texts, "--force"))
    assert again["resumed"] == 3
    assert again["train"] == report["train"]
    packed = PackedTokens.open(tmp_path / "plain")
    assert packed.meta["self_distillation"]["temperature"] == 0.8
    tokenizer = load_tokenizer(str(ROOT / MODEL))
    assert tokenizer is not None
    first = made("--out", str(tmp_path / "one"), "--text", str(texts / "0.py"))
    assert first["train"]["documents"] == 1
    assert packed.tokens[:4].tolist() == tokenizer(SOURCES[0])["input_ids"][:4]
    other = distil(tmp_path / "plain", texts, "--force", "--max-new-tokens", "7")
    assert_refused("was made with max_new_tokens 6 instead of 7", "data", MODEL, *other)


def test_responses_must_outlive_the_directory(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    inside = distil(out, texts, "--generated", str(out / "sub" / "file.jsonl"))
    assert_refused("Expected a file outside", "data", MODEL, *inside)


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_ended_continues(texts: Path, tmp_path: Path, ending: signal.Signals) -> None:
    for number in range(3, 64):
        (texts / f"{number:03}.py").write_text(f"value_{number} = [{number}, {number * 3}]\n")
    out = tmp_path / "cut"
    file = tmp_path / "cut.generated.jsonl"
    short = ("--max-new-tokens", "4")
    with ForkedCommand("data", MODEL, *distil(out, texts, *short)) as process:
        deadline = time.monotonic() + 120
        while (not file.exists() or file.read_bytes().count(b"\n") < 2) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        process.send_signal(ending)
        _, errors = process.communicate()
    assert process.returncode == (-ending if ending == signal.SIGKILL else 128 + ending), errors
    assert "Traceback" not in errors
    stored = [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]
    assert 1 < len(stored) < 65
    visible = sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith("."))
    assert visible == ["cut.generated.jsonl", "texts"]
    assert made(*distil(out, texts, *short))["resumed"] == len(stored) - 1
    whole = made(*distil(tmp_path / "whole", texts, *short))
    assert whole["resumed"] == 0
    assert file.read_bytes() == (tmp_path / "whole.generated.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "there is no source"),
        (("--text", "no-such-dir"), "there is no file 'no-such-dir'"),
        (("--text", "README.md", "--held-out-fraction", "1.5"), "--held-out-fraction is 1.5"),
        (("--text", "README.md", "--held-out-fraction", "0.1", "--held-out", "README.md"), "exclude each other"),
        (("--text", "README.md", "-s", "ngram"), "--self-distill"),
        (("--text", "README.md", "--self-distill", "--max-new-tokens", "5000"), "exceed the context length"),
        (("--text", "README.md", "--self-distill", "--temperature", "-1"), "temperature is -1.0"),
        (("--jsonl", "README.md"), "README.md:1 is not valid JSON"),
    ],
)
def test_bad_arguments(tmp_path: Path, arguments: tuple[str, ...], part: str) -> None:
    assert_refused(part, "data", MODEL, "--out", str(tmp_path / "out"), *arguments)
    assert list(tmp_path.iterdir()) == []


def test_bad_targets_and_chats(texts: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "out")
    empty, chats = tmp_path / "empty", tmp_path / "chats.jsonl"
    empty.mkdir()
    turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    chats.write_text(json.dumps({"messages": turns}))
    for target, source, part in (
        ("models/tinycod", ("--text", str(texts)), "Did you mean 'models/tinycode'?"),
        (str(empty), ("--text", str(texts)), "has no tokenizer"),
        (MODEL, ("--jsonl", str(chats)), "has no chat template"),
    ):
        assert_refused(part, "data", target, "--out", out, *source)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("architecture", ["llama", "qwen3_5"])
def test_a_tokenizer_with_more_tokens_than_the_model_is_named(architecture: str, texts: Path, tmp_path: Path) -> None:
    """By `data`, whether the target answers or not, and by `train` for tokens that were packed without a target."""
    model, out = tmp_path / "model", tmp_path / "out"
    tiny_model(architecture, vocab_size=300, eos_token_id=0).save_pretrained(model)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / MODEL / name, model / name)
    parts = ("holds token id ", "Expected 0..299, the target's tokens. Copy the files of the tokenizer")
    small = ("--prompt-tokens", "4", "--max-new-tokens", "2")
    assert_refused(parts, "data", str(model), "--text", str(texts), "--out", str(out), "--self-distill", *small)
    assert_refused(parts, "data", str(model), "--text", str(texts), "--out", str(out))
    assert not out.exists()
    output_of("data", MODEL, "--text", str(texts), "--out", str(out))
    assert_refused(parts, "train", "medusa", str(model), "--data", str(out), "--out", str(tmp_path / "head"))


def test_the_time_left_is_told_beside_the_answers_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of three minutes, in which an answer ends every twenty seconds; a log has a line in 30 seconds."""
    now, lines = [0.0], list[str]()
    monkeypatch.setattr(data.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(data.terminal, "renewed_line", lambda: nullcontext((lines.append, 30.0)))
    with data._shown() as show:
        for call in range(1, 4):
            for done in range(1, 10):
                now[0] += 20
                show((done, 9))
            show(DataProgress(documents=9 * call, tokens=9, seconds=now[0], tokens_per_s=1.0, seconds_left=60.0))
    assert lines[0] == "2 of the next 9 prompts are answered"
    assert any("left; " in line and line.endswith("of the next 9 prompts are answered") for line in lines)
    assert sum("left" in line for line in lines) >= len(lines) / 2
