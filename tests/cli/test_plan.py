"""`foretoken plan`: on the bundled model and on described machines; what it writes, and what it refuses."""

import shutil
from pathlib import Path

import pytest
import yaml
from command_line import MODEL, ROOT, assert_refused, output_of, report_of
from tiny_models import tiny_config

from foretoken.planning import measure

FAST = ("--bandwidth", "3350", "--flops", "989", "--memory", "80")
QUICK = ("-s", "ngram", "--num-prompts", "2", "--max-tokens", "24", "--temperature", "0", "--batch-size", "1")


@pytest.fixture(autouse=True)
def _few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times each pass twice, for a moment: no figure here has to be true of this machine."""
    monkeypatch.setattr(measure, "_PASS_ROUNDS", 2)
    monkeypatch.setattr(measure, "_ROUND_S", 0.05)
    monkeypatch.setattr(measure, "_DRAFT_ROUNDS", 1)


def test_a_measured_plan_of_the_bundled_model(tmp_path: Path) -> None:
    lengths, picture = tmp_path / "lengths.yaml", tmp_path / "plan.svg"
    files = ("--save-acceptance", str(lengths), "--out", str(picture))
    (page,) = report_of("plan", MODEL, *QUICK, "--measure", "--batch-size", "2", *files)["temperatures"]
    assert [each["batch_size"] for each in page["batches"]] == [1, 2]
    predictions = page["batches"][0]["predictions"]
    assert {each["drafter"] for each in predictions} == {"plain", "ngram:chain"}
    for each in predictions:
        seconds = each["verify_ms"] + each["draft_ms"] + each["host_ms"]
        assert each["tokens_per_s"] == pytest.approx(1e3 * each["mean_acceptance_length"] / seconds)
        assert each["tokens_per_s_low"] < each["tokens_per_s"] < each["tokens_per_s_high"]
    written = yaml.safe_load(lengths.read_text(encoding="utf-8"))["tinycode-ngram"]["thinking_off"]
    by_depth = {each["depth"]: each["mean_acceptance_length"] for each in predictions if each["depth"]}
    assert written == pytest.approx(by_depth, abs=1e-4)
    assert picture.read_text(encoding="utf-8").startswith("<?xml")

    again = report_of("plan", MODEL, *FAST, "-s", "ngram", "--temperature", "0", "--acceptance", f"ngram={lengths}")
    first = again["temperatures"][0]["batches"][0]["predictions"]
    assert {each["depth"]: each["mean_acceptance_length"] for each in first if each["depth"]} == pytest.approx(written)


def test_a_plan_of_a_model_that_is_rounded_at_load() -> None:
    assert report_of("plan", MODEL, *QUICK, "--measure", "--quantization", "int8")["quantization"] == "int8"


def test_a_described_machine_needs_no_weights(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / MODEL / "config.json", tmp_path / "config.json")
    told = output_of("plan", str(tmp_path), *FAST, "--temperature", "0")
    assert "batch 1: take " in told
    assert "such sequences fit" in told


@pytest.mark.parametrize(
    "drafter",
    ["hydra:chain", *(pytest.param(each, marks=pytest.mark.slow) for each in ("recycling:chain", "suffix:chain"))],
)
def test_lookups_and_heads_of_few_levels_are_measured(drafter: str) -> None:
    """Recycling knows nothing of the text on which drafts are timed; the head has four levels, fewer than are tried."""
    (batch,) = report_of("plan", MODEL, "-s", drafter, *QUICK[2:], "--measure")["temperatures"][0]["batches"]
    depths = [each["depth"] for each in batch["predictions"] if each["drafter"] == drafter]
    assert max(depths) == (4 if drafter.startswith("hydra") else 8)
    assert all(each["tokens_per_s"] > 0 for each in batch["predictions"])


def test_a_drafter_that_exists_is_timed_with_acceptance_from_a_file(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.yaml"
    lengths.write_text("tinycode-hass: {thinking_off: {1: 1.9, 2: 2.6}}", encoding="utf-8")
    told = report_of("plan", MODEL, "-s", "hass:chain", "--acceptance", f"hass={lengths}", *QUICK[2:])
    (batch,) = told["temperatures"][0]["batches"]
    found = {each["setup"]: each for each in batch["predictions"]}
    one, two = (found[f"hass:chain:num_speculative_tokens={depth}"] for depth in (1, 2))
    assert (one["nextn_accepted"], two["nextn_accepted"]) == (0.9, 1.6)
    assert 0 < one["draft_ms"] < two["draft_ms"]
    assert found["plain"]["draft_ms"] == 0


def test_a_gain_of_two_percent_is_not_decided(tmp_path: Path) -> None:
    lengths = tmp_path / "lengths.yaml"
    lengths.write_text("tinycode-ngram: {thinking_off: {1: 1.02}}", encoding="utf-8")
    arguments = ("plan", MODEL, *FAST, "-s", "ngram", "--acceptance", f"ngram={lengths}", *QUICK[6:])
    told = output_of(*arguments)
    assert "batch 1: not decided. ngram:chain:num_speculative_tokens=1 may give 0.8" in told
    assert "take" not in told
    assert "drafting pays" not in told
    (page,) = report_of(*arguments)["temperatures"]
    assert [(each["verdict"], each["best"]) for each in page["batches"]] == [("not decided", None)]


def test_a_machine_that_should_not_draft(tmp_path: Path) -> None:
    slow = ("--bandwidth", "3350", "--flops", "0.001", "--memory", "80")
    told = output_of("plan", MODEL, *slow, "--temperature", "0", "--batch-size", "1", "--batch-size", "16")
    assert told.count("do not draft") == 2
    assert "take" not in told


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--bandwidth", "100"), "--flops is missing"),
        (
            ("--measure", "-s", "ngram", "--max-tokens", "1", *QUICK[2:4], "--batch-size", "1"),
            "too few to time iterations",
        ),
        ((*FAST, "--measure"), "--measure runs on this machine"),
        ((*FAST, "--quantization", "int8"), "--quantization is timed on this machine"),
        (("--bandwidth", "-1", "--flops", "1", "--memory", "1"), "--bandwidth is -1"),
        (("--acceptance", "eagle"), "Expected DRAFTER=PATH"),
        (("--acceptance", "eagle=missing.yaml"), "'missing.yaml' cannot be read"),
        (("-s", "ngram+hass"), "several drafters"),
        ((*FAST, "-s", "lookahead"), "the acceptance of lookahead:tree is not known"),
        (("--out", "README.md"), "'README.md' exists"),
        ((*FAST, "--out", "{out}.bmp"), "ends in .svg or .png"),
    ],
)
def test_wrong_input_is_one_sentence(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    assert_refused(sentence, "plan", MODEL, *(each.format(out=tmp_path / "plan") for each in arguments))


@pytest.mark.parametrize("drafter", ["early_exit", "sparse_kv:chain"])
def test_recurrent_layers_refuse_drafts_by_a_part_of_the_target(drafter: str, tmp_path: Path) -> None:
    tiny_config("qwen3_5").save_pretrained(tmp_path)
    lengths = tmp_path / "lengths.yaml"
    lengths.write_text("x: {thinking_off: {1: 1.9, 2: 2.6}}", encoding="utf-8")
    known = ("--acceptance", f"{drafter}={lengths}")
    message = ("cannot draft for it", "has recurrent layers", "Use a lookup, a draft model or a head.")
    assert_refused(message, "plan", str(tmp_path), *FAST, "-s", drafter, *known)
    assert "early_exit" in output_of("plan", MODEL, *FAST, "-s", "early_exit", *known[:1], f"early_exit={lengths}")


def test_an_unknown_acceptance_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(measure, "measure")
    assert_refused("the acceptance of lookahead:tree is not known", "plan", MODEL, "-s", "lookahead")
