"""Loads a causal LM and its tokenizer from a directory or a hub id, strictly and without running their code."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.utils.logging import disable_progress_bar

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.models.config_checks import (
    ATTENTION_LAYERS,
    TWIN_KEY,
    TwinRecord,
    check_model_files,
    check_quantization,
    check_readable,
    check_sizes,
    end_tokens,
    read_twin_record,
)
from foretoken.models.local import is_gguf
from foretoken.models.placement import gather_weights, resolve_device, resolve_dtype, shared_copy
from foretoken.models.plugin import ATTENTION_NAME, adapt_attention
from foretoken.models.quantization.checkpoints import is_stored, open_checkpoint
from foretoken.models.quantization.gguf import gguf_tokenizer, open_gguf
from foretoken.models.quantization.stored import StoredModel, build
from foretoken.models.weight_files import (
    check_counts,
    check_dtypes,
    check_keys,
    check_shapes,
    check_total,
    check_unused,
    files_identity,
    meta_model,
    read_headers,
    settings_beside,
    untied_shapes,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from torch import nn


KVCacheDtype = Literal["auto", "int8"]
HASHED_ROWS = 64  # of the LM head; a choice: enough to tell models apart, read in milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM that is ready to run.

    Attributes:
        module: The transformers model in evaluation mode, with our attention plug-in.
        context_len: Number of positions that it can embed, whatever other sequences of a batch do.
        dtype: Dtype of weights and cache.
        eos_ids: End-of-sequence tokens of its generation configuration.
        is_borrowed: Whether the weights lie in the memory of a caller's model, which must stay as it is.
        quantization: How the matrices were rounded after they were loaded, or the format in which they are stored in
            integers; or None.
        first_head_rows: (HASHED_ROWS, E), rows of the LM head before they were rounded here; None if they were not.
        kv_cache_dtype: "int8" if keys and values are rounded when they are written to the KV cache, each row of a head
            with a scale; "auto" if the cache has the model's dtype.
        files: See `files_identity`; None for weights that came from memory.
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
    is_borrowed: bool = False
    quantization: str | None = None
    first_head_rows: torch.Tensor | None = None
    kv_cache_dtype: KVCacheDtype = "auto"
    files: str | None = None

    @property
    def backbone(self) -> nn.Module:
        """The model without its LM head."""
        backbone: nn.Module = self.module.base_model  # type: ignore[assignment]
        return backbone

    @property
    def generation_values(self) -> dict[str, Any]:
        """The values of the model's generation configuration, by name."""
        config = getattr(self.module, "generation_config", None)
        return {} if config is None else dict(config.to_diff_dict())

    @property
    def cost_twin(self) -> TwinRecord | None:
        """The trained model behind a cost twin; None for other models. Raises `ModelError` for an invalid record."""
        return read_twin_record({TWIN_KEY: getattr(self.config, TWIN_KEY, None)}, self.name)


def load_model(
    name: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", revision: str | None = None
) -> LoadedModel:
    """Loads a causal LM into memory; its files may then be changed or removed.

    On CPUs, matrices that are stored in integers stay so, see `StoredModel`; elsewhere transformers loads them.

    Args:
        name: A directory in Hugging Face layout, a hub id, or a GGUF file.
        dtype: "auto" (float32 on CPU, else the checkpoint's), or a key of `placement.DTYPES`.
        device: "auto" (an accelerator if there is one), or a torch device.

    Raises:
        ModelError: If the model is missing, damaged, incomplete or not safetensors, or its architecture cannot be
            rolled back.
    """
    name = os.fspath(name)
    files = files_identity(Path(name))  # before they are read: a change meanwhile makes it another model's
    model = _loaded(name, resolve_device(device), dtype, revision)
    return replace(model, files=files)


def _loaded(name: str, torch_device: torch.device, dtype: str, revision: str | None) -> LoadedModel:
    torch_dtype = resolve_dtype(dtype, torch_device)
    if is_gguf(name):
        return _stored_model(open_gguf(Path(name)), name, torch_dtype, torch_device)
    check_model_files(name)
    config, headers = load_config(name, revision), read_headers(Path(name))
    check_architecture(config, name)
    check_quantization(config, name)
    check_counts(headers, config.get_text_config(), name)
    if runs_cpu_kernels(torch_device) and is_stored(config):
        return _stored_model(open_checkpoint(name, config, revision), name, torch_dtype, torch_device)
    is_quantised = getattr(config, "quantization_config", None) is not None
    if not is_quantised:
        check_total(name, config, headers)
    if not sys.stderr.isatty():
        disable_progress_bar()

    def told(error: Exception) -> str:
        check_shapes(name, config, headers)  # names the weights if their shapes are wrong
        return f"model '{name}' cannot be loaded: {one_line(error)}. Check that it is complete."

    with foreign_errors_as(ModelError, told):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            revision=revision,
            dtype=torch_dtype,
            attn_implementation="eager",  # every architecture has this one; see `_plug_in`
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    module, info = loaded
    _check_loaded(info, config, name)
    if not is_quantised:
        check_dtypes(headers, module, name)
    module.to(torch_device)
    gather_weights(module)
    return _ready(module, name)


def _stored_model(stored: StoredModel, name: str, dtype: torch.dtype | str, device: torch.device) -> LoadedModel:
    if not runs_cpu_kernels(device) or dtype not in (torch.float32, torch.bfloat16):
        raise ModelError(
            f"'{name}' is stored as {stored.label} and was asked for in {dtype} on '{device}'. Only CPUs have kernels "
            "for it, and inputs are float32 or bfloat16. Pass device='cpu' and dtype='bfloat16'."
        )
    check_architecture(stored.config, name)
    module, info = build(stored, name, dtype)
    _check_loaded(info, stored.config, name)
    gather_weights(module)
    return replace(_ready(module, name), quantization=stored.label)


def _check_loaded(info: Any, config: Any, name: str) -> None:
    check_keys(name, missing=info["missing_keys"], misshaped=[str(key) for key in info["mismatched_keys"]])
    check_unused(info["unexpected_keys"], config.get_text_config(), name)
    if info["unexpected_keys"]:
        # A warning only: published checkpoints carry heads and buffers that a plain causal LM does not use.
        logging.getLogger(__name__).warning("%s: unused weights: %s", name, listed(info["unexpected_keys"]))


def fill_model(name: str, tensors: Iterable[tuple[str, torch.Tensor]], *, device: torch.device) -> LoadedModel:
    """Builds a causal LM from weights in memory.

    Args:
        name: A directory with `config.json`, which also names the dtype.
        tensors: Every weight with its name; each is copied.

    Raises:
        ModelError: If the configuration cannot be read, the architecture cannot be served, or weights are missing,
            unknown or of another shape.
    """
    config = load_config(name)
    check_architecture(config, name)
    with torch.device(device):
        module: Any = AutoModelForCausalLM.from_config(config, dtype=config.dtype, attn_implementation="eager")
    wanted, misshaped, unknown = dict(module.named_parameters()), [], []
    for key, tensor in tensors:
        parameter = wanted.pop(key, None)
        if parameter is None:
            unknown.append(key)
        elif parameter.shape != tensor.shape:
            misshaped.append(f"{key} {list(tensor.shape)} instead of {list(parameter.shape)}")
        else:
            parameter.detach().copy_(tensor)
    check_keys(name, missing=wanted, misshaped=misshaped)
    check_unused(unknown, config.get_text_config(), name)
    gather_weights(module)
    return _ready(module, name)


def wrap_model(module: Any, *, name: str, dtype: str = "auto", device: str = "auto") -> LoadedModel:
    """Makes a target of a transformers causal LM in memory; the caller may go on using the LM.

    The target has its own modules over the same weights, see `shared_copy`. The engine notices in-place writes to
    weights and buffers between passes and drops the old KV rows (`Runner.follow_weights`), but not writes through
    `.data`. Weights may move in memory between passes, as by `share_memory()`; nothing may move or free them during a
    pass.

    Args:
        module: The model. Its mode, attention, hooks and configuration are not changed.
        dtype: "auto", or the name of the model's dtype.
        device: "auto", or the model's device.

    Raises:
        ModelError: If it is not a causal LM, its architecture cannot be served, or it has another dtype or device.
    """
    model = replace(_ready(shared_copy(module), name), is_borrowed=True)
    check_placement(model, dtype=dtype, device=device)
    return model


def check_placement(model: LoadedModel, *, dtype: str, device: str) -> None:
    """Raises `ModelError` if a model in memory has another dtype or device than asked for."""
    if dtype != "auto" and resolve_dtype(dtype, model.device) != model.dtype:
        own = str(model.dtype).removeprefix("torch.")
        raise ModelError(
            f"dtype '{dtype}' was asked for, but {model.name} is in memory as {own}. Expected 'auto' or '{own}'. "
            "Convert it first, or pass the name of the model."
        )
    asked = None if device == "auto" else resolve_device(device)
    if asked is not None and (asked.type != model.device.type or asked.index not in (None, model.device.index)):
        raise ModelError(
            f"device '{device}' was asked for, but {model.name} is on '{model.device}'. Expected 'auto' or "
            f"'{model.device}'. Move it first, or pass the name of the model."
        )


def _ready(module: Any, name: str) -> LoadedModel:
    config = module.config.get_text_config()
    check_architecture(module.config, name, is_stateful=bool(getattr(module, "_is_stateful", False)))
    module.eval()
    _plug_in(module, name)
    parameter = next((each for each in module.parameters() if each.is_floating_point()), None)
    if parameter is None:
        raise ModelError(f"'{name}' has no weights of real numbers. Expected a causal LM.")
    vocab_size = module.get_output_embeddings().out_features
    return LoadedModel(
        module=module,
        config=config,
        name=name,
        vocab_size=vocab_size,
        context_len=_context_len(config),
        num_layers=config.num_hidden_layers,
        dtype=parameter.dtype,
        device=parameter.device,
        eos_ids=end_tokens(module.generation_config, config, vocab_size=vocab_size, name=name),
    )


def _plug_in(module: Any, name: str) -> None:
    if adapt_attention(module):
        module.config._attn_implementation = "eager"
        return
    module.set_attn_implementation(ATTENTION_NAME)
    if module.config.get_text_config()._attn_implementation != ATTENTION_NAME:
        raise ModelError(
            f"'{name}' ({type(module).__name__}) ignores the attention plug-in: transformers computes attention inside "
            "this architecture, where token trees cannot be shown to it. It cannot be used as a target."
        )


def load_tokenizer(name: str, revision: str | None = None) -> Any | None:
    """Returns the tokenizer of a model, None if its directory has none; raises `ModelError` if it is damaged."""
    directory = Path(name)
    if is_gguf(name):
        return gguf_tokenizer(directory)
    if directory.exists() and not directory.is_dir():
        raise ModelError(f"'{name}' is no directory. Expected one with tokenizer files, a GGUF file, or a hub id.")
    if directory.is_dir():
        check_readable(directory)
    if directory.is_dir() and not any(directory.glob("tokenizer*")) and not any(directory.glob("*vocab*")):
        return None
    with foreign_errors_as(ModelError, partial(_refusal, f"the tokenizer of '{name}'")):
        return AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def check_architecture(config: Any, name: str, *, is_stateful: bool = False) -> None:
    """Raises `ModelError` for encoder-decoders, recurrent state and other layers that cannot be rolled back."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"'{name}' is an encoder-decoder model. Expected a decoder-only causal LM.")
    text = config.get_text_config()
    foreign = sorted(set(getattr(text, "layer_types", None) or ()) - ATTENTION_LAYERS)
    if is_stateful or foreign:
        kinds = f"layers of kind {', '.join(foreign)}" if foreign else "recurrent state"
        raise ModelError(
            f"'{name}' ({type(text).__name__}) has {kinds}, which cannot be rolled back to the accepted tokens after a "
            "rejected draft. Expected full or sliding-window attention in every layer."
        )
    check_sizes(text, name)


def load_config(name: str, revision: str | None = None) -> Any:
    """Returns the model's configuration without running its code; raises `ModelError` if it cannot be read."""
    if is_gguf(name):
        return open_gguf(Path(name)).config
    with foreign_errors_as(ModelError, partial(_refusal, f"the configuration of '{name}'")):
        config: Any = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
        text = config.get_text_config()
    if getattr(config, "quantization_config", None) is None and (settings := settings_beside(Path(name))):
        config.quantization_config = settings
    if not isinstance(text, PreTrainedConfig):  # transformers keeps unknown keys with any value
        raise ModelError(
            f"the text configuration inside config.json of '{name}' is {shown(text)}, which its architecture does not "
            "have. Expected none. Copy or download config.json again."
        )
    return config


def _refusal(what: str, error: Exception) -> str:
    if "trust_remote_code" not in str(error):
        return f"{what} cannot be read: {one_line(error)}."
    return (
        f"{what} needs code that comes with the model, which is never run, also with trust_remote_code=True. Expected "
        "an architecture that transformers has. Load the model with transformers, and pass it as LLM(model, "
        "tokenizer=tokenizer)."
    )


def load_generation_values(name: str) -> dict[str, Any]:
    """Returns the values in a generation_config.json; raises `ModelError` if it cannot be read."""
    if Path(name).is_dir():
        check_readable(Path(name))
    told = "the generation configuration of '{}' cannot be read: {}. Expected a directory with generation_config.json."
    with foreign_errors_as(ModelError, lambda err: told.format(name, one_line(err).rstrip("."))):
        return dict(GenerationConfig.from_pretrained(name).to_diff_dict())


def _context_len(config: Any) -> int:
    """Returns the number of positions at which a token's embedding depends on its position alone.

    LongRoPE switches the whole batch to other frequencies past the pretrained length, so the context ends there.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 4096)
    rope = getattr(config, "rope_parameters", None) or {}
    for part in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if part.get("rope_type") == "longrope":
            longest = min(longest, int(part["original_max_position_embeddings"]))
    return longest


class WeightFindings(NamedTuple):
    """The findings in a target's weights.

    `findings`: tensors that are missing, of a wrong shape or dtype, or not finite. `warnings`: tensors that the
    architecture does not use; published checkpoints carry some.
    """

    findings: list[str]
    warnings: list[str]


def weight_findings(directory: Path) -> WeightFindings:
    """Compares the safetensors of a model directory with its architecture; reads one tensor at a time.

    Raises `ModelError` if there is nothing to compare with: quantised weights, architectures that cannot be built, and
    weights stored under other names.
    """
    config, headers = load_config(str(directory)), read_headers(directory)
    check_architecture(config, str(directory))
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"the weights of '{directory}' are quantised, which --verify cannot compare with the architecture. Load "
            "the model with `foretoken generate` to see whether they fit, or leave --verify out."
        )
    not_finite = list(_not_finite(directory))
    if (more := _told(lambda: check_counts(headers, config.get_text_config(), str(directory)))) is not None:
        return WeightFindings([more, *not_finite], [])  # before the layers are built one by one
    module: Any = meta_model(config)
    if module is None:
        raise ModelError(
            f"the architecture of '{directory}' cannot be built, so --verify has nothing to compare its weights with. "
            "Expected a causal LM of transformers. Leave --verify out."
        )
    shapes, used = untied_shapes(module), set(module.state_dict())
    names = {_named(key, used, str(getattr(module, "base_model_prefix", ""))): key for key in headers}
    missing, unused = sorted(shapes.keys() - names.keys()), sorted(names.keys() - used)
    if missing and unused and get_model_conversion_mapping(module, add_legacy=False):
        raise ModelError(
            f"the weights of '{directory}' are stored under other names than its architecture's, which --verify cannot "
            "compare. Load the model with `foretoken generate` to see whether they fit, or leave --verify out."
        )
    findings = [f"{key} is missing, of shape {list(shapes[key])}" for key in missing]
    findings += [
        f"{names[key]} has shape {list(headers[names[key]].shape)} instead of {list(shape)}"
        for key, shape in shapes.items()
        if key in names and headers[names[key]].shape != shape
    ]
    more = _told(lambda: check_dtypes(headers, module, str(directory)))
    extra = _told(lambda: check_unused(unused, config.get_text_config(), str(directory)))
    findings += [each for each in (more, extra) if each is not None]
    return WeightFindings([*findings, *not_finite], [f"{names[key]} is not used" for key in unused])


def _told(check: Callable[[], None]) -> str | None:
    try:
        check()
    except ModelError as err:
        return str(err)
    return None


def _named(key: str, used: set[str], prefix: str) -> str:
    names = (key, f"{prefix}.{key}", key.removeprefix(f"{prefix}."))
    return next((name for name in names if name in used), key)


def _not_finite(directory: Path) -> Iterator[str]:
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_tensor(key)
                if tensor.is_floating_point():
                    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
                    if wrong:
                        yield f"{key} holds {wrong} numbers that are not finite"
