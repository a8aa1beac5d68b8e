"""Distances against sums written out, and their gradients against autograd's of those sums."""

import math

import pytest
import torch
from torch import Tensor

from foretoken.training import losses
from foretoken.training.losses import Distances, LossWeights, TargetRows, distances, target_rows

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


LABELS = torch.tensor([3, 0, 6, 6])
KINDS = {
    "token": LossWeights(token=1.0),
    "kl": LossWeights(kl=1.0),
    "tv": LossWeights(tv=1.0),
    "top": LossWeights(top=1.0, num_top=3),
    "rkl": LossWeights(rkl=1.0),
    "jsd": LossWeights(jsd=1.0),
    "jsd 0.2": LossWeights(jsd=1.0, jsd_beta=0.2),
    "mix": LossWeights(0.7, 0.9, 0.4, 0.6, 2, rkl=0.3, jsd=0.8, jsd_beta=0.7),
}
KINDS["all"] = LossWeights(0.7, 0.9, 0.4, 0.6, 2)


def found(kind: str, logits: Tensor, probs: Tensor, entropy: Tensor, scale: float = 1.0) -> Distances:
    return distances(
        logits, TargetRows(probs.argmax(1), probs, entropy), LABELS[: len(logits)], KINDS[kind], scale=scale
    )


def summed(weights: LossWeights, logits: Tensor, probs: Tensor) -> Tensor:
    """(M,) the definition, for autograd; logits: (M, V) with a graph."""
    own = logits.exp() / logits.exp().sum(1, keepdim=True)
    token = -own[torch.arange(len(own)), LABELS[: len(own)]].log()
    kl = torch.where(probs > 0, probs * (probs.clamp_min(1e-300) / own).log(), 0.0).sum(1)
    best, tokens = probs.topk(weights.num_top if weights.top else 1, dim=1)
    top = -(best * own.gather(1, tokens).log()).sum(1)
    tv = (probs - own).abs().sum(1) / 2
    # A probability of 0 counts as the smallest normal number.
    rkl = (own * (own / probs.clamp_min(torch.finfo(probs.dtype).tiny)).log()).sum(1)
    beta = weights.jsd_beta
    mean = beta * probs + (1 - beta) * own
    jsd = beta * torch.where(probs > 0, probs * (probs.clamp_min(1e-300) / mean).log(), 0.0).sum(1)
    jsd = jsd + (1 - beta) * (own * (own / mean).log()).sum(1)
    by_name = {"token": token, "kl": kl, "tv": tv, "top": top, "rkl": rkl, "jsd": jsd}
    return torch.stack([getattr(weights, name) * value for name, value in by_name.items()]).sum(0)


def test_values() -> None:
    logits, (probs, entropy) = rows(1), distributions()
    token, kl, tv, jsd = (found(kind, logits, probs, entropy).loss for kind in ("token", "kl", "tv", "jsd 0.2"))
    others = logits.softmax(1).roll(1, 0)
    reverse = found("rkl", logits, others, torch.zeros(M)).loss
    for m in range(M):
        q, p = softmax(logits[m].tolist()), probs[m].tolist()
        assert float(token[m]) == pytest.approx(-math.log(q[LABELS[m]]), rel=1e-12)
        expected = math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a)
        assert float(kl[m]) == pytest.approx(expected, rel=1e-12)
        expected = 0.5 * math.fsum(abs(a - b) for a, b in zip(p, q, strict=True))
        assert float(tv[m]) == pytest.approx(expected, rel=1e-12)
        mean = [0.2 * a + 0.8 * b for a, b in zip(p, q, strict=True)]
        expected = 0.2 * math.fsum(a * math.log(a / c) for a, c in zip(p, mean, strict=True) if a)
        expected += 0.8 * math.fsum(b * math.log(b / c) for b, c in zip(q, mean, strict=True))
        assert float(jsd[m]) == pytest.approx(expected, rel=1e-12)
        expected = math.fsum(b * math.log(b / a) for a, b in zip(others[m].tolist(), q, strict=True))
        assert float(reverse[m]) == pytest.approx(expected, rel=1e-12)


def test_zero_where_head_and_target_agree_and_only_there() -> None:
    logits = rows(1)
    probs = logits.softmax(1)
    entropy = -(probs * probs.log()).sum(1)
    for kind in ("kl", "tv", "rkl", "jsd"):
        # A head's logits are known up to a constant.
        assert found(kind, logits + 5, probs, entropy).loss.abs().max() < 1e-12
        assert found(kind, rows(3), probs, entropy).loss.min() > 1e-2


def test_kl_is_from_the_target_to_the_head() -> None:
    """KL is not symmetric: mass that the head misses costs more than mass that it adds."""
    narrow, wide = torch.tensor([[0.98, 0.01, 0.01]]).double(), torch.full((1, 3), 1 / 3).double()
    entropy = [-(p * p.log()).sum(1) for p in (narrow, wide)]
    weights, label = LossWeights(kl=1.0), torch.tensor([0])
    misses = distances(narrow.log(), TargetRows(label, wide, entropy[1]), label, weights).loss
    adds = distances(wide.log(), TargetRows(label, narrow, entropy[0]), label, weights).loss
    assert float(misses) == pytest.approx(math.log(1 / 3) - (math.log(0.98) + 2 * math.log(0.01)) / 3)
    assert float(adds) < float(misses)


@pytest.mark.parametrize("values", [1, 2 * V, 1 << 18], ids=["a row", "rows", "whole"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradient_is_that_of_the_written_out_sum(kind: str, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_BLOCK_VALUES", values)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    (probs, entropy), given = distributions(), rows(1).requires_grad_()
    kept = given.detach().clone()
    ours = found(kind, given.detach(), probs, entropy, scale=0.3)
    naive = summed(KINDS[kind], given, probs)
    (0.3 * naive.sum()).backward()
    torch.testing.assert_close(ours.loss, naive.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours.grad, given.grad, rtol=1e-12, atol=1e-12)
    assert torch.equal(given.detach(), kept)  # the graph of the logits may need them
    assert torch.equal(ours.best, kept.argmax(1))


def test_bfloat16_logits_are_computed_in_float32() -> None:
    """Under autocast too, which would multiply in bfloat16."""
    logits, (probs, entropy) = rows(1).bfloat16(), distributions()
    probs, entropy = probs.float(), entropy.float()
    exact = found("all", logits.float(), probs, entropy)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = found("all", logits, probs, entropy)
    assert torch.equal(rounded.loss, exact.loss)
    assert exact.grad is not None
    assert rounded.grad is not None
    assert torch.equal(rounded.grad, exact.grad.bfloat16())


@pytest.mark.parametrize("values", [1, 1 << 18])
def test_target_rows(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "_BLOCK_VALUES", values)
    logits = rows(4)
    logits[0] = torch.tensor([900.0, -900.0, 0.0, 0.0, -math.inf, 899.0, 1.0])
    logits[1, :4] = -math.inf
    made = target_rows(logits)
    assert made.probs is not None
    torch.testing.assert_close(made.probs, logits.softmax(1), rtol=1e-12, atol=0)
    expected = [-math.fsum(p * math.log(p) for p in row if p) for row in logits.softmax(1).tolist()]
    torch.testing.assert_close(made.entropy, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    assert torch.equal(made.best, logits.argmax(1))
    alone = target_rows(logits, has_probs=False)
    assert torch.equal(alone.best, made.best)
    assert alone.probs is None


def test_large_logits() -> None:
    logits, probs = torch.tensor([[900.0, -900.0, 0.0]]), torch.tensor([[0.5, 0.5, 0.0]])
    made = distances(
        logits, TargetRows(LABELS[:1], probs, torch.tensor([math.log(2)])), LABELS[:1], LossWeights(kl=1.0)
    )
    assert float(made.loss) == pytest.approx(900 - math.log(2))
    torch.testing.assert_close(made.grad, torch.tensor([[0.5, -0.5, 0.0]]))
