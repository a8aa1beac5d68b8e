"""Measures a trained head on held-out prompts and saves it together with the results.

Acceptance by depth and rank is that of `foretoken.training.acceptance`; the acceptance length comes from drafting
through the real engine.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from foretoken.bench.prompt_sets import load_prompts
from foretoken.bench.workload import TokenProgress, Workload, no_progress
from foretoken.core.errors import ConfigError
from foretoken.core.results import GenerationMetrics
from foretoken.entrypoints.llm import LLM
from foretoken.files.atomic_files import new_directory, told_as
from foretoken.formats import native
from foretoken.formats.whole_files import safetensors_errors
from foretoken.models.loading import load_config
from foretoken.models.placement import DTYPES
from foretoken.runner.costs import pass_costs
from foretoken.training.acceptance import measured_acceptance
from foretoken.training.card import head_card, read_curve
from foretoken.training.processes import training_processes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.heads.base import HeadConfig
    from foretoken.models.loading import LoadedModel

_MAX_TOKENS = 128
_TEMPERATURES = (0.0, 0.8)
_AT_ONCE = 4
_ADVICE = "Expected a new directory with enough room that may be written to. Make room, and run the same command again."
_QUOTED_TREE = "mc_sim_7b_63"  # the one published figures have, so that they compare across machines
_QUOTED_NODES = 64  # nodes of `_QUOTED_TREE`, root included


def saved_head(  # noqa: PLR0913 - what a head comes from, is measured on, and goes to
    checkpoint: HeadCheckpoint,
    out: Path,
    *,
    target: LoadedModel,
    tokenizer: Any,
    dtype: str,
    workload: Workload | None,
    run: Path,
    command: str,
    on_progress: Callable[[int, int], None] = no_progress,
) -> dict[str, Any] | None:
    """Measures a trained head on held-out prompts and writes it.

    Args:
        checkpoint: The head.
        out: Where it goes; appears whole or not at all.
        target: Its target.
        tokenizer: The target's.
        dtype: Of the weights; "auto" for that of the target's checkpoint.
        workload: Held-out prompts and how they are continued; None measures nothing.
        run: The run's directory, for the curve on the card.
        command: What trained it, for the card: see `head_card`.
        on_progress: Called with held-out tokens decoded and such tokens in all.

    Returns:
        What was found, JSON-ready; None in every process but the first.

    Raises:
        ConfigError: When it cannot be written, or something is in its place.
    """
    if training_processes().process_index:
        return None
    stored = _stored_dtype(target.config, target.dtype) if dtype == "auto" else DTYPES[dtype]
    weights = {
        key: value.to(stored) if value.is_floating_point() else value for key, value in checkpoint.weights.items()
    }
    head = replace(checkpoint, weights=weights)
    facts: dict[str, Any] = {
        "method": head.config.method,
        "parameters": sum(value.numel() for value in weights.values()),
        "bytes": sum(value.numel() * value.itemsize for value in weights.values()),
        **{key: value for key, value in checkpoint.notes.items() if key != "settings"},
    }
    with told_as(ConfigError, f"'{out}'", _ADVICE), new_directory(out) as place:
        if workload is not None:
            progress = TokenProgress(workload, 3 * len(workload.temperatures), report=on_progress)
            measured = measured_acceptance(
                head.module(dtype=torch.float32), target, tokenizer, workload, progress=progress
            )
            head = replace(head, acceptance=measured)
            native.write_files(head, place)
            facts |= _drafting(head.config, place, target, tokenizer, workload, progress)
            assert head.acceptance is not None, "it was just measured"
            facts["acceptance_of_first_candidate"] = [row[0] for row in head.acceptance]
        native.write_files(replace(head, notes={**checkpoint.notes, **facts}), place)
        (place / "README.md").write_text(head_card(head, facts, read_curve(run), command), encoding="utf-8")
    return {**facts, "directory": str(out)}


def held_out_workload(prompts: str, num_prompts: int) -> Workload | None:
    """What a head is measured on; None for no prompts. Raises as `load_prompts`."""
    if not num_prompts:
        return None
    texts = load_prompts(prompts, limit=num_prompts)
    return Workload(prompts=texts, temperatures=_TEMPERATURES, max_tokens=_MAX_TOKENS)


def held_out_seconds(target: LoadedModel, tokenizer: Any, workload: Workload | None) -> Callable[[float], float]:
    """Estimates the seconds of `saved_head`'s measurement, by timing passes of the target.

    Args:
        target: The head's target.
        tokenizer: Its tokenizer.
        workload: Held-out prompts; None for nothing to measure.

    Returns:
        Tokens a target pass that drafts are expected to bring, to seconds.
    """
    if workload is None or training_processes().process_index:
        return lambda _: 0.0
    costs = pass_costs(target, LLM(target, tokenizer=tokenizer, max_num_seqs=_AT_ONCE).target.name)
    batch = min(_AT_ONCE, len(workload.prompts))
    passes = len(workload.temperatures) * workload.max_tokens * math.ceil(len(workload.prompts) / _AT_ONCE)
    plain, drafted = costs.verification(batch, batch), costs.verification(batch, batch * _QUOTED_NODES)
    return lambda tau: passes * (plain + 2 * drafted / tau)  # texts of the target, then a static and a dynamic tree


def save_target(target: LoadedModel, out: Path, *, tokenizer: Any, like: str) -> LoadedModel:
    """Writes a target that learned along with heads as a transformers model directory.

    Args:
        target: The new target.
        out: Where it goes; appears whole or not at all.
        tokenizer: Its tokenizer, the old one's.
        like: The old target, for its dtype.

    Returns:
        The target under its new name. Every process gets it; the first one writes.

    Raises:
        ConfigError: When it cannot be written, or something is in its place.
    """
    if training_processes().process_index == 0:
        module: Any = target.module
        with told_as(ConfigError, f"'{out}'", _ADVICE), new_directory(out) as place, safetensors_errors():
            module.to(_stored_dtype(load_config(like).get_text_config(), target.dtype)).save_pretrained(place)
            tokenizer.save_pretrained(place)
        module.to(target.dtype)  # with the rounding of what was written
    return replace(target, name=str(out))


def _stored_dtype(config: Any, default: torch.dtype) -> torch.dtype:
    """The dtype of a model's files by its configuration, which may name it or hold it."""
    stored = getattr(config, "dtype", None)
    return stored if isinstance(stored, torch.dtype) else DTYPES.get(str(stored), default)


def _drafting(
    config: HeadConfig,
    directory: Path,
    target: LoadedModel,
    tokenizer: Any,
    workload: Workload,
    progress: TokenProgress,
) -> dict[str, Any]:
    """What the engine makes of the head: tokens a target pass and acceptance by depth, at every temperature.

    First with a static tree, then with dynamic ones of at most as many nodes, whose facts begin with "dynamic".
    """
    facts: dict[str, Any] = {}

    def run(tree: dict[str, Any], name: str) -> int:
        """Adds the facts of a tree; gives its nodes."""
        llm = LLM(
            target,
            tokenizer=tokenizer,
            max_num_seqs=_AT_ONCE,
            speculative_config={"method": config.method, "model": str(directory), **tree},
            on_step=progress.add,
        )
        for temperature in workload.temperatures:
            outputs: Sequence[Any] = llm.generate(list(workload.prompts), workload.params(temperature))
            progress.end_run()
            metrics = GenerationMetrics.total(output.metrics for output in outputs)
            facts[f"{name}tau_at_temperature_{temperature:g}"] = round(metrics.mean_acceptance_length, 4)
            facts[f"{name}acceptance_by_depth_at_temperature_{temperature:g}"] = [
                round(share, 4) for share in metrics.acceptance_by_depth
            ]
        return int(llm.drafters[0].nodes_by_depth[-1])

    facts["tree_nodes"] = run({"tree": _QUOTED_TREE}, "")
    dynamic = {"tree": "dynamic", "max_nodes": facts["tree_nodes"], "num_speculative_tokens": config.steps}
    facts["dynamic_tree_nodes"] = run(dynamic, "dynamic_")
    return facts
