"""`foretoken train`: bad input is exit code 2, one sentence and no head; what is told of a run, and what comes next."""

import json
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from command_line import done, output_of, refused, report_of
from filelock import FileLock
from forked import ForkedCommand
from packed_data import write_packed
from tiny_models import VOCAB_SIZE, tiny_model
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import build_head
from foretoken.models.loading import load_model
from foretoken.models.parts import target_parts
from foretoken.training.data.packed import Document
from foretoken.training.objectives import head_config

QUICK = ("--steps", "2", "--batch-size", "2", "--length", "16", "--num-prompts", "0")


def tokenizer(first: str = "a") -> Any:
    """One word for each token; with another first word, another tokenizer."""
    words = ["<pad>", "<s>", "</s>", first, *(f"w{index}" for index in range(4, VOCAB_SIZE))]
    inner = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", pad_token="<pad>")


def saved_model(directory: Path, **changes: Any) -> str:
    """A tiny target on disk."""
    tiny_model("llama", num_hidden_layers=2, **changes).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return str(directory)


def packed(directory: Path, size: int = 600, first: str = "a") -> str:
    """Random text of a number of tokens, EOS included."""
    tokens = np.random.default_rng(1).integers(4, VOCAB_SIZE, size - 1)
    write_packed(directory, [Document(tokens.tolist())], tokenizer=tokenizer(first))
    return str(directory)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, another one half as wide, and packed text."""
    directory = tmp_path_factory.mktemp("shared")
    saved_model(directory / "target")
    saved_model(directory / "narrow", hidden_size=16)
    saved_model(directory / "relative", seed=5)
    packed(directory / "data")
    return directory


@pytest.fixture
def refuse(shared: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs `foretoken train`, which must refuse; gives what it says."""

    def call(*arguments: str, method: str = "medusa", data: str | None = None, model: str | None = None) -> str:
        out = tmp_path / "head"
        model, data = model or str(shared / "target"), data or str(shared / "data")
        told = refused("train", method, model, "--data", data, "--out", str(out), *QUICK, *arguments)
        assert_one_sentence(told)
        assert not out.exists()
        return told

    return call


def test_evaluations_without_tokens(refuse: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    look = ("--eval-every", "2")
    assert f"--eval-every needs held-out tokens, and there is no '{shared / 'held_out'}'" in refuse(*look)
    assert "Pass --eval-every too" in refuse("--eval-data", str(shared / "data"))
    joint = ("--joint", "backbone=lora", "--target-out", str(tmp_path / "target"))
    assert "--joint changes it" in refuse(*look, "--eval-data", str(shared / "data"), *joint)
    foreign = packed(tmp_path / "foreign", first="b")
    assert f"'{foreign}' was not packed with the tokenizer of" in refuse(*look, "--eval-data", foreign)
    short = packed(tmp_path / "short", 5)
    assert "no window of the evaluation data has 4 labels in a row" in refuse(*look, "--eval-data", short)


@pytest.mark.parametrize("part", ["", "train"])
def test_evaluations_of_held_out_tokens(shared: Path, tmp_path: Path, part: str) -> None:
    for name in ("train", "held_out"):
        packed(tmp_path / "data" / name)
    where = ("--data", str(tmp_path / "data" / part), "--out", str(tmp_path / "head"))
    result = done("train", "medusa", str(shared / "target"), *where, *QUICK, "--eval-every", "2")
    lines = [json.loads(line) for line in (tmp_path / "head-run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "held_out_tau" in line] == [2]
    assert f", held-out tau {lines[1]['held_out_tau']:.3f} (step 2), " in result.stderr


@pytest.mark.parametrize("name", ["head", "x:y=1"])
def test_the_last_line_is_a_command_that_runs(shared: Path, tmp_path: Path, name: str) -> None:
    where = ("--data", str(shared / "data"), "--out", str(tmp_path / name))
    told = output_of("train", "medusa", str(shared / "target"), *where, *QUICK).splitlines()[-1]
    program, *arguments = shlex.split(told.removeprefix("next: "))
    assert (program, arguments[:2]) == ("foretoken", ["bench", str(shared / "target")])
    assert "medusa" in output_of(*arguments, "--num-prompts", "1", "--max-tokens", "4")


def test_what_was_found_of_a_head_fits_80_columns(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    where = ("--data", str(shared / "data"), "--out", str(tmp_path / "head"))
    sizes = (*QUICK[:-2], "--num-prompts", "1", "--set", "num_heads=8")
    monkeypatch.setattr("foretoken.training.train.held_out_seconds", lambda *_: lambda tau: 90.0 + 0.0 * tau)
    result = done("train", "medusa", str(shared / "target"), *where, *sizes, is_terminal=True)
    shown = re.sub(r"\x1b\[[\d;]*m", "", result.stdout)
    found = [line for line in shown.splitlines() if str(tmp_path) not in line]
    assert max(map(len, found)) <= 80
    table = [line.split() for line in found if line.split()[:1] in (["static"], ["dynamic"])]
    assert [(tree, temperature) for tree, _, temperature, *_ in table] == [
        ("static", "0"), ("static", "0.8"), ("dynamic", "0"), ("dynamic", "0.8"),
    ]  # fmt: skip
    assert "step 2/2, 1:30 left, " in result.stderr


def test_a_run_is_not_mixed_with_other_files(refuse: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    before = sorted((shared / "data").iterdir())
    assert "holds other files (meta.json), no training run" in refuse("--run-dir", str(shared / "data"))
    assert sorted((shared / "data").iterdir()) == before
    assert "--run-dir '" in refuse("--run-dir", str(file))
    assert "--cache '" in refuse("--cache", str(file))
    assert file.read_text() == "mine"


def assert_one_sentence(told: str) -> None:
    errors = [line for line in told.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, told
    assert told.rstrip().splitlines()[-1] == errors[0], "the sentence goes on in further lines"


@pytest.mark.parametrize(
    ("method", "arguments", "parts"),
    [
        ("medsa", (), ("no head 'medsa' to train", "Did you mean 'medusa'?")),
        ("medusa", ("--set", "num_hads=3"), ("a medusa head has no key 'num_hads'", "Did you mean 'num_heads'?")),
        (
            "medusa",
            ("--objective", "kl_wight=1"),
            ("the objective of medusa has no key 'kl_wight'", "Did you mean 'kl_weight'?"),
        ),
        ("medusa", ("--cache-gib", "nan"), ("--cache-gib is nan. Expected at least 0",)),
        ("medusa", ("--cache-gib", "inf"), ("--cache-gib is inf",)),
        ("medusa", ("--cache-gib", "-1"), ("--cache-gib is -1.0",)),
        ("medusa", ("--save-every-s", "nan"), ("--save-every-s is nan",)),
        ("medusa", ("--save-dtype", "float31"), ("--save-dtype 'float31' does not exist. Did you mean 'float32'?",)),
        ("medusa", ("--set", "num_heads=0"), ("'num_heads' of a medusa head is 0", "greater than or equal to 1")),
        ("medusa", ("--set", "num_layers=-1"), ("'num_layers' of a medusa head is -1",)),
        ("medusa", ("--set", "num_heads=many"), ("'num_heads' of a medusa head is 'many'", "valid integer")),
        ("medusa", ("--set", "num_heads"), ("--set 'num_heads' is not KEY=VALUE", "num_heads=4")),
        ("medusa", ("--objective", "noise"), ("--objective 'noise' is not KEY=VALUE", "ce_weight=1")),
        ("medusa", ("--set", "hidden_size=8"), ("'hidden_size' of a medusa head is the target's",)),
        ("medusa", ("--set", "vocab_size=8"), ("'vocab_size' of a medusa head is the target's",)),
        ("medusa", ("--set", "draft_vocab_size=0"), ("'draft_vocab_size' of a medusa head is 0",)),
        ("hydra", ("--set", "dropout=1"), ("'dropout' of a hydra head is 1", "less than 1")),
        ("hydra", ("--set", 'prefix={"num_attention_heads": 4}'), ("'prefix.", "of a hydra head")),
        (
            "mlp_speculator",
            ("--set", "top_k=[5, 3]"),
            ("a mlp_speculator head: top_k has 2 entries. Expected one a head, 3",),
        ),
        (
            "hydra",
            (
                "--set",
                'prefix={"num_attention_heads": 4, "num_key_value_heads": 3, "head_dim": 8, "intermediate_size": 8}',
            ),
            ("4 query heads", "3 key heads"),
        ),
        ("medusa", ("--set", "draft_vocab_size=68", "--set", "own_lm_head=true"), ("68", "67")),
        ("medusa", ("--set", "draft_vocab_size=60", "--set", "own_lm_head=true"), ("60", "0 are named")),
        ("medusa", ("--lr", "inf"), ("--lr is inf. Expected at least 0",)),
        ("medusa", ("--objective", "head_decay=2"), ("'head_decay' of the objective of medusa is 2",)),
        ("hydra", ("--objective", "head_decay=0"), ("'head_decay' of the objective of hydra is 0",)),
        ("medusa", ("--objective", "kl_weight=inf"), ("'kl_weight' of the objective of medusa is", "finite")),
        ("medusa", ("--objective", "kl_weight=0"), ("nothing to learn",)),
        ("medusa", ("--objective", "kl_weight=-1"), ("'kl_weight' of the objective of medusa is -1",)),
        ("medusa", ("--lr", "0"), ("'schedule.peak' of training is 0.0", "greater than 0")),
        ("medusa", ("--lr", "nan"), ("--lr is nan. Expected at least 0",)),
        ("medusa", ("--lr-floor", "0"), ("'schedule.floor' of training is 0.0",)),
        ("medusa", ("--clip-norm", "0"), ("'clip_norm' of training is 0.0",)),
        ("medusa", ("--precision", "float8"), ("'precision' of training is 'float8'", "'bfloat16'")),
        ("medusa", ("--length", "5"), ("windows of 5 tokens", "last of 4 heads", "at least 6")),
    ],
)
def test_values(refuse: Callable[..., str], method: str, arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    text = refuse(*arguments, method=method)
    for part in parts:
        assert part in text


def a_head(directory: Path, model: str, method: str = "medusa") -> str:
    """An untrained head of a target."""
    target = load_model(model)
    head = build_head(head_config(method, target, {"num_heads": 2}), dtype=torch.float32)
    head.initialize(target_parts(target))
    native.write_checkpoint(HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target)), directory)
    return str(directory)


def test_heads_to_begin_from(refuse: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    for head, parts in (
        (a_head(tmp_path / "narrow", str(shared / "narrow")), ("was trained for", "hidden_size 16 instead of 32")),
        (a_head(tmp_path / "relative", str(shared / "relative")), ("was trained for", "weights")),
        (a_head(tmp_path / "hydra", str(shared / "target"), "hydra"), ("is a hydra head. Expected a medusa head",)),
        (str(tmp_path / "none"), (str(tmp_path / "none"),)),
    ):
        text = refuse("--init", head)
        assert all(part in text for part in parts), text


def test_data(refuse: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    text = refuse(data=packed(tmp_path / "foreign", first="b"))
    assert "was not packed with the tokenizer of" in text
    assert "`foretoken data" in text
    text = refuse(data=packed(tmp_path / "short", 15))
    assert "the data has 15 tokens and a window 16" in text
    assert "there is no model" in refuse(model=str(tmp_path / "none"))
    assert "holds no packed tokens" in refuse(data=str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "holds no packed tokens" in refuse(data=str(tmp_path / "empty"))
    shutil.copytree(shared / "data", tmp_path / "cut")
    (tmp_path / "cut" / "tokens.bin").write_bytes((tmp_path / "cut" / "tokens.bin").read_bytes()[:-1])
    assert "It is damaged" in refuse(data=str(tmp_path / "cut"))


def test_an_existing_output_is_left_alone(shared: Path, tmp_path: Path) -> None:
    for kind in ("file", "directory"):
        out = tmp_path / kind
        if kind == "file":
            out.write_text("mine")
        else:
            out.mkdir()
            (out / "config.json").write_text("mine")
        where = ("--data", str(shared / "data"), "--out", str(out))
        told = refused("train", "medusa", str(shared / "target"), *where, *QUICK)
        assert_one_sentence(told)
        assert "exists already" in told
        kept = out if kind == "file" else out / "config.json"
        assert kept.read_text() == "mine"
        assert not out.with_name(f"{out.name}-run").exists()


def test_a_run_with_other_settings(refuse: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    refuse("--lr", "1e30", "--steps", "30", "--warmup-steps", "0")  # leaves a run behind
    text = refuse("--lr", "1e-3", "--steps", "30", "--warmup-steps", "0")
    assert "holds a run with other settings; they differ in train.schedule.peak." in text


def test_a_run_that_is_at_work(refuse: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / "run.lock"):
        text = refuse("--run-dir", str(tmp_path / "run"))
    assert f"another run is at work in '{tmp_path / 'run'}'. Expected one at a time." in text
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.lock"]


def test_another_dtype_of_the_target(refuse: Callable[..., str], shared: Path, tmp_path: Path) -> None:
    arguments = ("--lr", "1e30", "--steps", "30", "--warmup-steps", "0")
    refuse(*arguments)  # leaves a run behind
    assert "they differ in target_dtype." in refuse(*arguments, "--dtype", "bfloat16")


def test_loss_that_is_no_number(refuse: Callable[..., str], tmp_path: Path) -> None:
    text = refuse("--lr", "1e30", "--steps", "30", "--warmup-steps", "0")
    assert "5 steps in a row" in text
    assert "Lower the learning rate" in text
    module = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        module.model.norm.weight[0] = float("nan")
    module.save_pretrained(tmp_path / "broken")
    tokenizer().save_pretrained(tmp_path / "broken")
    text = refuse("--steps", "30", "--run-dir", str(tmp_path / "other"), model=str(tmp_path / "broken"))
    assert "the loss is nan for 5 steps in a row, up to step 5" in text


@pytest.mark.slow
def test_told_to_stop(shared: Path, tmp_path: Path) -> None:
    """The exit code says which signal; the state is there, the head is not."""
    out = tmp_path / "head"
    curves, end = tmp_path / "head-run" / "metrics.jsonl", time.monotonic() + 90
    with ForkedCommand(
        "train", "medusa", str(shared / "target"), "--data", str(shared / "data"), "--out", str(out),
        "--steps", "1000000", "--batch-size", "2", "--length", "16", "--threads", "1",
    ) as process:  # fmt: skip
        while time.monotonic() < end and process.poll() is None and not (curves.is_file() and curves.stat().st_size):
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        stderr = process.communicate()[1]
    assert process.returncode == 143, stderr
    assert "Traceback" not in stderr
    assert "the same command continues" in stderr
    last = json.loads(curves.read_text().splitlines()[-1])["step"]
    assert (tmp_path / "head-run" / f"checkpoint-{last:08d}" / "progress.json").is_file()
    assert not out.exists()


@pytest.mark.parametrize("method", ["medusa", "hydra", "mlp_speculator"])
def test_a_good_run_for_comparison(shared: Path, tmp_path: Path, method: str) -> None:
    """The same command with nothing wrong gives a head."""
    out = tmp_path / "head"
    where = ("--data", str(shared / "data"), "--out", str(out))
    assert report_of("train", method, str(shared / "target"), *where, *QUICK, "--set", "num_heads=2")
    assert (out / "model.safetensors").is_file()
