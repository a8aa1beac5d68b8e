"""The training loop: for one process or many, resumable at any step with the same weights as without an interruption.

A global batch is a function of seed and step. Every process computes its rows of the batch. Losses are means over the
global batch, and gradients are summed over processes. So the number of processes changes only the time (and, for a
head with dropout, which units are dropped).
"""

from __future__ import annotations

import itertools
import math
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from typing_extensions import override

from foretoken.core.errors import ConfigError, ModelError
from foretoken.heads.base import WindowPositions
from foretoken.heads.eagle import EagleHead
from foretoken.sampling.noise import derive_seed
from foretoken.training.least_squares import LinearStart
from foretoken.training.objective_base import Examples, HeadSums, Objective, accumulate, label_counts, mean_by_head
from foretoken.training.run_state import Progress, load_state, save_state, saved_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from foretoken.heads.base import Head
    from foretoken.models.parts import TargetParts
    from foretoken.training.config import TrainConfig


_MAX_ANCHOR = 4  # tokens, as published
_BAD_STEPS_IN_A_ROW = 5  # a choice: one step may overflow by chance, and the run ends after so many
_RECENT_STEPS = 20  # steps of the rate in progress lines; a choice
_START_PART = 8  # the part of a run that first weights may take, as 1 / _START_PART; a choice


class Processes:
    """The processes that train together; by default this one alone."""

    num_processes, process_index = 1, 0

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all processes."""
        return tensor


class _Launched(Processes):
    def __init__(self) -> None:
        try:
            from accelerate import PartialState
        except ImportError as err:
            raise ConfigError(
                "training in several processes needs accelerate. Run in foretoken's repository: pip install '.[train]'."
            ) from err
        # Without this setting, accelerate would treat processes of torchrun without an accelerator as single ones: each
        # would train alone and write into the same directory.
        wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes")
        state = PartialState(cpu=wants_cpu or not torch.accelerator.is_available())
        self.num_processes, self.process_index = state.num_processes, state.process_index

    def sum(self, tensor: Tensor) -> Tensor:
        from accelerate.utils import reduce

        total: Tensor = reduce(tensor, reduction="sum")
        return total


def training_processes() -> Processes:
    """Returns the processes of this run; raises `ConfigError` if several were started and accelerate is missing."""
    return _Launched() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Processes()


class Batches(Protocol):
    """Training tokens, see `foretoken.training.data.packed.PackedTokens`."""

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns (B, S) int64 tokens and (B, S) bool labels; the same for the same arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one optimiser step.

    Attributes:
        step: Steps done, this one included.
        done: Share of the run that is done, by its steps or its seconds.
        loss: Weighted sum of the heads' mean losses.
        head_losses: Mean loss of each head.
        head_matches: Share of positions at which each head's first candidate is the target's.
        held_out_tau: After an evaluation, the expected tokens of a target pass that verifies a chain of K tokens, the
            target's own included; else None.
        held_out_acceptance: After an evaluation, the shares of `EvaluationConfig.evaluator`; else None.
        held_out_alpha: After an evaluation of a draft model, its acceptance rates on what the target writes at
            temperatures 0 and 1: the share of equal most probable tokens, and the mean of sum(min(p, q)); else None.
        written_tokens_per_s: Of the texts that were written for this step and the next ones; None if none were.
        seconds_after: Of `foretoken.train`, expected seconds of the measurement after the last step; else None.
    """

    step: int
    done: float
    loss: float
    head_losses: list[float]
    head_matches: list[float]
    rate: float
    grad_norm: float
    tokens_per_s: float
    held_out_tau: float | None = None
    held_out_acceptance: list[float] | None = None
    held_out_alpha: list[float] | None = None
    written_tokens_per_s: float | None = None
    seconds_after: float | None = None

    @property
    def tau(self) -> float:
        """Acceptance length of a chain on training text, from `head_matches`."""
        return 1.0 + sum(itertools.accumulate(self.head_matches, lambda left, right: left * right))


class MicroBatch(NamedTuple):
    """Windows of a step that are worked on at once, on the device.

    Attributes:
        tokens: (B, S) int64.
        supervised: (B, S) bool, the labels.
        features: (B, S, F E), the target's.
        positions: Where the student reads the windows.
    """

    tokens: Tensor
    supervised: Tensor
    features: Tensor
    positions: WindowPositions


class Trainer(ABC):
    """A module in training, in float32, and the progress of the run; a subclass knows the module and its loss."""

    def __init__(
        self,
        config: TrainConfig,
        batches: Batches,
        features: Callable[[int, Tensor], Tensor],
        *,
        processes: Processes | None = None,
    ) -> None:
        """Prepares a run at step 0.

        `features` returns what the target computes for a step and (B, S) tokens of this process.
        """
        self._config, self._batches, self._features = config, batches, features
        self._processes = processes or Processes()
        self._module = self._trained()
        self._optimizer = torch.optim.AdamW(self._groups(), lr=config.schedule.peak, betas=config.betas, fused=True)
        self.progress = Progress()
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._bad_steps = 0

    @property
    def device(self) -> torch.device:
        """The device of the trained weights."""
        return next(self._module.parameters()).device

    @abstractmethod
    def _trained(self) -> nn.Module:
        """Returns the module that is optimised and saved."""

    @abstractmethod
    def _counts(self, supervised: Tensor) -> Tensor:
        """Returns (K,) positions of the global batch for each loss; supervised: (B, S) bool."""

    @abstractmethod
    def _weights(self, step: int) -> list[float]:
        """Returns K weights of the losses in a step, counted from 0."""

    @abstractmethod
    def _backward(self, step: int, batch: MicroBatch, counts: Tensor) -> HeadSums:
        """Adds the gradients of a micro-batch; counts: (K,) of the global batch."""

    def _groups(self) -> list[dict[str, Any]]:
        """Returns the parameter groups of the optimiser."""
        return parameter_groups(self._module, self._config.weight_decay)

    def _divisors(self, counts: Tensor) -> Tensor:
        """Returns (K,) divisors of the sums of these losses; counts: (K,) positions."""
        return counts

    def save(self, run: Path) -> None:
        """Writes a checkpoint; only the first process does.

        Raises `ModelError` when weights are not finite (good checkpoints stay), or the checkpoint cannot be written.
        """
        if not all(bool(p.isfinite().all()) for p in self._module.parameters()):
            raise ModelError(
                f"weights are not finite after step {self.progress.step}. Expected finite numbers. Lower the learning "
                "rate; the last checkpoint is untouched."
            )
        if self._processes.process_index == 0:
            save_state(run, self._module, self._optimizer, self.progress)

    def resume(self, run: Path) -> bool:
        """Restores the last checkpoint, or returns False if there is none; raises `ModelError` if it is damaged."""
        states = saved_states(run)
        if not states:
            return False
        self.progress = load_state(states[-1], self._module, self._optimizer)
        return True

    def begin(self) -> bool:
        """Finds first weights from the data, for runs without a checkpoint; returns whether there were any to find."""
        return False

    def steps(self) -> Iterator[StepReport]:
        """Trains to the last step; yields after every step.

        Raises:
            ModelError: After several steps in a row without a finite loss or gradient; these steps change no weights.
        """
        while self._done < 1:
            yield self._train_step()
        if self.progress.skipped >= self.progress.step:
            raise ModelError(
                "no step changed anything: no loss was finite, or no batch had a label. Expected training. Check data "
                "and target with `foretoken doctor`."
            )

    def _train_step(self) -> StepReport:
        begin = time.perf_counter()
        config, step = self._config, self.progress.step
        world = self._processes.num_processes
        if world > 1:
            # Every process has its own dropout, the same after a resume, although a checkpoint holds the state of one
            # process.
            torch.manual_seed(derive_seed(config.seed, 1 + step * world + self._processes.process_index))
        tokens, supervised = self._batches.batch(
            step, batch_size=config.batch_size, length=config.length, seed=config.seed
        )
        counts = self._counts(supervised)
        sums = self._gradients(step, tokens, supervised, counts)
        grad_norm = float(torch.nn.utils.clip_grad_norm_(self._module.parameters(), config.clip_norm))
        rate = config.schedule.rate(step, self.progress.seconds)
        losses = mean_by_head(sums.loss, counts)
        parts = mean_by_head(sums.loss, self._divisors(counts))
        loss = math.fsum(value * weight for value, weight in zip(parts, self._weights(step), strict=True))
        if not counts.any():  # nothing to learn: momentum alone must not move the weights
            self.progress.skipped += 1
        elif math.isfinite(grad_norm) and math.isfinite(loss):
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["rate_factor"]
            self._optimizer.step()
            self._bad_steps = 0
        else:
            self._count_bad_step(step, loss)
        self._optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - begin
        if config.schedule.seconds is not None:
            seconds = self._common(seconds)
        self._recent.append((seconds, tokens.numel()))
        self.progress.step += 1
        self.progress.tokens += tokens.numel()
        self.progress.seconds += seconds
        recent_s = sum(s for s, _ in self._recent)
        return StepReport(
            step=step + 1,
            done=self._done,
            loss=loss,
            head_losses=list(losses),
            head_matches=list(mean_by_head(sums.matches, counts)),
            rate=rate,
            grad_norm=grad_norm,
            tokens_per_s=sum(n for _, n in self._recent) / recent_s,
        )

    def _common(self, seconds: float) -> float:
        """Returns the mean over all processes, which therefore end after the same step."""
        world = self._processes.num_processes
        if world == 1:
            return seconds
        return float(self._processes.sum(torch.tensor([seconds], device=self.device))) / world

    @property
    def _done(self) -> float:
        """The share of the run that is done."""
        return self._config.schedule.done(self.progress.step, self.progress.seconds)

    def _gradients(self, step: int, tokens: Tensor, supervised: Tensor, counts: Tensor) -> HeadSums:
        """Leaves the gradient of the global batch's loss in the parameters; returns the global sums."""
        world, rank = self._processes.num_processes, self._processes.process_index
        device = self.device
        own_tokens, own_supervised = tokens[rank::world].to(device), supervised[rank::world].to(device)
        # With more processes than windows some have none, and targets cannot run on an empty batch.
        features = self._features(step, own_tokens).to(device) if len(own_tokens) else own_tokens
        anchor, offset = (each[rank::world].to(device) for each in drawn_positions(self._config, step))
        self._module.train()
        total: HeadSums | None = None
        size = self._config.micro_batch_size or max(len(own_tokens), 1)
        for begin in range(0, len(own_tokens), size):
            part = slice(begin, begin + size)
            positions = WindowPositions(anchor[part], offset[part])
            with torch.autocast(device.type, torch.bfloat16, enabled=self._config.compute_dtype == torch.bfloat16):
                batch = MicroBatch(own_tokens[part], own_supervised[part], features[part], positions)
                sums = self._backward(step, batch, counts)
            total = sums if total is None else total + sums
        if total is None:  # more processes than windows
            zeros = torch.zeros_like(counts, device=device)
            total = HeadSums(zeros, zeros, zeros)
        return self._shared(total)

    def _shared(self, sums: HeadSums) -> HeadSums:
        packed = torch.stack([sums.loss, sums.matches, sums.count])
        if self._processes.num_processes == 1:
            return HeadSums(*packed.cpu().unbind(0))
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self._processes.sum(torch.cat([grad.reshape(-1) for grad in grads]))
        offset = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = flat[offset : offset + grad.numel()].view_as(grad)
            offset += grad.numel()
        return HeadSums(*self._processes.sum(packed).cpu().unbind(0))

    def _count_bad_step(self, step: int, loss: float) -> None:
        self.progress.skipped += 1
        self._bad_steps += 1
        if self._bad_steps >= _BAD_STEPS_IN_A_ROW:
            raise ModelError(
                f"the loss is {loss} for {self._bad_steps} steps in a row, up to step {step + 1}. Expected finite "
                "numbers. Lower the learning rate, or check the target's features with `foretoken doctor`; the last "
                "checkpoint is untouched."
            )


class HeadTrainer(Trainer):
    """A head in training."""

    def __init__(
        self,
        head: Head,
        parts: TargetParts,
        objective: Objective,
        config: TrainConfig,
        batches: Batches,
        features: Callable[[int, Tensor], Tensor],
        *,
        processes: Processes | None = None,
        is_new: bool = True,
    ) -> None:
        """Prepares a run of a head with initial weights; `features` returns those of `Teacher.read_features`.

        `is_new`: whether the weights know nothing of the target's texts.
        """
        self.head, self._parts, self._objective, self._is_new = head, parts, objective, is_new
        super().__init__(config, batches, features, processes=processes)

    @override
    def _trained(self) -> nn.Module:
        return self.head

    @override
    def begin(self) -> bool:
        """Fits the fusing layer of a new EAGLE head to the batches of the first steps; their time counts."""
        if not self._is_new or not isinstance(self.head, EagleHead):
            return False
        config, world, rank = self._config, self._processes.num_processes, self._processes.process_index
        begin, fit = time.perf_counter(), LinearStart(self.head, self._parts)
        most = max(config.schedule.num_steps // _START_PART, 1)
        limit = math.inf if config.schedule.seconds is None else config.schedule.seconds / _START_PART
        step, count = 0, min(-(-fit.num_tokens // (config.batch_size * config.length)), most)
        while step < count:
            tokens, _ = self._batches.batch(step, batch_size=config.batch_size, length=config.length, seed=config.seed)
            own = tokens[rank::world].to(self.device)
            if len(own):
                fit.add(own, self._features(step, own).to(self.device)[..., -self.head.config.hidden_size :])
            if step == 0 and limit < math.inf:
                count = min(count, max(int(limit / self._common(time.perf_counter() - begin)), 1))
            step += 1
        fit.finish(lambda sums: self._processes.sum(sums.to(self.device)).cpu() if world > 1 else sums)
        self.progress.seconds += min(self._common(time.perf_counter() - begin), limit)  # or no step would be left
        return True

    @override
    def _counts(self, supervised: Tensor) -> Tensor:
        return label_counts(supervised, self._objective.steps(self.head.config))

    @override
    def _divisors(self, counts: Tensor) -> Tensor:
        return self._objective.divisors(counts)

    @override
    def _weights(self, step: int) -> list[float]:
        return [self._objective.head_decay**index for index in range(self._objective.steps(self.head.config))]

    @override
    def _backward(self, step: int, batch: MicroBatch, counts: Tensor) -> HeadSums:
        tokens, supervised, features, positions = batch
        examples = Examples.of_batch(
            tokens, supervised, features, self.head.config, progress=self._done, positions=positions
        )
        return accumulate(self._objective, self.head, examples, self._parts, counts=counts)


def drawn_positions(config: TrainConfig, step: int) -> tuple[Tensor, Tensor]:
    """Returns anchors and offsets of a step's batch for `WindowPositions`, a pure function of (seed, step).

    They are (B, 1) int64, on the CPU. As in LongSpec (arXiv 2502.17421), 0 to 4 first tokens keep their positions.
    """
    generator = torch.Generator().manual_seed(derive_seed(config.seed, -1 - step))
    anchor = torch.randint(_MAX_ANCHOR + 1, (config.batch_size, 1), generator=generator)
    return anchor, torch.randint(config.max_offset + 1, (config.batch_size, 1), generator=generator)


def parameter_groups(module: nn.Module, weight_decay: float, rate_factor: float = 1.0) -> list[dict[str, Any]]:
    """Returns trainable parameters for AdamW: matrices decay, vectors do not."""
    trainable = [p for p in module.parameters() if p.requires_grad]
    matrices, others = [p for p in trainable if p.dim() > 1], [p for p in trainable if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay, "rate_factor": rate_factor},
        {"params": others, "weight_decay": 0.0, "rate_factor": rate_factor},
    ]
