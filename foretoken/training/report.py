"""Measures a trained head or draft model on held-out prompts, and saves it with the results.

`foretoken.training.evaluation` measures acceptance by depth and rank. The acceptance length comes from drafting in the
engine.
"""

from __future__ import annotations

import io
import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.bench.plots import LIGHT, distinct_look, load_matplotlib, page_style
from foretoken.bench.workload import TokenProgress, Workload, make_workload, no_progress, read_prompts
from foretoken.core.errors import ConfigError
from foretoken.core.records import GenerationMetrics
from foretoken.entrypoints.llm import LLM
from foretoken.files.atomic_files import new_directory, told_as
from foretoken.formats import native
from foretoken.heads.base import AutoregressiveConfig
from foretoken.models.loaded import DTYPES, LoadedModel
from foretoken.models.loading import load_config, load_model
from foretoken.runner.costs import pass_costs
from foretoken.training.evaluation import CHAIN, TEMPERATURES, measured_acceptance
from foretoken.training.run_state import read_curve
from foretoken.training.trainer import training_processes

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint

_SIZE = (8.4, 3.3)  # inches
_NUM_POINTS = 10  # of a curve in the report; a choice
_MAX_TOKENS = 128  # of a prompt; a choice: minutes for a report
_AT_ONCE = 4  # sequences decoded together; a choice
ADVICE = "Expected a new directory with enough room that may be written to. Make room, and run the same command again."
_QUOTED_TREE = "mc_sim_7b_63"  # the tree of published figures, so that figures compare across machines
_QUOTED_NODES = 64  # nodes of `_QUOTED_TREE`, root included
_PAPERS = {
    "medusa": "Medusa heads (arXiv 2401.10774)",
    "hydra": "Hydra heads (arXiv 2402.05109)",
    "mlp_speculator": "An MLP speculator (arXiv 2404.19124)",
    "eagle": "An EAGLE head (arXiv 2401.15077)",
    "eagle3": "An EAGLE-3 head (arXiv 2503.01840)",
    "mtp": "A head for multi-token prediction (arXiv 2412.19437)",
    "spire": "A SPiRe draft model (arXiv 2504.06419)",
    "falcon": "A Falcon head (arXiv 2412.12639)",
}
_HASS = "An EAGLE head, trained as HASS has it (arXiv 2408.15766)"
_CARD = """---
license: apache-2.0
{tags}
---

# {title}

{origin}

| | |
|---|---|
{rows}

Acceptance and tau (tokens a target pass, the target's own included) are of texts that the target writes to held-out
prompts, {max_tokens} tokens each; tau with {drafts}.

| step | loss | {first} the target's, on training text (means of the steps around) |
|---|---|---|
{points}

```console
{command}
```
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingResult:
    """The result of `foretoken.train`. `losses`, `acceptance` and `facts` are empty in every process but the first.

    `acceptance` has, for each evaluated step, the acceptance rate at depths 1, 2, …: the share of drafts on held-out
    text with d right first tokens, by the target's choice at temperature 0.
    """

    directory: Path  # of the head or draft model, as `speculative_config` of `LLM` takes it
    run_dir: Path  # of the checkpoints and of `metrics.jsonl`
    target: LoadedModel  # that the head belongs to; with `joint` the new one
    losses: list[float]  # training loss of each step, from step 1
    acceptance: dict[int, list[float]]
    facts: dict[str, Any]  # measured on held-out prompts, and the head's size, as `foretoken train --json` prints them

    @property
    def tau(self) -> dict[int, float]:
        """Acceptance length at each evaluated step: tokens a target pass of a chain, the target's own included."""
        return {step: 1.0 + sum(by_depth) for step, by_depth in self.acceptance.items()}

    def plot(self, file: str | os.PathLike[str] | IO[str] | None = None) -> Any:
        """Draws loss and acceptance rate at each depth over the steps; returns the `matplotlib.figure.Figure`.

        The picture is written to `file`, in the format of the suffix; to an open file as SVG. Raises `ConfigError` when
        matplotlib is not installed (`pip install '.[report]'`).
        """
        mpl = load_matplotlib()
        from matplotlib.figure import Figure

        with mpl.rc_context({**page_style(LIGHT, "training"), "svg.fonttype": "none"}):  # text as text: a small file
            figure: Any = Figure(figsize=_SIZE, layout="constrained")
            loss, acceptance = figure.subplots(1, 2)
            loss.plot(range(1, len(self.losses) + 1), self.losses, color=distinct_look(1).light, lw=1.4)
            loss.set_title("training loss", loc="left")
            self._draw_acceptance(acceptance)
            for axes in (loss, acceptance):
                axes.set_xlabel("optimizer step")
                axes.spines[["top", "right"]].set_visible(False)
                axes.grid(visible=True, color=LIGHT.grid, lw=0.6)
                axes.set_xlim(0, 1.02 * max(len(self.losses), 1))
                axes.set_ylim(bottom=0)
            if file is not None:
                is_svg = hasattr(file, "write") or str(file).endswith(".svg")
                dateless = {"metadata": {"Date": None}, "format": "svg"} if is_svg else {}
                figure.savefig(file, **dateless)
        return figure

    def _repr_svg_(self) -> str:
        picture = io.StringIO()
        self.plot(picture)
        return picture.getvalue()

    def _draw_acceptance(self, axes: Any) -> None:
        by_step = list(self.acceptance.values())
        for depth, rates in enumerate(zip(*by_step, strict=True)):
            look = distinct_look(depth)
            percents = [100 * rate for rate in rates]
            axes.plot(list(self.acceptance), percents, color=look.light, marker=look.marker, ms=4, label=depth + 1)
        taus = list(self.tau.values())
        ending = f", tau {taus[0]:.2f} to {taus[-1]:.2f}" if taus else ""
        axes.set_title(f"acceptance on held-out text{ending}", loc="left")
        axes.set_ylabel("drafts accepted, %")
        if taus:
            axes.legend(title="to depth", frameon=False)


def head_card(checkpoint: HeadCheckpoint, facts: Mapping[str, Any]) -> str:
    """Returns a model card in Markdown, from a head with the notes of `trained_notes` and `saved_head`'s facts."""
    target = Path(checkpoint.target.name or "its target").name if checkpoint.target else "its target"
    settings, method = checkpoint.notes["settings"], checkpoint.config.method
    unit = "step" if isinstance(checkpoint.config, AutoregressiveConfig) else "head"
    paper = _HASS if "top_weight" in settings["objective"] else _PAPERS.get(method, method)
    drafts = f"the static tree `{_QUOTED_TREE}`"
    if "tree_nodes" in facts:
        drafts += f", {facts['tree_nodes']} nodes at this depth"
    if "dynamic_tree_nodes" in facts:
        drafts += f", and with dynamic trees (EAGLE-2) of at most {facts['dynamic_tree_nodes']} nodes"
    rows = {
        "sizes": _listed(settings["head"]),
        **_autoregressive(checkpoint, settings),
        **_training(settings, facts),
        **_measured(checkpoint.acceptance, unit, facts),
    }
    return _card(
        facts, checkpoint.notes, rows, tags=f"tags: [speculative-decoding, {method}]", title=f"{method} for {target}",
        origin=f"{paper}, trained by `foretoken train` on the frozen target `{target}`.", drafts=drafts,
        first=f"first candidate of each {unit} is",
    )  # fmt: skip


def draft_model_card(target: str, config: Any, facts: Mapping[str, Any]) -> str:
    """Returns a model card in Markdown; facts: the contents of `training.json`."""
    settings, name = facts["settings"], Path(target).name
    origin = settings["origin"]
    begun = "a model of the same tokenizer" if "init" in origin else "random weights"
    if "target_layers" in origin:
        begun = f"the target's layers {', '.join(map(str, origin['target_layers']))}"
    written = {}
    if "written_tokens" in facts:
        speed = f"{facts['written_tokens'] / 1e6:.2f} M tokens, {facts['written_tokens_per_s']} tokens/s"
        written = {"text of draft model and target": speed}
    rows = {
        "sizes": f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, {config.num_attention_heads} heads",
        "begun from": begun,
        **_training(settings, facts),
        "speed": f"{facts['trained_tokens_per_s']} tokens/s trained",
        **written,
        **_measured(facts["acceptance"], "token", facts),
    }
    return _card(
        facts, facts, rows,
        tags="library_name: transformers\npipeline_tag: text-generation\ntags: [speculative-decoding, draft-model]",
        title=f"Draft model for {name}",
        origin=f"Distilled from `{name}` by `foretoken train draft_model` (DistillSpec, arXiv 2310.08461).",
        drafts=f"chains of {CHAIN} tokens", first="most probable token is",
    )  # fmt: skip


def _card(facts: Mapping[str, Any], notes: Mapping[str, Any], rows: Mapping[str, str], **texts: str) -> str:
    parameters = f"{facts['parameters'] / 1e6:.2f} M ({facts['bytes'] / 1e6:.1f} MB)"
    points = (
        f"| {point['step']} | {point['loss']:.3f} | {' '.join(f'{share:.3f}' for share in point['head_matches'])} |"
        for point in notes.get("curve", ())
    )
    return _CARD.format(
        rows="\n".join(f"| {key} | {value} |" for key, value in {"parameters": parameters, **rows}.items()),
        points="\n".join(points), max_tokens=_MAX_TOKENS, command=notes.get("command", ""), **texts,
    )  # fmt: skip


def _training(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> dict[str, str]:
    train, schedule = settings["train"], settings["train"]["schedule"]
    objective = {key: value for key, value in settings["objective"].items() if value}
    if "jsd_weight" not in objective:
        objective.pop("jsd_beta", None)
    return {
        "training": f"{facts['steps']} steps of {train['batch_size']} x {train['length']} tokens, "
        f"{facts['tokens'] / 1e6:.2f} M tokens, {facts['seconds'] / 60:.0f} minutes in steps",
        "objective": _listed(objective),
        "optimiser": f"AdamW, peak {schedule['peak']:g} after {schedule['warmup_steps']} steps, cosine to "
        f"{schedule['floor']:g} of it, weight decay {train['weight_decay']:g}, clip {train['clip_norm']:g}, "
        f"seed {train['seed']}, {train['precision']}",
    }


def _listed(values: Mapping[str, Any]) -> str:
    """Lists names and values, without the target's sizes; a nested table is in parentheses."""
    return _nested(
        {
            key: f"({_nested(value)})" if isinstance(value, dict) else value
            for key, value in values.items()
            if key not in ("hidden_size", "vocab_size") and value is not None
        }
    )


def _nested(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _autoregressive(checkpoint: HeadCheckpoint, settings: Mapping[str, Any]) -> dict[str, str]:
    config = checkpoint.config
    if not isinstance(config, AutoregressiveConfig):
        return {}
    drafted = getattr(config, "draft_vocab_size", None) or len(checkpoint.draft_vocab or ()) or config.vocab_size
    rows = {"taps": ", ".join(map(str, config.taps)), "drafts": f"{drafted} of {config.vocab_size} tokens"}
    if "passes" in settings["objective"]:  # Falcon trains one block
        steps = min(settings["objective"]["passes"], config.steps)
        rows["steps trained"] = f"{steps}; acceptance is measured for {config.steps}"
    return rows


def _measured(acceptance: Sequence[Sequence[float]] | None, unit: str, facts: Mapping[str, Any]) -> dict[str, str]:
    rows = {}
    if acceptance is not None:
        rows[f"first candidate right, by {unit}"] = " ".join(f"{row[0]:.3f}" for row in acceptance)
        rows[f"one of ten candidates right, by {unit}"] = " ".join(f"{sum(row):.3f}" for row in acceptance)
    for temperature in ("0", "0.8"):
        for key, name in (("", ""), ("dynamic_", ", dynamic trees")):
            tau = facts.get(f"{key}tau_at_temperature_{temperature}")
            if tau is not None:
                depths = " ".join(f"{x:.2f}" for x in facts[f"{key}acceptance_by_depth_at_temperature_{temperature}"])
                rows[f"tau at temperature {temperature}{name}"] = f"{tau:.2f} (accepted by depth {depths})"
    return rows


def trained_notes(notes: Mapping[str, Any], run: Path, command: str) -> dict[str, Any]:
    """Returns the notes of a run with what a card needs: some points of its curve, and its command.

    Each point is the mean of the steps since the previous one. `command` has its prompt: `$` of a shell or `>>>` of
    Python.
    """
    curve, points = read_curve(run), []
    size = max(1, -(-len(curve) // _NUM_POINTS))
    for begin in range(0, len(curve), size):
        part = curve[begin : begin + size]
        matches = zip(*(line["head_matches"] for line in part), strict=True)
        points.append(
            {
                "step": part[-1]["step"],
                "loss": round(sum(line["loss"] for line in part) / len(part), 5),
                "head_matches": [round(sum(column) / len(part), 5) for column in matches],
            }
        )
    return {**notes, "curve": points, "command": command}


def saved_head(
    checkpoint: HeadCheckpoint,
    out: Path,
    *,
    target: LoadedModel,
    tokenizer: Any,
    dtype: str,
    workload: Workload | None,
    on_progress: Callable[[int, int], None] = no_progress,
) -> dict[str, Any] | None:
    """Measures a trained head on held-out prompts and writes it; returns the JSON-ready facts.

    `checkpoint` has the notes of `trained_notes`, perhaps with earlier measurements, which are replaced. `out` appears
    whole or not at all. `dtype` "auto" is that of the target's checkpoint. Without a `workload` nothing is measured.
    Returns None in every process but the first.

    `on_progress`: called with held-out tokens decoded and such tokens in all. Raises `ConfigError` when a file cannot
    be written, or `out` is taken.
    """
    if training_processes().process_index:
        return None
    stored = _stored_dtype(target) if dtype == "auto" else DTYPES[dtype]
    weights = {
        key: value.to(stored) if value.is_floating_point() else value for key, value in checkpoint.weights.items()
    }
    head = replace(checkpoint, weights=weights)
    facts = _facts(head.config.method, weights.values(), checkpoint.notes)
    with told_as(ConfigError, f"'{out}'", ADVICE), new_directory(out) as new:
        if workload is not None:
            progress = TokenProgress(workload, 3 * len(workload.temperatures), report=on_progress)
            measured = measured_acceptance(
                head.module(dtype=torch.float32), target, tokenizer, workload, progress=progress
            )
            head = replace(head, acceptance=measured)
            native.write_files(head, new)
            setup: dict[str, Any] = {"method": head.config.method, "model": str(new)}
            static, nodes = _drafting({**setup, "tree": _QUOTED_TREE}, target, tokenizer, workload, progress)
            setup |= {"tree": "dynamic", "max_nodes": nodes, "num_speculative_tokens": head.config.steps}
            dynamic, dynamic_nodes = _drafting(setup, target, tokenizer, workload, progress)
            facts |= {
                **static, **{f"dynamic_{key}": value for key, value in dynamic.items()}, "tree_nodes": nodes,
                "dynamic_tree_nodes": dynamic_nodes, "acceptance_of_first_candidate": [row[0] for row in measured],
                "measured_on": workload.source,
            }  # fmt: skip
        native.write_files(replace(head, notes={**checkpoint.notes, **facts}), new)
        (new / "README.md").write_text(head_card(head, facts), encoding="utf-8")
    return {**facts, "directory": str(out)}


def saved_draft_model(
    student: LoadedModel,
    notes: Mapping[str, Any],
    out: Path,
    *,
    target: LoadedModel,
    tokenizer: Any,
    dtype: str,
    workload: Workload | None,
    on_progress: Callable[[int, int], None] = no_progress,
) -> dict[str, Any] | None:
    """Writes a trained draft model as a model directory and measures it; arguments and result as of `saved_head`.

    `notes` are those of `trained_notes`; they go to `training.json` with the results. The weights of `student` get the
    dtype of the files.
    """
    if training_processes().process_index:
        return None
    module: Any = student.module
    module.to(_stored_dtype(target) if dtype == "auto" else DTYPES[dtype])
    facts = _facts("draft_model", list(module.parameters()), notes)
    with told_as(ConfigError, f"'{out}'", ADVICE), new_directory(out) as new:
        module.save_pretrained(new)
        tokenizer.save_pretrained(new)
        acceptance = None
        if workload is not None:
            progress = TokenProgress(workload, 2 * len(workload.temperatures), report=on_progress)
            drafter = load_model(str(new), dtype=str(target.dtype).removeprefix("torch."), device=str(target.device))
            acceptance = measured_acceptance(drafter, target, tokenizer, workload, progress=progress)
            chain = {"method": "draft_model", "model": str(new), "tree": "chain", "num_speculative_tokens": CHAIN}
            drafted, facts["tree_nodes"] = _drafting(chain, target, tokenizer, workload, progress)
            facts |= {**drafted, "acceptance_of_first_candidate": [row[0] for row in acceptance]}
        stored = {**notes, **facts, "acceptance": acceptance}
        (new / "training.json").write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        (new / "README.md").write_text(draft_model_card(target.name, student.config, stored), encoding="utf-8")
    return {**facts, "directory": str(out)}


def _facts(method: str, weights: Collection[Tensor], notes: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "method": method,
        "parameters": sum(value.numel() for value in weights),
        "bytes": sum(value.numel() * value.itemsize for value in weights),
        **{key: value for key, value in notes.items() if key not in ("settings", "curve", "command")},
    }


def held_out_workload(prompts: str, num_prompts: int, target: LoadedModel, tokenizer: Any) -> Workload | None:
    """Returns the workload of a head's measurement; None for no prompts. Raises as `read_prompts`."""
    if not num_prompts:
        return None
    rows = read_prompts(prompts, limit=num_prompts)
    return make_workload(
        rows, target, tokenizer, temperatures=TEMPERATURES, max_tokens=_MAX_TOKENS, source=Path(prompts).name
    )


def held_out_seconds(target: LoadedModel, tokenizer: Any, workload: Workload | None) -> Callable[[float], float]:
    """Returns a function from the expected acceptance length to the seconds of `saved_head`'s measurement.

    Times passes of the target. Without a workload, and in every process but the first, the seconds are 0.
    """
    if workload is None or training_processes().process_index:
        return lambda _: 0.0
    served = target.stored or target
    costs = pass_costs(served, LLM(served, tokenizer=tokenizer, max_num_seqs=_AT_ONCE).target.name)
    batch = min(_AT_ONCE, len(workload.prompts))
    passes = len(workload.temperatures) * workload.max_tokens * math.ceil(len(workload.prompts) / _AT_ONCE)
    plain, drafted = costs.verification(batch, batch), costs.verification(batch, batch * _QUOTED_NODES)
    return lambda tau: passes * (plain + 2 * drafted / tau)  # plain texts, then a static and a dynamic tree


def save_target(target: LoadedModel, out: Path, *, tokenizer: Any, like: str) -> LoadedModel:
    """Writes a target that was trained with its heads as a model directory, in the dtype of the model `like`.

    `out` appears whole or not at all; the first process writes. Returns the target under its new name. Raises
    `ConfigError` when a file cannot be written, or `out` is taken.
    """
    if training_processes().process_index == 0:
        module: Any = target.module
        with told_as(ConfigError, f"'{out}'", ADVICE), new_directory(out) as place:
            module.to(_stored_dtype(target, like)).save_pretrained(place)
            tokenizer.save_pretrained(place)
        module.to(target.dtype)  # the target in memory is rounded like the written weights
    return replace(target, name=str(out))


def _stored_dtype(target: LoadedModel, files: str | None = None) -> torch.dtype:
    """Returns the dtype of a target's files, or of the model `files`; of a target in integers that of its decoder."""
    if target.stored is not None:
        return target.stored.dtype
    in_memory = files is None and target.is_borrowed  # a loaded model's configuration has the dtype of its memory
    config = target.config if in_memory else load_config(files or target.name).get_text_config()
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else DTYPES.get(str(stored), target.dtype)


def _drafting(
    setup: dict[str, Any], target: LoadedModel, tokenizer: Any, workload: Workload, progress: TokenProgress
) -> tuple[dict[str, Any], int]:
    """Returns tokens per target pass and acceptance by depth at each temperature, and nodes of the deepest draft."""
    llm = LLM(
        target.stored or target, tokenizer=tokenizer, max_num_seqs=_AT_ONCE, speculative_config=setup,
        on_step=progress.add,
    )  # fmt: skip
    facts: dict[str, Any] = {}
    for temperature in workload.temperatures:
        outputs: Sequence[Any] = llm.generate(list(workload.prompts), workload.params(temperature))
        progress.end_run()
        metrics = GenerationMetrics.total(output.metrics for output in outputs)
        facts[f"tau_at_temperature_{temperature:g}"] = round(metrics.mean_acceptance_length, 4)
        facts[f"acceptance_by_depth_at_temperature_{temperature:g}"] = [
            round(share, 4) for share in metrics.acceptance_by_depth
        ]
    return facts, int(llm.drafters[0].nodes_by_depth[-1])
