"""Everything that touches transformers: loading and checking models, attention plug-in, features, generic decoder.

`accelerate` and `release`, which need the engine, are imported when they are first used.
"""

from importlib import import_module
from typing import Any

__all__ = ["accelerate", "release"]


def __getattr__(name: str) -> Any:
    """The two functions for models in memory."""
    if name not in __all__:
        raise AttributeError(f"module 'foretoken.hf' has no attribute {name!r}")
    return getattr(import_module("foretoken.engine.accelerate"), name)
