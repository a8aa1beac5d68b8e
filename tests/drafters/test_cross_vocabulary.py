"""A draft model with another vocabulary drafts shared tokens, with the distributions that it states."""

import copy
import json
import logging
import random
from functools import cache
from typing import Any

import pytest
import torch
from drafting_contexts import assert_fresh, attached, context
from end_to_end.tiny_llms import (
    GAPPED_CHOICES,
    OTHER_ORDER,
    PIECES,
    WIDTHS,
    byte_level_tokenizer,
    draft_model,
    noisy,
    other_tokenizer,
    target,
    tokenizer,
    with_other_vocabulary,
)
from tiny_models import VOCAB_SIZE
from tokenizers import Tokenizer
from tokenizers_of_kinds import BUNDLED, bundled
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import DrawKind, TokenTree
from foretoken.drafters.vocabularies import _SAMPLE, Vocabulary
from foretoken.models.loading import load_model, wrap_model
from foretoken.runner.runner import Runner
from tests.tree_checks import check_tree

TEXTS = [[5, 6, 7], [9], [20, 4, 22, 30], [31, 54]]  # 4, 30 and 54 are not shared
PARAMS = [
    SamplingParams(temperature=0.7, seed=1),
    SamplingParams(temperature=1.3, seed=2, top_k=3),
    SamplingParams(temperature=0.9, seed=3),
    SamplingParams(temperature=0.0),
]
IS_COUPLED = [False, False, True, False]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "widths": {"tree": WIDTHS},
    "gapped choices": {"tree": GAPPED_CHOICES},
    "dynamic": {"tree": "dynamic", "num_speculative_tokens": 5, "tree_top_k": 3, "max_nodes": 12},
}
PERMUTED = [(5 * token + 2) % VOCAB_SIZE for token in range(VOCAB_SIZE)]


@cache
def other_model() -> Any:
    """The noisy target with the other vocabulary."""
    return with_other_vocabulary(noisy())


@cache
def permuted_model() -> Any:
    """The noisy target with all tokens under other ids."""
    module = copy.deepcopy(noisy())
    for part in (module.get_input_embeddings(), module.get_output_embeddings()):
        part.weight = torch.nn.Parameter(part.weight[PERMUTED])
    return module


def drafter(shape: str = "chain", module: Any = None, names: Any = None, **options: Any) -> Any:
    """An attached one with another vocabulary."""
    made = draft_model(
        other_model() if module is None else module,
        tokenizer=other_tokenizer() if names is None else names,
        **{"vocab_match": "intersection", **SHAPES[shape], **options},
    )
    return attached(made(), tokenizer=tokenizer())


def propose(made: Any) -> TokenTree:
    """One proposal for sampled, truncated, coupled and greedy requests side by side."""
    tree: TokenTree = made.propose(context(TEXTS, params=PARAMS, is_coupled=IS_COUPLED))
    check_tree(tree)
    return tree


@pytest.mark.parametrize("shape", SHAPES)
def test_permuted_ids_change_nothing(shape: str) -> None:
    """The same tokens, scores and stated distributions as of the draft model with the target's own ids."""
    names = byte_level_tokenizer([PIECES[token] for token in PERMUTED])
    ours = propose(drafter(shape, permuted_model(), names))
    theirs = propose(attached(draft_model(noisy(), **SHAPES[shape])()))
    assert torch.equal(ours.tokens, theirs.tokens)
    assert torch.equal(ours.parents, theirs.parents)
    torch.testing.assert_close(ours.scores, theirs.scores)
    assert (ours.distributions is None) == (theirs.distributions is None) == (shape == "dynamic")
    if ours.distributions is not None and theirs.distributions is not None:
        assert torch.equal(ours.distributions.kinds, theirs.distributions.kinds)
        torch.testing.assert_close(ours.distributions.rows, theirs.distributions.rows)


def their_ids(tokens: list[int]) -> list[int]:
    """Ids of the other tokenizer, token by token, written down by hand: only those that are not shared take several."""
    several = {4: b"a", 30: b"th", 54: b"7"}
    ids: list[int] = []
    for token in tokens:
        pieces = [bytes([byte]) for byte in several[token]] if token in several else [PIECES[token]]
        known = [PIECES[each] for each in OTHER_ORDER]
        ids += [known.index(piece) if piece in known else other_tokenizer().eos_token_id for piece in pieces]
    return ids


def restricted(tokens: list[int], params: SamplingParams) -> Tensor:
    """(V,) the draft distribution over the target's ids, by a forward without any cache and the plain formula."""
    module = copy.deepcopy(other_model())
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = module(torch.tensor([their_ids(tokens)])).logits[0, -1].float() / (params.temperature or 1.0)
    shared = torch.zeros(VOCAB_SIZE)
    for theirs, ours in enumerate(OTHER_ORDER):
        shared[ours] = logits[theirs].exp()
    if params.top_k:
        shared[shared < shared.topk(params.top_k).values[-1]] = 0.0
    return shared / shared.sum()


@pytest.mark.parametrize("shape", ["chain", "widths"])
def test_stated_distributions_are_the_restricted_ones(shape: str) -> None:
    tree = propose(drafter(shape))
    stated = tree.distributions
    assert stated is not None
    for row, params in enumerate(PARAMS):
        for node in range(1, int(tree.num_nodes[row])):
            path, walk = list[int](), int(tree.parents[row, node])
            while walk:
                path.insert(0, int(tree.tokens[row, walk]))
                walk = int(tree.parents[row, walk])
            q, token = restricted([*TEXTS[row], *path], params), int(tree.tokens[row, node])
            if IS_COUPLED[row] or params.is_greedy:
                assert int(stated.kinds[row, node]) == DrawKind.ONE_HOT
                assert token in OTHER_ORDER
                continue
            where = int(stated.row_of[row, node])
            if where < 0:  # a fourth child of three possible tokens
                assert q[token] == 0
                continue
            torch.testing.assert_close(stated.rows[row, where], q, rtol=1e-4, atol=1e-6)
            assert float(stated.rows[row, where].sum()) == pytest.approx(1.0)
            assert q[token] > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_cache_is_that_of_a_fresh_prefill(shape: str) -> None:
    """Accepted paths, tokens that become several, thrown-away proposals and rounds without one."""
    made, draw = drafter(shape), random.Random(shape)
    made._runner.prefill_chunk = 4
    fresh = Runner(
        wrap_model(other_model(), name="fresh"), num_slots=1, context_len=96, max_nodes=9, runner=made._runner.name
    )
    texts = [[4], [5, 30, 6], [draw.randrange(3, VOCAB_SIZE) for _ in range(11)]]
    params = [SamplingParams(temperature=0.0), *(SamplingParams(temperature=0.9, seed=s) for s in (1, 2))]
    for round_ in range(8):
        asked = context(texts, params=params, is_coupled=[False, True, False], slots=[4, 0, 2])
        if round_ % 3 == 1:
            made.propose(asked)  # never verified
        tree = made.propose(asked)
        for slot, text in zip([4, 0, 2], texts, strict=True):
            assert_fresh(made._runner, slot, their_ids(text), fresh)
        for row, text in zip(tree.rows(), texts, strict=True):
            node = 0
            while (children := [i for i, parent in enumerate(row.parents) if parent == node]) and draw.random() < 0.8:
                node = draw.choice(children)
                text.append(row.tokens[node])
            text.append(draw.randrange(3, VOCAB_SIZE))


def test_a_sequence_that_outgrows_the_draft_model_s_context() -> None:
    """Its context counts the draft model's tokens: 48 of the target's make 96 of them."""
    made = drafter()
    assert made.propose(context([[30] * 47, [30] * 48, [5] * 48])).num_nodes.tolist() == [3, 1, 4]


@pytest.mark.parametrize("match", ["same", None])
def test_another_vocabulary_is_refused_unless_asked_for(match: str | None) -> None:
    with pytest.raises(ConfigError, match=r"entries differ\. .* set 'vocab_match' to 'intersection', .* 'text', which"):
        drafter(vocab_match=match)


def test_too_few_shared_tokens_are_refused() -> None:
    """Most of the bundled tokenizer's tokens are none of a vocabulary of 67 letters, but these are known to it."""
    few = draft_model(noisy(), tokenizer=tokenizer(), vocab_match="intersection")
    with pytest.raises(
        ConfigError, match=r"has 1\.\d % of the tokens of 'target'\. .* 10 % .* Set it to 'text', which"
    ):
        attached(few(), tokenizer=bundled(), vocab_size=6144)
    some = byte_level_tokenizer([*PIECES[:30], *(b"xx%d" % i for i in range(37))])
    assert drafter(names=some, module=noisy()) is not None
    with pytest.raises(
        ConfigError, match=r"has 44\.8 % .* at least 50 % with 'vocab_match' at 'auto'\. Set it to 'inter"
    ):
        drafter(names=some, module=noisy(), vocab_match="auto")


def test_the_shared_tokens_and_the_bound_of_acceptance_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The bound by the plain formula, from a forward of the target over the same lines."""
    made = draft_model(other_model(), tokenizer=other_tokenizer(), vocab_match="intersection", num_speculative_tokens=2)
    with caplog.at_level(logging.INFO, logger="foretoken.drafters"):
        LLM(target(), tokenizer=tokenizer(), drafter=made, trust_drafter=True)
        LLM(target(), tokenizer=tokenizer(), drafter=made)
    trusted, untrusted = [record.getMessage() for record in caplog.records if "shares" in record.getMessage()]
    assert untrusted.endswith("shares 63 tokens with 'LlamaForCausalLM', 94.0 % of them")
    known = Vocabulary(tokenizer(), VOCAB_SIZE, "target")
    tokens = [piece.token for piece in known.encode(_SAMPLE)][:64]
    module = copy.deepcopy(target())
    module.set_attn_implementation("eager")
    with torch.inference_mode():
        p = module(torch.tensor([tokens])).logits[0].softmax(1)
    bound = 100 * float(p[:, OTHER_ORDER].sum(1).mean())
    assert 50 < bound < 99.9
    assert f"they are {bound:.1f} % probable" in trusted


def test_equal_vocabularies_need_no_map() -> None:
    for match in ("auto", "same", "intersection"):
        made = drafter(module=noisy(), names=tokenizer(), vocab_match=match)
        assert made._mapping is None
        assert drafter(vocab_match="auto")._mapping is not None


def test_options_that_contradict_each_other() -> None:
    assert drafter(vocab_match=None, use_heterogeneous_vocab=True)._mapping is not None
    with pytest.raises(ConfigError, match=r"and vocab_match is 'text'\. Leave one of them out"):
        draft_model(noisy(), vocab_match="text", use_heterogeneous_vocab=True)
    with pytest.raises(ConfigError, match="Leave 'tree' out, or set vocab_match to 'intersection'"):
        draft_model(noisy(), vocab_match="text", tree="tree")


def test_the_bundled_draft_model_under_other_ids_is_accepted_as_often() -> None:
    """Models in int8 and kernels that draft in one call make hardly a difference."""
    parts = json.loads(bundled().backend_tokenizer.to_str())
    order = [(1001 * token + 17) % 6144 for token in range(6144)]  # the old id of every new one
    new_ids = {old: new for new, old in enumerate(order)}
    parts["model"]["vocab"] = {text: new_ids[token] for text, token in parts["model"]["vocab"].items()}
    for entry in parts["added_tokens"]:
        entry["id"] = new_ids[entry["id"]]
    names = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(parts)), bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )
    draft = str(BUNDLED.with_name("tinycode-draft"))
    module = load_model(draft).module
    weight = module.get_input_embeddings().weight  # the LM head's too
    weight.data = weight.data[order].clone()
    params = [SamplingParams(temperature=t, seed=5, max_tokens=48) for t in (0.0, 0.8)]
    prompts = ["def add(a, b):\n    return"] * 2
    config = {"method": "draft_model", "model": draft, "num_speculative_tokens": 4}
    ours = LLM(str(BUNDLED), drafter=draft_model(
        module, tokenizer=names, vocab_match="auto", num_speculative_tokens=4), trust_drafter=True
    ).generate(prompts, params)  # fmt: skip
    theirs = LLM(str(BUNDLED), speculative_config=config).generate(prompts, params)
    for a, b in zip(ours, theirs, strict=True):
        assert a.outputs[0].token_ids == b.outputs[0].token_ids
        assert a.metrics.mean_acceptance_length == pytest.approx(b.metrics.mean_acceptance_length, rel=0.05)
        assert a.metrics.mean_acceptance_length > 1.5


def test_text_needs_tokenizers() -> None:
    made = draft_model(noisy(), tokenizer=tokenizer(), vocab_match="text")
    with pytest.raises(ConfigError, match=r"has no tokenizer, and .vocab_match. compares what tokens spell"):
        LLM(noisy(), drafter=made, trust_drafter=True)
