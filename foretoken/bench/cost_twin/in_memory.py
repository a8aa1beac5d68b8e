"""Makes a cost twin whose target is padded on its device: its weights never become files.

A target of 32 layers of 4096 would be 13 GB of files. On a GPU its added weights, zeros or random numbers, are made in
place, around the few megabytes of the small model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from foretoken.bench.cost_twin.make import planned_parts, write_heads, write_planned_model
from foretoken.bench.cost_twin.model import Padding
from foretoken.bench.cost_twin.model_files import padded_tensors, write_all_but_weights
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.formats.files import whole_files
from foretoken.models.loading import fill_model

if TYPE_CHECKING:
    from foretoken.bench.cost_twin.make import TwinPlan
    from foretoken.models.loading import LoadedModel


def make_twin_in_memory(plan: TwinPlan) -> LoadedModel:
    """Makes a twin's target on the plan's device, and files of its drafters beside `plan.out`, as for any twin.

    `plan.out` gets configuration and tokenizer alone. Returns the target, named `plan.out`.

    Raises:
        ConfigError, ModelError: See `make_twin`.
        torch.OutOfMemoryError: When the device has too little memory.
    """
    planned = planned_parts(plan)
    generator = torch.Generator(plan.device).manual_seed(plan.seed)
    target, *draft_models = planned.models
    padding = Padding(target.factor, plan.fill, generator)
    with whole_files(target.path, replaces=True) as new:
        write_all_but_weights(target.small, padding, target.record, new, num_layers=target.num_layers, dtype=plan.dtype)
    tensors = padded_tensors(target.small, padding, num_layers=target.num_layers, dtype=plan.dtype)
    model = fill_model(str(target.path), tensors, device=torch.device(plan.device))
    for draft_model in draft_models:
        write_planned_model(draft_model, plan, generator)
    write_heads(planned, TargetFingerprint.of(model), plan, generator)
    return model
