"""Random inputs of tree attention: every class of shapes, and what no row may be read of filled with NaN."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.token_tree import TokenTree, TreeRow

Levels = Mapping[str, Sequence[Any]]
Case = dict[str, Any]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

LEVELS: Levels = {
    "head": ((64, 64), (96, 96), (128, 128), (256, 256), (192, 128)),
    "group": (1, 4, 8),
    "dtype": ("bfloat16", "float16", "float32"),
    "nodes": (1, 8, 33, 64, 128, 340),
    "batch": (1, 3, 8),
    "prefix": ("none", "short", "long", "ragged"),
    "structure": ("causal", "chain", "tree", "levels"),
    "window": (None, 5, 100),
    "softcap": (None, None, 2.0, 30.0),
    "sinks": (False, False, True),
    "splits": (None, None, 1, 2, 5),
}
REHEARSAL_LEVELS: Levels = {
    "head": ((16, 16), (24, 16)),
    "group": (1, 2),
    "dtype": ("float32", "float16"),
    "nodes": (1, 7),
    "batch": (1, 2),
    "prefix": ("none", "short"),
    "structure": ("causal", "tree", "levels"),
    "window": (None, 5),
    "softcap": (None, 2.0),
    "sinks": (False, True),
    "splits": (None, 2),
}
_PREFIXES = {"none": (0, 0), "short": (1, 40), "long": (700, 2100)}
_KV_HEADS = 2
_SPARE_ROWS = 19  # of a slot, behind everything that may be read
_SPARE_SLOTS = 2


def covering_cases(levels: Levels, seed: int) -> list[Case]:
    """A short list of cases in which every two levels of two factors meet.

    Args:
        levels: Factors and their levels; a level that stands twice comes up more often.
        seed: Other seeds give other lists.
    """
    rng = random.Random(seed)
    missing = {
        frozenset([(a, x), (b, y)]) for a, b in combinations(levels, 2) for x in levels[a] for y in levels[b]
    }  # fmt: skip
    cases: list[Case] = []
    while missing:
        # Any missing pair, and of many ways to complete it the one that covers most: each case covers something.
        wanted = dict(sorted(missing, key=lambda pair: sorted(map(str, pair)))[rng.randrange(len(missing))])
        drawn = [{name: rng.choice(values) for name, values in levels.items()} | wanted for _ in range(40)]
        best = max(drawn, key=lambda case: len(pairs_of(case) & missing))
        missing -= pairs_of(best)
        cases.append({name: best[name] for name in levels})
    return cases


def pairs_of(case: Case) -> set[frozenset[tuple[str, Any]]]:
    """Every two levels that meet in a case."""
    return {frozenset(pair) for pair in combinations(case.items(), 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One call of tree attention.

    Attributes:
        query: (B, H, T, Dk).
        keys: (slots, Hk, capacity, Dk), NaN in every row that must not be read.
        values: (slots, Hk, capacity, Dv), likewise.
        layout: Who sees what, as the runner would say it.
        visible: For each sequence (T, S) bool on the CPU, the same by a loop of its own; S = prefix + W.
        parents: (B, T) int32, or None where the tokens are causal.
        sinks: (H,), or None.
        scale: Factor of the dot products.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    layout: AttentionLayout
    visible: Sequence[Tensor]
    parents: Tensor | None
    sinks: Tensor | None
    scale: float

    @property
    def lengths(self) -> list[int]:
        """S of each sequence."""
        return [mask.shape[1] for mask in self.visible]


def make_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """Random inputs of a case; the same seed gives the same ones on every device.

    Queries are long, so that few keys carry a row's weight and a single one that is lost shows.

    Args:
        case: A level of every factor.
        device: Where the tensors go.
        seed: Of everything.
    """
    rng = random.Random(seed)
    batch, fed, dtype = case["batch"], case["nodes"], DTYPES[case["dtype"]]
    key_width, value_width = case["head"]
    heads = case["group"] * _KV_HEADS
    prefix = [_prefix(case["prefix"], row, rng) for row in range(batch)]
    offset = rng.randint(1, 20) if case["structure"] == "levels" else 0
    width = offset + fed
    parents = [_parents(case["structure"], width, row, rng) for row in range(batch)]
    slots = rng.sample(range(batch + _SPARE_SLOTS), batch)
    capacity = max(prefix) + width + _SPARE_ROWS
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=generator)).to(device=device, dtype=dtype)

    keys = normal(batch + _SPARE_SLOTS, _KV_HEADS, capacity, key_width)
    values = normal(batch + _SPARE_SLOTS, _KV_HEADS, capacity, value_width)
    for slot in range(batch + _SPARE_SLOTS):
        end = prefix[slots.index(slot)] + width if slot in slots else 0
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    return Problem(
        query=normal(batch, fed, heads, key_width, size=2.5).transpose(1, 2),
        keys=keys,
        values=values,
        layout=_layout(case["structure"], slots, prefix, parents, offset, device),
        visible=[
            visible_rows(line, start, offset, case["window"]) for line, start in zip(parents, prefix, strict=True)
        ],
        parents=None
        if case["structure"] == "causal"
        else torch.tensor(parents, dtype=torch.int32, device=device)[:, offset:],
        sinks=normal(heads) if case["sinks"] else None,
        scale=key_width**-0.5,
    )


def visible_rows(parents: Sequence[int], prefix: int, offset: int, window: int | None) -> Tensor:
    """Which cache rows the fed nodes see, told from parents alone.

    Args:
        parents: Of all W scratch nodes; -1 where none comes before.
        prefix: Rows before them, which everyone sees.
        offset: Nodes that earlier passes fed.
        window: Only rows less than this many positions back, or None.

    Returns:
        (W - offset, prefix + W) bool.
    """
    sees: list[set[int]] = []
    depths: list[int] = []
    for node, parent in enumerate(parents):
        sees.append({node} | (sees[parent] if parent >= 0 else set()))
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    mask = torch.zeros(len(parents), prefix + len(parents), dtype=torch.bool)
    mask[:, :prefix] = True
    for node, seen in enumerate(sees):
        mask[node, [prefix + other for other in seen]] = True
    if window is not None:
        positions = torch.tensor([*range(prefix), *(prefix + depth for depth in depths)])
        mask &= positions[prefix:].unsqueeze(1) - positions < window
    return mask[offset:]


def _prefix(kind: str, row: int, rng: random.Random) -> int:
    """A sequence's prefix length; a ragged batch has every kind in it."""
    if kind == "ragged":
        kind = ("long", "none", "short")[row % 3]
    return rng.randint(*_PREFIXES[kind])


def _parents(structure: str, width: int, row: int, rng: random.Random) -> list[int]:
    """Parents of a sequence's scratch nodes; trees of a batch differ in size, and the rest is padding."""
    if structure in ("causal", "chain"):
        return list(range(-1, width - 1))
    count = width if row == 0 or structure == "levels" else rng.randint(1, width)
    near = rng.choice((2, 8, width))  # deep trees, bushy ones, and any
    tree = [-1] + [rng.randint(max(0, node - near), node - 1) for node in range(1, count)]
    return tree + [-1] * (width - count)


def _layout(
    structure: str,
    slots: Sequence[int],
    prefix: Sequence[int],
    parents: Sequence[Sequence[int]],
    offset: int,
    device: torch.device,
) -> AttentionLayout:
    """The pass as the runner describes it."""
    starts = torch.tensor(prefix, device=device).unsqueeze(1)
    if structure == "causal":
        positions = starts + torch.arange(len(parents[0]), device=device)
        return AttentionLayout(slots=slots, prefix=prefix, positions=positions)
    if structure == "levels":
        depths = torch.tensor([_depths(line) for line in parents], device=device)
        visible = torch.stack([visible_rows(line, 0, offset, None) for line in parents]).to(device)
        return AttentionLayout(
            slots=slots, prefix=prefix, offset=offset, positions=(starts + depths)[:, offset:], visible=visible,
            scratch_positions=starts + depths,
        )  # fmt: skip
    # The real nodes of a row come first; whatever has no parent after the root is padding.
    counts = [len(line) - sum(parent < 0 for parent in line[1:]) for line in parents]
    rows = [TreeRow([0] * count, line[:count]) for count, line in zip(counts, parents, strict=True)]
    tree = TokenTree.from_rows(rows, device=device)
    return AttentionLayout(slots=slots, prefix=prefix, positions=starts + tree.depths, tree=tree)


def _depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
