"""Embeddings in integers inside models: what replaces them, what they share with the LM head, and what stays."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import written
from models.test_gguf import CHANGES, VALUES
from tiny_models import tiny_model
from torch import nn

from foretoken.core.errors import ModelError
from foretoken.decoder.quantized import Quantization, quantized
from foretoken.decoder.quantized_modules import QuantizedEmbedding
from foretoken.models.lean_weights import read_weights
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import wrap_model
from foretoken.models.making.in_memory import quantize_model
from foretoken.models.stored.building import build
from foretoken.models.stored.gguf import open_gguf
from foretoken.planning.sizes import sizes_of

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
QUANTIZATIONS = get_args(Quantization)
IDS = torch.tensor([[0, 66, 15], [16, 17, 66]])


def rounded(quantization: Quantization, architecture: str, dtype: torch.dtype = torch.bfloat16) -> LoadedModel:
    return quantize_model(wrap_model(tiny_model(architecture, dtype=dtype), name="tiny"), quantization)


def ends(model: LoadedModel) -> tuple[Any, Any]:
    """The embedding and the LM head."""
    module: Any = model.module
    return module.get_input_embeddings(), module.get_output_embeddings()


@DTYPES
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("architecture", ["llama", "gemma2", "gemma3"])
def test_rows_are_those_of_the_replaced_module(
    architecture: str, quantization: Quantization, dtype: torch.dtype
) -> None:
    """With the rounded weight; Gemma multiplies rows by a factor that it rounds to the dtype."""
    original: Any = tiny_model(architecture, dtype=dtype).get_input_embeddings()
    embedding, _ = ends(rounded(quantization, architecture, dtype))
    assert isinstance(embedding, QuantizedEmbedding)
    original.weight = nn.Parameter(quantized(original.weight, "int8", dtype=dtype).dequantized().to(dtype))
    assert torch.equal(embedding.weight, original.weight)
    found = embedding(IDS)
    assert found.dtype == dtype
    assert torch.equal(found, original(IDS))
    assert embedding(IDS[:, :0]).shape == (2, 0, 32)


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_tied_weights_that_are_rounded_alike_share_memory(quantization: Quantization) -> None:
    embedding, head = ends(rounded(quantization, "llama_tied"))
    own = quantized(tiny_model("llama_tied", dtype=torch.bfloat16).get_input_embeddings().weight, "int8")
    assert torch.equal(embedding.matrix.numbers, own.numbers)
    assert torch.equal(embedding.matrix.row_scales, own.row_scales)
    pairs = zip(embedding.matrix.tensors(), head.matrix.tensors(), strict=False)
    is_shared = [ours.data_ptr() == theirs.data_ptr() for ours, theirs in pairs]
    assert is_shared == [quantization in ("int8", "w8a8")] * 2


def test_untied_weights_have_their_own_integers() -> None:
    embedding, head = ends(rounded("int8", "llama"))
    assert embedding.matrix.numbers.data_ptr() != head.matrix.numbers.data_ptr()
    assert not torch.equal(embedding.matrix.numbers, head.matrix.numbers)


@DTYPES
@pytest.mark.parametrize(("architecture", "is_tied"), [("llama", True), ("llama", False), ("gemma3", True)])
def test_an_embedding_of_a_gguf_file(path: Path, architecture: str, is_tied: bool, dtype: torch.dtype) -> None:
    """Rows in the model's dtype, times Gemma's factor; an LM head of the same tensor has the same memory."""
    model = tiny_model(architecture, **CHANGES[architecture])
    written(path, model, matrices=Type.Q4_1, tied=is_tied, values=VALUES.get(architecture))
    module = build(open_gguf(path), str(path), dtype)[0]
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    expected = model.to(dtype).get_input_embeddings()
    assert isinstance(embedding, QuantizedEmbedding)
    assert torch.equal(embedding(IDS), expected(IDS))
    assert (embedding.matrix is head.matrix) == is_tied


def test_ids_beyond_the_table_are_refused() -> None:
    embedding, _ = ends(rounded("int8", "llama"))
    for token in (-1, 67, 79, 2**40):
        with pytest.raises(IndexError, match=r"Expected 0\.\.66"):
            embedding(torch.tensor([3, token]))


def test_lean_decoders_get_the_integers() -> None:
    model = rounded("int4", "gemma2", torch.float32)
    embedding, _ = ends(model)
    weights = read_weights(model, 8)
    assert weights.embedding is embedding.matrix
    assert weights.embedding_scale == float(embedding.embed_scale)
    assert (weights.dtype, weights.device) == (torch.float32, torch.device("cpu"))
    assert {id(each) for each in embedding.matrix.tensors()} <= {id(each) for each in weights.tensors()}


def test_a_rounded_model_has_the_sizes_of_the_original() -> None:
    for architecture in ("llama", "llama_tied"):
        plain = wrap_model(tiny_model(architecture), name="tiny")
        sizes = sizes_of(plain.module, plain.config, 2)
        for quantization in QUANTIZATIONS:
            made = rounded(quantization, architecture)
            assert sizes_of(made.module, made.config, 2) == sizes


class _Normed(nn.Embedding):
    """An embedding that is no table."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(super().forward(ids), dim=-1)


@pytest.mark.parametrize("what", ["another class", "max_norm", "shared"])
def test_embeddings_that_stay(what: str) -> None:
    model = wrap_model(tiny_model("llama", dtype=torch.bfloat16), name="tiny")
    module: Any = model.module
    embedding = module.model.embed_tokens
    if what == "another class":
        embedding.__class__ = _Normed
    elif what == "max_norm":
        embedding.max_norm = 1.0
    else:
        module.more = nn.Embedding(67, 32)
        module.more.weight = embedding.weight
    weight = embedding.weight.clone()
    assert ends(quantize_model(model, "int8"))[0] is embedding
    assert torch.equal(embedding.weight, weight)


def test_refusals() -> None:
    broken = tiny_model("llama", dtype=torch.bfloat16)
    broken.model.embed_tokens.weight.data[3, 2] = float("inf")
    with pytest.raises(ModelError, match=r"'model.embed_tokens' of 'tiny' cannot be quantized: a weight .* NaN"):
        quantize_model(wrap_model(broken, name="tiny"), "int4")
    with pytest.raises(ModelError, match=r"'model.embed_tokens' keeps its weight in 8 bits, which cannot be saved"):
        rounded("int4", "llama").module.state_dict()
