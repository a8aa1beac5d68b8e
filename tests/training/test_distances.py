"""Losses against sums written out, and their gradients against finite differences and the written-out sum's."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from foretoken.training.losses import kl_loss, token_loss, tv_loss

M, V = 4, 7


def rows(seed: int, scale: float = 2.0) -> Tensor:
    return scale * torch.randn(M, V, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def distributions() -> tuple[Tensor, Tensor]:
    """Distributions, one of which is certain and one of which lacks tokens, and their entropies."""
    probs = rows(2).softmax(1)
    probs[0] = torch.eye(V, dtype=torch.float64)[3]
    probs[1, :4] = 0
    probs[1] /= probs[1].sum()
    entropy = [-math.fsum(p * math.log(p) for p in row if p) for row in probs.tolist()]
    return probs, torch.tensor(entropy, dtype=torch.float64)


def softmax(scores: list[float]) -> list[float]:
    weights = [math.exp(score - max(scores)) for score in scores]
    return [weight / math.fsum(weights) for weight in weights]


def test_values() -> None:
    logits, labels, (probs, entropy) = rows(1), torch.tensor([3, 0, 6, 6]), distributions()
    tokens, kl, tv = token_loss(logits, labels), kl_loss(logits, probs, entropy), tv_loss(logits, probs)
    for m in range(M):
        q, p = softmax(logits[m].tolist()), probs[m].tolist()
        assert float(tokens[m]) == pytest.approx(-math.log(q[labels[m]]), rel=1e-12)
        expected = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
        assert float(kl[m]) == pytest.approx(expected, rel=1e-12)
        expected = 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))
        assert float(tv[m]) == pytest.approx(expected, rel=1e-12)


def test_zero_where_head_and_target_agree_and_only_there() -> None:
    logits = rows(1)
    probs = logits.softmax(1)
    entropy = -(probs * probs.log()).sum(1)
    # A head's logits are known up to a constant.
    assert kl_loss(logits + 5, probs, entropy).abs().max() < 1e-12
    assert tv_loss(logits + 5, probs).abs().max() < 1e-12
    other = rows(3)
    assert kl_loss(other, probs, entropy).min() > 1e-2
    assert tv_loss(other, probs).min() > 1e-2


def test_kl_is_from_the_target_to_the_head() -> None:
    """KL is not symmetric: mass that the head misses costs more than mass that it adds."""
    narrow, wide = torch.tensor([[0.98, 0.01, 0.01]]).double(), torch.full((1, 3), 1 / 3).double()
    entropy = [-(p * p.log()).sum(1) for p in (narrow, wide)]
    misses, adds = kl_loss(narrow.log(), wide, entropy[1]), kl_loss(wide.log(), narrow, entropy[0])
    assert float(misses) == pytest.approx(math.log(1 / 3) - (math.log(0.98) + 2 * math.log(0.01)) / 3)
    assert float(adds) < float(misses)


@pytest.mark.parametrize("name", ["token", "kl", "tv"])
def test_gradients(name: str) -> None:
    labels, (probs, entropy) = torch.tensor([3, 0, 6, 6]), distributions()
    losses = {
        "token": lambda logits: token_loss(logits, labels),
        "kl": lambda logits: kl_loss(logits, probs, entropy),
        "tv": lambda logits: tv_loss(logits, probs),
    }
    assert torch.autograd.gradcheck(losses[name], rows(1).requires_grad_())


def test_gradient_of_kl_is_that_of_the_written_out_sum() -> None:
    probs, entropy = distributions()
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0]).double()  # rows count differently, as heads do
    ours, naive = rows(1).requires_grad_(), rows(1).requires_grad_()
    (kl_loss(ours, probs, entropy) * weights).sum().backward()
    cross = -(probs * (naive.exp() / naive.exp().sum(1, keepdim=True)).log()).sum(1)
    ((cross - entropy) * weights).sum().backward()
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad, naive.grad, rtol=1e-12, atol=1e-12)


def test_large_logits() -> None:
    logits = torch.tensor([[900.0, -900.0, 0.0]], requires_grad=True)
    probs = torch.tensor([[0.5, 0.5, 0.0]])
    loss = kl_loss(logits, probs, torch.tensor([math.log(2)]))
    loss.sum().backward()
    assert float(loss.detach()) == pytest.approx(900 - math.log(2))
    assert logits.grad is not None
    torch.testing.assert_close(logits.grad, torch.tensor([[0.5, -0.5, 0.0]]))
