"""The methods that have a network of their own, told without importing torch."""

from __future__ import annotations

from pkgutil import iter_modules

import foretoken.heads

_NOT_METHODS = {
    "autoregressive",
    "base",
    "decoder_layer",
    "methods",
}


def head_methods() -> list[str]:
    """Methods whose head is a module of this package, such as "medusa"."""
    return sorted(module.name for module in iter_modules(foretoken.heads.__path__) if module.name not in _NOT_METHODS)
