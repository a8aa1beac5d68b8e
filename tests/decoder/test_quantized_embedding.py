"""Rows of embeddings in integers: the bits of the dequantized table, in torch and on every instruction set."""

import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from decoder.instruction_sets import INSTRUCTION_SETS, kernels_for
from decoder.test_quantized import FORMATS, some_matrix
from tiny_models import tiny_model

from foretoken.core.errors import PassError
from foretoken.core.passes import Pass
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.blocks import LeanWeights
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.quantized import QuantizedMatrix
from foretoken.decoder.quantized_modules import QuantizedEmbedding
from foretoken.decoder.slot_cache import LayerShape, SlotCache
from foretoken.decoder.torch_blocks import StockDecoder
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import wrap_model

pytestmark = pytest.mark.native

V, E, SCALE = 67, 300, 17.3  # neither fills panels or groups
TOKENS = [0, 1, 15, 16, 17, 63, 64, 66, 66, 30]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> Iterator[str]:
    with kernels_for(request.param):
        yield request.param


@functools.cache
def plain_weights(dtype: torch.dtype) -> LeanWeights:
    model = wrap_model(tiny_model("llama", dtype=dtype, hidden_size=E, head_dim=8), name="tiny")
    return read_weights(model, 16)


def weights_with(table: QuantizedMatrix | torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> LeanWeights:
    return replace(plain_weights(dtype), embedding=table, embedding_scale=scale)


def cache(dtype: torch.dtype) -> SlotCache:
    return SlotCache([LayerShape(2, 8, 8)] * 3, num_slots=1, capacity=16, dtype=dtype, device=torch.device("cpu"))


def a_pass(tokens: list[int]) -> Pass:
    return Pass.of_chains([tokens], slots=[0], prefix_lens=[0])


def embedded(weights: LeanWeights) -> torch.Tensor:
    """What the first block gets of `TOKENS`."""
    made = NativeBlocks(weights.layers, cache(weights.dtype), [0], ends=weights)
    features = made.run(a_pass(TOKENS)).features
    assert features is not None
    return features[:, 0]


@DTYPES
@pytest.mark.parametrize("name", FORMATS)
def test_torch_looks_up_rows_of_the_dequantized_table(name: str, dtype: torch.dtype) -> None:
    matrix = some_matrix(name, V, E, dtype)
    whole = matrix.dequantized()
    ids = torch.tensor(TOKENS)
    assert torch.equal(matrix.dequantized(ids), whole[ids])
    for scale in (None, 2.7, torch.tensor(17.3)):
        expected = torch.nn.functional.embedding(ids.view(2, 5), whole.to(dtype))
        factor = scale.to(dtype) if isinstance(scale, torch.Tensor) else scale
        found = QuantizedEmbedding(matrix, scale)(ids.view(2, 5))
        assert torch.equal(found, expected if factor is None else expected * factor)


@DTYPES
def test_kernels_look_up_rows_of_the_dequantized_table(instruction_set: str, dtype: torch.dtype) -> None:
    """Every bit, of every format, with and without a factor; as the kernels read a dense table."""
    for name in FORMATS:
        matrix = some_matrix(name, V, E, dtype)
        rows = matrix.dequantized().to(dtype)
        for scale in (1.0, SCALE):
            found = embedded(weights_with(matrix, dtype, scale))
            assert torch.equal(found, embedded(weights_with(rows, dtype, scale))), name
            expected = (rows[TOKENS].float() * torch.tensor(scale)).to(dtype)
            assert torch.equal(found, expected), name


@DTYPES
def test_tokens_beyond_the_table_are_refused(dtype: torch.dtype) -> None:
    weights = weights_with(some_matrix("8 bits, rows", V, E, dtype), dtype)
    made = NativeBlocks(weights.layers, cache(dtype), [0], ends=weights)
    for token in (-1, V, 79, 2**40):
        with pytest.raises(PassError, match="tokens"):
            made.run(a_pass([3, token]))


def test_memory_that_is_gone_is_noticed() -> None:
    matrix = some_matrix("8 bits, groups of 256", V, E, torch.float32)
    own = replace(matrix, numbers=matrix.numbers.clone())
    weights = weights_with(own, torch.float32)
    made = NativeBlocks(weights.layers, cache(torch.float32), [0], ends=weights)
    expected = made.run(a_pass(TOKENS)).features
    own.numbers.share_memory_()
    assert torch.equal(made.run(a_pass(TOKENS)).features, expected)
    own.numbers.untyped_storage().resize_(0)
    with pytest.raises(PassError, match=r"the memory of a weight .* was freed or cut"):
        made.run(a_pass(TOKENS))


def test_tables_that_do_not_fit_are_refused() -> None:
    for name, table in {
        "rows in torch.bfloat16": some_matrix("8 bits, rows", V, E, torch.bfloat16),
        f"the embedding is .{V}, 64": some_matrix("8 bits, rows", V, 64, torch.float32),
    }.items():
        weights = weights_with(table, torch.float32)
        with pytest.raises(UnsuitableError, match=name):
            NativeBlocks(weights.layers, cache(torch.float32), [0], ends=weights)
    weights = weights_with(some_matrix("8 bits, rows", V, E, torch.float32), torch.float32)
    with pytest.raises(UnsuitableError, match="only native kernels on CPUs run weights in 8 bits"):
        StockDecoder(weights, cache(torch.float32), [])
