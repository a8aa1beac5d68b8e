"""Matrices of GGUF files that the kernels store have the bits of those that torch stores, and so have their weights."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import SCALES, random_blocks

from foretoken.core.errors import ModelError
from foretoken.decoder import quantized as quantized_module
from foretoken.decoder.quantized import KINDS, QuantizedMatrix, quantized, store_blocks
from foretoken.models.stored.gguf_blocks import FORMATS
from foretoken.models.stored.gguf_file import GgufFile, read_gguf

pytestmark = pytest.mark.native
NAMED = [kind for kind in KINDS if kind in Type.__members__]  # a made-up type has a test of its own
# Types that take about the bytes of the file in memory.
CLOSE = {"Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"}
NAME, ROWS = "blk.0.ffn_up.weight", 40  # fill two panels and a half


def written(path: Path, type_: Type, blocks: np.ndarray) -> GgufFile:
    """A file with one matrix."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(NAME, blocks, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read_gguf(path)


def without_kernels(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(quantized_module, "library_or_none", lambda: None)


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("kind", NAMED)
def test_the_kernels_store_what_torch_stores(
    kind: str, is_ordered: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cols = max(96, FORMATS[kind].block)  # of 64 that are read at once
    blocks = random_blocks(ROWS, cols, Type[kind])
    file = written(tmp_path / "model.gguf", Type[kind], blocks)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)) if is_ordered else None
    made = file.matrix(NAME, torch.float32, order)
    weights = made.dequantized()
    without_kernels(monkeypatch)
    expected = file.matrix(NAME, torch.float32, order)
    assert torch.equal(weights, expected.dequantized())
    assert torch.equal(weights, made.dequantized()), "torch reads the kernels' order"
    some = torch.tensor([3, 39, 3])
    assert torch.equal(weights[some], made.dequantized(some))
    assert torch.equal(weights[5:37], made.rows(5, 37).dequantized())
    file_bits = 8 * FORMATS[kind].num_bytes / FORMATS[kind].block
    assert made.nbytes == 48 / 40 * file.bytes_in_memory(NAME, torch.float32) * (128 / 96 if cols == 96 else 1)
    if kind in CLOSE:
        assert file.bytes_in_memory(NAME, torch.float32) * 8 / (ROWS * cols) <= file_bits + 0.125
    theirs = torch.from_numpy(gguf.dequantize(blocks, Type[kind]))
    assert torch.equal(weights, theirs if order is None else theirs[order])
    assert theirs.unique().numel() > 50


@pytest.mark.parametrize("kind", NAMED)
def test_scales_that_are_not_finite_are_found(kind: str, tmp_path: Path) -> None:
    blocks = random_blocks(ROWS, 256, Type[kind])
    last = blocks.reshape(-1, FORMATS[kind].num_bytes)[-1]
    if kind == "IQ1_M":
        last[48:56] |= 0xF0  # NaN
    elif kind == "MXFP4":
        last[0] = 255
    else:
        at = SCALES.get(Type[kind], (0,))[-1]
        last[at : at + 2] = np.frombuffer(np.float16("inf").tobytes(), np.uint8)
    with pytest.raises(ModelError, match=f"{NAME} of .* holds NaN or infinite values"):
        written(tmp_path / "model.gguf", Type[kind], blocks).matrix(NAME, torch.float32)


def rounded(quantization: str) -> QuantizedMatrix:
    return quantized(torch.randn(ROWS, 200, generator=torch.Generator().manual_seed(1)), quantization)  # type: ignore[arg-type]


def ordered() -> QuantizedMatrix:
    numbers = torch.randint(-8, 8, (ROWS, 96), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    scales = torch.rand(ROWS, 3, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(96, generator=torch.Generator().manual_seed(4)).int()
    return QuantizedMatrix.of(
        numbers, bits=4, group=32, group_scales=scales, group_offsets=scales / 3, row_scales=torch.rand(ROWS),
        input_order=order, dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize("make", [lambda: rounded("int4"), lambda: rounded("int8"), ordered])
def test_weights_have_the_bits_of_torchs(make: object, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = make()  # type: ignore[operator]
    weights = matrix.dequantized()
    without_kernels(monkeypatch)
    assert torch.equal(weights, matrix.dequantized())


def test_a_matrix_of_another_form_is_refused() -> None:
    matrix = QuantizedMatrix.empty(
        (ROWS, 96), bits=4, group=32, dtype=torch.float32, scale_dtype=torch.float32, has_offsets=True
    )
    with pytest.raises(ValueError, match="Q4_K does not fit the matrix: SHAPE"):
        store_blocks(matrix, torch.zeros(1 << 16, dtype=torch.uint8), "Q4_K", None)
    with pytest.raises(ValueError, match="Q4_1 does not fit the matrix: SHAPE"):
        store_blocks(matrix, torch.zeros(1 << 16, dtype=torch.uint8), "Q4_1", torch.arange(1, ROWS + 1))


def test_codes_without_their_table_are_refused() -> None:
    matrix = QuantizedMatrix.empty(
        (ROWS, 96), bits=8, group=32, dtype=torch.float32, scale_dtype=torch.float16, has_offsets=False
    )
    with pytest.raises(ValueError, match="IQ4_NL does not fit the matrix: MISSING"):
        store_blocks(matrix, torch.zeros(1 << 16, dtype=torch.uint8), "IQ4_NL", None)
