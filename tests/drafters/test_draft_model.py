"""The draft model's own cache: after any history of proposals it is that of a fresh prefill of the committed tokens."""

import copy
import random
from typing import Any
from unittest import mock

import pytest
import torch
from drafting_contexts import accepted, assert_fresh, attached, begin, context
from end_to_end.tiny_llms import GAPPED_CHOICES, MEDUSA_CHOICES, WIDTHS, draft_model, noisy
from pairwise import slow_products
from tiny_models import VOCAB_SIZE, tiny_model
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.core.passes import Pass
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.decoder import quantized as quantized_module
from foretoken.decoder.quantized import quantized
from foretoken.drafters.draft_model import DraftModelDrafter
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from foretoken.sampling.noise import KeyedNoise, Purpose
from tests.tree_checks import check_tree

EXACT = {"rtol": 1e-9, "atol": 1e-9}
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
                assert_fresh(made._runner, slot, text, fresh, **EXACT)
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
    assert_fresh(made._runner, 0, text, fresh_runner(made), **EXACT)


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


TEXTS = [[5, 6, 7], [9], [20, 21, 22, 23], [30, 31]]
PARAMS = [
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_k=2),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.0),
]
IS_COUPLED = [False, False, True, False]
SAMPLED_SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "widths": {"tree": WIDTHS},
    "gapped choices": {"tree": GAPPED_CHOICES},
}

DYNAMIC: dict[str, Any] = {"tree": "dynamic", "num_speculative_tokens": 5, "tree_top_k": 3, "max_nodes": 30}


def propose(shape: str, module: Any = None, **options: Any) -> TokenTree:
    """One proposal for sampled, truncated, coupled and greedy requests side by side."""
    made = attached(
        draft_model(noisy() if module is None else module, **{**SAMPLED_SHAPES, "dynamic": DYNAMIC}[shape], **options)()
    )
    tree = made.propose(context(TEXTS, params=PARAMS, is_coupled=IS_COUPLED))
    check_tree(tree)
    return tree


def draft_distribution(row: int, path: list[int], module: Any = None) -> Tensor:
    """The warped draft distribution after a path, (V,), by a forward without any cache."""
    module = copy.deepcopy(noisy() if module is None else module)
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = module(torch.tensor([TEXTS[row] + path])).logits[0, -1].float()
    params = PARAMS[row]
    if params.is_greedy:
        return logits.softmax(0)
    logits = logits / params.temperature
    if params.top_k:
        logits[logits < logits.topk(params.top_k).values[-1]] = float("-inf")
    return logits.softmax(0)


def noise(row: int, purpose: Purpose, position: int, lane: int = 0) -> Tensor:
    """(V,) keyed Gumbel noise of a request."""
    keyed = KeyedNoise(torch.tensor([PARAMS[row].seed or 0]))
    return keyed.gumbel(torch.tensor([position]), purpose, VOCAB_SIZE, lane)[0]


def families(tree: TokenTree, row: int) -> list[tuple[int, list[int], list[int]]]:
    """Every node with children: the node, the tokens on the path to it, its children in order."""
    parents = tree.parents[row].tolist()
    found = []
    for node in range(int(tree.num_nodes[row])):
        children = [child for child, parent in enumerate(parents) if parent == node]
        path, walk = [], node
        while walk:
            path.insert(0, int(tree.tokens[row, walk]))
            walk = parents[walk]
        if children:
            found.append((node, path, children))
    return found


def of_integers() -> Any:
    """The draft model whose matrices, embedding apart, are what their integers in int8 stand for; in float64."""
    module = copy.deepcopy(noisy(dtype=torch.float32)).double()
    for layer in (part for part in module.modules() if isinstance(part, torch.nn.Linear)):
        made = quantized(layer.weight.float(), "int8")
        layer.weight = torch.nn.Parameter(made.dequantized().double())  # unties a head
    return module


@pytest.mark.parametrize("shape", SAMPLED_SHAPES)
def test_tokens_rows_and_kinds(shape: str) -> None:
    check_rows_and_kinds(propose(shape), shape, noisy())


@pytest.mark.parametrize("shape", SAMPLED_SHAPES)
def test_a_quantised_model_states_its_own_distribution(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With inputs of 24 bits: those of 16 move probabilities by up to 0.1 %."""
    monkeypatch.setattr(quantized_module, "_input_bits", lambda *_: 24)
    tree = propose(shape, noisy(dtype=torch.float32), quantization="int8")
    check_rows_and_kinds(tree, shape, of_integers())
    stored, own = (draft_distribution(0, [], module) for module in (noisy(dtype=torch.float32), of_integers()))
    assert (stored / own - 1).abs().max() > 1e-3, "ten times what is tolerated above"


def check_rows_and_kinds(tree: TokenTree, shape: str, module: Any) -> None:
    """Tokens are drawn from, and rows state, the module's distribution."""
    distribution = tree.distributions
    assert distribution is not None
    ranks = GAPPED_CHOICES if shape == "gapped choices" else None
    for row in range(len(TEXTS)):
        for node, path, children in families(tree, row):
            q = draft_distribution(row, path, module)
            depth, root = len(path), len(TEXTS[row]) - 1
            is_sampled = not IS_COUPLED[row] and not PARAMS[row].is_greedy
            keys = q.log()
            if is_sampled:
                keys = keys + noise(row, Purpose.DRAFT, root, lane=node)
            elif IS_COUPLED[row]:
                keys = keys + noise(row, Purpose.TARGET, root + depth + 1)
            order = keys.argsort(descending=True).tolist()
            if is_sampled or ranks is None:
                wanted = order[: len(children)]  # draws in order, none left out
            else:
                wanted = [order[choice[-1]] for choice in ranks if len(choice) == depth + 1]
            support = int((q > 0).sum())
            for place, child in enumerate(children):
                if place < support:
                    assert int(tree.tokens[row, child]) == wanted[place]
                kind, where = DrawKind(int(distribution.kinds[row, child])), int(distribution.row_of[row, child])
                if not is_sampled or place >= support:
                    assert (kind, where) == (DrawKind.ONE_HOT, -1)
                    continue
                assert kind == (DrawKind.INDEPENDENT if len(children) == 1 else DrawKind.WITHOUT_REPLACEMENT)
                torch.testing.assert_close(distribution.rows[row, where], q, rtol=1e-4, atol=1e-6)
    assert distribution.max_siblings == max(len(children) for _, _, children in families(tree, 0))


def test_greedy_drafts_of_sampled_requests_carry_no_distribution() -> None:
    tree = propose("widths", draft_sample_method="greedy")
    assert tree.distributions is None
    for row in range(len(TEXTS)):
        for _, path, children in families(tree, row):
            module_distribution = draft_distribution(row, path)
            best = module_distribution.argsort(descending=True, stable=True)[: len(children)].tolist()
            if PARAMS[row].top_k == 0:
                assert [int(tree.tokens[row, child]) for child in children] == best


@pytest.mark.parametrize("shape", ["widths", "dynamic"])
def test_scores_are_path_log_probabilities(shape: str) -> None:
    """So the draft model has seen every path as it is, down to the deepest node."""
    tree = propose(shape)
    assert tree.scores is not None
    for row in (0, 3):
        for node, path, children in families(tree, row):
            q = draft_distribution(row, path).log()
            for child in children:
                expected = tree.scores[row, node] + q[int(tree.tokens[row, child])]
                torch.testing.assert_close(tree.scores[row, child], expected, rtol=1e-4, atol=1e-4)


def test_draws_depend_on_the_position_not_on_the_neighbours() -> None:
    """The same request alone, in another slot, or behind others proposes the same tree."""
    made = attached(draft_model(noisy(), tree=WIDTHS)())
    together = made.propose(context(TEXTS, params=PARAMS, is_coupled=IS_COUPLED))
    for row in range(3):
        alone = attached(draft_model(noisy(), tree=WIDTHS)()).propose(
            context([TEXTS[row]], params=[PARAMS[row]], is_coupled=[IS_COUPLED[row]], slots=[7])
        )
        assert torch.equal(alone.tokens[0], together.tokens[row])
