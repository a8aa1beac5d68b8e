"""Speculative decoding for Hugging Face causal LMs and GGUF files.

>>> from foretoken import LLM, SamplingParams  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"
__all__ = [
    "LLM", "AsyncEngineArgs", "AsyncLLM", "CompletionOutput", "EngineArgs", "EngineStopped", "ForetokenError",
    "PromptType", "QueueFull", "RequestOutput", "RequestOutputKind", "SamplingParams", "StreamChunk",
    "StructuredOutputsParams", "TextPrompt", "TokensPrompt", "TrainingResult", "train",
]  # fmt: skip

if TYPE_CHECKING:
    from foretoken.core.errors import EngineStopped, ForetokenError, QueueFull
    from foretoken.entrypoints.async_llm import AsyncLLM
    from foretoken.entrypoints.llm import LLM, AsyncEngineArgs, EngineArgs
    from foretoken.inputs import PromptType, TextPrompt, TokensPrompt
    from foretoken.outputs import CompletionOutput, RequestOutput, StreamChunk
    from foretoken.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
    from foretoken.training.report import TrainingResult
    from foretoken.training.train import train

_HOMES = {
    "foretoken.core.errors": ("EngineStopped", "ForetokenError", "QueueFull"),
    "foretoken.entrypoints.async_llm": ("AsyncLLM",),
    "foretoken.entrypoints.llm": ("LLM", "AsyncEngineArgs", "EngineArgs"),
    "foretoken.inputs": ("PromptType", "TextPrompt", "TokensPrompt"),
    "foretoken.outputs": ("CompletionOutput", "RequestOutput", "StreamChunk"),
    "foretoken.training.report": ("TrainingResult",),
    "foretoken.training.train": ("train",),
    "foretoken.sampling_params": ("RequestOutputKind", "SamplingParams", "StructuredOutputsParams"),
}


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__", "hf"])


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that the command line starts without torch."""
    from importlib import import_module

    if name == "hf":  # so that `foretoken.hf.accelerate` needs no import of its own
        return import_module("foretoken.hf")
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
