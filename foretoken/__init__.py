"""Speculative decoding for any Hugging Face causal LM.

>>> from foretoken import LLM, SamplingParams  # doctest: +SKIP
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["LLM", "ForetokenError", "RequestOutput", "SamplingParams", "StreamChunk"]

if TYPE_CHECKING:
    from foretoken.core.errors import ForetokenError
    from foretoken.core.results import RequestOutput, StreamChunk
    from foretoken.core.sampling_params import SamplingParams
    from foretoken.engine.llm import LLM

_HOMES = {
    "LLM": "foretoken.engine.llm",
    "ForetokenError": "foretoken.core.errors",
    "StreamChunk": "foretoken.core.results",
    "SamplingParams": "foretoken.core.sampling_params",
    "RequestOutput": "foretoken.core.results",
}


def __getattr__(name: str) -> Any:
    """Imports the public names when they are first used, so that the command line starts without torch."""
    from importlib import import_module

    if name == "hf":  # so that `foretoken.hf.accelerate` needs no import of its own
        return import_module("foretoken.hf")
    if name not in _HOMES:
        raise AttributeError(f"module 'foretoken' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
