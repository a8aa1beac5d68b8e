"""Processes that fork after the native kernels have run on several threads."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest
import torch

from foretoken.core import backend
from foretoken.core.errors import ConfigError
from foretoken.decoder.native_linear import NativeLinear

pytestmark = pytest.mark.native

# A child that waits for threads that it does not have waits for ever: the alarm ends it, and `wait` tells.
PROGRAM = """
    import multiprocessing, os, signal, sys
    import torch
    from tiny_models import tiny_model
    from foretoken import LLM, SamplingParams
    from foretoken.core.backend import kernel_threads
    from foretoken.decoder import library
    from foretoken.decoder.native_linear import NativeLinear

    if sys.argv[1] == "cannot":
        library._pauses = lambda: iter([None])
    torch.set_num_threads(2)
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    make = lambda: LLM(tiny_model("llama"), runner="lean-native", max_num_seqs=2)
    text = lambda llm: llm.generate([[5, 6, 7], [9, 8]], params)
    ids = lambda llm: [output.outputs[0].token_ids for output in text(llm)]
    linear, x = NativeLinear(torch.randn(400, 300)), torch.randn(4, 300)
    many = torch.randn(1 << 18)
    llm = make()
    before = ids(llm), linear(x), many.exp()

    def child():
        signal.alarm(90)
        same = ids(llm) == ids(make()) == before[0]
        same &= torch.equal(linear(x), before[1]) and torch.equal(many.exp(), before[2])
        os._exit(0 if same and kernel_threads() == torch.get_num_threads() == int(sys.argv[2]) else 3)

    pid = os.fork()
    if pid == 0:
        child()
    ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    ended.append(process.exitcode)
    print(ended, ids(llm) == before[0], kernel_threads())
"""


def test_a_child_has_threads_of_its_own() -> None:
    """One of this process, which waits for ever for threads that it does not have: the alarm ends it."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        linear, x, many = NativeLinear(torch.randn(400, 300)), torch.randn(4, 300), torch.randn(1 << 18)
        expected = linear(x), many.exp()
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            code = 1
            try:
                same = torch.equal(linear(x), expected[0]) and torch.equal(many.exp(), expected[1])
                code = 0 if same and backend.kernel_threads() == torch.get_num_threads() == 2 else 3
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert torch.equal(linear(x), expected[0])
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize(("can_end", "threads_of_child"), [("can", 2), ("cannot", 1)])
def test_children_write_the_same_text(can_end: str, threads_of_child: int) -> None:
    """With the model of their parent and with one of their own."""
    environment = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path)), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM), can_end, str(threads_of_child)], capture_output=True,
        text=True, timeout=280, check=False, env=environment,
    )  # fmt: skip
    assert done.stdout == "[0, 0] True 2\n", done.stderr[-2000:]
    sentence = "the OpenMP threads could not be ended before a fork; the child process runs on one thread."
    assert done.stderr.count(sentence) == (2 if can_end == "cannot" else 0), "once a child"


def test_threads_are_bounded() -> None:
    before = torch.get_num_threads()
    for count in (0, -1, backend.MAX_THREADS + 1, 100_000):
        with pytest.raises(ConfigError, match=rf"threads is {count}\. Expected 1\.\.{backend.MAX_THREADS} on this"):
            backend.set_num_threads(count)
    assert torch.get_num_threads() == before
    backend.set_num_threads(before)
