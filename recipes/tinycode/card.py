"""Write the model card of an export from what the run recorded: corpus statistics, logs, the checkpoint's progress."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipes.tinycode import checkpoint as checkpoints
from recipes.tinycode.data import LONG_EVERY, held_out_windows
from recipes.tinycode.model import CONFIGS, TinyLlama
from recipes.tinycode.train import cross_entropy, teacher_path

CARD_TOKENS = 32_768


@torch.no_grad()
def held_out_loss(model: TinyLlama, windows: Tensor) -> float:
    """Mean loss in nats per token of (n, T + 1) windows, float32."""
    total = sum(float(cross_entropy(model(part[:, :-1]), part[:, 1:])) * len(part) for part in windows.split(8))
    return total / len(windows)


@torch.no_grad()
def agreement(target: TinyLlama, draft: TinyLlama, windows: Tensor) -> tuple[float, float]:
    """Compare next-token distributions on held-out text.

    Args:
        target: the target, float32.
        draft: the draft model, float32.
        windows: (n, T + 1) int64 token ids.

    Returns:
        Mean of sum(min(p, q)) over positions (the acceptance rate of the first drafted token when sampling at
        temperature 1), and the share of positions where both have the same most likely token.
    """
    overlap, same, count = 0.0, 0, 0
    for part in windows[:, :-1].split(8):
        target_probs, draft_probs = target(part).softmax(-1), draft(part).softmax(-1)
        overlap += float(torch.minimum(target_probs, draft_probs).sum())
        same += int((target_probs.argmax(-1) == draft_probs.argmax(-1)).sum())
        count += part.numel()
    return overlap / count, same / count


def load_rounded(path: Path, model: str) -> TinyLlama:
    """Load a checkpoint or an export with its weights rounded to bfloat16, as shipped, in float32 arithmetic."""
    net = TinyLlama(CONFIGS[model])
    checkpoints.load_weights(path, net)
    net.load_state_dict({k: v.bfloat16().float() for k, v in net.state_dict().items()})
    return net


def read_log(run_dir: Path, name: str) -> list[dict[str, Any]]:
    """Read one JSONL run log; an absent log is empty."""
    path = run_dir / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def curve_points(run_dir: Path, names: list[str]) -> list[tuple[str, int, float]]:
    """Return (phase, tokens, held-out loss) of every evaluation in these logs, at most once per token count."""
    points = {(n, r["tokens"]): r["held_out_loss"] for n in names for r in read_log(run_dir, n) if "held_out_loss" in r}
    return [(name, tokens, loss) for (name, tokens), loss in points.items()]


def curve_svg(points: list[tuple[str, int, float]]) -> str:
    """Draw held-out loss against tokens as a small SVG."""
    width, height, pad = 560, 260, 42
    xs, ys = [p[1] for p in points], [p[2] for p in points]
    x_max, y_min, y_max = max(xs), min(ys) - 0.05, max(ys) + 0.05

    def place(tokens: int, loss: float) -> str:
        x = pad + (width - 2 * pad) * tokens / x_max
        y = pad + (height - 2 * pad) * (y_max - loss) / (y_max - y_min)
        return f"{x:.1f},{y:.1f}"

    lines = []
    for phase, colour in zip(dict.fromkeys(p[0] for p in points), ("#1f5fa8", "#c2481f"), strict=False):
        path = " ".join(place(t, loss) for name, t, loss in points if name == phase)
        lines.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="{path}"/>')
    text = 'font-family="sans-serif" font-size="11" fill="#333"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">',
            f'<rect width="{width}" height="{height}" fill="#fff"/>',
            f'<path d="M{pad},{pad} V{height - pad} H{width - pad}" fill="none" stroke="#999"/>',
            *lines,
            f'<text x="{pad}" y="{pad - 12}" {text}>held-out loss (nats/token): {y_max:.2f} at the top, '
            f"{y_min:.2f} at the bottom</text>",
            f'<text x="{pad}" y="{height - 16}" {text}>0 to {x_max / 1e6:.1f} M tokens; orange: decay branch</text>',
            "</svg>",
            "",
        ]
    )


def bytes_per_token(run_dir: Path) -> float:
    """UTF-8 bytes of the held-out files divided by their tokens."""
    stats = json.loads((run_dir / "corpus_stats.json").read_text(encoding="utf-8"))
    return stats["held_out_bytes"] / (len(np.load(run_dir / "held_out.npy")) - stats["held_out_files"])


def write_card(run_dir: Path, checkpoint: str, model: str, out: Path, progress: dict[str, Any]) -> None:
    """Write `README.md` and `loss.svg` into `out`, and print the figures that go into the card."""
    config = CONFIGS[model]
    net = load_rounded(run_dir / f"{checkpoint}.pt", model)
    stream = np.load(run_dir / "held_out.npy")
    losses = {n: held_out_loss(net, held_out_windows(stream, CARD_TOKENS // n, n)) for n in (256, 512, 1024)}
    loss = losses[512]
    per_byte = loss / math.log(2) / bytes_per_token(run_dir)
    stats = json.loads((run_dir / "corpus_stats.json").read_text(encoding="utf-8"))
    names = [model, checkpoint] if checkpoint != model else [model]
    points = curve_points(run_dir, names)
    if points:
        (out / "loss.svg").write_text(curve_svg(points), encoding="utf-8")
    shown = points[:: max(1, len(points) // 10)]
    shown += points[-1:] if points and shown[-1] != points[-1] else []
    meta = json.loads((run_dir / f"{checkpoint}.meta.json").read_text(encoding="utf-8"))
    values = {
        **{k: getattr(config, k) for k in config.__slots__},
        "head_dim": config.head_dim,
        "title": out.name,
        "parameters_m": f"{sum(p.numel() for p in net.parameters()) / 1e6:.2f}",
        "tokens_m": f"{progress['tokens'] / 1e6:.1f}",
        "steps": progress["step"],
        "minutes": f"{progress['seconds'] / 60:.0f}",
        "loss": f"{loss:.3f}",
        "perplexity": f"{math.exp(loss):.2f}",
        "bits": f"{per_byte:.3f}",
        "loss_256": f"{losses[256]:.3f}",
        "loss_1024": f"{losses[1024]:.3f}",
        "bytes_per_token": f"{bytes_per_token(run_dir):.2f}",
        "train_files": stats["train_files"],
        "train_mb": f"{stats['train_bytes'] / 1e6:.0f}",
        "train_tokens_m": f"{len(np.load(run_dir / 'train.npy', mmap_mode='r')) / 1e6:.1f}",
        "held_files": stats["held_out_files"],
        "groups": ", ".join(f"{g} {n / 1e6:.1f}" for g, n in list(stats["characters_by_group"].items())[:12]),
        "n_groups": len(stats["characters_by_group"]),
        "versions": ", ".join(stats["stdlib_versions"]),
        "skipped_licence": stats["counts"].get("packages_skipped_licence", 0),
        "curve": "\n".join(f"| {phase} | {tokens / 1e6:.2f} | {value:.3f} |" for phase, tokens, value in shown),
        **meta,
        "long_every": LONG_EVERY,
        "stable_steps": progress["decay_start"] or progress["step"],
    }
    if model == "draft":
        values |= draft_values(run_dir, meta, net, stream)
    template = (Path(__file__).parent / f"card_{model}.md").read_text(encoding="utf-8")
    (out / "README.md").write_text(template.format(**values), encoding="utf-8")
    names = ("tokens_m", "steps", "minutes", "loss", "perplexity", "bits", "agreement")
    print(json.dumps({name: values[name] for name in names if name in values}))


def draft_values(run_dir: Path, meta: dict[str, Any], draft: TinyLlama, stream: np.ndarray) -> dict[str, str]:
    """What only the card of a draft model says: what it was distilled from, went on from, and agrees with."""
    windows = held_out_windows(stream, 32, 512)
    target = load_rounded(teacher_path(run_dir, meta["teacher"]), "target")

    def agrees(model: TinyLlama) -> str:
        alpha, same = agreement(target, model, windows)
        return f"sum min(p, q) {alpha:.3f} a position at temperature 1; same argmax {same:.3f}"

    distilled = f"--teacher {meta['teacher']} --kl-weight {meta['kl_weight']} --lr {meta['lr']} --seed {meta['seed']} "
    if meta["init"] is None:
        stable, before = "", "none"
        phases = f"Stable phase on cross-entropy; objective of the\ndecay phase: {meta['objective']}."
    else:
        distilled = f"--init {meta['init']} {distilled}"
        old = load_rounded(Path(meta["init"]), "draft")
        loss = held_out_loss(old, held_out_windows(stream, CARD_TOKENS // 512, 512))
        stable, before = distilled, f"{loss:.3f} nats, perplexity {math.exp(loss):.2f}; {agrees(old)}"
        phases = f"It went on from the version before; objective of\nboth phases: {meta['objective']}."
    options = {"stable_options": stable, "decay_options": distilled, "phases": phases, "before": before}
    return {"agreement": agrees(draft), **options}
