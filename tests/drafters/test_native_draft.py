"""Draft trees of a native draft model: one call gives what a pass for each level gives, and leaves the same cache."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from drafting_contexts import attached, context
from end_to_end.tiny_llms import FLOORS, GAPPED_CHOICES, MEDUSA_CHOICES, WIDTHS, draft_model, noisy, target
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import PassError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.native import NativeDecoder
from foretoken.drafters.base import DraftContext
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.drafters.native.trees import draft_trees
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion
from tests.tree_checks import assert_same_tree, check_tree

pytestmark = pytest.mark.native

TEXTS = [[5, 6, 7], [9], [20, 21, 22, 23], [30, 31]]
REQUESTS = {
    "sampled": (SamplingParams(temperature=0.7, seed=1), False),
    "coupled": (SamplingParams(temperature=0.9, seed=3), True),
    "greedy": (SamplingParams(temperature=0.0), False),
}
MIXES = {
    **{kind: [kind] * 2 for kind in REQUESTS},
    "alone": ["coupled"],
    "mixed": ["sampled", "greedy", "coupled", "sampled"],
}
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "floors": {},
    "tree": {"tree": "tree"},
    "choices": {"tree": MEDUSA_CHOICES},
    "gapped choices": {"tree": GAPPED_CHOICES},
    "widths": {"tree": WIDTHS},
    "greedy drafts": {"tree": WIDTHS, "draft_sample_method": "greedy"},
    "one level": {"tree": [[0], [1], [2]]},
    "some tokens": {"tree": WIDTHS, "draft_vocab_size": 24},
    "some tokens, dynamic": {"tree": "dynamic", "num_speculative_tokens": 3, "draft_vocab_size": 30},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 4, "max_nodes": 12},
    "one dynamic level": {"tree": "dynamic", "num_speculative_tokens": 1, "max_nodes": 5},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def drafter(module: Any, dtype: torch.dtype, *, by_levels: bool = False, **options: Any) -> DraftModelDrafter:
    """One on the native decoder that drafts in one call, or by levels."""
    made = attached(draft_model(module, **options)(), dtype=dtype, runner="lean-native")
    assert isinstance(made, DraftModelDrafter)
    assert isinstance(made._runner.decoder, NativeDecoder)
    if by_levels:
        propose = made.propose

        def proposed(asked: DraftContext) -> TokenTree:
            with mock.patch("foretoken.drafters.levels.draft_trees", return_value=False):
                return propose(asked)

        made.propose = proposed  # type: ignore[method-assign]
    return made


def assert_same_rows(ours: DraftModelDrafter, theirs: DraftModelDrafter, lengths: list[int]) -> None:
    """Of the KV caches, bit for bit, where they hold committed tokens: only one call feeds nodes without children."""
    for name in ("keys", "values"):
        for mine, other in zip(getattr(ours._runner.cache, name), getattr(theirs._runner.cache, name), strict=True):
            for slot, length in enumerate(lengths):
                assert torch.equal(mine[slot, :, :length], other[slot, :, :length])


@pytest.mark.parametrize(("shape", "mix", "dtype"), slow_products(list(SHAPES), list(MIXES), list(DTYPES)))
def test_one_call_drafts_what_a_pass_for_each_level_drafts(shape: str, mix: str, dtype: str) -> None:
    """Over rounds with accepted nodes, thrown-away proposals, and sequences without room."""
    module = noisy(dtype=DTYPES[dtype])
    both = [drafter(module, DTYPES[dtype], by_levels=by, **SHAPES[shape]) for by in (False, True)]
    params, is_coupled = zip(*(REQUESTS[kind] for kind in MIXES[mix]), strict=True)
    texts = [list(text) for text in TEXTS[: len(params)]]
    for max_depth in (8, 8, [2, 0, 8, 1], 3):
        depth = max_depth if isinstance(max_depth, int) else max_depth[: len(texts)]
        asked = context(texts, max_depth=depth, params=params, is_coupled=is_coupled)
        ours, theirs = (made.propose(asked) for made in both)
        assert_same_tree(ours, theirs, 1e-5)
        depths = [depth] * len(texts) if isinstance(depth, int) else depth
        assert_same_rows(*both, [len(text) if room else 0 for text, room in zip(texts, depths, strict=True)])
        for row, text in enumerate(texts):
            text += [*ours.tokens[row, 1 : 2 + row % 2].tolist(), 11 + row]


RECURRENT_SHAPES = ("floors", "choices", "widths", "greedy drafts", "some tokens", "dynamic", "one dynamic level")


@pytest.mark.parametrize(
    ("shape", "architecture", "mix", "dtype"),
    slow_products(list(RECURRENT_SHAPES), ["qwen3_5", "lfm2", "falcon_h1"], list(MIXES), list(DTYPES), each=1),
)
def test_recurrent_layers(shape: str, architecture: str, mix: str, dtype: str) -> None:
    """Prompts, accepted paths, chains that end early, discarded proposals; committed states are those of the texts."""
    module = noisy(architecture, dtype=DTYPES[dtype])
    both = [drafter(module, DTYPES[dtype], by_levels=by, **SHAPES[shape]) for by in (False, True)]
    params, is_coupled = zip(*(REQUESTS[kind] for kind in MIXES[mix]), strict=True)
    texts = [list(text) for text in TEXTS[: len(params)]]
    for turn in range(6):
        depth = [[8, 2, 0, 1], [8] * 4][turn % 2][: len(texts)]
        asked = context(texts, max_depth=depth, params=params, is_coupled=is_coupled)
        if shape == "floors" and turn % 3 != 2:
            asked = replace(asked, floors=FLOORS)
        drafted, again = (made.propose(asked) for made in both)
        assert_same_tree(drafted, again, 1e-5)
        assert_same_rows(*both, [len(text) if room else 0 for text, room in zip(texts, depth, strict=True)])
        for row, (tree, text) in enumerate(zip(drafted.rows(), texts, strict=True)):
            if turn not in (2, 5):  # else the proposal is discarded
                path = longest_path(tree)[: 1 + row % 2 + turn // 2]
                text += [*(tree.tokens[node] for node in path), *[11 + row] * (4 if turn == 3 else 1)]
    fresh = drafter(module, DTYPES[dtype], **SHAPES[shape])
    for row, text in enumerate(texts):
        fresh._runner.prefill(row, text, 0)
        work = Pass.of_chains([[9, 5]], slots=[row], prefix_lens=[len(text)], has_last_logits=True)
        read, ours, theirs = (made._runner.run(work).logits for made in (fresh, *both))
        assert torch.equal(ours, theirs)
        is_drafted = read.isfinite() & ours.isfinite()  # a part of the LM head depends on the tokens that were seen
        assert is_drafted.sum() > 10
        assert torch.equal(ours[is_drafted], read[is_drafted])


def longest_path(tree: TreeRow) -> list[int]:
    """Nodes from below the root to the first of the deepest ones."""
    paths: list[list[int]] = [[]]
    for node, parent in enumerate(tree.parents[1:], start=1):
        paths.append([*paths[parent], node])
    return max(paths, key=len)


@pytest.mark.parametrize(("mix", "dtype"), slow_products(list(MIXES), list(DTYPES)))
def test_chains_end_where_their_path_is_improbable(mix: str, dtype: str) -> None:
    """In one call and by levels, each sequence at its own depth; over rounds with accepted nodes.

    Where nothing is drawn, the second candidates stand beside the first four tokens, and chains are shorter by as many.
    """
    module = noisy(dtype=DTYPES[dtype])
    both = [drafter(module, DTYPES[dtype], by_levels=by) for by in (False, True)]
    params, is_coupled = zip(*(REQUESTS[kind] for kind in MIXES[mix]), strict=True)
    texts, depths = [list(text) for text in TEXTS[: len(params)]], set[int]()
    num_beside = 0 if "sampled" in MIXES[mix] else 4
    for turn, max_depth in enumerate((16, 16, [2, 0, 8, 1], 16, 3)):
        depth = max_depth if isinstance(max_depth, int) else max_depth[: len(texts)]
        asked = replace(context(texts, max_depth=depth, params=params, is_coupled=is_coupled), floors=FLOORS)
        ours, theirs = (made.propose(asked) for made in both)
        assert_same_tree(ours, theirs, 1e-5)
        assert ours.max_depth == max(ours.depths.amax(1).tolist())
        for row, text in enumerate(texts):
            of_nodes = ours.depths[row, : int(ours.num_nodes[row])].tolist()
            path, count = 0.0, max(of_nodes)
            firsts = [of_nodes.index(d) for d in range(count + 1)]
            assert len(of_nodes) == 1 + count + min(count, num_beside)
            for d in range(1, count + 1):
                gain = ours.scores[row, firsts[d]] - ours.scores[row, firsts[d - 1]]
                path += float(FLOORS.log_estimates(gain.clamp_max(-1.2340e-4), d))
                assert d == count or path >= FLOORS.floors[d - 1] - 1e-4
            room = depth if isinstance(depth, int) else depth[row]
            assert count in (0, min(room, 16 - num_beside)) or path < FLOORS.floors[count - 1] + 1e-4
            depths.add(count)
            followed = [int(ours.tokens[row, node]) for node in firsts[1 : 1 + turn]]
            if turn == 1 and num_beside and count:
                followed = [int(ours.tokens[row, 2])]
            text += [*followed, 11 + row]
        assert_same_rows(*both, [0 for _ in texts])
    assert len(depths) >= 3


@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE - 7, VOCAB_SIZE + 13])
@pytest.mark.parametrize("kind", REQUESTS)
def test_other_vocabularies_and_the_end_of_the_context(kind: str, vocab_size: int) -> None:
    """Tokens that the draft model lacks are fed as its last one; past its context it drafts for neighbours alone."""
    module = tiny_model("llama", seed=1, vocab_size=vocab_size, max_position_embeddings=24)
    both = [drafter(module, torch.float32, by_levels=by, tree=WIDTHS) for by in (False, True)]
    assert both[0]._runner.context_len == 24
    params, is_coupled = REQUESTS[kind]
    texts = [[5, VOCAB_SIZE - 1, 6], [7] * 23, [8] * 21]
    asked = context(texts, params=[params] * 3, is_coupled=[is_coupled] * 3)
    ours, theirs = (made.propose(asked) for made in both)
    assert ours.num_nodes.tolist() == [16, 4, 16]
    assert_same_tree(ours, theirs, 1e-5)
    assert_same_rows(*both, [len(text) for text in texts])


@pytest.mark.parametrize("size", ["all", 20])
@pytest.mark.parametrize("architecture", ["gemma2", "qwen3_moe", "mistral"])
def test_other_architectures(architecture: str, size: int | str) -> None:
    """Capped logits, norms after blocks, experts, sliding windows."""
    module = tiny_model(architecture, seed=1)
    both = [drafter(module, torch.float32, by_levels=by, tree="tree", draft_vocab_size=size) for by in (False, True)]
    texts = [list(range(3, 25)), [9]]
    params, is_coupled = zip(*(REQUESTS[kind] for kind in ("sampled", "coupled")), strict=True)
    asked = context(texts, params=params, is_coupled=is_coupled)
    ours, theirs = (made.propose(asked) for made in both)
    assert_same_tree(ours, theirs, 1e-5)
    assert_same_rows(*both, [len(text) for text in texts])


def test_truncated_requests_are_drafted_by_levels(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drafter(noisy(dtype=torch.float32), torch.float32, num_speculative_tokens=3)
    passes: list[Pass] = []
    run = made._runner.run
    monkeypatch.setattr(made._runner, "run", lambda work: passes.append(work) or run(work))
    made.propose(context([[5]], params=[SamplingParams(seed=1)]))
    assert not passes
    made.propose(context([[5, 6]], params=[SamplingParams(seed=1, top_p=0.9)]))
    assert len(passes) == 3


def test_weights_that_are_no_numbers_draft_valid_tokens() -> None:
    module = tiny_model("llama", seed=1)
    made = drafter(module, torch.float32, tree=WIDTHS, quantization="none")  # which reads what is set below
    with torch.no_grad():
        module.lm_head.weight[3] = float("nan")
    params, is_coupled = zip(*REQUESTS.values(), strict=True)
    tree = made.propose(context(TEXTS[:3], params=params, is_coupled=is_coupled))
    assert ((tree.tokens >= 0) & (tree.tokens < VOCAB_SIZE)).all()
    assert tree.distributions is not None
    assert not tree.distributions.kinds.any()
    check_tree(tree)


@pytest.mark.parametrize(("shape", "dtype"), slow_products(["chain", "tree", "gapped choices"], list(DTYPES), each=1))
def test_text_is_plain_decodings(shape: str, dtype: str) -> None:
    """Three sequences at a time, greedy and seeded, with a draft model that is often right."""
    module = target(dtype=DTYPES[dtype])
    params = [
        SamplingParams(temperature=t, seed=s, max_tokens=18 + s, ignore_eos=True) for s, t in enumerate((0.0, 0.8) * 2)
    ]
    prompts = [[5, 6], [7], [8, 9, 10], [4]]
    plain = LLM(module, runner="lean-native", max_num_seqs=3).generate(prompts, params)
    made = draft_model(noisy(dtype=DTYPES[dtype]), **SHAPES[shape])
    engine = LLM(module, drafter=made, trust_drafter=True, runner="lean-native", max_num_seqs=3)
    outputs = engine.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert sum(o.metrics.num_accepted for o in outputs) > 10
    assert all(o.metrics.draft_errors == 0 for o in outputs)


def native(num_slots: int = 2, architecture: str = "llama") -> Runner:
    """A draft model with room for a chain of four."""
    model = wrap_model(tiny_model(architecture, seed=1), name="tiny")
    return Runner(model, num_slots=num_slots, context_len=40, max_nodes=5, runner="lean-native")


def expansion(shape: TreeShape, count: int = 2) -> TreeExpansion:
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=s) for s in range(count)], VOCAB_SIZE)
    draws = DraftDraws.build(batch, [False] * count, torch.full((count,), 2))
    return TreeExpansion(shape, torch.full((count,), 7), draws)


def chains(**changes: Any) -> Pass:
    given: dict[str, Any] = {"slots": [0, 1], "prefix_lens": [0, 0], "has_last_logits": True}
    return Pass.of_chains([[5, 6, 7]] * 2, **{**given, **changes})


@pytest.mark.parametrize(
    ("work", "tree"),
    [
        (chains(slots=[0, 2]), expansion(TreeShape.chain(4))),
        (chains(prefix_lens=[0, -1]), expansion(TreeShape.chain(4))),
        (chains(prefix_lens=[0, 40]), expansion(TreeShape.chain(4))),
        (chains(has_last_logits=False), expansion(TreeShape.chain(4))),
        (chains(), expansion(TreeShape.chain(60))),
        (chains(), expansion(TreeShape.chain(4), 1)),
        (chains(), expansion(TreeShape.chain(4), 3)),
        (chains(), expansion(TreeShape(()))),
        (chains(), expansion(TreeShape(((0,), (0, 0), (1,))))),
    ],
    ids=["slot", "prefix", "no room", "no logits", "deep", "fewer", "more", "nothing", "unordered"],
)
def test_drafts_that_do_not_fit_are_refused(work: Pass, tree: TreeExpansion) -> None:
    made = native()
    before = [layer.clone() for layer in made.cache.keys]
    with pytest.raises(PassError, match=r"Expected|needs"):
        draft_trees(made, work, tree, vocab_size=VOCAB_SIZE)
    assert all(torch.equal(a, b) for a, b in zip(before, made.cache.keys, strict=True))
    assert not tree.tokens[:, 1:].any()
    assert draft_trees(made, chains(), expansion(TreeShape.chain(4)), vocab_size=VOCAB_SIZE)


@pytest.mark.parametrize("changes", [{"parents": torch.tensor([-1, 0, 0] * 2)}, {"num_earlier": [0, 0]}])
def test_recurrent_drafts_begin_behind_chains(changes: dict[str, Any]) -> None:
    """Where the pass before the draft is a tree, or a level of one, the draft is refused and no state changes."""
    made, tree = native(architecture="qwen3_5"), expansion(TreeShape.chain(4))
    with pytest.raises(PassError, match="Expected"):
        draft_trees(made, replace(chains(), **changes), tree, vocab_size=VOCAB_SIZE)
    assert made.cache.states is not None
    assert made.cache.states.reusable(0, 3) == 0
    assert draft_trees(made, chains(), tree, vocab_size=VOCAB_SIZE)
    assert made.cache.states.reusable(0, 3) == 3
