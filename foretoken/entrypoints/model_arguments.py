"""Checks the arguments of `LLM`; loads model and tokenizer in any form, and the sampling defaults."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch

from foretoken.core.backend import is_out_of_memory
from foretoken.core.checks import check_boolean, check_integer, check_number, check_text, shown
from foretoken.core.errors import ConfigError, ModelError, RequestError, nearest_name_hint
from foretoken.core.sampling_params import SamplingParams
from foretoken.entrypoints.drafter_files import check_is_no_head, exists
from foretoken.models.loaded import KVCacheDtype, LoadedModel, check_placement
from foretoken.models.loading import load_generation_values, load_model, load_tokenizer, wrap_model
from foretoken.models.making.in_memory import RoundsInputs, check_quantization_name, quantize_model
from foretoken.models.names import resolve_model
from foretoken.text.prompts import check_vocabulary

if TYPE_CHECKING:
    from foretoken.decoder.quantized import Quantization

_DTYPE_NAMES = {"half": "float16", "float": "float32", "double": "float64"}  # names of vLLM and torch

# Keys of a generation configuration and their fields of `SamplingParams`; vLLM reads the same keys.
_SAMPLING = {name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")} | {
    "max_new_tokens": "max_tokens"
}


_INTEGERS = {  # least and greatest values of arguments that may be None
    "max_num_seqs": (1, 1 << 16),
    "max_model_len": (8, math.inf),  # the check of the decoder at load needs 8 tokens
    "max_num_batched_tokens": (1, math.inf),
    "kv_cache_memory_bytes": (1, math.inf),
    "seed": (-math.inf, math.inf),
}


def check_engine_arguments(given: Mapping[str, Any]) -> None:
    """Raises `ConfigError` if an argument of `LLM` has a wrong type, is out of range, or excludes another one."""
    if given["speculative_config"] is not None and given["drafter"] is not None:
        raise ConfigError("speculative_config and drafter exclude each other. Pass one of them.")
    for name, (least, most) in _INTEGERS.items():
        if given[name] is not None:
            check_integer(name, given[name], least, most, error=ConfigError)
    if given["gpu_memory_utilization"] is not None:
        check_number(
            "gpu_memory_utilization", given["gpu_memory_utilization"], 0.0, 1.0, low_open=True, error=ConfigError
        )
    check_text("runner", given["runner"], error=ConfigError)
    for name in ("enable_prefix_caching", "trust_drafter", "allow_unknown_ids", "trace"):
        if given[name] is not None or name != "enable_prefix_caching":
            check_boolean(name, given[name], error=ConfigError)
    for name, expected in (("drafter", "makes one"), ("on_step", "takes a StepRecord")):
        if given[name] is not None and not callable(given[name]):
            raise ConfigError(f"{name} is {shown(given[name])}. Expected a function that {expected}.")
    if given["trace"] and given["on_step"] is None:
        raise ConfigError("trace is True but there is no on_step to get the traces. Pass on_step, or leave trace out.")


def check_context_len(max_model_len: int | None, target: LoadedModel) -> None:
    """Raises `ConfigError` if sequences of `max_model_len` tokens exceed the context of the model."""
    if max_model_len is not None and max_model_len > target.context_len:
        raise ConfigError(
            f"max_model_len is {shown(max_model_len)}, but '{target.name}' has a context of {target.context_len} "
            "tokens. Expected at most that. Leave it out for the model's limit."
        )


@contextmanager
def enough_memory(target: LoadedModel, num_slots: int, max_model_len: int | None) -> Iterator[None]:
    """Turns failed allocations for sequences of a target into `ModelError`."""
    try:
        yield
    except (MemoryError, RuntimeError) as err:
        if not is_out_of_memory(err):
            raise
        raise ModelError(
            f"there is no memory for the KV rows and tables of '{target.name}', {num_slots} x "
            f"{max_model_len or target.context_len} tokens. Expected more free memory, or a smaller max_model_len or "
            "max_num_seqs."
        ) from err


def located(what: str, model: Any, revision: Any = None) -> Any:
    """Returns the path of a model that is given by its name, see `resolve_model`; other values as they are.

    `what` names the argument. Raises `ConfigError` for a name that the file system refuses, `ModelError` if there is no
    such model.
    """
    if not isinstance(model, str | os.PathLike) or not os.fspath(model):
        return model
    return resolve_model(checked_path(what, model), revision if isinstance(revision, str) else None)


def target_model(
    model: Any, dtype: Any, device: Any, revision: Any = None, quantization: Any = None, kv_cache_dtype: Any = None
) -> LoadedModel:
    """Returns the target; loads it if needed. Arguments as in `LLM`.

    Raises `ConfigError` for arguments of another form, `ModelError` if the model cannot be loaded or quantized, or is
    in memory with another dtype, device or quantization.
    """
    wanted, kv_wanted = check_quantization_name(quantization), _kv_cache_dtype(kv_cache_dtype)
    loaded = _quantized_model(_loaded_model(model, dtype, device, revision, wanted == "a8"), model, wanted)
    return replace(loaded, kv_cache_dtype=kv_wanted) if kv_wanted != "auto" else loaded


def _kv_cache_dtype(value: Any) -> KVCacheDtype:
    if value is None or value in get_args(KVCacheDtype):
        return "auto" if value is None else value
    raise ConfigError(
        f"kv_cache_dtype is {shown(value)}. Expected auto for the model's dtype, or int8. Leave it out for auto."
    )


def _quantized_model(loaded: LoadedModel, model: Any, wanted: Quantization | RoundsInputs | None) -> LoadedModel:
    if wanted is None or wanted == loaded.quantization:
        return loaded
    if wanted == "a8":
        if not isinstance(model, str | os.PathLike):
            raise ModelError(
                f"quantization 'a8' was asked for, but '{loaded.name}' is in memory. Expected the name of a model: its "
                "inputs are quantized from the start. Pass its file or directory."
            )
        return loaded
    if loaded.quantization is not None:
        raise ModelError(
            f"quantization '{wanted}' was asked for, but '{loaded.name}' is in memory as {loaded.quantization}. "
            "Expected the same or None. Load it again."
        )
    if loaded is model:  # the caller's, who may use it as it is
        loaded = wrap_model(loaded.module, name=loaded.name)
    return quantize_model(loaded, wanted)


def _loaded_model(model: Any, dtype: Any, device: Any, revision: Any, rounds_inputs: bool) -> LoadedModel:
    dtype, device = _dtype_name(dtype), _device_name(device)
    _check_revision("revision", revision, "model", model)
    if isinstance(model, LoadedModel):
        check_placement(model, dtype=dtype, device=device)
        return model
    if isinstance(model, torch.nn.Module):
        return wrap_model(model, name=type(model).__name__, dtype=dtype, device=device)
    if isinstance(model, str | os.PathLike):
        name = checked_path("model", model)
        return load_model(name, dtype=dtype, device=device, revision=revision, rounds_inputs=rounds_inputs)
    raise ConfigError(f"model is {shown(model)}. Expected a directory, a hub id, or a transformers causal LM.")


def load_target(
    model: str | os.PathLike[str],
    *,
    dtype: Any = "auto",
    device: Any = "auto",
    quantization: Any = None,
    kv_cache_dtype: Any = None,
    unpacks: bool = False,
) -> tuple[LoadedModel, Any]:
    """Loads a target and its tokenizer from files; arguments as in `LLM`. With `unpacks` see `unpacked_model`.

    Raises:
        ConfigError: When the directory holds a draft head, or an argument has another form.
        ModelError: When the model cannot be loaded, or the device does not exist.
        RequestError: When the model has no tokenizer.
    """
    try:
        target = target_model(model, dtype, device, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    except ModelError:
        check_is_no_head(os.fspath(model))  # a better error for a draft head
        raise
    tokenizer = target_tokenizer(None, model)
    if tokenizer is None:
        raise RequestError(f"'{model}' has no tokenizer. Expected tokenizer files beside the weights.")
    if unpacks:
        from foretoken.models.smaller import unpacked_model  # for training alone

        target = unpacked_model(target)
    return target, tokenizer


def directory_of(model: Any) -> str | None:
    """Returns the directory or hub id of a target; None for a model in memory without a local directory."""
    if isinstance(model, LoadedModel):
        return model.name
    if not isinstance(model, torch.nn.Module):
        return os.fspath(model) if isinstance(model, str | os.PathLike) and os.fspath(model) else None
    name = getattr(model, "name_or_path", None)
    return name if isinstance(name, str) and name and exists(name) else None


def target_tokenizer(given: Any, model: Any, revision: Any = None, tokenizer_revision: Any = None) -> Any:
    """Returns the tokenizer: the given one, or loaded by path, else the model's own (None for a model in memory).

    Without `tokenizer_revision` the model's own tokenizer has the revision of the model. Raises `ConfigError` for
    arguments of another form, `ModelError` when the tokenizer cannot be loaded.
    """
    _check_revision("tokenizer_revision", tokenizer_revision, "tokenizer", model if given is None else given)
    path = located("tokenizer", given, tokenizer_revision)
    name = model if path is None else path
    if isinstance(name, str | os.PathLike):
        is_own = path is None or path == model
        return load_tokenizer(checked_path("tokenizer", name), tokenizer_revision or (revision if is_own else None))
    if given is not None and not (callable(given) and callable(getattr(given, "decode", None))):
        raise ConfigError(f"tokenizer is {shown(given)}. Expected a transformers tokenizer, or a directory or hub id.")
    check_vocabulary(given)
    return given


def sampling_defaults(target: LoadedModel, generation_config: Any, override: Any) -> dict[str, Any]:
    """Returns the model's defaults for `SamplingParams`, by field; arguments as in `LLM`.

    Raises `ConfigError` for arguments that have another form or do not fit, `ModelError` if the configuration cannot be
    read.
    """
    if not isinstance(generation_config, str | os.PathLike):
        raise ConfigError(f"generation_config is {shown(generation_config)}. Expected 'auto', 'vllm', or a directory.")
    values = dict(target.generation_values) if generation_config == "auto" else {}
    if generation_config not in ("auto", "vllm"):
        values = load_generation_values(checked_path("generation_config", generation_config))
    values |= _overriding(override)
    found = {field: values[name] for name, field in _SAMPLING.items() if values.get(name) is not None}
    try:
        SamplingParams(**found)
    except RequestError as err:
        raise ConfigError(
            f"the sampling defaults of '{target.name}' do not fit: {err} Correct them by override_generation_config or "
            "in generation_config.json, or pass generation_config='vllm' to leave them out."
        ) from err
    return found


def _overriding(given: Any) -> dict[str, Any]:
    values = {} if given is None else given
    if isinstance(given, str):
        try:
            values = json.loads(given)
        except (ValueError, RecursionError):
            values = None
    if not isinstance(values, Mapping):
        expected = 'Expected a mapping, or its JSON, as {"temperature": 0.7}.'
        raise ConfigError(f"override_generation_config is {shown(given)}. {expected}")
    for name in values:
        if name not in _SAMPLING:
            hint = nearest_name_hint(str(name), _SAMPLING)
            raise ConfigError(f"override_generation_config has {shown(name)}, which says nothing of sampling. {hint}")
    return dict(values)


def checked_path(what: str, path: str | os.PathLike[Any]) -> str:
    """Returns a path or hub id as text; raises `ConfigError` for text that the file system refuses. `what` names it."""
    name = os.fspath(path)
    check_text(what, name, error=ConfigError)
    if name and name.splitlines() != [name]:
        raise ConfigError(f"{what} is {shown(name)}, which has a line break. Expected a path, or a hub id.")
    try:
        os.stat(name)  # noqa: PTH116 - pathlib hides some errors
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass  # a hub id, or a mistake that a later check explains better
    except (OSError, ValueError) as err:
        reason = err.strerror if isinstance(err, OSError) else str(err)
        raise ConfigError(f"{what} is {shown(name)}, which no file can be called: {reason}. Expected a path.") from err
    return name


def _check_revision(what: str, revision: Any, owner: str, name: Any) -> None:
    if revision is None:
        return
    check_text(what, revision, error=ConfigError)
    if not isinstance(name, str | os.PathLike):
        raise ConfigError(f"{what} is {shown(revision)}, but {owner} is in memory. Expected a hub id. Leave it out.")


def _dtype_name(dtype: Any) -> str:
    if isinstance(dtype, torch.dtype):
        return str(dtype).removeprefix("torch.")
    if not isinstance(dtype, str):
        raise ConfigError(f"dtype is {shown(dtype)}. Expected a name such as 'bfloat16', or a torch dtype.")
    return _DTYPE_NAMES.get(dtype, dtype)


def _device_name(device: Any) -> str:
    if not isinstance(device, str | torch.device):
        raise ConfigError(f"device is {shown(device)}. Expected a name such as 'cpu', or a torch device.")
    return str(device)
