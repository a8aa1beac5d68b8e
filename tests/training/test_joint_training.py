"""Medusa-2: target and heads learn together, and what comes out is a target with its head."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from training_runs import StopError, stop_after

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.formats import native
from foretoken.heads.base import build_head
from foretoken.models.generic import run_plain
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.joint import JointConfig, JointTrainer
from foretoken.training.objectives import head_config, objective_config
from foretoken.training.run import HeadSettings, train_head
from foretoken.training.trainer import train_config

pytest.importorskip("peft")
# peft asks transformers by a name that will go.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning:peft.*")

WINDOWS = torch.tensor([[(3 + 5 * row + 7 * i * (row + 1)) % 60 + 3 for i in range(16)] for row in range(8)])


class Repeated:
    """The same few windows again and again."""

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [(step * batch_size + row) % len(WINDOWS) for row in range(batch_size)]
        tokens = WINDOWS[rows, :length]
        return tokens, torch.ones_like(tokens, dtype=torch.bool)


def target(architecture: str = "llama") -> LoadedModel:
    return wrap_model(tiny_model(architecture), name="tiny")


def trainer(model: LoadedModel, steps: int = 4, method: str = "medusa", **joint: Any) -> JointTrainer:
    torch.manual_seed(0)
    sizes = {"num_heads": 2} if method == "medusa" else {"num_steps": 2}
    head = build_head(head_config(method, model, sizes), dtype=torch.float32)
    head.initialize(target_parts(model))
    train = train_config({"schedule": {"num_steps": steps, "warmup_steps": 0, "peak": 3e-3}, "batch_size": 4,
                          "length": 16})  # fmt: skip
    settings = JointConfig(**{"lora_rank": 4, "lora_dropout": 0.0, **joint})
    return JointTrainer(
        head, model, objective_config(method, {"ce_weight": 1.0, "kl_weight": 0.0}), train, Repeated(), settings
    )


def test_first_weights_are_not_fitted_to_a_target_that_learns() -> None:
    made = trainer(target(), method="eagle")
    assert not made.begin()
    assert next(made.steps()).loss > 0


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_at_first_the_target_is_the_original(backbone: str) -> None:
    """Untouched adapters and copied weights: the loss of self-distillation begins at exactly nothing."""
    before = run_plain(tiny_model("llama"), WINDOWS).logits
    made = trainer(target(), backbone=backbone)
    first = next(made.steps())
    assert first.head_losses[-1] == pytest.approx(0.0, abs=1e-6)
    assert len(first.head_losses) == 3, "two heads and the backbone's own"
    torch.testing.assert_close(made._original_logits(WINDOWS), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("backbone", ["lora", "full"])
def test_both_learn(backbone: str) -> None:
    model = target()
    before = run_plain(copy.deepcopy(model.module), WINDOWS).logits
    made = trainer(model, steps=40, backbone=backbone, self_distillation=False)
    reports = list(made.steps())
    assert reports[-1].head_losses[-1] < 0.8 * reports[0].head_losses[-1], "the text"
    assert reports[-1].head_losses[0] < 0.9 * reports[0].head_losses[0], "the first head"
    merged = made.merged_target()
    after = run_plain(wrap_model(merged, name="new").module, WINDOWS).logits
    assert (after - before).abs().max() > 0.1, "what was learned is in the merged weights"


def test_weight_of_the_heads_rises() -> None:
    """The published values: a sine that ends at lambda, a line, or lambda at once."""
    sine = JointConfig(head_weight=0.2, head_warmup="sine")
    assert sine.weight(0, 4) == pytest.approx(0.2 * 0.3826834)
    assert sine.weight(1, 4) == pytest.approx(0.2 * 0.7071068)
    assert sine.weight(3, 4) == pytest.approx(0.2)
    linear = JointConfig(head_weight=0.4, head_warmup="linear", warmup_part=0.5)
    assert [linear.weight(step, 8) for step in (0, 1, 3, 7)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert JointConfig(head_weight=0.3).weight(0, 100) == 0.3


def test_learning_rates_differ() -> None:
    made = trainer(target(), rate_factor=0.25)
    report = next(made.steps())
    rates = {group["rate_factor"]: group["lr"] for group in made._optimizer.param_groups}
    assert rates[0.25] == pytest.approx(report.rate / 4)
    assert rates[1.0] == pytest.approx(report.rate)


def test_a_run_gives_a_target_and_its_head(tmp_path: Path) -> None:
    """Interrupted halfway and gone on with: the same weights, and the head drafts for the new target."""

    def settings(directory: Path) -> HeadSettings:
        return HeadSettings(
            head=head_config("medusa", target(), {"num_heads": 2}), objective=objective_config("medusa", {}),
            train=train_config({"schedule": {"num_steps": 6, "warmup_steps": 0}, "batch_size": 4, "length": 16}),
            data="windows", directory=directory, joint=JointConfig(lora_rank=4, lora_dropout=0.1),
        )  # fmt: skip

    whole, model = train_head(target(), Repeated(), settings(tmp_path / "whole"))

    broken = replace(settings(tmp_path / "parts"), save_every_s=0.0)
    with pytest.raises(StopError):
        train_head(target(), Repeated(), broken, on_step=stop_after(3))
    again, same = train_head(target(), Repeated(), broken)
    assert all(torch.equal(value, again.weights[key]) for key, value in whole.weights.items())
    assert all(torch.equal(a, b) for a, b in zip(model.module.parameters(), same.module.parameters(), strict=True))
    native.write_checkpoint(whole, tmp_path / "head")
    params = SamplingParams(temperature=0.0, max_tokens=12)
    config = {"method": "medusa", "model": str(tmp_path / "head"), "tree": "chain", "num_speculative_tokens": 2}
    plain = LLM(model).generate([[5, 6, 7, 8]], params)[0]
    drafted = LLM(model, speculative_config=config).generate([[5, 6, 7, 8]], params)[0]
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafted.metrics.num_drafted > 0
    with pytest.raises(ConfigError, match="weights"):
        LLM(target(), speculative_config=config)


def test_adapters_need_projections() -> None:
    with pytest.raises(ConfigError, match="has none of the projections"):
        trainer(target("gpt2"))


def test_a_tied_lm_head_stays_tied() -> None:
    made = trainer(target("llama_tied"))
    next(made.steps())
    merged = made.merged_target()
    assert merged.get_output_embeddings().weight is merged.get_input_embeddings().weight
