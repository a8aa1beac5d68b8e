"""EAGLE and EAGLE-3 as drafters: their block's cache, what a path scores, failures, context limits, and refusals."""

import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from drafters.autoregressive_heads import KINDS, SHAPES, Texts, directory, drafter, poison, stored_rows, target
from drafters.drafting_contexts import accepted, context
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import QuantizedMatrix
from foretoken.drafters import head_features
from foretoken.drafters.heads import AutoregressiveDrafter
from foretoken.drafters.registry import drafter_options
from foretoken.formats import files
from foretoken.models.loading import wrap_model
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import DynamicShape
from tests.tree_checks import check_tree

GREEDY, SAMPLED = SamplingParams(temperature=0.0), SamplingParams(temperature=0.7)
SAME = {"rtol": 1e-4, "atol": 1e-4}  # float32, in another order than torch's


def words(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(VOCAB_SIZE) for _ in range(length)]


def paths(tree: TreeRow) -> list[list[int]]:
    """The nodes of every path from a child of the root to a leaf."""
    found = []
    for leaf in set(range(1, len(tree.tokens))) - set(tree.parents):
        path = [leaf]
        while tree.parents[path[0]] > 0:
            path.insert(0, tree.parents[path[0]])
        found.append(path)
    return found


def assert_scores(tree: TokenTree, row: int, texts: Texts, slot: int, temperature: float) -> None:
    """Along every path, the scores are those of the head's own steps from the last committed position."""
    assert tree.scores is not None
    of_row = tree.rows()[row]
    for path in paths(of_row):
        tokens = [of_row.tokens[node] for node in path]
        log_probs = texts.log_probs(slot, tokens, temperature)
        expected = log_probs[range(len(tokens)), tokens].cumsum(0)
        torch.testing.assert_close(tree.scores[row, path], expected, **SAME)


# What is accepted goes round, so that every kind and every shape meets all of it. Every second case is slow.
HISTORIES = [
    pytest.param(
        kind, shape, ("some", "everything", "nothing")[(i + j) % 3], marks=pytest.mark.slow if (i + j) % 2 else ()
    )
    for i, kind in enumerate(KINDS)
    for j, shape in enumerate(SHAPES)
]


def live_through(made: Any, texts: Texts, how: str, draw: random.Random, spoil: Callable[[Any], None]) -> Iterator[int]:
    """Ragged batches, proposals thrown away, iterations without one, slots begun anew, prompts of several chunks.

    Yields the slot of every sequence that was drafted for, whose scores are right. `spoil` writes NaN over all rows
    that are not committed.
    """
    slots, params = [4, 0, 2], [GREEDY, SAMPLED, GREEDY]
    for slot, length in zip(slots, (2, 3, 45), strict=True):
        texts.begin([made], slot, words(draw, length))
    for round_ in range(8):
        texts.commit([made], slots, most=30 if round_ == 0 else 10_000)  # a prompt may come in parts
        texts.commit([made], slots)
        spoil(made)
        held = [texts.texts[slot] for slot in slots]
        depth = [draw.choice([0, 1, 2, 8]) for _ in slots] if round_ % 3 else [8, 8, 8]
        if round_ % 4 == 1:
            made.propose(context(held, max_depth=[3, 0, 8], params=params, slots=slots))  # never verified
            spoil(made)
        if round_ % 4 == 3:  # the engine does not draft
            for slot in slots:
                texts.texts[slot] += words(draw, 2)
            continue
        tree = made.propose(context(held, max_depth=depth, params=params, slots=slots))
        check_tree(tree)
        for row, (slot, most) in enumerate(zip(slots, depth, strict=True)):
            assert int(tree.depths[row].max()) <= most
            if most:
                assert tree.num_nodes[row] > 1
                assert_scores(tree, row, texts, slot, params[row].temperature or 1.0)
                yield slot
        for row, slot in zip(tree.rows(), slots, strict=True):
            texts.texts[slot] += accepted(row, how, draw)
        if round_ == 4:
            made.release(slots[1])
            texts.begin([made], slots[1], words(draw, 50))


@pytest.mark.parametrize(("kind", "shape", "how"), HISTORIES)
def test_after_any_history_cache_and_drafts_are_those_of_the_text(kind: str, shape: str, how: str) -> None:
    made, texts, draw = drafter(kind, **SHAPES[shape]), Texts(kind), random.Random(f"{kind} {shape} {how}")
    with mock.patch.object(head_features, "CHUNK", 16):
        for slot in live_through(made, texts, how, draw, poison):
            length = len(texts.texts[slot]) - 1
            for ours, expected in zip(stored_rows(made, slot, length), texts.rows(slot), strict=True):
                torch.testing.assert_close(ours, expected, **SAME)


@pytest.mark.parametrize(("kind", "shape"), slow_products(list(KINDS), ["static", "dynamic"], each=1))
def test_rows_that_are_not_committed_are_never_read(kind: str, shape: str) -> None:
    """One drafter finds NaN there before everything it does, the other what it left; a slot's neighbour changes."""
    texts, draw, pair = Texts(kind), random.Random(1), [drafter(kind, **SHAPES[shape]) for _ in range(2)]
    for slot, length in enumerate((3, 40)):
        texts.begin(pair, slot, words(draw, length))
    for round_ in range(6):
        texts.commit(pair, [0, 1])
        poison(pair[0])
        slots = [[0, 1], [0], [1, 0]][round_ % 3]
        held = [texts.texts[slot] for slot in slots]
        ours, theirs = (made.propose(context(held, slots=slots)) for made in pair)
        assert torch.equal(ours.tokens, theirs.tokens)
        assert torch.equal(ours.parents, theirs.parents)
        assert ours.scores is not None and theirs.scores is not None  # noqa: PT018 - one condition
        assert torch.equal(ours.scores, theirs.scores)
        assert ours.scores.isfinite().all()
        for row, slot in zip(ours.rows(), slots, strict=True):
            texts.texts[slot] += accepted(row, "some", draw)
        if round_ == 3:
            texts.begin(pair, 0, words(draw, 2))


def test_control_one_committed_row_is_read() -> None:
    """The same poison one row further up shows."""
    texts, made = Texts("eagle"), drafter("eagle", **SHAPES["chain"])
    texts.begin([made], 0, [5, 6, 7, 8])
    texts.commit([made], [0])
    made.propose(context([texts.texts[0]]))
    made._stack.cache.poison(0, 2)
    tree = made.propose(context([texts.texts[0]]))
    assert tree.scores is not None
    assert tree.scores.isnan().any()


class FailingRun:
    """Makes a drafter's block raise in one of its next passes."""

    def __init__(self, made: AutoregressiveDrafter, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        for name in ("run", "append"):
            monkeypatch.setattr(made._stack, name, partial(self._called, getattr(made._stack, name)))

    def _called(self, work: Callable[..., Any], *args: Any) -> Any:
        self.left -= 1
        if self.left == -1:
            raise MemoryError
        return work(*args)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_of_a_long_prompt_the_last_position_alone_is_computed_whole(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, texts, fed = drafter(kind, **SHAPES["chain"]), Texts(kind), list[int]()
    monkeypatch.setattr(head_features, "CHUNK", 20)
    append = made._stack.append
    monkeypatch.setattr(made._stack, "append", lambda *args: (fed.append(len(args[0])), append(*args)))
    texts.begin([made], 0, words(random.Random(2), 60))
    texts.commit([made], [0])
    tree = made.propose(context([texts.texts[0]]))
    assert sum(fed) == len(texts.texts[0]) - 2
    assert fed[0] == 20
    assert_scores(tree, 0, texts, 0, 1.0)


@pytest.mark.parametrize(("kind", "passes"), slow_products(["eagle", "eagle3"], [0, 1, 2], each=1))
def test_a_feeding_that_raises_leaves_holes_undrafted(kind: str, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the first or second chunk of a long prompt, or in the pass that feeds the others; beside slots that go on."""
    made, texts, draw = drafter(kind, **SHAPES["static"]), Texts(kind), random.Random(1)
    monkeypatch.setattr(head_features, "CHUNK", 20)
    failing, lengths = FailingRun(made, monkeypatch), {0: 4, 1: 41, 2: 6}
    for slot, length in lengths.items():
        texts.begin([made], slot, words(draw, length))
    texts.commit([made], [2])
    assert made.propose(context([texts.texts[2]], slots=[2])).num_nodes.tolist() == [9]
    texts.commit([made], [0, 1])
    held = [texts.texts[slot] for slot in (0, 1, 2)]
    failing.left = passes
    with pytest.raises(MemoryError):
        made.propose(context(held))
    assert made.reusable(1, 40) == (0 if passes < 2 else 40)
    for _ in range(2):  # also after further tokens
        tree = made.propose(context(held))
        assert tree.num_nodes.tolist() == [9, 1 if passes < 2 else 9, 9]  # a chunk that is missing leaves a hole
        for slot in (0, 1, 2):
            if tree.num_nodes[slot] > 1:
                assert_scores(tree, slot, texts, slot, 1.0)
            texts.texts[slot] += words(draw, 2)
        texts.commit([made], [0, 1, 2])
        assert bool(made.reusable(1, 40)) == (passes == 2), "nothing behind a hole"
    for slot, length in lengths.items():
        texts.begin([made], slot, words(draw, length))
    texts.commit([made], [0, 1, 2])
    tree = made.propose(context([texts.texts[slot] for slot in (0, 1, 2)]))
    assert tree.num_nodes.tolist() == [9, 9, 9]
    for slot in (0, 1, 2):
        assert_scores(tree, slot, texts, slot, 1.0)


def test_a_level_that_raises_costs_one_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    made, texts = drafter("eagle3", **SHAPES["dynamic"]), Texts("eagle3")
    texts.begin([made], 0, [5, 6, 7, 8])
    texts.commit([made], [0])
    failing = FailingRun(made, monkeypatch)
    failing.left = 2  # the committed pairs and a level go well
    with pytest.raises(MemoryError):
        made.propose(context([texts.texts[0]]))
    tree = made.propose(context([texts.texts[0]]))
    assert tree.num_nodes.tolist() == [12]
    assert_scores(tree, 0, texts, 0, 1.0)


CONTEXT = 24
DEEP: dict[str, tuple[dict[str, Any], int]] = {  # and the nodes below the root that are fed at most
    "chain": ({"tree": "chain", "num_speculative_tokens": 40}, 41),
    "one": ({"tree": "chain", "num_speculative_tokens": 1}, 2),
    "named": ({"tree": "mc_sim_7b_63"}, 64),
    "own": ({}, 64),
    "own, small": ({"max_nodes": 3}, 6),
    "dynamic": ({"tree": "dynamic", "tree_top_k": 5, "max_nodes": 30}, 26),
    "deep dynamic": ({"tree": "dynamic", "num_speculative_tokens": 20, "tree_top_k": 2, "max_nodes": 64}, 39),
}


@pytest.mark.parametrize(("kind", "name"), slow_products(["eagle", "eagle3"], list(DEEP), each=1))
def test_at_the_end_of_the_context(kind: str, name: str) -> None:
    """The last drafts of a sequence beside one that begins, in a cache with no row more than shapes need."""
    options, most_fed = DEEP[name]
    made, texts, draw = drafter(kind, {"context_len": CONTEXT}, **options), Texts(kind), random.Random(1)
    assert made._stack.cache.capacity == CONTEXT + most_fed
    texts.begin([made], 0, words(draw, 3))
    for length in (CONTEXT - 2, CONTEXT - 1):
        texts.begin([made], 1, words(draw, length))
        texts.commit([made], [0, 1])
        depth = [made.shape.depth, CONTEXT - length]
        tree = made.propose(context([texts.texts[0], texts.texts[1]], max_depth=depth))
        deepest, shallow = tree.depths.amax(1).tolist()
        assert deepest == made.shape.depth or (isinstance(made.shape, DynamicShape) and deepest >= 2)
        assert shallow == min(made.shape.depth, CONTEXT - length)
        if deepest <= 6:
            assert_scores(tree, 0, texts, 0, 1.0)
        assert_scores(tree, 1, texts, 1, 1.0)


@pytest.mark.parametrize(("kind", "shape"), slow_products(["eagle", "eagle3"], [*SHAPES, "deep"], each=1))
def test_texts_that_reach_the_context_limit(kind: str, shape: str) -> None:
    """Through the engine: no draft fails, and drafts go on to the last token."""
    options = {"tree": "chain", "num_speculative_tokens": 30} if shape == "deep" else SHAPES[shape]
    config = {"method": KINDS[kind][0], "model": str(directory(kind)), **options}
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (60, 30, 10)]
    prompts = [[4], [5] * 15, list(range(3, 25))]
    plain = LLM(target(), max_model_len=CONTEXT).generate(prompts, params)
    outputs = LLM(target(), max_model_len=CONTEXT, speculative_config=config).generate(prompts, params)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
    assert len(prompts[0]) + len(outputs[0].outputs[0].token_ids) == CONTEXT
    assert all(o.metrics.draft_errors == 0 for o in outputs)
    # All but the first, behind which there is no feature yet, and perhaps the last, where no draft has room.
    assert outputs[0].metrics.drafted_at_depth[1] >= outputs[0].metrics.steps - 2


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_drafts_may_be_deeper_than_training_unrolled(kind: str, tree: str) -> None:
    assert drafter(kind, tree=tree, num_speculative_tokens=30).shape.depth == 30
    assert drafter(kind, tree="dynamic").shape.depth == 6
    assert drafter(kind, tree=[[0] * depth for depth in range(1, 21)]).shape.depth == 20


def test_prompts_longer_than_a_chunk_as_they_are() -> None:
    """With the chunk that is used, not a small one."""
    made, texts = drafter("eagle3", {"context_len": 1300}, **SHAPES["static"]), Texts("eagle3")
    texts.begin([made], 0, words(random.Random(1), 1200))
    texts.commit([made], [0])
    assert_scores(made.propose(context([texts.texts[0]])), 0, texts, 0, 1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_int8_and_weights_as_they_are_stored(kind: str) -> None:
    """Every matrix but the fusing layer's, and the target's LM head where it is shared; drafts stay about the same."""
    texts, scores = Texts(kind), []
    for option, is_int8 in (("auto", True), ("int8", True), ("none", False)):
        made = drafter(kind, quantization=option, **SHAPES["chain"])
        layers = {name: layer for name, layer in made.head.named_children() if isinstance(layer, NativeLinear)}
        assert layers.keys() == ({"fc"} if made.head.has_target_lm_head else {"fc", "lm_head"})
        assert not isinstance(layers.pop("fc")._weight, QuantizedMatrix)
        assert all(isinstance(layer._weight, QuantizedMatrix) == is_int8 for layer in layers.values())
        assert bool(made._stack.native_blocks._described.structure.layers[0].gate.scales) == is_int8
        texts.begin([made], 0, [5, 6, 7, 8])
        texts.commit([made], [0])
        made.propose(context([texts.texts[0]]))
        keys = stored_rows(made, 0, 3)[0]
        torch.testing.assert_close(keys, texts.rows(0)[0], rtol=0.1, atol=0.1)
        scores.append(keys)
    assert torch.equal(scores[0], scores[1])
    assert not torch.equal(scores[0], scores[2])


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_int8_elsewhere_than_on_a_cpu_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match="only CPUs have kernels for int8, not meta"):
        drafter(kind, {"device": torch.device("meta")}, quantization="int8")


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_by_hub_id(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The revision that the options name is the one that drafts, from the taps on."""
    directories = {None: directory(kind), "v1": directory(kind, seed=1)}
    monkeypatch.setattr(files, "snapshot_download", lambda name, *, revision, **_: str(directories[revision]))
    local, of_main, of_v1 = (
        drafter(kind, **keys) for keys in ({}, {"model": "some/head"}, {"model": "some/head", "revision": "v1"})
    )
    text, found = [5, 6, 7, 8], []
    for made in (local, of_main, of_v1):
        texts = Texts(kind)
        texts.begin([made], 0, text)
        texts.commit([made], [0])
        found.append(made.propose(context([text])).scores)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize(("method", "kind"), [("eagle", "eagle3"), ("eagle3", "eagle"), ("medusa", "eagle")])
def test_the_wrong_method_is_refused(method: str, kind: str) -> None:
    own = KINDS[kind][0]
    expected = rf"is an? {own} head, and method '{method}' needs an? {method} head\. Write {own}:model="
    with pytest.raises(ConfigError, match=expected):
        LLM(target(), speculative_config={"method": method, "model": str(directory(kind))})


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_heads_of_other_targets_are_refused(kind: str) -> None:
    config = {"method": KINDS[kind][0], "model": str(directory(kind))}
    for changes, message in (
        ({"vocab_size": 71}, "vocab_size 67 instead of 71"),
        ({"seed": 1}, r"weights \w+ instead of"),
        ({"num_hidden_layers": 2}, "num_layers 3 instead of 2"),
    ):
        other = wrap_model(tiny_model("llama", **changes), name="other")
        with pytest.raises(ConfigError, match=message):
            LLM(other, speculative_config=config)
    other = wrap_model(tiny_model("llama", seed=1), name="other")
    assert LLM(other, speculative_config={**config, "allow_other_target": True}).generate([5], GREEDY)
    with pytest.raises(ConfigError, match="needs a trained head"):
        LLM(target(), speculative_config={"method": KINDS[kind][0]})
    assert drafter_options(config).model == str(directory(kind))


def test_taps_that_the_target_does_not_have(tmp_path: Path) -> None:
    """A head whose target has as many weights but fewer blocks than its taps name."""
    del tmp_path
    other = wrap_model(tiny_model("llama", num_hidden_layers=2), name="other")
    config = {"method": "eagle3", "model": str(directory("eagle3")), "allow_other_target": True}
    with pytest.raises(Exception, match=r"tap 3 does not exist: the target has 2 blocks\. Expected 0\.\.2"):
        LLM(other, speculative_config=config)


def test_a_tree_given_as_a_shape() -> None:
    assert drafter("eagle", tree=TreeShape.chain(3)).shape == TreeShape.chain(3)
