"""One request's failure, wherever it happens, ends that request and no other."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from end_to_end.tiny_llms import drafters, llm, tokenizer
from pairwise import slow_products
from tiny_models import EOS_ID, VOCAB_SIZE, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.acceptance.select import LOSSLESS_RULES, LOSSY_RULES
from foretoken.core.passes import Pass
from foretoken.core.records import StepRecord
from foretoken.core.results import CompletionOutput
from foretoken.engine import loop
from foretoken.engine.sequence import Sequence
from foretoken.sampling.batch import HistoryTable, SamplingBatch
from foretoken.text.codec import Detokenizer

DRAFTERS = drafters()
PROMPTS = [[5], [6, 7], [8, 9, 10]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=20, logprobs=1, repetition_penalty=1.1),
    SamplingParams(temperature=0.8, seed=1, max_tokens=20, repetition_penalty=1.2, logprobs=2),
    SamplingParams(temperature=0.9, seed=2, max_tokens=20, top_k=9, top_p=0.9, presence_penalty=0.1, logprobs=0),
]
Fault = Callable[[pytest.MonkeyPatch, LLM, int], None]


def raising(kind: type, name: str, is_victims: Callable[..., bool], error: BaseException) -> Fault:
    """A fault: `kind.name` raises when it is about the victim; is_victims(victim, *arguments of the call)."""

    def install(monkeypatch: pytest.MonkeyPatch, engine: LLM, victim: int) -> None:
        original = getattr(kind, name)

        def faulty(*arguments: Any, **keywords: Any) -> Any:
            if is_victims(victim, *arguments):
                raise error
            return original(*arguments, **keywords)

        monkeypatch.setattr(kind, name, faulty)

    return install


def in_batch(victim: int, requests: Any, *_: Any) -> bool:
    """Whether a list of sampling requests has the victim's."""
    return any(request.params == PARAMS[victim] for request in requests)


def in_slot(victim: int, engine: LLM, slots: Any) -> bool:
    """Whether the victim runs in one of some slots."""
    running = [s for s in engine._engine._scheduler.running if s.params == PARAMS[victim]]
    return any(s.slot in slots for s in running)


def faulty_target(name: str, slots_of: Callable[..., Any], error: BaseException) -> Fault:
    """A fault of the runner's method when it serves the victim's slot."""

    def install(monkeypatch: pytest.MonkeyPatch, engine: LLM, victim: int) -> None:
        original = getattr(engine.target, name)

        def faulty(*arguments: Any) -> Any:
            if in_slot(victim, engine, slots_of(*arguments)):
                raise error
            return original(*arguments)

        monkeypatch.setattr(engine.target, name, faulty)

    return install


def prompts_and_trees(work: Pass) -> tuple[list[int], list[int]]:
    """Slots of which a pass reads a chunk of the prompt, and slots of which it verifies a tree."""
    with_logits = set() if work.logit_rows is None else set(work.logit_rows.tolist())
    is_tree = [start in with_logits for start in work.offsets[:-1]]  # of a chunk, at most the last token has logits
    return (
        [slot for slot, tree in zip(work.slots, is_tree, strict=True) if not tree],
        [slot for slot, tree in zip(work.slots, is_tree, strict=True) if tree],
    )


FAULTS: dict[str, Fault] = {
    "sampling parameters": raising(SamplingBatch, "build", in_batch, TypeError("not a number")),
    "history": raising(HistoryTable, "start", lambda v, _, slot, tokens: tokens == PROMPTS[v], IndexError("no row")),
    "prefill": faulty_target("run", lambda work: prompts_and_trees(work)[0], RuntimeError("no room")),
    "verify": faulty_target("run", lambda work: prompts_and_trees(work)[1], torch.OutOfMemoryError("out of memory")),
    "commit": faulty_target("commit", lambda slots, *_: slots, ValueError("bad path")),
    "stop checks": raising(Sequence, "emit", lambda v, s, _: s.params == PARAMS[v], MemoryError("no memory left")),
    "logprobs": raising(
        loop, "token_scores", lambda v, _, tokens, n: n == PARAMS[v].logprobs, RuntimeError("too many")
    ),
}  # fmt: skip


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


FAULTS["text of an error"] = raising(SamplingBatch, "build", in_batch, UnprintableError())


@cache
def plain_alone() -> list[CompletionOutput]:
    """Each request in an engine of its own."""
    return [llm({}).generate(prompt, params)[0].outputs[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.mark.parametrize(("drafter", "fault"), slow_products(["none", "draft itself tree"], list(FAULTS), each=1))
def test_the_others_go_on(drafter: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = plain_alone()
    # A fixed bound: by measured times a prompt's last token may come in a pass of its own, where it looks like a tree.
    engine = llm(DRAFTERS[drafter](None), max_num_seqs=3, max_num_batched_tokens=64)
    for victim in range(1 if fault == "prefill" else 0, 3):  # a prompt of one token has nothing to prefill
        with monkeypatch.context() as patch:
            FAULTS[fault](patch, engine, victim)
            outputs = [output.outputs[0] for output in engine.generate(PROMPTS, PARAMS)]
        for index, (got, want) in enumerate(zip(outputs, plain, strict=True)):
            if index != victim:
                assert (got.token_ids, got.text, got.error) == (want.token_ids, want.text, None)
                continue
            # What fails once a prompt is read comes after the first token, but for prompts of a token.
            num_before = int(fault in {"verify", "commit"} and len(PROMPTS[victim]) > 1)
            assert (got.finish_reason, got.token_ids) == ("error", want.token_ids[:num_before])
            assert want.text.startswith(got.text)
            assert bool(got.text) == bool(num_before)
            assert got.error is not None
            assert got.error.startswith("decoding failed: ")
        assert not engine._engine.has_work
        assert [o.outputs[0].token_ids for o in engine.generate(PROMPTS, PARAMS)] == [p.token_ids for p in plain]


def test_a_tokenizer_that_cannot_decode_a_token_ends_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even what is left of the text cannot be decoded then: the request keeps its tokens and says why."""
    plain = [output.outputs[0] for output in llm({}).generate(PROMPTS, PARAMS)]
    original = Detokenizer._decode

    def faulty(self: Detokenizer, tokens: list[int]) -> str:
        if plain[0].token_ids[7] in tokens and self._tokens[:1] == PROMPTS[0]:
            raise UnicodeError("no such token")
        return original(self, tokens)

    monkeypatch.setattr(Detokenizer, "_decode", faulty)
    outputs = [output.outputs[0] for output in llm({}).generate(PROMPTS, PARAMS)]
    assert outputs[0].finish_reason == "error"
    assert str(outputs[0].error).startswith(
        "decoding failed: UnicodeError: no such token. Its last tokens could not be "
    )
    assert [(o.token_ids, o.text) for o in outputs[1:]] == [(p.token_ids, p.text) for p in plain[1:]]


def test_closing_streams_that_cannot_be_decoded_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokenizer fails while what is held back is turned into text: slots are freed all the same."""
    engine = llm({}, max_num_seqs=2)
    want = engine.generate(PROMPTS[2], PARAMS[2])[0].outputs[0].token_ids
    streams = [engine.stream(prompt, params) for prompt, params in zip(PROMPTS[:2], PARAMS[:2], strict=True)]
    for stream in streams:
        next(stream)

    def fails(self: Detokenizer, tokens: list[int]) -> None:
        raise UnicodeError("no such token")

    with monkeypatch.context() as patch:
        patch.setattr(Detokenizer, "push_all", fails)
        patch.setattr(Detokenizer, "flush", fails)
        for stream in streams:
            stream.close()
    assert not engine._engine.has_work
    assert engine.generate(PROMPTS[2], PARAMS[2])[0].outputs[0].token_ids == want


def test_a_callback_that_raises_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[StepRecord] = []

    def fails(record: StepRecord) -> None:
        calls.append(record)
        raise ValueError("the disk of the monitoring is full")

    engine = llm({}, on_step=fails)
    want = llm({}).generate(PROMPTS, PARAMS)
    for _ in range(2):
        got = engine.generate(PROMPTS, PARAMS)
        assert [output.outputs[0] for output in got] == [output.outputs[0] for output in want]
    assert len(calls) == 1
    assert "on_step raised ValueError: the disk of the monitoring is full. It is not called any more." in caplog.text


def test_a_callback_whose_error_has_no_text_ends_no_request(caplog: pytest.LogCaptureFixture) -> None:
    def fails(record: StepRecord) -> None:
        raise UnprintableError

    with caplog.at_level("DEBUG", "foretoken"):
        got = llm({}, on_step=fails).generate(PROMPTS, PARAMS)
    assert [output.outputs[0] for output in got] == [output.outputs[0] for output in llm({}).generate(PROMPTS, PARAMS)]
    assert "on_step raised UnprintableError: its text cannot be shown" in caplog.text


def test_a_failed_request_never_says_that_it_stopped() -> None:
    """A stop string that is completed by what was held back ends the text, but the reason stays the failure."""
    params = SamplingParams(temperature=0.0, max_tokens=9, stop=["never there"])
    engine = llm({})
    stream = engine.stream([5], params)
    next(stream)
    sequence = engine._engine._scheduler.running[0]
    sequence._cut_at_stop_string = lambda num_new: setattr(sequence, "finish_reason", "stop") is None
    sequence._detokenizer.flush = lambda: "held back"
    sequence.fail("out of luck")
    assert (sequence.finish_reason, sequence.stop_reason, sequence.error) == ("error", None, "out of luck")


WHOLE_VOCABULARY = [[token] for token in range(VOCAB_SIZE)]
IMPOSSIBLE = {
    "bad words": {"bad_words": WHOLE_VOCABULARY},
    "held back": {
        "min_tokens": 9,
        "stop_token_ids": [token for token in range(VOCAB_SIZE) if token % 2],
        "bad_words": [[token] for token in range(VOCAB_SIZE) if token % 2 == 0],
    },
}
RULES: list[dict[str, Any]] = [{}, *({"acceptance": rule} for rule in (*LOSSLESS_RULES[1:], "lenient", "typical"))]


OTHER = SamplingParams(temperature=0.0, max_tokens=20)


@cache
def plain_other() -> list[int]:
    """What stands beside an impossible request, alone."""
    return llm({}).generate([[7]], OTHER)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    ("method", "temperature", "reason"),
    slow_products(["none", "ngram", "drafters.adversarial"], [0.0, 0.8], list(IMPOSSIBLE), each=1),
)
def test_a_request_without_a_possible_token_ends_with_an_error(method: str, temperature: float, reason: str) -> None:
    """Token 0 for ever was the answer."""
    params = SamplingParams(temperature=temperature, max_tokens=20, **IMPOSSIBLE[reason])
    for rule in RULES if method != "none" else RULES[:1]:
        config = None if method == "none" else {"method": method, **rule}
        engine = llm({"speculative_config": config}, max_num_seqs=2)
        for seed in (None, 1):
            ended, fine = engine.generate([[5, 6, 5, 6], [7]], [replace(params, seed=seed), OTHER])
            assert ended.outputs[0].finish_reason == "error"
            assert "no token is possible" in str(ended.outputs[0].error)
            assert len(ended.outputs[0].token_ids) <= 1
            if rule.get("acceptance") not in LOSSY_RULES:  # which are lossy for greedy requests too
                assert fine.outputs[0].token_ids == plain_other()


def test_a_first_request_without_a_possible_token_leaves_the_engine_right() -> None:
    """What chooses the depth of drafts learned of an iteration that emitted nothing, and failed ever after."""
    engine = llm(DRAFTERS["ngram adaptive"](None))
    (ended,) = engine.generate([[5]], SamplingParams(**IMPOSSIBLE["bad words"]))
    assert (ended.outputs[0].finish_reason, ended.outputs[0].token_ids) == ("error", [])
    assert engine.generate([[7]], OTHER)[0].outputs[0].token_ids == plain_other()


def test_requests_become_impossible_where_plain_decoding_says_so() -> None:
    """Forbidden sequences leave nothing after a while: every drafter ends at the same token, with the same text."""
    others = [[token] for token in range(VOCAB_SIZE) if token not in (11, 12)]
    params = SamplingParams(temperature=0.0, max_tokens=60, bad_words=[*others, [11, 11], [12, 12], [11, 12, 11]])
    plain = llm({}).generate([[5]], params)[0].outputs[0]
    assert plain.finish_reason == "error"
    assert 1 < len(plain.token_ids) < 60
    for name in ("ngram", "draft tree", "oracle [3, 0, 5]", "random wide"):
        got = llm(DRAFTERS[name]([[5, *plain.token_ids]])).generate([[5]], params)[0].outputs[0]
        assert (got.token_ids, got.finish_reason, got.error) == (plain.token_ids, "error", plain.error)


class Poorer:
    """A tokenizer that lacks the last ids of the model."""

    def __init__(self, size: int) -> None:
        self._inner, self._size = tokenizer(), size

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._inner(*arguments, **keywords)

    def decode(self, *arguments: Any, **keywords: Any) -> str:
        return str(self._inner.decode(*arguments, **keywords))

    def get_vocab(self) -> dict[str, int]:
        return {token: index for token, index in self._inner.get_vocab().items() if index < self._size}


@pytest.mark.parametrize("name", ["none", "draft itself tree", pytest.param("ngram", marks=pytest.mark.slow)])
def test_ids_that_the_tokenizer_lacks_are_not_generated_unless_asked_for(name: str) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=40, seed=3, ignore_eos=True, logprobs=VOCAB_SIZE)
    arguments = {**DRAFTERS[name](None)}
    outputs = {}
    for allowed in (False, True):
        engine = llm(arguments, allow_unknown_ids=allowed)
        poorer = LLM(
            engine.target.model, tokenizer=Poorer(20), runner="generic", allow_unknown_ids=allowed, **arguments
        )
        outputs[allowed] = poorer.generate([[5], [6]], params)
        if allowed:
            want = [output.outputs[0].token_ids for output in engine.generate([[5], [6]], params)]
            assert [output.outputs[0].token_ids for output in outputs[allowed]] == want
    assert max(token for output in outputs[True] for token in output.outputs[0].token_ids) >= 20
    for output in outputs[False]:
        assert max(output.outputs[0].token_ids) < 20
        assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("runner", "dtype"),
    [
        ("generic", torch.float32),
        ("generic", torch.bfloat16),
        ("lean-stock", torch.float32),
        ("lean-native", torch.float32),
    ],
    ids=str,
)
def test_ids_that_the_tokenizer_lacks_in_every_runner(runner: str, dtype: torch.dtype) -> None:
    """Logits that are float32 already stay the tensor that the model made in inference mode."""
    engine = LLM(tiny_model("llama", dtype=dtype), tokenizer=Poorer(20), runner=runner)
    output = engine.generate([[5]], SamplingParams(temperature=1.0, max_tokens=20, seed=3, ignore_eos=True))[0].outputs[
        0
    ]
    assert (output.finish_reason, output.error) == ("length", None)
    assert max(output.token_ids) < 20


def test_end_of_sequence_is_always_a_known_id() -> None:
    engine = LLM(llm({}).target.model, tokenizer=Poorer(EOS_ID), runner="generic")
    output = engine.generate([[5]], SamplingParams(temperature=0.0, max_tokens=9, logit_bias={EOS_ID: 50.0}))[0]
    assert output.outputs[0].token_ids == [EOS_ID]
