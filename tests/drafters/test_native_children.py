"""Children that the native kernels choose: those of `Expansion.grow`, for every kind of draw and shape."""

import subprocess
from ctypes import CDLL, byref, c_int64, c_void_p
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from limits import threads
from torch import Tensor

from foretoken.core.errors import PassError
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.decoder import library
from foretoken.decoder.arguments import Status
from foretoken.drafters.native.trees import NativeDraft, can_draft
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import DynamicExpansion, DynamicShape
from foretoken.trees.expansion import TreeExpansion
from tests.tree_checks import check_tree

pytestmark = pytest.mark.native

POSITION = 9
DISTRIBUTION = torch.tensor([0.4, 0.3, 0.2, 0.1])
KINDS = {"greedy": (0.0, False), "coupled": (0.8, True), "sampled": (1.3, False)}


def draws(kinds: list[str], vocab_size: int) -> DraftDraws:
    """One request of each kind."""
    requests = [
        SamplingRequest(params=SamplingParams(temperature=KINDS[kind][0]), seed=seed - 3)
        for seed, kind in enumerate(kinds)
    ]
    batch = SamplingBatch.build(requests, vocab_size)
    return DraftDraws.build(batch, [KINDS[kind][1] for kind in kinds], POSITION + torch.arange(len(kinds)))


@cache
def children_library() -> CDLL:
    """The kernels' choice of children as a library of its own: its callers in the package bring logits of their own."""
    source = Path(__file__).with_name("children.cpp")
    with TemporaryDirectory() as directory:
        made = Path(directory) / "children.so"
        flags = [*library._flags(library._fitting_processors()[0]), f"-I{library._KERNELS}", f"-I{library._DRAFTS}"]
        subprocess.run([*library._compiler(), *flags, "-w", source, "-o", made], check=True)
        loaded = CDLL(str(made))
    loaded.children_bytes.restype = loaded.choose_children.restype = c_int64
    return loaded


def choose_children(draft: NativeDraft, depth: int, logits: Tensor, *, is_shared: bool = False) -> None:
    """Calls the kernel for the parents of one depth, which drafts of heads call for every level.

    logits: (B, P, W) float32, after each parent, or (B, 1, W) with `is_shared`; changed for dynamic trees.
    """
    assert logits.dtype is torch.float32
    assert logits.is_contiguous()
    kernels, arguments, width = children_library(), draft.arguments, c_int64(logits.shape[-1])
    space = torch.empty(kernels.children_bytes(byref(arguments), width), dtype=torch.uint8)
    status = kernels.choose_children(
        byref(arguments), c_int64(depth), c_void_p(logits.data_ptr()), width, c_int64(is_shared), c_int64(2),
        c_void_p(space.data_ptr()),
    )  # fmt: skip
    if status:
        raise PassError(f"the draft does not fit: {Status(status).name}.")


def expanded(
    shape: TreeShape, chosen: DraftDraws, logits: list[Tensor], *, is_native: bool, vocab_size: int, is_shared: bool
) -> TokenTree:
    """The tree of given logits: (B, P, W) for each depth."""
    count = logits[0].shape[0]
    expansion = TreeExpansion(shape, torch.full((count,), 7), chosen)
    if is_native:
        assert can_draft(expansion, vocab_size)
        draft = NativeDraft(expansion, vocab_size, is_shared=is_shared)
        for depth in range(shape.depth):
            choose_children(draft, depth, logits[depth], is_shared=is_shared)
    else:
        for depth in range(shape.depth):
            padded = torch.full((*logits[depth].shape[:2], vocab_size), float("-inf"))
            width = min(vocab_size, logits[depth].shape[2])
            padded[..., :width] = logits[depth][..., :width]
            expansion.grow(depth, padded)
    return expansion.finish(range(count), [shape.depth] * count, [7] * count)


def both(
    shape: TreeShape, kinds: list[str], logits: list[Tensor], vocab_size: int, *, is_shared: bool
) -> list[TokenTree]:
    """The trees of the kernels and of torch."""
    return [
        expanded(
            shape, draws(kinds, vocab_size), logits, is_native=is_native, vocab_size=vocab_size, is_shared=is_shared
        )
        for is_native in (True, False)
    ]


def logits_for(shape: TreeShape, batch: int, width: int, *, is_shared: bool, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inner = sorted(set(shape.parents) - {-1})
    rows = [1 if is_shared else sum(shape.depths[node] == depth for node in inner) for depth in range(shape.depth)]
    return [4 * torch.randn(batch, count, width, generator=generator) for count in rows]


def assert_same(ours: TokenTree, theirs: TokenTree) -> None:
    """The same tokens and kinds; scores and stated distributions up to rounding."""
    check_tree(ours)
    assert ours.scores is not None
    assert theirs.scores is not None
    assert torch.equal(ours.tokens, theirs.tokens)
    torch.testing.assert_close(ours.scores, theirs.scores, rtol=2e-6, atol=2e-5)
    assert (ours.distributions is None) == (theirs.distributions is None)
    if ours.distributions is not None and theirs.distributions is not None:
        assert torch.equal(ours.distributions.kinds, theirs.distributions.kinds)
        assert torch.equal(ours.distributions.row_of, theirs.distributions.row_of)
        torch.testing.assert_close(ours.distributions.rows, theirs.distributions.rows, rtol=1e-5, atol=1e-7)


@st.composite
def shapes(draw: st.DrawFn) -> TreeShape:
    """Shapes of a few levels, with gaps among the ranks."""
    level: list[tuple[int, ...]] = [()]
    choices: list[tuple[int, ...]] = []
    for _ in range(draw(st.integers(1, 4))):
        level = [(*choice, rank) for choice in level for rank in sorted(draw(st.sets(st.integers(0, 6), max_size=3)))]
        choices += level
        level = level[: draw(st.integers(1, 4))]
    return TreeShape.from_choices(choices or [(0,)])


@settings(max_examples=60, deadline=None)
@given(
    shape=shapes(), kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    vocab_size=st.sampled_from([7, 16, 33, 700, 1111]), narrower=st.integers(-9, 9), is_shared=st.booleans(),
    seed=st.integers(0, 99), num_threads=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_children_are_those_of_the_torch_path(
    shape: TreeShape, kinds: list[str], vocab_size: int, narrower: int, is_shared: bool, seed: int, num_threads: int
) -> None:
    """Any shape, batch, mix of draws and width of the logits; one row a node or one a level."""
    width = max(7, vocab_size - narrower)
    logits = logits_for(shape, len(kinds), width, is_shared=is_shared, seed=seed)
    with threads(num_threads):
        assert_same(*both(shape, kinds, logits, vocab_size, is_shared=is_shared))


def dynamic_tree(
    shape: DynamicShape, chosen: DraftDraws, logits: list[Tensor], room: list[int], *, is_native: bool
) -> TokenTree:
    """The dynamic tree of given logits: (B, P, V) for each depth."""
    expansion = DynamicExpansion(shape, torch.full((len(room),), 7), chosen)
    if is_native:
        assert can_draft(expansion, logits[0].shape[2])
        draft = NativeDraft(expansion, logits[0].shape[2])
        for depth, level in enumerate(logits):
            choose_children(draft, depth, level.clone())
    else:
        for depth, level in enumerate(logits):
            expansion.grow(depth, level)
    return expansion.finish(range(len(room)), room, [7] * len(room))


def assert_same_nodes(ours: TokenTree, theirs: TokenTree) -> None:
    assert_same(ours, theirs)
    for name in ("parents", "depths", "num_nodes"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name))


@settings(max_examples=60, deadline=None)
@given(
    size=st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(2, 40)),
    kinds=st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=4),
    vocab_size=st.sampled_from([7, 16, 33, 700, 1111]), shallow=st.integers(0, 4), seed=st.integers(0, 99),
    num_threads=st.sampled_from([1, 2, 3]),
)  # fmt: skip
def test_dynamic_trees_are_those_of_the_torch_path(
    size: tuple[int, int, int], kinds: list[str], vocab_size: int, shallow: int, seed: int, num_threads: int
) -> None:
    """Any bounds, batch, mix of draws and width of the logits; the first sequence may have less room."""
    shape = DynamicShape(top_k=size[0], depth=size[1], max_nodes=size[2])
    generator = torch.Generator().manual_seed(seed)
    logits = [
        4 * torch.randn(len(kinds), 1 if depth == 0 else shape.top_k, vocab_size, generator=generator)
        for depth in range(shape.depth)
    ]
    room = [shallow, *[shape.depth] * (len(kinds) - 1)]
    with threads(num_threads):
        ours, theirs = (
            dynamic_tree(shape, draws(kinds, vocab_size), logits, room, is_native=is_native)
            for is_native in (True, False)
        )
    assert_same_nodes(ours, theirs)


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_dynamic_trees_leave_impossible_candidates_out(kind: str, odd: float) -> None:
    """Where a node's logits are no numbers it has no children; tokens without a chance are nobody's."""
    shape = DynamicShape(top_k=3, depth=2, max_nodes=13)
    generator = torch.Generator().manual_seed(1)
    logits = [torch.randn(2, 1, 40, generator=generator), torch.randn(2, 3, 40, generator=generator)]
    logits[1][1, 0, 30] = odd
    logits[1][0, :, 2:] = float("-inf")
    ours, theirs = (
        dynamic_tree(shape, draws([kind] * 2, 40), logits, [2, 2], is_native=is_native) for is_native in (True, False)
    )
    assert_same_nodes(ours, theirs)
    assert ours.num_nodes.tolist() == [1 + 3 + 6, 1 + 3 + (9 if odd == float("-inf") else 6)]


def test_dynamic_drafts_that_do_not_fit_are_refused() -> None:
    expansion = DynamicExpansion(DynamicShape(top_k=2, depth=2, max_nodes=5), torch.tensor([7]), draws(["greedy"], 9))
    logits = torch.zeros(1, 1, 9)
    draft = NativeDraft(expansion, 9)
    with pytest.raises(PassError, match="SHAPE"):
        choose_children(draft, 0, logits, is_shared=True)
    draft.arguments.path_scores = None
    with pytest.raises(PassError, match="MISSING"):
        choose_children(draft, 0, logits)
    draft = NativeDraft(expansion, 9)
    narrowing = torch.tensor([-1, 0, 0, 1, 1])
    draft.arguments.parents = narrowing.data_ptr()
    with pytest.raises(PassError, match="SHAPE"):
        choose_children(draft, 0, logits)
    wide = DynamicExpansion(DynamicShape(top_k=10, depth=2, max_nodes=5), torch.tensor([7]), draws(["greedy"], 9))
    assert not can_draft(wide, 9)


@pytest.mark.parametrize("kind", KINDS)
def test_one_row_of_logits_for_more_nodes_than_levels(kind: str) -> None:
    """There are as many stated distributions as levels then, fewer than nodes with children."""
    shape = TreeShape.cartesian((3, 2, 2))
    logits = logits_for(shape, 2, 33, is_shared=True)
    assert_same(*both(shape, [kind] * 2, logits, 33, is_shared=True))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_change_no_bit(kind: str) -> None:
    shape = TreeShape.cartesian((3, 2))
    logits = logits_for(shape, 2, 5000, is_shared=False)
    trees = []
    for count in (1, 2, 5):
        with threads(count):
            trees.append(
                expanded(shape, draws([kind] * 2, 5000), logits, is_native=True, vocab_size=5000, is_shared=False)
            )
    for other in trees[1:]:
        assert torch.equal(trees[0].tokens, other.tokens)
        assert torch.equal(trees[0].scores, other.scores)  # type: ignore[arg-type]
        if trees[0].distributions is not None and other.distributions is not None:
            assert torch.equal(trees[0].distributions.rows, other.distributions.rows)


def test_equal_logits_are_taken_from_the_lowest_token_on() -> None:
    """Also across the parts of a row that threads share."""
    logits = torch.zeros(1, 1, 3000)
    logits[..., 2500:] = 1.0
    logits[..., 100] = 1.0
    shape = TreeShape.cartesian((4,))
    tree = expanded(shape, draws(["greedy"], 3000), [logits], is_native=True, vocab_size=3000, is_shared=False)
    assert tree.tokens.tolist() == [[7, 100, 2500, 2501, 2502]]


@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_that_are_no_numbers_draw_nothing(kind: str, odd: float) -> None:
    """Their children count as one-hot, which is true of any token; those of other nodes are drawn as ever."""
    shape = TreeShape.cartesian((2, 2))
    logits = logits_for(shape, 1, 1300, is_shared=False)
    logits[1][0, 1, 1200] = odd
    tree = expanded(shape, draws([kind], 1300), logits, is_native=True, vocab_size=1300, is_shared=False)
    assert ((tree.tokens >= 0) & (tree.tokens < 1300)).all()
    assert len(set(tree.tokens[0, 5:].tolist())) == 2
    if kind == "sampled":
        assert tree.distributions is not None
        assert tree.distributions.kinds[0].tolist() == [0, 2, 2, 2, 2, 0, 0]
        assert tree.distributions.row_of[0].tolist() == [-1, 0, 0, 1, 1, -1, -1]


def test_children_past_the_support_are_choices() -> None:
    """Below a node with two possible tokens the third child is a choice; so is one whose probability underflows."""
    shape = TreeShape.cartesian((3,))
    for logits in (torch.tensor([0.0, 0.5, 0.5, 0.0]).log(), torch.tensor([0.0, 0.0, -150.0, -150.0])):
        tree = expanded(
            shape, draws(["sampled"], 4), [logits.view(1, 1, 4)], is_native=True, vocab_size=4, is_shared=False
        )
        check_tree(tree)
        assert tree.distributions is not None
        assert tree.distributions.kinds[0].tolist() == [0, 2, 2, 0]
        assert len(set(tree.tokens[0, 1:].tolist())) == 3


def test_stated_probabilities_are_zero_or_normal_numbers() -> None:
    """Two tokens lead, so exp(-86.9) / 2 is subnormal: 0 is stated, and the token is a choice where it was drawn."""
    logits = torch.tensor([0.0, 0.0, -86.5, -86.9, -86.95])
    many, shape = 200, TreeShape.cartesian((5,))
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=seed) for seed in range(many)], 5)
    chosen = DraftDraws.build(batch, [False] * many, torch.full((many,), POSITION))
    for is_native in (True, False):
        tree = expanded(
            shape, chosen, [logits.expand(many, 1, 5).contiguous()], is_native=is_native, vocab_size=5, is_shared=False
        )
        assert tree.distributions is not None
        row = tree.distributions.rows[0, 0]
        assert row.gt(0).tolist() == [True, True, True, False, False]
        assert row[2] >= torch.finfo(torch.float32).tiny
        assert torch.equal(tree.distributions.kinds[:, 1:] != DrawKind.ONE_HOT, row[tree.tokens[:, 1:]] > 0)


def test_sampled_children_have_the_distribution_they_are_said_to_have() -> None:
    """The first from DISTRIBUTION, the second from it without the first, and an only child from it."""
    many, shape = 20_000, TreeShape.cartesian((2, 1))
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=seed) for seed in range(many)], 4)
    chosen = DraftDraws.build(batch, [False] * many, torch.full((many,), POSITION))
    logits = [DISTRIBUTION.log().expand(many, count, 4).contiguous() for count in (1, 2)]
    tree = expanded(shape, chosen, logits, is_native=True, vocab_size=4, is_shared=False)
    check_tree(tree)
    assert tree.distributions is not None
    assert (tree.distributions.kinds[:, 1:3] == DrawKind.WITHOUT_REPLACEMENT).all()
    assert (tree.distributions.kinds[:, 3:] == DrawKind.INDEPENDENT).all()
    torch.testing.assert_close(tree.distributions.rows, DISTRIBUTION.expand_as(tree.distributions.rows))
    first, second, below = tree.tokens[:, 1], tree.tokens[:, 2], tree.tokens[:, 3]
    ordered = DISTRIBUTION[:, None] * DISTRIBUTION / (1 - DISTRIBUTION[:, None])
    is_pair = ~torch.eye(4, dtype=torch.bool)
    assert_is_distribution((first * 4 + second).bincount(minlength=16)[is_pair.flatten()], ordered[is_pair])
    assert_is_distribution((first * 4 + below).bincount(minlength=16), (DISTRIBUTION[:, None] * DISTRIBUTION).flatten())


def assert_is_distribution(counts: Tensor, distribution: Tensor) -> None:
    """Chi-square at level 1e-6, for fixed seeds."""
    expected = distribution.double() * counts.sum()
    statistic = ((counts - expected) ** 2 / expected).sum()
    degrees = torch.tensor((len(distribution) - 1) / 2, dtype=torch.float64)
    assert torch.special.gammaincc(degrees, statistic / 2) > 1e-6


def test_drafts_that_do_not_fit_are_refused() -> None:
    shape = TreeShape.cartesian((2, 1))
    expansion = TreeExpansion(shape, torch.tensor([7]), draws(["greedy"], 9))
    draft, logits = NativeDraft(expansion, 9), torch.zeros(1, 1, 9)
    with pytest.raises(PassError, match="does not fit"):
        choose_children(draft, 0, torch.zeros(1, 1, 1))
    for depth in (-1, 2):
        with pytest.raises(PassError, match="does not fit"):
            choose_children(draft, depth, logits)
    unordered = torch.tensor([-1, 0, 1, 0, 2])
    draft.arguments.parents = unordered.data_ptr()
    with pytest.raises(PassError, match="does not fit"):
        choose_children(draft, 0, logits)
    assert expansion.tokens.tolist() == [[7, 0, 0, 0, 0]]


def test_truncated_draws_are_left_to_torch() -> None:
    for params in (SamplingParams(top_k=3), SamplingParams(top_p=0.5), SamplingParams(min_p=0.1)):
        batch = SamplingBatch.build([SamplingRequest(params=params, seed=1)], 9)
        chosen = DraftDraws.build(batch, [False], torch.tensor([3]))
        assert not can_draft(TreeExpansion(TreeShape.chain(1), torch.tensor([7]), chosen), 9)
    few = TreeExpansion(TreeShape.from_choices([[9]]), torch.tensor([7]), draws(["greedy"], 9))
    assert not can_draft(few, 9)
