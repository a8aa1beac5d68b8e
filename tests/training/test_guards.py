"""A trained head passes every guard rail; broken in one way, exactly the right one finds it and names the cause.

Slow because every kind of fault needs a head that was trained with it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from trained_heads import MAX_TOKENS, PROMPTS, SIZES, good, target, texts, tokenizer, trained

from foretoken.core.errors import ConfigError, RequestError
from foretoken.drafters.base import Committed
from foretoken.drafters.head_features import LastFeatures
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.models.parts import target_parts
from foretoken.runner.runner import Runner
from foretoken.training.doctor.checks import Check, check_agreement, check_trained, check_values, fresh_head
from foretoken.training.doctor.examine import (
    DraftingFigures,
    Examination,
    OneBatch,
    check_drafting,
    examine,
    examine_training,
)
from foretoken.training.doctor.readings import EARLIER, IN_PLACE, LATER, NORMED_TWICE, PRE_NORM, SHIFTS, Agreement
from foretoken.training.objectives import head_config
from foretoken.training.teacher import Teacher

_UNDERTRAINED = (1, 3, 20)
_QUICK = {"medusa": 1, "mlp_speculator": 3, "hydra": 20}  # what is not slow


def methods(*quick: str) -> list[Any]:
    """All methods as parameters; those that are not named are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in sorted(SIZES)]


def faults(checks: list[Check]) -> dict[str, str]:
    """Messages of faults and warnings by name."""
    return {check.name: check.message for check in checks if check.verdict in ("fault", "warning")}


def sole_fault(checks: list[Check], name: str) -> str:
    """The message of the only check with a fault or a warning."""
    found = faults(checks)
    assert found.keys() == {name}
    return found[name]


def examined(checkpoint: HeadCheckpoint, directory: Path, **more: Any) -> list[Check]:
    """All checks, with the texts that the target wrote for the first of these tests."""
    native.write_checkpoint(checkpoint, directory)
    case = Examination(head=directory, prompts=PROMPTS, max_tokens=MAX_TOKENS, runner="generic", **more)
    with mock.patch("foretoken.training.doctor.examine.greedy_texts", autospec=True, return_value=texts()):
        return examine(target(), tokenizer(), case)


def with_weights(change: Callable[[dict[str, Tensor]], object]) -> HeadCheckpoint:
    """The good head with some weights changed."""
    weights = {key: value.clone() for key, value in good().weights.items()}
    change(weights)
    return replace(good(), weights=weights)


@pytest.mark.parametrize("method", methods("eagle3", "medusa"))
def test_a_trained_head_passes_all(method: str, tmp_path: Path) -> None:
    native.write_checkpoint(good(method), tmp_path)
    case = Examination(head=tmp_path, prompts=PROMPTS, max_tokens=MAX_TOKENS, runner="generic")
    checks = examine(target(), tokenizer(), case)  # with texts that the target writes now, as every user's
    assert faults(checks) == {}
    assert [check.name for check in checks] == [
        "target logits", "tree logits", "target served", "head loads", "head fits", "head trained", "head values",
        *(["taps served"] * (method == "eagle3")), "feature", "configuration", "labels", "knowledge", "depth",
        "drafting", "rounding",
    ]  # fmt: skip
    unlike = method == "mlp_speculator"  # neither an LM head of the target's width nor rotary embeddings
    skipped = [*(["configuration"] * unlike), *(["depth"] * (method != "medusa"))]
    assert [check.name for check in checks if check.verdict == "skipped"] == skipped
    drafting = next(check for check in checks if check.name == "drafting")
    # Pass by pass at the same positions: not merely near.
    assert drafting.expected == f"accepted by depth {drafting.value['accepted']}"
    assert drafting.value["accepted"][0] > 0.2


@pytest.mark.parametrize(
    ("method", "reading", "steps", "sentence"),
    [
        ("medusa", PRE_NORM, 300, "was trained on pre-norm features"),
        pytest.param("medusa", NORMED_TWICE, 300, "went through the final norm twice", marks=pytest.mark.slow),
        ("hydra", EARLIER, None, "features one position off: it wants the feature of the position before"),
        pytest.param(
            "hydra", LATER, None, "features one position off: it wants the feature of the position after",
            marks=pytest.mark.slow,
        ),
        pytest.param("eagle3", EARLIER, None, "wants the feature of the position before", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_another_feature(method: str, reading: str, steps: int | None, sentence: str, tmp_path: Path) -> None:
    head = trained(method, feature=lambda readings: readings[reading], steps=steps)
    assert sentence in sole_fault(examined(head, tmp_path), "feature")


@pytest.mark.parametrize("by", [-1, 1])
def test_taps_one_block_off(by: int, tmp_path: Path) -> None:
    """The head was trained on taps 1 and 2; its configuration names others, as after a conversion by another count."""
    taps, head = [1, 2], good("eagle3")
    wrong = head.config.model_copy(update={"boundaries": tuple(tap - by for tap in taps)})
    found = sole_fault(examined(replace(head, config=wrong), tmp_path), "feature")
    assert f"the taps are those of the block {'before' if by < 0 else 'after'}" in found.lower()
    assert f"was trained on 1, 2, and its configuration says {1 - by}, {2 - by}" in found


def test_taps_that_do_not_exist(tmp_path: Path) -> None:
    deep = good("eagle3").config.model_copy(update={"boundaries": (1, 9)})
    assert "tap 9 does not exist: the target has 3 blocks" in sole_fault(
        examined(replace(good("eagle3"), config=deep), tmp_path), "taps served"
    )


def test_taps_that_are_served_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Runner.prefill

    def swapped(self: Runner, slot: int, tokens: Any, start: int) -> Tensor | None:
        features = prefill(self, slot, tokens, start)
        return None if features is None else features.flip(1)

    monkeypatch.setattr(Runner, "prefill", swapped)
    case = Examination(method="eagle3", prompts=PROMPTS, max_tokens=MAX_TOKENS, runner="generic")
    assert "elsewhere than training does" in sole_fault(examine(target(), tokenizer(), case), "taps served")


def test_the_feature_that_tells_the_label_is_no_mistake_of_training() -> None:
    """The feature of the position after holds the first step's label: a head that repeats it is right more often."""
    good, later = table([0.6, 0.1, 0.1, 0.1]), {LATER: [[0.9, 0.1, 0.1, 0.1]]}
    both = replace(good, table={**good.table, **later}, next_token={**good.next_token, LATER: [0.9]}, reads_tokens=True)
    assert "wants the feature of the position after" in sole_fault(check_agreement(both), "feature")
    fed = replace(both, is_autoregressive=True)
    assert faults(check_agreement(fed)) == {}
    trained_on_it = replace(
        fed,
        table={**fed.table, IN_PLACE: [[0.2, 0.7, 0.1, 0.1]]},
        next_token={**fed.next_token, IN_PLACE: [0.7]},
    )
    assert "the target's own next token, which fresh heads predict" in sole_fault(
        check_agreement(trained_on_it), "knowledge"
    )


@pytest.mark.parametrize(
    ("late", "sentence", "by"),
    [
        pytest.param(1, "head 0 looks like head 1; head 1 looks like head 2", "one token more", marks=pytest.mark.slow),
        pytest.param(2, "head 0 looks like head 2; head 1 looks like head 3", "2 tokens more", marks=pytest.mark.slow),
        (-1, "head 0 says the target's own next token; head 1 looks like head 0", "one token less"),
    ],
)
def test_shifted_labels(late: int, sentence: str, by: str, tmp_path: Path) -> None:
    found = sole_fault(examined(trained(late=late), tmp_path), "labels")
    assert sentence in found
    assert f"labels are shifted by {by} than they should be" in found


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        pytest.param(method, steps, marks=() if _QUICK.get(method) == steps else pytest.mark.slow)
        for method in sorted(SIZES)
        for steps in _UNDERTRAINED
    ],
)
def test_few_steps_are_no_wrong_labels(method: str, steps: int, tmp_path: Path) -> None:
    """An undertrained head still says the token that its feature was made for, which is its neighbour's label."""
    checks = examined(trained(method, steps=steps), tmp_path)
    assert sole_fault(checks, "knowledge").startswith("Undertrained")
    verdicts = {check.name: check.verdict for check in checks}
    assert verdicts["labels"] != "fault"
    assert verdicts["feature"] != "fault"


def test_a_single_head_names_both_causes(tmp_path: Path) -> None:
    """What one head says is the same after few steps and with labels that are one token early."""
    message = faults(check_agreement(table([0.2, 0.6, 0.2, 0.2], own_next=0.6)))["knowledge"]
    assert "Undertrained" in message
    assert "If it was trained long, its labels are shifted by one token less than needed" in message


def test_heads_in_another_order(tmp_path: Path) -> None:
    def swap(weights: dict[str, Tensor]) -> None:
        for key in weights:
            weights[key] = weights[key][[1, 0, 2]].contiguous()

    assert "head 0 looks like head 1; head 1 looks like head 0: the heads are in another order" in sole_fault(
        examined(with_weights(swap), tmp_path), "labels"
    )


def test_the_head_of_another_target(tmp_path: Path) -> None:
    checks = examined(trained(seed=1, steps=5), tmp_path)
    assert "trained for another target (tiny-1): it has weights" in sole_fault(checks, "head fits")
    assert "skipped" in {check.verdict for check in checks if check.name == "feature"}
    allowed = examined(trained(seed=1, steps=60), tmp_path, allow_other_target=True)
    assert {check.name: check.verdict for check in allowed}["head fits"] == "warning"
    assert faults(allowed).keys() == {"head fits", "knowledge"}


def test_a_random_head(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)

    def scramble(weights: dict[str, Tensor]) -> None:
        for value in weights.values():
            value.copy_(torch.randn(value.shape, generator=generator) * value.std())

    assert "heads predict the same whatever the text" in sole_fault(
        examined(with_weights(scramble), tmp_path), "knowledge"
    )


@pytest.mark.parametrize("method", methods("eagle3", "medusa"))
def test_an_untrained_head(method: str, tmp_path: Path) -> None:
    parts = target_parts(target(), dtype=torch.float32)
    head = fresh_head(head_config(method, target(), SIZES[method]), parts, seed=0)
    checkpoint = HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target()))
    assert "the head still has the weights that training starts from: it was never trained" in sole_fault(
        examined(checkpoint, tmp_path), "head trained"
    )


def test_nearly_untrained_heads_say_the_next_token(tmp_path: Path) -> None:
    parts = target_parts(target(), dtype=torch.float32)
    head = fresh_head(head_config("medusa", target(), SIZES["medusa"]), parts, seed=0)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(1e-6)
    checkpoint = HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target()))
    found = sole_fault(examined(checkpoint, tmp_path), "knowledge")
    assert "the target's own next token, which fresh heads predict, is still predicted more often" in found
    assert "If it was trained long, its labels were not shifted at all" in found


def test_one_untrained_head(tmp_path: Path) -> None:
    parts = target_parts(target(), dtype=torch.float32)
    fresh = fresh_head(good().config, parts, seed=0).state_dict()
    assert "head 1 still has the weights that training starts from" in sole_fault(
        examined(with_weights(lambda w: [w[key][1].copy_(fresh[key][1]) for key in w]), tmp_path), "head trained"
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda weights: weights["weight"][1].zero_(), "weight[1] is zero everywhere"),
        (lambda weights: weights["lm_head"][2].mul_(1e7), "lm_head[2] reaches"),
    ],
)
def test_spoilt_values(change: Callable[[dict[str, Tensor]], object], sentence: str, tmp_path: Path) -> None:
    assert sentence in sole_fault(examined(with_weights(change), tmp_path), "head values")


def test_not_finite(tmp_path: Path) -> None:
    spoilt = with_weights(lambda weights: weights["lm_head"][0, 0, :1].fill_(torch.nan))
    assert "not finite: lm_head" in sole_fault(examined(spoilt, tmp_path), "head loads")
    in_memory = check_values(spoilt, set())
    assert in_memory.verdict == "fault"
    assert "lm_head[0] holds numbers that are not finite" in in_memory.message
    assert check_trained(spoilt, target_parts(target()))[0].verdict == "ok"


def test_a_missing_tensor(tmp_path: Path) -> None:
    native.write_checkpoint(good(), tmp_path)
    tensors = load_file(tmp_path / native.WEIGHTS)
    del tensors["bias"]
    save_file(tensors, tmp_path / native.WEIGHTS)
    case = Examination(head=tmp_path, prompts=PROMPTS, max_tokens=MAX_TOKENS, train_check=True)
    checks = examine(target(), tokenizer(), case)
    found = faults(checks)
    assert found.keys() == {"head loads"}
    assert checks[-1].verdict == "skipped"
    assert "missing: bias" in found["head loads"]


def test_drafting_from_the_wrong_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learn = LastFeatures.learn

    def one_early(self: LastFeatures, committed: Committed) -> None:
        assert committed.features is not None
        learn(self, replace(committed, features=committed.features.roll(1, dims=0)))

    monkeypatch.setattr(LastFeatures, "learn", one_early)
    assert "Drafting does not do what training did" in sole_fault(examined(good(), tmp_path), "drafting")


def test_weights_that_int8_copies_lose(tmp_path: Path) -> None:
    """One input of a layer is tiny, and its weights are as much greater: the same network, whose rows int8 empties."""
    weights = {key: value.clone() for key, value in good("eagle").weights.items()}
    weights["layer.up_proj.weight"][0] /= 500
    weights["layer.down_proj.weight"][:, 0] *= 500
    assert "Chains of int8 copies bring" in sole_fault(
        examined(replace(good("eagle"), weights=weights), tmp_path), "rounding"
    )


def test_a_drafter_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: LastFeatures, slots: object) -> Tensor:
        raise RuntimeError("no features")

    monkeypatch.setattr(LastFeatures, "of", fail)
    assert "drafting" in faults(examined(good(), tmp_path))


def test_serving_reads_another_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = Runner.prefill

    def shifted(self: Runner, slot: int, tokens: Any, start: int) -> Tensor | None:
        features = prefill(self, slot, tokens, start)
        return None if features is None else features.roll(1, dims=0)

    monkeypatch.setattr(Runner, "prefill", shifted)
    case = Examination(method="medusa", prompts=PROMPTS, max_tokens=MAX_TOKENS, runner="generic")
    assert "trained on one thing and served another" in sole_fault(
        examine(target(), tokenizer(), case), "target served"
    )


def test_a_teacher_with_the_wrong_feature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    features = Teacher.features

    def normed_twice(self: Teacher, tokens: Tensor) -> Tensor:
        module: Any = target().module
        with torch.no_grad():
            twice: Tensor = module.model.norm(features(self, tokens))
        return twice

    monkeypatch.setattr(Teacher, "features", normed_twice)
    found = faults(examine(target(), tokenizer(), Examination(method="medusa", prompts=PROMPTS, max_tokens=MAX_TOKENS)))
    assert {"target logits", "target served"} <= found.keys()
    assert "normed twice" in found["target logits"]


@pytest.mark.parametrize("method", methods("medusa", "mlp_speculator", "mtp"))
def test_before_training(method: str) -> None:
    checks = examine_training(target(), head_config(method, target(), SIZES[method]), texts())
    first, last = checks[1].value
    assert last < 0.9 * first
    assert f"from {first:.4f} to {last:.4f}" in checks[1].message
    fresh = "skipped" if method in ("mlp_speculator", "eagle3") else "ok"
    assert {check.name: check.verdict for check in checks} == {"fresh head": fresh, "learning": "ok"}


def test_data_without_labels() -> None:
    no_labels = OneBatch(torch.ones(2, 16, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.bool))
    checks = examine_training(target(), head_config("medusa", target(), {}), texts(), data=no_labels)
    assert "no batch had a label" in sole_fault(checks, "learning")


def table(*rows: list[float], frequent: float = 0.1, own_next: float = 0.3) -> Agreement:
    """Shares at the shifts 0, -1, 1, 2 of each head, with the feature in place."""
    assert all(len(row) == len(SHIFTS) for row in rows)
    own = [own_next] * len(rows)
    return Agreement(
        table={IN_PLACE: rows},
        next_token={IN_PLACE: own},
        most_frequent=frequent,
        num_positions=1000,
        reads_tokens=False,
    )


def test_agreement_that_rises_with_depth() -> None:
    rising = table([0.4, 0.2, 0.2, 0.2], [0.6, 0.2, 0.2, 0.2], [0.5, 0.2, 0.2, 0.2])
    assert "head 1 is right more often than head 0" in sole_fault(check_agreement(rising), "depth")
    assert faults(check_agreement(replace(rising, reads_tokens=True))) == {}


def test_differences_within_chance_are_no_faults() -> None:
    assert faults(check_agreement(table([0.5, 0.53, 0.2, 0.2], [0.53, 0.2, 0.55, 0.2]))) == {}
    assert faults(check_agreement(table([0.95, 0.5, 0.5, 0.5], frequent=0.9))) == {}
    assert faults(check_agreement(table([0.9, 0.5, 0.5, 0.5], frequent=0.9))).keys() == {"knowledge"}


@pytest.mark.parametrize(("drop", "verdict"), [(0.0, "ok"), (0.1, "warning"), (0.2, "fault")])
def test_how_much_less_is_accepted(drop: float, verdict: str) -> None:
    drafting = DraftingFigures(accepted=[0.7, 0.5 - drop], expected=[0.7, 0.5], num_passes=100, num_errors=0)
    assert check_drafting(drafting).verdict == verdict


def test_what_cannot_be_examined() -> None:
    with pytest.raises(RequestError, match="no prompt has two tokens"):
        examine(target(), tokenizer(), Examination(method="medusa", prompts=["t5", ""]))
    with pytest.raises(ConfigError, match="there is no head 'medsa' to train"):
        examine(target(), tokenizer(), Examination(method="medsa", prompts=PROMPTS))
