"""Train the tinycode target or its draft model on the encoded corpus, resumably, on a CPU or a GPU.

    python -m recipes.tinycode.train --device cuda --seconds 200
    python -m recipes.tinycode.train --device cuda --seconds 40 --model draft --teacher target --kl-weight 0.9
    python -m recipes.tinycode.train --steps 9000 --tokens-per-step 2048 --windows 256 --long-windows 256 1024

A run has a planned end, in steps or in seconds: warm-up, a stable rate, and in the last third of the run a falling rate
with long windows among the short ones. The same command continues a stopped run. SIGTERM and SIGINT save a checkpoint
and end it.
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

import torch
from torch.nn import functional

from recipes.tinycode import checkpoint
from recipes.tinycode.data import Batches, held_out_windows, load_stream
from recipes.tinycode.evaluate import held_out_loss
from recipes.tinycode.model import CONFIGS, ModelConfig, TinyLlama
from recipes.tinycode.optimizer import MuonAdamW
from recipes.tinycode.paths import default_run_dir
from recipes.tinycode.schedule import Schedule

if TYPE_CHECKING:
    from torch import Tensor

CLIP_NORM = 1.0
WEIGHT_DECAY = 0.1
LOG_EVERY = 10  # steps; reading the loss waits for the device
PEAK_FLOPS = 989e12  # dense bfloat16 of an H100 SXM, NVIDIA's data sheet


@dataclass(slots=True)
class Progress:
    """How far a run has come; `seconds` counts compilation, evaluation and saves too, not the time between runs."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0


class Trainer:
    """Model, optimiser and data of one run; `train_step` is deterministic in (seed, step, share of the run done)."""

    def __init__(
        self,
        config: ModelConfig,
        batches: Batches,
        schedule: Schedule,
        *,
        windows: tuple[int, ...],
        long_windows: tuple[int, ...],
        seed: int = 0,
    ) -> None:
        self.device = batches.stream.device
        model = TinyLlama(config)
        model.init_weights(torch.Generator().manual_seed(seed))
        self.model = model.to(self.device)
        self.optimizer = MuonAdamW(self.model.named_parameters(), adam_lr_scale=1.0, weight_decay=WEIGHT_DECAY)
        self.batches = batches
        self.schedule = schedule
        self.windows, self.long_windows = windows, long_windows
        self.progress = Progress()
        self.teacher: TinyLlama | None = None
        self.kl_weight = 0.7
        self.autocast = False
        self.head_loss = self._head_loss

    def _head_loss(self, x_ND: Tensor, labels_N: Tensor, teacher_ND: Tensor | None) -> Tensor:
        """Cross-entropy (nats per token) of the last layer's states; with a teacher, mixed with KL(target || draft)."""
        logits_NV = self.model.logits(x_ND).float()
        if self.teacher is None or teacher_ND is None:
            return functional.cross_entropy(logits_NV, labels_N)
        log_draft = functional.log_softmax(logits_NV, dim=-1)
        log_target = functional.log_softmax(self.teacher.logits(teacher_ND).detach().float(), dim=-1)
        kl = (log_target.exp() * (log_target - log_draft)).sum(-1).mean()
        return self.kl_weight * kl + (1 - self.kl_weight) * functional.nll_loss(log_draft, labels_N)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the loss of a (B, T + 1) batch."""
        ids, labels = batch[:, :-1].contiguous(), batch[:, 1:].flatten()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            teacher = None
            if self.teacher:
                with torch.no_grad():
                    teacher = self.teacher.hidden(ids).flatten(0, 1)
            return self.head_loss(self.model.hidden(ids).flatten(0, 1), labels, teacher)

    def compile(self) -> None:
        """Compile the layers (a graph for each window length) and the loss (one graph), and print how long it takes."""
        self.model.compile_layers()
        if self.teacher:
            self.teacher.compile_layers()
        self.head_loss = torch.compile(self._head_loss, dynamic=False)
        for length in sorted({*self.windows, *self.long_windows}):
            began = time.perf_counter()
            self.loss(self.batches.batch(0, length)).backward()
            self.optimizer.zero_grad(set_to_none=True)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            print(f"compiled for windows of {length}: {time.perf_counter() - began:.1f} s", flush=True)

    def window(self, done: float) -> int:
        """Return the next window length, in turn: from `windows`, or from `long_windows` while the rate falls."""
        lengths = self.long_windows if self.schedule.decaying(done) else self.windows
        return lengths[self.progress.step % len(lengths)]

    def train_step(self, done: float) -> Tensor:
        """Take one step when the share `done` of the run has passed; return the loss without waiting for the device."""
        step = self.progress.step
        loss = self.loss(self.batches.batch(step, self.window(done)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule.lr(step, done)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.progress.step += 1
        self.progress.tokens += self.batches.tokens_per_step
        return loss.detach()

    def evaluate(self, windows: Tensor) -> float:
        """Return mean held-out loss in nats per token over (n, T + 1) windows, uncompiled, in float32."""
        with torch.compiler.set_stance("force_eager"):
            return held_out_loss(self.model, windows)


def parse_args() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--run-dir", type=Path, default=default_run_dir())
    parser.add_argument("--model", choices=sorted(CONFIGS), default="target")
    parser.add_argument("--name", help="checkpoint name; default: the model")
    parser.add_argument("--init", type=Path, help="begin from this exported model's weights")
    parser.add_argument("--teacher", help="target to distil from: a checkpoint name, or an exported model's directory")
    parser.add_argument(
        "--kl-weight", type=float, default=0.7, help="of KL(target || draft); the rest is cross-entropy"
    )
    parser.add_argument("--lr", type=float, default=2.5e-3)
    parser.add_argument("--warmup-steps", type=int, default=150)
    parser.add_argument(
        "--tokens-per-step", type=int, default=65_536, help="default: for 2e8 tokens, Bi et al. 2024 (arXiv 2401.02954)"
    )
    end = parser.add_mutually_exclusive_group(required=True)
    end.add_argument("--steps", type=int, help="length of the run in steps")
    end.add_argument("--seconds", type=float, help="length of the run in seconds, compilation included")
    parser.add_argument("--windows", type=int, nargs="+", default=[1024], help="window lengths, taken in turn")
    parser.add_argument(
        "--long-windows", type=int, nargs="+", default=[1024, 4096, 16_384], help="the same, in the last third"
    )
    parser.add_argument("--eval-every-s", type=float, default=240.0)
    parser.add_argument("--save-every-s", type=float, default=200.0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--no-compile", action="store_true", help="run without torch.compile")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for length in {*args.windows, *args.long_windows}:
        if args.tokens_per_step % length or length > CONFIGS[args.model].max_position_embeddings:
            parser.error(
                f"window length {length} must divide --tokens-per-step {args.tokens_per_step} and be at most "
                f"{CONFIGS[args.model].max_position_embeddings}. Change --windows, --long-windows or --tokens-per-step."
            )
    return args


def teacher_path(run_dir: Path, teacher: str) -> Path:
    """Return where a teacher's weights lie: an exported model's directory, or a checkpoint of the run directory."""
    return Path(teacher) if Path(teacher).is_dir() else run_dir / f"{teacher}.pt"


def build(args: argparse.Namespace) -> tuple[Trainer, Path]:
    """Create the trainer and restore its checkpoint if there is one."""
    path = args.run_dir / f"{args.name or args.model}.pt"
    trainer = Trainer(
        CONFIGS[args.model],
        Batches(
            stream=load_stream(args.run_dir / "train.npy").to(args.device),
            tokens_per_step=args.tokens_per_step,
            seed=args.seed,
        ),
        Schedule(peak=args.lr, warmup_steps=args.warmup_steps),
        windows=tuple(args.windows),
        long_windows=tuple(args.long_windows),
        seed=args.seed,
    )
    if path.exists():
        trainer.progress = Progress(**checkpoint.load(path, trainer.model, trainer.optimizer))
    elif args.init:
        checkpoint.load_weights(args.init, trainer.model)
    if args.teacher:
        trainer.kl_weight = args.kl_weight
        trainer.teacher = TinyLlama(CONFIGS["target"]).to(args.device)
        checkpoint.load_weights(teacher_path(args.run_dir, args.teacher), trainer.teacher)
    return trainer, path


def write_meta(path: Path, args: argparse.Namespace) -> None:
    """Record beside the checkpoint what the card must state and the checkpoint does not hold."""
    objective = "cross-entropy"
    if args.teacher:
        objective = (
            f"{args.kl_weight} KL(target || draft) + {1 - args.kl_weight:.1f} cross-entropy, target = `{args.teacher}`"
        )
    cuda = args.device.startswith("cuda")
    meta = {
        "objective": objective,
        "torch": torch.__version__,
        "hardware": f"one {torch.cuda.get_device_name()}" if cuda else f"{args.threads} CPU threads",
        "length": f"--seconds {args.seconds:g}" if args.seconds else f"--steps {args.steps}",
        "init": str(args.init) if args.init else None,
    }
    kept = (
        "seed",
        "lr",
        "warmup_steps",
        "tokens_per_step",
        "windows",
        "long_windows",
        "teacher",
        "kl_weight",
        "device",
    )
    meta |= {name: getattr(args, name) for name in kept}
    path.with_suffix(".meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")


def main() -> None:
    """Run until the planned end or a signal, logging, evaluating and saving on the way."""
    began = time.monotonic()
    args = parse_args()
    torch.set_num_threads(args.threads)
    trainer, path = build(args)
    write_meta(path, args)
    windows = held_out_windows(load_stream(args.run_dir / "held_out.npy"), 64, 512)
    progress, config = trainer.progress, trainer.model.config
    began -= progress.seconds
    cuda = trainer.device.type == "cuda"
    trainer.autocast = cuda or torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not args.no_compile:
        trainer.compile()
    stop: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, _: stop.append(signum))

    def done() -> float:
        progress.seconds = time.monotonic() - began
        return progress.seconds / args.seconds if args.seconds else progress.step / args.steps

    logged = saved = evaluated = time.monotonic()
    tokens, flops, recent = 0, 0.0, math.nan
    with path.with_suffix(".jsonl").open("a", buffering=1, encoding="utf-8") as log:

        def write(record: dict[str, Any]) -> None:
            line = json.dumps({**asdict(progress), **record})
            log.write(f"{line}\n")
            print(line, flush=True)

        while (share := done()) < 1 and not stop:
            flops += args.tokens_per_step * config.flops_per_token(trainer.window(share))
            tokens += args.tokens_per_step
            loss = trainer.train_step(share)
            if progress.step % LOG_EVERY == 0:
                recent = float(loss) if math.isnan(recent) else 0.7 * recent + 0.3 * float(loss)
                now = time.monotonic()
                record = {"loss": round(recent, 4), "lr": trainer.schedule.lr(progress.step, share)}
                record |= {"tokens_per_s": round(tokens / (now - logged)), "done": round(share, 4)}
                if cuda:
                    record["mfu"] = round(flops / (now - logged) / PEAK_FLOPS, 4)
                write(record)
                tokens, flops, logged = 0, 0.0, now
            now = time.monotonic()
            if now - evaluated > args.eval_every_s:
                write({"held_out_loss": round(trainer.evaluate(windows), 4)})
                evaluated = logged = time.monotonic()
                tokens, flops = 0, 0.0
            if now - saved > args.save_every_s:
                checkpoint.save(path, trainer.model, trainer.optimizer, asdict(progress))
                saved = time.monotonic()
        checkpoint.save(path, trainer.model, trainer.optimizer, asdict(progress))
        write({"held_out_loss": round(trainer.evaluate(windows), 4), "ended": "signal" if stop else "done"})
        if cuda:
            print(f"peak GPU memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")


if __name__ == "__main__":
    main()
