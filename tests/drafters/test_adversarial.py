"""Each behaviour really misbehaves, or the tests of losslessness against it would prove nothing."""

from typing import Any

import pytest
import torch
from drafters.adversarial import BEHAVIOURS, AdversarialDrafter, Behaviour, Options
from drafting_contexts import attached, context
from tiny_models import VOCAB_SIZE

from foretoken.drafters.base import Committed
from foretoken.drafting.draft_guard import cut_invalid_nodes, find_fault

TOKENS = [[5, 6], [7, 8, 9]]
FAULTS: dict[str, str] = {
    "too_deep": "tree of shape (2, 41)",
    "too_wide": "tree of shape (2, 501)",
    "wrong_root": "wrong root",
    "wrong_depths": "wrong depths",
    "wrong_parents": "parents that do not come before their children",
}


def drafter(behaviour: Behaviour, **options: Any) -> AdversarialDrafter:
    """A drafter with a behaviour."""
    made: AdversarialDrafter = attached(
        AdversarialDrafter(Options(method="adversarial", behaviour=behaviour, **options))
    )
    return made


@pytest.mark.parametrize("behaviour", FAULTS)
def test_trees_that_are_none(behaviour: Behaviour) -> None:
    adversary = drafter(behaviour, tree={"widths": [8, 2]})
    finding = find_fault(adversary.propose(context(TOKENS)), [6, 9], adversary.nodes_by_depth[-1])
    assert FAULTS[behaviour] in str(finding.fault)


@pytest.mark.parametrize("behaviour", [b for b in BEHAVIOURS if b not in (*FAULTS, "raises")])
def test_trees_that_are_wrong_in_what_they_hold(behaviour: Behaviour) -> None:
    adversary = drafter(behaviour, tree="tree")
    tree = adversary.propose(context(TOKENS))
    assert find_fault(tree, [6, 9], adversary.nodes_by_depth[-1]).fault is None
    drafted = tree.tokens[:, 1:]
    siblings = len({(p, t) for p, t in zip(tree.parents[0].tolist()[1:], drafted[0].tolist(), strict=True)})
    shows = {
        "out_of_vocabulary": ((drafted >= VOCAB_SIZE) | (drafted < 0)).any(),
        "nan": tree.distributions is not None and tree.distributions.rows.isnan().all(),
        "eos": (drafted == 0).all(),
        "duplicates": siblings < drafted.shape[1],
        "empty": tree.width == 1,
    }
    assert shows.get(behaviour, torch.tensor(tree.width > 4))
    assert cut_invalid_nodes(tree, VOCAB_SIZE, [8, 8]).distributions is None


def test_raising_and_seeding() -> None:
    with pytest.raises(RuntimeError, match="always fails"):
        drafter("raises").propose(context(TOKENS))
    with pytest.raises(RuntimeError, match="always fails"):
        drafter("raises_in_commit").commit(Committed(slots=[0], starts=[0], tokens=[[5]], features=None))
    trees = [drafter("random", seed=seed).propose(context(TOKENS)).tokens for seed in (0, 0, 1)]
    assert torch.equal(trees[0], trees[1])
    assert not torch.equal(trees[0], trees[2])
