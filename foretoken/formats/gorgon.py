"""Reads heads of Project Gorgon: Medusa heads without bias behind a frozen copy of the target's last norm.

The reader drops the norm: the features here are already normed. The first head is trained to predict x_{t+1}, one token
earlier than ours, so the heads draft badly until they are trained further.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import torch

from foretoken.formats.conversion import finished, read_tensors
from foretoken.formats.medusa import MedusaNames

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
    from foretoken.formats.files import HeadFiles, Weights

NAMES = MedusaNames(block="{head}.blocks.{layer}.linear", lm_head="{head}.lm_head.weight")
_NORM = re.compile(r"\d{1,4}\.norm\.weight")


def recognises(files: HeadFiles) -> bool:
    """Decides whether there are keys of this family."""
    return NAMES.recognises(_compiled_or_not(files))


def read(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads heads; warns if their norm differs from the target's, if that is available.

    Raises:
        ModelError: If keys are wrong, or numbers are not finite.
    """
    weights = _compiled_or_not(files)
    sizes = NAMES.config(weights, vocab_size=target.vocab_size)
    norms = [match[0] for match in weights.matches(_NORM)]
    _compare_norms(weights, norms, target)
    tensors = read_tensors(weights, NAMES.table(sizes), sizes, ignored=norms)
    return finished(str(files.path), files.config, sizes, tensors, target)


def _compiled_or_not(files: HeadFiles) -> Weights:
    """Returns the tensors without the prefix that `torch.compile` adds to names."""
    return files.weights.renamed(lambda key: key.replace("_orig_mod.", ""))


def _compare_norms(weights: Weights, norms: list[str], target: TargetInfo) -> None:
    if not norms or target.weights is None or target.weights.norm is None:
        return
    norm = target.weights.norm.cpu().float()
    for key, tensor in weights.fetch(norms).items():
        if tensor.shape != norm.shape or not torch.allclose(tensor.float(), norm, rtol=1e-2, atol=1e-3):
            logging.getLogger(__name__).warning("%s: %s is not the target's last norm", weights.name, key)
