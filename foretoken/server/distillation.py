"""Online distillation beside a running server: collects served text, runs the training process, swaps weights in.

Requests only put token ids on a bounded queue. One thread writes them to disk and looks for published draft models.
Another process trains (`foretoken.training.online`): at the lowest priority, on one CPU thread, a quarter of the time
while requests run. Its failures cost no request. Without `--distill-to` nothing of this exists.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Full, Queue
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, described
from foretoken.core.results import Counter, Gauge, Metric, RequestOutput
from foretoken.drafters.draft_model import DraftModelDrafter, Options
from foretoken.entrypoints.config import parse_speculative_config
from foretoken.files.atomic_files import told_as
from foretoken.files.processes import is_lock, start_python
from foretoken.training import online
from foretoken.training.data.packed import PackedForm
from foretoken.training.online import DRAFTS, RUN, TRAFFIC, Round, Traffic, numbered, read_weights

if TYPE_CHECKING:
    from foretoken.entrypoints.async_llm import AsyncLLM

_MOST_QUEUED = 256  # completions that wait for the disk; a choice: seconds of a busy server
_LOOK_S = 0.5  # seconds between looks for published draft models; a choice
_MOST_WAIT_S = 30.0  # for a moment without requests, before weights are swapped between two iterations; a choice
_log = logging.getLogger(__name__)


def trained_draft(speculative_config: Mapping[str, Any] | None, *, target: str) -> str:
    """Returns the draft model that a server may train.

    Raises `ConfigError` unless the drafters have one whole draft model, without a revision.
    """
    options = [
        each
        for each in parse_speculative_config(speculative_config, target=target).options
        if each.method == DraftModelDrafter.name
    ]
    if len(options) != 1:
        raise ConfigError(
            f"--distill-to trains the draft model of the server, and there are {len(options)}. Expected one. Pass "
            "-s draft_model, or leave --distill-to out."
        )
    assert isinstance(options[0], Options), "the method has these options"
    if options[0].revision is not None:
        raise ConfigError(
            "--distill-to trains a draft model in a directory, and 'revision' names one on the hub. Expected a "
            "directory. Download the revision, and set 'model'."
        )
    return str(options[0].model)


def check_directory(directory: Path) -> None:
    """Makes a directory that only this user can read; raises `ConfigError` if it is unsuitable."""
    advice = "Expected a new directory, or that of an earlier server. Pass another --distill-to."
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        others = sorted(path.name for path in directory.iterdir() if not (path.name in _OWN or is_lock(path)))
    except OSError as err:
        raise ConfigError(f"--distill-to '{directory}' cannot be used: {err.strerror}. {advice}") from err
    if others:
        raise ConfigError(f"--distill-to '{directory}' holds other files ({others[0]}). {advice}")


_OWN = (TRAFFIC, DRAFTS, RUN)


class OnlineDistillation:
    """Trains the draft model of an engine on the requests of its server."""

    def __init__(self, engine: AsyncLLM, directory: Path, *, draft: str, most_tokens: int) -> None:
        """Swaps in the last published draft model that fits, if any; starts the thread and the training process.

        Args:
            engine: Its draft model has the target's vocabulary.
            directory: For text and draft models; no other server uses it.
            draft: Directory or hub id of the draft model.
            most_tokens: Of traffic on disk.

        Raises:
            ConfigError: When the draft model has another vocabulary, the directory cannot be written to, or holds text
                of another tokenizer, or the process cannot be started.
        """
        self._engine, self._directory, llm = engine, directory, engine.llm
        drafter = next((each for each in llm.drafters if isinstance(each, DraftModelDrafter)), None)
        if drafter is None or not drafter.has_same_vocabulary:
            raise ConfigError(
                f"--distill-to trains draft models with the target's vocabulary, and '{draft}' has another one. Use a "
                "draft model of the same family, or leave --distill-to out."
            )
        self._drafter = drafter
        form = PackedForm.of(llm.tokenizer, llm.target.vocab_size)
        with told_as(ConfigError, f"'{directory}'", "Expected a directory that may be written to. Pass another one."):
            (directory / DRAFTS).mkdir(exist_ok=True)  # unfinished ones begin there
            self._traffic = Traffic(directory, form, most_tokens=most_tokens)
        self._queue: Queue[tuple[Sequence[int], Sequence[int]]] = Queue(_MOST_QUEUED)
        self._num_collected = self._num_dropped = self._num_rounds = self._num_swaps = 0
        self._last_round: Round | None = None
        self._is_collecting, self._is_closed = True, False
        self._seen: str | None = None  # name of the last published draft model that was looked at
        self._found: float | None = None  # when a newer one was first seen, monotonic seconds
        self._since = time.monotonic()
        for path in reversed(numbered(directory / DRAFTS)):
            self._seen = self._seen or path.name
            if self._swaps_in(path):
                break
        target = llm.target.model
        self._process = start_python(
            "-m", online.__name__, target.name, draft, os.fspath(directory.absolute()),
            str(target.dtype).removeprefix("torch."), name="the training process of --distill-to",
            advice="Leave --distill-to out", error=ConfigError,
        )  # fmt: skip
        self._threads = [
            threading.Thread(target=run, name=f"foretoken-distill-{name}", daemon=True)
            for name, run in (("collect", self._collect), ("read", self._read))
        ]
        for thread in self._threads:
            thread.start()

    def add(self, outputs: Sequence[RequestOutput]) -> None:
        """Queues the text of a finished request; never waits. Drops what the queue has no room for."""
        for output in outputs:
            for each in output.outputs:
                if each.finish_reason not in ("stop", "length"):
                    continue
                text = output.prompt_token_ids, each.token_ids
                try:
                    if not self._is_collecting:
                        raise Full
                    self._queue.put_nowait(text)
                except Full:
                    self._num_dropped += sum(map(len, text))

    def metrics(self) -> list[Metric]:
        """Returns figures so far; acceptance rates are those of the last round."""
        counts = {
            "tokens_collected": self._num_collected, "tokens_dropped": self._num_dropped, "rounds": self._num_rounds,
            "swaps": self._num_swaps,
        }  # fmt: skip
        age = Gauge(name="foretoken:distill_weights_age_seconds", labels={}, value=time.monotonic() - self._since)
        return [
            *(Counter(name=f"foretoken:distill_{name}", labels={}, value=value) for name, value in counts.items()),
            age,
            *(
                Gauge(name=f"foretoken:distill_{name}", labels={"temperature": temperature}, value=rate)
                for name in (("alpha_before", "alpha_after") if self._last_round is not None else ())
                for temperature, rate in zip(("0", "1"), getattr(self._last_round, name), strict=True)
            ),
        ]

    def close(self) -> None:
        """Ends the process and the threads; writes the text that waits."""
        self._is_closed = True
        self._process.kill()
        for thread in self._threads:
            thread.join()
        self._process.communicate()

    def _collect(self) -> None:
        """Writes text, says whether requests run, and looks for published draft models, until `close`."""
        said, looked, has_text = b"", 0.0, False
        while not self._is_closed or not self._queue.empty():
            with suppress(Empty):
                prompt, output = self._queue.get(timeout=_LOOK_S)
                if max([*prompt, *output]) < self._drafter.model.vocab_size:  # others are ids of no token
                    self._keep(self._traffic.add, prompt, output)
                has_text = True
            if time.monotonic() - looked < _LOOK_S or self._is_closed:
                continue
            # A request that ended since the last look counts too: the next one of its client is probably on its way.
            is_busy = bool(has_text or self._engine.num_running or self._engine.num_waiting)
            looked, has_text = time.monotonic(), False
            if said != (said := b"1" if is_busy else b"0"):
                self._say(said)
            self._look(is_busy=is_busy)
        self._keep(self._traffic.flush)

    def _keep(self, write: Callable[..., None], *text: Sequence[int]) -> None:
        """Calls a function that writes text; its first failure ends the collection."""
        if not self._is_collecting:
            return
        try:
            write(*text)
            self._num_collected += sum(map(len, text))
        except Exception as err:  # noqa: BLE001 - a full disk, or anything else, must not end requests
            self._is_collecting = False
            _log.warning("--distill-to collects no more text: %s. Requests go on.", described(err))

    def _say(self, state: bytes) -> None:
        assert self._process.stdin is not None, "it has pipes"
        with suppress(OSError):  # the process has ended; `_read` says so
            self._process.stdin.write(state)
            self._process.stdin.flush()

    def _look(self, *, is_busy: bool) -> None:
        """Swaps in a newly published draft model at the first moment without requests, or after `_MOST_WAIT_S`."""
        newest = next(reversed(numbered(self._directory / DRAFTS)), None)
        if newest is None or newest.name == self._seen:
            self._found = None
            return
        self._found = time.monotonic() if self._found is None else self._found
        if is_busy and time.monotonic() - self._found < _MOST_WAIT_S:
            return
        self._seen = newest.name
        self._swaps_in(newest)

    def _swaps_in(self, path: Path) -> bool:
        """Lets a published draft model draft from now on; returns False, after a warning, if it does not fit."""
        try:
            weights = read_weights(path, self._drafter.model)
            with self._engine.llm.shared.turn():
                begin = time.perf_counter()
                self._drafter.load_weights(weights)
                seconds = time.perf_counter() - begin
        except Exception as err:  # noqa: BLE001 - whatever was published must not end requests
            _log.warning("the draft model '%s' is not used: %s. The server keeps the one it has.", path, described(err))
            return False
        self._num_swaps, self._since = self._num_swaps + 1, time.monotonic()
        _log.info("drafts come from '%s' now; iterations waited %.0f ms for the weights", path, 1000 * seconds)
        return True

    def _read(self) -> None:
        """Reads the rounds of the training process until it ends."""
        assert self._process.stdout is not None, "it has pipes"
        error = None
        for line in self._process.stdout:
            told = json.loads(line)
            if "error" in told:
                error = told["error"]
                continue
            self._last_round = last = Round(**told)
            self._num_rounds += 1
            _log.info(
                "round %d of training took %.0f s: alpha on held-out traffic from %s to %s at temperatures 0 and 1; %s",
                self._num_rounds, last.seconds, _shown(last.alpha_before), _shown(last.alpha_after),
                "not published" if last.draft is None else f"published as {last.draft}",
            )  # fmt: skip
        if not self._is_closed:
            reason = error or f"exit status {self._process.wait()}"
            _log.warning("the training of --distill-to ended: %s. Requests go on with the present draft model.", reason)


def _shown(rates: Sequence[float]) -> str:
    return " and ".join(f"{rate:.3f}" for rate in rates)
