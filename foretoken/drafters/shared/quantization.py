"""The option `quantization` of drafters with weights: whether copies in int8 draft, on CPUs.

Whatever a drafter computes with, the target's distribution is kept. Drafting on a CPU is bound by reading weights, and
a byte a weight is half of bfloat16. The target's own weights are never quantised by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, TypeVar

from foretoken.core.errors import ConfigError
from foretoken.decoder.base import UnsuitableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.decoder.lean.int8 import Quantization

QuantizationOption = Literal["auto", "int8", "none"]
_Made = TypeVar("_Made")


def with_quantization(option: QuantizationOption, make: Callable[[Quantization | None], _Made]) -> _Made:
    """What `make` gives for int8 where that is wanted and can be, else for the weights as they are stored.

    Args:
        option: "int8" insists on it, "auto" takes it where it can be.
        make: Gives it; raises `UnsuitableError` where the drafter cannot be quantised.

    Raises:
        ConfigError: For "int8" where that cannot be.
    """
    if option == "none":
        return make(None)
    try:
        return make("int8")
    except UnsuitableError as err:
        if option == "int8":
            raise ConfigError(
                f"quantization 'int8' cannot be had: {err} Leave it out to draft with the weights as they are stored."
            ) from err
        return make(None)
