"""Measures a trained head on held-out prompts and saves it together with the results.

Acceptance is counted on texts that the target itself wrote to held-out prompts, half of them greedily and half at a
temperature; the acceptance length comes from drafting through the real engine.

Letters: S positions, K heads, R ranks, E hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from foretoken.bench.prompt_sets import load_prompts
from foretoken.bench.workload import TokenProgress, Workload, no_progress
from foretoken.core.atomic_files import new_directory, told_as
from foretoken.core.errors import ConfigError
from foretoken.core.results import GenerationMetrics
from foretoken.engine.llm import LLM
from foretoken.formats import native
from foretoken.formats.whole_files import safetensors_errors
from foretoken.hf.loading import load_config
from foretoken.hf.parts import target_parts
from foretoken.hf.placement import DTYPES
from foretoken.training.card import head_card, read_curve
from foretoken.training.processes import training_processes
from foretoken.training.teacher import Teacher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.heads.base import Head, HeadConfig
    from foretoken.hf.loading import LoadedModel

_NUM_RANKS = 10
_MAX_TOKENS = 128
_TEMPERATURES = (0.0, 0.8)
_AT_ONCE = 4
_ADVICE = "Expected a new directory with enough room that may be written to. Make room, and run the same command again."
_QUOTED_TREE = "mc_sim_7b_63"  # the one published figures have, so that they compare across machines


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
        command: What trained it, for the card.
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


def measured_acceptance(
    head: Head, target: LoadedModel, tokenizer: Any, workload: Workload, *, progress: TokenProgress | None = None
) -> list[list[float]]:
    """How often each candidate of each head is what the target wrote.

    Args:
        head: In float32.
        target: Its target.
        tokenizer: The target's.
        workload: Prompts and how to continue them.
        progress: Told of every iteration and of every temperature's end.

    Returns:
        K rows of R shares: entry i, r is P(candidate r of head i is the token | the tokens before were given).
    """
    progress = progress or TokenProgress(workload, len(workload.temperatures), report=no_progress)
    llm = LLM(target, tokenizer=tokenizer, max_num_seqs=_AT_ONCE, on_step=progress.add)
    texts = []
    for temperature in workload.temperatures:
        for output in llm.generate(list(workload.prompts), workload.params(temperature)):
            texts.append((len(output.prompt_token_ids), [*output.prompt_token_ids, *output.outputs[0].token_ids]))
        progress.end_run()
    hits = torch.zeros(head.config.steps, _NUM_RANKS, dtype=torch.float64)
    counts = torch.zeros(head.config.steps, 1, dtype=torch.float64)
    head = head.to(target.device)
    parts, teacher = target_parts(target, dtype=torch.float32), Teacher(target, head.config.taps)
    width = head.config.hidden_size * len(head.config.taps)
    for num_prompt, text in texts:
        tokens = torch.tensor([text], device=target.device)
        features = teacher.read(tokens)[..., :width].float()
        with torch.inference_mode():
            for index, hidden in enumerate(head.teacher_forced(features, tokens, parts)):
                # The first draft is made when the last prompt token is the root: head i then guesses position
                # num_prompt + i from the feature of position num_prompt - 2.
                first = max(num_prompt - 2, 0)
                labels = tokens[0, first + 2 + index :]
                logits = head.logits(index, hidden[0, first : first + len(labels)], parts)
                own = logits.gather(1, labels.unsqueeze(1))
                # A label that cannot be drafted has no rank, however few tokens can be.
                ranks = (logits > own).sum(1).masked_fill(own[:, 0].isneginf(), _NUM_RANKS).cpu()
                hits[index] += torch.bincount(ranks, minlength=_NUM_RANKS)[:_NUM_RANKS]
                counts[index] += len(labels)
    shares: list[list[float]] = (hits / counts.clamp_min(1)).tolist()
    return [[round(share, 5) for share in row] for row in shares]


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
