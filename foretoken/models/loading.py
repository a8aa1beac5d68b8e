"""Loads a causal LM and its tokenizer from a directory or a hub id, strictly and without running their code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache, partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import ModelError, foreign_errors_as, listed, one_line
from foretoken.models.borrowed import shared_copy
from foretoken.models.config import (
    check_architecture,
    check_model_files,
    check_quantization,
    check_readable,
    end_tokens,
    read_config,
    read_headers,
    refusal,
)
from foretoken.models.forward_pass import ATTENTION_NAME
from foretoken.models.loaded import (
    LoadedModel,
    check_memory,
    check_placement,
    gather_weights,
    input_bits,
    keeps_integers,
    resolve_device,
    resolve_dtype,
)
from foretoken.models.names import is_gguf
from foretoken.models.stored.checkpoints import is_stored, open_checkpoint
from foretoken.models.stored.gguf import gguf_tokenizer, lean_file, open_gguf, stored_model
from foretoken.models.stored.gguf_config import read_settings
from foretoken.models.stored.gguf_file import read_gguf
from foretoken.models.weight_files import (
    check_counts,
    check_dtypes,
    check_keys,
    check_shapes,
    check_total,
    check_unused,
    files_identity,
    num_weights,
)

if TYPE_CHECKING:
    from foretoken.decoder.blocks import LeanWeights
    from foretoken.files.bounded_reads import TensorHeader
    from foretoken.models.stored import StoredModel

_STORED_BYTES = {"F64": 8, "F32": 4}  # of a number as safetensors name its dtype; 2 for the others
_log = logging.getLogger(__name__)


def load_model(
    name: str | os.PathLike[str], *, dtype: str = "auto", device: str = "auto", revision: str | None = None,
    rounds_inputs: bool | None = False,
) -> LoadedModel:  # fmt: skip
    """Loads a causal LM into memory; its files may then be changed or removed.

    On CPUs in float32 and bfloat16, matrices that are stored in integers stay so, see `StoredModel`. Elsewhere those of
    a GGUF file are unpacked to the dtype, and transformers loads other formats.

    Args:
        name: A directory in Hugging Face layout, a hub id, or a GGUF file.
        dtype: "auto", see `resolve_dtype` (of a GGUF file bfloat16 on accelerators), or a key of `loaded.DTYPES`.
        device: "auto" (an accelerator if there is one), or a torch device.
        rounds_inputs: Whether matrices that are stored in integers round their inputs to 8 bits, as llama.cpp's do.
            None: if there are such matrices, and kernels for them.

    Raises:
        ModelError: If the model is missing, damaged, incomplete or not safetensors, or its architecture cannot be
            rolled back; or there are no matrices in integers whose inputs could be quantized, or no kernels for them.
    """
    name = os.fspath(name)
    files = files_identity(Path(name))  # before they are read: a change meanwhile makes it another model's
    model = _loaded(name, resolve_device(device), dtype, revision, rounds_inputs)
    return replace(model, files=files)


def _loaded(
    name: str, device: torch.device, wanted: str, revision: str | None, rounds_inputs: bool | None
) -> LoadedModel:
    if is_gguf(name):
        return _gguf_model(name, wanted, device, rounds_inputs)
    check_model_files(name)
    config, headers = read_config(name, revision), read_headers(Path(name))
    dtype = resolve_dtype(wanted, device, is_stored=is_stored(config))
    check_architecture(config, name)
    check_quantization(config, name)
    check_counts(headers, config.get_text_config(), name)
    bits = input_bits(name, rounds_inputs, is_stored=is_stored(config), dtype=dtype, device=device)
    if runs_cpu_kernels(device) and is_stored(config):
        stored = open_checkpoint(name, config, revision).with_inputs(bits)
        return _stored_model(stored, name, dtype, device)
    return _transformers_model(name, config, headers, revision, dtype, device)


def _transformers_model(
    name: str, config: Any, headers: Mapping[str, TensorHeader], revision: str | None, dtype: torch.dtype | str,
    device: torch.device,
) -> LoadedModel:  # fmt: skip
    is_quantized = getattr(config, "quantization_config", None) is not None
    if not is_quantized:
        check_total(name, config, headers)
        itemsize = dtype.itemsize if isinstance(dtype, torch.dtype) else None  # "auto": those of the files
        sizes = ((prod(each.shape), _STORED_BYTES.get(each.dtype, 2)) for each in headers.values())
        check_memory(name, sum(count * (itemsize or own) for count, own in sizes), device)
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()

    def told(error: Exception) -> str:
        if is_quantized and (isinstance(error, ImportError) or "pip install" in str(error)):
            return (
                f"'{name}' is stored in a format that transformers reads with a library that is missing: "
                f"{one_line(error).rstrip('.')}. Install it, see docs/runners.md."
            )
        check_shapes(name, config, headers)  # names the weights if their shapes are wrong
        return f"model '{name}' cannot be loaded: {one_line(error)}. Check that it is complete."

    with foreign_errors_as(ModelError, told):
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            config=config,
            revision=revision,
            dtype=dtype,
            attn_implementation="eager",  # every architecture has this one; see `_plug_in`
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            # Libraries pack weights for the device that they are read to. Others are joined on the host and moved.
            device_map={"": str(device)} if is_quantized else None,
        )
    module, info = loaded
    _check_loaded(info, config, name)
    if not is_quantized:
        check_dtypes(headers, module, name)
    module.to(device)
    gather_weights(module)
    return _ready(module, name)


def _gguf_model(name: str, wanted: str, device: torch.device, rounds_inputs: bool | None) -> LoadedModel:
    settings = read_settings(read_gguf(Path(name)))
    dtype: Any = resolve_dtype(wanted, device, is_stored=settings.file.is_quantized)
    dtype = torch.bfloat16 if dtype == "auto" else dtype
    bits = input_bits(name, rounds_inputs, is_stored=settings.file.is_quantized, dtype=dtype, device=device)
    has_kernels = keeps_integers(dtype, device)
    if not has_kernels:
        check_memory(name, settings.file.num_weights * dtype.itemsize, device)
    file = lean_file(settings, dtype, bits)
    if file is None or not has_kernels:
        return _stored_model(stored_model(settings).with_inputs(bits), name, dtype, device)
    check_memory(name, file.num_bytes, device)
    finish = file.read_beside()

    @cache
    def module() -> nn.Module:
        finish()
        return _stored_model(stored_model(settings).with_inputs(bits), name, dtype, device).module

    def weights(num_positions: int) -> LeanWeights:
        finish()
        return file.weights(num_positions)

    fields = settings.fields
    vocab_size = fields["vocab_size"]
    return LoadedModel(
        make_module=module,
        architecture=settings.model_type,
        sizes={key: value for key, value in fields.items() if isinstance(value, int)},
        num_weights=settings.file.num_weights,
        lean=weights,
        bytes_read=file.bytes_read,
        generation_values={},
        name=name,
        vocab_size=vocab_size,
        context_len=fields["max_position_embeddings"],
        num_layers=fields["num_hidden_layers"],
        dtype=dtype,
        device=device,
        eos_ids=end_tokens(None, SimpleNamespace(**fields), vocab_size=vocab_size, name=name),
        quantization=file.label,
    )


def _stored_model(stored: StoredModel, name: str, dtype: Any, device: torch.device) -> LoadedModel:
    from foretoken.models.stored.building import build, unpacked

    module, info = build(stored, name, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    _check_loaded(info, stored.config, name)
    label: str | None = stored.label
    if not keeps_integers(dtype, device):
        if any(getattr(part, "matrix", None) is not None and part.matrix.input_bits == 8 for part in module.modules()):
            raise ModelError(
                f"'{name}' is stored as {stored.label} and was asked for in {dtype}. It rounds inputs to 8 bits, in "
                "float32 and bfloat16 alone. Pass dtype='bfloat16'."
            )
        before, label = _bytes_of(module), None
        with foreign_errors_as(ModelError, lambda err: f"'{name}' cannot be unpacked to {dtype}: {one_line(err)}."):
            module = unpacked(module, dtype).to(device)
        _log.info(
            "%s: %s is unpacked to %s on '%s', where no kernels read it: %.1f MB of memory instead of %.1f MB",
            name, stored.label, str(dtype).removeprefix("torch."), device, _bytes_of(module) / 1e6, before / 1e6,
        )  # fmt: skip
    gather_weights(module)
    return replace(_ready(module, name), quantization=label)


def _bytes_of(module: nn.Module) -> int:
    return sum(each.nbytes for each in (*module.parameters(), *module.buffers()))


def _check_loaded(info: Any, config: Any, name: str) -> None:
    check_keys(name, missing=info["missing_keys"], misshaped=[str(key) for key in info["mismatched_keys"]])
    check_unused(info["unexpected_keys"], config.get_text_config(), name)
    if info["unexpected_keys"]:
        # A warning only: published checkpoints carry heads and buffers that a plain causal LM does not use.
        _log.warning("%s: unused weights: %s", name, listed(info["unexpected_keys"]))


def fill_model(name: str, tensors: Iterable[tuple[str, torch.Tensor]], *, device: torch.device) -> LoadedModel:
    """Builds a causal LM from copies of all its weights, with the `config.json` of a directory, which names the dtype.

    Raises `ModelError` if the configuration cannot be read, the architecture cannot be served, or weights are missing,
    unknown or of another shape.
    """
    config = read_config(name)
    check_architecture(config, name)
    with torch.device(device):
        module: Any = transformers.AutoModelForCausalLM.from_config(
            config, dtype=config.dtype, attn_implementation="eager"
        )
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
    pass. The model's mode, attention, hooks and configuration are not changed.

    Raises `ModelError` if it is not a causal LM, its architecture cannot be served, or it has another dtype or device
    than asked for.
    """
    model = replace(_ready(shared_copy(module), name), is_borrowed=True)
    check_placement(model, dtype=dtype, device=device)
    return model


def _ready(module: Any, name: str) -> LoadedModel:
    config = module.config.get_text_config()
    check_architecture(module.config, name, is_stateful=bool(getattr(module, "_is_stateful", False)))
    module.eval()
    _plug_in(module, name)
    parameter = next((each for each in module.parameters() if each.is_floating_point()), None)
    if parameter is None:
        raise ModelError(f"'{name}' has no weights of real numbers. Expected a causal LM.")
    vocab_size = module.get_output_embeddings().out_features
    generation = getattr(module, "generation_config", None)
    return LoadedModel(
        make_module=lambda: module,
        architecture=type(module).__name__,
        sizes={key: value for key, value in config.to_dict().items() if isinstance(value, int)},
        num_weights=num_weights(module),
        generation_values={} if generation is None else dict(generation.to_diff_dict()),
        name=name,
        vocab_size=vocab_size,
        context_len=_context_len(config),
        num_layers=config.num_hidden_layers,
        dtype=parameter.dtype,
        device=parameter.device,
        eos_ids=end_tokens(module.generation_config, config, vocab_size=vocab_size, name=name),
    )


def _plug_in(module: Any, name: str) -> None:
    from foretoken.models.plugin import adapt_attention  # imports transformers' models
    from foretoken.models.recurrent import adapt_recurrent_layers

    adapt_recurrent_layers(module)
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
    with foreign_errors_as(ModelError, partial(refusal, f"the tokenizer of '{name}'")):
        return transformers.AutoTokenizer.from_pretrained(name, revision=revision, trust_remote_code=False)


def load_config(name: str) -> Any:
    """Returns the configuration of a model without running its code; raises `ModelError` if it cannot be read."""
    return open_gguf(Path(name)).config if is_gguf(name) else read_config(name)


def load_generation_values(name: str) -> dict[str, Any]:
    """Returns the values in a generation_config.json; raises `ModelError` if it cannot be read."""
    if Path(name).is_dir():
        check_readable(Path(name))
    told = "the generation configuration of '{}' cannot be read: {}. Expected a directory with generation_config.json."
    with foreign_errors_as(ModelError, lambda err: told.format(name, one_line(err).rstrip("."))):
        return dict(transformers.GenerationConfig.from_pretrained(name).to_diff_dict())


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
