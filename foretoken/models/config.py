"""Reads the configuration of a model directory, and checks it and the files before a library reads them."""

import logging
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open

from foretoken.core.checks import shown, validated
from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.files.bounded_reads import MIB, TensorHeader, check_regular, read_json_object, tensor_headers
from foretoken.models.names import is_gguf, is_hub_id, refuse_missing

SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)
LARGEST_SIZE = 1 << 28  # a choice: the largest published sizes are vocabularies and contexts of some ten millions
ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
# Model types with recurrent layers whose trees were compared with transformers, see tests/models/test_recurrent.py.
RECURRENT_MODELS = frozenset(
    {
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "mamba", "mamba2",
        "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
    }
)  # fmt: skip
TWIN_KEY = "cost_twin"
_SETTINGS = {"quantize_config.json": "gptq", "quant_config.json": "awq"}  # files of AutoGPTQ and AutoAWQ
_SETTINGS_NAMES = {"w_bit": "bits", "q_group_size": "group_size"}  # AutoAWQ's names in its own file
_INDEX = "model.safetensors.index.json"
# Files that libraries read to their end; a device has no end.
_READ_WHOLE = {".json", ".safetensors", ".txt", ".model", ".jinja"}
_TEMPLATES = "additional_chat_templates"  # the only directory that tokenizers read besides
_MOST_TEXT_BYTES = 256 * MIB  # a choice: tokenizers of 260,000 tokens have 40 MiB
_log = logging.getLogger(__name__)


class TwinRecord(BaseModel):
    """The trained model behind a cost twin; a draft model or head states the sizes of the twin that it drafts for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    of: str = Field(min_length=1)
    layers: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    recurrent: str | None = None  # kind of the further layers; None: as the model's

    @property
    def label(self) -> str:
        """For example "24 x 1024 of tinycode"."""
        kind = "" if self.recurrent is None else f" ({self.recurrent})"
        return f"{self.layers} x {self.hidden_size}{kind} of {self.of}"

    @property
    def values(self) -> dict[str, Any]:
        """The record in a configuration or in a head's notes."""
        return self.model_dump(mode="json", exclude_none=True)

    def __str__(self) -> str:
        return f"cost twin {self.label}"


def read_twin_record(values: Mapping[str, Any], name: str) -> TwinRecord | None:
    """Returns the record in a configuration or in a head's notes, or None; raises `ModelError` if it is invalid."""
    if values.get(TWIN_KEY) is None:
        return None
    return validated(
        TwinRecord,
        values[TWIN_KEY],
        f"'{TWIN_KEY}' in the config.json of '{name}'",
        error=ModelError,
        advice="Make it again.",
    )


def is_size(value: object) -> bool:
    """Decides whether a value is an integer that a model may have as a size."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_SIZE


def check_sizes(config: Any, name: str) -> None:
    """Raises `ModelError` for the first field of a text configuration that is not a plausible positive integer."""
    for field in SIZES:
        value = getattr(config, field, None)
        if field == "sliding_window" and getattr(config, "use_sliding_window", True) is False:
            continue  # transformers may set it to 0
        for one in value if isinstance(value, list | tuple) and value else [value]:  # some models have one a layer
            if one is not None and not is_size(one):
                raise ModelError(
                    f"{field} in the configuration of '{name}' is {shown(value)}. Expected a whole number from 1 to "
                    f"{LARGEST_SIZE}. Copy or download config.json again."
                )


def logits_shape(config: Any) -> tuple[float, float | None]:
    """Returns a target's scale of logits, and c of c tanh(logit / c)."""
    names = "logit_scale", "lm_head_multiplier", "logits_scaling"
    scale, multiplier, divisor = (float(getattr(config, name, None) or 1.0) for name in names)
    return scale * multiplier / divisor, getattr(config, "final_logit_softcapping", None)


def check_quantization(config: Any, name: str) -> None:
    """Raises `ModelError` for a quantization method that transformers does not know and would ignore."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # takes seconds to import

    from foretoken.models.stored import OWN_METHOD

    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        settings = getattr(part, "quantization_config", None)
        if settings is None:
            continue
        method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
        known = sorted(AUTO_QUANTIZATION_CONFIG_MAPPING.keys() - {OWN_METHOD})
        if getattr(method, "value", method) not in known and not _is_bitsandbytes(settings):
            raise ModelError(
                f"the weights of '{name}' are quantized by the method {shown(method)}, which transformers does not "
                f"know. Expected one of {', '.join(known)}, or a model that is not quantized."
            )


def end_tokens(generation_config: Any, config: Any, *, vocab_size: int, name: str) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of a model: of its generation configuration, else of its configuration.

    Tokens outside the vocabulary are dropped with a warning: the model never writes them. Raises `ModelError` for an
    entry that is not a token id.
    """
    given = getattr(generation_config, "eos_token_id", None)
    given = getattr(config, "eos_token_id", None) if given is None else given
    tokens = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    if any(not isinstance(token, int) or isinstance(token, bool) or token < 0 for token in tokens):
        raise ModelError(
            f"eos_token_id of '{name}' is {shown(given)}. Expected a token id, or a list of these. Correct it in "
            "generation_config.json or config.json."
        )
    unknown = [token for token in tokens if token >= vocab_size]
    if unknown:
        _log.warning(
            "%s: end-of-sequence tokens %s are not in its vocabulary of %d and are left out.", name, unknown, vocab_size
        )
    return tuple(dict.fromkeys(token for token in tokens if token < vocab_size))


def _is_bitsandbytes(settings: Any) -> bool:
    """Recognises bitsandbytes settings of the time before configurations named their method."""
    return isinstance(settings, dict) and bool(settings.get("load_in_8bit") or settings.get("load_in_4bit"))


def check_model_files(name: str, *, may_be_hub_id: bool = True) -> None:
    """Checks a model directory before any library reads it; raises `ModelError` if it is missing or damaged."""
    directory = Path(name)
    if is_gguf(name) and directory.is_file():
        raise ModelError(
            f"'{name}' is a GGUF file. Expected a model directory with config.json and safetensors, because this needs "
            "the weights as they were before they were quantized. Name the directory of the original model."
        )
    if not directory.is_dir():
        if may_be_hub_id and is_hub_id(name):
            return
        refuse_missing(name)
    check_readable(directory)
    if not (directory / "config.json").is_file():
        raise ModelError(f"'{name}' has no config.json. Expected a model directory in Hugging Face layout.")
    settings = read_json_object(directory / "config.json").get("quantization_config")
    if settings is not None and not isinstance(settings, dict):
        raise ModelError(
            f"quantization_config in the config.json of '{name}' is {shown(settings)}. Expected an object, or none. "
            "Copy or download config.json again."
        )
    weights = sorted(directory.glob("*.safetensors"))
    if (directory / _INDEX).is_file() and not (directory / "model.safetensors").is_file():
        indexed_files(directory / _INDEX)
    if not weights:
        pickles = sorted(p.name for kind in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in directory.glob(kind))
        if pickles:
            raise ModelError(
                f"'{name}' holds only pickle weights ({pickles[0]}), which can run code when they are loaded. "
                "Expected safetensors. Convert them first where you trust their origin."
            )
        raise ModelError(f"'{name}' holds no weights. Expected *.safetensors beside config.json.")
    for path in weights:
        try:
            with safe_open(path, framework="np") as file:  # "pt" would import torch
                file.keys()
        except (SafetensorError, OSError) as err:
            raise ModelError(f"{path} is damaged: {one_line(err)}. Copy or download it again.") from err


def check_readable(directory: Path) -> None:
    """Raises `ModelError` for files that would keep a library reading: devices, pipes and endless text."""
    for path in sorted([*directory.iterdir(), *directory.glob(f"{_TEMPLATES}/*")]):
        if path.suffix not in _READ_WHOLE or not path.exists():
            continue
        check_regular(path)
        size = path.stat().st_size
        if path.suffix != ".safetensors" and size > _MOST_TEXT_BYTES:
            raise ModelError(
                f"'{path}' has {size} bytes. Expected at most {_MOST_TEXT_BYTES}. Copy or download it again."
            )


def indexed_files(index: Path) -> list[Path]:
    """Returns the weight files that an index names, sorted.

    Raises `ModelError` if the index or a file is missing, or a file lies outside the index's directory.
    """
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{index} has no weight_map. Expected one that gives each tensor's file.")
    names = sorted({str(shard) for shard in weight_map.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ModelError(f"{index} names files outside its directory: {listed(outside)}. Expected plain file names.")
    missing = [name for name in names if not (index.parent / name).is_file()]
    if missing:
        raise ModelError(
            f"'{index.parent}' lacks weight files that its index names: {listed(missing)}. Copy or download them again."
        )
    return [index.parent / name for name in names]


def read_headers(directory: Path) -> dict[str, TensorHeader]:
    """Returns the tensors of all safetensors files of a directory by name; empty for a missing directory."""
    headers: dict[str, TensorHeader] = {}
    for path in sorted(directory.glob("*.safetensors")):
        headers |= tensor_headers(path)
    return headers


def check_architecture(config: Any, name: str, *, is_stateful: bool = False) -> None:
    """Raises `ModelError` for encoder-decoders, and for recurrent layers other than those of `RECURRENT_MODELS`."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"'{name}' is an encoder-decoder model. Expected a decoder-only causal LM.")
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if (is_stateful or foreign) and text.model_type not in RECURRENT_MODELS:
        kinds = f"layers of kind {', '.join(foreign)}" if foreign else "recurrent layers"
        raise ModelError(
            f"'{name}' ({type(text).__name__}) has {kinds}, whose state foretoken cannot keep for each node of a token "
            f"tree. Expected attention in every layer, or one of {', '.join(sorted(RECURRENT_MODELS))}."
        )
    check_sizes(text, name)


def read_config(name: str, revision: str | None = None) -> Any:
    """Returns the configuration of a directory or hub id without running its code.

    Settings of quantization that stand in a file of their own are its `quantization_config`. Raises `ModelError` if the
    configuration cannot be read.
    """
    import transformers

    with foreign_errors_as(ModelError, partial(refusal, f"the configuration of '{name}'")):
        config: Any = transformers.AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        text = config.get_text_config()
    if getattr(config, "quantization_config", None) is None and (settings := _settings_beside(Path(name))):
        config.quantization_config = settings
    if not isinstance(text, transformers.PreTrainedConfig):  # transformers keeps unknown keys with any value
        raise ModelError(
            f"the text configuration inside config.json of '{name}' is {shown(text)}, but its architecture has no such "
            "part. Copy or download config.json again."
        )
    return config


def _settings_beside(directory: Path) -> dict[str, Any] | None:
    """Returns quantization settings of a file of their own; such a file beside other weights is a leftover."""
    for name, method in _SETTINGS.items():
        if (directory / name).is_file() and any(key.endswith(".qweight") for key in read_headers(directory)):
            found = read_json_object(directory / name)
            return {"quant_method": method} | {_SETTINGS_NAMES.get(key, key): each for key, each in found.items()}
    return None


def refusal(what: str, error: Exception) -> str:
    """Returns the message for an error of transformers in a part of a model that may need code of its own."""
    if "trust_remote_code" not in str(error):
        return f"{what} cannot be read: {one_line(error)}."
    return (
        f"{what} needs code that comes with the model, which is never run, also with trust_remote_code=True. Expected "
        "an architecture that transformers has. Load the model with transformers, and pass it as LLM(model, "
        "tokenizer=tokenizer)."
    )
