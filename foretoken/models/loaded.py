"""A loaded model, and where its weights lie: dtypes and devices by name, contiguous blocks."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.checks import shown
from foretoken.core.errors import ModelError, nearest_name_hint, one_line
from foretoken.decoder.memory import in_own_memory, plain_tensors
from foretoken.decoder.quantized import can_store_blocks
from foretoken.decoder.slot_cache import free_bytes
from foretoken.models.config import TWIN_KEY, TwinRecord, read_twin_record

if TYPE_CHECKING:
    from foretoken.decoder.blocks import LeanWeights

KVCacheDtype = Literal["auto", "int8"]
HASHED_ROWS = 64  # of the LM head; a choice: enough to tell models apart, read in milliseconds
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "float64")}
_LONGEST_REASON = 100  # characters; a choice: longer messages of torch list all device types
_BLOCK = re.compile(r"(.*?\.\d+)\.")  # the part of a weight's name up to its block's number
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector register


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A causal LM that is ready to run.

    Attributes:
        make_module: Returns `module`, always the same one.
        architecture: The class of the module, or the model type in a file that was read without transformers.
        sizes: Whole numbers of the configuration, by name.
        num_weights: Of the model.
        lean: Reads the weights for lean decoders without `module`, see `LeanFile.weights`; None: they are found in it.
        bytes_read: Returns the bytes read so far and the bytes of all matrices; None if all were read.
        generation_values: The values of the model's generation configuration, by name.
        context_len: Number of positions that it can embed, whatever other sequences of a batch do.
        dtype: Dtype of weights and cache.
        eos_ids: End-of-sequence tokens of its generation configuration.
        is_borrowed: Whether the weights lie in the memory of a caller's model, which must stay as it is.
        quantization: How the matrices were quantized after they were loaded, or the format in which they are stored in
            integers; or None.
        first_head_rows: (HASHED_ROWS, E), rows of the LM head before they were quantized here; None if they were not.
        kv_cache_dtype: "int8" if keys and values are quantized when they are written to the KV cache, each row of a
            head with a scale; "auto" if the cache has the model's dtype.
        files: See `files_identity`; None for weights that came from memory.
        stored: The model with the integers that this one's weights stand for; None if it was not unpacked from any.
    """

    make_module: Callable[[], nn.Module]
    architecture: str
    sizes: Mapping[str, int]
    num_weights: int
    lean: Callable[[int], LeanWeights] | None = None
    bytes_read: Callable[[], tuple[int, int]] | None = None
    generation_values: Mapping[str, Any]
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
    stored: LoadedModel | None = None

    @property
    def module(self) -> nn.Module:
        """The transformers model in evaluation mode, with our attention plug-in."""
        return self.make_module()

    @property
    def config(self) -> Any:
        """The text configuration of `module`."""
        module: Any = self.module
        return module.config.get_text_config()

    @property
    def backbone(self) -> nn.Module:
        """The model without its LM head."""
        backbone: nn.Module = self.module.base_model  # type: ignore[assignment]
        return backbone

    @property
    def cost_twin(self) -> TwinRecord | None:
        """The trained model behind a cost twin; None for other models. Raises `ModelError` for an invalid record."""
        return None if self.lean else read_twin_record({TWIN_KEY: getattr(self.config, TWIN_KEY, None)}, self.name)


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
    for (_, dtype), weights in blocks.items():
        step = _ALIGNMENT // dtype.itemsize
        sizes = [-(-weight.numel() // step) * step for weight in weights]
        memory = torch.empty(sum(sizes), dtype=dtype, device="cpu")
        for weight, part in zip(weights, memory.split(sizes), strict=True):
            own = part[: weight.numel()].view(weight.shape)
            own.copy_(weight.data)
            weight.data = own
    for buffer in module.buffers():
        buffer.data = in_own_memory(buffer.data)


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
