"""Targets that are stored in integers: their text is the same with and without drafts, and in every batch."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.same_text import assert_same_text
from end_to_end.tiny_llms import drafters, tokenizer
from gguf import GGMLQuantizationType as Type
from models.gguf_files import write as write_gguf
from models.integer_checkpoints import Scheme, write
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.models.loading import load_model

PROMPTS = [[5, 6, 7, 8, 5, 6], list(range(3, 40)), [9, 9, 4]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, logprobs=2),
    SamplingParams(temperature=0.8, seed=1, max_tokens=24),
    SamplingParams(temperature=0.9, seed=2, max_tokens=24, top_p=0.9),
]
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
DRAFTERS = ("ngram tree", "early exit", "sparse kv", "recycling", "oracle tree")


def _mixed(key: str) -> Type:
    """As llama.cpp's Q4_K_M: queries and keys in 4 bits, values and the LM head in 6."""
    return Type.Q6_K if "v_proj" in key or "down_proj" in key or "lm_head" in key else Type.Q4_K


FORMATS: dict[str, Any] = {
    "GGUF Q4_0": Type.Q4_0,
    "GGUF Q4_K and Q6_K": _mixed,
    "GGUF Q5_K": Type.Q5_K,
    "GPTQ, desc_act": Scheme("gptq", zeros=True, act_order=True),
    "AWQ": Scheme("awq", zeros=True),
    "W4A16": Scheme("compressed-tensors", group=128),
    "W8A8": Scheme("compressed-tensors", bits=8, group=0, settings={"format": "int-quantized", "inputs": True}),
}


@cache
def path_of(name: str, directory: Path) -> Path:
    form, place = FORMATS[name], directory / name
    if isinstance(form, Scheme):
        write(place, tiny_model("llama", **SIZES).config, form)
        return place
    path = place.with_suffix(".gguf")
    # Of seed 0, Q4_0 makes a model whose logits in bfloat16 differ by more than its self-test allows, also when dense.
    write_gguf(path, tiny_model("llama", seed=1, **SIZES), matrices=form)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stored")


@cache
def loaded(path: Path, dtype: str) -> Any:
    return load_model(path, dtype=dtype, device="cpu")


def texts(path: Path, arguments: dict[str, Any], dtype: str, **more: Any) -> list[Any]:
    engine = LLM(loaded(path, dtype), tokenizer=tokenizer(), **{"runner": "lean-native"} | more, **arguments)
    return engine.generate(PROMPTS, PARAMS)


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_plain_decodings(name: str, directory: Path) -> None:
    path = path_of(name, directory)
    plain = texts(path, {}, "bfloat16", max_num_seqs=1)
    known = [[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in plain]
    for each in DRAFTERS:
        got = texts(path, drafters(dtype=torch.bfloat16)[each](known), "bfloat16", max_num_seqs=3)
        assert_same_text(got, plain, [each] * len(PROMPTS))
        assert all(output.metrics.draft_errors == 0 for output in got)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "W8A8"])  # inputs of 8 bits differ by a step
def test_native_kernels_compute_the_stored_model(name: str, directory: Path) -> None:
    """In float32, beside torch's products with the dequantized weights."""
    native, generic = (
        texts(path_of(name, directory), {}, "float32", runner=each) for each in ("lean-native", "generic")
    )
    assert_same_text(generic, native, [name] * len(PROMPTS), tolerance=5e-2 if name == "W8A8" else 1e-4)
