"""What was learned of acceptance is there for the next process, and a file that cannot be true is done without."""

from __future__ import annotations

import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import tiny_model

from foretoken.drafters.registry import drafter_options
from foretoken.drafting.asking import Reach
from foretoken.drafting.calibration import Calibration, KeptAcceptance, pair_key
from foretoken.drafting.several_drafters import SeveralDrafters
from foretoken.files import user_cache
from foretoken.models.loading import wrap_model
from foretoken.runner.costs import CostCurve

FILE, KEY = "foretoken-acceptance.json", "a pair"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of the test's own."""
    place = tmp_path / "cache"
    place.mkdir(mode=0o700)
    monkeypatch.setenv("FORETOKEN_CACHE", str(place))
    monkeypatch.setattr(user_cache, "_said", [])
    return place


def learners() -> tuple[Calibration, Reach]:
    return Calibration(), Reach(4)


def learned(num: int = 100) -> tuple[tuple[Calibration, Reach], KeptAcceptance]:
    """Learners after some iterations of a drafter that is right once in four times."""
    made = learners()
    kept = KeptAcceptance(made, KEY)
    for i in range(num):
        made[0].learn_nodes([1, 2], [-0.05, -0.3], [i % 4 == 0, False])
        made[1].learn_draft(before=0, right=int(i % 4 == 0), asked=4, generated=2)
        kept.learned()
    return made, kept


def test_the_next_process_begins_with_what_was_learned() -> None:
    (calibration, reach), kept = learned()
    kept.keep()
    again = learners()
    KeptAcceptance(again, KEY)
    depths, scores = np.array([1, 2]), np.array([-0.05, -0.3], dtype=np.float32)
    found, known = again[0].probabilities(depths, scores), calibration.probabilities(depths, scores)
    fresh = Calibration().probabilities(depths, scores)
    assert found == pytest.approx(known, abs=0.15)
    assert fresh[0] - found[0] > 0.4
    assert again[1].probabilities()[0] == pytest.approx(reach.probabilities()[0], abs=0.1)
    assert again[0].counts()[0].max() <= 20.0, "what was learned long ago weighs little"
    other = learners()
    KeptAcceptance(other, "another pair")
    assert not other[0].counts().any()


def test_little_is_not_kept_and_much_is_kept_on_the_way(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned(20)[1].keep()
    assert not (cache / FILE).exists()
    monkeypatch.setattr("foretoken.drafting.calibration._EVERY", 90)
    learned(89)
    assert not (cache / FILE).exists()
    learned(90)
    assert (cache / FILE).stat().st_mode & 0o777 == 0o600


def test_a_controller_keeps_what_it_learned_at_its_end(cache: Path) -> None:
    made = SeveralDrafters(CostCurve((1,), (1.0,)), nodes_by_depth=[range(1, 4)] * 2, max_nodes=8)
    kept = KeptAcceptance(made.learners, KEY)
    made.keep_learned(kept)
    for _ in range(100):
        made.learners[0].learn_nodes([1], None, [True])  # type: ignore[attr-defined]
        kept.learned()
    assert not (cache / FILE).exists()
    del made, kept
    gc.collect()
    assert KEY in json.loads((cache / FILE).read_text())["drafters"]


def kept_as(cache: Path, counts: Any, **changes: Any) -> tuple[Calibration, Reach]:
    """Learners that begin with an entry of the file."""
    entry = {"measured": time.time(), "counts": counts, **changes}
    (cache / FILE).write_text(json.dumps({"foretoken_acceptance": 1, "drafters": {KEY: entry, "other": entry}}))
    made = learners()
    KeptAcceptance(made, KEY)
    return made


GOOD: list[Any] = [[[12, 10.0, 5]], [[0, 4, 1.0]]]
HOSTILE: dict[str, Any] = {
    "nothing": None,
    "no list": {"0": []},
    "one too few": GOOD[:1],
    "one too many": [*GOOD, []],
    "no bins": [1, 2],
    "bins that are none": [[12, 10.0, 5], GOOD[1]],
    "two numbers": [[[12, 10.0]], GOOD[1]],
    "text": [[["12", 10.0, 5]], GOOD[1]],
    "a truth value": [[[True, 10.0, 5]], GOOD[1]],
    "a negative bin": [[[-1, 10.0, 5]], GOOD[1]],
    "no such bin": [[[10**9, 10.0, 5]], GOOD[1]],
    "a bin between": [[[1.5, 10.0, 5]], GOOD[1]],
    "more right than seen": [[[12, 4.0, 5]], GOOD[1]],
    "negative": [[[12, 4.0, -5]], GOOD[1]],
    "nothing seen": [[[12, 0, 0]], GOOD[1]],
    "too much": [[[12, 1e9, 5]], GOOD[1]],
    "huge": [[[12, 10**400, 5]], GOOD[1]],
    "not a number": [[[12, float("nan"), float("nan")]], GOOD[1]],
    "infinite": [[[12, float("inf"), 1]], GOOD[1]],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_counts_that_cannot_be_true_are_done_without(what: str, cache: Path) -> None:
    assert kept_as(cache, GOOD)[0].counts().any()
    for learner in kept_as(cache, HOSTILE[what]):
        assert not learner.counts().any()


def test_files_that_others_may_have_written_are_done_without(cache: Path) -> None:
    for date in (None, time.time() + 1e6, time.time() - 1e7):
        assert not kept_as(cache, GOOD, measured=date)[0].counts().any()
    assert kept_as(cache, GOOD)[0].counts().any()
    (cache / FILE).chmod(0o666)
    made = learners()
    KeptAcceptance(made, KEY)
    assert not made[0].counts().any(), "others may write it"
    for data in (b"", b"{", b'{"foretoken_acceptance": 1', b"[" * 100_000, b"x" * (1 << 21)):
        (cache / FILE).unlink()
        (cache / FILE).write_bytes(data)
        (_, _), kept = learned()
        kept.keep()
    (cache / FILE).unlink()
    (cache / FILE).symlink_to(cache / "elsewhere")
    learned()[1].keep()
    assert not (cache / "elsewhere").exists()


def test_two_at_once_lose_no_entry_of_the_file_and_the_oldest_go_first(cache: Path) -> None:
    kept_as(cache, GOOD)
    (_, _), kept = learned()
    kept.keep()
    assert set(json.loads((cache / FILE).read_text())["drafters"]) == {KEY, "other"}
    many = {str(i): {"measured": time.time() - 1000 + i, "counts": "x" * 9000} for i in range(110)}
    (cache / FILE).write_text(json.dumps({"foretoken_acceptance": 1, "drafters": many}))
    for _ in range(3):
        kept.keep()
        (cache / FILE).write_text((cache / FILE).read_text().replace('"counts": []', '"counts": "' + "x" * 9000 + '"'))
    left = json.loads((cache / FILE).read_text())["drafters"]
    assert {KEY, "109"} <= set(left)


def test_a_pair_is_the_targets_weights_and_all_options() -> None:
    model = replace(wrap_model(tiny_model("llama"), name="one"), is_borrowed=False)  # as one that was read
    options = [drafter_options({"method": "ngram"}), drafter_options({"method": "medusa", "model": "/x"})]
    key = pair_key(model, options)
    assert key is not None
    assert pair_key(replace(model, name="two"), options) == key
    wider = [options[0], drafter_options({"method": "medusa", "model": "/x", "max_nodes": 32})]
    others = [
        pair_key(model, options[:1]), pair_key(model, wider),
        pair_key(replace(wrap_model(tiny_model("llama", hidden_size=64), name="one"), is_borrowed=False), options),
    ]  # fmt: skip
    assert len({key, *others}) == 4
    assert pair_key(replace(model, is_borrowed=True), options) is None
