"""Many threads on one `LLM`: every text is what it is alone, nobody waits for ever, nothing is left behind."""

import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from end_to_end.request_mix import CONTEXT_LEN, plain_mix, references, request_mix
from end_to_end.tiny_llms import drafters, llm
from entrypoints.test_streaming import is_idle

from foretoken import SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.core.records import StepRecord
from foretoken.engine.loop import Engine
from foretoken.entrypoints.serving import FairLock

THREADS = 16
PATIENCE_S = 60
GREEDY = SamplingParams(temperature=0.0, max_tokens=30)
DRAFTERS = drafters()


def in_child(work: Callable[[], bool]) -> int:
    """The process id of a forked child, which has done `work` when it ends."""
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)  # ends the child where it would hang
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return child


def is_content(child: int) -> bool:
    """Waits for the end of a child, and tells whether its work was true."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What `work(i)` gives in each of 16 threads that begin together; raises what a thread raises."""
    together = threading.Barrier(THREADS)

    def begin(index: int) -> Any:
        together.wait(PATIENCE_S)
        return work(index)

    with ThreadPoolExecutor(THREADS) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(begin, i) for i in range(THREADS)]]


@pytest.mark.parametrize(
    ("drafter", "runner"),
    [
        pytest.param("none", "lean-native", marks=pytest.mark.slow), ("draft itself tree", "generic"),
        ("ngram", "lean-native"),
    ],
)  # fmt: skip
def test_texts_are_those_of_single_calls(drafter: str, runner: str) -> None:
    """Calls and streams of 16 threads at once, over three slots, some streams closed or forgotten on the way."""
    mix, plain = request_mix(), plain_mix(runner)
    wide: list[int] = []

    def note(record: StepRecord) -> None:
        wide.append(len(record.sequences))

    arguments = DRAFTERS[drafter](references(plain))
    engine = llm(arguments, runner=runner, max_num_seqs=3, max_model_len=CONTEXT_LEN, on_step=note)

    def work(index: int) -> None:
        order = random.Random(index).sample(range(len(mix)), 3)
        for number, request in enumerate(order):
            prompt, params = mix[request].prompt, mix[request].params
            want = [completion.token_ids for completion in plain[request].outputs]
            if number % 3 == 0:
                assert [c.token_ids for c in engine.generate([prompt], params)[0].outputs] == want
            elif number % 3 == 1:
                got: dict[int, list[int]] = defaultdict(list)
                for chunk in engine.stream([prompt], params):
                    got[chunk.index] += chunk.token_ids
                assert [got[i] for i in range(len(want))] == want
            else:
                stream = engine.stream([prompt], params)
                next(stream)
                if index % 2:
                    stream.close()

    in_threads(work)
    engine.generate([5], SamplingParams(max_tokens=1))  # what was closed while others were at work goes with this turn
    assert is_idle(engine)
    assert max(wide) == 3, "requests of different threads share passes"


def test_a_stream_held_open_keeps_nobody_waiting() -> None:
    engine = llm({}, max_num_seqs=2)
    expected = engine.generate([6], GREEDY)[0].outputs[0].token_ids
    held = engine.stream([5], GREEDY)
    first = next(held).token_ids
    texts = in_threads(lambda _: engine.generate([6], GREEDY)[0].outputs[0].token_ids)
    assert texts == [expected] * THREADS
    rest = [token for chunk in held for token in chunk.token_ids]
    assert first + rest == llm({}).generate([5], GREEDY)[0].outputs[0].token_ids


def test_a_busy_thread_does_not_keep_others_from_joining() -> None:
    """Turns go in the order of asking: a short request joins a long one and ends long before it."""
    engine = llm({}, max_num_seqs=2)
    long_ended, begun = threading.Event(), threading.Event()
    rounds = 6

    def run_long() -> None:
        for _ in range(rounds):
            for _ in engine.stream([5], SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)):
                begun.set()
        long_ended.set()

    thread = threading.Thread(target=run_long)
    thread.start()
    begun.wait(PATIENCE_S)
    engine.generate([6], SamplingParams(temperature=0.0, max_tokens=2))
    assert not long_ended.is_set()
    thread.join(PATIENCE_S)


def test_a_callback_that_calls_back_is_told_so() -> None:
    """It would wait for itself for ever."""
    found: list[Exception] = []

    def call_back(record: StepRecord) -> None:
        try:
            engine.generate([5], GREEDY)
        except ForetokenError as err:
            found.append(err)

    engine = llm({}, on_step=call_back)
    assert len(engine.generate([5], GREEDY)[0].outputs[0].token_ids) == 30
    assert len(found) == 30
    assert "called from within one of its own callbacks" in str(found[0])


@contextmanager
def interruption() -> Iterator[None]:
    """The third commit of any engine is interrupted as by Ctrl-C, which escapes here."""
    original, calls = Engine._commit, []

    def interrupted(self: Engine, *arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "_commit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            yield


def test_an_interrupted_iteration_ends_its_requests_and_no_more() -> None:
    engine = llm(DRAFTERS["draft itself tree"](None), max_num_seqs=2)
    expected = engine.generate([[5], [6], [7]], GREEDY)
    with interruption():
        engine.generate([[5], [6], [7]], GREEDY)
    assert is_idle(engine)
    got = engine.generate([[5], [6], [7]], GREEDY)
    assert [o.outputs[0].token_ids for o in got] == [o.outputs[0].token_ids for o in expected]


def test_requests_of_others_are_told_that_an_iteration_was_interrupted() -> None:
    """Ctrl-C reaches one thread; the requests of the others share its iteration and end with a sentence."""
    engine = llm({}, max_num_seqs=2)
    others = [engine.stream([5], GREEDY), engine.stream([8], GREEDY)]  # the second waits for a slot in vain
    next(others[0])
    running = [*engine._engine._scheduler.running]
    with interruption():
        engine.generate([[6], [7]], GREEDY)
    assert [chunk.finish_reason for chunk in others[0]][-1] == "error"
    output = running[0].output()
    assert (output.finish_reason, output.stop_reason) == ("error", None)
    assert str(output.error).startswith("another call of this LLM was interrupted by KeyboardInterrupt in the middle")
    assert is_idle(engine)
    got = engine.generate([6], GREEDY)[0].outputs[0]
    assert (got.token_ids, got.error) == (llm({}).generate([6], GREEDY)[0].outputs[0].token_ids, None)


def test_a_forked_child_does_not_inherit_locks_or_requests() -> None:
    """The fork happens in the middle of another thread's iteration; the child still answers."""
    forked = threading.Event()
    inside = threading.Event()

    def hold(record: StepRecord) -> None:
        if threading.current_thread().name == "holder":
            inside.set()
            forked.wait(PATIENCE_S)

    engine = llm({}, on_step=hold, max_num_seqs=1)
    expected = engine.generate([6], GREEDY)[0].outputs[0].token_ids
    thread = threading.Thread(target=engine.generate, args=([5], GREEDY), name="holder")
    thread.start()
    inside.wait(PATIENCE_S)
    child = in_child(lambda: engine.generate([6], GREEDY)[0].outputs[0].token_ids == expected)
    forked.set()
    thread.join(PATIENCE_S)
    assert is_content(child)


def test_a_lock_is_given_in_the_order_of_asking() -> None:
    lock, order, asked = FairLock(), [], []

    def take(index: int) -> None:
        asked.append(index)
        with lock:
            order.append(index)

    threads = []
    with lock:
        assert not lock.try_acquire()
        for index in range(8):
            threads.append(threading.Thread(target=take, args=(index,)))
            threads[-1].start()
            while lock._next_ticket < index + 2:  # until it waits
                pass
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == list(range(8))
    assert lock.try_acquire()
    lock.release()
