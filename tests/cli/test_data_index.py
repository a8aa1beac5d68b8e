"""`foretoken data index`, drafting from what it made, and `foretoken generate --prediction`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import MODEL, ROOT, Finished, run

from foretoken.training.data.packed import PackedTokens

SOURCE = ROOT / "foretoken" / "core" / "errors.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed tokens and a datastore of a file of ours."""
    directory = tmp_path_factory.mktemp("index")
    result = run("data", MODEL, "--text", str(SOURCE), "--out", str(directory / "data"))
    assert result.returncode == 0, result.stderr
    result = run("data", "index", str(directory / "data"), "--out", str(directory / "index"))
    assert result.returncode == 0, result.stderr
    size = len(PackedTokens.open(directory / "data").tokens)
    assert f"sorting the suffixes of {size} tokens" in result.stderr
    assert "suffixes sorted by 8 of 64 tokens" in result.stderr
    assert f"{directory / 'index'}: {size} tokens in" in result.stdout
    return directory


def written(*arguments: str) -> Any:
    """The JSON object of `foretoken generate`, which must succeed."""
    result = run("generate", MODEL, "--json", "--max-tokens", "16", *arguments)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_drafts_from_a_corpus_and_from_a_prediction(place: Path, tmp_path: Path) -> None:
    prompt = ("-p", "".join(SOURCE.read_text().partition("class ForetokenError")[:2]))
    plain = written(*prompt)
    rest = written(*prompt, "-s", f"rest:datastore={place / 'index'}:num_speculative_tokens=4")
    assert rest["text"] == plain["text"]
    assert rest["metrics"]["num_drafted"] > 0
    prediction = tmp_path / "prediction.txt"
    prediction.write_text(plain["text"])
    predicted = written(*prompt, "-s", "prediction:num_speculative_tokens=4", "--prediction", str(prediction))
    assert predicted["text"] == plain["text"]
    assert predicted["metrics"]["accepted_by"]["prediction"] == predicted["metrics"]["num_accepted"] > 8


def assert_refused(result: Finished, sentence: str) -> None:
    assert result.returncode == 2, result.stdout
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr


def test_bad_requests(place: Path, tmp_path: Path) -> None:
    data, out = str(place / "data"), str(tmp_path / "out")
    assert_refused(run("data", "index", str(tmp_path), "--out", out), "holds no packed tokens")
    assert_refused(run("data", "index", data), "Missing option '--out'")
    assert_refused(run("data", "index", data, "--out", str(place / "index")), "holds a datastore already")
    assert_refused(run("data", "index", data, "--out", data, "--force"), "holds other files")
    again = run("data", "index", data, "--out", str(place / "index"), "--force", "--json")
    assert json.loads(again.stdout)["tokens"] == len(PackedTokens.open(place / "data").tokens)
    damaged = tmp_path / "data"
    shutil.copytree(place / "data", damaged)
    meta = json.loads((damaged / "train" / "meta.json").read_text())
    for change, sentence in (
        ({"vocab_size": 3}, "Expected ids below 3"),
        ({"vocab_size": "many"}, "'vocab_size' of '"),
        ({"eos_id": -1}, "is damaged"),
    ):
        (damaged / "train" / "meta.json").write_text(json.dumps(meta | change))
        assert_refused(run("data", "index", str(damaged), "--out", out), sentence)
    assert not Path(out).exists()


def test_predictions_and_datastores_that_are_none(place: Path, tmp_path: Path) -> None:
    empty, nonsense = tmp_path / "empty", tmp_path / "nonsense"
    empty.write_text("")
    nonsense.write_bytes(b"\xff")
    ask = ("generate", MODEL, "-p", "x", "-s", "prediction", "--prediction")
    assert_refused(run(*ask, str(empty)), "the prediction is empty. Expected at least one token. Leave it out.")
    assert_refused(run(*ask, str(tmp_path / "none")), "cannot be read: No such file")
    assert_refused(run(*ask, str(nonsense)), "is not UTF-8 text")
    ask = ("generate", MODEL, "-p", "x", "-s")
    assert_refused(run(*ask, "rest"), "method 'rest' needs a datastore. Set 'datastore' to a directory")
    assert_refused(run(*ask, f"rest:datastore={tmp_path}"), "holds no datastore")
    index = json.loads((place / "index" / "index.json").read_text())
    foreign = shutil.copytree(place / "index", tmp_path / "foreign")
    (foreign / "index.json").write_text(json.dumps(index | {"tokenizer_sha": "another"}))
    assert_refused(run(*ask, f"rest:datastore={foreign}"), "was not made with the tokenizer of")
