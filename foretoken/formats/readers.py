"""Lists which programs read a head that a format writes, and how.

A format's `readers(checkpoint, options)` lists programs other than foretoken that might be expected to read it.
Versions are those whose code was examined.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from foretoken.formats.checkpoint import HeadCheckpoint

MEDUSA_CODE = "FasterDecoding/Medusa"
HYDRA_CODE = "zankner/Hydra"
TRT_MEDUSA = "TensorRT-LLM"
TRT_HYDRA = "the public Hydra port of TensorRT-LLM"
VLLM = "vLLM 0.32"
VLLM_EAGLE = "vLLM"
EAGLE_CODE = "SafeAILab/EAGLE"
FALCON_CODE = "Bestpay-inc/Falcon"
SGLANG = "SGLang"
SPECFORGE = "sgl-project/SpecForge"
SPECULATORS = "speculators 0.9"
TGI = "TGI 3.3"
OLD_TGI = "TGI 2.0.3 to 2.2"


class Reader(NamedTuple):
    """A program, and what it makes of a checkpoint.

    Attributes:
        program: Its name, with the version where that matters.
        reads: Whether it computes what the head computes here.
        how: What to do; or, where it does not, what happens.
    """

    program: str
    reads: bool
    how: str

    def __str__(self) -> str:
        return f"{'read' if self.reads else 'not read'} by {self.program}: {self.how}"


def has_different_blocks(checkpoint: HeadCheckpoint, *names: str) -> bool:
    """Whether blocks that others hold to be one differ.

    Args:
        checkpoint: The head.
        names: Stacked tensors of its weights with blocks along dimension 1.
    """
    stacked = [checkpoint.weights[name] for name in names if name in checkpoint.weights]
    return any(not torch.equal(part, part[:, :1].expand_as(part)) for part in stacked if part.shape[1] > 1)


def needs_target_name(checkpoint: HeadCheckpoint) -> str:
    """What to add where a reader loads the target that a head names, and this one names none."""
    is_named = checkpoint.target is not None and checkpoint.target.name
    return (
        "" if is_named else "; set base_model_name_or_path in config.json to the target, which this head does not name"
    )
