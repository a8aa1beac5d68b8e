"""Train the tinycode target or its draft model on the encoded corpus, resumably.

    python -m recipes.tinycode.train --run-dir DIR                     # target, stable phase, runs until stopped
    python -m recipes.tinycode.train --run-dir DIR --decay-steps 1500  # decay branch from the last stable checkpoint
    python -m recipes.tinycode.train --run-dir DIR --model draft --teacher target-decay --steps 3000 --decay-steps 3000
    python -m recipes.tinycode.train --model draft --init models/tinycode-draft --teacher models/tinycode --steps 3000

The same command continues a stopped run. SIGTERM and SIGINT save a checkpoint and end it.
"""

from __future__ import annotations

import argparse
import json
import math
import signal
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from recipes.tinycode import checkpoint
from recipes.tinycode.data import Batches, held_out_windows
from recipes.tinycode.model import CONFIGS, ModelConfig, TinyLlama
from recipes.tinycode.optimizer import MuonAdamW
from recipes.tinycode.paths import default_run_dir
from recipes.tinycode.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1


@dataclass(slots=True)
class Progress:
    """How far a run has come; `seconds` is time spent in training steps."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    decay_start: int = 0


def cross_entropy(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Mean negative log-likelihood in nats per token, computed in float32."""
    return functional.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten())


class Trainer:
    """Model, optimiser and data of one run; `train_step` is deterministic in (seed, step)."""

    def __init__(self, config: ModelConfig, batches: Batches, schedule: Schedule, *, seed: int = 0) -> None:
        self.model = TinyLlama(config)
        self.model.init_weights(torch.Generator().manual_seed(seed))
        self.optimizer = MuonAdamW(self.model.named_parameters(), adam_lr_scale=1.0, weight_decay=WEIGHT_DECAY)
        self.batches = batches
        self.schedule = schedule
        self.progress = Progress()
        self.teacher: TinyLlama | None = None
        self.kl_weight = 0.7
        self.autocast = False
        self.loss_fn = self._loss

    def _loss(self, ids_BT: Tensor, labels_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            return cross_entropy(self.model(ids_BT), labels_BT)

    def _distil_loss(self, ids_BT: Tensor, labels_BT: Tensor, teacher_BTV: Tensor) -> Tensor:
        """Mix of cross-entropy and KL(target || draft) at temperature 1."""
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            logits = self.model(ids_BT)
        log_draft = functional.log_softmax(logits.float(), dim=-1)
        log_target = functional.log_softmax(teacher_BTV.float(), dim=-1)
        kl = (log_target.exp() * (log_target - log_draft)).sum(-1).mean()
        nll = functional.nll_loss(log_draft.flatten(0, 1), labels_BT.flatten())
        return self.kl_weight * kl + (1 - self.kl_weight) * nll

    def compile(self) -> None:
        """Compile the loss (one graph per window length); bfloat16 autocast where the processor multiplies bfloat16."""
        self.autocast = torch.ops.mkldnn._is_mkldnn_bf16_supported()
        self.loss_fn = torch.compile(self._distil_loss if self.teacher else self._loss, dynamic=False)
        if self.teacher:
            self.teacher_fn = torch.compile(self._teach, dynamic=False)

    def _teach(self, ids_BT: Tensor) -> Tensor:
        assert self.teacher is not None, "only called with a teacher"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            return self.teacher(ids_BT)

    def train_step(self) -> float:
        """Take one optimiser step; return the batch loss in nats per token."""
        began = time.perf_counter()
        step = self.progress.step
        data = self.batches.batch(step)
        ids, labels = data[:, :-1].contiguous(), data[:, 1:].contiguous()
        extra: tuple[Tensor, ...] = ()
        if self.teacher:
            with torch.no_grad():
                extra = (self.teacher_fn(ids),)
        loss = self.loss_fn(ids, labels, *extra)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(step)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += labels.numel()
        self.progress.seconds += time.perf_counter() - began
        return loss.item()

    @torch.no_grad()
    def evaluate(self, windows: Tensor, batch: int = 8) -> float:
        """Return mean held-out loss in nats per token over (n, T + 1) windows, in float32."""
        losses = [cross_entropy(self.model(part[:, :-1]), part[:, 1:]) * len(part) for part in windows.split(batch)]
        return float(sum(losses)) / len(windows)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--model", choices=sorted(CONFIGS), default="target")
    parser.add_argument("--name", help="checkpoint name; default: the model, plus `-decay` on a decay branch")
    parser.add_argument("--init", type=Path, help="begin from this exported model's weights")
    parser.add_argument("--teacher", help="target to distil from: a checkpoint name, or an exported model's directory")
    parser.add_argument(
        "--kl-weight", type=float, default=0.7, help="of KL(target || draft); the rest is cross-entropy"
    )
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--warmup-steps", type=int, default=150)
    parser.add_argument("--tokens-per-step", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=1_000_000, help="stop a stable run here")
    parser.add_argument("--decay-steps", type=int, default=0, help="branch off the stable checkpoint and decay to 0")
    parser.add_argument("--eval-every-s", type=float, default=240.0)
    parser.add_argument("--save-every-s", type=float, default=200.0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def teacher_path(run_dir: Path, teacher: str) -> Path:
    """Return where a teacher's weights lie: an exported model's directory, or a checkpoint of the run directory."""
    return Path(teacher) if Path(teacher).is_dir() else run_dir / f"{teacher}.pt"


def build(args: argparse.Namespace) -> tuple[Trainer, Path]:
    """Create the trainer and restore its own checkpoint, or for a new decay branch the stable one."""
    stable = args.run_dir / f"{args.model}.pt"
    name = args.name or (f"{args.model}-decay" if args.decay_steps else args.model)
    path = args.run_dir / f"{name}.pt"
    batches = Batches(
        stream=np.load(args.run_dir / "train.npy", mmap_mode="r"), tokens_per_step=args.tokens_per_step, seed=args.seed
    )
    trainer = Trainer(
        CONFIGS[args.model], batches, Schedule(peak=args.lr, warmup_steps=args.warmup_steps), seed=args.seed
    )
    if path.exists():
        trainer.progress = Progress(**checkpoint.load(path, trainer.model, trainer.optimizer))
    elif args.decay_steps:
        trainer.progress = Progress(**checkpoint.load(stable, trainer.model, trainer.optimizer))
        trainer.progress.decay_start = trainer.progress.step
    elif args.init:
        checkpoint.load_weights(args.init, trainer.model)
    if args.decay_steps:
        trainer.schedule = Schedule(
            peak=args.lr,
            warmup_steps=args.warmup_steps,
            decay_start=trainer.progress.decay_start,
            decay_steps=args.decay_steps,
        )
    if args.teacher:
        trainer.kl_weight = args.kl_weight
        trainer.teacher = TinyLlama(CONFIGS["target"])
        checkpoint.load_weights(teacher_path(args.run_dir, args.teacher), trainer.teacher)
    return trainer, path


def write_meta(path: Path, args: argparse.Namespace) -> None:
    """Record beside the checkpoint what the card must state and the checkpoint does not hold."""
    objective = "cross-entropy"
    if args.teacher:
        objective = (
            f"{args.kl_weight} KL(target || draft) + {1 - args.kl_weight:.1f} cross-entropy, target = `{args.teacher}`"
        )
    meta = {"objective": objective, "seed": args.seed, "torch": torch.__version__, "threads": args.threads}
    meta |= {
        "lr": args.lr,
        "tokens_per_step": args.tokens_per_step,
        "decay_steps": args.decay_steps,
        "teacher": args.teacher,
        "kl_weight": args.kl_weight,
        "init": str(args.init) if args.init else None,
    }
    path.with_suffix(".meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def main() -> None:
    """Run until the last step or a signal, logging, evaluating and saving on the way."""
    args = parse_args()
    torch.set_num_threads(args.threads)
    trainer, path = build(args)
    write_meta(path, args)
    trainer.compile()
    windows = held_out_windows(np.load(args.run_dir / "held_out.npy"), 64, 512)
    progress = trainer.progress
    last = progress.decay_start + args.decay_steps if args.decay_steps else args.steps
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: stop.append(signum))
    started, first, saved, evaluated = time.monotonic(), progress.tokens, time.monotonic(), time.monotonic()
    recent = math.nan
    with path.with_suffix(".jsonl").open("a", buffering=1, encoding="utf-8") as log:

        def write(record: dict[str, Any]) -> None:
            log.write(json.dumps({**asdict(progress), **record}) + "\n")

        while progress.step < last and not stop:
            loss = trainer.train_step()
            recent = loss if math.isnan(recent) else 0.95 * recent + 0.05 * loss
            now = time.monotonic()
            if progress.step % 20 == 0:
                speed = (progress.tokens - first) / (now - started)
                eta = (last - progress.step) * args.tokens_per_step / speed
                write(
                    {"loss": round(recent, 4), "lr": trainer.schedule.lr(progress.step), "tokens_per_s": round(speed)}
                )
                print(
                    f"step {progress.step} tokens {progress.tokens} loss {recent:.4f} {speed:.0f} tok/s eta {eta:.0f} s"
                )
            if now - evaluated > args.eval_every_s:
                write({"held_out_loss": round(trainer.evaluate(windows), 4)})
                evaluated = time.monotonic()
            if now - saved > args.save_every_s:
                checkpoint.save(path, trainer.model, trainer.optimizer, asdict(progress))
                saved = time.monotonic()
        checkpoint.save(path, trainer.model, trainer.optimizer, asdict(progress))
        write({"held_out_loss": round(trainer.evaluate(windows), 4), "ended": "signal" if stop else "done"})


if __name__ == "__main__":
    main()
