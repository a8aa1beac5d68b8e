"""Networks of the trained drafters; training and drafting run the same code. This module does not import torch."""

from pkgutil import iter_modules

_NOT_METHODS = {"base", "decoder_layer", "steps"}


def head_methods() -> list[str]:
    """Returns the methods with a head in this package, such as "medusa"."""
    return sorted(module.name for module in iter_modules(__path__) if module.name not in _NOT_METHODS)
