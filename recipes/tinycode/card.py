"""Write the model card of an export from what the run recorded: corpus statistics, logs, the checkpoint's progress."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.tinycode import checkpoint as checkpoints
from recipes.tinycode.data import held_out_windows, load_stream
from recipes.tinycode.evaluate import held_out_loss, loss_by_context
from recipes.tinycode.model import TinyLlama, config_of
from recipes.tinycode.train import teacher_path

SHORT_WINDOWS = 64  # held-out windows of 512 tokens in the card


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
    for part in windows[:, :-1].to(target.device).split(8):
        target_probs, draft_probs = target(part).softmax(-1), draft(part).softmax(-1)
        overlap += float(torch.minimum(target_probs, draft_probs).sum())
        same += int((target_probs.argmax(-1) == draft_probs.argmax(-1)).sum())
        count += part.numel()
    return overlap / count, same / count


def load_rounded(path: Path, model: str, device: str) -> TinyLlama:
    """Load a checkpoint or an export with its weights rounded to bfloat16, as shipped, in float32 arithmetic."""
    net = TinyLlama(config_of(path, model))
    checkpoints.load_weights(path, net)
    net.load_state_dict({k: v.bfloat16().float() for k, v in net.state_dict().items()})
    return net.to(device)


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
            f'<text x="{pad}" y="{height - 16}" {text}>0 to {x_max / 1e6:.1f} M tokens; measured while training</text>',
            "</svg>",
            "",
        ]
    )


def bytes_per_token(run_dir: Path) -> float:
    """UTF-8 bytes of the held-out files divided by their tokens."""
    stats = json.loads((run_dir / "corpus_stats.json").read_text(encoding="utf-8"))
    return stats["held_out_bytes"] / (len(load_stream(run_dir / "held_out.npy")) - stats["held_out_files"])


def write_card(
    run_dir: Path,
    checkpoint: str,
    model: str,
    out: Path,
    progress: dict[str, Any],
    *,
    old: TinyLlama | None,
    long_windows: int,
    device: str,
) -> None:
    """Write `README.md` and `loss.svg` into `out`, and print the figures that go into the card.

    `old` is the export that this one replaces: its loss on the same windows goes into the card.
    `long_windows` held-out windows of the whole context show what far context is worth.
    """
    net = load_rounded(run_dir / f"{checkpoint}.pt", model, device)
    config = net.config
    stream = load_stream(run_dir / "held_out.npy")
    windows = held_out_windows(stream, SHORT_WINDOWS, 512)
    loss = held_out_loss(net, windows)
    context = loss_by_context(net, stream, config.max_position_embeddings, long_windows)
    per_byte = loss / math.log(2) / bytes_per_token(run_dir)
    stats = json.loads((run_dir / "corpus_stats.json").read_text(encoding="utf-8"))
    points = curve_points(run_dir, [checkpoint])
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
        "minutes": f"{progress['seconds'] / 60:.1f}",
        "loss": f"{loss:.3f}",
        "perplexity": f"{math.exp(loss):.2f}",
        "bits": f"{per_byte:.3f}",
        "by_window": "; ".join(f"{n} tokens: {value:.3f}" for n, value in context["by_window"].items()),
        "by_position": "; ".join(f"to {end}: {value:.3f}" for end, value in context["by_position"].items()),
        "bytes_per_token": f"{bytes_per_token(run_dir):.2f}",
        "train_files": stats["train_files"],
        "train_mb": f"{stats['train_bytes'] / 1e6:.0f}",
        "train_tokens_m": f"{len(load_stream(run_dir / 'train.npy')) / 1e6:.1f}",
        "held_files": stats["held_out_files"],
        "groups": ", ".join(f"{g} {n / 1e6:.1f}" for g, n in list(stats["characters_by_group"].items())[:12]),
        "n_groups": len(stats["characters_by_group"]),
        "versions": ", ".join(stats["stdlib_versions"]),
        "skipped_licence": stats["counts"].get("packages_skipped_licence", 0),
        "curve": "\n".join(f"| {phase} | {tokens / 1e6:.2f} | {value:.3f} |" for phase, tokens, value in shown),
        **meta,
        "card_windows": long_windows,
        "windows": " and ".join(map(str, meta["windows"])),
        "long_windows": ", ".join(map(str, meta["long_windows"])),
        "init_option": f"--init {meta['init']} " if meta["init"] else "",
        "begun": f"the weights of {meta['init']}" if meta["init"] else "random weights",
        "before": "none",
    }
    target = load_rounded(teacher_path(run_dir, meta["teacher"]), "target", device) if model == "draft" else None
    if old:
        old_loss = held_out_loss(old, windows)
        values["before"] = f"{old_loss:.3f} nats, perplexity {math.exp(old_loss):.2f}"
        if target:
            values["before"] += f"; {agrees(target, old, windows)}"
    if target:
        values["agreement"] = agrees(target, net, windows)
    template = (Path(__file__).parent / f"card_{model}.md").read_text(encoding="utf-8")
    (out / "README.md").write_text(template.format(**values), encoding="utf-8")
    names = (
        "tokens_m", "steps", "minutes", "loss", "perplexity", "bits", "by_window", "by_position", "agreement", "before"
    )  # fmt: skip
    print(json.dumps({name: values[name] for name in names if name in values}))


def agrees(target: TinyLlama, draft: TinyLlama, windows: Tensor) -> str:
    """Say how far a draft model agrees with the target."""
    alpha, same = agreement(target, draft, windows)
    return f"sum min(p, q) {alpha:.3f} a position at temperature 1; same argmax {same:.3f}"
