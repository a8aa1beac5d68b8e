"""Weights that are stored in integers round their inputs to 8 bits where that is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import write
from models.integer_checkpoints import Scheme
from models.test_gguf import WIDE
from models.test_routes import checkpoint
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError
from foretoken.decoder.quantized import QuantizedLinear
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import load_model

pytestmark = pytest.mark.native
PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [9, 9, 4], [*range(3, 40)]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=30, top_p=0.9, ignore_eos=True),
]


def gguf_file(path: Path, matrices: Type = Type.Q4_K) -> str:
    write(path, tiny_model("llama", **WIDE), matrices=matrices, tied=True)
    return str(path)


def directory(path: Path) -> str:
    path.mkdir()
    checkpoint(path, Scheme("compressed-tensors", group=32))
    return str(path)


def input_bits(model: LoadedModel) -> set[int]:
    return {part.matrix.input_bits for part in model.module.modules() if isinstance(part, QuantizedLinear)}


@pytest.mark.parametrize("make", [gguf_file, directory])
def test_text_with_drafts_is_text_without(make: Any, tmp_path: Path) -> None:
    name, texts = make(tmp_path / "model.gguf"), []
    plain = LLM(name, max_num_seqs=3)
    for config in (
        None,
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
        {"method": "suffix"},
    ):
        llm = LLM(name, quantization="a8", speculative_config=config, max_num_seqs=3)
        assert str(llm.target.model.quantization) == f"{plain.target.model.quantization}, inputs of 8 bits"
        assert (input_bits(llm.target.model), llm.target.model.dtype) == ({8}, torch.bfloat16)
        texts.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, PARAMS)])
    assert texts[0] == texts[1] == texts[2]
    assert input_bits(plain.target.model) == {16}


def test_passes_take_rounded_inputs(tmp_path: Path) -> None:
    """Logits are near those of inputs as they are, and others."""
    name, params = gguf_file(tmp_path / "model.gguf"), SamplingParams(max_tokens=1, prompt_logprobs=0)

    def scores(**options: Any) -> torch.Tensor:
        rows = LLM(name, **options).generate(PROMPTS[2:], params)[0].prompt_logprobs or []
        return torch.tensor([next(iter(row.values())).logprob for row in rows if row is not None])

    exact, usual, narrow = scores(dtype="float32"), scores(), scores(quantization="a8")
    assert 0 < (usual - exact).abs().max() < (narrow - exact).abs().max() < 0.2


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda path: gguf_file(path, Type.F16), {}, "'.*' has no weights in integers. Expected a GGUF file, GPTQ"),
        (gguf_file, {"dtype": "float64"}, "in torch.float64 on 'cpu'. Only the kernels on CPUs round inputs"),
        (lambda path: load_model(gguf_file(path)), {}, "is in memory. Expected the name of a model"),
        (lambda path: tiny_model("llama"), {}, "is in memory. Expected the name of a model"),
    ],
)
def test_refusals(make: Any, options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ForetokenError, match=f"quantization 'a8' was asked for.*{message}"):
        LLM(make(tmp_path / "model.gguf"), quantization="a8", **options)
