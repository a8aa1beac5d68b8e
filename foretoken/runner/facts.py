"""What passes of a decoder on a model depend on: the keys of stored costs and of passed self-tests."""

from __future__ import annotations

import hashlib
import json
import os
from typing import TYPE_CHECKING, Any

import torch

from foretoken.core.backend import has_cuda_runtime
from foretoken.decoder.library import kernels_version

if TYPE_CHECKING:
    from foretoken.models.loading import LoadedModel


def facts_of_passes(model: LoadedModel, decoder: str) -> dict[str, Any]:
    """Returns the machine, the kernels, and the model's architecture and sizes, JSON-ready; weights do not count."""
    return {
        "torch": torch.__version__,
        "processor": sorted((name, str(value)) for name, value in torch.cpu.get_capabilities().items()),
        "device": torch.cuda.get_device_name(model.device) if has_cuda_runtime(model.device) else str(model.device),
        "threads": torch.get_num_threads(),
        "runner": decoder,
        "kernels": kernels_version(),
        "sanitizers": os.environ.get("FORETOKEN_SANITIZE", "0") != "0",
        "architecture": model.architecture,
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": model.kv_cache_dtype,
        "sizes": sorted(model.sizes.items()),
    }


def as_key(facts: dict[str, Any]) -> str:
    """Returns a digest of facts."""
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]
