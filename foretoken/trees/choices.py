"""Tree shapes: which candidate ranks follow each other at each depth, independent of tokens; and the best shape.

A choice is a tuple of ranks in Medusa's notation: (0,) is the best candidate after the root, (0, 1) the second best
after that candidate. A shape is a prefix-closed set of choices. Chains, static trees and Cartesian products are shapes.

`best_shape` finds the shape with the most tokens per second from measured acceptance. a(d, r) is the probability that
candidate r of depth d is right if its parent is right, assumed independent of all else. The value of a node is the
product of these along its path: the probability that the node is accepted. The sum of all values is the expected number
of accepted tokens.

No node is worth more than its parent. Selecting the most valuable node below selected nodes, again and again, thus
gives the best tree of every size (the search of Medusa, arXiv 2401.10774). An acceptance table has K rows, one per
head. Rows may differ in length and need not fall with the rank.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import MAX_NODES, DrawKind

if TYPE_CHECKING:
    Acceptance = Sequence[Sequence[float]]

Choice = tuple[int, ...]

# What "tree" means for drafters that are language models. Best node first: any beginning of the list is a tree.
OF_LANGUAGE_MODELS: tuple[Choice, ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 0, 0), (2,), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0, 0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A prefix-closed set of choices in level order, siblings by rank, without the root, node 0."""

    choices: tuple[Choice, ...]

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> TreeShape:
        """Returns a static tree from choices in Medusa's notation; raises `ConfigError` if they are no tree."""
        ordered = sorted((tuple(choice) for choice in choices), key=lambda choice: (len(choice), choice))
        known: set[Choice] = {()}
        for choice in ordered:
            if not choice or min(choice) < 0 or max(choice) >= MAX_NODES:
                raise ConfigError(f"tree choice {shown(choice)} is not valid. Expected ranks of 0 to {MAX_NODES - 1}.")
            if choice in known:
                raise ConfigError(f"tree choice {shown(choice)} stands twice. Leave one out.")
            if choice[:-1] not in known:
                raise ConfigError(f"tree choice {shown(choice)} has no parent. Add {shown(choice[:-1])}.")
            known.add(choice)
        if len(ordered) >= MAX_NODES:
            raise ConfigError(f"the tree has {len(ordered)} choices. Expected fewer than {MAX_NODES}.")
        return cls(tuple(ordered))

    @classmethod
    def chain(cls, depth: int) -> TreeShape:
        """Returns a chain of the best candidates."""
        return cls.from_choices((0,) * d for d in range(1, depth + 1))

    @classmethod
    def comb(cls, depth: int, num_beside: int) -> TreeShape:
        """Returns a chain of the best candidates, and the second best beside each of its first `num_beside` tokens."""
        beside = [(*(0,) * d, 1) for d in range(num_beside)]
        return cls.from_choices([*((0,) * d for d in range(1, depth + 1)), *beside])

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> TreeShape:
        """Returns all combinations of the best `widths[d]` candidates at depth d + 1.

        Raises `ConfigError` when a width is below 1, or the widths give too many nodes.
        """
        if not widths or min(widths) < 1:
            raise ConfigError(f"tree widths {shown(widths)} are not valid. Expected at least one, each of at least 1.")
        num_nodes = 0
        for level in accumulate(widths, mul):
            num_nodes += level
            if num_nodes >= MAX_NODES:  # before the nodes are made: there may be billions
                raise ConfigError(f"tree widths {shown(widths)} give too many nodes. Expected fewer than {MAX_NODES}.")
        return cls.from_choices(
            choice for d in range(1, len(widths) + 1) for choice in product(*(range(w) for w in widths[:d]))
        )

    @classmethod
    def parse(cls, value: Any) -> TreeShape:
        """Returns a tree from [[0], [1], [0, 0]] or {"widths": [3, 2, 1]}; raises `ConfigError` for other values."""
        if isinstance(value, Mapping):
            if value.keys() != {"widths"}:
                raise ConfigError(f"tree {shown(value)} is not valid. Expected {{'widths': [3, 2, 1]}}.")
            return cls.cartesian(_integers(value["widths"], what="tree widths"))
        if isinstance(value, str) or not isinstance(value, Sequence):
            raise ConfigError(f"tree {shown(value)} is not valid. Expected choices such as [[0], [1], [0, 0]].")
        if not value:
            raise ConfigError("the tree has no choices. Expected at least one, as [[0]].")
        return cls.from_choices([_integers(choice, what="tree choice") for choice in value])

    @property
    def num_nodes(self) -> int:
        """Nodes, the root included."""
        return len(self.choices) + 1

    @property
    def depth(self) -> int:
        """Greatest depth."""
        return max(map(len, self.choices), default=0)

    @property
    def parents(self) -> list[int]:
        """Parent of every node, -1 at the root."""
        index = {choice: i + 1 for i, choice in enumerate(self.choices)} | {(): 0}
        return [-1] + [index[choice[:-1]] for choice in self.choices]

    @property
    def ranks(self) -> list[int]:
        """Rank of every node among the candidates after its parent; 0 at the root."""
        return [0] + [choice[-1] for choice in self.choices]

    @property
    def depths(self) -> list[int]:
        """Depth of every node."""
        return [0] + [len(choice) for choice in self.choices]

    @property
    def is_comb(self) -> bool:
        """Whether only the best candidates of a path have children."""
        return all(not any(choice[:-1]) for choice in self.choices)

    def truncated(self, max_depth: int) -> TreeShape:
        """Returns the shape without nodes deeper than `max_depth`."""
        return TreeShape(tuple(choice for choice in self.choices if len(choice) <= max_depth))


def _integers(value: Any, *, what: str) -> tuple[int, ...]:
    if isinstance(value, str) or not isinstance(value, Sequence) or any(type(number) is not int for number in value):
        raise ConfigError(f"{what} {shown(value)} is not valid. Expected a list of integers.")
    return tuple(value)


def _choices(digits: str) -> tuple[Choice, ...]:
    """Parses choices without brackets: 021 is (0, 2, 1)."""
    return tuple(tuple(int(rank) for rank in choice) for choice in digits.split())


# `mc_sim_7b_63` is Medusa's default, also used by Hydra and the examples of TensorRT-LLM. Medusa takes the stage 2
# trees for targets of these names. The stage 1 trees belong to heads that were trained alone, on a frozen target.
PUBLISHED: Mapping[str, tuple[Choice, ...]] = MappingProxyType(
    {
        "mc_sim_7b_63": _choices(
            """
            0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21 004
            005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001 16 070
            """
        ),
        "vicuna_7b_stage1_ablation": _choices(
            """
            0 00 1 000 01 10 2 02 001 3 03 010 20 002 04 4 0000 100 11 003 020 05 5 30 011 06 6 004 12 0001 40 005 07 08
            030 0010 101 7 200 006 21 012 50 021 09 0002 040 8 13 007 0100 110 60 9 008 009 050 0020 102 013 0003 300 31
            """
        ),
        "vicuna_7b_stage1": _choices(
            """
            0 00 1 2 01 10 3 02 4 000 03 5 20 04 6 05 11 001 7 30 06 8 9 010 07 08 40 002 12 09 21 50 100 003 13 020 011
            004 60 14 005 22 030 31 006 70 15 101 200 007 80 0000 41 012 040 90 021 23 16 008 050 32 51
            """
        ),
        "vicuna_7b_stage2": _choices(
            """
            0 00 1 01 000 10 2 02 001 03 3 010 20 4 002 04 11 100 0000 5 003 05 020 30 011 06 6 07 004 40 12 08 7
            030 0001 005 21 006 101 0010 200 50 09 012 8 040 021 13 007 0002 008 110 0100 60 9 013 0003 102 050 31
            0020 70 14
            """
        ),
        "vicuna_13b_stage1": _choices(
            """
            0 00 1 01 2 10 000 02 3 03 4 20 04 001 05 5 11 010 6 06 002 7 30 8 07 08 100 003 40 12 9 09 21 020 004 13
            011 005 50 030 0000 006 60 14 200 012 31 040 101 22 007 15 70 008 80 050 009 021 110 013 41 23 16
            """
        ),
        "vicuna_13b_stage2": _choices(
            """
            0 00 1 000 01 10 2 02 001 010 3 03 20 002 0000 04 100 11 4 003 05 020 5 30 011 06 004 0001 07 005 12
            0010 030 101 40 006 08 200 09 6 7 21 50 012 0002 8 040 0100 021 007 110 13 0020 9 008 050 0003 009 013
            102 0011 300 1000
            """
        ),
        "vicuna_33b_stage1": _choices(
            """
            0 1 00 2 01 3 10 4 02 5 03 000 6 04 20 7 11 05 30 8 9 06 07 001 12 40 010 08 09 21 002 50 13 003 100 14 60
            020 31 22 004 70 011 15 41 005 030 90 80 16 006 23 012 32 040 200 17 101 007 51 24 008 021
            """
        ),
        "vicuna_33b_stage2": _choices(
            """
            0 00 1 01 000 10 2 02 001 03 3 010 20 04 4 002 11 100 05 5 0000 003 30 020 06 011 6 004 07 7 12 40 8 030
            005 0001 08 21 09 101 200 006 50 0010 13 012 040 007 021 9 110 0002 60 008 0100 70 013 050 14 009 31 102
            22
            """
        ),
        "zephyr_stage2": _choices(
            """
            0 00 1 01 2 000 10 02 3 03 4 20 001 04 5 05 010 11 6 002 30 06 7 07 08 003 100 09 020 12 40 8 9 21 011
            004 0000 50 030 13 005 006 60 200 101 012 040 14 31 22 007 70 021 008 013 050 15 009 110 0001 0010 41 23
            """
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Relations:
    """The parents, levels and counts of a shape.

    Attributes:
        depths: Depth of every node.
        levels: Of each depth, the nodes that have children.
        places: (3, N) int64, parents, depths and ranks.
        max_siblings: Most children of a node.
        num_inner: Nodes that have children.
        widest_level: Most nodes with children of one depth.
        num_candidates: The largest rank plus 1.
    """

    depths: list[int]
    levels: list[Level]
    places: Tensor
    max_siblings: int
    num_inner: int
    widest_level: int
    num_candidates: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Level:
    """The P nodes of one depth that have children, and their C children.

    Attributes:
        indices: P nodes.
        nodes: Index of these in (B, N): a slice if they are contiguous, else (P,) int64.
        origins: See `Frontier`.
        children: (C,) int64, nodes.
        parents: (C,) int64, the parent of each.
        place: (C,) int64, index of that parent among the P nodes.
        rank: (C,) int64, of each among the candidates after its parent.
        order: (C,) int64, of each among its siblings.
        kind: (C,) int64, the `DrawKind` of each if it is drawn.
        num_candidates: Candidates needed after a node: the largest rank plus 1.
    """

    indices: list[int]
    nodes: slice | Tensor
    origins: Tensor | None
    children: Tensor
    parents: Tensor
    place: Tensor
    rank: Tensor
    order: Tensor
    kind: Tensor
    num_candidates: int

    def narrowed(self, places: Tensor, above: Tensor | None) -> Level:
        """Returns a part of the level: the nodes at `places`, (P',) int64, ascending.

        `above` are the places in the level above; None at the root.
        """
        device = places.device
        new_place = torch.full((len(self.indices),), -1, device=device)
        new_place[places] = torch.arange(len(places), device=device)
        stays = new_place[self.place] >= 0
        origins = None
        if above is not None:
            all_origins = torch.arange(len(self.indices), device=device) if self.origins is None else self.origins[0]
            origins = torch.searchsorted(above, all_origins[places]).unsqueeze(0)
        indices = [self.indices[place] for place in places.tolist()]
        return Level(
            indices=indices,
            nodes=torch.tensor(indices, dtype=torch.int64, device=device),
            origins=origins,
            children=self.children[stays],
            parents=self.parents[stays],
            place=new_place[self.place[stays]],
            rank=self.rank[stays],
            order=self.order[stays],
            kind=self.kind[stays],
            num_candidates=self.num_candidates,
        )


class _Table(NamedTuple):
    parents: list[int]
    children: list[list[int]]
    ranks: list[int]


@lru_cache(maxsize=64)  # a drafter has one shape, truncated to as many depths as it has levels
def relations_of(shape: TreeShape, device: torch.device) -> Relations:
    """Returns the index tensors of a shape; cached."""
    parents, depths, ranks = shape.parents, shape.depths, shape.ranks
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if node:
            children[parent].append(node)
    inner: list[list[int]] = [[] for _ in range(shape.depth)]
    for node, own in enumerate(children):
        if own:
            inner[depths[node]].append(node)
    return Relations(
        depths=depths,
        levels=[
            _level(nodes, inner[depth - 1] if depth else [-1], _Table(parents, children, ranks), device)
            for depth, nodes in enumerate(inner)
        ],
        places=torch.tensor([parents, depths, ranks], device=device),
        max_siblings=max(map(len, children)),
        num_inner=sum(map(len, inner)),
        widest_level=max(map(len, inner), default=0),
        num_candidates=max(ranks) + 1,
    )


@lru_cache(maxsize=64)
def whole_places(relations: Relations, batch: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns parents (B, N), depths (B, N) and numbers of nodes (B,) of uncut trees."""
    parents, depths, _ = relations.places.unsqueeze(1).expand(-1, batch, -1).unbind()
    return parents, depths, torch.full((batch,), len(relations.depths), device=parents.device)


def _level(nodes: list[int], above: list[int], relations: _Table, device: torch.device) -> Level:
    parents, children, ranks = relations
    columns = [
        (child, node, place, ranks[child], order, _kind(len(children[node])))
        for place, node in enumerate(nodes)
        for order, child in enumerate(children[node])
    ]
    origins = [above.index(parents[node]) for node in nodes]
    first, last = nodes[0], nodes[-1]
    is_run = last - first + 1 == len(nodes)
    child, parent, place, rank, order, kind = torch.tensor(columns, device=device).T.contiguous()
    return Level(
        indices=nodes,
        nodes=slice(first, last + 1) if is_run else torch.tensor(nodes, device=device),
        origins=None if origins == list(range(len(above))) else torch.tensor([origins], device=device),
        children=child,
        parents=parent,
        place=place,
        rank=rank,
        order=order,
        kind=kind,
        num_candidates=max(column[3] for column in columns) + 1,
    )


def _kind(siblings: int) -> int:
    return (DrawKind.INDEPENDENT if siblings == 1 else DrawKind.WITHOUT_REPLACEMENT).value


def best_nodes(acceptance: Acceptance, max_nodes: int) -> list[tuple[Choice, float]]:
    """Returns choices by falling value; every beginning of the list is the best tree of its size.

    Among equal values the shorter choice comes first, then the lexicographically smaller one.

    Args:
        acceptance: K rows, probability that each candidate of a depth is right if its parent is.
        max_nodes: Most nodes of a tree, root included.

    Returns:
        At most `max_nodes - 1` choices with their values; fewer if the table has fewer.

    Raises:
        ConfigError: When the table is empty or holds anything but probabilities, or `max_nodes` is below 2.
    """
    _check(acceptance)
    if max_nodes < 2:
        raise ConfigError(f"max_nodes is {max_nodes}. Expected at least 2: the root and a drafted node.")
    heap: list[tuple[float, int, Choice]] = []

    def offer_children(choice: Choice, value: float) -> None:
        if len(choice) < len(acceptance):
            for rank, probability in enumerate(acceptance[len(choice)]):
                heapq.heappush(heap, (-value * probability, len(choice) + 1, (*choice, rank)))

    selected: list[tuple[Choice, float]] = []
    offer_children((), 1.0)
    while heap and len(selected) < max_nodes - 1:
        negative, _, choice = heapq.heappop(heap)
        selected.append((choice, -negative))
        offer_children(choice, -negative)
    return selected


def best_shape(
    acceptance: Acceptance,
    pass_seconds: Callable[[int], float],
    *,
    level_seconds: float | Callable[[TreeShape], float] = 0.0,
    max_nodes: int,
) -> TreeShape:
    """Returns the shape with the most expected tokens per second.

    If drafting takes time per level, a shallower tree may pay more than any beginning of `best_nodes`. Every depth is
    therefore tried as the greatest. With a number for `level_seconds` the result is the best of all shapes; with a
    function, the best of the shapes tried. Among equals the shape with the fewest nodes wins. The shape has at least
    one drafted node.

    Args:
        acceptance: K rows, see `best_nodes`.
        pass_seconds: Seconds of a target pass by its nodes, root included.
        level_seconds: Seconds of drafting per level; or a function that returns the seconds for a whole shape.
        max_nodes: Most nodes of a tree, root included.

    Raises:
        ConfigError: See `best_nodes`.
    """
    _check(acceptance)
    rate_of_best, best = float("-inf"), TreeShape(())
    # If depth costs nothing, the deepest search has the best tree of every size.
    for depth in range(1 if level_seconds else len(acceptance), len(acceptance) + 1):
        selected = best_nodes(acceptance[:depth], max_nodes)
        choices = [choice for choice, _ in selected]
        tokens = accumulate((value for _, value in selected), initial=1.0)
        next(tokens)  # of the root alone
        deepest = accumulate(map(len, choices), max)
        for drafted, (expected, levels) in enumerate(zip(tokens, deepest, strict=True), start=1):
            if callable(level_seconds):
                drafting = level_seconds(TreeShape.from_choices(choices[:drafted]))
            else:
                drafting = levels * level_seconds
            rate = expected / (pass_seconds(drafted + 1) + drafting)
            if (rate, -drafted) > (rate_of_best, 1 - best.num_nodes):
                rate_of_best, best = rate, TreeShape.from_choices(choices[:drafted])
    return best


def _check(acceptance: Acceptance) -> None:
    if not acceptance or not all(acceptance):
        widths = [len(row) for row in acceptance]
        raise ConfigError(f"acceptance table with rows of {widths}. Expected at least one entry at every depth.")
    for depth, row in enumerate(acceptance):
        for rank, probability in enumerate(row):
            if not 0.0 <= probability <= 1.0:
                raise ConfigError(
                    f"acceptance of candidate {rank} at depth {depth + 1} is {probability}. Expected a probability: "
                    "hits by the number of times its parent was right."
                )
