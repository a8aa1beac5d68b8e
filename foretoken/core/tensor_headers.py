"""What safetensors files say of their tensors, without reading them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from safetensors import safe_open

if TYPE_CHECKING:
    from pathlib import Path


class TensorHeader(NamedTuple):
    """What a file says of one tensor: its shape, and its dtype in the words of safetensors, such as "BF16"."""

    shape: tuple[int, ...]
    dtype: str


def tensor_headers(path: Path) -> dict[str, TensorHeader]:
    """The tensors of a file, by name.

    Raises:
        SafetensorError, OSError: When it is damaged or cannot be read.
    """
    with safe_open(path, framework="np") as file:
        names = file.keys()  # of the file itself, which is no mapping
        parts = {name: file.get_slice(name) for name in names}
        return {name: TensorHeader(tuple(part.get_shape()), part.get_dtype()) for name, part in parts.items()}
