"""What a model directory holds, read from its configuration and weight headers without loading weights."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from foretoken.core.errors import ModelError
from foretoken.target.loading import check_architecture, load_config
from foretoken.target.model_files import check_model_files

if TYPE_CHECKING:
    from pathlib import Path


def describe_directory(directory: Path) -> dict[str, Any]:
    """Facts about a model directory, JSON-ready.

    Args:
        directory: In Hugging Face layout.

    Raises:
        ModelError: When it is not a model, or damaged.
    """
    check_model_files(str(directory), may_be_hub_id=False)
    config = load_config(str(directory))
    text = config.get_text_config()
    paths = sorted(directory.glob("*.safetensors"))
    num_parameters, dtypes = _weights(paths)
    try:
        check_architecture(config, str(directory))
        is_causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
        target = "yes, if the self-test at load agrees" if is_causal else "no: it is no causal LM of transformers"
    except ModelError as err:
        target = f"no: {err}"
    return {
        "directory": str(directory),
        "architecture": ", ".join(config.architectures or [type(config).__name__]),
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "vocabulary": getattr(text, "vocab_size", None),
        "context": getattr(text, "max_position_embeddings", None),
        "parameters": num_parameters,
        "weight_dtypes": sorted(dtypes),
        "weight_bytes": sum(path.stat().st_size for path in paths),
        "has_tokenizer": any(directory.glob("tokenizer*")),
        "can_be_target": target,
    }


def _weights(paths: list[Path]) -> tuple[int, set[str]]:
    """Number of parameters and their dtypes over several safetensors files."""
    total, dtypes = 0, set()
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - the file is no mapping
                part = file.get_slice(key)
                total += prod(part.get_shape())
                dtypes.add(str(part.get_dtype()))
    return total, dtypes
