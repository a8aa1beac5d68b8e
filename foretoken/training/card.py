"""Writes the model card of a trained head: what it is, how it was trained, what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.heads.autoregressive import AutoregressiveConfig

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from foretoken.formats.checkpoint import HeadCheckpoint

_NUM_POINTS = 10
_PAPERS = {
    "medusa": "Medusa heads (arXiv 2401.10774)",
    "hydra": "Hydra heads (arXiv 2402.05109)",
    "mlp_speculator": "An MLP speculator (arXiv 2404.19124)",
    "eagle": "An EAGLE head (arXiv 2401.15077)",
    "eagle3": "An EAGLE-3 head (arXiv 2503.01840)",
    "falcon": "A Falcon head (arXiv 2412.12639)",
}
_HASS = "An EAGLE head, trained as HASS has it (arXiv 2408.15766)"


def head_card(
    checkpoint: HeadCheckpoint, facts: Mapping[str, Any], curve: Sequence[Mapping[str, Any]], command: str
) -> str:
    """Writes a card in Markdown.

    Args:
        checkpoint: The head, with the notes of its run.
        facts: What `saved_head` found.
        curve: Lines of the run's `metrics.jsonl`.
        command: What trained it, with its prompt: `$` of a shell or `>>>` of Python.
    """
    target = Path(checkpoint.target.name or "its target").name if checkpoint.target else "its target"
    settings = checkpoint.notes["settings"]
    train, schedule = settings["train"], settings["train"]["schedule"]
    sizes = ", ".join(f"{key} {value}" for key, value in _plain(settings["head"]).items())
    objective = ", ".join(f"{key} {value}" for key, value in _plain(settings["objective"]).items() if value)
    rows = {
        "parameters": f"{facts['parameters'] / 1e6:.2f} M ({facts['bytes'] / 1e6:.1f} MB)",
        "sizes": sizes,
        **_autoregressive(checkpoint, settings),
        "training": f"{facts['steps']} steps of {train['batch_size']} x {train['length']} tokens, "
        f"{facts['tokens'] / 1e6:.2f} M tokens, {facts['seconds'] / 60:.0f} minutes in steps",
        "objective": objective,
        "optimiser": f"AdamW, peak {schedule['peak']:g} after {schedule['warmup_steps']} steps, cosine to "
        f"{schedule['floor']:g} of it, weight decay {train['weight_decay']:g}, clip {train['clip_norm']:g}, "
        f"seed {train['seed']}, {train['precision']}",
        **_measured(checkpoint, facts),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    points = "\n".join(
        f"| {point['step']} | {point['loss']:.3f} | {' '.join(f'{share:.3f}' for share in point['head_matches'])} |"
        for point in _thinned(curve)
    )
    method, unit = checkpoint.config.method, _unit(checkpoint)
    paper = _HASS if "top_weight" in settings["objective"] else _PAPERS.get(method, method)
    return f"""---
license: apache-2.0
tags: [speculative-decoding, {method}]
---

# {method} for {target}

{paper}, trained by `foretoken train` on the frozen target `{target}`.

| | |
|---|---|
{table}

Acceptance and tau (tokens a target pass, the target's own included) are of texts that the target writes to held-out
prompts, 128 tokens each; tau with the static tree `mc_sim_7b_63`{_dynamic(facts)}.

| step | loss | first candidate of each {unit} is the target's, on training text (means of the steps around) |
|---|---|---|
{points}

```console
{command}
```
"""


def _unit(checkpoint: HeadCheckpoint) -> str:
    """What drafts a token: a head, or a step of the only one."""
    return "step" if isinstance(checkpoint.config, AutoregressiveConfig) else "head"


def _dynamic(facts: Mapping[str, Any]) -> str:
    """What else tau is quoted with."""
    nodes = facts.get("dynamic_tree_nodes")
    static = f", {facts['tree_nodes']} nodes at this depth" if "tree_nodes" in facts else ""
    return static if nodes is None else f"{static}, and with dynamic trees (EAGLE-2) of at most {nodes} nodes"


def _autoregressive(checkpoint: HeadCheckpoint, settings: Mapping[str, Any]) -> dict[str, str]:
    """What a head of the EAGLE family or Falcon reads and drafts, and how far it was unrolled; nothing of others."""
    config = checkpoint.config
    if not isinstance(config, AutoregressiveConfig):
        return {}
    drafted = getattr(config, "draft_vocab_size", None)
    trained = {}
    if "passes" in settings["objective"]:  # Falcon trains one block
        steps = min(settings["objective"]["passes"], config.steps)
        trained = {"steps trained": f"{steps}; acceptance is measured for {config.steps}"}
    return {
        "taps": ", ".join(map(str, config.taps)),
        "drafts": f"{config.vocab_size if drafted is None else drafted} of {config.vocab_size} tokens",
        **trained,
    }


def read_curve(run: Path) -> list[dict[str, Any]]:
    """Lines of a run's metrics; none where there are none."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values worth a word: nested ones in brackets, without the target's own sizes."""
    shown = {}
    for key, value in values.items():
        if key in ("hidden_size", "vocab_size") or value is None:
            continue
        nested = isinstance(value, dict)
        shown[key] = f"({', '.join(f'{k} {v}' for k, v in value.items())})" if nested else value
    return shown


def _measured(checkpoint: HeadCheckpoint, facts: Mapping[str, Any]) -> dict[str, str]:
    """What was measured on held-out prompts, if anything was."""
    rows = {}
    if checkpoint.acceptance is not None:
        first = " ".join(f"{row[0]:.3f}" for row in checkpoint.acceptance)
        best = " ".join(f"{sum(row):.3f}" for row in checkpoint.acceptance)
        rows[f"first candidate right, by {_unit(checkpoint)}"] = first
        rows[f"one of ten candidates right, by {_unit(checkpoint)}"] = best
    for temperature in ("0", "0.8"):
        for key, name in (("", ""), ("dynamic_", ", dynamic trees")):
            tau = facts.get(f"{key}tau_at_temperature_{temperature}")
            if tau is not None:
                depths = " ".join(f"{x:.2f}" for x in facts[f"{key}acceptance_by_depth_at_temperature_{temperature}"])
                rows[f"tau at temperature {temperature}{name}"] = f"{tau:.2f} (accepted by depth {depths})"
    return rows


def _thinned(curve: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A few points of a curve, each the mean of the steps since the one before."""
    size = max(1, -(-len(curve) // _NUM_POINTS))
    points = []
    for begin in range(0, len(curve), size):
        part = curve[begin : begin + size]
        matches = zip(*(line["head_matches"] for line in part), strict=True)
        points.append(
            {
                "step": part[-1]["step"],
                "loss": sum(line["loss"] for line in part) / len(part),
                "head_matches": [sum(column) / len(part) for column in matches],
            }
        )
    return points
