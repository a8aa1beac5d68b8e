"""Requests served by kernels get what the walk node by node gives them."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from kernel_device import DEVICE, OnDevice, random_parents

from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.node_scores import NodeScores

VOCAB_SIZE = 3  # few, so that drafted tokens are drawn


@pytest.mark.parametrize("seed", range(4))
def test_drawn_is_coupled(seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes, temperatures = (1, 30, 64), (0.3, 1.0, 1.7)
    rows = [
        TreeRow(torch.randint(VOCAB_SIZE, (size,), generator=generator).tolist(), random_parents(size, 60, generator))
        for size in sizes
    ]
    tree = TokenTree.from_rows(rows, device=DEVICE)
    requests = [
        SamplingRequest(params=SamplingParams(temperature=temperature), seed=(-1) ** row * (seed + 10**row))
        for row, temperature in enumerate(temperatures)
    ]
    scores = NodeScores(
        tree=tree, logits=torch.randn(sum(sizes), VOCAB_SIZE, generator=generator).to(DEVICE),
        starts=torch.tensor([0, 1, 31], device=DEVICE),
        batch=SamplingBatch.build(requests, VOCAB_SIZE, DEVICE), history=None,
    )  # fmt: skip
    roots = torch.tensor([0, 17, 90_000], device=DEVICE)
    with OnDevice():
        drawn = accept(scores, ["drawn"] * 3, AcceptancePolicy(), roots)
    coupled = accept(scores, ["coupled"] * 3, AcceptancePolicy(), roots)
    assert int(drawn.num_accepted.max()) > 0, "or nothing was tested"
    for name in ("path", "num_accepted", "next_token"):
        assert torch.equal(getattr(drawn, name), getattr(coupled, name))


@pytest.mark.parametrize(
    ("params", "is_plain"),
    [
        ({}, True), ({"temperature": 0.2, "seed": 4}, True), ({"top_k": 4}, False), ({"top_p": 0.9}, False),
        ({"min_p": 0.1}, False), ({"repetition_penalty": 1.1}, False), ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False), ({"logit_bias": {3: 1.0}}, False), ({"bad_words": [[4]]}, False),
        ({"min_tokens": 2}, False),
    ],
)  # fmt: skip
def test_who_is_served_by_kernels(params, *, is_plain) -> None:
    """Never dependent on the neighbours: by the request alone."""
    assert SamplingParams(**params).is_plain is is_plain
    tree = TokenTree.roots([3])
    rule = AcceptancePolicy().rule_for(tree, is_greedy=False, is_seeded=True, row=0, is_plain=is_plain)
    assert rule == ("drawn" if is_plain else "coupled")
