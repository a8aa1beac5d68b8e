"""Speculative decoding for any Hugging Face causal LM.

>>> from foretoken import LLM, SamplingParams  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "EngineStopped", "ForetokenError", "QueueFull", "RequestOutput", "SamplingParams", "StreamChunk",
    "StructuredOutputsParams",
]  # fmt: skip

if TYPE_CHECKING:
    from foretoken.core.errors import EngineStopped, ForetokenError, QueueFull
    from foretoken.core.results import RequestOutput, StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.core.structured_outputs import StructuredOutputsParams
    from foretoken.engine.async_llm import AsyncLLM
    from foretoken.engine.llm import LLM

_HOMES = {
    "LLM": "foretoken.engine.llm",
    "AsyncLLM": "foretoken.engine.async_llm",
    "EngineStopped": "foretoken.core.errors",
    "ForetokenError": "foretoken.core.errors",
    "QueueFull": "foretoken.core.errors",
    "StreamChunk": "foretoken.core.results",
    "SamplingParams": "foretoken.core.sampling_params",
    "RequestOutput": "foretoken.core.results",
    "StructuredOutputsParams": "foretoken.core.structured_outputs",
}


def __dir__() -> list[str]:
    """What users call; the packages inside are not among it."""
    return sorted([*__all__, "__version__", "hf"])


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that the command line starts without torch."""
    from importlib import import_module

    if name == "hf":  # so that `foretoken.hf.accelerate` needs no import of its own
        return import_module("foretoken.hf")
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
