"""Which tokens a draft model proposes, and the draft distributions it states, recomputed from plain forwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from drafting_contexts import attached, context
from end_to_end.tiny_llms import GAPPED_CHOICES, WIDTHS, draft_model, noisy
from tiny_models import VOCAB_SIZE
from torch import Tensor

from foretoken import SamplingParams
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.decoder import quantized as quantized_module
from foretoken.decoder.quantized import quantized
from foretoken.sampling.noise import KeyedNoise, Purpose
from tests.tree_checks import check_tree

TEXTS = [[5, 6, 7], [9], [20, 21, 22, 23], [30, 31]]
PARAMS = [
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_k=2),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.0),
]
IS_COUPLED = [False, False, True, False]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "widths": {"tree": WIDTHS},
    "gapped choices": {"tree": GAPPED_CHOICES},
}

DYNAMIC: dict[str, Any] = {"tree": "dynamic", "num_speculative_tokens": 5, "tree_top_k": 3, "max_nodes": 30}


def propose(shape: str, module: Any = None, **options: Any) -> TokenTree:
    """One proposal for sampled, truncated, coupled and greedy requests side by side."""
    made = attached(
        draft_model(noisy() if module is None else module, **{**SHAPES, "dynamic": DYNAMIC}[shape], **options)()
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


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_rows_and_kinds(shape: str) -> None:
    check_rows_and_kinds(propose(shape), shape, noisy())


@pytest.mark.parametrize("shape", SHAPES)
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
