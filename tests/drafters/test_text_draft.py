"""Drafting by text: what is committed and what is drafted, in the tokens of two vocabularies."""

import random
from itertools import product
from typing import Any

import pytest
from drafting_contexts import assert_fresh, attached, begin, context
from end_to_end.tiny_llms import draft_model, noisy, other_tokenizer, tokenizer, with_other_vocabulary
from tiny_models import VOCAB_SIZE, tiny_model
from tokenizers_of_kinds import BUNDLED, KINDS, TEXTS, vocabulary

from foretoken import LLM, SamplingParams
from foretoken.drafters.draft_model import DraftText, Retokenizer
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from tests.tree_checks import check_tree

PAIRS = list(product(KINDS, KINDS))


def both(ours: str, theirs: str) -> Retokenizer:
    """Between two kinds of tokenizers."""
    return Retokenizer(vocabulary(ours), vocabulary(theirs))


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_committed_tokens_are_read_as_the_same_bytes(ours: str, theirs: str) -> None:
    """However they come, special tokens and parts of characters among them; what stays is said exactly."""
    between, draw = both(ours, theirs), random.Random(ours + theirs)
    target, draft = between.target, between.draft
    assert target.eos is not None
    for text in TEXTS.values():
        data = text.encode()
        start = draw.randrange(len(data))
        parts = data[:start], data[start:]
        tokens = [t for part in parts for t in [*(p.token for p in target.encode(part)), target.eos]]
        reader, end, before = DraftText(between), 0, list[int]()
        while end < len(tokens):
            end = min(len(tokens), end + draw.randrange(1, 6))
            kept = reader.read(tokens[:end])
            same = next((i for i, (a, b) in enumerate(zip(before, reader.ids, strict=False)) if a != b), None)
            assert kept == (min(len(before), len(reader.ids)) if same is None else same)
            before = list(reader.ids)
            spelled = b"".join(target.spellings[token] or b"" for token in tokens[:end])
            assert b"".join(draft.spellings[token] or b"" for token in before) == spelled
            assert before.count(draft.eos) == tokens[:end].count(target.eos)
            assert reader.read(tokens[:end]) == len(before)
        if len(tokens) < 12:  # within what is encoded anew
            assert before == [t for part in parts for t in [*(p.token for p in draft.encode(part)), draft.eos]]


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_drafted_text_becomes_the_target_s_own_tokens(ours: str, theirs: str) -> None:
    """Behind any token of a text: the tokens that the target's tokenizer has for the rest, as far as it is whole."""
    between = both(ours, theirs)
    for text in TEXTS.values():
        tokens = [piece.token for piece in between.target.encode(text.encode())]
        for start in range(1, len(tokens)):
            rest = b"".join(between.target.spellings[token] or b"" for token in tokens[start:])
            drafted = [piece.token for piece in between.draft.encode(rest)]
            chain = between.chain(tokens[:start], drafted)
            got = [node.token for node in chain]
            assert got == tokens[start : start + len(got)]
            assert len(tokens) - start - len(got) in (0, 1)
            ended = between.chain(tokens[:start], [*drafted, between.draft.eos or 0])
            assert [node.token for node in ended] == [*tokens[start:], between.target.eos]
            counts = [node.num_drafted for node in ended]
            assert counts == sorted(counts)
            assert counts[-1] == len(drafted) + 1


@pytest.mark.parametrize(
    ("drafted", "chain"),
    [
        (b"return x", [b"return"]),  # which may become " xy"
        (b"return x\n", [b"return", b" x", b"\n"]),
        (b"return", [b"return"]),  # the only one
        ("x = '😀".encode()[:-1], [b"x", b" =", b" '"]),  # a part of a character is left out
        (b"", []),
    ],
)
def test_the_last_token_is_left_out_where_text_may_go_on(drafted: bytes, chain: list[bytes]) -> None:
    between = both("bundled", "llama_like")
    tokens = [piece.token for piece in between.target.encode(b"def f(x):\n    ")]
    nodes = between.chain(tokens, [piece.token for piece in between.draft.encode(drafted)])
    assert [between.target.spellings[node.token] for node in nodes] == chain


def test_text_in_the_midst_of_a_word_goes_on_there() -> None:
    """The target committed a part of a word that its tokenizer has whole: its token cannot be the next one."""
    between = both("bundled", "bundled")
    ids = between.target.ids
    nodes = between.chain([ids[b"re"]], [piece.token for piece in between.draft.encode(b"turn x\n")])
    assert b"".join(between.target.spellings[node.token] or b"" for node in nodes) == b"turn x\n"


def test_special_tokens_without_a_counterpart_end_a_draft() -> None:
    between = both("bundled", "llama_like")
    unknown = between.draft.stand_in
    assert unknown in between.draft.specials
    drafted = [piece.token for piece in between.draft.encode(b"a = 1\n")]
    tokens = [node.token for node in between.chain([300], [*drafted, unknown, *drafted])]
    assert b"".join(between.target.spellings[token] or b"" for token in tokens) == b"a = 1\n"


def drafter(**options: Any) -> Any:
    """An attached one over the noisy target with the other vocabulary."""
    made = draft_model(with_other_vocabulary(noisy()), tokenizer=other_tokenizer(), vocab_match="text", **options)
    return attached(made(), tokenizer=tokenizer())


def test_cache_is_that_of_a_fresh_prefill() -> None:
    """Accepted chains, text that is encoded anew, proposals that are thrown away, slots that begin again."""
    made, draw = drafter(num_speculative_tokens=4), random.Random(5)
    made._runner.prefill_chunk = 4
    module = with_other_vocabulary(noisy())
    fresh = Runner(wrap_model(module, name="f"), num_slots=1, context_len=96, max_nodes=9, runner=made._runner.name)
    texts, slots = [[4], [5, 30, 6], [draw.randrange(VOCAB_SIZE) for _ in range(11)]], [4, 0, 2]
    params = [SamplingParams(temperature=0.0), *(SamplingParams(temperature=0.9, seed=s) for s in (1, 2))]
    for round_ in range(10):
        depth = [4, draw.choice([0, 4]), 2]
        asked = context(texts, params=params, is_coupled=[False, True, False], slots=slots, max_depth=depth)
        if round_ % 3 == 1:
            made.propose(asked)
        tree = made.propose(asked)
        check_tree(tree)
        assert tree.distributions is None
        assert tree.scores is not None
        for scores, count in zip(tree.scores.tolist(), tree.num_nodes.tolist(), strict=True):
            assert scores[:count] == sorted(scores[:count], reverse=True)
        assert all(int(d.max()) <= most for d, most in zip(tree.depths, depth, strict=True))
        for slot, most in zip(slots, depth, strict=True):
            if most:
                assert_fresh(made._runner, slot, made._texts[slot].ids, fresh)
        for row, text in zip(tree.rows(), texts, strict=True):
            text += [*row.tokens[1 : draw.randrange(1, len(row.tokens) + 1)], draw.randrange(VOCAB_SIZE)]
        if round_ == 6:
            made.release(slots[1])
            begin(made, slots[1])


def test_the_same_tokenizer_drafts_nearly_what_tokens_draft() -> None:
    """The bundled pair of models by text: of the tokens a pass only those are lost that may go on."""
    params = SamplingParams(temperature=0.0, max_tokens=48)
    prompts = ["def add(a, b):\n    return", "import os\n\n\nclass File:\n    def __init__(self"]
    plain = [output.outputs[0].token_ids for output in LLM(str(BUNDLED)).generate(prompts, params)]
    taus = {}
    for match in ("same", "text"):
        config = {"method": "draft_model", "num_speculative_tokens": 5, "vocab_match": match}
        outputs = LLM(str(BUNDLED), speculative_config=config).generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert all(output.metrics.draft_errors == 0 for output in outputs)
        taus[match] = sum(output.metrics.mean_acceptance_length for output in outputs) / 2
    assert taus["text"] > 0.75 * taus["same"]


def test_a_tokenizer_of_another_kind() -> None:
    """A random draft model with a Llama-like tokenizer and a short context, at batch 1 and 3, sampled and greedy."""
    names = KINDS["llama_like"]()
    module = tiny_model("llama", vocab_size=len(names) + 5, max_position_embeddings=40)
    params = [SamplingParams(temperature=t, seed=3, max_tokens=20) for t in (0.0, 0.8, 0.8)]
    prompts = [TEXTS["code"], TEXTS["emoji"], "x"]
    plain = LLM(str(BUNDLED)).generate(prompts, params)
    made = draft_model(module, tokenizer=names, vocab_match="text", num_speculative_tokens=4)
    for batch in (1, 3):
        outputs = LLM(str(BUNDLED), drafter=made, trust_drafter=True, max_num_seqs=batch).generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == [o.outputs[0].token_ids for o in plain]
        assert all(output.metrics.draft_errors == 0 for output in outputs)
        assert outputs[2].metrics.num_drafted > 0
