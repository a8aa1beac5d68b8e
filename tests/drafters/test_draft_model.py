"""The draft model's own cache: after any history of proposals it is that of a fresh prefill of the committed tokens."""

from __future__ import annotations

import random
from typing import Any
from unittest import mock

import pytest
import torch
from drafting_contexts import attached, begin, context
from end_to_end.tiny_llms import GAPPED_CHOICES, MEDUSA_CHOICES, WIDTHS, draft_model, noisy
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from tests.tree_checks import check_tree

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "tree": {"tree": "tree"},
    "choices": {"tree": MEDUSA_CHOICES},
    "gapped choices": {"tree": GAPPED_CHOICES},
    "widths": {"tree": WIDTHS},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 4, "tree_top_k": 3, "max_nodes": 12},
    "narrow dynamic": {"tree": "dynamic", "num_speculative_tokens": 5, "tree_top_k": 4, "max_nodes": 6},
}


def drafter(module: Any = None, **options: Any) -> DraftModelDrafter:
    """A drafter over a tiny model."""
    made = attached(draft_model(noisy() if module is None else module, **options)())
    assert isinstance(made, DraftModelDrafter)
    return made


def fresh_runner(made: DraftModelDrafter) -> Runner:
    """A runner of the same weights and decoder: in float64 decoders differ by where transformers' norms round."""
    return Runner(wrap_model(noisy(), name="fresh"), num_slots=1, context_len=96, max_nodes=9, runner=made._runner.name)


def assert_fresh(made: DraftModelDrafter, slot: int, tokens: list[int], fresh: Runner) -> None:
    """The slot's rows up to and with the root are those of a prefill in another cache."""
    fresh.prefill(0, tokens, 0)
    for layer in range(fresh.model.num_layers):
        for ours, theirs in (
            (made._runner.cache.keys, fresh.cache.keys),
            (made._runner.cache.values, fresh.cache.values),
        ):
            torch.testing.assert_close(
                ours[layer][slot, :, : len(tokens)], theirs[layer][0, :, : len(tokens)], rtol=1e-9, atol=1e-9
            )


def accepted(tree: TreeRow, how: str, draw: random.Random) -> list[int]:
    """Tokens that a pass commits: a path down the tree and one token more."""
    node, path = 0, []
    while how != "nothing":
        children = [child for child, parent in enumerate(tree.parents) if parent == node]
        if not children or (how == "some" and draw.random() < 0.4):
            break
        node = draw.choice(children)
        path.append(tree.tokens[node])
    return [*path, draw.randrange(VOCAB_SIZE)]


@pytest.mark.parametrize(("shape", "how"), slow_products(list(SHAPES), ["some", "everything", "nothing"], each=1))
def test_cache_is_that_of_a_fresh_prefill(shape: str, how: str) -> None:
    """Ragged rows, sequences without room, thrown-away proposals, rounds without one, slots that begin anew."""
    made, draw = drafter(**SHAPES[shape]), random.Random(f"{shape} {how}")
    made._runner.prefill_chunk = 4
    fresh = fresh_runner(made)
    slots = [4, 0, 2]
    params = [SamplingParams(temperature=0.0), *(SamplingParams(temperature=0.9, seed=s) for s in (1, 2))]
    texts = [[draw.randrange(VOCAB_SIZE) for _ in range(length)] for length in (1, 2, 11)]
    for round_ in range(12):
        depth = [draw.choice([0, 1, 2, 8]) for _ in slots] if round_ % 3 else [8, 8, 8]
        asked = context(texts, max_depth=depth, params=params, is_coupled=[False, True, False], slots=slots)
        if round_ % 4 == 1:
            made.propose(context(texts, max_depth=[3, 0, 8], params=params, slots=slots))  # never verified
        tree = made.propose(asked)
        check_tree(tree)
        assert all(row.tokens[0] == text[-1] for row, text in zip(tree.rows(), texts, strict=True))
        assert all(int(d.max()) <= most for d, most in zip(tree.depths, depth, strict=True))
        for slot, text, most in zip(slots, texts, depth, strict=True):
            if most:
                assert_fresh(made, slot, text, fresh)
        for row, text in zip(tree.rows(), texts, strict=True):
            text.extend(accepted(row, how, draw))
        if round_ % 5 == 4:  # rounds decoded without a draft, as when the budget says that none pays
            texts[0] += [draw.randrange(VOCAB_SIZE) for _ in range(7)]
        if len(texts[1]) > 40:
            made.release(slots[1])
            begin(made, slots[1])
            texts[1] = texts[1][:3]
        texts[:] = [text[:80] for text in texts]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_proposal_may_be_thrown_away(shape: str) -> None:
    """Also when the other one was asked for with less depth, or among other sequences."""
    texts = [[5, 6, 7, 8], [9]]
    params = [SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=0.0)]
    made = drafter(**SHAPES[shape])
    first, second = (made.propose(context(texts, params=params)) for _ in range(2))
    made.propose(context(texts, max_depth=[1, 0], params=params))
    made.propose(context(texts[:1], params=params[:1]))
    third = made.propose(context(texts, params=params))
    alone = drafter(**SHAPES[shape]).propose(context(texts[:1], params=params[:1]))
    for other in (second, third):
        assert torch.equal(first.tokens, other.tokens)
        torch.testing.assert_close(first.scores, other.scores)
    assert torch.equal(first.tokens[:1], alone.tokens)


def test_full_acceptance_costs_one_pass_to_catch_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last drafted token and the bonus token are new to the draft model: both are fed in the first pass."""
    made = drafter(num_speculative_tokens=4)
    text = [5, 6, 7]
    fed: list[int] = []
    run = made._runner.run

    def counting(work: Pass) -> Any:
        if work.logit_rows is not None:  # no prefill
            fed.append(work.num_tokens)
        return run(work)

    monkeypatch.setattr(made._runner, "run", counting)
    tree = made.propose(context([text]))
    assert fed == [1, 1, 1, 1]  # the root, and three of the four drafted tokens
    fed.clear()
    made.propose(context([[*text, *tree.rows()[0].tokens[1:], 9]]))
    assert fed == [2, 1, 1, 1]


def test_a_draft_model_with_a_shorter_context_stops_drafting_there() -> None:
    """Learned positions end; sequences at the end share batches with others that go on."""
    module = tiny_model("gpt2", seed=1, dtype=torch.float64, n_positions=24, max_position_embeddings=24)
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (30, 14, 6)]
    prompts = [[4], [5] * 15, list(range(3, 25))]
    target = tiny_model("gpt2", dtype=torch.float64)
    plain = LLM(target).generate(prompts, params)
    for options in SHAPES.values():
        outputs = LLM(target, drafter=draft_model(module, **options)).generate(prompts, params)
        assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in plain]
        assert all(o.metrics.draft_errors == 0 for o in outputs)
        assert outputs[0].metrics.num_drafted > 0
        assert outputs[2].metrics.drafted_at_depth[1] == 1, "its 24th token; prefill gives the 23rd"
    made = drafter(module, num_speculative_tokens=3)
    assert made.propose(context([[5] * 24, [5] * 30])).width == 1
    assert made.propose(context([[5] * 23, [5] * 2])).num_nodes.tolist() == [2, 4]


def test_a_failed_pass_leaves_no_rows_that_count_as_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proposal that breaks off must not make later ones trust rows that were never written."""
    made = drafter(num_speculative_tokens=4)
    run, calls = made._runner.run, []

    def failing(work: Pass) -> Any:
        if work.logit_rows is None:  # prefill
            return run(work)
        calls.append(work.tokens)
        if len(calls) == 3:
            raise MemoryError
        return run(work)

    monkeypatch.setattr(made._runner, "run", failing)
    text = [5, 6, 7]
    with pytest.raises(MemoryError):
        made.propose(context([text]))
    lost = [int(tokens[0]) for tokens in calls[1:]]
    text += [*lost, 9]
    made.propose(context([text]))
    assert_fresh(made, 0, text, fresh_runner(made))


def test_target_ids_that_the_draft_model_lacks() -> None:
    """Padding rows of the target's head: fed as some token, never drafted."""
    made = drafter(tiny_model("llama", dtype=torch.float64, vocab_size=60), num_speculative_tokens=3)
    tree = made.propose(context([[5, 66, 62]], params=[SamplingParams(temperature=2.0, seed=1)]))
    assert tree.distributions is not None
    assert tree.distributions.rows.shape[-1] == VOCAB_SIZE
    assert float(tree.distributions.rows[..., 60:].sum()) == 0.0
    assert int(tree.tokens[0, 1:].max()) < 60
    wide = drafter(tiny_model("llama", dtype=torch.float64, vocab_size=80), num_speculative_tokens=3)
    tree = wide.propose(context([[5]], params=[SamplingParams(temperature=2.0, seed=1)]))
    assert tree.distributions is not None
    assert tree.distributions.rows.shape[-1] == VOCAB_SIZE
    torch.testing.assert_close(tree.distributions.rows.sum(-1), torch.ones(1, 3))


def test_nothing_to_do() -> None:
    made = drafter(tree="tree")
    tree = made.propose(context([[5], [6, 7]], max_depth=0))
    assert isinstance(tree, TokenTree)
    assert tree.rows() == [([5], [-1]), ([7], [-1])]
    made.release(3)


@pytest.mark.parametrize("tree", ["chain", "dynamic"])
def test_nothing_is_drafted_below_what_falls_short(tree: str) -> None:
    """A drafter that is never certain takes the one pass for its root, and no more."""
    options = {"tree": tree, "num_speculative_tokens": 8, "pruning": {"token_probability": 1.0}}
    made = drafter(**options, **({"tree_top_k": 2} if tree == "dynamic" else {}))
    with mock.patch.object(made._runner, "run", wraps=made._runner.run) as run:
        proposed = made.propose(context([[5, 7]]))
    assert proposed.tokens.tolist() == [[7]]
    assert run.call_count == 1
