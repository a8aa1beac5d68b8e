"""Kernels for the distances against the functions of `losses`, which are tested against sums written out."""

import pytest
import torch
from kernel_device import DEVICE, few
from torch import Tensor

pytest.importorskip("triton")

from foretoken.training import losses
from foretoken.training.losses import LossWeights, TargetRows, distances, target_rows
from foretoken.training.triton_losses import distributions, losses_and_gradient

M = 5
SIZES = [13, 2048, 2051]  # part of a block, a block, more than one
WEIGHTS = {
    "token": LossWeights(token=0.7),
    "kl": LossWeights(kl=1.3),
    "tv": LossWeights(tv=0.4),
    "top": LossWeights(top=0.6, num_top=4),
    "hass": LossWeights(kl=0.1, top=1.0, num_top=10),
    "all": LossWeights(0.7, 0.9, 0.4, 0.6, 2),
    "none": LossWeights(),
}


def numbers(size: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return 3 * torch.randn(M, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_distributions(size: int, dtype: torch.dtype) -> None:
    logits = numbers(size, 1, dtype)
    logits[0, : size // 2] = float("-inf")
    logits[1, [3, 5]] = 50.0  # equal ones: the lowest id
    expected = target_rows(logits)
    best, probs, entropy = distributions(logits.to(DEVICE), has_probs=True)
    assert torch.equal(best.cpu(), expected.best)
    torch.testing.assert_close(probs.cpu(), expected.probs, rtol=1e-5, atol=1e-8)
    torch.testing.assert_close(entropy.cpu(), expected.entropy, rtol=1e-5, atol=1e-5)
    best, probs, entropy = distributions(logits.to(DEVICE), has_probs=False)
    assert torch.equal(best.cpu(), expected.best)
    assert probs is None
    assert entropy is None


@pytest.mark.parametrize(("name", "size", "dtype"), few(list(WEIGHTS), SIZES, [torch.float32, torch.bfloat16]))
def test_losses_and_gradients(name: str, size: int, dtype: torch.dtype) -> None:
    weights, logits = WEIGHTS[name], numbers(size, 2, dtype)
    taught = numbers(size, 3)
    if not weights.tv:  # whose slope is arbitrary there
        taught[2] = logits[2]
    taught[3, : size // 2] = float("-inf")
    target, labels = target_rows(taught), torch.tensor([0, 5, size - 1, 7, size // 2])
    if name == "token":
        target = TargetRows(target.best)
    expected = distances(logits, target, labels, weights, scale=0.3)
    read = [None if each is None else each.to(DEVICE) for each in (target.probs, target.entropy)]
    loss, best, grad = losses_and_gradient(logits.to(DEVICE), *read, labels.to(DEVICE), weights[:5], 0.3)
    assert torch.equal(best.cpu(), expected.best)
    torch.testing.assert_close(loss.cpu(), expected.loss, rtol=1e-5, atol=2e-5)
    if expected.grad is None:
        assert grad is None
        return
    assert grad.dtype == dtype
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(grad.cpu(), expected.grad, rtol=rounding, atol=1e-6)


def test_training_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU `target_rows` and `distances` are the kernels; float64 and CPUs have none."""
    taught, logits, labels = numbers(40, 3), numbers(40, 2), torch.tensor([0, 5, 39, 7, 20])
    expected = distances(logits, target_rows(taught), labels, WEIGHTS["all"])
    assert losses._has_kernels(logits.to(DEVICE)) == (DEVICE == "cuda")
    assert not losses._has_kernels(logits.double().to(DEVICE))
    monkeypatch.setattr(losses, "_has_kernels", lambda _: True)
    monkeypatch.setattr(losses, "_argmax", None)  # is not called
    target = target_rows(taught.to(DEVICE)).at(slice(3))
    found = distances(logits[:3].to(DEVICE), target, labels[:3].to(DEVICE), WEIGHTS["all"])
    torch.testing.assert_close(found.loss.cpu(), expected.loss[:3], rtol=1e-5, atol=2e-5)
