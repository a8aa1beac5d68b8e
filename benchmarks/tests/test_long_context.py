"""Prompts, bytes, counting and real runs of the benchmark of long texts."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.long_context import sizes
from benchmarks.long_context.__main__ import main
from benchmarks.long_context.passes import PassBytes, bytes_of, row_bytes
from benchmarks.long_context.positions import Bins, Line, repeated_share
from benchmarks.long_context.prompts import TAIL, prompts_of
from benchmarks.long_context.report import break_even, positions_table, sizes_table, verdict
from benchmarks.long_context.sizes import Cell, Meter, Switch
from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.records import SequenceStep, StageSeconds, StepRecord
from foretoken.entrypoints.config import checked_setup

pytestmark = pytest.mark.slow

MODEL = str(Path(__file__).parents[2] / "models" / "tinycode16k")
TEXTS = [[1000 * text + at for at in range(200)] for text in range(5)]


def step(request: str = "a", *, emitted: int = 1, depth: int = 0, ends_prompt: bool = False) -> SequenceStep:
    return SequenceStep(
        request_id=request, num_drafted=depth, tree_depth=depth, num_accepted=emitted - 1, num_emitted=emitted,
        accepted_by={}, ends_prompt=ends_prompt,
    )  # fmt: skip


def record(*steps: SequenceStep, prompt: int = 0) -> StepRecord:
    return StepRecord(sequences=steps, num_tokens=len(steps), seconds=StageSeconds(), num_prompt_tokens=prompt)


def cell(*, setup: str = "ngram", drafted: float = 20.0, draft: float | None = 10.0) -> Cell:
    return Cell(
        rows=4096, batch=2, setup=setup, passes=PassBytes(100.0, draft), plain=[10.0, 10.0, 5.0],
        drafted=[drafted, drafted, 5.0], tokens=60, iterations=10, levels=40, num_same=5, num_texts=6,
    )  # fmt: skip


def test_prompts_share_all_but_their_tails() -> None:
    prompts = prompts_of(TEXTS, 300, 12)
    assert {len(prompt) for prompt in prompts} == {300}
    assert len({tuple(prompt) for prompt in prompts}) == 12
    shared = [*TEXTS[0], *TEXTS[1]][-(300 - TAIL) :]
    assert all(prompt[:-TAIL] == shared for prompt in prompts)
    ends = [prompt[-TAIL:] for prompt in prompts]
    assert ends[:5] == [TEXTS[text][-TAIL:] for text in (1, 0, 2, 3, 4)]
    assert ends[5] == TEXTS[2][-2 * TAIL : -TAIL]


@pytest.mark.parametrize(("length", "number"), [(1100, 1), (300, 1000), (TAIL, 1)])
def test_too_few_tokens_are_refused(length: int, number: int) -> None:
    with pytest.raises(RequestError, match="Expected more tokens"):
        prompts_of(TEXTS, length, number)


def test_modelled_bytes() -> None:
    passes = PassBytes(plain=100.0, draft=25.0)
    assert passes.speed_up(tau=3.0, levels=4.0) == 3.0 * 100.0 / (100.0 + 4 * 25.0)
    assert passes.of_token(tau=2.0, levels=4.0, batch=5) == 200.0 / 10
    assert PassBytes(100.0, None).speed_up(3.0, 4.0) is None
    assert passes.speed_up(tau=1.0, levels=0.0) == 1.0
    rows = break_even(600e6, 48 * 1024, 4)
    assert 4 * rows * 48 * 1024 == pytest.approx(600e6)


@pytest.mark.parametrize(
    "name",
    [
        "sparse_kv:kv_budget=64",
        "draft_model",
        "draft_model:draft_window_size=64",
        "eagle",
        "spire",
        "spire:quantization=none",
        "ngram",
    ],
)
def test_bytes_of_passes_are_those_of_the_files(name: str) -> None:
    setup = checked_setup(f"{name}:num_speculative_tokens=2", target=MODEL)
    with LLM(MODEL, speculative_config=setup.config, dtype="bfloat16", max_num_seqs=2, max_model_len=512) as llm:
        row = row_bytes(llm.handle.model)
        cache = llm.target.cache
        assert row == sum(part[0, :, 0].nbytes for part in (*cache.keys, *cache.values))
        passes = bytes_of(setup, llm, rows=300, batch=2)
        weights = sum(each.nbytes for each in llm.handle.model.module.parameters())
        assert passes.plain == weights + 2 * 300 * row
        head = llm.handle.model.module.get_output_embeddings().weight.nbytes
    files = {which: Path(f"{MODEL}-{which}/model.safetensors").stat().st_size for which in ("draft", "eagle", "spire")}
    config = json.loads(Path(f"{MODEL}-draft/config.json").read_text())
    draft_row = 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert (
        passes.draft
        == {
            "sparse_kv:kv_budget=64": weights + 2 * 64 * row,
            "draft_model": files["draft"] + 2 * 300 * draft_row,
            "draft_model:draft_window_size=64": files["draft"]
            + 2 * (4 + 64 + 64) * draft_row,  # sinks, window, its room
            "eagle": (files["eagle"] + head) / 2 + 2 * 300 * row / 12,  # int8
            "spire": (files["spire"] + head) / 2 + 2 * (4 + 256 - 1) * 2 * (2 * row) / 12,  # two blocks, float32
            "spire:quantization=none": files["spire"] + head + 2 * (4 + 256 - 1) * 2 * (2 * row) / 12,
            "ngram": 0.0,
        }[name]
    )


def test_the_meter_counts_iterations_of_the_whole_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr(sizes.time, "perf_counter", lambda: float(next(clock)))
    meter = Meter()
    meter.start(2)
    both = (step("a", emitted=3, depth=4), step("b", emitted=1, depth=2))
    not_counted = [
        record(step(), step("b"), prompt=5), record(step(ends_prompt=True), step("b")), record(*both), record(*both),
    ]  # fmt: skip
    for each in [*not_counted, record(*both), record(*both), record(step())]:
        meter.add(each)
    assert (meter.tokens, meter.iterations, meter.levels, meter.seconds) == (8, 2, 8, 2.0)
    assert meter.rate == 4.0
    meter.start(2)
    with pytest.raises(ConfigError, match="Raise --tokens"):
        _ = meter.rate


def test_a_switch_turns_drafts_off_and_on() -> None:
    records: list[StepRecord] = []
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    config = {"method": "sparse_kv", "num_speculative_tokens": 3}
    depths = []
    with LLM(MODEL, speculative_config=config, max_num_seqs=1, max_model_len=512, on_step=records.append) as llm:
        switch = Switch.within(llm)
        for switch.is_on in (True, False, True):
            records.clear()
            text = llm.generate("import os\n", params)[0].outputs[0].token_ids
            depths.append(([each.sequences[0].tree_depth for each in records], text))
    (on, drafted), (off, plain), (again, also) = depths
    assert drafted == plain == also
    assert max(on) == max(again) == 3
    assert off == [0] * 12
    assert again[1] == 0  # the drafters have missed the text until then: why the first iterations do not count


def test_positions_are_those_of_the_first_token_of_a_pass() -> None:
    bins = Bins(2)
    bins.add(record(step(ends_prompt=True), step("b", ends_prompt=True)))
    for _ in range(171):
        bins.add(record(step(emitted=3, depth=2), step("b")))
    assert bins.passes == [171 + 171, 0]  # the last pass begins at token 511
    bins.add(record(step(emitted=3), step("b")))
    assert (bins.passes, bins.emitted) == ([343, 1], [171 * 3 + 172, 3])


def test_repeated_grams_are_counted() -> None:
    assert repeated_share(list(range(200))) == 0.0
    assert repeated_share([7] * 65) == 0.5
    assert repeated_share([7] * 10) == 0.0


def test_tables() -> None:
    setup = "sparse_kv kv_selection=vegas num_speculative_tokens=4"
    table = sizes_table([cell(), cell(setup=setup, drafted=30.0), cell(setup="rest", draft=None)])
    assert "| 4,096 | 2 | sparse_kv vegas, depth 4 | 10.0 | 30.0 | **3.00** (1.00-3.00) | 2.14 | 3.00 | 4.00 |" in table
    assert "| ngram | 10.0 | 20.0 | 2.00 (1.00-2.00) | 2.14 | 3.00 | 4.00 | 5/6 | 0 | 0 |" in table
    assert "| rest | 10.0 | 20.0 | 2.00 (1.00-2.00) |  | 3.00 |" in table
    good = Line(setup="ngram", temperature=0.8, emitted=[40, 30], passes=[10, 10], repeated=0.0, seconds=1.0)
    bad = Line(setup="eagle", temperature=0.8, emitted=[40, 19], passes=[10, 10], repeated=0.0, seconds=1.0)
    looping = Line(setup="suffix", temperature=0.0, emitted=[40, 10], passes=[10, 10], repeated=0.9, seconds=1.0)
    assert "with no drafter; the least share is 75%, of ngram at T 0.8" in verdict([good, looping])
    assert "Texts at T 0 loop" in verdict([good, looping])
    assert "below half of its first value with eagle" in verdict([good, bad])
    assert "| 0.8 | eagle | 4.00 | 1.90 | 48% | 0% |" in positions_table([good, bad])


def test_a_run_by_size_goes_on_where_it_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = ["--rows", "300", "--tokens", "24", "--rounds", "1", "--threads", "1"]
    common += ["--out", str(tmp_path / "run"), "--runs", str(tmp_path)]
    drafters = ["--drafters", "sparse_kv:kv_budget=64:num_speculative_tokens=3", "ngram"]
    assert main(["sizes", *common, "--batch", "1", *drafters]) == 0
    first = json.loads((tmp_path / "run.json").read_text())["lines"]
    assert main(["sizes", *common, "--batch", "1", "2", *drafters]) == 0
    found = json.loads((tmp_path / "run.json").read_text())
    assert found["lines"][:2] == first
    assert [(line["batch"], line["setup"].split()[0]) for line in found["lines"]] == [
        (1, "sparse_kv"), (1, "ngram"), (2, "sparse_kv"), (2, "ngram"),
    ]  # fmt: skip
    assert all(line["num_same"] == line["num_texts"] == line["batch"] for line in found["lines"])
    assert all(Cell.read(line).tau >= 1 for line in found["lines"])
    assert Cell.read(found["lines"][0]).depth > 0
    report = (tmp_path / "run.md").read_text()
    assert report in capsys.readouterr().out
    assert "The machine was" in report
    if find_spec("matplotlib"):
        assert "sparse_kv" in (tmp_path / "run.svg").read_text()
        assert {path.name for path in tmp_path.iterdir()} >= {"run.png", "run-dark.svg"}


def test_cells_of_other_runs_join_a_report(tmp_path: Path) -> None:
    common = ["sizes", "--rows", "300", "--tokens", "24", "--rounds", "1", "--threads", "1", "--runs", str(tmp_path)]
    common += ["--drafters", "ngram"]
    first, second = tmp_path / "first", tmp_path / "second"
    assert main([*common, "--batch", "1", "2", "--out", str(first)]) == 0
    assert main([*common, "--batch", "1", "--out", str(second), "--also", f"{first}.json"]) == 0
    report = second.with_suffix(".md").read_text()
    assert "Cells of another run, `first.json` (commit" in report
    assert [row.split("|")[2].strip() for row in report.splitlines() if "| ngram" in row] == ["1", "2"]
    assert len(json.loads(second.with_suffix(".json").read_text())["lines"]) == 1, "its own"


def test_what_does_not_fit_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "available_bytes", lambda: (1 << 30) + (8 << 20))
    run = ["sizes", "--rows", "300", "--batch", "1", "8", "--tokens", "24", "--rounds", "1", "--threads", "1"]
    run += ["--drafters", "ngram", "--out", str(tmp_path / "run"), "--runs", str(tmp_path)]
    assert main(run) == 0
    assert "- ngram behind 300 rows in a batch of 8: its KV rows need 1.0 GiB" in (tmp_path / "run.md").read_text()
    short = [{"24": "3", str(tmp_path / "run"): str(tmp_path / "short")}.get(each, each) for each in run]
    assert main(short) == 2
    assert "ngram behind 300 rows: the texts ended before any iteration counted" in capsys.readouterr().err
    assert main([*run[:2], "20000", *run[3:]]) == 2
    assert "more than the 16384 positions" in capsys.readouterr().err


def test_a_run_by_position(tmp_path: Path) -> None:
    run = ["positions", "--tokens", "40", "--num-prompts", "2", "--prompt-tokens", "64", "--temperatures", "0.8"]
    run += ["--drafters", "eagle:num_speculative_tokens=2", "ngram:num_speculative_tokens=2", "--threads", "1"]
    assert main([*run, "--out", str(tmp_path / "run"), "--runs", str(tmp_path)]) == 0
    lines = [Line(**line) for line in json.loads((tmp_path / "run.json").read_text())["lines"]]
    assert [sum(line.emitted) for line in lines] == [2 * 39, 2 * 39]  # the prompts' passes gave the first tokens
    assert all(0 < sum(line.passes) <= 2 * 39 for line in lines)
    assert "least" in (tmp_path / "run.md").read_text()


def test_a_run_along_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["positions", "--along-texts", "--num-prompts", "2", "--prompt-tokens", "64", "--temperatures", "0"]
    run += ["--drafters", "ngram:num_speculative_tokens=2", "--threads", "1", "--runs", str(tmp_path)]
    assert main([*run, "--tokens", "600", "--out", str(tmp_path / "run")]) == 0
    (line,) = [Line(**line) for line in json.loads((tmp_path / "run.json").read_text())["lines"]]
    assert line.emitted == [
        2 * 8 * 11,
        2 * 2 * 11,
    ]  # ten outputs of twelve tokens for each text; the first are prompts'
    assert main([*run, "--tokens", "16000", "--out", str(tmp_path / "long")]) == 2
    assert "has no text of 16064 tokens" in capsys.readouterr().err
