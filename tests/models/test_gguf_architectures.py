"""GGUF files of further architectures: logits are those of transformers' model, defaults are llama.cpp's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Type
from models.gguf_files import SMALL, write
from models.gguf_files import written as written_file
from models.test_gguf import refusal, same_logits, told
from tiny_models import random_model, tiny_config, tiny_model

from foretoken import LLM, SamplingParams
from foretoken.models.loading import load_model
from foretoken.models.stored.building import build
from foretoken.models.stored.gguf import open_gguf

_WINDOW = 6
_SIZES = SMALL | {
    "vocab_size": 67, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 96,
    "initializer_range": 0.25, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "tie_word_embeddings": False,
}  # fmt: skip
_FULL = ["full_attention"] * 3
_EVERY_OTHER = ["sliding_attention", "full_attention", "sliding_attention"]
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
_SCALED = {"logit_scale": 3.0, "residual_scale": 0.5, "embedding_scale": 2.0, "attention.scale": 0.25}
_WINDOW_KEY = {"attention.sliding_window": _WINDOW}
_OSS = _WINDOW_KEY | {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 96}
_YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24,
}  # fmt: skip


def _oss(**changes: Any) -> Any:
    return tiny_config("gpt_oss", **SMALL | {"head_dim": 32, "layer_types": _EVERY_OTHER} | changes)


# The model's configuration, and the settings that the conversion script writes for it.
MODELS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "smollm3": (lambda: tiny_config("smollm3", **SMALL | {"num_hidden_layers": 4, "no_rope_layers": None}), {}),
    "olmo2": (lambda: tiny_config("olmo2", **SMALL), {}),
    "olmo3": (
        lambda: hf.Olmo3Config(**_SIZES, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, rope_parameters={
            "full_attention": dict(_YARN), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }),
        _WINDOW_KEY | {"attention.sliding_window_pattern": [True, False, True]} | _YARN_KEYS,
    ),
    "granite": (
        lambda: tiny_config("granite", **SMALL, attention_bias=True, logits_scaling=3.0, residual_multiplier=0.5,
                            embedding_multiplier=2.0, attention_multiplier=0.25),
        _SCALED,
    ),
    "glm4": (
        lambda: tiny_config("glm4", **SMALL | {"head_dim": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        }}),
        {},
    ),
    "exaone4": (lambda: hf.Exaone4Config(**_SIZES, sliding_window=None, layer_types=_FULL), {}),
    "exaone4 32B": (
        lambda: hf.Exaone4Config(**_SIZES | {"num_hidden_layers": 64}, sliding_window=_WINDOW),
        _WINDOW_KEY,
    ),
    "command-r": (
        lambda: tiny_config("cohere", **SMALL, use_qk_norm=True),
        {"logit_scale": 0.5, "rope.scaling.type": "none"},
    ),
    "cohere2": (
        lambda: hf.Cohere2Config(**_SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True}, logit_scale=0.5,
                                 sliding_window=_WINDOW),
        _WINDOW_KEY | {"logit_scale": 0.5},
    ),
    "gpt-oss": (_oss, _OSS),
    "gpt-oss yarn": (lambda: _oss(rope_parameters=_YARN | {"truncate": False}), _OSS | _YARN_KEYS),
}  # fmt: skip


def written(path: Path, name: str, *, leave_out: tuple[str, ...] = (), **options: Any) -> Any:
    """Writes a model's file without some of the settings; gives the model that the file stands for."""
    make, values = MODELS[name]
    model = random_model(make())
    options = {"matrices": Type.Q8_0, "tied": model.config.tie_word_embeddings} | options
    return written_file(path, model, values=values | dict.fromkeys(leave_out), **options)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(path: Path, name: str) -> None:
    model = written(path, name)
    same_logits(path, model)
    config = open_gguf(path).config
    config.tie_word_embeddings = model.config.tie_word_embeddings
    assert told(config).items() >= {key: told(model.config)[key] for key in ("rope_parameters", "model_type")}.items()


@pytest.mark.parametrize(
    ("name", "runner"),
    [("smollm3", "lean-native"), ("olmo2", "lean-native"), ("olmo3", "lean-native"), ("glm4", "generic")],
)
def test_text_with_drafts_is_the_files_models(path: Path, name: str, runner: str) -> None:
    model, prompt = written(path, name), [5, 6, 7, 8, 5, 6]
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    llm = LLM(load_model(path, dtype="float32"), speculative_config=config, max_num_seqs=1, runner=runner)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_experts_of_gpt_oss_in_mxfp4_are_dequantized(path: Path) -> None:
    same_logits(path, written(path, "gpt-oss", matrices=lambda key: Type.MXFP4 if "experts" in key else Type.Q8_0))
    assert open_gguf(path).label == "GGUF, Q8_0"


@pytest.mark.parametrize(
    ("name", "key", "part"),
    [
        ("granite", "logit_scale", "lacks granite.logit_scale"),
        ("cohere2", "logit_scale", "lacks cohere2.logit_scale"),
        ("cohere2", "attention.sliding_window", "does not say which layers have a sliding window"),
        ("gpt-oss", "attention.sliding_window", "does not say which layers have a sliding window"),
        ("gpt-oss", "expert_feed_forward_length", "lacks gpt-oss.expert_feed_forward_length"),
        ("gpt-oss", "expert_used_count", "lacks gpt-oss.expert_used_count"),
    ],
)
def test_settings_that_llama_cpp_requires(path: Path, name: str, key: str, part: str) -> None:
    written(path, name, leave_out=(key,))
    assert part in refusal(path)


def test_what_a_file_leaves_out_is_as_llama_cpp_takes_it(path: Path) -> None:
    written(path, "granite", leave_out=tuple(key for key in _SCALED if key != "logit_scale"))
    config = open_gguf(path).config
    assert (config.residual_multiplier, config.embedding_multiplier, config.attention_multiplier) == (1, 1, 0.25)
    written(path, "command-r", leave_out=("logit_scale",))
    assert open_gguf(path).config.logit_scale == 1
    written(path, "exaone4 32B", leave_out=("attention.sliding_window",))
    assert open_gguf(path).config.sliding_window == 4096


def test_files_without_an_lm_head_of_their_own(path: Path) -> None:
    written(path, "smollm3", tied=True)
    assert "lm_head" in open_gguf(path).linears
    written(path, "olmo2", tied=True)
    assert "lacks output.weight" in refusal(path)


@pytest.mark.parametrize(("architecture", "window"), [("gemma2", 4096), ("gemma3", None)])
def test_windows_of_gemma_that_a_file_leaves_out(path: Path, architecture: str, window: int | None) -> None:
    model = tiny_model(architecture, **SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32})
    write(path, model, matrices=Type.Q8_0, tied=True)
    config = open_gguf(path).config
    assert ("sliding_attention" in config.layer_types) == (window is not None)
    assert window is None or config.sliding_window == window


def test_phi3_with_factors_for_long_texts(path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 9, 8, dtype=np.float32)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": short.tolist(), "long_factor": long.tolist(),
        "attention_factor": 1.25, "original_max_position_embeddings": 48, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    model = tiny_model("phi3", **SMALL, sliding_window=None, rope_parameters=rope)
    values = {"rope.scaling.attn_factor": 1.25, "rope.scaling.original_context_length": 48}
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    written_file(path, model, matrices=Type.Q8_0, values=values, tensors=factors)
    same_logits(path, model)
    del factors["rope_factors_long.weight"]
    write(path, model, matrices=Type.Q8_0, values=values, tensors=factors)
    assert "Expected rope_factors_short.weight and rope_factors_long.weight of phi3." in refusal(path)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.F16])
def test_queries_keys_and_values_may_be_joined(path: Path, type_: Type) -> None:
    model = written_file(path, tiny_model("llama", **SMALL, attention_bias=True), matrices=type_)
    same_logits(path, model)
    write(path, model, matrices=type_, joined={"attn_qkv": ("attn_q", "attn_k", "attn_v")})
    same_logits(path, model)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.F16])
def test_gate_and_up_of_experts_may_be_joined(path: Path, type_: Type) -> None:
    model = written_file(
        path, tiny_model("mixtral", **SMALL), matrices=lambda key: Type.F32 if "mlp.gate." in key else type_,
        values={"expert_count": 4, "expert_used_count": 2},
        joined={"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")},
    )  # fmt: skip
    same_logits(path, model)


def test_layers_for_further_tokens_are_left_out(path: Path) -> None:
    extra = {f"blk.3.nextn.{part}.weight": np.ones(64, np.float32) for part in ("enorm", "hnorm")}
    values = {"block_count": 4, "nextn_predict_layers": 1}
    model = written_file(path, tiny_model("llama", **SMALL), matrices=Type.Q8_0, values=values, tensors=extra)
    same_logits(path, model)
    assert build(open_gguf(path), str(path), torch.float32)[0].config.num_hidden_layers == 3


def test_counts_of_each_layer_are_read_if_they_are_equal(path: Path) -> None:
    model = tiny_model("llama", **SMALL)
    write(path, model, matrices=Type.Q8_0, values={"feed_forward_length": [96, 96, 96]})
    assert open_gguf(path).config.intermediate_size == 96
    write(path, model, matrices=Type.Q8_0, values={"feed_forward_length": [96, 96, 64]})
    assert "Expected the same positive number for all layers" in refusal(path)
