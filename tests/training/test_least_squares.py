"""First weights of EAGLE heads: the linear map that texts follow."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from foretoken.heads.base import build_head
from foretoken.heads.decoder_layer import LayerConfig
from foretoken.heads.eagle import EagleConfig, EagleHead
from foretoken.models.parts import TargetParts
from foretoken.training import objectives, trainer
from foretoken.training.objectives import HassObjective, LinearStart
from foretoken.training.trainer import HeadTrainer, Processes, TrainConfig

E, V, B, S = 8, 30, 4, 40
LAYER = LayerConfig(num_attention_heads=2, num_key_value_heads=1, head_dim=4, intermediate_size=12)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TABLE = drawn(V, E, seed=1)
FROM_TOKEN, FROM_FEATURE = drawn(E, E, seed=2), torch.linalg.qr(drawn(E, E, seed=3)).Q * 0.9
PARTS = TargetParts(embed=lambda ids: TABLE[ids], lm_head=lambda x: x @ TABLE.T, lm_head_weight=TABLE)


def lawful(seed: int, *, constant: float = 0.0) -> tuple[Tensor, Tensor]:
    """Tokens, and features that follow from the token and the feature before."""
    tokens = torch.randint(0, V, (B, S), generator=torch.Generator().manual_seed(seed))
    features = [drawn(B, E, seed=seed + 1)]
    for column in tokens[:, 1:].unbind(1):
        features.append(TABLE[column] @ FROM_TOKEN.T + features[-1] @ FROM_FEATURE.T + constant)
    return tokens, torch.stack(features, dim=1)


def new_head(*, has_bias: bool = False) -> EagleHead:
    head = build_head(EagleConfig(hidden_size=E, vocab_size=V, layer=LAYER, num_steps=3, has_bias=has_bias))
    assert isinstance(head, EagleHead)
    head.initialize(PARTS)
    return head


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_law_is_found(has_bias: bool) -> None:
    head, constant = new_head(has_bias=has_bias), 0.7 if has_bias else 0.0
    fit = LinearStart(head, PARTS)
    for seed in range(20):
        fit.add(*lawful(10 * seed, constant=constant))
    fit.finish(lambda sums: sums)
    torch.testing.assert_close(head.fc.weight, torch.cat([FROM_TOKEN, FROM_FEATURE], dim=1), rtol=0, atol=0.02)
    if has_bias:
        torch.testing.assert_close(head.fc.bias, torch.full((E,), constant), rtol=0, atol=0.02)
    tokens, features = lawful(999, constant=constant)
    steps = list(head.teacher_forced(features, tokens, PARTS))
    torch.testing.assert_close(steps[0][:, : S - 1], features[:, 1:], rtol=0, atol=0.2)  # the block adds nothing yet


def test_processes_add_up() -> None:
    one, parts, sums = new_head(), [], []
    fit = LinearStart(one, PARTS)
    for seed in (0, 10):
        fit.add(*lawful(seed))
        parts.append(LinearStart(new_head(), PARTS))
        parts[-1].add(*lawful(seed))
        parts[-1].finish(lambda found: sums.append(found.clone()) or found)
    fit.finish(lambda found: sums.append(found) or found)
    for first, second, both in zip(sums[0:2], sums[2:4], sums[4:6], strict=True):  # moments, and positions
        torch.testing.assert_close(first + second, both)


@pytest.mark.parametrize("features", [torch.zeros(B, S, E), torch.full((B, S, E), torch.inf)], ids=["zeros", "inf"])
def test_what_teaches_nothing_changes_nothing_that_is_finite(features: Tensor) -> None:
    head = new_head()
    fit = LinearStart(head, TargetParts(embed=lambda ids: 0 * TABLE[ids], lm_head=PARTS.lm_head, lm_head_weight=TABLE))
    before = head.fc.weight.clone()
    fit.add(torch.zeros(B, S, dtype=torch.int64), features)
    fit.finish(lambda sums: sums)
    assert torch.equal(head.fc.weight, before)


class Lawful:
    """Batches whose features the trainer asks for."""

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        assert (batch_size, length, seed) == (B, S, 0)
        self.step = step
        tokens = lawful(10 * step)[0]
        return tokens, torch.ones_like(tokens, dtype=torch.bool)

    def features(self, step: int, tokens: Tensor) -> Tensor:
        assert torch.equal(tokens, lawful(10 * step)[0])
        return lawful(10 * step)[1]


def test_runs_begin_with_it(tmp_path: Path) -> None:
    def run(**options: bool) -> HeadTrainer:
        data = Lawful()
        config = TrainConfig.model_validate({"batch_size": B, "length": S, "schedule": {"num_steps": 80}})
        return HeadTrainer(new_head(), PARTS, HassObjective(), config, data, data.features, **options)

    fresh, begun = run(), run(is_new=False)
    assert fresh.begin()
    assert not begun.begin(), "weights that know the target's texts stay"
    weight = fresh.head.get_parameter("fc.weight")
    torch.testing.assert_close(weight, torch.cat([FROM_TOKEN, FROM_FEATURE], dim=1), rtol=0, atol=0.05)
    assert fresh.progress.step == 0
    assert fresh.progress.seconds > 0, "a run that is bounded in time includes it"
    first = next(iter(fresh.steps())).loss
    assert first < next(iter(begun.steps())).loss
    fresh.save(tmp_path)
    again = run()
    assert again.resume(tmp_path)
    assert torch.equal(again.head.get_parameter("fc.weight"), weight)


class Pair(Processes):
    """This process and one that takes 200 seconds for everything, and sees the same windows."""

    def sum(self, tensor: Tensor) -> Tensor:
        return tensor + 200 if tensor.numel() == 1 and tensor.dtype == torch.float32 else 2 * tensor


@pytest.mark.parametrize(("bound", "seconds"), [(None, 100), (40.0, 5)])
def test_processes_agree_on_the_time(bound: float | None, seconds: float) -> None:
    """Their runs end after the same step; a run that is bounded in time has seven of eight parts left."""
    data, schedule = Lawful(), {"num_steps": 80, "seconds": bound}
    config = TrainConfig.model_validate({"batch_size": B, "length": S, "schedule": schedule})
    made = HeadTrainer(new_head(), PARTS, HassObjective(), config, data, data.features, processes=Pair(2))
    made._features = lambda step, tokens: lawful(10 * step)[1][::2]
    assert made.begin()
    assert made.progress.seconds == pytest.approx(seconds, abs=1)
    assert data.step == (0 if bound else 9), "1,600 positions are wanted of 160 a step"


def test_too_few_positions_fit_nothing() -> None:
    head, before = new_head(), new_head().fc.weight
    fit, (tokens, features) = LinearStart(head, PARTS), lawful(1)
    fit.add(tokens[:3], features[:3])  # 117 positions for 16 inputs
    fit.finish(lambda sums: sums)
    assert torch.equal(head.fc.weight, before)


def test_numbers() -> None:
    """Of "First weights of EAGLE heads by least squares" in `benchmarks/NOTES.md`."""
    assert (objectives.TOKENS_AN_INPUT, objectives._RIDGE, trainer._START_PART) == (100, 1e-3, 8)
    assert objectives._FEWEST_AN_INPUT == 8
