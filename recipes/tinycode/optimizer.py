"""Muon for the matrices inside the layers, AdamW for embeddings and norms, in one optimiser.

Matrices of one shape are orthogonalised together in one batched Newton-Schulz iteration: 84 small matrices one by
one would cost more than the forward pass on a CPU. Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/;
update scale of Liu et al. 2025 (arXiv 2502.16982), which lets both parts share one learning rate.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterable

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NS_STEPS = 5


def orthogonalise(g_nrc: Tensor) -> Tensor:
    """Push the singular values of each matrix towards 1 (Newton-Schulz in bfloat16).

    Args:
        g_nrc: (n, rows, columns) float32.

    Returns:
        (n, rows, columns) bfloat16.
    """
    a, b, c = NS_COEFFICIENTS
    tall = g_nrc.shape[1] > g_nrc.shape[2]
    x = g_nrc.mT if tall else g_nrc
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).bfloat16()
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


class MuonAdamW(torch.optim.Optimizer):
    """Muon on 2-D layer weights, AdamW on the rest; `state_dict` is that of any torch optimiser."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, adam_lr_scale: float, weight_decay: float) -> None:
        named = list(named)
        matrices: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for name, p in named:
            if p.ndim == 2 and "layers." in name:
                matrices[tuple(p.shape)].append(p)
        rest = [p for name, p in named if p.ndim == 2 and "layers." not in name]
        norms = [p for _, p in named if p.ndim == 1]
        groups: list[dict[str, Any]] = [
            {"params": ps, "muon": True, "scale": 1.0, "weight_decay": weight_decay} for ps in matrices.values()
        ]
        groups.append({"params": rest, "muon": False, "scale": adam_lr_scale, "weight_decay": weight_decay})
        groups.append({"params": norms, "muon": False, "scale": adam_lr_scale, "weight_decay": 0.0})
        super().__init__(groups, {"lr": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters in place from their gradients, at each group's `lr`."""
        del closure
        for group in self.param_groups:
            (self._muon if group["muon"] else self._adamw)(group, group["lr"] * group["scale"])

    def _muon(self, group: dict[str, Any], lr: float) -> None:
        params = group["params"]
        buffers = []
        for p in params:
            state = self.state[p]
            if not state:
                state["momentum"] = torch.zeros_like(p)
            buffers.append(state["momentum"])
        grads = [p.grad for p in params]
        torch._foreach_lerp_(buffers, grads, 0.05)
        nesterov = torch._foreach_lerp(grads, buffers, 0.95)
        update = orthogonalise(torch.stack(nesterov)).float()
        update *= 0.2 * max(update.shape[1:]) ** 0.5
        torch._foreach_mul_(params, 1 - lr * group["weight_decay"])
        torch._foreach_add_(params, list(update.unbind(0)), alpha=-lr)

    def _adamw(self, group: dict[str, Any], lr: float) -> None:
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update(step=torch.zeros(()), mean=torch.zeros_like(p), square=torch.zeros_like(p))
            state["step"] += 1
            t = float(state["step"])
            state["mean"].lerp_(p.grad, 0.1)
            state["square"].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            denominator = (state["square"] / (1 - 0.95**t)).sqrt_().add_(1e-8)
            p.mul_(1 - lr * group["weight_decay"]).addcdiv_(state["mean"], denominator, value=-lr / (1 - 0.9**t))
