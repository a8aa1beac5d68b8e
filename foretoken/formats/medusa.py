"""Reads and writes Medusa heads as published: `{head}.{layer}.linear.*`, an LM head each, alone or in a whole model.

The reader knows three layouts: heads alone (`medusa_lm_head.pt` or safetensors), `medusa_head.*` inside a transformers
model (Medusa-1.0, Medusa-2), and `medusa_heads.*` inside one (ModelOpt). The writer writes heads alone. The tensors
give the counts: released configurations state two heads for files with five.

The original code opens the pickle alone and repeats one module for all blocks of a head. A head with different blocks
would be another network there, so it is not written as a pickle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.core.errors import ConfigError
from foretoken.formats.mapping import read_tensors, scatter
from foretoken.formats.medusa_names import OFFICIAL, for_writing, warn_of_counts, without_added_biases
from foretoken.formats.saving import (
    MEDUSA_CODE,
    TGI,
    TRT_MEDUSA,
    VLLM,
    Reader,
    expect_method,
    finished,
    has_different_blocks,
    needs_target_name,
    own_entries,
    save,
    target_name,
)
from foretoken.heads.medusa import MedusaConfig

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from foretoken.formats.checkpoint import HeadCheckpoint
    from foretoken.formats.files import HeadFiles
    from foretoken.formats.saving import WriteOptions
    from foretoken.formats.target_info import TargetInfo

_OFFICIAL_HEADS = 5  # the original code always builds this number
_PREFIXES = ("", "medusa_head.", "medusa_heads.")


def recognises(files: HeadFiles) -> bool:
    """Decides whether there are keys of this family."""
    return any(OFFICIAL.prefixed(prefix).recognises(files.weights) for prefix in _PREFIXES)


def read(files: HeadFiles, target: TargetInfo) -> HeadCheckpoint:
    """Reads heads; those without LM heads share the target's.

    Args:
        files: The checkpoint.
        target: For the vocabulary's size of heads without LM heads.

    Raises:
        ModelError: If keys are wrong, or numbers are not finite.
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
    model = [key for key in weights.shapes if not key.startswith(prefix)]  # tensors of the model around the heads
    tensors = read_tensors(weights, names.table(sizes), sizes, ignored=model)
    sizes, tensors = without_added_biases(config, sizes, tensors)
    return finished(str(files.path), config, sizes, tensors, target)


def write(checkpoint: HeadCheckpoint, directory: Path, options: WriteOptions) -> None:
    """Writes heads alone, each with an LM head.

    Raises:
        ConfigError: If the format cannot hold the head, the original code would load another network, or the target's
            LM head is needed and missing.
    """
    what = "format 'medusa'"
    expect_method(checkpoint, "medusa", what=what)
    if not options.as_safetensors and has_different_blocks(checkpoint, "weight", "bias"):
        raise ConfigError(
            f"the {checkpoint.weights['weight'].shape[1]} blocks of each head differ, and {MEDUSA_CODE}, which opens "
            "medusa_lm_head.pt, takes the last one in place of all: it would draft as another network. Train with "
            "tied_blocks=true, pass --safetensors for readers that keep blocks apart, or convert to 'vllm_medusa', "
            "'tensorrt_llm' or 'native'."
        )
    config = checkpoint.config
    assert isinstance(config, MedusaConfig), "the method says so"
    sizes, weights = for_writing(config, checkpoint.weights, options, what=what)
    write_heads(checkpoint, sizes, scatter(weights, OFFICIAL.table(sizes)), directory, options)


def readers(checkpoint: HeadCheckpoint, options: WriteOptions) -> list[Reader]:
    """Returns the programs that read the result of `write`."""
    named, heads = needs_target_name(checkpoint), checkpoint.config.steps
    vllm = Reader(
        VLLM, True, f"speculative_config with method 'medusa' named; a chain of the best token of {heads} heads"
    )
    converter = Reader(TRT_MEDUSA, True, f"its converter, with --medusa_model_dir and --num_medusa_heads {heads}")
    if options.as_safetensors:
        tgi = Reader(TGI, True, f"--model-id of this directory; a chain{named}")
        return [Reader(MEDUSA_CODE, False, "it opens medusa_lm_head.pt alone"), tgi, vllm, converter]
    official = Reader(MEDUSA_CODE, True, f"MedusaModel.from_pretrained{_other_count(heads)}{named}")
    return [official, Reader(TGI, False, "it opens safetensors alone; pass --safetensors"), vllm, converter]


def write_heads(
    checkpoint: HeadCheckpoint, sizes: MedusaConfig, tensors: dict[str, Tensor], directory: Path, options: WriteOptions
) -> None:
    """Writes tensors and `config.json` under the file names of the original code."""
    config = {
        **target_name(checkpoint),
        "medusa_num_heads": sizes.num_heads,
        "medusa_num_layers": sizes.num_layers,
        **({} if sizes.own_lm_head else {"version": "2"}),
        "medusa_fc_bias": sizes.has_bias and sizes.num_layers > 0,  # vLLM drops biases without it
        "hidden_size": sizes.hidden_size,
        "vocab_size": sizes.vocab_size,
        **own_entries(checkpoint),
    }
    name = "medusa_lm_head.safetensors" if options.as_safetensors else "medusa_lm_head.pt"
    save(directory, name, tensors, config)


def _other_count(heads: int) -> str:
    """Returns what the original code does with another number of heads than its own."""
    if heads == _OFFICIAL_HEADS:
        return ""
    rest = "leaves the others at random" if heads < _OFFICIAL_HEADS else "passes over the others"
    return f", which builds {_OFFICIAL_HEADS} heads and {rest}: choose medusa_choices no deeper than {min(heads, 5)}"
