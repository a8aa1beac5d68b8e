"""Loading a causal LM and its tokenizer from a directory or a hub id, strictly and without running its code."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from foretoken.core.errors import ModelError, nearest_name_hint
from foretoken.target.model_files import check_model_files, one_line
from foretoken.target.plugin import ATTENTION_NAME

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
        context_len: Most positions it can embed, whatever the other sequences of a batch.
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
    place = _resolve_device(device)
    kind = _resolve_dtype(dtype, place)
    config = load_config(name, revision)
    check_architecture(config, name)
    if not sys.stderr.isatty():
        disable_progress_bar()
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
    except Exception as err:  # damaged files and configurations raise anything inside transformers
        _check_shapes(name, config)
        raise ModelError(f"model '{name}' cannot be loaded: {one_line(err)}. Check that it is complete.") from err
    module, info = loaded
    _check_keys(name, missing=info["missing_keys"], misshaped=[str(key) for key in info["mismatched_keys"]])
    if info["unexpected_keys"]:
        # No error: published checkpoints carry extra heads and buffers that a plain causal LM has no use for.
        logging.getLogger(__name__).warning("%s: unused weights: %s", name, ", ".join(sorted(info["unexpected_keys"])))
    return wrap_model(module.to(place), name=name)


def wrap_model(module: Any, *, name: str) -> LoadedModel:
    """The facts of a transformers causal LM that is already in memory; sets its attention to the plug-in."""
    config = module.config.get_text_config()
    check_architecture(module.config, name, is_stateful=bool(getattr(module, "_is_stateful", False)))
    module.eval()
    if config._attn_implementation != ATTENTION_NAME:
        module.set_attn_implementation(ATTENTION_NAME)
    eos = module.generation_config.eos_token_id if module.generation_config is not None else None
    eos = getattr(config, "eos_token_id", None) if eos is None else eos
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (eos,)
    parameter = next(module.parameters())
    return LoadedModel(
        module=module,
        config=config,
        name=name,
        vocab_size=module.get_output_embeddings().out_features,
        context_len=_context_len(config),
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
    except Exception as err:  # damaged files raise anything inside tokenizers, even bare Exception
        raise ModelError(f"the tokenizer of '{name}' cannot be loaded: {one_line(err)}.") from err


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


def load_config(name: str, revision: str | None = None) -> Any:
    """The model's configuration; code named inside it is never run.

    Raises:
        ModelError: When it cannot be read or makes no sense.
    """
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as err:  # a field of the wrong type raises anything, ZeroDivisionError included
        raise ModelError(f"the configuration of '{name}' cannot be read: {one_line(err)}.") from err


def _check_keys(name: str, *, missing: Iterable[str], misshaped: Iterable[str]) -> None:
    """Raises `ModelError` naming all missing and mis-shaped weights at once."""
    groups = {"missing": sorted(missing), "wrong shape": sorted(misshaped)}
    parts = [f"{kind}: {', '.join(keys)}" for kind, keys in groups.items() if keys]
    if parts:
        raise ModelError(
            f"the weights of '{name}' do not fit its config.json: {'; '.join(parts)}. "
            "Expected every weight of the architecture. Copy or download the model again."
        )


def _check_shapes(name: str, config: Any) -> None:
    """Names the weights behind a failed load, where file headers and architecture tell them; else does nothing.

    transformers stops at a wrong shape without naming it, and would allocate whatever a damaged configuration asks
    for if told to go on. It also renames some weights while loading: a name that only the files know says nothing.
    """
    try:
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
    except Exception:  # noqa: BLE001 - then the architecture was the error, and the caller says so
        return
    found: dict[str, tuple[int, ...]] = {}
    for path in Path(name).glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            found |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
    wanted = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    misshaped = [
        f"{key} {list(found[key])} instead of {list(shape)}"
        for key, shape in wanted.items()
        if found.get(key, shape) != shape
    ]
    if misshaped:
        missing = wanted.keys() - found.keys() - getattr(module, "all_tied_weights_keys", {}).keys()
        _check_keys(name, missing=missing, misshaped=misshaped)


def _context_len(config: Any) -> int:
    """Positions at which a token's embedding depends on nothing but its position.

    LongRoPE has two sets of frequencies and takes the long one for the whole batch once any position is past the
    pretrained length: neighbours and drafted nodes would change a sequence's text, so the context ends before that.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 4096)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            longest = min(longest, int(part["original_max_position_embeddings"]))
    return longest


def _resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """The dtype to load in; float32 on CPU by default, where it is exact and no slower for small models."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in DTYPES:
        raise ModelError(f"dtype '{dtype}' does not exist. {nearest_name_hint(dtype, [*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def _resolve_device(device: str) -> torch.device:
    """The device to load on; with "auto" an accelerator where there is one."""
    if device == "auto":
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return accelerator or torch.device("cpu")
    try:
        place = torch.device(device)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ImportError) as err:
        raise ModelError(
            f"device '{device}' cannot be used: {one_line(err)}. Expected 'auto', 'cpu' or an accelerator of this "
            "machine, such as 'cuda'."
        ) from err
    return place
