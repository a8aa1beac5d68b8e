"""Reads and writes Medusa heads that share the target's LM head, as the legacy trainer's `"version": "2"` wrote them.

Names are those of `medusa`, whose reader serves both. Only blocks are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError
from foretoken.formats import medusa
from foretoken.formats.conversion import (
    MEDUSA_CODE,
    TGI,
    VLLM,
    Reader,
    expect_method,
    has_different_blocks,
    needs_target_name,
    scatter,
)
from foretoken.formats.medusa import OFFICIAL, with_biases
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint, TargetInfo
    from foretoken.formats.conversion import WriteOptions
    from foretoken.formats.files import HeadFiles


def recognises(files: HeadFiles) -> bool:
    """Decides whether there are blocks without LM heads."""
    blocks, lm_heads = OFFICIAL.match(files.weights)
    return bool(blocks) and not lm_heads


def read(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads a head, see `medusa.read`."""
    return medusa.read(files, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes blocks alone.

    Raises:
        ConfigError: If the heads have their own LM heads, no blocks, or several different blocks.
    """
    expect_method(checkpoint, "medusa", what="format 'medusa_v2'")
    config = checkpoint.config
    assert isinstance(config, MedusaConfig), "the method says so"
    if config.own_lm_head or config.num_layers == 0:
        raise ConfigError("format 'medusa_v2' holds blocks and no LM heads. Convert this head to 'medusa'.")
    if has_different_blocks(checkpoint, "weight", "bias"):
        raise ConfigError(
            f"the {config.num_layers} blocks of each head differ, and no program reads that from format 'medusa_v2': "
            f"{MEDUSA_CODE} takes the last one in place of all, TGI knows one. Train with tied_blocks=true, or convert "
            "to 'vllm_medusa', 'tensorrt_llm' or 'native'."
        )
    sizes, weights = with_biases(config, dict(checkpoint.weights))
    medusa.write_heads(checkpoint, sizes, scatter(weights, OFFICIAL.table(sizes)), directory, options)


def readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    """Returns the programs that read the result of `write`."""
    config, named = checkpoint.config, needs_target_name(checkpoint)
    assert isinstance(config, MedusaConfig), "the method says so"
    if options.as_safetensors:
        official = Reader(MEDUSA_CODE, False, "it opens medusa_lm_head.pt alone")
    else:
        official = Reader(MEDUSA_CODE, True, f"the class of medusa_model_legacy.py alone{named}")
    if config.num_layers > 1:
        tgi = Reader(TGI, False, f"it takes one block a head; there are {config.num_layers}")
    elif options.as_safetensors:
        tgi = Reader(TGI, True, f"--model-id of this directory; a chain{named}")
    else:
        tgi = Reader(TGI, False, "it opens safetensors alone; pass --safetensors")
    return [official, tgi, Reader(VLLM, False, "it misses LM heads; convert to 'vllm_medusa' with --target")]
