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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn
from typing_extensions import override

from foretoken.core.checks import validated
from foretoken.core.errors import ConfigError, ModelError
from foretoken.heads.base import Head, WindowPositions
from foretoken.heads.eagle import EagleHead
from foretoken.sampling.noise import derive_seed
from foretoken.training.objective_base import Examples, HeadSums, Objective, accumulate, label_counts, mean_by_head
from foretoken.training.objectives import LinearStart
from foretoken.training.run_state import Progress, load_state, save_state, saved_states

if TYPE_CHECKING:
    from foretoken.models.parts import TargetParts

_MAX_ANCHOR = 4  # tokens, as published
_BAD_STEPS_IN_A_ROW = 5  # a choice: one step may overflow by chance, and the run ends after so many
_RECENT_STEPS = 20  # steps of the rate in progress lines; a choice
_START_PART = 8  # the part of a run that first weights may take, as 1 / _START_PART; a choice


class Schedule(BaseModel):
    """Learning rate of every optimiser step; a run that is stored or resumed keeps it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    peak: float = Field(default=1e-3, gt=0)
    num_steps: int = Field(default=1000, ge=1)
    warmup_steps: int = Field(default=50, ge=0)  # of linear rise from near 0
    floor: float = Field(default=0.05, gt=0, le=1)  # last rate / peak; at 0 an extended run would learn nothing
    seconds: float | None = Field(default=None, gt=0)  # the run ends after so many, and the rate falls by this clock

    def done(self, step: int, seconds: float) -> float:
        """Returns the share of the run that is done after some steps, which took some seconds."""
        return max(step / self.num_steps, 0.0 if self.seconds is None else seconds / self.seconds)

    def rate(self, step: int, seconds: float = 0.0) -> float:
        """Returns the learning rate of a step, counted from 0, that begins after `seconds` of steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        length = max(self.num_steps - self.warmup_steps - 1, 1)
        by_time = 0.0 if self.seconds is None else seconds / self.seconds
        progress = min(max((step - self.warmup_steps) / length, by_time), 1.0)
        return self.peak * (self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * progress)))


class TrainConfig(BaseModel):
    """Batches and optimiser. The settings are stored beside checkpoints and must not change when a run is resumed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    schedule: Schedule = Schedule()
    batch_size: int = Field(default=8, ge=1, le=1 << 16)  # windows of a global batch, over all processes
    micro_batch_size: int | None = Field(default=None, ge=1)  # computed at once by one process; None: all of its share
    length: int = Field(default=512, ge=4)  # tokens of a window
    max_offset: int = Field(default=0, ge=0)  # largest random offset of the positions, see `WindowPositions`
    repeats_windows: bool = False  # whether all epochs cut the data at the same places, see `PackedTokens`
    weight_decay: float = Field(default=0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = Field(default=1.0, gt=0)  # greatest norm of the gradient
    precision: Literal["float32", "bfloat16"] = "float32"  # of GEMMs: bfloat16 by autocast with float32 weights
    seed: int = Field(default=0, ge=0)  # of weights, order of the data and dropout

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of GEMMs and of frozen weights; trained weights are in float32."""
        return torch.bfloat16 if self.precision == "bfloat16" else torch.float32


def train_config(values: Mapping[str, Any]) -> TrainConfig:
    """Returns the checked settings of a run; raises `ConfigError` for unknown names and wrong values."""
    return validated(TrainConfig, values, "training")


class Processes:
    """The processes that train together; by default this one alone."""

    def __init__(self, num_processes: int = 1, process_index: int = 0) -> None:
        self.num_processes, self.process_index = num_processes, process_index

    def sum(self, tensor: Tensor) -> Tensor:
        """Returns the sum over all processes."""
        if self.num_processes == 1:
            return tensor
        from accelerate.utils import reduce

        total: Tensor = reduce(tensor, reduction="sum")
        return total

    def own(self, batch: Tensor) -> Tensor:
        """Returns the rows of a global batch that this process computes."""
        return batch[self.process_index :: self.num_processes]


def training_processes() -> Processes:
    """Returns the processes of this run; raises `ConfigError` if several were started and accelerate is missing."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
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
    return Processes(state.num_processes, state.process_index)


class Batches(Protocol):
    """Training tokens, see `foretoken.training.data.packed.PackedTokens`."""

    def batch(self, step: int, *, batch_size: int, length: int, seed: int) -> tuple[Tensor, Tensor]:
        """Returns (B, S) int64 tokens and (B, S) bool labels; the same for the same arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one optimiser step. A value that was not measured in this step is None."""

    step: int  # steps done, this one included
    done: float  # share of the run that is done, by its steps or its seconds
    loss: float  # weighted sum of the heads' mean losses
    head_losses: list[float]  # mean loss of each head
    head_matches: list[float]  # share of positions at which each head's first candidate is the target's
    rate: float
    grad_norm: float
    tokens_per_s: float
    held_out_tau: float | None = None  # expected tokens of a target pass that verifies a chain, its own included
    held_out_acceptance: list[float] | None = None  # shares of drafts with d right first tokens, from d = 1
    held_out_alpha: list[float] | None = None  # of a draft model, see `foretoken.training.evaluation.acceptance_rates`
    written_tokens_per_s: float | None = None  # of the text that was written for this step and the next ones
    seconds_after: float | None = None  # of `foretoken.train`: expected seconds of the measurement after the last step

    @property
    def tau(self) -> float:
        """Acceptance length of a chain on training text, from `head_matches`."""
        return 1.0 + sum(itertools.accumulate(self.head_matches, lambda left, right: left * right))


class Trainer(ABC):
    """A module in training, in float32, and the progress of the run; a subclass knows the loss."""

    def __init__(
        self,
        module: nn.Module,
        config: TrainConfig,
        batches: Batches,
        features: Callable[[int, Tensor], Tensor],
        *,
        processes: Processes | None = None,
        groups: list[dict[str, Any]] | None = None,
    ) -> None:
        """Prepares a run at step 0 of `module`, which is optimised and saved.

        `features` returns what the target computes for a step and (B, S) tokens of this process. `groups` are parameter
        groups of the optimiser; None for those of `parameter_groups`.
        """
        self._module, self._config, self._batches, self._features = module, config, batches, features
        self.processes = processes or Processes()
        groups = groups or parameter_groups(module, config.weight_decay)
        self._optimizer = torch.optim.AdamW(groups, lr=config.schedule.peak, betas=config.betas, fused=True)
        self.progress = Progress()
        self._recent: deque[tuple[float, int]] = deque(maxlen=_RECENT_STEPS)
        self._bad_steps = 0

    @property
    def device(self) -> torch.device:
        """The device of the trained weights."""
        return next(self._module.parameters()).device

    @abstractmethod
    def _counts(self, supervised: Tensor) -> Tensor:
        """Returns (K,) positions of the global batch for each loss; supervised: (B, S) bool."""

    @abstractmethod
    def _weights(self, step: int) -> list[float]:
        """Returns K weights of the losses in a step, counted from 0."""

    @abstractmethod
    def _backward(self, step: int, batch: Examples, counts: Tensor) -> HeadSums:
        """Adds the gradients of a micro-batch with the target's features; counts: (K,) of the global batch."""

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
        if self.processes.process_index == 0:
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
        world = self.processes.num_processes
        if world > 1:
            # Every process has its own dropout, the same after a resume, although a checkpoint holds the state of one
            # process.
            torch.manual_seed(derive_seed(config.seed, 1 + step * world + self.processes.process_index))
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
            head_losses=losses,
            head_matches=mean_by_head(sums.matches, counts),
            rate=rate,
            grad_norm=grad_norm,
            tokens_per_s=sum(n for _, n in self._recent) / recent_s,
        )

    def _common(self, seconds: float) -> float:
        """Returns the mean over all processes, which therefore end after the same step."""
        world = self.processes.num_processes
        return seconds if world == 1 else float(self._summed(torch.tensor([seconds]))) / world

    def _summed(self, tensor: Tensor) -> Tensor:
        """Returns the sum of a tensor on the host over all processes."""
        return tensor if self.processes.num_processes == 1 else self.processes.sum(tensor.to(self.device)).cpu()

    @property
    def _done(self) -> float:
        """The share of the run that is done."""
        return self._config.schedule.done(self.progress.step, self.progress.seconds)

    def _gradients(self, step: int, tokens: Tensor, supervised: Tensor, counts: Tensor) -> HeadSums:
        """Leaves the gradient of the global batch's loss in the parameters; returns the global sums."""
        device = self.device
        own_tokens, own_supervised = (self.processes.own(each).to(device) for each in (tokens, supervised))
        # With more processes than windows some have none, and targets cannot run on an empty batch.
        features = self._features(step, own_tokens).to(device) if len(own_tokens) else own_tokens
        anchor, offset = (self.processes.own(each).to(device) for each in drawn_positions(self._config, step))
        self._module.train()
        total: HeadSums | None = None
        size = self._config.micro_batch_size or max(len(own_tokens), 1)
        for begin in range(0, len(own_tokens), size):
            part = slice(begin, begin + size)
            batch = Examples(
                own_tokens[part], own_supervised[part], features[part], features[part], self._done,
                WindowPositions(anchor[part], offset[part]),
            )  # fmt: skip
            with torch.autocast(device.type, torch.bfloat16, enabled=self._config.compute_dtype == torch.bfloat16):
                sums = self._backward(step, batch, counts)
            total = sums if total is None else total + sums
        if total is None:  # more processes than windows
            zeros = torch.zeros_like(counts, device=device)
            total = HeadSums(zeros, zeros, zeros)
        return self._shared(total)

    def _shared(self, sums: HeadSums) -> HeadSums:
        packed = torch.stack([sums.loss, sums.matches, sums.count])
        if self.processes.num_processes == 1:
            return HeadSums(*packed.cpu().unbind(0))
        parameters = [p for p in self._module.parameters() if p.requires_grad]
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        flat = self.processes.sum(torch.cat([grad.reshape(-1) for grad in grads]))
        offset = 0
        for parameter, grad in zip(parameters, grads, strict=True):
            parameter.grad = flat[offset : offset + grad.numel()].view_as(grad)
            offset += grad.numel()
        return HeadSums(*self.processes.sum(packed).cpu().unbind(0))

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
        super().__init__(head, config, batches, features, processes=processes)

    @override
    def begin(self) -> bool:
        """Fits the fusing layer of a new EAGLE head to the batches of the first steps; their time counts."""
        if not self._is_new or not isinstance(self.head, EagleHead):
            return False
        config = self._config
        begin, fit = time.perf_counter(), LinearStart(self.head, self._parts)
        most = max(config.schedule.num_steps // _START_PART, 1)
        limit = math.inf if config.schedule.seconds is None else config.schedule.seconds / _START_PART
        step, count = 0, min(-(-fit.num_tokens // (config.batch_size * config.length)), most)
        while step < count:
            tokens, _ = self._batches.batch(step, batch_size=config.batch_size, length=config.length, seed=config.seed)
            own = self.processes.own(tokens).to(self.device)
            if len(own):
                fit.add(own, self._features(step, own).to(self.device)[..., -self.head.config.hidden_size :])
            if step == 0 and limit < math.inf:
                count = min(count, max(int(limit / self._common(time.perf_counter() - begin)), 1))
            step += 1
        fit.finish(self._summed)
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
        return self._objective.step_weights(self.head.config)

    @override
    def _backward(self, step: int, batch: Examples, counts: Tensor) -> HeadSums:
        return accumulate(self._objective, self.head, batch.of_head(self.head.config), self._parts, counts=counts)


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
