"""Random inputs of tree attention in every class of shapes; rows that must not be read are filled with NaN."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from typing import Any

import torch
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.passes import Pass

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
    "structure": ("causal", "chain", "tree", "mixed", "levels"),
    "tables": ("pass", "captured"),
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
    "structure": ("causal", "tree", "mixed", "levels"),
    "tables": ("pass", "captured"),
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
        query: (M, H, Dk).
        keys: (slots, Hk, capacity, Dk), NaN in every row that must not be read.
        values: (slots, Hk, capacity, Dv), likewise.
        work: The pass, as the runner would describe it.
        visible: For each sequence (T, L) bool on the CPU, what each token sees, by a plain loop; L = prefix + nodes.
        sinks: (H,), or None.
        scale: Factor of the dot products.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    work: Pass
    visible: Sequence[Tensor]
    sinks: Tensor | None
    scale: float

    @property
    def layout(self) -> AttentionLayout:
        """Of the pass."""
        return AttentionLayout(self.work)

    @property
    def lengths(self) -> list[int]:
        """L of each sequence."""
        return [mask.shape[1] for mask in self.visible]

    @property
    def counts(self) -> list[int]:
        """T of each sequence."""
        return [mask.shape[0] for mask in self.visible]

    def padded(self, packed: Tensor, value: float = 0) -> Tensor:
        """(B, T, …) what lies packed by token, with `value` behind every sequence but the longest."""
        return torch.nn.utils.rnn.pad_sequence(packed.split(self.counts), batch_first=True, padding_value=value)

    def packed(self, padded: Tensor) -> Tensor:
        """The reverse of `padded`."""
        return torch.cat([row[:count] for row, count in zip(padded, self.counts, strict=True)])


def make_problem(case: Case, device: torch.device, seed: int) -> Problem:
    """Random inputs of a case; the same seed gives the same ones on every device.

    Queries are long, so that few keys carry a row's weight and a single one that is lost shows.

    Args:
        case: A level of every factor.
        device: Where the tensors go.
        seed: Of everything.
    """
    rng = random.Random(seed)
    batch, dtype, structure = case["batch"], DTYPES[case["dtype"]], case["structure"]
    key_width, value_width = case["head"]
    heads = case["group"] * _KV_HEADS
    prefix = [_prefix(case["prefix"], row, rng) for row in range(batch)]
    earlier = [rng.randint(1, 20) if structure == "levels" else 0 for _ in range(batch)]
    counts = [case["nodes"] if row == 0 or structure == "causal" else rng.randint(1, case["nodes"])
              for row in range(batch)]  # fmt: skip
    parents = [_parents(structure, earlier[row] + counts[row], row, rng) for row in range(batch)]
    slots = rng.sample(range(batch + _SPARE_SLOTS), batch)
    capacity = max(prefix) + max(map(len, parents)) + _SPARE_ROWS
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, size: float = 1.0) -> Tensor:
        return (size * torch.randn(*shape, generator=generator)).to(device=device, dtype=dtype)

    keys = normal(batch + _SPARE_SLOTS, _KV_HEADS, capacity, key_width)
    values = normal(batch + _SPARE_SLOTS, _KV_HEADS, capacity, value_width)
    for slot in range(batch + _SPARE_SLOTS):
        row = slots.index(slot) if slot in slots else None
        end = 0 if row is None else prefix[row] + len(parents[row])
        keys[slot, :, end:] = float("nan")
        values[slot, :, end:] = float("nan")
    positions = [start + depth for line, start in zip(parents, prefix, strict=True) for depth in _depths(line)]
    work = Pass(
        tokens=torch.zeros(sum(counts), dtype=torch.int64, device=device),
        positions=torch.tensor(positions, device=device),
        parents=torch.tensor([parent for line in parents for parent in line], device=device),
        slots=slots, prefix_lens=prefix, offsets=[0, *accumulate(counts)],
        num_earlier=earlier if structure == "levels" else None, logit_rows=None, is_causal=structure == "causal",
    )  # fmt: skip
    return Problem(
        query=normal(sum(counts), heads, key_width, size=2.5),
        keys=keys,
        values=values,
        work=work,
        visible=[
            visible_rows(line, start, before, case["window"])
            for line, start, before in zip(parents, prefix, earlier, strict=True)
        ],
        sinks=normal(heads) if case["sinks"] else None,
        scale=key_width**-0.5,
    )


def visible_rows(parents: Sequence[int], prefix: int, earlier: int, window: int | None) -> Tensor:
    """Which cache rows the tokens of a sequence see, told from parents alone.

    Args:
        parents: Of all N nodes; -1 where none comes before.
        prefix: Rows before them, which everyone sees.
        earlier: Nodes that earlier passes computed.
        window: Only rows less than this many positions back, or None.

    Returns:
        (N - earlier, prefix + N) bool.
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
    return mask[earlier:]


def _prefix(kind: str, row: int, rng: random.Random) -> int:
    """A sequence's prefix length; a ragged batch has every kind in it."""
    if kind == "ragged":
        kind = ("long", "none", "short")[row % 3]
    return rng.randint(*_PREFIXES[kind])


def _parents(structure: str, width: int, row: int, rng: random.Random) -> list[int]:
    """Parents of a sequence's nodes; mixed are prompts and trees in turn, and levels have several trees."""
    if structure in ("causal", "chain") or (structure == "mixed" and row % 2 == 0):
        return list(range(-1, width - 1))
    near = rng.choice((2, 8, width))  # deep trees, bushy ones, and any
    parents = [-1] + [rng.randint(max(0, node - near), node - 1) for node in range(1, width)]
    return [-1 if structure == "levels" and rng.random() < 0.2 else parent for parent in parents]


def _depths(parents: Sequence[int]) -> list[int]:
    """Depth of every node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
    return depths
