"""The exact tests see every bug they are meant for: each mutant's distribution is off, its healthy setting's is not."""

from dataclasses import dataclass

import pytest
import torch
from enumeration import exact_distribution
from mutants import MUTANTS
from torch import Tensor

from foretoken.acceptance.rules import KeyedDecisions
from foretoken.sampling.noise import KeyedNoise, Purpose


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    healthy = mutant.setting
    law = exact_distribution(healthy.rule, healthy.drafts, healthy.target, dtype=mutant.dtype)
    assert law.error <= mutant.tolerance
    for target, replacement in mutant.patches.items():
        monkeypatch.setattr(target, replacement)
    broken = mutant.broken or healthy
    distribution = exact_distribution(
        broken.rule, broken.drafts, broken.target, lookup=mutant.lookup, decisions=mutant.decisions, dtype=mutant.dtype
    )
    assert distribution.error > mutant.least


@dataclass(frozen=True, slots=True)
class ZeroNoise(KeyedNoise):
    """Every uniform number is 0, which a float32 generator gives once in 2^24 draws."""

    def uniform(self, positions: Tensor, purpose: Purpose, lane: int = 0) -> Tensor:
        return torch.zeros(positions.shape[0], dtype=torch.float64)


class AcceptsAtEquality(KeyedDecisions):
    """The test as many libraries write it: u <= p / q."""

    def accept(self, target_prob: Tensor, draft_prob: Tensor, lane: int) -> Tensor:
        return self.noise.uniform(self.root_positions, Purpose.ACCEPT, lane) <= target_prob / draft_prob


def accepts_impossible_tokens(decisions: type[KeyedDecisions]) -> bool:
    """Whether a token that the target excludes survives at u = 0."""
    zero = torch.zeros(1, dtype=torch.int64)
    return bool(decisions(ZeroNoise(zero), zero).accept(torch.tensor([0.0]), torch.tensor([0.3]), 0))


def test_impossible_tokens_never_survive() -> None:
    assert not accepts_impossible_tokens(KeyedDecisions)
    assert accepts_impossible_tokens(AcceptsAtEquality), "the directed test does not see the mutant"
