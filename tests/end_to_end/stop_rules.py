"""Stop rules that end some drafts of tiny models and not others."""

import torch
from torch import nn

from foretoken.trees.stopping import TRAINED, StopRule

NUM_STATISTICS = 13  # the token's log-odds, ten of the most probable tokens, entropy, position


def stop_rule(control: str) -> StopRule:
    """A rule of a control; its network trusts the token's probability less where entropy and position are great."""
    threshold = 0.7 if control == "specdec_pp" else 0.3
    if control not in TRAINED:
        return StopRule.of(control, threshold)
    network = nn.Linear(NUM_STATISTICS, 1)
    with torch.no_grad():
        network.weight.zero_()
        network.weight[0, [0, -2, -1]] = torch.tensor([1.0, -1.0, -2.0])
        network.bias.fill_(0.5)
    return StopRule.of(control, threshold, network.requires_grad_(requires_grad=False))
