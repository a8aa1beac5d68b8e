"""Streams: chunks make up the final text, closing one frees its slots, and calls may be made while one is open."""

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.tiny_llms import drafters, llm, tokenizer
from pairwise import slow_products

from foretoken import LLM, SamplingParams, StreamChunk
from foretoken.core.errors import RequestError
from foretoken.core.records import SequenceStep, StepRecord
from foretoken.drafters.base import TargetReads
from foretoken.text.codec import Codec, Detokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
DRAFTERS = drafters()


class Released:
    """A drafter without drafts that counts how its slots are given and released."""

    name, reads, nodes_by_depth = "released", TargetReads(), (1, 2)

    def __init__(self) -> None:
        self.released: list[int] = []

    def attach(self, target: object) -> None: ...

    def begin(self, slot: int, request: object) -> None: ...

    def propose(self, context: object) -> None:
        raise ValueError("nothing to propose")

    def commit(self, committed: object) -> None: ...

    def release(self, slot: int) -> None:
        self.released.append(slot)


def tokens_of(chunks: Iterable[StreamChunk]) -> list[int]:
    """All tokens of some chunks."""
    return list(chain.from_iterable(chunk.token_ids for chunk in chunks))


def is_idle(engine: LLM) -> bool:
    """Whether all slots are free, each once, and nothing waits."""
    loop = engine._engine
    return sorted(loop._scheduler._slots.free) == list(range(len(loop._scheduler._slots.free))) and not loop.has_work


@pytest.mark.parametrize(
    ("batch", "drafter"), slow_products([4, 1], ["none", "oracle tree", "draft itself tree"], each=1)
)
def test_chunks_make_up_text_and_tokens(drafter: str, batch: int) -> None:
    mix, plain = request_mix(), plain_mix()
    engine = llm(DRAFTERS[drafter](references(plain)), max_num_seqs=batch, max_model_len=CONTEXT_LEN)
    chunks: dict[tuple[int, int], list[StreamChunk]] = defaultdict(list)
    for chunk in engine.stream([r.prompt for r in mix], [r.params for r in mix]):
        chunks[chunk.prompt_index, chunk.index].append(chunk)
    for prompt_index, output in enumerate(plain):
        for completion in output.outputs:
            parts = chunks.pop((prompt_index, completion.index))
            assert "".join(part.text for part in parts) == completion.text
            assert tokens_of(parts) == completion.token_ids
            assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [completion.finish_reason]
            assert all(part.token_ids for part in parts)
    assert not chunks
    assert is_idle(engine)


@pytest.mark.parametrize("drafter", ["none", "oracle tree", "ngram"])
def test_parts_say_who_proposed_their_tokens(drafter: str) -> None:
    """Against the records of the iterations, and the text of every token where they come one by one."""
    mix, plain = request_mix(), plain_mix()
    steps: dict[str, list[SequenceStep]] = defaultdict(list)

    def note(record: StepRecord) -> None:
        for step in record.sequences:
            steps[step.request_id].append(step)

    engine = llm(DRAFTERS[drafter](references(plain)), max_num_seqs=8, max_model_len=CONTEXT_LEN, on_step=note)
    chosen = [(request, output) for request, output in zip(mix, plain, strict=True) if request.params.n == 1]
    chunks: dict[int, list[StreamChunk]] = defaultdict(list)
    for chunk in engine.stream([request.prompt for request, _ in chosen], [request.params for request, _ in chosen]):
        assert "".join(part.text for part in chunk.parts) == chunk.text
        assert all(part.text for part in chunk.parts)
        chunks[chunk.prompt_index].append(chunk)
    codec, num_drafted = Codec(tokenizer(), len(tokenizer())), 0
    for place, (request, output) in enumerate(chosen):
        taken, completion = chunks[place], output.outputs[0]
        origins = [
            origin
            for step in steps[taken[0].request_id]
            for origin in [*step.accepted_from, *[()] * (step.num_emitted - step.num_accepted)]
        ]
        spans = Detokenizer(codec, output.prompt_token_ids, skip_special_tokens=request.params.skip_special_tokens)
        ends_with_token = completion.finish_reason == "stop" and not isinstance(completion.stop_reason, str)
        is_hidden = ends_with_token and not request.params.include_stop_str_in_output
        spans.push_all(completion.token_ids[: len(completion.token_ids) - is_hidden])
        parts = [part for chunk in taken for part in chunk.parts]
        shown = [part.accepted_from for part in parts for _ in part.text]
        by_token = zip(origins, spans.parts(completion.text), strict=False)  # a hidden last token has an origin alone
        assert shown == [origin for origin, part in by_token for _ in part]
        assert [each for chunk in taken for each in chunk.is_drafted] == [bool(origin) for origin in origins]
        num_drafted += sum(map(bool, shown))
    assert (num_drafted > 20) == (drafter != "none")


def test_text_waits_for_characters_and_stop_strings() -> None:
    """Nothing is shown that the next token could change: the shown text is always the beginning of the final one."""
    mix, plain = request_mix(), plain_mix()
    engine = llm({}, max_num_seqs=8, max_model_len=CONTEXT_LEN)
    shown: dict[tuple[int, int], str] = defaultdict(str)
    withheld = 0
    for chunk in engine.stream([r.prompt for r in mix], [r.params for r in mix]):
        key = chunk.prompt_index, chunk.index
        shown[key] += chunk.text
        final = plain[chunk.prompt_index].outputs[chunk.index].text
        assert final.startswith(shown[key])
        withheld += not chunk.text and chunk.finish_reason is None
    assert withheld > 10


@pytest.mark.parametrize(
    "drafter",
    [
        "none",
        "draft itself tree",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("oracle [3, 0, 5]", "ngram")),
    ],
)
def test_closing_a_stream_frees_its_slots(drafter: str) -> None:
    """In prefill, while decoding, and with more waiting than running; the next call is exact."""
    mix, plain = request_mix(), plain_mix()
    engine = llm(DRAFTERS[drafter](references(plain)), max_num_seqs=3, max_model_len=CONTEXT_LEN)
    engine.target.prefill_chunk = 4
    for taken in (0, 1, 2, 7, 20):
        stream = engine.stream([r.prompt for r in mix], [r.params for r in mix])
        for _ in range(taken):
            next(stream)
        stream.close()
        assert is_idle(engine)
    got = engine.generate([r.prompt for r in mix], [r.params for r in mix])
    assert [c.token_ids for o in got for c in o.outputs] == [c.token_ids for o in plain for c in o.outputs]


def test_every_slot_given_is_released_to_the_drafter() -> None:
    drafter = Released()
    engine = llm({"drafter": lambda: drafter}, max_num_seqs=2)
    engine.generate([[5], [6], [7]], SamplingParams(temperature=0.0, max_tokens=2))
    assert len(drafter.released) == 3
    stream = engine.stream([[5], [6], [7]], GREEDY)
    next(stream)
    stream.close()
    assert sorted(drafter.released[3:]) == [0, 1]


def test_calls_may_be_made_while_a_stream_is_open() -> None:
    alone = llm({})
    expected = {i: alone.generate([i], GREEDY)[0].outputs[0].token_ids for i in (5, 6, 7)}
    engine = llm(DRAFTERS["draft itself"](None), max_num_seqs=2)
    first, second = engine.stream([5], GREEDY), engine.stream([6], GREEDY)
    chunks = {5: [next(first)], 6: [next(second)]}
    assert engine.generate([7], GREEDY)[0].outputs[0].token_ids == expected[7]
    chunks[6] += list(second)
    chunks[5] += list(first)
    for prompt in (5, 6):
        assert tokens_of(chunks[prompt]) == expected[prompt]
        assert chunks[prompt][-1].finish_reason == "length"
    assert is_idle(engine)


def test_closing_one_stream_leaves_the_other() -> None:
    engine = llm({}, max_num_seqs=2)
    expected = engine.generate([6], GREEDY)[0].outputs[0].token_ids
    first, second = engine.stream([5], GREEDY), engine.stream([6], GREEDY)
    taken = next(second).token_ids
    next(first)
    first.close()
    assert taken + tokens_of(second) == expected
    assert is_idle(engine)


def test_errors_come_with_the_call_not_with_the_first_chunk() -> None:
    with pytest.raises(RequestError, match="empty"):
        llm({}).stream([[]], GREEDY)


@pytest.mark.parametrize("length", [1, 9])
def test_the_first_chunk_of_the_first_completion_has_the_scores_of_the_prompt(length: int) -> None:
    engine = llm({}, max_num_seqs=4)
    engine.target.prefill_chunk = 4
    prompts = [list(range(5, 5 + length)), list(range(3, 3 + 2 * length))]
    params = SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=2, n=2)
    expected = [output.prompt_logprobs for output in engine.generate(prompts, params)]
    chunks = list(engine.stream(prompts, params))
    for index, scores in enumerate(expected):
        first, *others = [each for each in chunks if (each.prompt_index, each.index) == (index, 0)]
        assert first.prompt_logprobs == scores
        assert len(scores or ()) == len(prompts[index])
        others += [each for each in chunks if (each.prompt_index, each.index) == (index, 1)]
        assert others
        assert all(each.prompt_logprobs is None for each in others)
    assert all(each.prompt_logprobs is None for each in engine.stream(prompts, GREEDY))
