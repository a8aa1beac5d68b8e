"""Medusa heads as published: `{head}.{layer}.linear.*` and an LM head each, alone or inside a whole model.

Three layouts are read: heads alone (`medusa_lm_head.pt` or safetensors), `medusa_head.*` inside a transformers model
(Medusa-1.0, Medusa-2), and `medusa_heads.*` inside one (ModelOpt). Heads alone are written.

Counts come from the tensors: released configurations say two heads where files hold five.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.formats.mapping import read_tensors, scatter
from foretoken.formats.medusa_names import OFFICIAL, for_writing, warn_of_counts, without_added_biases
from foretoken.formats.saving import expect_method, finished, own_entries, save, target_name
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.formats.files import HeadFiles
    from foretoken.formats.saving import WriteOptions
    from foretoken.formats.surroundings import Surroundings

_PREFIXES = ("", "medusa_head.", "medusa_heads.")


def recognises(files: HeadFiles) -> bool:
    """Whether there are keys of this family."""
    return any(OFFICIAL.prefixed(prefix).recognises(files.weights) for prefix in _PREFIXES)


def read(files: HeadFiles, target: Surroundings) -> HeadCheckpoint:
    """Reads heads; those without LM heads share the target's.

    Args:
        files: The checkpoint.
        target: For the vocabulary's size where there are no LM heads.

    Raises:
        ModelError: When keys do not fit together, or numbers are not finite.
    """
    weights, config = files.weights, files.config
    prefix = next(prefix for prefix in _PREFIXES if OFFICIAL.prefixed(prefix).recognises(weights))
    names = OFFICIAL.prefixed(prefix)
    stated = config.get("vocab_size")
    sizes = names.config(weights, vocab_size=stated if isinstance(stated, int) else target.vocab_size)
    counts = {"num_heads": "medusa_num_heads", "num_layers": "medusa_num_layers"}
    warn_of_counts(str(files.path), config, counts, sizes)
    if isinstance(config.get("medusa"), dict):
        counts = {"num_heads": "num_medusa_heads", "num_layers": "num_medusa_layers"}
        warn_of_counts(str(files.path), config["medusa"], counts, sizes)
    model = [key for key in weights.shapes if not key.startswith(prefix)]  # of the whole model around the heads
    tensors = read_tensors(weights, names.table(sizes), sizes, ignored=model)
    sizes, tensors = without_added_biases(config, sizes, tensors)
    return finished(str(files.path), config, sizes, tensors, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes heads alone, each with an LM head.

    Raises:
        ConfigError: When the format has no room for them, or the target's LM head is needed and not at hand.
    """
    what = "format 'medusa'"
    expect_method(checkpoint, "medusa", what=what)
    config = checkpoint.config
    assert isinstance(config, MedusaConfig), "the method says so"
    sizes, weights = for_writing(config, checkpoint.weights, options, what=what)
    write_heads(checkpoint, sizes, scatter(weights, OFFICIAL.table(sizes)), directory, options)


def write_heads(
    checkpoint: HeadCheckpoint, sizes: MedusaConfig, tensors: dict[str, Tensor], directory: Path, options: WriteOptions
) -> None:
    """Writes tensors and `config.json` under the names that the original code looks for."""
    config = {
        **target_name(checkpoint),
        "medusa_num_heads": sizes.num_heads,
        "medusa_num_layers": sizes.num_layers,
        **({} if sizes.own_lm_head else {"version": "2"}),
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        **own_entries(checkpoint),
    }
    name = "medusa_lm_head.safetensors" if options.as_safetensors else "medusa_lm_head.pt"
    save(directory, name, tensors, config)
