"""What was learned of acceptance is there for the next process, and a file that cannot be true is done without."""

import gc
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model

from foretoken.drafters.registry import drafter_options
from foretoken.drafting.acceptance import KeptAcceptance, LevelAcceptance, NodeAcceptance, pair_key
from foretoken.drafting.goodput import Goodput
from foretoken.files import user_cache
from foretoken.models.loading import wrap_model
from foretoken.runner.costs import CostCurve

FILE, KEY = "foretoken-acceptance.json", "a pair"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache directory of the test's own."""
    path = tmp_path / "cache"
    path.mkdir(mode=0o700)
    monkeypatch.setenv("FORETOKEN_CACHE", str(path))
    monkeypatch.setattr(user_cache, "_said", [])
    return path


def learners() -> tuple[NodeAcceptance, LevelAcceptance]:
    return NodeAcceptance(), LevelAcceptance(4)


def learned(num: int = 100) -> tuple[tuple[NodeAcceptance, LevelAcceptance], KeptAcceptance]:
    """Learners after some iterations of a drafter that is right once in four times."""
    made = learners()
    kept = KeptAcceptance(made, KEY)
    for i in range(num):
        made[0].learn([(3.0, 1, i % 4 == 0)])
        made[1].learn([0], [int(i % 4 == 0)], [2])
        kept.learned()
        if i % 20 == 19:
            made[1].begin_text()
    return made, kept


def is_fresh(learner: NodeAcceptance | LevelAcceptance) -> bool:
    return learner.state() == type(learner)(*[4] * isinstance(learner, LevelAcceptance)).state()


def test_the_next_process_begins_with_what_was_learned() -> None:
    (nodes, levels), kept = learned()
    kept.keep()
    again = learners()
    KeptAcceptance(again, KEY)
    found, known, fresh = (
        each.path_values([-1, 0], [0, 1], [0.0, 3.0])[1] for each in (again[0], nodes, NodeAcceptance())
    )  # fmt: skip
    assert found == pytest.approx(known, abs=0.15)
    assert fresh - found > 0.3
    assert again[1].survival()[0] == pytest.approx(levels.survival()[0], abs=0.1)
    assert again[1].num_seen == 0, "another text is expected to be like the texts before it, and nothing is seen of it"
    other = learners()
    KeptAcceptance(other, "another pair")
    assert all(map(is_fresh, other))


def test_little_is_not_kept_and_much_is_kept_on_the_way(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learned(20)[1].keep()
    assert not (cache / FILE).exists()
    monkeypatch.setattr("foretoken.drafting.acceptance._EVERY", 90)
    learned(89)
    assert not (cache / FILE).exists()
    learned(90)
    assert (cache / FILE).stat().st_mode & 0o777 == 0o600


def test_a_controller_keeps_what_it_learned_at_its_end(cache: Path) -> None:
    made = Goodput(CostCurve((1,), (1.0,)), nodes_by_depth=[range(1, 4)] * 2, max_nodes=8)
    kept = KeptAcceptance(made.learners, KEY)
    made.keep_learned(kept)
    for _ in range(100):
        made.learners[0].learn([(0.0, 1, True)])  # type: ignore[attr-defined]
        kept.learned()
    assert not (cache / FILE).exists()
    del made, kept
    gc.collect()
    assert KEY in json.loads((cache / FILE).read_text())["drafters"]


def kept_as(cache: Path, states: Any, **changes: Any) -> tuple[NodeAcceptance, LevelAcceptance]:
    """Learners that begin with an entry of the file."""
    entry = {"measured": time.time(), "states": states, **changes}
    (cache / FILE).write_text(json.dumps({"foretoken_acceptance": 1, "drafters": {KEY: entry, "other": entry}}))
    made = learners()
    KeptAcceptance(made, KEY)
    return made


NODES, LEVELS = learned()[0][0].state(), [0.8, 0.6, 0.5, 0.25]
GOOD: list[Any] = [NODES, LEVELS]


def changed(state: list[Any], at: int, value: Any) -> list[Any]:
    return [*state[:at], value, *state[at + 1 :]]


HOSTILE: dict[str, Any] = {
    "nothing": None,
    "no list": {"0": []},
    "one too few": GOOD[:1],
    "one too many": [*GOOD, []],
    "no states": [1, 2],
    "empty": [[], []],
    "a number too few": [NODES[:-1], LEVELS[:-1]],
    "a number too many": [[*NODES, 0.0], [*LEVELS, 0.0]],
    "text": [changed(NODES, 0, "0.5"), changed(LEVELS, 0, "0.8")],
    "a truth value": [changed(NODES, 0, True), changed(LEVELS, 0, True)],
    "falling slope, rate above 1": [changed(NODES, 0, -1.0), changed(LEVELS, 3, 1.5)],
    "negative": [changed(NODES, 1, -1.0), changed(LEVELS, 3, -1.0)],
    "too steep": [changed(NODES, 0, 1e3), changed(LEVELS, 0, 1e12)],
    "no curvature": [changed(NODES, 1, 0.0), changed(LEVELS, 0, -1.0)],
    "huge": [changed(NODES, 0, 10**400), changed(LEVELS, 0, 10**400)],
    "not a number": [changed(NODES, 2, float("nan")), changed(LEVELS, 2, float("nan"))],
    "infinite": [changed(NODES, 2, float("inf")), changed(LEVELS, 2, float("inf"))],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_estimates_that_cannot_be_true_are_done_without(what: str, cache: Path) -> None:
    assert not any(map(is_fresh, kept_as(cache, GOOD)))
    assert all(map(is_fresh, kept_as(cache, HOSTILE[what])))


def test_files_that_others_may_have_written_are_done_without(cache: Path) -> None:
    for date in (None, time.time() + 1e6, time.time() - 1e7):
        assert is_fresh(kept_as(cache, GOOD, measured=date)[0])
    assert not is_fresh(kept_as(cache, GOOD)[0])
    (cache / FILE).chmod(0o666)
    made = learners()
    KeptAcceptance(made, KEY)
    assert is_fresh(made[0]), "others may write it"
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
    many = {str(i): {"measured": time.time() - 1000 + i, "states": "x" * 9000} for i in range(110)}
    (cache / FILE).write_text(json.dumps({"foretoken_acceptance": 1, "drafters": many}))
    for _ in range(3):
        kept.keep()
        (cache / FILE).write_text((cache / FILE).read_text().replace('"states": []', '"states": "' + "x" * 9000 + '"'))
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
