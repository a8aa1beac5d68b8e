"""Trains a draft model on the traffic of a server, round after round, in a process of its own (online distillation).

`foretoken.server.distillation` starts the process, collects the traffic, and swaps the published weights in. The
directory of `foretoken serve --distill-to` has:

- `traffic/train` and `traffic/held_out`: packed tokens in numbered directories; the oldest leave.
- `drafts`: the last published draft models in numbered directories.
- `training-run`: the run of the present round.

A round trains on all of `traffic/train` with the loss of `foretoken train draft_model`. The draft model is published if
its acceptance rate on `traffic/held_out` rose; otherwise the round is undone.

Source: Liu et al. 2023 (arXiv 2310.07177). The target's distributions are computed anew, not kept with the text.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import select
import shutil
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from foretoken.core.backend import set_num_threads
from foretoken.core.errors import ConfigError, ModelError, RequestError, described, one_line
from foretoken.entrypoints.model_arguments import load_target
from foretoken.files.atomic_files import new_directory
from foretoken.training.data.packed import Document, PackedForm, PackedTokens, PackedWriter
from foretoken.training.draft_model import Distillation, new_student
from foretoken.training.evaluation import acceptance_rates
from foretoken.training.report import saved_draft_model, trained_notes
from foretoken.training.run import Interrupted, ModelSettings, train_model
from foretoken.training.trainer import StepReport, train_config

if TYPE_CHECKING:
    from foretoken.models.loaded import LoadedModel

TRAFFIC, DRAFTS, RUN = "traffic", "drafts", "training-run"
_PARTS = 16  # packed directories of a ring; a choice: a sixteenth of the traffic leaves at once
_HELD_OUT = 8  # one prompt in so many is held out; a choice
_KEPT_DRAFTS = 2  # the last one, and the one before to go back to
_LENGTH, _BATCH_SIZE, _RATE = 256, 8, 1e-4  # RESULTS, "Draft models by DistillSpec"
_STEPS, _EPOCHS = 64, 2  # most of a round; choices: minutes on one thread, and little text is not learned by heart
_HELD_OUT_WINDOWS, _AT_ONCE = 32, 4  # windows of an evaluation, and those computed together; a choice
_BUSY_SHARE = 0.25  # of the time for training while requests run; a choice
_LOOK_S = 1.0  # seconds between looks for new traffic; a choice
_log = logging.getLogger(__name__)


def numbered(directory: Path) -> list[Path]:
    """Returns the directories in a directory whose names are numbers, the oldest first."""
    found = (path for path in directory.glob("[0-9]*") if path.name.isdecimal() and path.is_dir())
    return sorted(found, key=lambda path: int(path.name))


def _next_path(directory: Path) -> Path:
    last = numbered(directory)[-1:]
    return directory / f"{int(last[0].name) + 1 if last else 1:08d}"


def remove_unfinished(directory: Path) -> None:
    """Removes what a killed process left in a directory of numbered directories."""
    for left in directory.glob(".[0-9]*"):
        shutil.rmtree(left, ignore_errors=True)


def read_weights(directory: Path, model: LoadedModel) -> dict[str, Tensor]:
    """Returns the weights of a published draft model by the names of a module's parameters, in its dtype and device.

    Raises `ModelError` when the file is missing or damaged, names or shapes are not those of `model`, or a value is not
    finite.
    """
    advice = f"Expected the weights of '{model.name}', trained. Remove it, or start the server with it."
    try:
        weights = load_file(directory / "model.safetensors")
    except (OSError, SafetensorError) as err:
        raise ModelError(f"'{directory}' has no readable model.safetensors: {one_line(err)}. {advice}") from err
    parameters = dict(model.module.named_parameters())
    for name in sorted(parameters.keys() | weights.keys()):
        shapes = [list(each[name].shape) if name in each else "missing" for each in (weights, parameters)]
        if shapes[0] != shapes[1]:
            raise ModelError(f"{name} in '{directory}' is {shapes[0]}, and {shapes[1]} in the server. {advice}")
        if not bool(weights[name].isfinite().all()):
            raise ModelError(f"{name} in '{directory}' has values that are not finite. {advice}")
    return {name: weights[name].to(each.device, each.dtype) for name, each in parameters.items()}


def _opened(directory: Path) -> list[tuple[Path, PackedTokens]]:
    """Returns the packed tokens of a ring, the oldest first, without those that are damaged or being removed."""
    parts = []
    for path in numbered(directory):
        with suppress(RequestError, OSError):
            parts.append((path, PackedTokens.open(path)))
    return parts


class TrafficRing:
    """Packed tokens on disk, at most `most_tokens`; the oldest leave."""

    def __init__(self, directory: Path, form: PackedForm, *, most_tokens: int) -> None:
        """Continues the ring of an earlier server, if there is one; raises `ConfigError` for that of another target."""
        self._directory, self._form, self._most_tokens = directory, form, most_tokens
        self._waiting: list[Document] = []
        self._num_waiting = 0
        directory.mkdir(parents=True, exist_ok=True)
        remove_unfinished(directory)
        parts = _opened(directory)
        for path in set(numbered(directory)) - {path for path, _ in parts}:
            _log.warning("the collected text in '%s' is damaged and not learned", path)
        if any(part.meta["tokenizer_sha"] != form.tokenizer_sha for _, part in parts):
            raise ConfigError(
                f"'{directory}' holds text of a target with another tokenizer. Expected that of this target. Pass "
                "another --distill-to."
            )

    def add(self, document: Document) -> None:
        """Adds a document; writes packed tokens when enough are there. Raises `OSError` or `RequestError`.

        A document that would fill more than half of the ring is left out.
        """
        if 2 * len(document.tokens) > self._most_tokens:
            return
        self._waiting.append(document)
        self._num_waiting += len(document.tokens)
        if self._num_waiting * _PARTS >= self._most_tokens:
            self.flush()

    def flush(self) -> None:
        """Writes the documents that wait, and removes the oldest packed tokens; raises as `add`."""
        if not self._waiting:
            return
        waiting, self._waiting, self._num_waiting = self._waiting, [], 0
        with new_directory(_next_path(self._directory)) as new, closing(PackedWriter(new, self._form)) as writer:
            for document in waiting:
                writer.add(document)
            writer.finish()
        sizes, num_tokens = {path: part.meta["num_tokens"] for path, part in _opened(self._directory)}, 0
        for path in reversed(numbered(self._directory)):
            num_tokens += sizes.get(path, 0)  # of damaged ones
            if num_tokens > self._most_tokens:
                shutil.rmtree(path)


class Traffic:
    """The text of served requests on disk, split by prompt: equal prompts are never on both sides."""

    def __init__(self, directory: Path, form: PackedForm, *, most_tokens: int) -> None:
        """Opens both rings, which together hold at most `most_tokens` tokens."""
        held_out = most_tokens // _HELD_OUT
        self._train = TrafficRing(directory / TRAFFIC / "train", form, most_tokens=most_tokens - held_out)
        self._held_out = TrafficRing(directory / TRAFFIC / "held_out", form, most_tokens=held_out)

    def add(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Adds the tokens of a completion; those of its output are labels. Raises as `TrafficRing.add`."""
        is_held_out = zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes()) % _HELD_OUT == 0
        flags = [False] * len(prompt) + [True] * len(output)
        (self._held_out if is_held_out else self._train).add(Document([*prompt, *output], flags))

    def flush(self) -> None:
        """Writes what waits; raises as `TrafficRing.flush`."""
        self._train.flush()
        self._held_out.flush()


def read_traffic(directory: Path) -> PackedTokens | None:
    """Returns all packed tokens of a ring in memory, one after another; None for an empty ring."""
    parts = [part for _, part in _opened(directory)]
    if not parts:
        return None
    flags = [np.ones(len(part.tokens), bool) if part.supervised is None else part.supervised for part in parts]
    digest = hashlib.sha256("".join(str(part.meta["tokens_sha256"]) for part in parts).encode()).hexdigest()
    return PackedTokens(
        np.concatenate([part.tokens for part in parts]), np.concatenate(flags), {"tokens_sha256": digest}
    )


class ServerSignals:
    """What the server says over standard input: 1 when requests run, 0 when none do. Its end ends this process."""

    def __init__(self) -> None:
        self._is_busy = False
        self._last = time.perf_counter()  # end of the last wait

    def wait(self, seconds: float) -> None:
        """Waits, at most until the server says something."""
        if select.select([sys.stdin], [], [], seconds)[0]:
            told = os.read(sys.stdin.fileno(), 1 << 12)
            if not told:
                raise SystemExit
            self._is_busy = told.endswith(b"1")
        self._last = time.perf_counter()

    def pause(self, _: StepReport | None = None) -> None:
        """Waits after work, so that work takes `_BUSY_SHARE` of the time while requests run."""
        worked = time.perf_counter() - self._last
        self.wait(0)
        until = self._last + worked * (1 / _BUSY_SHARE - 1)
        while self._is_busy and (left := until - time.perf_counter()) > 0:
            self.wait(left)


class Round(NamedTuple):
    """The result of a round, JSON-ready."""

    alpha_before: Sequence[float]  # acceptance rates on held-out traffic at temperatures 0 and 1
    alpha_after: Sequence[float]
    tokens: int  # of the training windows
    seconds: float  # of the round, pauses included
    draft: str | None  # name of the published directory; None if the rate did not rise


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlineTraining:
    """A draft model in training beside a server."""

    target: LoadedModel
    tokenizer: Any
    student: LoadedModel
    draft: str  # directory or hub id of the draft model that the server began with
    directory: Path  # of `foretoken serve --distill-to`
    pause: Callable[[StepReport | None], None]  # is called between pieces of work

    @classmethod
    def of_files(
        cls, model: str, draft: str, directory: Path, *, dtype: str, pause: Callable[[StepReport | None], None]
    ) -> OnlineTraining:
        """Loads target and draft model on the CPU; begins with the last published weights that are not damaged.

        Raises as `load_target` and `new_student`.
        """
        drafts = directory / DRAFTS
        remove_unfinished(drafts)
        target, tokenizer = load_target(model, dtype=dtype, device="cpu", unpacks=True)
        student = new_student(target, tokenizer, init=draft, sizes={}, seed=0).model
        for path in reversed(numbered(drafts)):
            with suppress(ModelError):  # the server says so
                student.module.load_state_dict(read_weights(path, student), strict=False)
                break
        return cls(target=target, tokenizer=tokenizer, student=student, draft=draft, directory=directory, pause=pause)

    def round(self) -> Round | None:
        """Trains on the traffic and publishes the draft model if its acceptance rate rose; None with too little text.

        The weights of `student` are those of the last published draft model again if the rate did not rise.
        """
        begin = time.perf_counter()
        train, held_out = (read_traffic(self.directory / TRAFFIC / part) for part in ("train", "held_out"))
        if train is None or held_out is None:
            return None
        context_len = min(self.student.context_len, self.target.context_len)
        length = min(_LENGTH, context_len, len(train.tokens), len(held_out.tokens))
        windows = _windows(held_out, length)
        if length < 4 or not len(windows[0]):
            return None
        before = self._acceptance_rates(windows)
        steps = min(max(_EPOCHS * train.num_windows(length) // _BATCH_SIZE, 1), _STEPS)
        kept = {name: weight.detach().clone() for name, weight in self.student.module.state_dict().items()}
        run = self.directory / RUN
        shutil.rmtree(run, ignore_errors=True)  # of a killed process
        settings = ModelSettings(
            objective=Distillation(), data=str(train.meta["tokens_sha256"]), directory=run, save_every_s=math.inf,
            origin={"init": self.draft},
            train=train_config({
                "schedule": {"peak": _RATE, "num_steps": steps, "warmup_steps": steps // 10},
                "batch_size": _BATCH_SIZE, "length": length, "max_offset": context_len - length,
                "seed": int(_next_path(self.directory / DRAFTS).name),
            }),
        )  # fmt: skip
        notes = trained_notes(
            train_model(self.target, self.student, train, settings, on_step=self.pause), run,
            f"$ foretoken serve {self.target.name} --distill-to {self.directory}",
        )  # fmt: skip
        shutil.rmtree(run, ignore_errors=True)
        after = self._acceptance_rates(windows)
        new = _next_path(self.directory / DRAFTS)  # others may have published since
        has_risen = sum(after) > sum(before)
        if has_risen:
            saved_draft_model(
                self.student, notes, new, target=self.target, tokenizer=self.tokenizer, dtype="float32", workload=None
            )
            for old in numbered(new.parent)[:-_KEPT_DRAFTS]:
                if old.resolve() != Path(self.draft).resolve():  # from which the server starts
                    shutil.rmtree(old, ignore_errors=True)
        else:
            self.student.module.load_state_dict(kept)
        seconds = round(time.perf_counter() - begin, 1)
        return Round(before, after, int(notes["tokens"]), seconds, new.name if has_risen else None)

    def _acceptance_rates(self, windows: Sequence[Tensor]) -> list[float]:
        """Returns the acceptance rates at temperatures 0 and 1, means over the labels of all windows."""
        sums, num_labels = np.zeros(2), 0
        for tokens, is_label in zip(*(each.split(_AT_ONCE) for each in windows), strict=True):
            count = int(is_label[:, 1:].sum())
            rates = acceptance_rates(self.student, self.target, tokens, is_label, dtype=torch.float32)
            sums += count * np.array(rates)
            num_labels += count
            self.pause(None)
        return [float(each) for each in sums / num_labels]


def _windows(held_out: PackedTokens, length: int) -> tuple[Tensor, Tensor]:
    """Returns (B, S) int64 tokens and (B, S) bool labels of windows with a label, always the same for the same text."""
    count = min(_HELD_OUT_WINDOWS, held_out.num_windows(length))
    tokens, is_label = held_out.batch(0, batch_size=count, length=length, seed=0)
    has_labels = is_label[:, 1:].any(1)
    return tokens[has_labels], is_label[has_labels]


def main() -> None:
    """Runs rounds until standard input ends; writes each as a line of JSON, or `error` before a failure.

    The arguments are target, draft model, directory and dtype of the target. A round begins after new text came, and
    after a round whose draft model was published.
    """
    model, draft, directory, dtype = sys.argv[1:]
    os.nice(19)
    set_num_threads(1)
    signals, told, trained = ServerSignals(), sys.stdout, list[Path]()
    train = Path(directory) / TRAFFIC / "train"
    try:
        training = OnlineTraining.of_files(model, draft, Path(directory), dtype=dtype, pause=signals.pause)
        while True:
            there = numbered(train)
            result = None if there == trained else training.round()
            if result is None:
                signals.wait(_LOOK_S)
                continue
            trained = there if result.draft is None else []
            told.write(json.dumps(result._asdict()) + "\n")
            told.flush()
    except Interrupted as err:
        raise SystemExit(128 + err.number) from err
    except Exception as err:
        told.write(json.dumps({"error": described(err)}) + "\n")
        raise SystemExit(1) from err


if __name__ == "__main__":
    main()
