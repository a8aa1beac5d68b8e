"""The worker's side of the protocol: answers JSON lines until its input ends."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.rivals.messages import Generation, Loaded, LoadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


class Rival(Protocol):
    """What a worker's file implements."""

    def load(self, request: LoadRequest) -> Loaded:
        """Loads the model; called once, before anything else."""

    def generate(self, prompt_ids: list[int], max_tokens: int, temperature: float, seed: int) -> Generation:
        """Decodes exactly `max_tokens` tokens, whatever end-of-sequence token comes.

        Temperature 0 is greedy; above, tokens are sampled from the whole distribution, with the request's seed.
        """

    def forward(self, width: int, context: int, repeats: int) -> float:
        """Median seconds of a pass over `width` new tokens behind `context` cached ones.

        From token ids on the host to the logits of all `width` positions on the host; taking the new rows out of the
        cache again is not timed.
        """


class ChunkClock:
    """Times one request; starts when it is made."""

    def __init__(self) -> None:
        self._begin = time.perf_counter()
        self._chunks: list[tuple[float, int]] = []

    def add(self, num_tokens: int, at: float | None = None) -> None:
        """Notes that tokens became certain: just now, or `at` a time of the monotonic clock, in seconds."""
        self._chunks.append((time.perf_counter() if at is None else at, num_tokens))

    def finish(self, token_ids: list[int]) -> Generation:
        """Ends the request, for rivals that give one chunk a target pass."""
        seconds = time.perf_counter() - self._begin
        if not self._chunks:
            return Generation(token_ids=token_ids, seconds=seconds)
        first, last = self._chunks[0], self._chunks[-1]
        return Generation(
            token_ids=token_ids,
            seconds=seconds,
            first_seconds=first[0] - self._begin,
            decode_seconds=last[0] - first[0],
            decode_tokens=len(token_ids) - first[1],
            decode_passes=len(self._chunks) - 1,
        )


def median_seconds(run: Callable[[], object], repeats: int, undo: Callable[[], object] | None = None) -> float:
    """Median seconds of `run` after one warm-up; `undo` follows every run, outside of the timing."""
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
        if undo is not None:
            undo()
    return median(seconds[1:])


def serve(rival: Rival) -> None:
    """Answers questions from standard input; whatever the rival prints goes to standard error."""
    _die_with_parent()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                answer = _answer(rival, json.loads(line))
            except Exception as err:  # noqa: BLE001 - whatever a rival raises becomes one sentence for the comparison
                traceback.print_exc()
                answer = {"error": f"{type(err).__name__}: {_one_line(err)}"}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _answer(rival: Rival, question: dict[str, Any]) -> dict[str, Any]:
    """The answer to one question."""
    ask = question.pop("ask")
    if ask == "load":
        return asdict(rival.load(LoadRequest(**question)))
    if ask == "generate":
        return asdict(rival.generate(**question))
    if ask == "forward":
        return {"seconds": rival.forward(question["width"], question["context"], question["repeats"])}
    raise ValueError(f"question '{ask}' is unknown. Expected load, generate or forward.")


def _one_line(err: Exception) -> str:
    """An exception's first line with anything in it."""
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return lines[0] if lines else "no message"


def _die_with_parent() -> None:
    """Has the kernel end this process when the comparison dies: a stopped worker would stay for ever."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
