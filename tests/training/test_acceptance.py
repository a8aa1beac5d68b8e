"""The trees that an acceptance table gives, against all trees."""

from __future__ import annotations

from itertools import combinations, product

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.training.evaluation import tuned_tree
from foretoken.trees.choices import TreeShape


def test_the_tree_of_a_table_is_the_best_of_all_trees() -> None:
    table = [[0.6, 0.2, 0.05], [0.5, 0.3, 0.0], [0.4, 0.1, 0.0]]
    every = [choice for length in (1, 2, 3) for choice in product(range(3), repeat=length)]

    def expected(choices: tuple[tuple[int, ...], ...]) -> float:
        values = (torch.tensor([table[d][rank] for d, rank in enumerate(choice)]).prod().item() for choice in choices)
        return 1.0 + sum(values)

    def is_tree(choices: tuple[tuple[int, ...], ...]) -> bool:
        return all(len(choice) == 1 or choice[:-1] in choices for choice in choices)

    tuned = tuned_tree(table, max_nodes=5, sizes=(2, 3, 4))
    for size in (2, 3, 4, 5):
        best = max(expected(choices) for choices in combinations(every, size - 1) if is_tree(choices))
        assert tuned.tokens_by_nodes[size] == pytest.approx(best)
    assert expected(tuned.shape.choices) == pytest.approx(tuned.tokens_by_nodes[5])
    assert TreeShape.parse([list(choice) for choice in tuned.shape.choices]) == tuned.shape


def test_candidates_that_were_never_right_are_no_nodes() -> None:
    assert tuned_tree([[0.5, 0.0]], max_nodes=9).shape == TreeShape.chain(1)
    with pytest.raises(ConfigError, match="no candidate was right even once"):
        tuned_tree([[0.0, 0.0]], max_nodes=9)
