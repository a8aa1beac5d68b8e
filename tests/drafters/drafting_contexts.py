"""Contexts as the engine builds them, for drafters that are called by hand."""

import pickle
import random
from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import VOCAB_SIZE

from foretoken import SamplingParams
from foretoken.core.errors import PassError
from foretoken.core.records import AskedDrafter, SequenceStep, StageSeconds, StepRecord
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import DraftContext, DraftRequest, TargetHandle, Verified
from foretoken.runner.costs import CostCurve
from foretoken.runner.runner import Runner
from foretoken.sampling.batch import SamplingBatch, SamplingRequest


def _not_run(work: Any) -> Any:
    raise PassError("there is no target to run")


GREEDY = SamplingParams(temperature=0.0)


def handle(**changes: Any) -> TargetHandle:
    """A target of the tiny models' size with eight slots; 16 tokens take twice as long as one."""
    values: dict[str, Any] = {
        "name": "target", "vocab_size": VOCAB_SIZE, "context_len": 96, "num_slots": 8, "device": torch.device("cpu"),
        "dtype": torch.float32, "runner": "auto", "tokenizer": None, "model": None, "run": _not_run,
        "target_runner": None,
        "measured_costs": lambda: CostCurve((1, 16), (1.0, 2.0)),
    }  # fmt: skip
    return TargetHandle(**{**values, **changes})


def attached(drafter: Any, **changes: Any) -> Any:
    """A drafter that is attached and has a sequence in every slot."""
    target = handle(**changes)
    drafter.attach(target)
    for slot in range(target.num_slots):
        begin(drafter, slot)
    return drafter


def begin(drafter: Any, slot: int, prompt: Sequence[int] = ()) -> None:
    """A sequence begins in a slot."""
    drafter.begin(slot, DraftRequest(request_id=str(slot), prompt=list(prompt), params=GREEDY))


def verified() -> Verified:
    """What a drafter is told of a pass over roots."""
    return Verified(tree=TokenTree.roots([5]), paths=[[]], offsets=[0, 1], top_ids=None)


def continued(lookup: Any, tokens: list[int], path: list[int], depth: int, *, is_kept: bool = True) -> list[int]:
    """What a lookup says of a path after a text in slot 0; nothing that it keeps may change, nor what it proposes.

    Args:
        lookup: An attached drafter.
        tokens: Committed ones.
        path: After them.
        depth: Tokens wanted.
        is_kept: Whether it keeps anything.
    """
    drafted = lookup.propose(context([tokens])).rows()
    first = list(lookup.continue_from(0, tokens, path, depth))
    kept = pickle.dumps(vars(lookup)) if is_kept else b""
    assert list(lookup.continue_from(0, tokens, path, depth)) == first
    assert not is_kept or pickle.dumps(vars(lookup)) == kept
    assert lookup.propose(context([tokens])).rows() == drafted
    return first


def accepted(tree: TreeRow, how: str, draw: random.Random) -> list[int]:
    """Tokens that a pass commits: a path down the tree and one token more."""
    node, path = 0, []
    while how != "nothing":
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not children or (how == "some" and draw.random() < 0.4):
            break
        node = draw.choice(children)
        path.append(tree.tokens[node])
    return [*path, draw.randrange(VOCAB_SIZE)]


def assert_fresh(runner: Runner, slot: int, ids: Sequence[int], fresh: Runner, **tolerance: float) -> None:
    """Checks that a slot's rows up to and with the root are those of a prefill in another cache."""
    fresh.prefill(0, ids, 0)
    for ours, theirs in ((runner.cache.keys, fresh.cache.keys), (runner.cache.values, fresh.cache.values)):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine[slot, :, : len(ids)], other[0, :, : len(ids)], **tolerance)


def step(tokens: Sequence[int], num_drafted: int = 0, **more: Any) -> SequenceStep:
    """A sequence that emitted some tokens, all but the last of them drafted; a chain unless said otherwise."""
    values: dict[str, Any] = {
        "request_id": "", "num_drafted": num_drafted, "tree_depth": num_drafted, "num_accepted": len(tokens) - 1,
        "num_emitted": len(tokens), "tokens": tokens, "accepted_by": {},
    }  # fmt: skip
    return SequenceStep(**{**values, **more})


def record(
    steps: Sequence[SequenceStep], num_tokens: int, *drafts: Sequence[Any], verify: float = 1.0, **more: Any
) -> StepRecord:
    """An iteration; drafts: index, depth, seconds and perhaps missed tokens of each drafter that was asked."""
    names = ("index", "depth", "seconds", "num_missed")
    asked = [AskedDrafter(name="d", **dict(zip(names, each, strict=False))) for each in drafts]
    spent = StageSeconds(draft=sum(each.seconds for each in asked), verify=verify)
    values: dict[str, Any] = {"sequences": steps, "num_tokens": num_tokens, "asked": asked, "seconds": spent}
    return StepRecord(**{**values, **more})


def context(
    tokens: Sequence[Sequence[int]],
    *,
    max_depth: int | Sequence[int] = 8,
    max_nodes: int = 512,
    params: Sequence[SamplingParams] | None = None,
    is_coupled: Sequence[bool] | None = None,
    slots: Sequence[int] | None = None,
) -> DraftContext:
    """What the engine would tell a drafter; greedy requests in slots 0, 1, … unless said otherwise."""
    each = [GREEDY] * len(tokens) if params is None else params
    requests = [SamplingRequest(params=p, seed=p.seed or 0) for p in each]
    return DraftContext(
        slots=range(len(tokens)) if slots is None else slots,
        tokens=tokens,
        max_depth=[max_depth] * len(tokens) if isinstance(max_depth, int) else max_depth,
        max_nodes=[max_nodes] * len(tokens),
        sampling=SamplingBatch.build(requests, VOCAB_SIZE),
        is_coupled=[False] * len(tokens) if is_coupled is None else is_coupled,
    )
