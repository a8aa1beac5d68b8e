"""GGUF files of further architectures: logits are those of transformers' model, defaults are llama.cpp's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from models.gguf_files import write
from models.test_gguf import SMALL, add_value, refusal, same_logits, told
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
_SCALED = {
    "granite.logit_scale": 3.0, "granite.residual_scale": 0.5, "granite.embedding_scale": 2.0,
    "granite.attention.scale": 0.25,
}  # fmt: skip
_OSS = {
    "gpt-oss.expert_count": 4, "gpt-oss.expert_used_count": 2, "gpt-oss.expert_feed_forward_length": 96,
    "gpt-oss.attention.sliding_window": _WINDOW,
}  # fmt: skip
_YARN_KEYS = {
    "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 24,
}  # fmt: skip


def _oss(**changes: Any) -> Any:
    return tiny_config("gpt_oss", **SMALL | {"head_dim": 32, "layer_types": _EVERY_OTHER} | changes)


# The architecture, the model's configuration, and the settings that the conversion script writes for it.
MODELS: dict[str, tuple[str, Callable[[], Any], dict[str, Any]]] = {
    "smollm3": (
        "smollm3", lambda: tiny_config("smollm3", **SMALL | {"num_hidden_layers": 4, "no_rope_layers": None}), {},
    ),
    "olmo2": ("olmo2", lambda: tiny_config("olmo2", **SMALL), {}),
    "olmo3": (
        "olmo2",
        lambda: hf.Olmo3Config(**_SIZES, sliding_window=_WINDOW, layer_types=_EVERY_OTHER, rope_parameters={
            "full_attention": dict(_YARN), "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }),
        {
            "olmo2.attention.sliding_window": _WINDOW,
            "olmo2.attention.sliding_window_pattern": [True, False, True],
        } | {f"olmo2.{key}": value for key, value in _YARN_KEYS.items()},
    ),
    "granite": (
        "granite",
        lambda: tiny_config("granite", **SMALL, attention_bias=True, logits_scaling=3.0, residual_multiplier=0.5,
                            embedding_multiplier=2.0, attention_multiplier=0.25),
        _SCALED,
    ),
    "glm4": (
        "glm4",
        lambda: tiny_config("glm4", **SMALL | {"head_dim": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        }}),
        {},
    ),
    "exaone4": ("exaone4", lambda: hf.Exaone4Config(**_SIZES, sliding_window=None, layer_types=_FULL), {}),
    "exaone4 32B": (
        "exaone4",
        lambda: hf.Exaone4Config(**_SIZES | {"num_hidden_layers": 64}, sliding_window=_WINDOW),
        {"exaone4.attention.sliding_window": _WINDOW},
    ),
    "command-r": (
        "command-r",
        lambda: tiny_config("cohere", **SMALL, use_qk_norm=True),
        {"command-r.logit_scale": 0.5, "command-r.rope.scaling.type": "none"},
    ),
    "cohere2": (
        "cohere2",
        lambda: hf.Cohere2Config(**_SIZES | {"num_hidden_layers": 4, "tie_word_embeddings": True}, logit_scale=0.5,
                                 sliding_window=_WINDOW),
        {"cohere2.logit_scale": 0.5, "cohere2.attention.sliding_window": _WINDOW},
    ),
    "gpt-oss": ("gpt-oss", _oss, _OSS),
    "gpt-oss yarn": (
        "gpt-oss",
        lambda: _oss(rope_parameters=_YARN | {"truncate": False}),
        _OSS | {f"gpt-oss.{key}": value for key, value in _YARN_KEYS.items()},
    ),
}  # fmt: skip


def written(path: Path, name: str, *, leave_out: tuple[str, ...] = (), **options: Any) -> Any:
    """Writes a model's file without some of the settings; gives the model that the file stands for."""
    architecture, make, values = MODELS[name]
    model = random_model(make())
    adds = [partial(add_value, key, value) for key, value in values.items() if key not in leave_out]
    options = {"matrices": Type.Q8_0, "tied": model.config.tie_word_embeddings, "values": adds} | options
    weights = write(path, model, architecture=architecture, **options)
    model.load_state_dict(weights)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, name)
    same_logits(path, model, 1e-5)
    config = open_gguf(path).config
    config.tie_word_embeddings = model.config.tie_word_embeddings
    assert told(config).items() >= {key: told(model.config)[key] for key in ("rope_parameters", "model_type")}.items()


@pytest.mark.parametrize(
    ("name", "runner"),
    [("smollm3", "lean-native"), ("olmo2", "lean-native"), ("olmo3", "lean-native"), ("glm4", "generic")],
)
def test_text_with_drafts_is_the_files_models(tmp_path: Path, name: str, runner: str) -> None:
    path, prompt = tmp_path / "model.gguf", [5, 6, 7, 8, 5, 6]
    model = written(path, name)
    config = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    llm = LLM(load_model(path, dtype="float32"), speculative_config=config, max_num_seqs=1, runner=runner)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False, eos_token_id=None)
    assert llm.generate([prompt], params)[0].outputs[0].token_ids == expected[0, len(prompt) :].tolist()


def test_experts_of_gpt_oss_in_mxfp4_are_dequantized(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = written(path, "gpt-oss", matrices=lambda key: Type.MXFP4 if "experts" in key else Type.Q8_0)
    same_logits(path, model, 1e-5)
    assert open_gguf(path).label == "GGUF, Q8_0"


@pytest.mark.parametrize(
    ("name", "key", "part"),
    [
        ("granite", "granite.logit_scale", "lacks granite.logit_scale"),
        ("cohere2", "cohere2.logit_scale", "lacks cohere2.logit_scale"),
        ("cohere2", "cohere2.attention.sliding_window", "does not say which layers have a sliding window"),
        ("gpt-oss", "gpt-oss.attention.sliding_window", "does not say which layers have a sliding window"),
        ("gpt-oss", "gpt-oss.expert_feed_forward_length", "lacks gpt-oss.expert_feed_forward_length"),
        ("gpt-oss", "gpt-oss.expert_used_count", "lacks gpt-oss.expert_used_count"),
    ],
)
def test_settings_that_llama_cpp_requires(tmp_path: Path, name: str, key: str, part: str) -> None:
    path = tmp_path / "model.gguf"
    written(path, name, leave_out=(key,))
    assert part in refusal(path)


def test_what_a_file_leaves_out_is_as_llama_cpp_takes_it(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "granite", leave_out=tuple(key for key in _SCALED if key != "granite.logit_scale"))
    config = open_gguf(path).config
    assert (config.residual_multiplier, config.embedding_multiplier, config.attention_multiplier) == (1, 1, 0.25)
    written(path, "command-r", leave_out=("command-r.logit_scale",))
    assert open_gguf(path).config.logit_scale == 1
    written(path, "exaone4 32B", leave_out=("exaone4.attention.sliding_window",))
    assert open_gguf(path).config.sliding_window == 4096


def test_files_without_an_lm_head_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    written(path, "smollm3", tied=True)
    assert "lm_head" in open_gguf(path).linears
    written(path, "olmo2", tied=True)
    assert "lacks output.weight" in refusal(path)


@pytest.mark.parametrize(("architecture", "window"), [("gemma2", 4096), ("gemma3", None)])
def test_windows_of_gemma_that_a_file_leaves_out(tmp_path: Path, architecture: str, window: int | None) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model(architecture, **SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32})
    write(path, model, matrices=Type.Q8_0, architecture=architecture, tied=True)
    config = open_gguf(path).config
    assert ("sliding_attention" in config.layer_types) == (window is not None)
    assert window is None or config.sliding_window == window


def test_phi3_with_factors_for_long_texts(tmp_path: Path) -> None:
    short, long = np.linspace(1, 2, 8, dtype=np.float32), np.linspace(2, 9, 8, dtype=np.float32)
    rope = {
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": short.tolist(), "long_factor": long.tolist(),
        "attention_factor": 1.25, "original_max_position_embeddings": 48, "partial_rotary_factor": 1.0,
    }  # fmt: skip
    model, path = tiny_model("phi3", **SMALL, sliding_window=None, rope_parameters=rope), tmp_path / "model.gguf"
    adds = {"phi3.rope.scaling.attn_factor": 1.25, "phi3.rope.scaling.original_context_length": 48}
    factors = {"rope_factors_short.weight": short, "rope_factors_long.weight": long}
    values = [partial(add_value, key, value) for key, value in adds.items()]
    weights = write(path, model, matrices=Type.Q8_0, architecture="phi3", values=values, tensors=factors)
    model.load_state_dict(weights)
    same_logits(path, model, 1e-5)
    write(path, model, matrices=Type.Q8_0, architecture="phi3", values=values, tensors=dict([*factors.items()][:1]))
    assert "Expected rope_factors_short.weight and rope_factors_long.weight of phi3." in refusal(path)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.F16])
def test_queries_keys_and_values_may_be_joined(tmp_path: Path, type_: Type) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("llama", **SMALL, attention_bias=True)
    model.load_state_dict(write(path, model, matrices=type_))
    same_logits(path, model, 1e-5)
    write(path, model, matrices=type_, joined={"attn_qkv": ("attn_q", "attn_k", "attn_v")})
    same_logits(path, model, 1e-5)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.F16])
def test_gate_and_up_of_experts_may_be_joined(tmp_path: Path, type_: Type) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("mixtral", **SMALL)
    counts = {GGUFWriter.add_expert_count: 4, GGUFWriter.add_expert_used_count: 2}
    model.load_state_dict(write(
        path, model, matrices=lambda key: Type.F32 if "mlp.gate." in key else type_,
        values=[lambda writer, add=add, count=count: add(writer, count) for add, count in counts.items()],
        joined={"ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")},
    ))  # fmt: skip
    same_logits(path, model, 1e-5)


def test_layers_for_further_tokens_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("llama", **SMALL)
    extra = {f"blk.3.nextn.{part}.weight": np.ones(64, np.float32) for part in ("enorm", "hnorm")}
    add = [lambda writer: writer.kv_data[0].pop("llama.block_count"), lambda writer: writer.add_block_count(4),
           lambda writer: writer.add_uint32("llama.nextn_predict_layers", 1)]  # fmt: skip
    model.load_state_dict(write(path, model, matrices=Type.Q8_0, values=add, tensors=extra))
    same_logits(path, model, 1e-5)
    assert build(open_gguf(path), str(path), torch.float32)[0].config.num_hidden_layers == 3


def test_counts_of_each_layer_are_read_if_they_are_equal(tmp_path: Path) -> None:
    def add(values: list[int], writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.feed_forward_length")
        writer.add_array("llama.feed_forward_length", values)

    path, model = tmp_path / "model.gguf", tiny_model("llama", **SMALL)
    write(path, model, matrices=Type.Q8_0, values=[partial(add, [96, 96, 96])])
    assert open_gguf(path).config.intermediate_size == 96
    write(path, model, matrices=Type.Q8_0, values=[partial(add, [96, 96, 64])])
    assert "Expected the same positive number for all layers" in refusal(path)
