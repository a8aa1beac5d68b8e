"""Drafters of the EAGLE family and MTP: one native call gives the trees of the loop over levels."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from drafters.drafting_contexts import attached, context
from heads.test_native_heads import assert_same
from pairwise import slow_products
from tiny_models import tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken import SamplingParams
from foretoken.decoder.native import NativeBlocks
from foretoken.drafters import head_features
from foretoken.drafters.base import Committed
from foretoken.drafters.registry import create_drafter, drafter_options
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.heads.base import build_head
from foretoken.models.loading import wrap_model
from foretoken.models.parts import target_parts
from foretoken.training.objectives import head_config

pytestmark = pytest.mark.native

METHODS: dict[str, dict[str, Any]] = {
    "eagle": {"num_steps": 3},
    "eagle3": {"num_steps": 3, "boundaries": [1, 2], "draft_vocab_size": 50},
    "mtp": {"num_steps": 3},
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 4},
    "choices": {"tree": [[0], [1], [0, 0], [0, 2], [1, 0], [0, 0, 0], [1, 0, 1]]},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 4, "max_nodes": 11},
    "one dynamic level": {"tree": "dynamic", "num_speculative_tokens": 1, "max_nodes": 4},
}
REQUESTS = {
    "sampled": (SamplingParams(temperature=0.9), False),
    "coupled": (SamplingParams(temperature=0.9, seed=3), True),
    "greedy": (SamplingParams(temperature=0.0), False),
}


def drafter(directory: Path, method: str, **options: Any) -> Any:
    """One over a random head, with as many slots as a target of the tiny models' size has."""
    target = wrap_model(tiny_model("llama"), name="llama")
    if not directory.exists():
        torch.manual_seed(0)
        head = build_head(head_config(method, target, METHODS[method]), dtype=torch.float32)
        head.initialize(target_parts(target))
        for parameter in head.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        native.write_checkpoint(HeadCheckpoint.of_head(head, target=TargetFingerprint.of(target)), directory)
    keys = drafter_options({"method": method, "model": str(directory), "quantization": "none", **options})
    return attached(create_drafter(keys, target), model=target, vocab_size=target.vocab_size)


def commit(made: list[Any], slot: int, start: int, tokens: list[int], seed: int) -> None:
    """The same positions and features for all drafters."""
    taps = len(made[0].reads.taps)
    features = torch.randn(len(tokens), taps, 32, generator=torch.Generator().manual_seed(seed))
    for each in made:
        each.commit(Committed(slots=[slot], starts=[start], tokens=[tokens], features=features))


@pytest.mark.parametrize(("method", "shape", "kind"), slow_products(list(METHODS), list(SHAPES), list(REQUESTS)))
def test_one_call_drafts_what_the_loop_drafts(method: str, shape: str, kind: str, tmp_path: Path) -> None:
    """Prompts long and short, proposals that are thrown away, requests that the kernels leave to the loop."""
    ours, theirs = (drafter(tmp_path / "head", method, **SHAPES[shape]) for _ in range(2))
    assert ours._whole_drafts is not None
    theirs._whole_drafts = None
    params, is_coupled = REQUESTS[kind]
    texts = [[5 + i % 50 for i in range(length)] for length in (40, 3, 9)]
    known = [0, 0, 0]
    whole = mock.Mock(wraps=ours._whole_drafts.draft)
    turns = [(True, 8, 1.0), (False, 8, 1.0), (True, [2, 0, 3], 1.0), (True, 8, 0.9), (False, 8, 1.0), (True, 8, 1.0)]
    for turn, (has_new, max_depth, top_p) in enumerate(turns):
        if has_new:  # else the last proposal was thrown away
            for slot, text in enumerate(texts):
                text.extend([(7 * turn + slot) % 60] * (slot + 1))
                commit([ours, theirs], slot, known[slot], text[known[slot] : -1], seed=10 * turn + slot)
                known[slot] = len(text) - 1
        each = replace(params, top_p=top_p)
        asked = context(texts, params=[each] * 3, is_coupled=[is_coupled] * 3, max_depth=max_depth)
        with mock.patch.object(ours._whole_drafts, "draft", whole):
            assert_same(ours.propose(asked), theirs.propose(asked), 1e-4)
        for made in (ours, theirs):
            for slot in range(3):
                made._stack.cache.poison(slot, known[slot])
    assert whole.call_count >= 4


@pytest.mark.parametrize("method", METHODS)
def test_long_parts_are_fed_before(method: str, tmp_path: Path) -> None:
    """All but the last position, in chunks."""
    made = drafter(tmp_path / "head", method, num_speculative_tokens=2)
    text = [5 + i % 50 for i in range(80)]
    commit([made], 0, 0, text[:-1], seed=1)
    lengths: list[int] = []
    append = NativeBlocks.append

    def seen(blocks: Any, work: Any, *inputs: Any) -> Any:
        lengths.append(work.num_tokens)
        return append(blocks, work, *inputs)

    with mock.patch.object(NativeBlocks, "append", seen), mock.patch.object(head_features, "CHUNK", 32):
        first = made.propose(context([text], params=[REQUESTS["greedy"][0]]))
        again = made.propose(context([text], params=[REQUESTS["greedy"][0]]))
    assert lengths == [32, 32, 14]
    assert torch.equal(first.tokens, again.tokens)


class Operations(TorchDispatchMode):
    """Counts torch operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
def test_operations_do_not_grow_with_depth(method: str, tmp_path: Path) -> None:
    """One call fills the tree: a deeper one costs no further operation in torch."""
    counts: dict[tuple[bool, int], int] = {}
    for depth in (2, 5):
        for is_whole in (True, False):
            made = drafter(tmp_path / "head", method, num_speculative_tokens=depth)
            if not is_whole:
                made._whole_drafts = None
            text = [5, 6, 7, 8]
            commit([made], 0, 0, text[:-1], seed=1)
            made.propose(context([text], params=[REQUESTS["greedy"][0]]))
            commit([made], 0, 3, [8], seed=2)
            with Operations() as operations:
                made.propose(context([[*text, 9]], params=[REQUESTS["greedy"][0]]))
            counts[is_whole, depth] = operations.count
    assert counts[True, 2] == counts[True, 5] < counts[False, 2] < counts[False, 5], counts
