"""The methods that have a network of their own; this module does not import torch."""

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
    """Returns the methods with a head in this package, such as "medusa"."""
    return sorted(module.name for module in iter_modules(foretoken.heads.__path__) if module.name not in _NOT_METHODS)
