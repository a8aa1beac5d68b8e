"""Medusa heads that share the target's LM head, as the legacy trainer with `"version": "2"` wrote them.

The same names as in `medusa`, whose reader serves both; only blocks are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError
from foretoken.formats import medusa
from foretoken.formats.mapping import scatter
from foretoken.formats.medusa_names import OFFICIAL, with_biases
from foretoken.formats.saving import expect_method
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from pathlib import Path

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.formats.files import HeadFiles
    from foretoken.formats.saving import WriteOptions
    from foretoken.formats.surroundings import Surroundings


def recognises(files: HeadFiles) -> bool:
    """Whether there are blocks without LM heads."""
    blocks, lm_heads = OFFICIAL.match(files.weights)
    return bool(blocks) and not lm_heads


def read(files: HeadFiles, target: Surroundings) -> HeadCheckpoint:
    """See `medusa.read`."""
    return medusa.read(files, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes blocks alone.

    Raises:
        ConfigError: When the heads have LM heads of their own, or no blocks.
    """
    expect_method(checkpoint, "medusa", what="format 'medusa_v2'")
    config = checkpoint.config
    assert isinstance(config, MedusaConfig), "the method says so"
    if config.own_lm_head or config.num_layers == 0:
        raise ConfigError("format 'medusa_v2' holds blocks and no LM heads. Convert this head to 'medusa'.")
    sizes, weights = with_biases(config, dict(checkpoint.weights))
    medusa.write_heads(checkpoint, sizes, scatter(weights, OFFICIAL.table(sizes)), directory, options)
