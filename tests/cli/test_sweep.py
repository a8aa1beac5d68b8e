"""`foretoken sweep` on a tiny model: killed, stopped and gone on with, shown again, and refused."""

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_refused, done, refused, report_of, run
from disks import everything
from end_to_end.tiny_llms import target, tokenizer
from forked import ForkedCommand

from foretoken.bench import plots
from foretoken.bench.sweep import RESULTS, SweepResults

AXES = ("-s", "ngram:prompt_lookup_min=1", "--sweep", "num_speculative_tokens=1,2", "--temperature", "0",
        "--temperature", "0.8", "--together", "1", "--max-tokens", "4", "--threads", "1")  # fmt: skip
NUM_POINTS = 4


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and prompts for it."""
    place = tmp_path_factory.mktemp("sweep") / "small"
    target().save_pretrained(place)
    tokenizer().save_pretrained(place)
    prompts = [json.dumps({"prompt": text}) for text in ("the thing the thing", "ab ab ab ab ab")]
    place.with_name("prompts.jsonl").write_text("\n".join(prompts))
    return place


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws nothing: that takes longer than measuring, and has tests of its own."""
    monkeypatch.setattr(plots, "write_plots", lambda panels, directory, what: [])


def command(small: Path, out: Path, *more: str) -> list[str]:
    prompts = str(small.with_name("prompts.jsonl"))
    return ["sweep", str(small), *AXES, "--prompts", prompts, "--out", str(out), *more]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_a_killed_sweep_goes_on_where_it_was(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    results = out / RESULTS
    with ForkedCommand(*command(small, out)) as child:
        while not results.is_file() or results.read_bytes().count(b"\n") < 2:  # the conditions and one point
            assert child.poll() is None, "it ended before it could be killed"
            time.sleep(0.001)
        child.send_signal(signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    before = results.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    measured = whole.count(b"\n") - 1
    assert 1 <= measured < NUM_POINTS
    results.write_bytes(whole + b'{"key": "{\\"serving')  # killed in the middle of writing

    result = done(*command(small, out, "--json"))
    points = json.loads(result.stdout)["points"]
    assert results.read_bytes().startswith(whole), "a point that was measured stays as it is"
    assert results.read_bytes().count(b"\n") == 1 + NUM_POINTS
    assert f"{measured} of {NUM_POINTS} points are measured; continuing" in result.stderr
    assert {(point["serving.temperature"], point["changes.num_speculative_tokens"]) for point in points} == {
        (temperature, depth) for temperature in (0.0, 0.8) for depth in (1, 2)
    }
    for point in points:
        assert point["num_identical"] == point["num_texts"] == point["num_rounds"] == 2
        assert point["tau"] > 1.0, "the prompts repeat themselves"
        assert sum(point[f"shares.{part}"] for part in ("draft", "verify", "host")) == pytest.approx(1.0)
        assert point["tokens_per_s.low"] <= point["tokens_per_s.median"] <= point["tokens_per_s.high"]
    kept = SweepResults(out).points
    assert {(result.nodes, result.tau) for result in kept} == {(point["nodes"], point["tau"]) for point in points}


@pytest.mark.usefixtures("no_pictures")
def test_one_that_is_told_to_stop_ends_after_the_points_in_work(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, added, real = tmp_path / "out", list[str](), SweepResults.add

    def add(self: SweepResults, point: Any, result: Any) -> None:
        if not added:
            signal.raise_signal(signal.SIGINT)
        real(self, point, result)
        added.append(result.name)

    monkeypatch.setattr(SweepResults, "add", add)
    stopped = run(*command(small, out, "--together", "2"))
    assert stopped.returncode == 130
    assert stopped.stdout == ""
    assert "stopping after the current points" in stopped.stderr
    assert f"stopped with 2 of {NUM_POINTS} points left; the same command continues from '{out}'" in stopped.stderr
    assert len(added) == 2, "both of those that were measured together are kept"
    whole = report_of(*command(small, out))
    assert len(added) == len(whole["points"]) == NUM_POINTS
    again = report_of("sweep", str(out))
    assert again["points"] == whole["points"]
    assert again["target"]["vocab_size"] == 67

    assert_refused("was measured with seed 0, and seed is 5 now", *command(small, out, "--seed", "5"))
    assert len(added) == NUM_POINTS


def test_the_table_marks_fronts_and_names_what_was_left_out(small: Path, tmp_path: Path) -> None:
    (tmp_path / "grid.toml").write_text('method = ["ngram", "medusa"]\nprompt_lookup_min = [1, 9]\n')
    arguments = ["sweep", str(small), "--grid", str(tmp_path / "grid.toml"), "--temperature", "0", "--max-tokens", "4"]
    arguments += ["--prompts", str(small.with_name("prompts.jsonl")), "--batch-size", "2", "--runner", "generic"]
    result = done(*arguments, "--sweep", "prompt_lookup_max=3,9", "--out", str(tmp_path / "out"), "--wide")
    assert "dtype auto, runner generic, batch size 2, temperature 0; plain decoding" in result.stdout
    rows = [line for line in result.stdout.splitlines() if line.startswith(" ngram") and "/2" in line]
    assert len(rows) == 3
    assert sum("tokens/s" in row for row in rows) >= 1
    assert "front by: no other point has as much tau, or as many tokens/s, with fewer drafted nodes" in result.stdout
    assert "points, " in result.stderr
    assert "a minute, about 0:00 left" in result.stderr
    assert "ngram prompt_lookup_min=9 prompt_lookup_max=3" in result.stdout.partition("left out: ")[2]
    assert "left out: method 'medusa' has no key 'prompt_lookup_max'. Known: " in result.stdout


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (("--sweep", "max_nodes=1"), "every combination is refused: "),
        (("--sweep", "num_speculative_tokens=3"), "'num_speculative_tokens' is swept twice"),
        (("--sweep", "max_nodes"), "not of the form KEY=VALUE,VALUE"),
        (("--grid", "no-such-file.json"), "'no-such-file.json' cannot be read"),
        (("--runner", "fastst"), "fastst"),
    ],
)
def test_what_cannot_be_swept(small: Path, tmp_path: Path, more: tuple[str, ...], part: str) -> None:
    assert_refused(part, *command(small, tmp_path / "out", *more))


def test_where_results_go_and_come_from(small: Path, tmp_path: Path) -> None:
    assert_refused("Pass --out DIR", "sweep", str(small), "-s", "ngram")
    SweepResults(tmp_path, {})
    assert_refused("holds no measured point yet", "sweep", str(tmp_path))
    assert_refused("is shown without measuring", "sweep", str(tmp_path), "--sweep", "max_nodes=2")


def test_a_directory_of_other_files_is_not_written_to(small: Path, tmp_path: Path) -> None:
    before = everything(small)
    told = refused(*command(small, small))
    assert told == f"error: '{small}' holds other files. Expected a new or empty directory.\n"
    assert everything(small) == before
    (tmp_path / "run.lock").touch()  # of a sweep that was killed before its first line
    (tmp_path / f".{RESULTS}-0a1b2c3d").touch()
    assert_refused("Did you mean 'fastest'?", *command(small, tmp_path, "--runner", "fastst"))
