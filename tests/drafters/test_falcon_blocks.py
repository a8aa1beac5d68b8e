"""Falcon's drafts against its head fed the same text, whatever was committed and drafted before; and the cross product.

Each node of a tree is held against the head that is fed the text and the path to the node: the head's own tests hold
that against formulas.
"""

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from drafters.drafting_contexts import context, handle
from heads.head_formulas import E, V, numbers, shared_parts, tokens
from heads.tiny_falcon import falcon
from pairwise import slow_products
from torch import Tensor

from foretoken.core.token_tree import TokenTree
from foretoken.decoder.block_stack import BlockStack
from foretoken.drafters.base import Committed, Prefix
from foretoken.drafters.falcon import FalconBlocks, block_plan
from foretoken.drafters.levels import KeptDraws
from foretoken.models.parts import TargetParts
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import DynamicShape, begin_expansion

LENGTH = 60
STATIC = TreeShape.from_choices(
    [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 1, 1], [1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 0],
     [0, 1, 1, 2], [0, 1, 1, 0, 0], [0, 1, 1, 2, 1], [0, 1, 1, 2, 1, 0], [0, 1, 1, 2, 1, 0, 0]]
)  # fmt: skip
SHAPES = {
    "chain": TreeShape.chain(7),
    "static": STATIC,
    "dynamic": DynamicShape(top_k=3, depth=6, max_nodes=14),
}


class Drafts:
    """A `FalconBlocks` beside the head and the texts that it is fed with."""

    def __init__(self, dtype: torch.dtype = torch.float64, num_slots: int = 3, **sizes: Any) -> None:
        self.head, self.parts = falcon(**{"num_steps": 4 * sizes.get("block", 2), **sizes}), shared_parts()
        self.dtype, own = dtype, deepcopy(self.head).to(dtype)
        if dtype == torch.float32:
            own.optimize_for_inference()
        parts = TargetParts(
            embed=lambda ids: self.parts.embed(ids).to(dtype),
            lm_head=lambda x: self.parts.lm_head(x.double()).to(dtype),
            lm_head_weight=self.parts.lm_head_weight,
        )
        target = handle(vocab_size=V, context_len=LENGTH, num_slots=num_slots, dtype=dtype)
        capacity = LENGTH + 24 * len(block_plan(own.config.block).positions)
        stack = BlockStack(own.layer.as_blocks(capacity), num_slots=num_slots, capacity=capacity)
        self.blocks = FalconBlocks(own, parts, target, stack, dtype)
        assert self.blocks.stack.backend == ("torch" if dtype == torch.float64 else "native")
        self.draws = KeptDraws("greedy")
        self.texts, self.features = [Tensor()] * num_slots, [Tensor()] * num_slots
        self.length = [0] * num_slots

    def begin(self, slot: int, seed: int) -> None:
        """Another text in a slot."""
        self.texts[slot], self.features[slot] = tokens(LENGTH, seed=seed), numbers(LENGTH, E, seed=seed + 1)
        self.length[slot] = 0

    def commit(self, counts: dict[int, int]) -> None:
        """Commits further positions of some slots in one call."""
        starts = [self.length[slot] for slot in counts]
        rows = [self.features[slot][self.length[slot] :][:count] for slot, count in counts.items()]
        for slot, count in counts.items():
            self.length[slot] += count
        ids = [[0] * count for count in counts.values()]
        features = torch.cat(rows).unsqueeze(1).to(self.dtype)
        self.blocks.learn(Committed(slots=list(counts), starts=starts, tokens=ids, features=features))

    def draft(self, slots: Sequence[int], shape: Any) -> TokenTree:
        """Trees for some slots; afterwards all rows that are not committed are NaN."""
        texts = [self.texts[slot][: self.length[slot] + 1].tolist() for slot in slots]
        assert all(self.blocks.is_known(slot, self.length[slot]) for slot in slots)
        roots, draws = self.draws.of(context(texts), range(len(slots)), torch.device("cpu"))
        expansion = begin_expansion(shape, roots, draws)
        with torch.inference_mode():
            self.blocks.fill(expansion, slots, self.blocks.of(slots, texts))
        for slot in slots:
            self.blocks.stack.cache.poison(slot, self.length[slot])
        return expansion.finish(range(len(slots)), [shape.depth] * len(slots), [text[-1] for text in texts])

    def check(self, slots: Sequence[int], shape: Any) -> TokenTree:
        """Every node is what the head says after the path to it."""
        tree = self.draft(slots, shape)
        # Scores are sums in float32, whatever the head computes in.
        same = {"rel": 1e-5, "abs": 1e-5} if self.dtype == torch.float64 else {"rel": 1e-3, "abs": 1e-3}
        for row, slot in enumerate(slots):
            said: dict[tuple[int, ...], Tensor] = {}
            paths = {0: ()}
            for node in range(1, int(tree.num_nodes[row])):
                parent = int(tree.parents[row, node])
                path = paths[parent]
                if path not in said:
                    said[path] = self.log_probs(slot, path)
                token = int(tree.tokens[row, node])
                gain = float(tree.scores[row, node] - tree.scores[row, parent])
                assert gain == pytest.approx(float(said[path][token]), **same), (slot, path)
                paths[node] = (*path, token)
                rank = int((said[path] > said[path][token] + same["abs"]).sum())
                if isinstance(shape, TreeShape):
                    assert rank <= shape.ranks[node]
                    assert int((said[path] >= said[path][token] - same["abs"]).sum()) > shape.ranks[node]
        return tree

    def log_probs(self, slot: int, path: Sequence[int]) -> Tensor:
        """(V,), of the token after a path, from the text that is committed and the path alone."""
        end = self.length[slot]
        text = torch.cat([self.texts[slot][: end + 1], torch.tensor(path, dtype=torch.int64), torch.zeros(9).long()])
        features = torch.zeros(1, len(text), E, dtype=torch.float64)
        features[0, :end] = self.features[slot][:end]
        with torch.no_grad():
            steps = list(self.head.teacher_forced(features, text.unsqueeze(0), self.parts))
        return self.parts.lm_head(steps[len(path)][0, end - 1]).log_softmax(0)


@pytest.mark.parametrize(
    ("block", "mode", "shape"), slow_products([2, 3], ["recurrent", "per_position"], list(SHAPES), each=1)
)
def test_trees(block: int, mode: str, shape: str) -> None:
    drafts = Drafts(block=block, lstm_mode=mode)
    for slot, count in enumerate((5, block, 9)):
        drafts.begin(slot, seed=10 * slot)
        drafts.commit({slot: count})
    drafts.check([2, 0, 1], SHAPES[shape])
    for counts in ({0: 1, 1: 4, 2: 1}, {0: 2, 2: 3}):  # fewer than a block, more, and none at all
        drafts.commit(counts)
        drafts.check([0, 1, 2], SHAPES[shape])
    drafts.check([0], SHAPES[shape])


@pytest.mark.parametrize("mode", ["recurrent", "per_position"])
def test_native_kernels(mode: str) -> None:
    drafts = Drafts(torch.float32, lstm_mode=mode)
    for slot, count in enumerate((5, 2, 40)):
        drafts.begin(slot, seed=10 * slot)
        drafts.commit({slot: count})
    for _ in range(3):
        drafts.check([0, 1, 2], STATIC)
        drafts.commit({0: 1, 1: 5, 2: 2})


@pytest.mark.parametrize(("waiting", "source"), slow_products([0, 3, 40], [0, 1], each=1))
def test_a_text_that_goes_on_where_another_one_ended(waiting: int, source: int) -> None:
    """In the other one's slot or beside it; from within what went through the LSTM no text can go on."""
    drafts = Drafts(block=2)
    drafts.begin(source, seed=1)
    drafts.commit({source: 10})
    drafts.check([source], STATIC)
    if waiting:
        drafts.commit({source: waiting})
    assert [drafts.blocks.reusable(source, length) for length in (9, 10, 12, 60)] == [
        0, 10, min(12, 10 + waiting), 10 + waiting
    ]  # fmt: skip
    for length in {10, 10 + min(waiting, 2)}:
        text, features = drafts.texts[source].clone(), drafts.features[source].clone()
        drafts.begin(2, seed=2)
        drafts.texts[2][: length + 1], drafts.features[2][:length] = text[: length + 1], features[:length]
        drafts.blocks.begin(2, Prefix(source, length))
        drafts.blocks.stack.cache.poison(2, drafts.blocks._fed[2])
        drafts.length[2] = length
        drafts.check([2], STATIC)
        drafts.commit({2: 3})
        drafts.check([2], STATIC)
    drafts.blocks.begin(source, Prefix(source, 10))
    drafts.length[source] = 10
    drafts.check([source], STATIC)


@pytest.mark.parametrize("seed", [0, 1, pytest.param(2, marks=pytest.mark.slow)])
def test_ragged_slots_that_come_and_go(seed: int) -> None:
    """Any interleaving of commits, proposals that are thrown away, and new sequences; long prompts are fed alone."""
    dice, drafts = random.Random(seed), Drafts(block=2 + seed % 2, num_steps=6)
    for turn in range(12):
        counts = {}
        for slot in dice.sample(range(3), dice.randint(1, 3)):
            if drafts.length[slot] > 45 or dice.random() < 0.1:
                drafts.blocks.begin(slot, None)
                drafts.length[slot] = 0
            if not drafts.length[slot]:
                drafts.begin(slot, seed=1000 * seed + 10 * turn + slot)
            counts[slot] = dice.choice((1, 2, 36, 40)) if not drafts.length[slot] else dice.randint(1, 5)
        drafts.commit(counts)
        known = [slot for slot in range(3) if drafts.blocks.is_known(slot, drafts.length[slot])]
        if known and dice.random() < 0.7:
            drafts.check(dice.sample(known, dice.randint(1, len(known))), TreeShape.from_choices(STATIC.choices[:11]))


def test_children_of_a_block_are_a_cross_product() -> None:
    """The tokens of a block are drafted independently: every first one is followed by the same second ones."""
    drafts = Drafts()
    drafts.begin(0, seed=1)
    drafts.commit({0: 7})
    tree = drafts.check([0], TreeShape.cartesian([3, 2, 2, 3]))
    parents, depths, ids = tree.parents[0].tolist(), tree.depths[0].tolist(), tree.tokens[0].tolist()

    def below(nodes: Sequence[int]) -> list[list[int]]:
        return [[ids[child] for child, parent in enumerate(parents) if parent == node] for node in nodes]

    at = {depth: [node for node, d in enumerate(depths) if d == depth] for depth in range(5)}
    assert len({tuple(own) for own in below(at[1])}) == 1
    gains = (tree.scores[0] - tree.scores[0, tree.parents[0]]).tolist()
    of_second = [[gains[child] for child, parent in enumerate(parents) if parent == node] for node in at[2]]
    assert len({round(own[0], 5) for own in of_second}) == 6, "the second block reads what was drafted"
    for node in at[2]:
        own = [child for child, parent in enumerate(parents) if parent == node]
        assert len({tuple(of) for of in below(own)}) == 1


def test_fewer_positions_than_a_block() -> None:
    drafts = Drafts(block=3)
    drafts.begin(0, seed=1)
    drafts.commit({0: 2})
    assert not drafts.blocks.is_known(0, 2)
    drafts.commit({0: 1})
    drafts.check([0], STATIC)
    drafts.length[0] += 1  # a position that the drafter was never told of
    drafts.commit({0: 3})
    assert not drafts.blocks.is_known(0, 7)


@pytest.mark.parametrize("block", [2, 3, 4])
def test_every_position_of_a_block_sees_all_of_them(block: int) -> None:
    """A plan's chains: each ends in its own position, behind the others; the first K nodes are the block in order."""
    positions, parents, ends = block_plan(block)
    assert positions[:block] == list(range(block))
    for own, node in enumerate(ends):
        seen = [positions[node]]
        while parents[node] >= 0:
            assert parents[node] < node
            node = parents[node]  # noqa: PLW2901 - up to the block's first node
            seen.append(positions[node])
        assert seen[0] == own
        assert sorted(seen) == list(range(block))
    assert len(positions) == block + sum(range(2, block + 1))
