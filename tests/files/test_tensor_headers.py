"""What safetensors files say of their tensors is read from the header alone."""

from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from foretoken.files.bounded_reads import tensor_headers


def test_names_shapes_and_dtypes_of_a_file(tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    save_file({"a.weight": torch.zeros(3, 5, dtype=torch.bfloat16), "b": torch.zeros((), dtype=torch.int64)}, place)
    assert tensor_headers(place) == {"a.weight": ((3, 5), "BF16"), "b": ((), "I64")}


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "model.safetensors"
    place.write_bytes(b"\xff" * 64)
    with pytest.raises(SafetensorError):
        tensor_headers(place)
