"""Ends drafts early: a rule estimates whether each drafted token is accepted, and decides whether drafting goes on.

The estimate `a` of a token is the probability that the target accepts the token if it accepts the tokens before:

- `confidence`: the drafter's own probability. A draft ends at `a < threshold`. This is transformers'
  `assistant_confidence_threshold` (`ConfidenceCriteria` in `generation/stopping_criteria.py`).
- `disco`: a network of two linear layers on the greatest probabilities of the draft distribution, its entropy, and the
  position in the draft. A draft ends at `a < threshold`. Source: Mamou et al. 2024 (arXiv 2405.04304).
- `specdec_pp`: residual blocks and a linear layer. A draft ends once `1 - product of a > threshold`, the product over
  the path. Source: Huang et al. 2024 (arXiv 2405.19715). There the network reads the draft model's last
  hidden state; here it reads the statistics that `disco` reads, which every drafter has.

Both networks also read the token's own probability: a sampled draft may hold another token than the most probable one.

The token that ends a draft is verified as well. A rule reads tokens that are already drafted and the distributions
that they come from. Whether a node gets children is therefore a function of the path down to the node, as for pruned
trees of sampled requests (`foretoken.trees.merge`), and the acceptance rules stay exact.

Letters: B sequences, P nodes of one level, C children of theirs, V vocabulary, F statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from foretoken.core.errors import ConfigError, one_line
from foretoken.files.atomic_files import check_writable, told_as, write_file
from foretoken.trees.merge import Pruning, normalised_entropy

STOP_CONTROLS = ("confidence", "disco", "specdec_pp")
TRAINED = STOP_CONTROLS[1:]
_NUM_TOP = 10  # DISCO's k
_NUM_STATISTICS = _NUM_TOP + 3
_SMALLEST = 1e-6  # cap of log-odds; float32 cannot tell probabilities nearer to 1
FARTHEST = 9.0  # greatest log-odds that count in estimates of acceptance
_HIDDEN, _NUM_BLOCKS = 32, 3  # of DISCO's network, a choice; of SpecDec++'s, its code
_ADVICE = "Expected the drafter in a directory that may be written to."
POSITION_SCALE = 1 / 16  # a choice: statistics of a similar size


def statistics(log_probs: Tensor, place: Tensor, own: Tensor, depth: int) -> Tensor:
    """Returns the statistics of drafted tokens, (B, C, F) float32.

    They are log-odds of the token's probability and of the greatest probabilities, the normalised entropy, and the
    position. Log-odds tell 0.99 from 0.9999, which probabilities hardly do.

    Args:
        log_probs: (B, P, V) float32, the draft distributions; or (B, 1, V) for all nodes of a level.
        place: (C,) int64, the parent of each child among the P nodes.
        own: (B, C) float32, log-probabilities of the children's tokens.
        depth: Of the P nodes.
    """
    num_nodes = log_probs.shape[1]
    top = log_probs.topk(min(_NUM_TOP, log_probs.shape[2]), dim=2).values
    if top.shape[2] < _NUM_TOP:
        top = nn.functional.pad(top, (0, _NUM_TOP - top.shape[2]), value=float("-inf"))
    entropy = normalised_entropy(log_probs).unsqueeze(2)
    if num_nodes != len(place):
        top, entropy = (
            each.expand(-1, len(place), -1) if num_nodes == 1 else each[:, place] for each in (top, entropy)
        )
    odds = torch.cat([own.unsqueeze(2), top], dim=2).exp().logit(_SMALLEST)
    return torch.cat([odds, entropy, torch.full_like(entropy, depth * POSITION_SCALE)], dim=2)


class _ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_NUM_STATISTICS, _NUM_STATISTICS)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


def acceptance_network(control: str) -> nn.Sequential:
    """Returns the untrained network of a control of `TRAINED`; maps (..., F) statistics to (..., 1) log-odds of `a`."""
    if control == "disco":
        return nn.Sequential(nn.Linear(_NUM_STATISTICS, _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, 1))
    return nn.Sequential(*(_ResidualBlock() for _ in range(_NUM_BLOCKS)), nn.Linear(_NUM_STATISTICS, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """Decides after which tokens a draft ends, see the module.

    Attributes:
        thresholds: On the estimates: a draft goes on after tokens that pass.
        network: Computes the estimates; None for the drafter's own probabilities.
        max_depth: Most tokens of a draft; None for no bound.
    """

    thresholds: Pruning
    network: nn.Module | None = None
    max_depth: int | None = None

    @classmethod
    def of(cls, control: str, threshold: float, network: nn.Module | None = None, max_depth: int | None = None) -> Self:
        """Returns the rule of a control; `threshold` is between 0 and 1, see the module."""
        is_product = control == "specdec_pp"
        thresholds = Pruning(path_probability=1 - threshold) if is_product else Pruning(token_probability=threshold)
        return cls(thresholds=thresholds, network=network, max_depth=max_depth)

    @property
    def threshold(self) -> float:
        """The threshold of the control, see `of`."""
        product = self.thresholds.path_probability
        return self.thresholds.token_probability or 1 - (product or 0.0)

    def on(self, device: torch.device) -> StopRule:
        """Returns the rule with the network on a device."""
        if self.network is None or next(self.network.parameters()).device == device:
            return self
        return replace(self, network=self.network.to(device))

    def log_estimates(self, log_probs: Tensor, place: Tensor, own: Tensor, depth: int) -> Tensor:
        """Returns log `a` of every child, (B, C) float32; NaN after logits with NaN. Arguments: see `statistics`."""
        if self.network is None:
            return own
        odds: Tensor = self.network(statistics(log_probs, place, own, depth))
        return nn.functional.logsigmoid(odds[..., 0])


@dataclass(frozen=True, slots=True)
class PathFloors:
    """Ends a chain once its path is not probable enough to pay for another level; what pays is the caller's estimate.

    A token of draft probability q is estimated to be accepted after the tokens before it with log-odds
    `slope * log-odds(q) + intercept`; the estimate of a path is the product. All lists are by depth, from depth 1.

    Attributes:
        floors: Least log-probability of a path down to the depth that goes on.
    """

    slope: float
    intercepts: Sequence[float]
    floors: Sequence[float]

    def log_estimates(self, own: Tensor, depth: int) -> Tensor:
        """Returns log-probabilities that tokens of a depth are accepted; own: float32 log q of any shape."""
        odds = own.exp().logit(_SMALLEST).clamp(-FARTHEST, FARTHEST)
        return nn.functional.logsigmoid(self.slope * odds + self.intercepts[depth - 1])


def rule_file(drafter: Path, control: str) -> Path:
    """Returns the path of a trained rule: a file beside the drafter's weights, in a directory of its own."""
    return (drafter.parent if drafter.is_file() else drafter) / "control" / f"{control}.safetensors"


def check_rule_path(drafter: Path) -> None:
    """Raises `ConfigError` if no rule can be written beside a drafter's weights."""
    check_writable(rule_file(drafter, TRAINED[0]), ConfigError, _ADVICE)


def write_rule(rule: StopRule, drafter: Path, control: str) -> None:
    """Writes a trained rule beside a drafter's weights, see `rule_file`; raises `ConfigError` if it cannot."""
    path, facts = rule_file(drafter, control), {"threshold": str(rule.threshold), "max_depth": str(rule.max_depth)}
    assert rule.network is not None, "only trained rules have a file"
    with told_as(ConfigError, f"'{path}'", _ADVICE):
        write_file(path, save(rule.network.state_dict(), metadata=facts))


def read_rule(path: Path, control: str) -> StopRule:
    """Reads a trained rule; raises `ConfigError` for a damaged file, or one of another network."""
    network = acceptance_network(control)
    try:
        with safe_open(path, framework="pt") as file:
            facts: dict[str, Any] = file.metadata() or {}
            network.load_state_dict({key: file.get_tensor(key) for key in file.keys()})  # noqa: SIM118 - no mapping
        rule = StopRule.of(
            control, float(facts["threshold"]), network.requires_grad_(requires_grad=False), int(facts["max_depth"])
        )
    except (SafetensorError, OSError, RuntimeError, KeyError, ValueError) as err:
        raise ConfigError(
            f"'{path}' is no trained rule of control '{control}': {one_line(err)}. Train it again."
        ) from err
    return rule
