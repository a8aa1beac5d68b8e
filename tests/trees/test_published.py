"""Published trees against numbers that follow from the lists as their authors lay them out in buffers.

The numbers were recorded from the original lists; here they are computed from paths alone, without `TreeShape`.
"""

import pytest

from foretoken.trees.choices import PUBLISHED, TreeShape

# Nodes of each depth, leaves, ones of the mask, sums of tree indices, positions and retrieve indices, first of their
# rows.
GOLDEN = {
    "mc_sim_7b_63": ([10, 28, 23, 2], 42, 207, 1029, 143, 2211, [0, 1, 11, 39, 63]),
    "vicuna_7b_stage2": ([10, 23, 23, 7], 42, 217, 1117, 153, 2320, [0, 1, 12, 43, 63]),
    "vicuna_7b_stage1_ablation": ([10, 21, 25, 7], 42, 219, 1142, 155, 2325, [0, 1, 12, 42, 63]),
    "vicuna_7b_stage1": ([10, 32, 20, 1], 44, 202, 976, 138, 2157, [0, 1, 11, 43, 63]),
    "vicuna_13b_stage2": ([10, 19, 25, 9], 42, 223, 1182, 159, 2360, [0, 2, 21, 49, 63]),
    "vicuna_13b_stage1": ([10, 29, 23, 1], 44, 205, 1015, 141, 2174, [0, 1, 11, 40, 63]),
    "vicuna_33b_stage2": ([10, 24, 24, 5], 43, 214, 1095, 150, 2287, [0, 1, 12, 45, 63]),
    "vicuna_33b_stage1": ([10, 34, 19], 46, 199, 957, 135, 2202, [0, 3, 29, 63]),
    "zephyr_stage2": ([10, 27, 23, 3], 44, 209, 1050, 145, 2224, [0, 1, 11, 39, 63]),
}
CANDIDATES_OF_A_HEAD = 10


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_numbers(name: str) -> None:
    paths = sorted(PUBLISHED[name], key=lambda path: (len(path), path))
    numbers = {(): 0} | {path: number for number, path in enumerate(paths, start=1)}
    deepest = max(map(len, paths))
    leaves = [path for path in reversed(paths) if not any(other[:-1] == path for other in paths)]
    # From the root to each leaf, -1 past its end.
    retrieve = [
        [numbers[leaf[:depth]] if depth <= len(leaf) else -1 for depth in range(deepest + 1)] for leaf in leaves
    ]
    found = (
        [sum(len(path) == depth for path in paths) for depth in range(1, deepest + 1)],
        len(leaves),
        sum(len(path) + 1 for path in paths) + 1,
        sum(CANDIDATES_OF_A_HEAD * (len(path) - 1) + path[-1] + 1 for path in paths),
        sum(map(len, paths)),
        sum(map(sum, retrieve)),
        retrieve[0],
    )
    assert found == GOLDEN[name]


def test_all_are_pinned() -> None:
    assert PUBLISHED.keys() == GOLDEN.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_beginning_is_a_tree(name: str) -> None:
    choices = PUBLISHED[name]
    for size in range(1, len(choices) + 1):
        assert TreeShape.from_choices(choices[:size]).num_nodes == size + 1
