"""`foretoken doctor`: exit codes, the table, JSON."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import assert_refused, output_of, report_of

sys.path.append(str(Path(__file__).parents[1] / "training"))
from trained_heads import MAX_TOKENS, PROMPTS, good, trained, write_target

from foretoken.formats import native


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a head that was trained for it and for its texts, one that was not, and the prompts."""
    directory = tmp_path_factory.mktemp("doctor")
    write_target(directory / "target")
    native.write_checkpoint(good(), directory / "head")
    native.write_checkpoint(trained(late=1), directory / "late")
    lines = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS)
    (directory / "prompts.jsonl").write_text(lines)
    return directory


def words(place: Path, *more: str) -> list[str]:
    """`doctor TARGET …` on the prompts."""
    sizes = ("--num-prompts", str(len(PROMPTS)), "--max-tokens", str(MAX_TOKENS))
    return ["doctor", str(place / "target"), "--prompts", str(place / "prompts.jsonl"), *sizes, *more]


@pytest.mark.parametrize("more", [(), pytest.param(("--train-check",), marks=pytest.mark.slow)], ids=str)
def test_a_good_head(place: Path, more: tuple[str, ...]) -> None:
    before = {path.name: path.read_bytes() for path in (place / "head").iterdir()}
    facts = report_of(*words(place, str(place / "head"), *more))
    assert facts["head"] == str(place / "head")
    assert {check["verdict"] for check in facts["checks"]} == {"ok"}
    names = [check["name"] for check in facts["checks"]]
    assert names[:3] == ["target logits", "tree logits", "target served"]
    assert names[-2 - 2 * len(more) :] == ["drafting", "rounding", "fresh head", "learning"][: 2 + 2 * len(more)]
    assert facts["checks"][0].keys() == {"name", "verdict", "value", "expected", "message"}
    assert {path.name: path.read_bytes() for path in (place / "head").iterdir()} == before


def test_a_fault(place: Path) -> None:
    told = " ".join(output_of(*words(place, str(place / "late")), code=1).split())
    assert all(part in told for part in ("labels", "fault", "head 0 looks like head 1"))


@pytest.mark.parametrize("width", [80, pytest.param(120, marks=pytest.mark.slow)])
def test_the_table_fits_a_terminal(place: Path, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = output_of(*words(place, str(place / "late")), code=1, is_terminal=True)
    _, table = re.sub(r"\x1b\[[\d;]*m", "", shown).split("\n", 1)
    assert max(map(len, table.splitlines())) <= width
    assert not set(table) & set("│┃┏├")
    assert "target logits ok " in table


def test_before_there_is_a_head(place: Path) -> None:
    told = output_of(*words(place, "--method", "medusa"))
    assert "fresh head" in told
    assert "drafting" not in told


def test_what_cannot_be_examined(place: Path, tmp_path: Path) -> None:
    for arguments, sentence in (
        ((), "there is nothing to examine"),
        (("--train-check", "--method", "medusa"), "--train-check takes the sizes of a head"),
        ((str(tmp_path),), "holds no weights"),
        ((str(tmp_path / "none"),), "there is no head"),
        (("--method", "medsa"), "Did you mean 'medusa'?"),
        (("-s", "plain"), "Pass -s ngram, or another one"),
        (("--method", "medusa", "--data", str(tmp_path)), "holds no packed tokens"),
        ((str(place / "head"), "--max-tokens", "1"), "the target wrote too little"),
    ):
        assert_refused(sentence, *words(place, *arguments))


def test_lost_speed(place: Path) -> None:
    setups = ("-s", "ngram:num_speculative_tokens=2", "-s", "oracle:num_speculative_tokens=2")
    facts = report_of(*words(place, *setups, "--batch-size", "4"))
    assert facts["checks"] == []
    ngram, oracle = facts["losses"]
    assert (ngram["setup"], oracle["setup"]) == ("ngram num_speculative_tokens=2", "oracle num_speculative_tokens=2")
    for loss in facts["losses"]:
        assert {cause["name"] for cause in loss["causes"]} == {"acceptance", "drafting", "wide passes", "host"}
        total = sum(cause["ms"] for cause in loss["causes"])
        assert total + loss["unexplained_ms"] == pytest.approx(loss["loss_ms"])
    acceptance = [next(each for each in loss["causes"] if each["name"] == "acceptance") for loss in (ngram, oracle)]
    assert acceptance[0]["share"] > acceptance[1]["share"]
    assert "tokens a pass" in acceptance[0]["advice"]
    shown = output_of(*words(place, "-s", "ngram:num_speculative_tokens=2"))
    assert "wide passes" in shown
    assert "without a cause" in shown
