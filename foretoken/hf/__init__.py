"""Makes the `generate` of a transformers model speculative: `accelerate` and `release`, imported when first used."""

from typing import TYPE_CHECKING, Any

__all__ = ["accelerate", "release"]


if TYPE_CHECKING:
    from foretoken.hf.acceleration import accelerate, release


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'foretoken.hf' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("foretoken.hf.acceleration"), name)
