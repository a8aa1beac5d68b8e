"""Options of `foretoken train`, by panel of its help: what the head is, how it learns, the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_HEAD = "What the head is"
_LEARNING = "How it learns"
_RUN = "The run"

Method = Annotated[
    str,
    typer.Argument(help="medusa, hydra, mlp_speculator, eagle, hass (trains eagle heads), eagle3 or falcon."),
]
Data = Annotated[Path, typer.Option(help="Packed tokens, as `foretoken data` writes them.")]
Out = Annotated[Path, typer.Option(help="Directory of the head; must not exist.")]
Sizes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=JSON",
        help="A size of the head, e.g. num_heads=4. May be repeated.",
        rich_help_panel=_HEAD,
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        help="Begin from this head, a directory or a hub id, instead of neutral weights.", rich_help_panel=_HEAD
    ),
]
DraftVocab = Annotated[
    Path | None,
    typer.Option(
        help="Draft these tokens alone: a file of `foretoken data vocab`. For eagle3, and for medusa with "
        "own_lm_head=true.",
        rich_help_panel=_HEAD,
    ),
]
Weights = Annotated[
    list[str] | None,
    typer.Option(
        "--objective",
        metavar="KEY=X",
        help="A weight of the objective: ce_weight, kl_weight, tv_weight, feature_weight, head_decay or noise; for the "
        "EAGLE family also passes and stride; for hass also num_top and top_weight; for falcon glancing and "
        "glancing_floor. May be repeated.",
        rich_help_panel=_LEARNING,
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Optimiser steps.", rich_help_panel=_LEARNING)]
LearningRate = Annotated[float, typer.Option(help="Highest learning rate.", rich_help_panel=_LEARNING)]
WarmupSteps = Annotated[int, typer.Option(min=0, help="Linear warm-up.", rich_help_panel=_LEARNING)]
LearningRateFloor = Annotated[
    float, typer.Option(help="Last learning rate as a part of the highest, above 0.", rich_help_panel=_LEARNING)
]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Windows of a global batch, over all processes.", rich_help_panel=_LEARNING)
]
MicroBatchSize = Annotated[
    int | None, typer.Option(min=1, help="Windows computed at once by a process.", rich_help_panel=_LEARNING)
]
Length = Annotated[int, typer.Option(min=4, help="Tokens of a window.", rich_help_panel=_LEARNING)]
WeightDecay = Annotated[float, typer.Option(help="Of AdamW.", rich_help_panel=_LEARNING)]
ClipNorm = Annotated[float, typer.Option(help="Greatest gradient norm.", rich_help_panel=_LEARNING)]
Precision = Annotated[
    str, typer.Option(metavar="NAME", help="float32, or bfloat16 by autocast.", rich_help_panel=_LEARNING)
]
Seed = Annotated[int, typer.Option(min=0, help="Of batches and fresh weights.", rich_help_panel=_LEARNING)]
Joint = Annotated[
    list[str] | None,
    typer.Option(
        "--joint",
        metavar="KEY=VALUE",
        help="Let the target learn along (Medusa-2): backbone=lora or full, head_weight, head_warmup, warmup_part, "
        "rate_factor, self_distillation, lora_rank, lora_alpha, lora_dropout. May be repeated.",
        rich_help_panel=_LEARNING,
    ),
]
TargetOut = Annotated[
    Path | None, typer.Option(help="With --joint: directory of the new target.", rich_help_panel=_RUN)
]
RunDir = Annotated[Path | None, typer.Option(help="Checkpoints and curves. Default: OUT-run.", rich_help_panel=_RUN)]
SaveEvery = Annotated[float, typer.Option(help="Seconds between checkpoints.", rich_help_panel=_RUN)]
Cache = Annotated[Path | None, typer.Option(help="Keep the target's features here between runs.", rich_help_panel=_RUN)]
CacheGib = Annotated[float, typer.Option(help="Most GiB of that.", rich_help_panel=_RUN)]
EvalEvery = Annotated[
    int,
    typer.Option(
        min=0,
        help="Steps between simulations of drafting on held-out tokens, for the curves; 0 for none. Weights stay "
        "the same.",
        rich_help_panel=_RUN,
    ),
]
EvalData = Annotated[
    Path | None,
    typer.Option(help="Packed tokens for that. Default: held_out/ beside train/.", rich_help_panel=_RUN),
]
NumPrompts = Annotated[
    int, typer.Option(min=0, help="Held-out prompts of the last report; 0 for none.", rich_help_panel=_RUN)
]
SaveDtype = Annotated[str, typer.Option(metavar="NAME", help="Of the saved weights; auto: the target's.")]
