"""The rivals harness: real workers over the real protocol, missing and crashing rivals, ratios from known seconds."""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafters.autoregressive_heads import directory
from tiny_models import VOCAB_SIZE, tiny_model

from benchmarks.rivals import compare as comparing
from benchmarks.rivals.__main__ import _write as write_report
from benchmarks.rivals.__main__ import parse_options
from benchmarks.rivals.compare import Comparison, FirstTokenRun, ForwardRun, Run, Settings, compare
from benchmarks.rivals.contestants import (
    CONTESTANTS,
    FORETOKEN_PLAIN,
    HF_GENERATE,
    Contestant,
    choose_contestants,
    plain_of,
    references,
)
from benchmarks.rivals.messages import Generation, Loaded
from benchmarks.rivals.prepared import PreparationError, checkpoints
from benchmarks.rivals.prompts import of_length
from benchmarks.rivals.report import as_json, as_markdown, first_token_rows, pass_rows, request_rows
from benchmarks.rivals.worker_process import WorkerProcess
from benchmarks.rivals.workers.converted import converted_path, stored_bytes

pytestmark = pytest.mark.slow

PROMPTS = [[3, 4, 5, 6, 3, 4, 5], [7, 8, 9]]
CRASHING = Contestant("crashing", "plain", "crashing")
FAULTY = Contestant("faulty", "plain", "faulty")
# Workers that answer `load` and then break down, one by dying and one by raising.
_BROKEN = """
from benchmarks.rivals.messages import Loaded
from benchmarks.rivals.workers.serve import serve
import os, sys
class Broken:
    def load(self, request):
        print("chatter on standard output")
        return Loaded(versions={{}})
    def generate(self, **question):
        {breaks}
serve(Broken())
"""
_BREAKS = {
    "crashing": "print('out of llamas', file=sys.stderr); sys.stderr.flush(); os._exit(7)",
    "faulty": "raise KeyError('no such weight')",
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rivals") / "tiny"
    model = tiny_model("llama", num_hidden_layers=2, eos_token_id=None, bos_token_id=None)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def settings(model_dir: Path, tmp_path: Path) -> Settings:
    return Settings(
        model=str(model_dir),
        dtype="float32",
        threads=1,
        prompts=PROMPTS,
        max_tokens=6,
        first_prompts=of_length(PROMPTS, 9),
        widths=(1, 3),
        context=8,
        repeats=1,
        env_dir=tmp_path,
        timeout_s=120.0,
    )


def broken_command(rival: str) -> list[str]:
    return [sys.executable, "-c", _BROKEN.format(breaks=_BREAKS[rival])]


def test_real_workers_agree_and_broken_ones_are_left_out(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_process = comparing.WorkerProcess

    def start(name: str, command: list[str], **arguments: object) -> WorkerProcess:
        rival = name.partition(".")[0]
        return real_process(name, broken_command(rival) if rival in _BREAKS else command, **arguments)

    monkeypatch.setattr(comparing, "WorkerProcess", start)
    monkeypatch.setattr(comparing, "python_of", lambda rival, _: None if rival == "llama_cpp" else Path(sys.executable))
    said: list[str] = []
    missing = next(c for c in CONTESTANTS if c.rival == "llama_cpp")

    result = compare(settings, [CRASHING, HF_GENERATE, missing, FAULTY, FORETOKEN_PLAIN], said.append)

    assert [c.name for c in result.contestants] == ["hf.generate", "foretoken.plain"]
    assert result.skipped == [
        "llama_cpp.plain is skipped: llama_cpp is not installed. "
        f"Run: python -m benchmarks.rivals install llama_cpp --env-dir {tmp_path}"
    ]
    assert result.failures == [
        "crashing.plain ended with status 7 during generate, its last words: out of llamas. It is left out.",
        "faulty.plain failed at generate: KeyError: 'no such weight'. It is left out.",
    ]
    texts = {(run.contestant, run.prompt): run.generation for run in result.runs}
    assert len(texts) == 4
    for index, prompt in enumerate(PROMPTS):
        want = greedy_by_hand(settings.model, prompt, settings.max_tokens)
        for contestant in result.contestants:
            got = texts[contestant.name, index]
            assert got.token_ids == want, f"{contestant.name}, prompt {index}"
            assert (got.decode_tokens, got.decode_passes, got.tau) == (5, 5, 1.0)
            assert got.first_seconds is not None
            assert got.decode_seconds is not None
            assert 0 < got.decode_seconds < got.first_seconds + got.decode_seconds <= got.seconds
    assert {(run.contestant, run.width) for run in result.forwards} == {
        (c.name, width) for c in result.contestants for width in settings.widths
    }
    assert sorted((run.contestant, run.prompt) for run in result.first_tokens) == [
        (c.name, prompt) for c in sorted(result.contestants, key=lambda c: c.name) for prompt in range(2)
    ]
    assert all(run.seconds > 0 for run in result.first_tokens)
    report = as_markdown(result, ["Conditions."])
    assert "2/2" in report
    assert "## First token" in report
    assert all(sentence in report for sentence in [*result.skipped, *result.failures])
    assert json.loads(json.dumps(as_json(result)))["runs"]


def test_sampled_texts_go_by_the_seed_of_their_prompt(settings: Settings) -> None:
    sampled = replace(settings, prompts=[PROMPTS[0]] * 2, temperature=1.5, rounds=2, widths=(), first_prompts=())
    result = compare(sampled, [HF_GENERATE, FORETOKEN_PLAIN], lambda _: None)
    assert result.failures == []
    texts = {(run.contestant, run.round, run.prompt): run.generation.token_ids for run in result.runs}
    for name in (c.name for c in result.contestants):
        assert texts[name, 0, 0] == texts[name, 1, 0], name
        assert texts[name, 0, 0] != texts[name, 0, 1], name
    assert texts[HF_GENERATE.name, 0, 0] != greedy_by_hand(settings.model, PROMPTS[0], settings.max_tokens)
    rows = request_rows(result)
    assert [row.num_identical for row in rows] == [None] * 2  # engines have their own random numbers
    assert all(row.decode_ratio[FORETOKEN_PLAIN.name] is not None for row in rows)


def test_prompts_of_one_length_go_on_with_those_that_follow() -> None:
    assert of_length([[1, 2, 3], [4, 5]], 4) == [[1, 2, 3, 4], [4, 5, 1, 2]]
    assert of_length([[1, 2, 3], [4, 5]], 2) == [[1, 2], [4, 5]]
    assert of_length([[7]], 3) == [[7, 7, 7]]


def greedy_by_hand(model: str, prompt: list[int], max_tokens: int) -> list[int]:
    """Greedy decoding without cache, streamer or engine."""
    from transformers import AutoModelForCausalLM

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(max_tokens):
            tokens.append(int(module(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_a_worker_that_is_not_asked_stands_still(tmp_path: Path) -> None:
    worker = WorkerProcess("busy", broken_command("faulty"), threads=1, log=tmp_path / "log", timeout_s=60.0)
    try:
        worker._ask("load", load_fields())
        if not Path(f"/proc/{worker.pid}/stat").exists():
            pytest.skip("needs /proc")
        deadline = time.monotonic() + 10
        while state_of(worker.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)  # the kernel stops it when its threads next look
        assert state_of(worker.pid) == "T"
    finally:
        worker.close()


def state_of(pid: int) -> str:
    """The kernel's letter: R runs, S sleeps, T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def load_fields() -> dict[str, object]:
    return {"mode": "plain", "model": "m", "dtype": "float32", "threads": 1, "max_len": 8, "cache_dir": "c"}


def known_comparison() -> Comparison:
    """HF decodes 4 and 2 tokens a second; foretoken is 2 and 3 times as fast, and one of its texts differs."""
    hf, ours = HF_GENERATE.name, FORETOKEN_PLAIN.name
    base = Generation(
        token_ids=[1] * 9, seconds=4.5, first_seconds=2.5, decode_seconds=2.0, decode_tokens=8, decode_passes=8
    )
    runs = [
        Run(contestant=hf, round=0, prompt=0, generation=base),
        Run(contestant=hf, round=0, prompt=1, generation=replace(base, decode_seconds=4.0, seconds=9.0)),
        Run(contestant=ours, round=0, prompt=0, generation=replace(base, decode_seconds=1.0, seconds=3.0)),
        Run(
            contestant=ours,
            round=0,
            prompt=1,
            generation=replace(base, token_ids=[2] * 9, decode_seconds=4.0 / 3, seconds=4.5, decode_passes=2),
        ),
    ]
    seconds = {(hf, 1): 0.03, (hf, 4): 0.06, (ours, 1): 0.02, (ours, 4): 0.03}
    forwards = [ForwardRun(contestant=n, round=0, width=w, seconds=s) for (n, w), s in seconds.items()]
    loaded = {name: Loaded(versions={"torch": "1"}) for name in (hf, ours)}
    firsts = [
        FirstTokenRun(contestant=name, round=0, prompt=prompt, seconds=s)
        for name, seconds_ in ((hf, (0.2, 0.5)), (ours, (0.1, 0.1)))
        for prompt, s in enumerate(seconds_)
    ]
    return Comparison(
        contestants=[HF_GENERATE, FORETOKEN_PLAIN], loaded=loaded, runs=runs, forwards=forwards, first_tokens=firsts
    )


def test_ratios_are_those_of_the_same_prompt_and_round() -> None:
    hf, ours = request_rows(known_comparison())
    assert hf.decode_ratio[HF_GENERATE.name].median == 1.0
    assert hf.num_identical == 2
    ratio = ours.decode_ratio[HF_GENERATE.name]
    assert (ratio.median, ratio.min, ratio.max) == pytest.approx((2.5, 2.0, 3.0))
    assert hf.decode_ratio[FORETOKEN_PLAIN.name].median == pytest.approx((1 / 2 + 1 / 3) / 2)
    assert ours.request_ratio[HF_GENERATE.name].median == pytest.approx((4.5 / 3 + 9 / 4.5) / 2)
    assert ours.decode_tokens_per_s.median == pytest.approx((8 + 6) / 2)
    assert ours.tau == pytest.approx(16 / 10)
    assert (ours.num_identical, ours.num_texts) == (1, 2)


def test_passes_are_related_to_ours() -> None:
    hf, ours = pass_rows(known_comparison())
    assert hf.ratio[1].median == pytest.approx(2 / 3)
    assert hf.ratio[4].median == pytest.approx(1 / 2)
    assert hf.growth == pytest.approx({1: 1.0, 4: 2.0})
    assert ours.ratio[4].median == pytest.approx(1.0)


def test_first_tokens_are_related_to_ours() -> None:
    hf, ours = first_token_rows(known_comparison())
    assert (hf.seconds.median, hf.seconds.min, hf.seconds.max) == pytest.approx((0.35, 0.2, 0.5))
    assert hf.ratio is not None
    assert (hf.ratio.median, hf.ratio.min, hf.ratio.max) == pytest.approx((0.35, 0.2, 0.5))
    assert ours.ratio is not None
    assert ours.ratio.median == 1.0
    assert "| HF generate | 350.0 (200.0-500.0) | 0.35 (0.20-0.50) |" in as_markdown(known_comparison(), [])


def test_the_table_shows_these_ratios() -> None:
    lines = as_markdown(known_comparison(), []).splitlines()
    ours = [line for line in lines if line.startswith("| foretoken, plain")]
    assert "| 2.50 (2.00-3.00) | 1.60 |" in ours[0]
    assert ours[0].endswith("| 1/2 |")
    assert "| 20.00 (1.00x) | 30.00 (1.00x) | 1.50 |" in ours[2]


def test_a_cost_twin_is_named_in_every_report(settings: Settings, tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    twin.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 24, "hidden_size": 1024}
    record = {"cost_twin": {"of": "tinycode", "layers": 24, "hidden_size": 1024}}
    for more, name in ({}, "Model twin (llama, 24x1024), float32"), (record, "cost twin 24 x 1024 of tinycode"):
        (twin / "config.json").write_text(json.dumps({**config, **more}))
        write_report(known_comparison(), replace(settings, model=str(twin)), tmp_path / "report", [])
        assert name in (tmp_path / "report.md").read_text()
    assert json.loads((tmp_path / "report.json").read_text())["model"]["cost_twin"] == "24 x 1024 of tinycode"


def test_what_a_rival_does_not_tell_is_left_open() -> None:
    comparison = known_comparison()
    for index, run in enumerate(comparison.runs):
        bare = Generation(token_ids=run.generation.token_ids, seconds=run.generation.seconds)
        comparison.runs[index] = replace(run, generation=bare)
    ours = request_rows(comparison)[1]
    assert (ours.decode_tokens_per_s, ours.tau, ours.decode_ratio[HF_GENERATE.name]) == (None, None, None)
    assert ours.request_ratio[HF_GENERATE.name] is not None


def test_contestants_are_chosen_by_rival_or_by_name() -> None:
    names = [c.name for c in choose_contestants(["hf", "llama_cpp.plain"], has_draft=False)]
    assert names == ["hf.generate", "hf.prompt_lookup", "llama_cpp.plain"]
    with pytest.raises(ValueError, match=r"Did you mean 'llama_cpp'\?"):
        choose_contestants(["llama.cpp"], has_draft=False)
    with pytest.raises(ValueError, match="--draft-model"):
        choose_contestants(["hf.assisted"], has_draft=False)


def test_heads_beside_the_model_take_part(tmp_path: Path) -> None:
    for name in ("eagle3", "hass"):
        (tmp_path / f"small-{name}").symlink_to(directory("eagle3" if name == "eagle3" else "eagle"))
    (tmp_path / "small-notes").mkdir()
    chosen = choose_contestants(["foretoken"], has_draft=False, model=tmp_path / "small")
    modes = ["plain", "ngram", "eagle3", "hass", "ngram+eagle3", "ngram+hass"]
    assert [c.name for c in chosen] == [f"foretoken.{mode}" for mode in modes]
    assert [c.title for c in chosen][3:5] == ["foretoken, HASS", "foretoken, n-gram + EAGLE-3"]
    others = choose_contestants(["openvino", "vllm"], has_draft=False, model=tmp_path / "small")
    assert [c.name for c in others if c.mode == "eagle3"] == ["openvino.eagle3", "vllm.eagle3"]
    names = [c.name for c in choose_contestants(["foretoken.hass"], has_draft=False, model=tmp_path / "small")]
    assert names == ["foretoken.hass"]
    with pytest.raises(ValueError, match=r"there is no contestant 'foretoken\.hass'"):
        choose_contestants(["foretoken.hass"], has_draft=False, model=tmp_path / "other")


def test_prompts_must_fit(settings: Settings) -> None:
    with pytest.raises(ValueError, match="Lower --max-tokens"):
        compare(replace(settings, max_tokens=10_000), [], print)
    assert max(max(prompt) for prompt in PROMPTS) < VOCAB_SIZE


def test_options_are_json_or_text() -> None:
    assert parse_options(["vllm:enforce_eager=true", "openvino.plain:ATTENTION_BACKEND=SDPA"]) == {
        "vllm": {"enforce_eager": True},
        "openvino.plain": {"ATTENTION_BACKEND": "SDPA"},
    }
    with pytest.raises(ValueError, match="NAME:KEY=VALUE"):
        parse_options(["vllm"])


def test_rounded_contestants_are_chosen_by_rival_format_or_mode() -> None:
    def names(*only: str, bits: int = 4, has_draft: bool = False) -> list[str]:
        return [c.name for c in choose_contestants(only, has_draft=has_draft, bits=bits)]

    assert names("foretoken.plain", "llama_cpp.Q4_0") == [
        "llama_cpp.Q4_0.plain",
        "llama_cpp.Q4_0.no_flash",
        "llama_cpp.Q4_0.prompt_lookup",
        "foretoken.int4.plain",
        "foretoken.w4a8.plain",
    ]
    assert names("vllm.draft_model", "foretoken.w8a8.ngram", bits=8, has_draft=True) == [
        "vllm.W8A8.draft_model",
        "foretoken.w8a8.ngram",
    ]
    assert {name.partition(".")[0] for name in names()} == {"llama_cpp", "openvino", "vllm", "foretoken"}
    with pytest.raises(ValueError, match=r"no contestant 'hf\.generate' in 4 bits"):
        names("hf.generate")
    with pytest.raises(ValueError, match=r"foretoken\.int4\.draft_model needs a draft model"):
        names("foretoken.draft_model")


def test_rounded_contestants_are_compared_with_their_own_plain_decoding() -> None:
    chosen = choose_contestants(["foretoken", "openvino", "llama_cpp"], has_draft=False, bits=4)
    by_name = {c.name: c for c in chosen}
    assert [c.name for c in references(chosen)] == ["foretoken.int4.plain"]
    assert plain_of(by_name["foretoken.w4a8.ngram"], chosen) == by_name["foretoken.w4a8.plain"]
    assert plain_of(by_name["openvino.int4_asym.prompt_lookup"], chosen) == by_name["openvino.int4_asym.plain"]
    assert plain_of(by_name["llama_cpp.Q4_0.prompt_lookup"], chosen) == by_name["llama_cpp.Q4_0.no_flash"]
    assert plain_of(by_name["foretoken.int4.plain"], chosen) is None


def test_agreement_and_sizes_of_rounded_contestants_are_shown() -> None:
    names = ("openvino.int4_asym.plain", "openvino.int4_asym.draft_model", "foretoken.int4.plain")
    everybody = choose_contestants([], has_draft=True, bits=4)
    theirs, drafting, ours = (next(c for c in everybody if c.name == name) for name in names)
    texts = {
        theirs.name: [[1, 2, 4, 4], [5, 6]],
        drafting.name: [[1, 2, 4, 4], [6, 6]],
        ours.name: [[1, 2, 3, 4], [5, 6]],
    }
    runs = [
        Run(contestant=name, round=0, prompt=prompt, generation=Generation(token_ids=text, seconds=1.0))
        for name, both in texts.items()
        for prompt, text in enumerate(both)
    ]
    loaded = {name: Loaded(versions={}, model_bytes=200_000_000) for name in names}
    loaded[drafting.name] = Loaded(versions={}, model_bytes=200_000_000, draft_bytes=30_000_000)
    comparison = Comparison(contestants=[theirs, drafting, ours], loaded=loaded, runs=runs)
    rows = request_rows(comparison)
    assert [row.num_as_plain for row in rows] == [None, 1, None]
    assert [row.num_leading for row in rows] == [2.0, 1.0, 3.0]
    assert [row.num_identical for row in rows] == [None] * 3
    assert list(rows[0].decode_ratio) == [ours.name]
    lines = as_markdown(comparison, []).splitlines()
    line = next(line for line in lines if line.startswith("| OpenVINO GenAI, draft model, int4_asym |"))
    assert line.endswith("| 200 + 30 | 1/2 | 1.0 | - |")
    sampled = request_rows(replace_greedy(comparison))
    assert [(row.num_as_plain, row.num_leading) for row in sampled] == [(None, None)] * 3


def replace_greedy(comparison: Comparison) -> Comparison:
    """The same runs, called sampled."""
    return Comparison(
        is_greedy=False, contestants=comparison.contestants, loaded=comparison.loaded, runs=comparison.runs
    )


def test_foretoken_rounds_as_it_is_asked(model_dir: Path, settings: Settings) -> None:
    chosen = choose_contestants(["foretoken.plain", "foretoken.ngram"], has_draft=False, bits=4)
    result = compare(replace(settings, dtype="bfloat16", bits=4, widths=(), first_prompts=()), chosen, lambda _: None)
    assert result.failures == []
    assert [c.name for c in result.contestants] == [c.name for c in chosen]
    sizes = [result.loaded[c.name].model_bytes for c in chosen]
    assert all(size is not None and 0 < size < stored_bytes(model_dir) for size in sizes)
    assert all(row.num_as_plain in (None, row.num_texts) for row in request_rows(result))


def test_conversions_go_by_weights_and_recipe(model_dir: Path, tmp_path: Path) -> None:
    def path(form: str, recipe: str = "") -> Path:
        return converted_path(str(tmp_path), str(model_dir), form, ".gguf", recipe)

    assert path("Q4_0", "one") == path("Q4_0", "one")
    assert len({path("bfloat16"), path("Q4_0", "one"), path("Q4_0", "other")}) == 3


def test_vllm_gets_a_checkpoint_that_foretoken_wrote(model_dir: Path, tmp_path: Path) -> None:
    (vllm,) = choose_contestants(["vllm.plain"], has_draft=False, bits=8)
    target, draft = checkpoints(vllm, str(model_dir), None, str(tmp_path))
    config = json.loads((Path(target) / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert (stored_bytes(target) < stored_bytes(model_dir), draft) == (True, None)
    assert checkpoints(vllm, str(model_dir), None, str(tmp_path)) == (target, None)  # made once
    (plain,) = choose_contestants(["vllm.plain"], has_draft=False)
    assert checkpoints(plain, str(model_dir), "draft", str(tmp_path)) == (str(model_dir), "draft")
    (narrow,) = choose_contestants(["vllm.plain"], has_draft=False, bits=4)
    with pytest.raises(PreparationError, match=r"`foretoken quantize tiny` failed: .*groups"):  # it is 48 wide, not 128
        checkpoints(narrow, str(model_dir), None, str(tmp_path))


def test_other_engines_get_eagle3_heads_in_their_layout(tmp_path: Path) -> None:
    model = tmp_path / "small"
    tiny_model("llama").save_pretrained(model)
    Path(f"{model}-eagle3").symlink_to(directory("eagle3"))
    chosen = choose_contestants(["openvino.eagle3", "vllm.eagle3"], has_draft=False, model=model)
    heads = [Path(checkpoints(c, str(model), None, str(tmp_path / "cache"))[1] or "") for c in chosen]
    names = [json.loads((head / "config.json").read_text())["architectures"] for head in heads]
    assert names == [["LlamaForCausalLMEagle3"], ["Eagle3Speculator"]]
    assert all((head / "model.safetensors").exists() for head in heads)
