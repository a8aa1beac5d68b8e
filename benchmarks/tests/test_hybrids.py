"""`python -m benchmarks.hybrids`: a rehearsal over toys without rivals, which rounds are measured, and the figures.

The rehearsal is slow because three processes for each toy import and load everything.
"""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hybrids
from benchmarks.pairs.contestants import Contestant
from foretoken.files.atomic_files import JournalFile


class Scripted:
    """Answers with the given seconds, and counts the requests."""

    def __init__(self, name: str, seconds: dict[str, float]) -> None:
        self.name, self.asked, self._seconds = name, list[str](), seconds

    def answer(self, **request: Any) -> dict[str, Any]:
        what = request.get("shape", "prompt" if not request["rows"] else "chain")
        self.asked.append(what)
        share = 0.04 if what.startswith("replay") else None
        return {"seconds": self._seconds.get(what, 0.01), "share": share, "runner": "generic"}

    def end(self) -> None:
        """Nothing ran."""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "qwen3.5").mkdir()
    (tmp_path / "qwen3.5" / "config.json").write_text('{"vocab_size": 64}')
    return tmp_path


def measured(directory: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> list[Scripted]:
    everyone = [
        Scripted("auto", {}), Scripted("generic", {"chain": 0.02, "prompt": 50.0}), Scripted("transformers", {}),
        Scripted("llama.cpp bf16", {"chain": 0.015}),
    ]  # fmt: skip
    monkeypatch.setattr(hybrids, "contestants", lambda *_: everyone)
    out = ["--out", str(directory / "out.jsonl"), "--only", "qwen3.5", "--parts", "passes", "--tokens", "1", "16"]
    hybrids.main(["run", str(directory), *out, *more])
    return everyone


def test_rounds_ratios_and_those_who_take_part(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, generic, theirs, llama = measured(directory, monkeypatch, "--rounds", "3")
    assert ours.asked == 3 * ["chain", "chain", "tree", "dynamic", "replay 4", "replay 15", "prompt"]
    assert generic.asked.count("prompt") == 1, "it takes 50 s"
    assert generic.asked.count("tree") == 3
    assert theirs.asked == 3 * ["chain", "prompt"], "one token at a time, and a prompt"
    assert llama.asked == 3 * ["chain", "chain", "prompt"]
    table = capsys.readouterr().out
    assert "| qwen3.5 | auto: generic | generic | transformers: generic | llama.cpp bf16: generic |" in table
    assert "| chain, 1 | 10.0 | 20.0 (2.00) | 10.0 (1.00) | 15.0 (1.50) |" in table
    assert "| tree, 16 | 10.0 | 10.0 (1.00) |  |  |" in table
    assert "| replay 4, 16 | 4.0% | 4.0% |  |  |" in table
    assert "| prompt, 1000 | 10.0 | 50000.0 (5000.00) | 10.0 (1.00) | 10.0 (1.00) |" in table


def test_a_run_goes_on_with_the_rounds_that_are_missing(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(directory, monkeypatch, "--rounds", "2")
    out = directory / "out.jsonl"
    lines = out.read_text().splitlines()
    dropped = max(i for i, line in enumerate(lines) if json.loads(line).get("what") == "tree")
    out.write_text("\n".join([*lines[:dropped], *lines[dropped + 1 :]]) + "\n")
    asked = [each.asked for each in measured(directory, monkeypatch, "--rounds", "2")]
    assert asked == [["tree"], ["tree"], [], []], "the round as a whole, and no other one"


def test_speed_ups_over_plain_decoding_of_the_same_prompt(directory: Path) -> None:
    journal = JournalFile(directory / "out.jsonl", {}, advice="")
    common = {"part": "speed-ups", "target": "lfm2", "what": "request", "tokens": 128, "runner": "lean-native"}
    for number, (plain, drafted) in enumerate([(10.0, 20.0), (20.0, 30.0), (10.0, 30.0)]):
        for who, rate, tau in (("plain", plain, 1.0), ("HASS", drafted, 5.0)):
            figures = {"rate": rate, "tau": tau, "verify_ms": 9.0, "draft_ms": 2.0, "host_ms": 1.0, "nodes": 59.0}
            journal.add(common | {"round": number, "who": who} | figures)
    table = hybrids.report(journal)
    assert "| lfm2, lean-native | tokens a pass, published | reached |" in table
    assert "| HASS | 5.15 | 5.00 | 59.0 | 30.0 | 2.00 | 9.00 | 2.00 | 1.00 |" in table


# Stands in for llama-cpp-python with a recurrent model: its memory is removed as a whole or not at all, and a token
# comes at the next position. The logits of a token are those of the token after it.
LLAMA = """
import ctypes
from types import SimpleNamespace as Of
llama_backend_init = llama_batch_free = llama_model_default_params = lambda *_: None
llama_model_load_from_file = llama_init_from_model = llama_get_memory = llama_model_get_vocab = lambda *_: "it"
llama_context_default_params, llama_vocab_n_tokens = Of, lambda _: 50
llama_vocab_is_eog = lambda *_: False
read, rows = [], []

def llama_batch_init(count, *_):
    return Of(token=[0] * count, pos=[0] * count, n_seq_id=[0] * count, seq_id=[[0]] * count, logits=[0] * count)

def llama_decode(_, batch):
    assert batch.pos == list(range(len(read), len(read) + batch.n_tokens)), "a token is read at another position"
    read.extend(batch.token)
    rows[:] = [token for token, wanted in zip(batch.token, batch.logits) if wanted]
    return 0

def llama_memory_seq_rm(_, sequence, start, end):
    if start == 0:
        read.clear()
    return start in (0, len(read))

def llama_memory_clear(*_):
    read.clear()

def llama_get_logits_ith(_, index):
    return (ctypes.c_float * 50)(*(float(each == (rows[index] + 1) % 50) for each in range(50)))
"""


def test_recurrent_states_of_llama_cpp_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    llama = Contestant("llama.cpp", "", sys.executable, "llama", target="model", draft=None)
    for grows in (True, False):
        for tokens in (1, 16, 600):
            assert llama.answer(rows=20, tokens=tokens, count=3, grows=grows)["seconds"] > 0
    # The lookup finds 7 8 9 and drafts 40 and what follows, which is wrong: the state behind 9 is needed again.
    prompt = [7, 8, 9, 40, 41, 42, 43, 7, 8]
    answer = llama.answer(prompt=prompt, tokens=6, length=4, ngram=3)
    llama.end()
    assert answer["ids"] == [9, 10, 11, 12, 13, 14]
    assert answer["steps"] == 5, "the draft was wrong"


@pytest.mark.slow
def test_a_rehearsal_over_toys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hybrids, "PROMPT", 40)
    monkeypatch.setattr(hybrids, "PUBLISHED", [hybrids.PUBLISHED[0], hybrids.PUBLISHED[-2]])
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")  # tests run beside each other
    hybrids.main(["make", str(tmp_path), "--toy", "--vocabulary", "300"])
    hybrids.main(["make", str(tmp_path), "--toy"])  # what is there stays
    assert json.loads((tmp_path / "lfm2" / "config.json").read_text())["vocab_size"] == 300
    options = [
        "--rounds",
        "1",
        "--tokens",
        "1",
        "16",
        "--ours",
        "auto",
        "generic",
        "--prompts",
        "1",
        "--max-tokens",
        "12",
    ]
    hybrids.main(["run", str(tmp_path), "--out", str(tmp_path / "out.jsonl"), *options])
    text = capsys.readouterr().out
    for target in ("qwen3.5", "lfm2"):
        assert f"| {target} | auto: lean-native | generic | transformers |" in text
        assert f"| {target}, lean-native | tokens a pass, published | reached |" in text
    lines = JournalFile(tmp_path / "out.jsonl", advice="").lines
    passes = [line for line in lines if line["part"] == "passes"]
    assert len(passes) == 2 * (2 * 7 + 2), "of both targets: all by our runners, two by transformers"
    assert all(line["seconds"] > 0 for line in passes)
    reached = {line["who"]: line["tau"] for line in lines if line["part"] == "speed-ups" and line["target"] == "lfm2"}
    assert reached.keys() == {"plain", *(each.name for each in hybrids.PUBLISHED)}
    assert reached["Hydra"] > 2, "drafts of fixed trees are accepted at published rates"
