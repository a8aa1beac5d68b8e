"""`foretoken bench serve` against a server whose tokens, pauses and errors are known, and against the real one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench.scripted_server import NUM_INPUT, ScriptedServer
from cli.command_line import MODEL, Finished, run
from served_app import served

from foretoken.bench.serving import DraftCounts, arrival_times, page_counts

FIGURES = ("mean", "median", "std", "p50", "p90", "p99")
VLLM_KEYS = {
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput",
    "request_goodput", "output_throughput", "total_token_throughput", "input_lens", "output_lens", "ttfts", "itls",
    "latencies", "generated_texts", "start_times", "errors", "max_output_tokens_per_s", "max_concurrent_requests",
    *(f"{what}_ttft_ms" for what in FIGURES), *(f"{what}_tpot_ms" for what in FIGURES),
    *(f"{what}_itl_ms" for what in FIGURES), *(f"{what}_e2el_ms" for what in FIGURES),
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_draft_tokens", "spec_decode_accepted_tokens", "spec_decode_per_position_acceptance_rates",
}  # fmt: skip


def load(app: ScriptedServer, place: Path, prompts: list[str], *arguments: str) -> tuple[Finished, dict[str, Any]]:
    """Runs the command against an application; its output, and the file it saved."""
    given, saved = place / "prompts.jsonl", place / "result.json"
    given.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    count = () if "--num-prompts" in arguments else ("--num-prompts", str(len(prompts)))
    with served(app) as url:
        finished = run(
            "bench", "serve", "--base-url", url, "--prompts", str(given), *count, "--save-result", str(saved),
            *arguments,
        )  # fmt: skip
    return finished, json.loads(saved.read_text()) if saved.exists() else {}


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_figures_are_those_of_the_script(tmp_path: Path, endpoint: str) -> None:
    app = ScriptedServer()
    prompts = ["5 0.02", "1 0.02", "429 !", "500 !", "3 0.02", "cut !", "broken !", "429 !"]
    finished, result = load(app, tmp_path, prompts, "--endpoint", endpoint, "--max-concurrency", "2", "--seed", "5")
    assert finished.returncode == 0, finished.stderr
    assert result.keys() >= VLLM_KEYS
    assert (result["completed"], result["failed"], result["rejected"]) == (3, 5, 2)
    assert result["errors_by_status"] == {"429": 2, "500": 1, "stream": 2}
    assert [bool(error) for error in result["errors"]] == [False, False, True, True, False, True, True, True]
    assert "refused with 429" in result["errors"][2]
    assert "the engine broke" in result["errors"][6]
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (3 * NUM_INPUT, 18)
    assert result["output_lens"][:2] == [10, 2]
    assert result["output_len_source"] == "usage"
    assert [len(itls) for itls in result["itls"]][:2] == [4, 0]
    assert result["output_throughput"] == pytest.approx(18 / result["duration"])
    whole = [0, 1, 4]
    for at in whole:  # pauses take at least as long as asked
        assert result["ttfts"][at] >= 0.0199
        assert result["latencies"][at] >= result["ttfts"][at] + sum(result["itls"][at])
    assert result["mean_itl_ms"] == pytest.approx(1e3 * np.mean(result["itls"][0] + result["itls"][4]))
    assert result["median_e2el_ms"] == pytest.approx(1e3 * np.median([result["latencies"][at] for at in whole]))
    after_first = {at: result["latencies"][at] - result["ttfts"][at] for at in whole}
    tpots = [after_first[0] / 9, after_first[1] / 1, after_first[4] / 5]
    assert result["p99_tpot_ms"] == pytest.approx(1e3 * np.percentile(tpots, 99))
    assert app.most_at_once == 2 == result["max_concurrent_requests"]
    assert sorted(body["seed"] for body in app.bodies) == list(range(5, 13))
    assert "requests rejected (429)" in finished.stdout
    assert "2 x 429: " in finished.stderr


def test_acceptance_is_what_was_counted_meanwhile(tmp_path: Path) -> None:
    _, result = load(ScriptedServer(), tmp_path, ["2 0", "2 0"])
    assert result["spec_decode_num_drafts"] == 8
    assert result["spec_decode_acceptance_rate"] == pytest.approx(100 * 12 / 64)
    assert result["spec_decode_acceptance_length"] == pytest.approx(1 + 12 / 8)
    assert result["spec_decode_per_position_acceptance_rates"] == pytest.approx([12 / 8])


def test_a_server_that_tells_little(tmp_path: Path) -> None:
    finished, result = load(
        ScriptedServer(has_usage=False, has_counters=False), tmp_path, ["4 0"], "--num-prompts", "3"
    )
    assert (result["output_len_source"], result["total_output_tokens"]) == ("chunks", 12)
    assert (result["total_input_tokens"], result["total_token_throughput"]) == (None, None)
    assert not [key for key in result if key.startswith("spec_decode")]
    assert "output tokens, by chunks" in finished.stdout
    assert "has 1 prompts, which are repeated" in finished.stderr


def test_an_open_loop_waits_for_no_answer(tmp_path: Path) -> None:
    app = ScriptedServer()
    _, result = load(app, tmp_path, ["1 0.5"] * 5, "--request-rate", "200", "--seed", "3")
    assert app.most_at_once > 1
    starts = np.array(result["start_times"]) - result["start_times"][0]
    assert all(starts >= np.array(arrival_times(5, 200, seed=3)) - 0.005)  # none is early


def test_arrivals_have_the_rate_and_the_spread() -> None:
    for burstiness in (0.5, 1.0, 4.0):
        gaps = np.diff(arrival_times(20_000, 5.0, burstiness=burstiness, seed=1))
        assert gaps.mean() == pytest.approx(0.2, rel=0.05)
        assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)
    assert arrival_times(3, float("inf")) == [0.0, 0.0, 0.0]
    assert arrival_times(9, 2.0, seed=4) == arrival_times(9, 2.0, seed=4) != arrival_times(9, 2.0, seed=5)


def test_a_page_with_both_names_is_counted_once() -> None:
    lines = "".join(
        f'{origin}:spec_decode_num_{name}_total{{engine="{engine}"{more}}} {value}\n'
        for origin in ("foretoken", "vllm")
        for engine in (0, 1)
        for name, more, value in (
            ("drafts", "", 2), ("draft_tokens", "", 1e1), ("accepted_tokens", "", 3),
            ("accepted_tokens_per_pos", ',position="0"', 2), ("accepted_tokens_per_pos", ',position="1"', 1),
        )
    )  # fmt: skip
    assert page_counts("# HELP x\n" + lines) == DraftCounts(4, 20, 6, {0: 4, 1: 2})
    assert page_counts("python_info 1\n") is None


def test_keys_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, _ = load(ScriptedServer(key="secret"), tmp_path, ["1 0"])
    assert refused.returncode == 2
    assert "refuses the API key" in refused.stderr
    monkeypatch.setenv("SOME_KEY", "secret")
    finished, result = load(ScriptedServer(key="secret"), tmp_path, ["1 0"], "--api-key-variable", "SOME_KEY")
    assert (finished.returncode, result["completed"]) == (0, 1)
    assert "secret" not in finished.stdout + finished.stderr + json.dumps(result)


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    for arguments, sentence in (
        (("--base-url", "localhost"), "Expected one as http://127.0.0.1:8000"),
        (("--base-url", "http://127.0.0.1:9"), "there is no server at"),
        (("--endpoint", "embeddings"), "Expected completions or chat"),
        (("--request-rate", "0"), "Expected a number above 0"),
        (("--burstiness", "0"), "Expected a number above 0"),
        (("--burstiness", "nan"), "--burstiness is nan. Expected"),
        (("--temperature", "-1"), "Expected at least 0"),
        (("--request-rate", "2", "--max-concurrency", "2"), "exclude each other"),
        (("--prompts", str(tmp_path / "none.jsonl")), "there is no prompt file"),
        (("--save-result", str(tmp_path)), "a directory"),
    ):
        finished = run("bench", "serve", *arguments)
        assert finished.returncode == 2, arguments
        assert sentence in finished.stderr
        assert "Traceback" not in finished.stderr
    assert not list(tmp_path.iterdir())


def test_no_answer_at_all_is_a_failure(tmp_path: Path) -> None:
    finished, result = load(ScriptedServer(), tmp_path, ["503 !"], "--json")
    assert finished.returncode == 1
    assert json.loads(finished.stdout)["errors_by_status"] == {"503": 1} == result["errors_by_status"]
    assert result["mean_ttft_ms"] is None


def test_the_real_server(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from foretoken import LLM, AsyncLLM
    from foretoken.server.app import ServerConfig, make_app

    llm = LLM(MODEL, speculative_config={"method": "ngram", "num_speculative_tokens": 4}, max_num_seqs=4)
    saved = tmp_path / "result.json"
    with served(make_app(AsyncLLM(llm), ServerConfig(names=["tinycode"]))) as url:
        finished = run(
            "bench", "serve", "--base-url", f"{url}/v1", "--num-prompts", "6", "--max-tokens", "24",
            "--max-concurrency", "3", "--save-result", str(saved),
        )  # fmt: skip
    assert finished.returncode == 0, finished.stderr
    result = json.loads(saved.read_text())
    assert (result["completed"], result["model_id"], result["output_len_source"]) == (6, "tinycode", "usage")
    assert all(0 < count <= 24 for count in result["output_lens"])
    drafted = {figure.name.removeprefix("vllm:"): figure for figure in llm.get_metrics()}
    assert result["spec_decode_draft_tokens"] == drafted["spec_decode_num_draft_tokens"].value > 0
