"""Evaluations of a run, chains counted one by one; no effect on weights; the trees of an acceptance table."""

from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
import training_runs
from training_runs import batches, metrics, settings, target

from foretoken.core.errors import ConfigError
from foretoken.models.parts import target_parts
from foretoken.training.evaluation import EvaluationConfig, tuned_tree
from foretoken.training.run import train_head
from foretoken.training.teacher import Teacher
from foretoken.trees.choices import TreeShape

SIZES: dict[str, dict[str, Any]] = {
    "hydra": {"num_heads": 3, "num_layers": 2, "dropout": 0.2},
    "eagle3": {"num_steps": 3, "boundaries": [1, 2], "draft_vocab_size": 50},
}
WEIGHTS: dict[str, dict[str, Any]] = {"hydra": {}, "eagle3": {"stride": 2}}


def evaluation(every: int = 2) -> EvaluationConfig:
    return EvaluationConfig.of_held_out(batches(400, is_partial=False), every=every, length=20)


def run_settings(directory: Path, method: str, **more: Any) -> Any:
    training_runs.SIZES.setdefault("eagle3", {})
    made = settings(directory, method, sizes=SIZES[method], weights=WEIGHTS[method])
    drafted = tuple(range(5, 55)) if method == "eagle3" else None
    return replace(made, draft_vocab=drafted, **more)


@pytest.mark.parametrize("method", SIZES)
def test_weights_are_those_of_a_run_without(tmp_path: Path, method: str) -> None:
    """Dropout and the positions that are followed are drawn from the same stream."""
    without, _ = train_head(target(), batches(), run_settings(tmp_path / "without", method))
    shown: list[Any] = []
    looked, _ = train_head(
        target(), batches(), run_settings(tmp_path / "with", method, evaluation=evaluation()), on_step=shown.append
    )
    training_runs.same_weights(looked.weights, without.weights)
    lines = metrics(tmp_path / "with")
    assert [line["step"] for line in lines if "held_out_tau" in line] == [2, 4, 6]
    assert [report.held_out_tau for report in shown] == [line.get("held_out_tau") for line in lines]
    for line in lines[1::2]:
        shares = line["held_out_acceptance"]
        assert shares == sorted(shares, reverse=True)
        assert line["held_out_tau"] == pytest.approx(1 + sum(shares))
    assert not any("held_out_tau" in line for line in metrics(tmp_path / "without"))


def test_an_interrupted_run_has_the_same_curve(tmp_path: Path) -> None:
    train_head(target(), batches(), run_settings(tmp_path / "whole", "hydra", evaluation=evaluation()))
    parts = run_settings(tmp_path / "parts", "hydra", evaluation=evaluation(), save_every_s=-1.0)
    with pytest.raises(training_runs.StopError):
        train_head(target(), batches(), parts, on_step=training_runs.stop_after(3))
    train_head(target(), batches(), parts)
    curves = [
        [(line["step"], line.get("held_out_tau")) for line in metrics(tmp_path / name)] for name in ("whole", "parts")
    ]
    assert curves[0] == curves[1]
    assert sum(tau is not None for _, tau in curves[0]) == 3


@pytest.mark.parametrize("method", SIZES)
@pytest.mark.parametrize("is_partial", [False, True])
def test_drafts_counted_one_by_one(tmp_path: Path, method: str, is_partial: bool) -> None:
    head = train_head(target(), batches(), run_settings(tmp_path / "run", method))[0].module()
    config = EvaluationConfig.of_held_out(batches(400, is_partial=is_partial), every=1, length=20)
    parts = target_parts(target())
    found = config.evaluator(target(), head, parts, precision=torch.float32)()["held_out_acceptance"]
    tokens, steps = config.tokens, head.config.steps
    read = Teacher(target(), head.config.taps).read_features(tokens)
    width = head.config.hidden_size * len(head.config.taps)
    choices = parts.lm_head(read[..., -head.config.hidden_size :]).argmax(-1)
    said = [
        head.logits(index, hidden, parts).argmax(-1)
        for index, hidden in enumerate(head.teacher_forced(read[..., :width], tokens, parts))
    ]
    lengths = []
    for row in range(len(tokens)):
        for begin in range(tokens.shape[1] - 1 - steps):
            if not all(bool(config.supervised[row, begin + 2 + index]) for index in range(steps)):
                continue
            right = 0
            while right < steps and said[right][row, begin] == choices[row, begin + 1 + right]:
                right += 1
            lengths.append(right)
    assert found == [sum(length > depth for length in lengths) / len(lengths) for depth in range(steps)]
    assert found[0] > 0


def test_windows(tmp_path: Path) -> None:
    short = EvaluationConfig.of_held_out(batches(12, is_partial=False), every=1, length=20)
    assert short.tokens.shape == (1, 12)
    assert short.starts(3)[0].tolist() == [True] * 8 + [False] * 4
    with pytest.raises(ConfigError, match="has 11 labels in a row"):
        short.starts(11)
    with pytest.raises(ConfigError, match="has 3 labels in a row"):
        replace(short, supervised=short.supervised & (torch.arange(12) % 3 > 0)).starts(3)


def test_the_tree_of_a_table_is_the_best_of_all_trees() -> None:
    table = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.0], [0.4, 0.1, 0.0]]
    every = [choice for length in (1, 2, 3) for choice in product(range(3), repeat=length)]

    def expected(choices: tuple[tuple[int, ...], ...]) -> float:
        values = (torch.tensor([table[d][rank] for d, rank in enumerate(choice)]).prod().item() for choice in choices)
        return 1.0 + sum(values)

    def is_tree(choices: tuple[tuple[int, ...], ...]) -> bool:
        return all(len(choice) == 1 or choice[:-1] in choices for choice in choices)

    tuned = tuned_tree(table, max_nodes=5, sizes=(2, 3, 4))
    for size in (2, 3, 4, 5):
        best = max(expected(choices) for choices in combinations(every, size - 1) if is_tree(choices))
        assert tuned.tokens_by_nodes[size] == pytest.approx(best)
    assert expected(tuned.shape.choices) == pytest.approx(tuned.tokens_by_nodes[5])
    assert TreeShape.parse([list(choice) for choice in tuned.shape.choices]) == tuned.shape


def test_candidates_that_were_never_right_are_no_nodes() -> None:
    assert tuned_tree([[0.5, 0.0]], max_nodes=9).shape == TreeShape.chain(1)
    with pytest.raises(ConfigError, match="no candidate was right even once"):
        tuned_tree([[0.0, 0.0]], max_nodes=9)
