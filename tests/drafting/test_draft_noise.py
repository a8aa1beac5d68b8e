"""Drafters of one tree draw with noise of their own, or the second one's draws would follow from the first one's."""

from __future__ import annotations

import torch
from drafters.drafting_contexts import context
from tiny_models import VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import DraftContext, TargetReads
from foretoken.drafting.base import Fixed
from foretoken.drafting.drafting import Drafting
from foretoken.sampling.noise import Purpose


class Seen:
    """A drafter that draws one token of equal probabilities for each sequence, and nothing else."""

    name, reads, nodes_by_depth = "seen", TargetReads(), (1, 2)

    def propose(self, context: DraftContext) -> TokenTree:
        positions = torch.tensor([len(tokens) for tokens in context.tokens])
        self.drawn = context.sampling.noise.gumbel(positions, Purpose.DRAFT, VOCAB_SIZE).argmax(1).tolist()
        return TokenTree.roots(context.roots)


def drawn(num_drafters: int, seeds: range, *, is_coupled: bool) -> list[list[int]]:
    drafters = [Seen() for _ in range(num_drafters)]
    made = Drafting(
        drafters, Fixed(64, [2] * num_drafters), vocab_size=VOCAB_SIZE, max_nodes=64, device=torch.device("cpu")
    )
    params = [SamplingParams(temperature=1.0, seed=seed) for seed in seeds]
    made.propose(context([[5, 6]] * len(params), params=params, is_coupled=[is_coupled] * len(params)))
    return [drafter.drawn for drafter in drafters]


def test_drafters_draw_independently_of_each_other() -> None:
    seeds = range(200)
    first, second, third = drawn(3, seeds, is_coupled=False)
    for one, other in ((first, second), (second, third), (first, third)):
        assert sum(a == b for a, b in zip(one, other, strict=True)) < 20, "about one in 67 agree by chance"
    assert drawn(1, seeds, is_coupled=False) == [first], "the first one has the request's own noise"


def test_coupled_requests_share_the_targets_noise() -> None:
    first, second = drawn(2, range(50), is_coupled=True)
    assert first == second
