"""`foretoken data index`, drafting from what it made, and `foretoken generate --prediction`."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import MODEL, ROOT, assert_refused, done, output_of, report_of

from foretoken.training.data.packed import PackedTokens

SOURCE = ROOT / "foretoken" / "core" / "errors.py"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed tokens and a datastore of a file of ours."""
    directory = tmp_path_factory.mktemp("index")
    output_of("data", MODEL, "--text", str(SOURCE), "--out", str(directory / "data"))
    result = done("data", "index", str(directory / "data"), "--out", str(directory / "index"))
    size = len(PackedTokens.open(directory / "data").tokens)
    assert f"sorting the suffixes of {size} tokens" in result.stderr
    assert "suffixes sorted by 8 of 64 tokens" in result.stderr
    assert f"{directory / 'index'}: {size} tokens in" in result.stdout
    return directory


def test_drafts_from_a_corpus_and_from_a_prediction(place: Path, tmp_path: Path) -> None:
    prompt = "".join(SOURCE.read_text().partition("class ForetokenError")[:2])
    ask = ("generate", MODEL, "--max-tokens", "16", "-p", prompt)
    plain = report_of(*ask)
    rest = report_of(*ask, "-s", f"rest:datastore={place / 'index'}:num_speculative_tokens=4")
    assert rest["text"] == plain["text"]
    assert rest["metrics"]["num_drafted"] > 0
    prediction = tmp_path / "prediction.txt"
    prediction.write_text(plain["text"])
    predicted = report_of(*ask, "-s", "prediction:num_speculative_tokens=4", "--prediction", str(prediction))
    assert predicted["text"] == plain["text"]
    assert predicted["metrics"]["accepted_by"]["prediction"] == predicted["metrics"]["num_accepted"] > 8


def test_bad_requests(place: Path, tmp_path: Path) -> None:
    data, out = str(place / "data"), str(tmp_path / "out")
    assert_refused("holds no packed tokens", "data", "index", str(tmp_path), "--out", out)
    assert_refused("Missing option '--out'", "data", "index", data)
    assert_refused("holds a datastore already", "data", "index", data, "--out", str(place / "index"))
    assert_refused("holds other files", "data", "index", data, "--out", data, "--force")
    again = report_of("data", "index", data, "--out", str(place / "index"), "--force")
    assert again["tokens"] == len(PackedTokens.open(place / "data").tokens)
    damaged = tmp_path / "data"
    shutil.copytree(place / "data", damaged)
    meta = json.loads((damaged / "train" / "meta.json").read_text())
    for change, sentence in (
        ({"vocab_size": 3}, "Expected ids below 3"),
        ({"vocab_size": "many"}, "'vocab_size' of '"),
        ({"eos_id": -1}, "is damaged"),
    ):
        (damaged / "train" / "meta.json").write_text(json.dumps(meta | change))
        assert_refused(sentence, "data", "index", str(damaged), "--out", out)
    assert not Path(out).exists()


def test_predictions_and_datastores_that_are_none(place: Path, tmp_path: Path) -> None:
    empty, nonsense = tmp_path / "empty", tmp_path / "nonsense"
    empty.write_text("")
    nonsense.write_bytes(b"\xff")
    ask = ("generate", MODEL, "-p", "x", "-s", "prediction", "--prediction")
    assert_refused("the prediction is empty. Expected at least one token. Leave it out.", *ask, str(empty))
    assert_refused("cannot be read: No such file", *ask, str(tmp_path / "none"))
    assert_refused("is not UTF-8 text", *ask, str(nonsense))
    ask = ("generate", MODEL, "-p", "x", "-s")
    assert_refused("method 'rest' needs a datastore. Set 'datastore' to a directory", *ask, "rest")
    assert_refused("holds no datastore", *ask, f"rest:datastore={tmp_path}")
    index = json.loads((place / "index" / "index.json").read_text())
    foreign = shutil.copytree(place / "index", tmp_path / "foreign")
    (foreign / "index.json").write_text(json.dumps(index | {"tokenizer_sha": "another"}))
    assert_refused("was not made with the tokenizer of", *ask, f"rest:datastore={foreign}")
