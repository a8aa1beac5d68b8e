"""`AsyncLLM`: many threads, tasks and event loops on one engine, each with the text that it gets alone.

Slow because hundreds of calls wait for one engine.
"""

import asyncio
import functools
import gc
import itertools
import random
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.tiny_llms import drafters, llm, target, tokenizer
from entrypoints.test_many_threads import in_child, is_content
from entrypoints.test_streaming import is_idle

from foretoken import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineStopped,
    QueueFull,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from foretoken.core.errors import ConfigError, RequestError
from foretoken.core.records import StepRecord
from foretoken.core.results import StreamChunk
from foretoken.engine.loop import Engine
from foretoken.engine.scheduler import Scheduler
from foretoken.entrypoints.async_llm import RequestStream
from foretoken.entrypoints.serving import Throughput, _at_exit

PATIENCE_S = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
DRAFTERS = drafters()


class Gate:
    """Lets iterations pass one by one: each waits at its end until it may go on."""

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self.arrived, self._permits = threading.Semaphore(0), threading.Semaphore(0)

    def __call__(self, record: StepRecord) -> None:
        self.records.append(record)
        self.arrived.release()
        self._permits.acquire(timeout=PATIENCE_S)

    def open(self, count: int = 1000) -> None:
        self._permits.release(count)

    def wait(self) -> None:
        """Until another iteration is at its end."""
        assert self.arrived.acquire(timeout=PATIENCE_S)

    def count(self, request_id: str) -> int:
        """Iterations in which a request took part."""
        return sum(step.request_id == request_id for record in self.records for step in record.sequences)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs a test in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def ids_of(output: RequestOutput) -> list[list[int]]:
    """Tokens of all completions."""
    return [completion.token_ids for completion in output.outputs]


async def within_patience(*tasks: Any) -> list[Any]:
    """What tasks give; fails where one of them hangs."""
    return await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE_S)


async def chunks_of(stream: RequestStream) -> dict[int, list[StreamChunk]]:
    """All chunks by completion."""
    chunks = defaultdict(list)
    async for chunk in stream:
        chunks[chunk.index].append(chunk)
    return chunks


@pytest.mark.parametrize("drafter", [pytest.param("none", marks=pytest.mark.slow), "ngram tree"])
def test_64_threads_and_200_tasks_get_the_texts_of_single_calls(drafter: str) -> None:
    """Tasks of one loop, threads with loops of their own, and threads that call the `LLM` itself, over eight slots.

    Greedy and seeded requests, with drafts, with few and without any.
    """
    runner = "lean-native"
    mix, plain = request_mix(), plain_mix(runner)
    shared = llm(DRAFTERS[drafter](references(plain)), runner=runner, max_num_seqs=8, max_model_len=CONTEXT_LEN)
    ways = [{}, {"speculative": {"enabled": False}}, {"speculative": {"max_nodes": 3}}]

    def request(number: int) -> tuple[dict[str, Any], SamplingParams, list[list[int]]]:
        index = random.Random(number).randrange(len(mix))
        return {"prompt_token_ids": mix[index].prompt, **ways[number % 3]}, mix[index].params, ids_of(plain[index])

    async def task(number: int) -> None:
        prompt, params, want = request(number)
        if number % 2:
            assert ids_of(await engine.generate(prompt, params)) == want
        else:
            chunks = await chunks_of(engine.submit(prompt, params))
            assert [[t for c in chunks[i] for t in c.token_ids] for i in range(len(want))] == want

    def thread(number: int) -> None:
        prompt, params, want = request(number)
        if number % 4 == 0:
            assert ids_of(shared.generate([prompt], params)[0]) == want
        elif number % 4 == 1:  # submitted outside of the loop that reads it
            assert ids_of(asyncio.run(engine.submit(prompt, params).output())) == want
        else:
            asyncio.run(task(number))

    async def run() -> None:
        with ThreadPoolExecutor(64) as pool:
            futures = [pool.submit(thread, number) for number in range(1000, 1064)]
            await within_patience(*(task(number) for number in range(200)))
            await within_patience(*map(asyncio.wrap_future, futures))
        assert (engine.num_running, engine.num_waiting) == (0, 0)

    engine = AsyncLLM(shared, max_waiting_requests=300)
    asyncio.run(run())
    engine.close()
    assert is_idle(shared)


@in_loop
async def test_chunks_make_up_outputs() -> None:
    """Text, tokens and log-probabilities of all completions, and how they ended; the result has metrics."""
    mix, plain = request_mix(), plain_mix()
    async with AsyncLLM(llm(DRAFTERS["draft itself tree"](None), max_model_len=CONTEXT_LEN)) as engine:
        streams = [engine.submit(each.prompt, each.params) for each in mix]
        found = await within_patience(*map(chunks_of, streams))
        for stream, chunks, want in zip(streams, found, plain, strict=True):
            output = await stream.output()
            assert output.finished
            assert output.request_id == stream.request_id
            assert output.metrics.num_emitted == sum(map(len, ids_of(want)))
            assert output.metrics.num_accepted > 0 or output.metrics.num_emitted < 4 * len(want.outputs)
            for completion in want.outputs:
                parts = chunks[completion.index]
                assert "".join(part.text for part in parts) == completion.text
                assert [t for part in parts for t in part.token_ids] == completion.token_ids
                assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
                assert (parts[-1].finish_reason, parts[-1].stop_reason) == (
                    completion.finish_reason, completion.stop_reason,
                )  # fmt: skip
                scores = [[*entry] for part in parts for entry in part.logprobs or []]
                assert scores == [[*entry] for entry in completion.logprobs or []]
                assert {part.request_id for part in parts} == {stream.request_id}


async def _leave_early(stream: RequestStream, gate: Gate) -> None:
    reading = asyncio.create_task(_first_chunk(stream))
    await asyncio.sleep(0)
    gate.open(1)
    await reading


async def _first_chunk(stream: RequestStream) -> None:
    async for _ in stream:
        break


async def _cancel(stream: RequestStream, gate: Gate) -> None:
    await _cancelled(stream.output(), gate)


async def _cancel_reader(stream: RequestStream, gate: Gate) -> None:
    await _cancelled(anext(stream), gate)


async def _cancelled(waited_for: Awaitable[Any], gate: Gate) -> None:
    task = asyncio.ensure_future(waited_for)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open(1)


async def _abort(stream: RequestStream, gate: Gate) -> None:
    stream.abort()
    gate.open(1)


@pytest.mark.parametrize(
    ("end", "iterations"), [(_leave_early, 2), (_cancel, 1), (_cancel_reader, 1), (_abort, 1)]
)  # fmt: skip
@in_loop
async def test_a_reader_that_ends_early_frees_the_slot_within_one_iteration(
    end: Callable[[RequestStream, Gate], Any], iterations: int
) -> None:
    """The iteration that is going on when it ends is the last one; the request behind it is served next."""
    gate = Gate()
    async with AsyncLLM(llm({}, max_num_seqs=1, on_step=gate)) as engine:
        stream = engine.submit([5], LONG, request_id="ends early")
        behind = asyncio.create_task(engine.generate([6], GREEDY))
        await asyncio.to_thread(gate.wait)
        await end(stream, gate)
        for _ in range(iterations - 1):
            await asyncio.to_thread(gate.wait)
        await asyncio.sleep(0)  # the loop closes the iteration that was left
        gate.open()
        output = (await within_patience(stream.output(), behind))[0].outputs[0]
        assert output.finish_reason == "abort"
        assert 1 <= gate.count("ends early") == len(output.token_ids) <= iterations
        assert is_idle(engine.llm)
        assert (engine.num_running, engine.num_waiting) == (0, 0)


@in_loop
async def test_requests_are_aborted_by_their_ids() -> None:
    """One that is running, one that waits behind another that goes on; what is unknown or over is no error."""
    gate = Gate()
    async with AsyncLLM(llm({}, max_num_seqs=1, on_step=gate)) as engine:
        tasks = [asyncio.create_task(engine.generate([5], GREEDY, request_id=name)) for name in "abc"]
        await asyncio.to_thread(gate.wait)
        for name in ("a", "c", "unknown"):
            engine.abort(name)
        gate.open()
        a, b, c = (output.outputs[0] for output in await within_patience(*tasks))
        assert [each.finish_reason for each in (a, b, c)] == ["abort", "length", "abort"]
        assert [len(each.token_ids) for each in (a, b, c)] == [1, 30, 0]
        assert [gate.count(name) for name in "abc"] == [1, 30, 0]
        engine.abort("b")
        assert is_idle(engine.llm)


@pytest.mark.parametrize("kind", [None, *RequestOutputKind])
@pytest.mark.parametrize("n", [1, 3])
def test_results_on_the_way_are_of_the_kind_that_is_asked_for(kind: RequestOutputKind | None, n: int) -> None:
    """Each iteration waits until the result of the one before was read."""
    gate, drafting = Gate(), DRAFTERS["ngram tree"](None)
    engine = AsyncLLM(llm(drafting, max_num_seqs=4, on_step=gate))
    params = SamplingParams(n=n, temperature=0.8, seed=3, max_tokens=20, logprobs=2, prompt_logprobs=1)
    whole = llm(drafting, max_num_seqs=4).generate([5, 9, 3, 5, 9], params)[0]
    params.output_kind = kind

    async def run() -> list[RequestOutput]:
        results = []
        gate.open(1000 if kind == RequestOutputKind.FINAL_ONLY else 1)
        async for each in engine.generate([5, 9, 3, 5, 9], params, "mine"):
            results.append(each)
            gate.open(1)
        return results

    results = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    *before, last = results
    assert [each.finished for each in results] == [False] * len(before) + [True]
    assert {each.request_id for each in results} == {"mine"}
    assert all(each.prompt_token_ids == [5, 9, 3, 5, 9] and len(each.outputs) == n for each in results)
    assert last.prompt_logprobs == whole.prompt_logprobs
    assert last.metrics.num_emitted == whole.metrics.num_emitted
    assert [each.metrics.steps for each in results] == sorted(each.metrics.steps for each in results)
    assert len(results) == (1 if kind == RequestOutputKind.FINAL_ONLY else len(gate.records))
    assert len(gate.records) > 3
    for index, completion in enumerate(whole.outputs):
        parts = [each.outputs[index] for each in results]
        assert (parts[-1].finish_reason, parts[-1].stop_reason) == (completion.finish_reason, completion.stop_reason)
        assert parts[-1].cumulative_logprob == pytest.approx(completion.cumulative_logprob)
        if kind == RequestOutputKind.DELTA:
            assert "".join(part.text for part in parts) == completion.text
            assert [token for part in parts for token in part.token_ids] == completion.token_ids
            assert [each for part in parts for each in part.logprobs or ()] == completion.logprobs
        else:
            assert (parts[-1].text, parts[-1].token_ids) == (completion.text, completion.token_ids)
            assert parts[-1].logprobs == completion.logprobs
            for shorter, longer in itertools.pairwise(parts):
                assert longer.text.startswith(shorter.text)
                assert longer.token_ids[: len(shorter.token_ids)] == shorter.token_ids
    engine.close()


@in_loop
async def test_leaving_the_results_on_the_way_ends_the_request() -> None:
    engine = AsyncLLM(llm({}))
    async with asyncio.timeout(PATIENCE_S):
        async for output in engine.generate([5], LONG):
            assert not output.finished
            break
        while engine.num_running:
            await asyncio.sleep(0)
    assert is_idle(engine.llm)


def test_parts_of_another_kind_are_refused_where_only_new_ones_are_given() -> None:
    engine = AsyncLLM(llm({}))
    params = SamplingParams(max_tokens=2, output_kind=RequestOutputKind.CUMULATIVE)
    with pytest.raises(RequestError, match="output_kind is CUMULATIVE, but submit gives new parts"):
        engine.submit([5], params)
    with pytest.raises(RequestError, match=r"output_kind is 1\. Expected a RequestOutputKind"):
        SamplingParams(output_kind=1)
    with pytest.raises(RequestError, match="lora_request = 1 is not supported"):
        engine.generate([5], params, lora_request=1)
    assert asyncio.run(engine.generate([5], params, priority=0)).finished
    engine.shutdown()
    assert not engine.is_alive


def test_an_async_engine_of_arguments() -> None:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model="models/tinycode", max_model_len=64, enforce_eager=True))
    assert asyncio.run(engine.generate("def f(", SamplingParams(max_tokens=4))).outputs[0].token_ids
    engine.shutdown()


def test_a_forgotten_stream_ends() -> None:
    gate = Gate()
    with_gate = llm({}, max_num_seqs=1, on_step=gate)
    engine = AsyncLLM(with_gate)
    stream = engine.submit([5], LONG, request_id="forgotten")
    gate.wait()
    del stream
    gc.collect()
    gate.open()
    asyncio.run(engine.generate([6], GREEDY))
    assert gate.count("forgotten") == 1
    engine.close()


@in_loop
async def test_no_more_requests_and_tokens_wait_than_may() -> None:
    gate = Gate()
    engine = AsyncLLM(llm({}, max_num_seqs=1, on_step=gate), max_waiting_requests=2, max_waiting_tokens=10)
    prompt = [5, 6, 7, 8, 9, 5, 6]
    tasks = [asyncio.create_task(engine.generate(prompt * 2, GREEDY))]  # longer than may wait, and need not
    await asyncio.to_thread(gate.wait)
    tasks.append(asyncio.create_task(engine.generate(prompt, GREEDY)))
    await asyncio.sleep(0)
    with pytest.raises(QueueFull, match=r"7 prompt tokens are waiting, and 7 more came. Expected at most 10") as full:
        engine.submit(prompt, GREEDY)
    assert full.value.retry_after_s >= 1
    tasks.append(asyncio.create_task(engine.generate([5, 6], GREEDY)))
    await asyncio.sleep(0)
    assert (engine.num_running, engine.num_waiting) == (1, 2)
    with pytest.raises(QueueFull, match=r"2 requests are waiting. Expected at most 2"):
        engine.submit([5], GREEDY)
    gate.open()
    assert [o.outputs[0].finish_reason for o in await within_patience(*tasks)] == ["length"] * 3
    assert [o.outputs[0].finish_reason for o in await within_patience(engine.generate([5], GREEDY))] == ["length"]
    engine.close()


Submitted = tuple[list[int], SamplingParams, Any]
"""A prompt, its parameters, and the client that asks."""


def joined(shared: LLM, gate: Gate, first: list[Submitted], late: Submitted) -> tuple[list[RequestOutput], list[bool]]:
    """Submits requests, and a late one after an iteration: all results, and the iterations with the late one."""

    async def run() -> list[RequestOutput]:
        engine = AsyncLLM(shared)
        streams = [engine.submit(prompt, params, client=client) for prompt, params, client in first]
        await asyncio.to_thread(gate.wait)
        streams.append(engine.submit(late[0], late[1], client=late[2], request_id="late"))
        gate.open(10_000)
        outputs = await within_patience(*(stream.output() for stream in streams))
        await asyncio.to_thread(engine.close)
        return outputs

    outputs = asyncio.run(run())
    return outputs, [any(step.request_id == "late" for step in record.sequences) for record in gate.records]


@pytest.mark.parametrize("drafter", ["none", "ngram tree"])
def test_a_client_that_asks_for_much_lets_others_in(drafter: str) -> None:
    """All slots are one client's when another comes, which gets one at once; every text is that of a single call."""
    runner, gate = "lean-native", Gate()
    mix, plain = request_mix(), plain_mix(runner)
    shared = llm(
        DRAFTERS[drafter](references(plain)), runner=runner, max_num_seqs=3, max_model_len=CONTEXT_LEN, on_step=gate
    )
    first = [(request.prompt, request.params, "many") for request in mix]
    outputs, took_part = joined(shared, gate, first, (mix[0].prompt, mix[0].params, "one"))
    assert [ids_of(output) for output in outputs] == [ids_of(each) for each in (*plain, plain[0])]
    assert took_part.index(True) <= 2
    assert took_part[-1] is False
    assert sum(output.metrics.num_preemptions for output in outputs[:-1]) == 1
    assert outputs[-1].metrics.num_preemptions == 0
    assert is_idle(shared)


@pytest.mark.parametrize(
    ("many", "who", "options"),
    [
        ([("many", i) for i in range(8)], "new", {}),  # a client with a request for each slot
        ([("many", 0)] * 20, ("new", 0), {}),  # with more completions than slots, in one request
        ([("many", 0)] * 2, "new", {"kv_cache_memory_bytes": 4 << 20}),  # with all KV rows, and most slots free
        ([("many", i) for i in range(5)] + [("another", 0)] * 2 + [("third", 0)], ("new", 0), {}),
    ],
)
def test_a_new_client_gets_a_slot_within_16_iterations(many: list[Any], who: Any, options: Any) -> None:
    gate, prompts = Gate(), [[5 + i, *range(100, 229)] for i in range(len(many))]
    shared = LLM("models/tinycode", max_num_seqs=8, max_model_len=256, on_step=gate, **options)
    alone = LLM("models/tinycode", max_num_seqs=1, max_model_len=256).generate([*prompts, [9] * 60], GREEDY)
    first = [(prompt, GREEDY, client) for prompt, client in zip(prompts, many, strict=True)]
    outputs, took_part = joined(shared, gate, first, ([9] * 60, GREEDY, who))
    assert [ids_of(output) for output in outputs] == [ids_of(output) for output in alone]
    assert took_part.index(True) <= 16


def test_prompts_of_clients_that_ask_for_little_are_read_first() -> None:
    gate, few = Gate(), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    shared = llm({}, max_num_seqs=4, max_num_batched_tokens=8, on_step=gate)
    first = [([begin, *range(3, 33)], few, "many") for begin in (40, 41, 42)]
    _, took_part = joined(shared, gate, first, ([5, 6], few, "one"))
    assert took_part.index(True) <= 2, "it waits for ninety tokens of the others"


@in_loop
async def test_completions_of_one_request_let_another_in() -> None:
    gate = Gate()
    engine = AsyncLLM(llm({}, max_num_seqs=2, on_step=gate))
    many = asyncio.create_task(engine.generate([5, 6, 7], replace(LONG, n=4)))
    await asyncio.to_thread(gate.wait)
    gate.open()
    await within_patience(engine.generate([5, 6], GREEDY))
    assert not many.done()
    await within_patience(many)
    engine.close()


def test_without_a_queue_as_many_are_taken_as_there_are_slots() -> None:
    gate = Gate()
    engine = AsyncLLM(llm({}, max_num_seqs=3, on_step=gate), max_waiting_requests=0)
    streams = [engine.submit([5 + i], GREEDY) for i in range(3)]
    with pytest.raises(QueueFull, match=r"0 requests are waiting. Expected at most 0"):
        engine.submit([9], GREEDY)
    gate.open()
    for stream in streams:
        asyncio.run(stream.output())
    engine.close()


def test_a_request_that_just_gets_its_slot_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, may_go_on, begin = threading.Event(), threading.Event(), Scheduler._begin

    def slow(*arguments: Any) -> None:
        arrived.set()
        may_go_on.wait(PATIENCE_S)
        begin(*arguments)

    monkeypatch.setattr(Scheduler, "_begin", slow)
    engine = AsyncLLM(llm({}, max_num_seqs=1), max_waiting_requests=1)
    streams = [engine.submit([5], GREEDY)]
    try:
        assert arrived.wait(PATIENCE_S)
        streams.append(engine.submit([6], GREEDY))  # the one place in the queue is free
    finally:
        may_go_on.set()
    for stream in streams:
        assert asyncio.run(stream.output()).outputs[0].finish_reason == "length"
    engine.close()


def test_the_wait_is_estimated_from_what_is_queued_and_the_speed() -> None:
    known = Throughput()
    assert known.seconds([100]) == 1.0
    known.add_iteration(tokens=100, seconds=2.0)
    assert known.seconds([100, 50]) == pytest.approx(3.0)
    known.add_output(10)
    assert known.seconds([100, 5]) == pytest.approx(0.3), "outputs had ten tokens so far"


def test_ids_are_kept_and_belong_to_one_request_at_a_time() -> None:
    gate = Gate()
    engine = AsyncLLM(llm({}, max_num_seqs=2, on_step=gate))
    next_id = str(int(engine.llm.shared.requests.new_id()) + 1)
    stream = engine.submit([5], GREEDY, request_id=next_id)
    with pytest.raises(RequestError, match=f"request_id '{next_id}' is in use by an unfinished request"):
        engine.submit([6], GREEDY, request_id=next_id)
    other = engine.submit([6], GREEDY)
    assert other.request_id not in (None, next_id)
    gate.open()
    assert asyncio.run(stream.output()).request_id == next_id
    assert asyncio.run(other.output()).request_id == other.request_id
    assert asyncio.run(engine.generate([5], GREEDY, request_id=next_id)).request_id == next_id
    engine.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"request_id": ""}, "request_id has 0 characters. Expected 1 to 256."),
        ({"request_id": 7}, "request_id is 7. Expected text."),
        ({"prompt": [[5], [6]]}, "there are 2 prompts. Expected one."),
        ({"prompt": []}, "there are 0 prompts. Expected one."),
        ({"sampling_params": {"n": 2}}, "sampling_params is {'n': 2}. Expected SamplingParams"),
        ({"prompt": {"prompt_token_ids": [5], "speculative": True}}, "speculative is True. Expected a mapping with"),
        ({"prompt": {"prompt_token_ids": [5], "speculative": {"nodes": 3}}}, "Expected a mapping with 'enabled'"),
        ({"prompt": {"prompt_token_ids": [5], "speculative": {"enabled": 1}}}, "Expected True or False."),
        ({"prompt": {"prompt_token_ids": [5], "speculative": {"max_nodes": 0}}}, "Expected at least 1."),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_at_once(arguments: dict[str, Any], message: str) -> None:
    engine = AsyncLLM(llm({}))
    with pytest.raises(RequestError) as refused:
        engine.submit(**{"prompt": [5], **arguments})
    assert message in str(refused.value)
    engine.close()


@pytest.mark.parametrize("arguments", [{"max_waiting_requests": -1}, {"max_waiting_tokens": 1.5}, {"llm": "a name"}])
def test_wrong_arguments_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="Expected"):
        AsyncLLM(**{"llm": llm({}), **arguments})


@in_loop
async def test_what_a_slow_reader_leaves_is_merged() -> None:
    """Nothing is kept for it but the tokens: what came while a chunk was unread is one chunk."""
    async with AsyncLLM(llm({}, max_num_seqs=2)) as engine:
        stream = engine.submit([5], LONG)
        first = await anext(stream)
        await within_patience(engine.generate([6], GREEDY), engine.submit([5], LONG).output())
        await stream.output()
        assert len(stream._served.chunks) <= 2
        rest = [chunk async for chunk in stream]
        expected = engine.llm.generate([5], LONG)[0].outputs[0]
        assert [t for chunk in [first, *rest] for t in chunk.token_ids] == expected.token_ids
        assert "".join(chunk.text for chunk in [first, *rest]) == expected.text
        assert rest[-1].finish_reason == "length"


class Fatal(BaseException):
    """Not an `Exception`: nothing contains it."""


@in_loop
async def test_a_dead_engine_ends_all_requests_and_takes_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """The `LLM` itself is whole: a new `AsyncLLM` serves on it."""
    original, calls = Engine._commit, []

    def dying(self: Engine, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise Fatal("of the test")
        return original(self, *arguments)

    engine = AsyncLLM(llm(DRAFTERS["draft itself tree"](None), max_num_seqs=2))
    expected = engine.llm.generate([5], GREEDY)[0].outputs[0].token_ids
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_commit", dying)
        streams = [engine.submit([5 + i], GREEDY) for i in range(3)]  # the last waits for a slot
        chunks = (await within_patience(chunks_of(streams[0])))[0][0]
        for stream in streams:
            output = (await within_patience(stream.output()))[0].outputs[0]
            assert output.finish_reason == "error"
            assert "the engine's thread was ended by Fatal" in output.error
        assert (chunks[-1].finish_reason, chunks[-1].error) == ("error", output.error)
    assert not engine.is_alive
    with pytest.raises(EngineStopped, match=r"the engine thread failed: Fatal: of the test\. All requests"):
        engine.submit([5], GREEDY)
    assert (engine.num_running, engine.num_waiting) == (0, 0)
    engine.close()
    assert is_idle(engine.llm)
    async with AsyncLLM(engine.llm) as another:
        assert (await within_patience(another.generate([5], GREEDY)))[0].outputs[0].token_ids == expected
    assert "the engine's thread failed" in caplog.text


class Failing:
    """A tokenizer that cannot decode one of the tokens."""

    def __init__(self, token: int) -> None:
        self._inner, self._token = tokenizer(), token

    def __call__(self, text: str, **options: Any) -> Any:
        return self._inner(text, **options)

    def decode(self, tokens: list[int], **options: Any) -> str:
        if self._token in tokens:
            raise ValueError("no such token")
        return self._inner.decode(tokens, **options)


@in_loop
async def test_a_tokenizer_that_fails_costs_its_request_alone() -> None:
    expected = llm({}).generate([[5], [6]], GREEDY)
    bad = next(t for t in ids_of(expected[0])[0][3:] if t not in ids_of(expected[1])[0])
    async with AsyncLLM(LLM(target(), tokenizer=Failing(bad), runner="generic")) as engine:
        streams = [engine.submit([5], GREEDY), engine.submit([6], GREEDY)]
        failed, whole = await within_patience(*map(chunks_of, streams))
        assert failed[0][-1].finish_reason == "error"
        assert "no such token" in failed[0][-1].error
        assert (await streams[0].output()).outputs[0].error == failed[0][-1].error
        assert [t for chunk in whole[0] for t in chunk.token_ids] == ids_of(expected[1])[0]
        assert engine.is_alive
        assert is_idle(engine.llm)


@in_loop
async def test_closing_ends_requests_and_thread_and_leaves_the_llm() -> None:
    gate = Gate()
    async with AsyncLLM(llm({}, max_num_seqs=1, on_step=gate)) as engine:
        tasks = [asyncio.create_task(engine.generate([5], GREEDY)) for _ in range(2)]
        await asyncio.to_thread(gate.wait)
        gate.open(1)
        threading.Timer(0.01, gate.open).start()
    outputs = [output.outputs[0] for output in await within_patience(*tasks)]
    assert [output.finish_reason for output in outputs] == ["abort", "abort"]
    assert not engine.is_alive
    assert not engine._thread._thread.is_alive()
    engine.close()
    with pytest.raises(EngineStopped, match="this AsyncLLM was closed"):
        engine.submit([5], GREEDY)
    assert len(engine.llm.generate([5], GREEDY)[0].outputs[0].token_ids) == 30


def test_a_forgotten_engine_ends_its_thread() -> None:
    engine = AsyncLLM(llm({}))
    thread = engine._thread._thread
    del engine
    gc.collect()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_a_forked_child_is_told_that_nobody_serves_it() -> None:
    """What waits there ends; the `LLM` itself, and an `AsyncLLM` of the child's own, work."""
    gate = Gate()
    engine = AsyncLLM(llm({}, max_num_seqs=1, on_step=gate))
    stream = engine.submit([5], GREEDY)
    gate.wait()  # in the middle of an iteration

    def is_told() -> bool:
        gate.open()
        if engine.is_alive or engine.num_running or engine.num_waiting:
            return False
        for refused in (lambda: engine.submit([5], GREEDY), lambda: asyncio.run(stream.output())):
            with pytest.raises(EngineStopped, match="forked"):
                refused()
        engine.close()
        texts = [asyncio.run(AsyncLLM(engine.llm).generate([5], GREEDY)), engine.llm.generate([5], GREEDY)[0]]
        return ids_of(texts[0]) == ids_of(texts[1])

    child = in_child(is_told)
    gate.open()
    assert asyncio.run(stream.output()).outputs[0].finish_reason == "length"
    engine.close()
    assert is_content(child)


def test_what_runs_at_the_end_of_a_program_is_aborted() -> None:
    """In a forked child, whose threads are its own."""

    def is_aborted() -> bool:
        engine = AsyncLLM(llm({}, on_step=(gate := Gate())))
        stream = engine.submit([5], LONG)
        gate.wait()  # in the middle of an iteration
        threading.Timer(0.01, gate.open).start()
        _at_exit()
        reason = asyncio.run(stream.output()).outputs[0].finish_reason
        return reason == "abort" and not engine._thread._thread.is_alive()

    assert is_content(in_child(is_aborted))


@pytest.mark.slow
def test_a_program_may_end_while_requests_run() -> None:
    code = (
        "from foretoken import LLM, AsyncLLM, SamplingParams\n"
        "engine = AsyncLLM(LLM('models/tinycode', runner='generic'))\n"
        "stream = engine.submit('def f():', SamplingParams(max_tokens=None, ignore_eos=True))\n"
        "print('ends')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "ends\n"), ended.stderr
