"""Tree shapes as choices: which candidate ranks follow each other at each depth, independent of tokens.

A choice is a tuple of ranks in Medusa's notation: (0,) is the best candidate after the root, (0, 1) the second best
after it. A shape is a prefix-closed set of choices. Chains, static trees and Cartesian products are all shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from operator import mul
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import MAX_NODES

if TYPE_CHECKING:
    from collections.abc import Iterable

Choice = tuple[int, ...]

# What "tree" means for drafters that are language models. Best node first: any beginning of the list is a tree.
OF_LANGUAGE_MODELS: tuple[Choice, ...] = (
    (0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 0, 0), (2,), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0, 0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TreeShape:
    """A prefix-closed set of choices in level order, siblings by rank; node 0 is the root.

    Attributes:
        choices: One choice a drafted node, without the root.
    """

    choices: tuple[Choice, ...]

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> TreeShape:
        """A static tree in Medusa's notation.

        Raises:
            ConfigError: When a choice is empty, out of range, repeated or lacks its prefix, or there are too many.
        """
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
        """The best candidate at every depth."""
        return cls.from_choices((0,) * d for d in range(1, depth + 1))

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> TreeShape:
        """Every combination of the best `widths[d]` candidates at depth d + 1.

        Raises:
            ConfigError: When a width is below 1, or they give too many nodes.
        """
        if not widths or min(widths) < 1:
            raise ConfigError(f"tree widths {shown(widths)} are not valid. Expected at least one, each of at least 1.")
        num_nodes = 0
        for level in accumulate(widths, mul):
            num_nodes += level
            if num_nodes >= MAX_NODES:  # before any of them is made: there may be billions
                raise ConfigError(f"tree widths {shown(widths)} give too many nodes. Expected fewer than {MAX_NODES}.")
        return cls.from_choices(
            choice for d in range(1, len(widths) + 1) for choice in product(*(range(w) for w in widths[:d]))
        )

    @classmethod
    def parse(cls, value: Any) -> TreeShape:
        """A static tree as users write it.

        Args:
            value: Choices such as [[0], [1], [0, 0]], or {"widths": [3, 2, 1]}.

        Raises:
            ConfigError: When it is neither, a number is no integer, or the tree is none; see the functions above.
        """
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
        return max((len(choice) for choice in self.choices), default=0)

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

    def truncated(self, max_depth: int) -> TreeShape:
        """The shape without nodes deeper than `max_depth`."""
        return TreeShape(tuple(choice for choice in self.choices if len(choice) <= max_depth))


def _integers(value: Any, *, what: str) -> tuple[int, ...]:
    """A list of integers, nothing that could pass for one."""
    if isinstance(value, str) or not isinstance(value, Sequence) or any(type(number) is not int for number in value):
        raise ConfigError(f"{what} {shown(value)} is not valid. Expected a list of integers.")
    return tuple(value)
