"""Prompts ride in the passes of those who decode, as much of them as is allowed, and the texts are the same."""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from end_to_end.tiny_llms import drafters, llm
from pairwise import slow_products

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.engine.iteration import Chunk, Prefill, PrefillBudget

PROMPTS = [[5, 6, 7], list(range(3, 33)), list(range(30, 50)), [9], list(range(20, 44))]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)
CHUNK = 512


def watched(engine: LLM, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, list[int]]]:
    """Of every pass: nodes of trees, and tokens of each chunk of a prompt."""
    seen, original = [], engine.target.run
    as_pass, chunks = Prefill.as_pass, list[int]()

    def noting(prefill: Prefill, each: list[Chunk]) -> Pass:
        chunks.extend(len(chunk.tokens) for chunk in each)
        return as_pass(prefill, each)

    def run(work: Pass) -> Any:
        seen.append((work.num_tokens - sum(chunks), chunks.copy()))
        chunks.clear()
        return original(work)

    monkeypatch.setattr(Prefill, "as_pass", noting)

    monkeypatch.setattr(engine.target, "run", run)
    return seen


@cache
def plain_texts() -> list[list[int]]:
    """Each prompt in an engine of its own."""
    return [llm({}).generate([prompt], PARAMS)[0].outputs[0].token_ids for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("drafter", "limit"), slow_products(["none", "ngram tree", "draft itself tree"], [None, 1, 4, 7, 64], each=1)
)
def test_texts_do_not_depend_on_the_budget(drafter: str, limit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm(drafters()[drafter](None), max_num_seqs=3, max_num_batched_tokens=limit)
    passes = watched(engine, monkeypatch)
    got = [output.outputs[0].token_ids for output in engine.generate(PROMPTS, PARAMS)]
    assert got == plain_texts()
    mixed = [(count, chunks) for count, chunks in passes if count and chunks]
    assert mixed, "or nothing was shown"
    if limit is not None:
        assert all(sum(chunks) <= max(limit - count, 1) for count, chunks in passes)


def test_prompts_share_a_pass_in_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm({}, max_num_seqs=4, max_num_batched_tokens=40)
    passes = watched(engine, monkeypatch)
    engine.generate(PROMPTS[:3], PARAMS)
    assert passes[:2] == [(0, [3, 30, 7]), (2, [13])]


@pytest.mark.parametrize("observed", [0, 1, 5])
@pytest.mark.parametrize("limit", [7, 64])
def test_chunks_end_at_cuts(observed: int, limit: int) -> None:
    """But for those inside the tokens that drafters read, which the last chunk has all of; every prompt ends."""
    prefill = Prefill(llm({}).target, llm({})._engine._drafting, limit)
    prefill._drafting = SimpleNamespace(reads=SimpleNamespace(attention_tokens=observed))  # type: ignore[assignment]
    for cuts in ({10}, {3, 4, 20}, set(range(1, 31)), {30}, {29}, {26}):
        sequence: Any = SimpleNamespace(
            tokens=list(range(30)), num_cached=0, slot=0, wants_prompt_scores=False, cuts=cuts
        )
        ends = list[int]()
        while sequence.num_cached < 29:  # the last token alone is decoded
            (chunk,) = prefill.next_chunks([sequence], 0)
            sequence.num_cached += len(chunk.tokens)
            ends.append(sequence.num_cached)
        assert {end for end in cuts if end <= min(30 - observed, 29)} <= set(ends)
        assert not any(30 - observed < end < 30 for end in ends)


def test_one_pass_reads_all_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm({}, max_num_seqs=8)
    passes = watched(engine, monkeypatch)
    engine.generate([[5, 6, 7]] * 8, PARAMS)
    assert passes[:2] == [(0, [3] * 8), (8, [])]


@pytest.mark.parametrize("drafter", ["none", "ngram tree", "draft itself tree", "random eagle"])
@pytest.mark.parametrize("prompt", [[9], [5, 6], list(range(3, 33))], ids=len)
def test_one_pass_gives_the_first_token_of_a_prompt_that_fits(
    drafter: str, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = llm(drafters()[drafter](PROMPTS))
    passes = watched(engine, monkeypatch)
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    assert len(engine.generate([prompt], one)[0].outputs[0].token_ids) == 1
    assert passes == ([(0, [len(prompt)])] if len(prompt) > 1 else [(1, [])])


@pytest.mark.parametrize("limit", [29, 30, 31])
def test_a_prompt_that_fits_but_for_its_root(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm({}, max_num_batched_tokens=limit)
    passes = watched(engine, monkeypatch)
    output = engine.generate([PROMPTS[1]], PARAMS)[0]
    assert passes[:2] == [(0, [min(limit, 30)]), (1, [])]
    is_read_apart = limit == 29
    assert (output.metrics.steps, output.metrics.num_prefill_emitted) == ((12, 0) if is_read_apart else (11, 1))
    assert len(passes) == 12 + is_read_apart


def test_the_first_draft_knows_the_features_of_the_whole_prompt() -> None:
    """The pass that reads the root tells drafters of it, and the next one verifies a draft."""
    records: list[Any] = []
    engine = llm(drafters()["random eagle"](PROMPTS), max_num_seqs=4, on_step=records.append)
    engine.generate(PROMPTS[:3], PARAMS)
    assert [step.ends_prompt for step in records[0].sequences] == [True] * 3
    assert [step.num_drafted for step in records[0].sequences] == [0] * 3
    assert all(step.num_drafted for step in records[1].sequences)


def test_what_a_pass_took_is_shared_between_prompts_and_those_who_decode() -> None:
    records: list[Any] = []
    outputs = llm({}, max_num_seqs=3, max_num_batched_tokens=9, on_step=records.append).generate(PROMPTS, PARAMS)
    mixed = [record for record in records if record.num_prompt_tokens]
    for record in mixed:
        share = record.num_tokens / (record.num_tokens + record.num_prompt_tokens)
        assert record.decode_seconds.verify == pytest.approx(share * record.seconds.verify)
        assert record.decode_seconds.draft == record.seconds.draft
    assert any(step.ends_prompt for record in mixed for step in record.sequences)
    assert any(not step.ends_prompt for record in mixed for step in record.sequences)
    assert all(output.metrics.prefill_seconds > 0 for output in outputs if len(output.prompt_token_ids) > 1)
    for output in outputs:
        mine = [(r, step) for r in records for step in r.sequences if step.request_id == output.request_id]
        decoded = [r.decode_seconds.verify for r, step in mine if not step.ends_prompt]
        assert output.metrics.seconds.verify == pytest.approx(sum(decoded))


def test_records_say_what_a_pass_read() -> None:
    records: list[Any] = []
    llm({}, max_num_seqs=4, max_num_batched_tokens=10, on_step=records.append).generate(PROMPTS, PARAMS)
    assert sum(record.num_prompt_tokens for record in records) > 20
    assert all(record.num_tokens + record.num_prompt_tokens <= 11 for record in records)
    ends = [step.request_id for record in records for step in record.sequences if step.ends_prompt]
    assert len(ends) == len(set(ends)) <= len(PROMPTS)


class TestBudget:
    """What `PrefillBudget` learns."""

    def test_all_fits_while_nobody_decodes(self) -> None:
        budget = PrefillBudget()
        assert budget.tokens(0, CHUNK) == CHUNK
        assert budget.tokens(1, CHUNK) < CHUNK, "nobody is to wait for a whole chunk because nothing is known"

    @pytest.mark.parametrize("fixed", [0.0, 0.004], ids=["in proportion", "with a part that every chunk costs"])
    @pytest.mark.parametrize("token", [1e-5, 1e-3])
    def test_a_step_with_prompts_comes_to_take_as_long_as_it_may(self, fixed: float, token: float) -> None:
        budget, step = PrefillBudget(), 0.010
        budget.learn_seconds(step, num_decoding=1, num_prompt=0)
        for _ in range(60):
            count = budget.tokens(1, 4096)
            budget.learn_seconds(step + fixed + token * count, num_decoding=1, num_prompt=count)
        assert budget.tokens(1, 4096) == pytest.approx(max((1.4 * step - fixed) / token, 4), rel=0.1)

    def test_one_slow_step_does_not_make_prompts_slow(self) -> None:
        """A step of a hundred times the usual, as where the machine was busy, is made up for in a few others."""
        budget = PrefillBudget()
        budget.learn_seconds(0.010, num_decoding=1, num_prompt=0)
        for seconds in [0.010] * 20 + [1.0]:
            budget.learn_seconds(seconds, num_decoding=1, num_prompt=budget.tokens(1, CHUNK))
        before = budget.tokens(1, CHUNK)
        for _ in range(3):
            budget.learn_seconds(0.010, num_decoding=1, num_prompt=budget.tokens(1, CHUNK))
        assert before >= 100
        assert budget.tokens(1, CHUNK) > before

    def test_short_chunks_do_not_raise_it(self) -> None:
        budget = PrefillBudget()
        budget.learn_seconds(0.010, num_decoding=1, num_prompt=0)
        before = budget.tokens(1, CHUNK)
        for _ in range(20):
            budget.learn_seconds(0.010, num_decoding=1, num_prompt=1)
        assert budget.tokens(1, CHUNK) == before

    def test_something_is_always_read(self) -> None:
        """Four tokens, and as many as are decoded, however long a step takes; one where a limit leaves no room."""
        budget = PrefillBudget()
        budget.learn_seconds(1e-6, num_decoding=1, num_prompt=0)
        for _ in range(40):
            budget.learn_seconds(1.0, num_decoding=1, num_prompt=budget.tokens(1, CHUNK))
        assert budget.tokens(1, CHUNK) == 4
        assert budget.tokens(8, CHUNK) == 8
        assert PrefillBudget(4).tokens(9, CHUNK) == 1

    def test_a_limit_counts_drafted_nodes(self) -> None:
        assert PrefillBudget(64).tokens(24, CHUNK) == 40
        assert PrefillBudget(4096).tokens(24, CHUNK) == CHUNK


@pytest.mark.parametrize("value", [0, -1, 1.5, True, "8"])
def test_limits_that_are_none(value: Any) -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        llm({}, max_num_batched_tokens=value)


def test_prompts_that_are_scored_take_turns_with_those_who_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk of one prompt an iteration, as small as of prompts that are only read."""
    scored = replace(PARAMS, prompt_logprobs=2, max_tokens=4)
    alone = [llm({}).generate([prompt], scored)[0] for prompt in PROMPTS]
    engine = llm({}, max_num_seqs=4)
    passes = watched(engine, monkeypatch)
    first, *others = engine.generate([[5, 6], *PROMPTS], [replace(PARAMS, max_tokens=60), *[scored] * len(PROMPTS)])
    assert [output.outputs[0].token_ids for output in others] == [each.outputs[0].token_ids for each in alone]
    assert [list(each) for output in others for each in output.prompt_logprobs or () if each] == [
        list(each) for output in alone for each in output.prompt_logprobs or () if each
    ]
    begin = next(at for at, (count, _) in enumerate(passes) if count)
    end = len(passes) - next(at for at, (_, chunks) in enumerate(reversed(passes)) if chunks)
    kinds = [bool(count) for count, _ in passes[begin:end]]
    assert kinds.count(False) > len(PROMPTS)
    assert not any(not one and not other for one, other in pairwise(kinds)), "two were read, and nobody decoded between"
    assert max(sum(chunks) for count, chunks in passes[begin:end] if not count) < 30
    assert len(first.outputs[0].token_ids) == 60


def test_scored_prompts_are_read_in_short_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = LLM("models/tinycode")
    passes = watched(engine, monkeypatch)
    ids = [5, 60, 700] * 100
    scored = engine.generate([ids], SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0))[0]
    assert [chunks for _, chunks in passes] == [[128], [128], [43], []]  # the root has a pass of its own
    assert scored.prompt_logprobs is not None
    assert [list(each) for each in scored.prompt_logprobs[1:] if each] == [[token] for token in ids[1:]]
