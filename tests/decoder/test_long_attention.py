"""The native attention behind long prefixes: the same bits in a tree, in a chunk and alone, and its weights."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.slow_blocks import Slow
from decoder.test_block_stack import E, block, chains, in_dtype, matrix, numbers
from limits import threads
from pairwise import slow_products
from torch import Tensor

from foretoken.attention.layout import AttentionLayout, reference_attention
from foretoken.core.errors import PassError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.blocks import Blocks
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.slot_cache import LayerShape, SlotCache

CAPACITY = 2200
# Two paths that take turns, so that most rows of a node are not where they are after a commit.
PARENTS = [-1, 0, 0, *range(1, 37)]
PATH = [0, *range(1, 39, 2)]
# Windows that begin in the middle of a block; prefixes around the end of a block and of a tile.
SHAPES: list[dict[str, Any]] = [
    {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64},
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32},
    {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "window": 301},
    {"num_heads": 8, "num_kv_heads": 2, "head_dim": 80, "softcap": 1.5},
    {"num_heads": 8, "num_kv_heads": 1, "head_dim": 128},
    {"num_heads": 9, "num_kv_heads": 3, "head_dim": 33, "window": 17},
    {"num_heads": 9, "num_kv_heads": 9, "head_dim": 32},  # so many that threads take whole heads of many queries
]

# The dtype of weights, and whether rows of the cache are int8.
STORED = {
    "float32": (torch.float32, False), "float32, int8": (torch.float32, True),
    "bfloat16": (torch.bfloat16, False), "bfloat16, int8": (torch.bfloat16, True),
}  # fmt: skip


def blocks_of(spec: dict[str, Any], dtype: torch.dtype) -> Blocks:
    heads, kv_heads, size = spec["num_heads"], spec["num_kv_heads"], spec["head_dim"]
    made = [
        block(
            seed,
            spec={**spec, "scale": 0.3},
            query=matrix(heads * size, E, seed + 1),
            key=matrix(kv_heads * size, E, seed + 2),
            value=matrix(kv_heads * size, E, seed + 3),
            output=matrix(E, heads * size, seed + 4),
            rotary=None,
        )
        for seed in (0, 100)
    ]
    return in_dtype(Blocks(blocks=made, final_norm=None), dtype)


def native(layers: Blocks, prefix: int, *, is_rounded: bool = False) -> tuple[NativeBlocks, SlotCache]:
    """Kernels with all taps, on two slots with the same prefix; later rows are NaN."""
    spec = layers.blocks[0].spec
    shape = LayerShape(spec.num_kv_heads, spec.head_dim, spec.head_dim)
    cache = SlotCache(
        [shape] * 2, num_slots=2, capacity=CAPACITY, dtype=layers.dtype, device=torch.device("cpu"),
        is_rounded=is_rounded,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(5)
    for part in (*cache.keys, *cache.values):
        rows = torch.randn(*part.shape[1:3], spec.head_dim, generator=generator)
        part[:] = rounded(rows) if is_rounded else rows.to(layers.dtype)
    for slot in range(2):
        cache.poison(slot, prefix)
    return NativeBlocks(layers, cache, [0, 1, 2]), cache


def rounded(rows: Tensor) -> Tensor:
    """Rows (..., D) float32 as the kernels store them: numbers (..., D) int8, and the four bytes of their scale."""
    size = rows.abs().amax(-1, keepdim=True)
    numbers = (rows * torch.where(size > 0, 127 / size, 0.0)).round().to(torch.int8)
    return torch.cat([numbers, (size / 127).view(torch.int8)], -1)


def read(stored: Tensor) -> Tensor:
    """The rows that `rounded` stored, in float32."""
    return stored[..., :-4].float() * stored[..., -4:].contiguous().view(torch.float32)


def on_threads(count: int, made: NativeBlocks, work: Pass, rows: Tensor) -> Any:
    with threads(count):
        return made.run(work, rows)


def tree_pass(slot: int, prefix: int) -> Pass:
    tree = TokenTree.from_rows([TreeRow([0] * len(PARENTS), PARENTS)])
    return replace(Pass.of_tree(tree, slots=[slot], prefix_lens=[prefix], last_position=CAPACITY - 1), logit_rows=None)


@pytest.mark.parametrize(("spec", "prefix", "stored"), slow_products(SHAPES, [250, 505, 512, 1023, 2100], list(STORED)))
def test_a_path_of_a_tree_has_the_bits_of_committed_tokens(spec: dict[str, Any], prefix: int, stored: str) -> None:
    dtype, is_rounded = STORED[stored]
    layers = blocks_of(spec, dtype)
    made, cache = native(layers, prefix, is_rounded=is_rounded)
    rows = numbers(len(PARENTS), E, seed=8, scale=1.0).float()
    alone = [
        on_threads(1, made, chains([1], slots=[0], prefix_lens=[prefix + i]), rows[node : node + 1]).features
        for i, node in enumerate(PATH)
    ]
    expected = torch.cat(alone)
    assert expected.isfinite().all()
    for count in (1, 2, 3):
        cache.poison(1, prefix)
        first = on_threads(count, made, chains([1], slots=[1], prefix_lens=[prefix]), rows[:1]).features
        assert torch.equal(first, expected[:1])
        cache.poison(1, prefix)
        found = on_threads(count, made, tree_pass(1, prefix), rows).features
        assert torch.equal(found[PATH], expected)
        cache.poison(1, prefix)
        chunk = on_threads(count, made, chains([len(PATH)], slots=[1], prefix_lens=[prefix]), rows[PATH]).features
        assert torch.equal(chunk, expected)


@pytest.mark.parametrize("is_rounded", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("spec", SHAPES[:4], ids=str)
def test_a_chunk_of_more_queries_than_are_computed_together(spec: dict[str, Any], is_rounded: bool) -> None:
    prefix, count = 1023, 600
    made, _ = native(blocks_of(spec, torch.bfloat16), prefix, is_rounded=is_rounded)
    rows = numbers(count, E, seed=8, scale=1.0).float()
    chunk = on_threads(2, made, chains([count], slots=[1], prefix_lens=[prefix]), rows).features
    for token in (0, 1, 255, 256, 511, count - 1):
        alone = chains([1], slots=[1], prefix_lens=[prefix + token])
        assert torch.equal(on_threads(1, made, alone, rows[token : token + 1]).features, chunk[token : token + 1])


def expected_weights(layers: Blocks, cache: SlotCache, work: Pass, features: Tensor, rows: list[int]) -> Tensor:
    """By `reference_attention`, with the unit vectors as values, in float64."""
    layout, spec, slow = AttentionLayout(work), layers.blocks[0].spec, Slow(in_dtype(layers, torch.float64))
    most = max(layout.num_keys(s) for s in range(len(work.slots)))
    weights = torch.zeros(len(work.slots), len(layers.blocks), spec.num_kv_heads, most, dtype=torch.float64)
    for s, slot in enumerate(work.slots):
        own, end = list(range(work.offsets[s], work.offsets[s + 1])), layout.num_keys(s)
        mask = layout.mask(s, spec.window)
        for index, each in enumerate(slow.layers.blocks):
            x = slow.normed(each.attention_norm, features[own, index].double())
            query = slow.linear(each.query, x).to(layers.dtype).double().unflatten(1, (spec.num_heads, spec.head_dim))
            key = cache.keys[index][slot, :, :end]
            key = (read(key).to(layers.dtype) if cache.is_rounded else key).double()
            unit = torch.eye(end, dtype=torch.float64).expand(spec.num_kv_heads, -1, -1)
            probs = reference_attention(
                query.transpose(0, 1), key, unit, mask, scale=spec.attention_scale, softcap=spec.softcap
            )
            wanted = [t - own[0] for t in rows if t in own]
            weights[s, index, :, :end] = probs[:, wanted].sum(1).unflatten(0, (spec.num_kv_heads, -1)).sum(1)
    return weights


# Features are rounded to the dtype before the query is computed from them, and queries are rounded too.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1}


@pytest.mark.parametrize("is_rounded", [False, True], ids=["", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SHAPES, ids=str)
def test_attention_weights(spec: dict[str, Any], dtype: torch.dtype, is_rounded: bool) -> None:
    """Of some nodes of a tree and of some tokens of a chain, on any number of threads."""
    layers, prefix = blocks_of(spec, dtype), 700
    made, cache = native(layers, prefix, is_rounded=is_rounded)
    work = tree_pass(1, prefix).with_chains(chains([70], slots=[0], prefix_lens=[290]))
    rows = numbers(work.num_tokens, E, seed=8, scale=1.0).float()
    scored = [0, 5, len(PARENTS) - 1, len(PARENTS) + 3, work.num_tokens - 2, work.num_tokens - 1]
    asked = replace(work, attention_rows=torch.tensor(scored))
    found = on_threads(1, made, asked, rows)
    expected = expected_weights(layers, cache, work, found.features, scored)
    assert found.attention.shape == expected.shape
    assert (found.attention - expected).abs().max() <= TOLERANCE[dtype] * expected.max()
    assert ((found.attention == 0) | (expected > 0)).all(), "only rows that some token sees have weights"
    for count in (2, 3):
        again = on_threads(count, made, asked, rows)
        assert torch.equal(again.attention, found.attention)
        assert torch.equal(again.features, made.run(work, rows).features)
    assert made.run(work, rows).attention is None


def errors(features: Tensor, expected: Tensor) -> Tensor:
    return (features - expected).norm(dim=-1) / expected.norm(dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rounded_rows(instruction_set: str, dtype: torch.dtype) -> None:
    """Rows are written as `rounded` says, and read as what they stand for."""
    prefix, zeros = 530, numbers(1, E, seed=3, scale=0.0)
    rows = torch.cat([numbers(len(PARENTS) - 1, E, seed=8, scale=1.0), zeros]).float()
    with kernels_for(instruction_set):
        for spec in SHAPES:
            layers, work = blocks_of(spec, dtype), tree_pass(1, prefix)
            (made, cache), (plain, wide) = native(layers, prefix, is_rounded=True), native(layers, prefix)
            for stored, exact in zip((*cache.keys, *cache.values), (*wide.keys, *wide.values), strict=True):
                exact[:, :, :prefix] = read(stored[:, :, :prefix]).to(dtype)
            found, expected = (each.run(work, rows).features.float() for each in (made, plain))
            # The first layer's output differs by the rows of the tree alone; another row in place of one gives about 1.
            difference = errors(found, expected)[:, 1]
            assert 0 < difference.median() < 0.02
            assert difference.max() < 0.2
            if dtype == torch.float32:  # otherwise the other cache holds rounded rows too
                end = prefix + len(PARENTS)
                for stored, exact in ((cache.keys[0], wide.keys[0]), (cache.values[0], wide.values[0])):
                    assert torch.equal(stored[1, :, prefix:end], rounded(exact[1, :, prefix:end]))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_rounded_rows_that_are_not_finite(value: float) -> None:
    made, cache = native(blocks_of(SHAPES[1], torch.bfloat16), 300, is_rounded=True)
    row = numbers(1, E, seed=1).float()
    row[0, 3] = value
    assert made.run(chains([1], slots=[0], prefix_lens=[300]), row).features[:, 1].isnan().any()
    assert read(cache.keys[0][0, :, 300]).isnan().all()


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_other_instruction_sets(instruction_set: str) -> None:
    prefix, scored = 530, [1, 2]
    with kernels_for(instruction_set):
        for spec in SHAPES[1:4]:
            layers = blocks_of(spec, torch.bfloat16)
            made, cache = native(layers, prefix)
            work = replace(tree_pass(1, prefix), attention_rows=torch.tensor(scored))
            found = made.run(work, numbers(len(PARENTS), E, seed=8, scale=1.0).float())
            expected = expected_weights(layers, cache, work, found.features, scored)
            assert (found.attention - expected).abs().max() <= TOLERANCE[torch.bfloat16] * expected.max()


def test_fewer_layers_and_wrong_rows() -> None:
    layers = blocks_of(SHAPES[1], torch.float32)
    made, _ = native(layers, 300)
    work, row = chains([2], slots=[0], prefix_lens=[300]), numbers(2, E, seed=1).float()
    whole = made.run(replace(work, attention_rows=torch.tensor([1])), row).attention
    cut = made.run(replace(work, attention_rows=torch.tensor([1]), num_layers=1), row).attention
    assert torch.equal(cut, whole[:, :1])
    none = made.run(replace(work, attention_rows=torch.tensor([], dtype=torch.int64)), row).attention
    assert not none.any()
    for wrong in ([2], [-1], [1, 0]):
        with pytest.raises(PassError, match=r"attention_rows are not ascending in 0\.\.1"):
            made.run(replace(work, attention_rows=torch.tensor(wrong)), row)
