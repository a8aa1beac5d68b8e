"""Options of drafters over heads, and loading of heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple

import torch

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import ConfigError
from foretoken.decoder.base import UnsuitableError
from foretoken.drafters.options import DrafterOptions, TreeOption
from foretoken.drafters.shared.drafts import QuantizationOption
from foretoken.formats.checkpoint import HeadCheckpoint, TargetFingerprint
from foretoken.formats.files import local_head
from foretoken.formats.registry import read_head
from foretoken.models.parts import TargetParts, target_parts
from foretoken.trees.pruning import Pruning

if TYPE_CHECKING:
    from foretoken.decoder.lean.native_linear import Quantization
    from foretoken.drafters.base import TargetHandle
    from foretoken.heads.base import Head
    from foretoken.models.loading import LoadedModel


class HeadOptions(DrafterOptions):
    """Options of all drafters over heads.

    Attributes:
        model: Directory or hub id of the head, in any format that `foretoken convert` knows.
        revision: Of the hub, if `model` is a hub id; None for its main branch.
        tree: As for every method. "tree" is the static tree that pays most on this machine by the acceptance stored
            with the head, or else the head's published tree; in each iteration as deep as pays, down to no draft at
            all.
        draft_sample_method: "probabilistic" draws drafts from the head's warped distribution for sampled requests
            without a seed; "greedy" always takes its most probable tokens.
        quantization: "int8" drafts with all matrices in int8, with a scale per row, on CPUs: one byte per weight, also
            for a copy of the target's LM head if the head shares it. "none" drafts with the weights as stored, in the
            target's precision: float32, or bfloat16 if the target is. "auto" takes int8 where possible.
        allow_other_target: Accept a head that was trained for another target of the same sizes.
    """

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)

    revision: str | None = None
    tree: TreeOption = "tree"
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    quantization: QuantizationOption = "auto"
    allow_other_target: bool = False


class LoadedHead(NamedTuple):
    """A head ready to draft with.

    Attributes:
        head: The network.
        parts: Modules that it shares with the target.
        checkpoint: Its source.
        dtype: Of its features.
        is_optimized: Whether its layers use the native kernels where possible.
        quantization: Of its matrices; None if they are as stored.
    """

    head: Head
    parts: TargetParts
    checkpoint: HeadCheckpoint
    dtype: torch.dtype
    is_optimized: bool
    quantization: Quantization | None


def load_head(
    options: HeadOptions, target: TargetHandle, method: str, quantization: Quantization | None = None
) -> LoadedHead:
    """Loads the head that the options name.

    Raises:
        ConfigError, ModelError: See `checked_head`; `UnsuitableError` when the head cannot be quantised.
    """
    is_on_cpu = runs_cpu_kernels(target.device)
    if quantization is not None and not is_on_cpu:  # before the checkpoint is read
        raise UnsuitableError(f"only CPUs have kernels for {quantization}, not {target.device}.")
    checkpoint = checked_head(options, target.model, method)
    dtype = torch.float32 if is_on_cpu else target.dtype  # drafts need not be exact
    head = checkpoint.module(device=target.device, dtype=dtype)
    if is_on_cpu:
        # bfloat16 rounds inputs, as int8 and a target in bfloat16 do.
        head.optimize_for_inference(quantization, compacts=quantization is not None or target.dtype == torch.bfloat16)
    parts = target_parts(
        target.model, dtype=dtype, is_inference=True, quantization=quantization if head.has_target_lm_head else None
    )
    return LoadedHead(head, parts, checkpoint, dtype, is_on_cpu, quantization)


def checked_head(options: HeadOptions, model: LoadedModel, method: str) -> HeadCheckpoint:
    """Returns the checkpoint that the options name.

    Raises:
        ConfigError: Without a model, or when the head is of another method or for another target.
        ModelError: When the checkpoint is missing or damaged, or cannot be downloaded.
    """
    if options.model is None:
        raise ConfigError(f"method '{method}' needs a trained head. Expected its directory or hub id. Set 'model'.")
    fingerprint = TargetFingerprint.of(model)
    path = local_head(options.model, options.revision)
    _, checkpoint = read_head(path, target=fingerprint, base_config=model.config)
    if checkpoint.config.method != method:
        raise ConfigError(
            f"'{options.model}' holds a head of method '{checkpoint.config.method}'. Expected one of '{method}'. "
            f"Set 'method' to '{checkpoint.config.method}'."
        )
    if options.allow_other_target:
        fingerprint = fingerprint.model_copy(update={"weights": None, "architecture": None, "num_layers": None})
    checkpoint.check_target(fingerprint, what=options.model)
    return checkpoint
