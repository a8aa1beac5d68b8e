"""The objective all heads share: which position learns what, against a loop over positions; and its portions."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from training_runs import VOCAB_SIZE, no_grad_features

from foretoken.heads.base import Head, HeadConfig, StepHead, StepHeadConfig, build_head
from foretoken.heads.hydra import HydraConfig
from foretoken.heads.medusa import MedusaConfig
from foretoken.heads.mlp_speculator import MlpSpeculatorConfig
from foretoken.models.parts import TargetParts
from foretoken.training import objective_base as base
from foretoken.training.objective_base import Examples, HeadSums, Objective, accumulate, label_counts

B, S, K, E = 3, 9, 3, 16
MIXED = {"ce_weight": 0.7, "kl_weight": 0.9, "tv_weight": 0.4, "feature_weight": 0.3, "head_decay": 0.6}
CONFIGS: dict[str, HeadConfig] = {
    "medusa": MedusaConfig(hidden_size=E, vocab_size=VOCAB_SIZE, num_heads=K),
    "medusa with LM heads": MedusaConfig(hidden_size=E, vocab_size=VOCAB_SIZE, num_heads=K, own_lm_head=True),
    "hydra": HydraConfig(hidden_size=E, vocab_size=VOCAB_SIZE, num_heads=K, num_layers=2, own_lm_head=True),
    "mlp": MlpSpeculatorConfig(hidden_size=E, vocab_size=VOCAB_SIZE, num_heads=K, inner_dim=E),
}


class Seer(StepHead):
    """Looks up what the text or the target says some positions off the right one, told where it is by the feature."""

    def __init__(self, table: Tensor, ahead: int) -> None:
        super().__init__(StepHeadConfig(hidden_size=2, vocab_size=VOCAB_SIZE, num_heads=K))
        self.table, self.ahead = table, ahead
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def initialize(self, parts: TargetParts) -> None:
        pass

    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        return state, state * self.scale

    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        sequence, position = hidden.detach().round().long().unbind(-1)
        where = (position + self.ahead + index).clamp(0, self.table.shape[1] - 1)
        return certain(self.table[sequence, where]) * self.scale


def certain(tokens: Tensor) -> Tensor:
    """Logits that leave no doubt."""
    return 60.0 * torch.nn.functional.one_hot(tokens, VOCAB_SIZE).float()


def different_neighbours(seed: int) -> Tensor:
    """(B, S) tokens, no two of a row equal, so that each shift gives others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(VOCAB_SIZE, generator=generator)[:S] for _ in range(B)])


@pytest.mark.parametrize("shift", [-1, 0, 1])
@pytest.mark.parametrize("kind", ["ce_weight", "kl_weight", "tv_weight"])
def test_shift(kind: str, shift: int) -> None:
    """A head that sees the future has no loss exactly when its head i says x_{t+2+i}, or the target's t+1+i."""
    text, taught = different_neighbours(1), different_neighbours(2)
    places = torch.stack(torch.meshgrid(torch.arange(B), torch.arange(S), indexing="ij"), dim=-1).float()
    parts = TargetParts(
        embed=lambda ids: ids.unsqueeze(-1).float(),
        lm_head=lambda x: certain(taught[tuple(x.round().long().unbind(-1))]),
        lm_head_weight=torch.zeros(VOCAB_SIZE, 2),
    )
    head = Seer(text, 2 + shift) if kind == "ce_weight" else Seer(taught, 1 + shift)
    objective = Objective(**{"kl_weight": 0.0, kind: 1.0})
    supervised = torch.ones(B, S, dtype=torch.bool)
    given = Examples(text, supervised, places, places)
    sums = accumulate(objective, head, given, parts, counts=label_counts(supervised, K))
    for index in range(K):
        mean = float(sums.loss[index]) / (B * (S - 2 - index))
        if shift == 0:
            assert mean < 1e-6
        else:
            # One position of a row may be right by the clamp at its ends; all others are wrong.
            assert mean > {"ce_weight": 40.0, "kl_weight": 40.0, "tv_weight": 0.6}[kind]
    if kind != "ce_weight":
        expected = [B * (S - 2 - i) for i in range(K)]
        assert (sums.matches.tolist() == expected) == (shift == 0)
    assert sums.count.tolist() == [B * (S - 2 - i) for i in range(K)]


def parts() -> TargetParts:
    """An embedding and an LM head that are not each other's transpose."""
    table, rows = (torch.randn(VOCAB_SIZE, E, generator=torch.Generator().manual_seed(s)) for s in (1, 2))
    return TargetParts(embed=lambda ids: table[ids], lm_head=lambda x: x @ rows.T, lm_head_weight=rows)


def examples() -> Examples:
    """Text of which some positions count, with a row that has no label and one whose last ones all count."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB_SIZE, (B, S), generator=generator)
    supervised = torch.rand(B, S, generator=generator) < 0.6
    supervised[1] = False
    supervised[2, -3:] = True
    features = no_grad_features(tokens)
    return Examples(tokens, supervised, features, features)


def random_head(name: str) -> Head:
    head = build_head(CONFIGS[name])
    with torch.no_grad():
        for seed, parameter in enumerate(head.parameters()):
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(50 + seed)))
    return head


def loops(head: Head, given: Examples, objective: Objective) -> tuple[Tensor, list[float], list[int]]:
    """The whole loss with its graph, each head's sum before the decay and its matches, position by position."""
    shared, total, sums, matches = parts(), torch.zeros(()), [], []
    hidden = list(head.teacher_forced(given.features, given.tokens, shared))
    for i in range(K):
        losses, hits = [], 0
        for b in range(B):
            for t in range(S - 2 - i):
                if not given.supervised[b, t + 2 + i]:
                    continue
                says = head.logits(i, hidden[i][b, t], shared)
                q, p = says.softmax(0), shared.lm_head(given.features[b, t + 1 + i]).softmax(0)
                d = (hidden[i][b, t] - given.features[b, t + 1 + i]).abs()
                losses.append(
                    objective.ce_weight * -q[given.tokens[b, t + 2 + i]].log()
                    + objective.kl_weight * (p * (p / q).log()).sum()
                    + objective.tv_weight * (p - q).abs().sum() / 2
                    + objective.feature_weight * torch.where(d < 1, d * d / 2, d - 0.5).sum() / E
                )
                hits += int(says.argmax() == p.argmax())
        total = total + objective.head_decay**i * torch.stack(losses).sum() / len(losses)
        sums.append(float(torch.stack(losses).detach().sum()))
        matches.append(hits)
    return total, sums, matches


def gradients(head: Head) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in head.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    "weights",
    [MIXED, {}, *({"kl_weight": 0.0, f"{kind}_weight": 1.0} for kind in ("ce", "tv", "feature"))],
    ids=["mixed", "kl", "ce", "tv", "feature"],
)
def test_loops_over_positions(name: str, weights: dict[str, float]) -> None:
    objective, given = Objective(**weights), examples()
    head, naive = random_head(name), random_head(name)
    counts = label_counts(given.supervised, K)
    found = accumulate(objective, head, given, parts(), counts=counts)
    total, sums, matches = loops(naive, given, objective)
    total.backward()
    assert counts.tolist() == [int(given.supervised[:, i + 2 :].sum()) for i in range(K)]
    # float32 on both sides, sums of up to 20 positions
    torch.testing.assert_close(found.loss, torch.tensor(sums, dtype=torch.float64), rtol=1e-5, atol=1e-5)
    assert found.matches.tolist() == matches
    expected, made = gradients(naive), gradients(head)
    # Where nothing is learned of logits, an LM head gets no gradient here, and zeros there.
    assert made.keys() >= {key for key, grad in expected.items() if grad.any()}
    for key, grad in made.items():
        torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6, msg=lambda text, key=key: f"{key} {text}")


@pytest.mark.parametrize("values", [1, 2 * VOCAB_SIZE, 7 * VOCAB_SIZE])
def test_portions_change_nothing(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    objective, given = Objective(**MIXED), examples()
    counts = label_counts(given.supervised, K)
    whole, parted = random_head("hydra"), random_head("hydra")
    one = accumulate(objective, whole, given, parts(), counts=counts)
    shared, sizes = parts(), []

    def watched(features: Tensor) -> Tensor:
        sizes.append(len(features))
        return shared.lm_head(features)

    monkeypatch.setattr(base, "_PORTION_VALUES", values)
    two = accumulate(objective, parted, given, replace(shared, lm_head=watched), counts=counts)
    # The target's logits are made once for all heads, and only where there is a label.
    assert sum(sizes) == int(given.supervised[:, 2:].sum())
    assert max(sizes) == max(1, values // VOCAB_SIZE)
    assert_same(one, two)
    for key, grad in gradients(parted).items():
        torch.testing.assert_close(grad, gradients(whole)[key], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2])
def test_micro_batches_change_nothing(size: int) -> None:
    objective, given = Objective(**MIXED), examples()
    counts = label_counts(given.supervised, K)
    whole, parted = random_head("hydra"), random_head("hydra")
    one = accumulate(objective, whole, given, parts(), counts=counts)
    each = [
        accumulate(objective, parted, part, parts(), counts=counts)
        for part in (
            Examples(*(whole[b : b + size] for whole in (given.tokens, given.supervised, given.features, given.final)))
            for b in range(0, B, size)
        )
    ]
    two = each[0]
    for more in each[1:]:
        two = two + more
    assert_same(one, two)
    for key, grad in gradients(parted).items():
        torch.testing.assert_close(grad, gradients(whole)[key], rtol=1e-4, atol=1e-6)


def assert_same(one: HeadSums, two: HeadSums) -> None:
    torch.testing.assert_close(one.loss, two.loss, rtol=1e-5, atol=1e-6)
    assert (one.matches.tolist(), one.count.tolist()) == (two.matches.tolist(), two.count.tolist())


def test_logits_are_made_where_a_head_has_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nowhere else: not for masked tokens, nor where the text ends before the label."""
    given, head, rows = examples(), random_head("medusa"), [0] * K
    logits = type(head).draft_logits

    def watched(self: Head, index: int, hidden: Tensor, shared: TargetParts) -> Tensor:
        rows[index] += len(hidden)
        return logits(self, index, hidden, shared)

    monkeypatch.setattr(type(head), "draft_logits", watched)
    counts = label_counts(given.supervised, K)
    accumulate(Objective(), head, given, parts(), counts=counts)
    assert rows == counts.tolist()


def test_positions_that_are_not_labels_teach_nothing() -> None:
    """Changing a token that no head may learn, and the feature before it, changes no loss of Medusa."""
    objective, given = Objective(**MIXED), examples()
    counts = label_counts(given.supervised, K)
    before = accumulate(objective, random_head("medusa"), given, parts(), counts=counts)
    row, column = 0, next(c for c in range(2, S) if not given.supervised[0, c])
    given.tokens[row, column] = (given.tokens[row, column] + 1) % VOCAB_SIZE
    after = accumulate(objective, random_head("medusa"), given, parts(), counts=counts)
    assert torch.equal(before.loss, after.loss)
    label = next(c for c in range(2, S) if given.supervised[0, c])
    given.tokens[row, label] = (given.tokens[row, label] + 1) % VOCAB_SIZE
    changed = accumulate(objective, random_head("medusa"), given, parts(), counts=counts)
    assert not torch.equal(before.loss, changed.loss)


def test_noise_is_bounded_and_only_on_what_heads_read(monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = examples(), []
    head = random_head("medusa")
    forced = type(head).teacher_forced

    def watched(self: Head, features: Tensor, *more: Any) -> Iterator[Tensor]:
        seen.append(features)
        return forced(self, features, *more)

    monkeypatch.setattr(type(head), "teacher_forced", watched)
    clean = given.features.clone()
    accumulate(Objective(noise=5.0), head, given, parts(), counts=label_counts(given.supervised, K))
    bound = 5.0 / (S * E) ** 0.5
    noise = seen[0] - clean
    assert torch.equal(given.features, clean)
    assert bound * 0.9 < float(noise.abs().max()) <= bound * 1.0001  # 432 draws come near the bound
    assert float(noise.std()) == pytest.approx(bound / 3**0.5, rel=0.1)
