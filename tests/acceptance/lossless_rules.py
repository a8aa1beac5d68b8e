"""The lossless rules by name, and how far many cases of one rule are from their targets."""

from collections.abc import Mapping

import torch
from enumeration import Drafts, ExactLaw, Rule, exact_distributions
from torch import Tensor

from foretoken.acceptance.rules import accept_coupled, accept_greedy
from foretoken.acceptance.sampled_rules import accept_block, accept_sequential, accept_traversal

RULES: dict[str, Rule] = {
    "greedy": lambda tree, log_probs, _: accept_greedy(tree, lambda nodes: log_probs(nodes).argmax(1)),
    "coupled": accept_coupled,
    "sequential": accept_sequential,
    "block": accept_block,
    "traversal": accept_traversal,
}
OF_TREES = ("sequential", "traversal")


def laws(
    rule: str, cases: Mapping[str, tuple[Drafts, Tensor]], dtype: torch.dtype = torch.float64
) -> dict[str, ExactLaw]:
    """What a rule does in each case; block and traversal verification look at nodes in another order than a walk."""
    walks = rule not in ("greedy", "block", "traversal")
    return dict(zip(cases, exact_distributions(RULES[rule], [*cases.values()], walks=walks, dtype=dtype), strict=True))


def worst(
    rule: str, cases: Mapping[str, tuple[Drafts, Tensor]], dtype: torch.dtype = torch.float64
) -> tuple[float, str]:
    """The largest error of a probability, and the case that it belongs to."""
    return max((law.error, name) for name, law in laws(rule, cases, dtype).items())
