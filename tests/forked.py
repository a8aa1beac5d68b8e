"""Processes of their own that start within milliseconds: forks of one process that has imported everything.

An import of torch, transformers and foretoken takes five seconds of a CPU. A test of signals, of exit codes or of a
process that is killed needs a process, but not the import.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing import reduction
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[1]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        "foretoken.cli.commands",
        "foretoken.entrypoints.llm",
        "foretoken.entrypoints.async_llm",
        "foretoken.server.app",
        "foretoken.training.run",
        "transformers.models.llama.modeling_llama",
        "transformers.generation",
    ]
)


def forked(target: Callable[..., Any], *arguments: Any, **named: Any) -> BaseProcess:
    """Starts a process that calls a function of a module; what the function passes to `sys.exit` is its exit code."""
    process = _CONTEXT.Process(target=target, args=arguments, kwargs=named)
    process.start()
    return process


class ForkedCommand:
    """`foretoken …` in a process of its own, with pipes for its output; as `subprocess.Popen`, and ends with its block.

    Args:
        arguments: After `foretoken`.
        setup: Python code that runs first.
        environment: Variables of the process; by default those of this one.
    """

    def __init__(self, *arguments: str, setup: str = "", environment: Mapping[str, str] | None = None) -> None:
        pipes = [os.pipe(), os.pipe()]
        streams = [_Descriptor(writing) for _, writing in pipes]
        self._process = forked(_run, arguments, setup, dict(environment or os.environ), streams)
        for _, writing in pipes:
            os.close(writing)
        self.stdout, self.stderr = (os.fdopen(reading, encoding="utf-8") for reading, _ in pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()
        with ExitStack() as streams:
            streams.callback(self.stdout.close)
            streams.callback(self.stderr.close)

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None before the end."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Returns `returncode`."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit code; by default pytest's own limit alone ends a test that waits."""
        self._process.join(timeout)
        assert self._process.exitcode is not None, "it does not end"
        return self._process.exitcode

    def communicate(self) -> tuple[str, str]:
        """Waits for the end; returns what is left of both outputs."""
        with ThreadPoolExecutor(2) as pool:
            output, errors = (pool.submit(stream.read) for stream in (self.stdout, self.stderr))
            self.wait()
        return output.result(), errors.result()


class _Descriptor:
    """A file descriptor that a process inherits."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> Any:
        return _inherited, (reduction.DupFd(self.number),)


def _inherited(duplicate: Any) -> _Descriptor:
    return _Descriptor(duplicate.detach())


def _run(arguments: tuple[str, ...], setup: str, environment: dict[str, str], streams: list[_Descriptor]) -> None:
    for number, (name, stream) in enumerate(zip(("stdout", "stderr"), streams, strict=True), start=1):
        os.dup2(stream.number, number)
        os.close(stream.number)
        errors = "strict" if name == "stdout" else "backslashreplace"
        setattr(sys, name, open(number, "w", encoding="utf-8", errors=errors, closefd=False))  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch

    torch.set_num_threads(1)
    sys.argv = ["foretoken", *arguments]
    exec(setup, {})
    from foretoken.cli.main import main

    main()
