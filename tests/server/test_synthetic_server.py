"""A server with synthetic acceptance: its model card, metrics and answers say so; promises of texts get 400."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli.command_line import run
from server.live_server import LiveServer, live_server

from foretoken import LLM

CONFIG = {
    "method": "draft_model", "model": "models/tinycode-draft", "num_speculative_tokens": 3,
    "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": [0.8, 0.56, 0.336],
}  # fmt: skip
BODY = {"prompt": "def main():", "max_tokens": 40, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server(LLM("models/tinycode", speculative_config=CONFIG), has_draft_metrics=True) as running:
        yield running


def test_card_metrics_and_answers_say_so(server: LiveServer) -> None:
    card = server.get("/v1/models").json()["data"][0]
    assert (card["is_lossless"], card["acceptance"]) == (False, "synthetic")
    told = server.post("/v1/completions", BODY).json()["metrics"]["speculative_decoding"]
    assert told["num_synthetic_steps"] == sum(told["acceptance_histogram"]) > 0
    assert server.figure("foretoken:synthetic_passes_total") >= told["num_synthetic_steps"]


@pytest.mark.parametrize(
    "promise",
    [
        {"structured_outputs": {"choice": ["a", "b"]}}, {"response_format": {"type": "json_object"}},
        {"allowed_token_ids": [5]}, {"bad_words": ["def"]}, {"min_tokens": 3},
    ],
)  # fmt: skip
def test_promises_of_texts_get_400(server: LiveServer, promise: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {**BODY, **promise})
    assert answer.status_code == 400
    assert "cannot be kept: acceptance is synthetic" in answer.json()["error"]["message"]


def test_a_load_is_reported_by_concurrency_and_category(server: LiveServer, tmp_path: Path) -> None:
    arguments = (
        "bench", "serve", "--base-url", server.url, "--prompts", "all", "--num-prompts", "6", "--max-tokens", "60",
        "--max-concurrency", "1", "--max-concurrency", "3",
    )  # fmt: skip
    finished = run(*arguments, "--json")
    assert finished.returncode == 0, finished.stderr
    assert "the server's acceptance is synthetic" in finished.stderr
    loads = json.loads(finished.stdout)["loads"]
    assert {each["acceptance"] for each in loads} == {"synthetic"}
    reports = [each["speed_bench"] for each in loads]
    assert [report["concurrency"] for report in reports] == [1, 3]
    for report in reports:
        assert report["Category_AL"].keys() == {"completion", "edits", "prose"}
        assert report["Average_AL"] == pytest.approx(2.696, abs=0.15)
        assert report["Conditional_Acceptance_Rate"]["2"] == pytest.approx(0.8, abs=0.1)
    refused = run(*arguments, "--save-result", str(tmp_path / "result.json"))
    assert refused.returncode == 2
    assert "a file of --save-result holds one load" in refused.stderr
    printed = run(*arguments).stdout
    assert printed.count("completion") == 2
