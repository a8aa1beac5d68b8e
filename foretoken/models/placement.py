"""Where a model's weights lie: dtypes and devices by name, contiguous blocks, and modules over a caller's weights."""

from __future__ import annotations

import copy
import re
from collections import OrderedDict, defaultdict
from types import MethodType
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, foreign_errors_as, nearest_name_hint, one_line
from foretoken.decoder.memory import has_memory, in_own_memory, lost_memory, plain_tensors
from foretoken.decoder.native_storage import can_store_blocks
from foretoken.decoder.slot_cache import free_bytes

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

_LONGEST_REASON = 100  # characters; a choice: longer messages of torch list all device types


def resolve_dtype(dtype: str, device: torch.device, *, is_stored: bool = False) -> torch.dtype | str:
    """Returns the dtype to load in.

    "auto" is the checkpoint's on an accelerator. On a CPU it is bfloat16 for weights that are stored in integers
    (`is_stored`) where kernels multiply these: inputs are rounded to 16 bits instead of 24, which takes less time for
    several tokens. Otherwise it is float32.
    """
    if dtype == "auto" and device.type == "cpu":
        return torch.bfloat16 if is_stored and can_store_blocks() else torch.float32
    if dtype == "auto":
        return dtype
    if dtype not in DTYPES:
        raise ModelError(f"dtype {shown(dtype)} does not exist. {nearest_name_hint(shown(dtype), [*DTYPES, 'auto'])}")
    return DTYPES[dtype]


def keeps_integers(dtype: torch.dtype | str, device: torch.device) -> bool:
    """Decides whether matrices in integers are multiplied as they are."""
    return runs_cpu_kernels(device) and dtype in (torch.float32, torch.bfloat16)


def input_bits(
    name: str, rounds_inputs: bool | None, *, is_stored: bool, dtype: torch.dtype | str, device: torch.device
) -> int | None:
    """Returns the bits to which matrices in integers round their inputs, None for as many as the dtype has.

    `rounds_inputs`: see `load_model`. Raises `ModelError` if it is true and no kernel rounds inputs for the model.
    """
    has_kernels = is_stored and keeps_integers(dtype, device) and can_store_blocks()
    if not rounds_inputs:
        return 8 if rounds_inputs is None and has_kernels else None
    if not is_stored:
        raise ModelError(
            f"quantization 'a8' was asked for, but '{name}' has no weights in integers. Expected a GGUF file, GPTQ, "
            "AWQ or compressed-tensors. Pass 'w8a8' or 'w4a8', which round the weights too."
        )
    if not has_kernels:
        raise ModelError(
            f"quantization 'a8' was asked for '{name}' in {dtype} on '{device}'. Only the kernels on CPUs round "
            "inputs, of float32 and bfloat16. Pass device='cpu' and dtype='bfloat16', and see `foretoken doctor`."
        )
    return 8


def resolve_device(device: str) -> torch.device:
    """Returns the device to load on, with "auto" an accelerator if any; raises `ModelError` if it is unusable."""
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device == "auto":
        return accelerator or torch.device("cpu")
    try:
        found = torch.device(device)
        torch.empty(1, dtype=torch.float32, device=found).tolist()
    except (RuntimeError, AssertionError, ImportError) as err:
        advice = _usable_devices(accelerator)
        raise ModelError(f"device {shown(device)} cannot be used: {_what_lacks(device, err)}. {advice}") from err
    return found


def _what_lacks(device: str, err: Exception) -> str:
    device_type = device.partition(":")[0]
    if device_type == "meta":
        return "it holds shapes and no numbers"
    if device_type == "cuda" and not torch.cuda.is_available():
        if torch.version.cuda is None and torch.version.hip is None:
            return f"this torch ({torch.__version__}) was built without CUDA"
        return "torch finds no NVIDIA GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"
    said = one_line(err).rstrip("!")
    # For an unknown or missing device torch lists all types or backends, which helps nobody.
    return said if len(said) < _LONGEST_REASON else "this torch cannot compute on it"


def _usable_devices(accelerator: torch.device | None) -> str:
    if accelerator is not None:
        return f"Expected 'auto', 'cpu' or '{accelerator.type}', also with an index of a device that is there."
    return (
        "Expected 'auto' or 'cpu': torch finds no accelerator here. Where there is one, install its driver and the "
        "build of torch for it that https://pytorch.org/get-started/locally shows."
    )


_BLOCK = re.compile(r"(.*?\.\d+)\.")  # the part of a weight's name up to its block's number
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


def check_memory(name: str, num_bytes: int, device: torch.device) -> None:
    """Raises `ModelError` if the weights of a model need more memory than is free, before they are read."""
    free = free_bytes(device)
    if num_bytes > free:
        raise ModelError(
            f"the weights of '{name}' need {num_bytes / 1e9:.1f} GB of memory on '{device}', where {free / 1e9:.1f} GB "
            "are free. Expected at least that and some more for the KV cache. Free memory, or use a file with fewer "
            "bits a weight."
        )


def gather_weights(module: nn.Module) -> None:
    """Moves the weights of each block into one allocation, in place; leaves other devices and tensor subclasses."""
    plain = set(map(id, plain_tensors(module)))
    blocks: dict[tuple[str, torch.dtype], list[Tensor]] = defaultdict(list)
    for name, parameter in module.named_parameters():
        if id(parameter) in plain and parameter.is_cpu:
            match = _BLOCK.match(name)
            blocks["" if match is None else match[1], parameter.dtype].append(parameter)
    for weights in blocks.values():
        _gather(weights)
    for buffer in module.buffers():
        buffer.data = in_own_memory(buffer.data)


def _gather(weights: list[Tensor]) -> None:
    step = _ALIGNMENT // weights[0].itemsize
    starts = [0]
    for weight in weights:
        starts.append(starts[-1] + -(-weight.numel() // step) * step)
    memory = torch.empty(starts[-1], dtype=weights[0].dtype, device="cpu")
    for weight, start in zip(weights, starts, strict=False):
        place = memory[start : start + weight.numel()].view(weight.shape)
        place.copy_(weight.data)
        weight.data = place


def shared_copy(model: Any) -> Any:
    """Copies the structure of a transformers causal LM and shares its weights.

    The copy has its own modules, configuration, mode and attention. Its parameters and buffers lie in the original's
    memory: a weight that is changed in place changes in both, one that is replaced (`model.to(...)`) changes in the
    original alone. Tied weights stay tied. Both call the hooks.

    `torch.compile` and peft adapters may wrap the model. Raises `ModelError` for anything else, and for weights that
    are not in memory, or on several devices.
    """
    source = _plain_model(model)
    with foreign_errors_as(  # an attribute may hold locks, files, generators
        ModelError,
        lambda err: (
            f"{type(source).__name__} holds something that cannot be copied ({type(err).__name__}). Expected a "
            "transformers causal LM as it was loaded. Save it with save_pretrained and pass the directory."
        ),
    ):
        return copy.deepcopy(source, _kept_as_they_are(source))


def _plain_model(model: Any) -> transformers.PreTrainedModel:
    model = getattr(model, "_orig_mod", model)  # torch.compile
    name = type(model).__name__
    if hasattr(model, "peft_config") and hasattr(model, "get_base_model"):
        if any(getattr(config, "is_prompt_learning", False) for config in model.peft_config.values()):
            raise ModelError(
                f"{name} learns prompts, which come before the tokens of every request. Expected a model, or adapters "
                "within its layers (LoRA and its kind)."
            )
        model = model.get_base_model()
    if not isinstance(model, transformers.PreTrainedModel):
        raise ModelError(
            f"a {name} is no transformers model. Expected a causal LM such as AutoModelForCausalLM gives; unwrap it "
            "first where it is inside something else."
        )
    head = model.get_output_embeddings()
    if not isinstance(getattr(head, "weight", None), Tensor):
        raise ModelError(f"{name} has no LM head. Expected a causal LM: load it with AutoModelForCausalLM.")
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if "meta" in devices:
        raise ModelError(
            f"some weights of {name} are on the device 'meta': they were never loaded, or are offloaded. Expected all "
            "weights in memory. Load it without device_map, on one device."
        )
    lost = next((tensor for tensor in plain_tensors(model) if not has_memory(tensor)), None)
    if lost is not None:
        raise ModelError(f"{name} cannot be used: {lost_memory(lost)}")
    if len(devices) > 1:
        raise ModelError(f"{name} is spread over {', '.join(devices)}. Expected all its weights on one device.")
    return model


def _kept_as_they_are(source: nn.Module) -> dict[int, Any]:
    """Returns the memo that makes `copy.deepcopy` share tensors, and hooks, which are not copied."""
    inside = {id(module) for module in source.modules()}
    memo = copies_of_empty_parts(source)
    for module in source.modules():
        for value in (*module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor):
                memo[id(value)] = value
        for parameter in module._parameters.values():
            if parameter is not None:
                memo.setdefault(id(parameter), _alias(parameter))
        merged = getattr(module, "merged_adapters", None)  # peft: the adapters that the shared weight contains
        if isinstance(merged, list):
            memo[id(merged)] = merged
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for hook in hooks.values():
                if not (isinstance(hook, MethodType) and id(hook.__self__) in inside):
                    memo[id(hook)] = hook
    return memo


def copies_of_empty_parts(source: nn.Module) -> dict[int, Any]:
    """Returns a memo for `copy.deepcopy` with copies of a module's empty containers, which take most of its time."""
    return {
        id(value): type(value)()
        for module in source.modules()
        for value in vars(module).values()
        if not value and type(value) in (dict, OrderedDict, set)
    }


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Returns another parameter over the same memory; shares subclasses, which quantized layers use, as they are."""
    if type(parameter) is not nn.Parameter:
        return parameter
    with torch.no_grad():
        return nn.Parameter(parameter.detach(), requires_grad=False)
