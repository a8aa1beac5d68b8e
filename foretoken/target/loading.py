"""Loading a causal LM and its tokenizer from a directory or a hub id, strictly and without running its code."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from foretoken.core.errors import ModelError, nearest_name_hint
from foretoken.target.plugin import ATTENTION_NAME

_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$|^[\w.-]+$")
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM ready to run, with the facts that the rest needs.

    Attributes:
        module: The transformers model in evaluation mode, its attention set to the plug-in.
        config: Its text configuration.
        name: Where it came from.
        vocab_size: Width of the logits.
        context_len: Most positions it can embed.
        num_layers: L.
        dtype: Of weights and cache.
        device: Of weights and cache.
        eos_ids: End-of-sequence tokens of its generation configuration.
    """

    module: nn.Module
    config: Any
    name: str
    vocab_size: int
    context_len: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device
    eos_ids: tuple[int, ...]

    @property
    def backbone(self) -> nn.Module:
        """The model without its LM head."""
        backbone: nn.Module = self.module.base_model  # type: ignore[assignment]
        return backbone


def load_model(name: str, *, dtype: str = "auto", device: str = "auto", revision: str | None = None) -> LoadedModel:
    """Loads a causal LM.

    Args:
        name: A directory in Hugging Face layout, or a hub id.
        dtype: "auto" (float32 on CPU, else the checkpoint's), or a key of `DTYPES`.
        device: "auto" (an accelerator where there is one), or a torch device.
        revision: Hub revision.

    Raises:
        ModelError: When the model is missing, damaged, incomplete, not safetensors, or of an architecture that cannot
            be rolled back.
    """
    check_model_files(name)
    config = _load_config(name, revision)
    check_architecture(config, name)
    place = torch.device(_default_device() if device == "auto" else device)
    kind = _resolve_dtype(dtype, place)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            revision=revision,
            dtype=kind,
            attn_implementation=ATTENTION_NAME,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as err:
        raise ModelError(f"model '{name}' cannot be loaded: {_one_line(err)}. Check that it is complete.") from err
    module, info = loaded
    _check_keys(name, info)
    return wrap_model(module.to(place), name=name)


def wrap_model(module: Any, *, name: str) -> LoadedModel:
    """The facts of a transformers causal LM that is already in memory; sets its attention to the plug-in."""
    config = module.config.get_text_config()
    check_architecture(module.config, name, is_stateful=bool(getattr(module, "_is_stateful", False)))
    module.eval()
    if config._attn_implementation != ATTENTION_NAME:
        module.set_attn_implementation(ATTENTION_NAME)
    eos = module.generation_config.eos_token_id if module.generation_config is not None else None
    eos = config.eos_token_id if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)
    parameter = next(module.parameters())
    return LoadedModel(
        module=module,
        config=config,
        name=name,
        vocab_size=module.get_output_embeddings().weight.shape[0],
        context_len=int(getattr(config, "max_position_embeddings", None) or 4096),
        num_layers=config.num_hidden_layers,
        dtype=parameter.dtype,
        device=parameter.device,
        eos_ids=eos_ids,
    )


def load_tokenizer(name: str, revision: str | None = None) -> Any | None:
    """The tokenizer of a model, or None when its directory has none."""
    directory = Path(name)
    if directory.is_dir() and not any(directory.glob("tokenizer*")) and not any(directory.glob("*vocab*")):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelError(f"the tokenizer of '{name}' cannot be loaded: {_one_line(err)}.") from err


def check_model_files(name: str) -> None:
    """Looks at a model directory before any library does, for one clear sentence about what is wrong with it.

    Raises:
        ModelError: When the directory is missing, holds no configuration or no safetensors, or holds a damaged file.
    """
    directory = Path(name)
    if not directory.is_dir():
        if directory.suffix or (len(directory.parts) != 2 and not _HUB_ID.match(name)) or directory.parent.is_dir():
            raise ModelError(
                f"there is no model directory '{name}'. Expected a directory with config.json and safetensors. "
                + _nearby(directory)
            )
        return
    if not (directory / "config.json").is_file():
        raise ModelError(f"'{name}' has no config.json. Expected a model directory in Hugging Face layout.")
    _read_json(directory / "config.json")
    weights = sorted(directory.glob("*.safetensors"))
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
            with safe_open(path, framework="pt") as file:
                file.keys()
        except (SafetensorError, OSError) as err:
            raise ModelError(f"{path} is damaged: {_one_line(err)}. Copy or download it again.") from err


def check_architecture(config: Any, name: str, *, is_stateful: bool = False) -> None:
    """Refuses what cannot be rolled back after a rejected draft.

    Raises:
        ModelError: For encoder-decoder models, recurrent state and attention kinds that are not supported.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"'{name}' is an encoder-decoder model. Expected a decoder-only causal LM.")
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if is_stateful or foreign:
        kinds = f"layers of kind {', '.join(foreign)}" if foreign else "recurrent state"
        raise ModelError(
            f"'{name}' ({type(text).__name__}) has {kinds}, which cannot be rolled back to the accepted tokens after a "
            "rejected draft. Expected full or sliding-window attention in every layer."
        )


def _load_config(name: str, revision: str | None) -> Any:
    """The model's configuration; code named inside it is never run."""
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ModelError(f"the configuration of '{name}' cannot be read: {_one_line(err)}.") from err


def _check_keys(name: str, info: dict[str, Any]) -> None:
    """Raises `ModelError` naming all missing and mis-shaped weights at once; unexpected ones are only logged."""
    missing, misshaped = sorted(info["missing_keys"]), sorted(str(key) for key in info["mismatched_keys"])
    if missing or misshaped:
        parts = [f"missing: {', '.join(missing)}"] * bool(missing) + [f"wrong shape: {', '.join(misshaped)}"] * bool(
            misshaped
        )
        raise ModelError(f"the weights of '{name}' do not fit its config.json: {'; '.join(parts)}.")
    if info["unexpected_keys"]:
        logging.getLogger(__name__).warning("%s: unused weights: %s", name, ", ".join(sorted(info["unexpected_keys"])))


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype to load in; float32 on CPU by default, where it is exact and no slower for small models."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' does not exist. {nearest_name_hint(dtype, [*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def _default_device() -> str:
    """An accelerator where there is one."""
    return str(torch.accelerator.current_accelerator() or "cpu") if torch.accelerator.is_available() else "cpu"


def _nearby(directory: Path) -> str:
    """Names of model directories beside a missing one."""
    siblings = directory.parent.iterdir() if directory.parent.is_dir() else ()
    names = [str(path) for path in siblings if (path / "config.json").is_file()]
    return nearest_name_hint(str(directory), names) if names else "Check the path."


def _read_json(path: Path) -> Any:
    """Parses a JSON file, naming it when it is damaged."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as err:
        raise ModelError(f"{path} is not valid JSON: {err}.") from err


def _one_line(err: BaseException) -> str:
    """The first line of a library's message, without its final stop."""
    text = str(err).strip().splitlines()
    return (text[0] if text else type(err).__name__).rstrip(".")
