"""GGUF files: matrices, configurations and tokenizers are those that llama.cpp's package and transformers read."""

from __future__ import annotations

import logging
import os
import random
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_files import SMALL, TINYCODE, add_tokenizer, tiny_file, write
from limits import limit_memory
from tiny_models import tiny_config, tiny_model
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from foretoken import LLM
from foretoken.core.errors import ModelError
from foretoken.models.stored.building import build
from foretoken.models.stored.gguf import gguf_tokenizer, open_gguf
from foretoken.models.stored.gguf_file import read_gguf

WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "head_dim": 64}  # blocks of 256 weights
_GEMMA = SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32, "final_logit_softcapping": 200.0}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "llama_tied": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 32},
    "phi3": SMALL,
    "starcoder2": SMALL | {"norm_epsilon": 1e-3},
    "gemma2": _GEMMA | {"attn_logit_softcapping": 20.0},
    "gemma3": _GEMMA | {"rope_parameters": None},
}
HEADERS: dict[str, list[Callable[[GGUFWriter], None]]] = {
    "phi3": [lambda writer: writer.add_sliding_window(6)],
    "starcoder2": [lambda writer: writer.add_sliding_window(6)],
    "gemma2": [
        lambda writer: writer.add_sliding_window(6),
        lambda writer: writer.add_attn_logit_softcapping(20.0),
        lambda writer: writer.add_final_logit_softcapping(200.0),
    ],
    "gemma3": [
        lambda writer: writer.add_sliding_window(6),
        lambda writer: writer.add_final_logit_softcapping(200.0),
        lambda writer: writer.add_array("gemma3.attention.sliding_window_pattern", [True, False, True]),
    ],
}
_UNSAID = ("architectures", "dtype", "_name_or_path", "initializer_range", "bos_token_id", "eos_token_id")


def same_logits(path: Path, reference: Any, share: float) -> None:
    module, info = build(open_gguf(path), str(path), torch.float32)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    tokens = torch.arange(1, 25).view(2, 12)
    with torch.no_grad():
        found, expected = module(tokens).logits, reference(tokens).logits
    assert expected.std() > 0.1
    assert (found - expected).abs().max() <= share * expected.abs().max()


def told(config: Any) -> dict[str, Any]:
    """What files say of a configuration."""
    return {key: value for key, value in config.to_dict().items() if key not in _UNSAID}


@pytest.mark.parametrize(
    "type_",
    [
        *(Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.Q8_0, Type.Q4_K, Type.Q5_K, Type.Q6_K),
        *(Type.Q2_K, Type.Q3_K, Type.IQ4_XS, Type.MXFP4, Type.IQ3_S, Type.IQ2_XXS),
    ],
)
def test_matrices_and_the_embedding_are_what_the_file_says(tmp_path: Path, type_: Type) -> None:
    path = tmp_path / "model.gguf"
    weights = write(path, tiny_model("llama", **WIDE), matrices=type_, tied=True)
    stored = open_gguf(path)
    assert stored.label == f"GGUF, {type_.name}"
    assert len(stored.linears) == 2 * 7 + 1
    assert stored.embedding == "model.embed_tokens"
    in_integers = {*stored.linears, stored.embedding}
    for linear in in_integers:
        matrix, expected = stored.matrix(linear, torch.float32), weights[f"{linear}.weight"]
        assert matrix.bits == {"Q2": 4, "Q3": 4, "Q4": 4, "Q5": 5, "Q6": 6}.get(type_.name[:2], 8)
        assert torch.equal(matrix.dequantized(), expected), linear
        assert stored.matrix(linear, torch.bfloat16).dtype == torch.bfloat16
    dense = stored.dense(torch.float32)
    assert dense.keys() == weights.keys() - {f"{part}.weight" for part in in_integers}
    for key, tensor in dense.items():
        assert torch.equal(tensor, weights[key]), key


@pytest.mark.parametrize("type_", [Type.F32, Type.F16, Type.BF16])
def test_matrices_that_are_no_integers_stay_as_they_are(tmp_path: Path, type_: Type) -> None:
    path = tmp_path / "model.gguf"
    weights = write(path, tiny_model("llama", **SMALL), matrices=type_)
    stored = open_gguf(path)
    assert (stored.label, stored.linears, stored.embedding) == ("GGUF, not quantized", frozenset(), None)
    dense = stored.dense(torch.float32)
    assert all(each.dtype == torch.float32 for each in dense.values())
    assert dense.keys() == weights.keys()
    assert all(torch.equal(dense[key].float(), weights[key]) for key in weights)


@pytest.mark.parametrize("architecture", CHANGES)
@pytest.mark.parametrize("type_", [Type.Q4_0, Type.BF16])
def test_whole_models_are_those_of_their_weights(tmp_path: Path, architecture: str, type_: Type) -> None:
    changes, path = CHANGES[architecture], tmp_path / "model.gguf"
    model, is_tied = tiny_model(architecture, **changes), architecture == "llama_tied"
    name = architecture.removesuffix("_tied")
    weights = write(path, model, matrices=type_, architecture=name, tied=is_tied, values=HEADERS.get(architecture, ()))
    config = open_gguf(path).config
    assert config.tie_word_embeddings == (is_tied and type_ == Type.BF16)
    config.tie_word_embeddings = is_tied
    assert told(config) == told(model.config)
    model.load_state_dict(weights)
    same_logits(path, model, 1e-5)


def mixed(key: str) -> Type:
    """As Q4_K_M mixes types."""
    return Type.Q6_K if "v_proj" in key or "embed" in key or "down_proj" in key else Type.Q4_K


@pytest.mark.parametrize(
    ("architecture", "changes", "tied"),
    [
        ("llama", WIDE, False),
        ("llama", WIDE, True),
        ("qwen2", WIDE, True),
        ("qwen3", WIDE | {"head_dim": 128}, False),  # the only size that transformers' reader knows
    ],
)
def test_transformers_reads_the_same_model(tmp_path: Path, architecture: str, changes: Any, tied: bool) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model(architecture, **changes)
    write(path, model, matrices=mixed, architecture=architecture, tied=tied)
    same_logits(path, AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32), 1e-4)
    assert open_gguf(path).label == "GGUF, Q4_K and Q6_K"


@pytest.mark.parametrize(
    ("rope", "values", "tensors"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"scaling.factor": 4.0}, {}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
            {"scaling.factor": 4.0, "scaling.original_context_length": 24},
            {},
        ),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
            {},
            {"rope_freqs.weight": True},
        ),
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_scaled_positions(tmp_path: Path, rope: Any, values: Any, tensors: Any) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("llama", **SMALL, rope_parameters=rope | {"rope_theta": 10000.0})
    plain = tiny_model("llama", **SMALL)
    if tensors:
        factors = plain.model.rotary_emb.inv_freq / model.model.rotary_emb.inv_freq
        assert factors.min() == 1
        assert factors.max() == 8
        tensors = {"rope_freqs.weight": factors.numpy()}
    adds = [partial(add_value, f"llama.rope.{key}", value) for key, value in values.items()]
    if values:
        adds.append(lambda writer: writer.add_string("llama.rope.scaling.type", rope["rope_type"]))
    weights = write(path, model, matrices=Type.Q8_0, values=adds, tensors=tensors)
    model.load_state_dict(weights)
    assert told(open_gguf(path).config) == told(model.config)
    same_logits(path, model, 1e-5)
    plain.load_state_dict(weights)
    with pytest.raises(AssertionError):
        same_logits(path, plain, 1e-5)


@pytest.mark.parametrize(
    ("values", "rope"),
    [
        ({"scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"scale_linear": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"scaling.factor": 1.0}, {"rope_type": "default"}),
        ({"scaling.type": "none", "scaling.factor": 4.0}, {"rope_type": "default"}),
        (
            {"scaling.type": "yarn", "scaling.factor": 4.0},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 96},
        ),
    ],
)
def test_what_a_file_leaves_out_of_its_rope_is_as_in_llama_cpp(tmp_path: Path, values: Any, rope: Any) -> None:
    adds = [partial(add_value, f"llama.rope.{key}", value) for key, value in values.items()]
    config = open_gguf(tiny_file(tmp_path / "model.gguf", *adds)).config
    assert config.max_position_embeddings == 96
    assert config.rope_parameters == rope | {"rope_theta": config.rope_parameters["rope_theta"]}


def add_value(key: str, value: Any, writer: GGUFWriter) -> None:
    """Adds a value of the type that fits best."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    add.get(type(value), writer.add_string)(key, value)


def test_large_gemma_has_another_scale_of_scores(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("gemma2", **_GEMMA | {"hidden_size": 64, "num_hidden_layers": 46, "layer_types": None})
    write(path, model, matrices=Type.Q4_0, architecture="gemma2", values=HEADERS["gemma2"], tied=True)
    config = open_gguf(path).config
    assert config.query_pre_attn_scalar == 64 // 4
    assert config.layer_types == ["sliding_attention", "full_attention"] * 23
    assert config.sliding_window == 6


def test_a_window_of_0_is_none(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    model = tiny_model("phi3", **SMALL, sliding_window=None)
    header = [lambda writer: writer.add_sliding_window(0)]  # as of Phi-4
    model.load_state_dict(write(path, model, matrices=Type.Q8_0, architecture="phi3", values=header))
    assert open_gguf(path).config.sliding_window is None
    same_logits(path, model, 1e-5)


@pytest.fixture(scope="module")
def tinycode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = AutoModelForCausalLM.from_pretrained(TINYCODE, dtype=torch.float32)
    extra = [
        lambda writer: writer.add_chat_template("{{ messages[0].content }}"),
        lambda writer: writer.add_eot_token_id(7),
    ]
    write(path, model, matrices=Type.Q8_0, tied=True, tokenizer=True, values=extra)
    return path


def test_configuration_and_tokens_of_a_trained_model(tinycode: Path) -> None:
    original, config = AutoConfig.from_pretrained(TINYCODE), open_gguf(tinycode).config
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (0, [0, 7], 0)
    assert told(config) == told(original) | {"tie_word_embeddings": False}


def test_tokenizer_of_a_trained_model(tinycode: Path) -> None:
    tokenizer = gguf_tokenizer(tinycode)
    assert tokenizer is not None
    original = AutoTokenizer.from_pretrained(TINYCODE)
    assert tokenizer.get_vocab() == original.get_vocab()
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>",) * 3
    for text in ("hello world", "<|endoftext|>x = 12", "for i in range(1234567):"):
        assert tokenizer.encode(text) == original.encode(text)
        assert tokenizer.decode(original.encode(text)) == text
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def with_tokens(writer: GGUFWriter) -> None:
    add_tokenizer(writer, "llama-bpe")
    writer.add_add_bos_token(True)


def test_tokenizer_is_the_one_that_transformers_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_file(tmp_path / "model.gguf", with_tokens)
    with caplog.at_level(logging.WARNING):
        tokenizer = gguf_tokenizer(path)
    assert not caplog.text
    expected = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    for text in ("def add(a, b):\n    return a + b  # 12345\n", "", "Déjà vu"):
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.encode(text)[0] == 0


def test_a_file_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert gguf_tokenizer(tiny_file(tmp_path / "model.gguf")) is None


def refusal(path: Path, opened: Callable[[Path], Any] = open_gguf) -> str:
    with pytest.raises(ModelError) as caught:
        opened(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) - len(str(path)) < 700
    return message


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("llama.expert_count", 8, "lacks llama.expert_used_count"),
        ("llama.attention.scale", 0.5, "has llama.attention.scale, which may change the model"),
        ("llama.attention.sliding_window", 64, "has llama.attention.sliding_window, which may change the model"),
        (
            "llama.rope.scaling.type",
            "longrope",
            "scales positions by 'longrope'. Expected rope_factors_short.weight and",
        ),
        ("llama.rope.scaling.type", "ntk", "scales positions by 'ntk'. Expected none, linear, yarn or longrope."),
        ("llama.rope.scaling.attn_factor", 1.5, "has a factor of attention without the scaling of positions"),
        ("llama.rope.freq_base_swa", 500.0, "rotates by another base in layers with a window"),
        ("llama.rope.scaling.type", "linear", "lacks llama.rope.scaling.factor."),
        ("tokenizer.ggml.eos_token_id", "x", "tokenizer.ggml.eos_token_id is 'x', and no token id"),
        ("split.count", 3, "is a part of a model in 3 files. Expected the first one with its own name"),
        ("general.alignment", 3, "general.alignment is 3, not a power of 2"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, key: str, value: Any, part: str) -> None:
    assert part in refusal(tiny_file(tmp_path / "model.gguf", partial(add_value, key, value)))


def test_layers_that_differ_are_refused(tmp_path: Path) -> None:
    def add(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_array("llama.attention.head_count_kv", [2, 1])

    assert "has [2, 1] as llama.attention.head_count_kv" in refusal(tiny_file(tmp_path / "model.gguf", add))


@pytest.mark.parametrize("name", ["qwen2moe", "bert", "clip"])
def test_architectures_that_are_refused(tmp_path: Path, name: str) -> None:
    writer = GGUFWriter(tmp_path / "model.gguf", name)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = refusal(tmp_path / "model.gguf")
    assert f"holds a model of the architecture '{name}'. Expected one of llama, qwen2," in message


def test_a_split_model_is_that_of_one_file(tmp_path: Path) -> None:
    whole = open_gguf(tiny_file(tmp_path / "whole.gguf"))
    tiny_file(tmp_path / "model.gguf", split=4)
    first, second, third = sorted(tmp_path.glob("model-*"))
    same_logits(first, build(whole, "whole", torch.float32)[0], 0)
    assert {len(header.tensors) for header in read_gguf(first).headers} == {4, 3}
    assert f"is part 2 of a model in 3 files. Expected the first one, which has the settings. Name '{first}'." in (
        refusal(second)
    )
    third.write_bytes(second.read_bytes())
    assert "is damaged: blk.0.attn_output.weight is in an earlier part too" in refusal(
        third, lambda _: read_gguf(first)
    )
    third.unlink()
    assert f"there is no {third.name} beside it. Expected all parts in one directory." in refusal(first)


def test_missing_and_foreign_tensors_are_named(tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "model.gguf", leave_out=["blk.0.ffn_up.weight", "output_norm.weight"])
    assert "do not fit its settings: model.layers.0.mlp.up_proj.weight is missing, model.norm" in refusal(path)
    path = tiny_file(tmp_path / "model.gguf", tensors={"blk.0.ffn_gate_inp.weight": np.ones((2, 64), np.float32)})
    assert "has tensors that its architecture lacks: blk.0.ffn_gate_inp.weight." in refusal(path)
    path = tiny_file(tmp_path / "model.gguf", tensors={"rope_freqs.weight": np.full(8, 3, np.float32)})
    assert "has factors of positions in rope_freqs.weight that no formula gives" in refusal(path)


def entry(data: bytes, name: str) -> int:
    """Where a name in the header ends."""
    start = data.index(struct.pack("<Q", len(name)) + name.encode())
    return start + 8 + len(name)


def change(path: Path, name: str, at: int, form: str, value: Any) -> Path:
    """Overwrites bytes behind a name in the header."""
    data = bytearray(path.read_bytes())
    struct.pack_into(f"<{form}", data, entry(data, name) + at, value)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("name", "at", "form", "value", "part"),
    [
        ("blk.0.ffn_up.weight", 20, "I", Type.NVFP4, "blk.0.ffn_up.weight of"),
        ("blk.0.ffn_up.weight", 20, "I", Type.NVFP4, "is stored as NVFP4. Expected Q4_0, Q4_1,"),
        ("blk.0.ffn_up.weight", 20, "I", 41, "is stored as Q1_0. Expected"),
        ("blk.0.ffn_up.weight", 20, "I", 42, "is stored as Q2_0. Expected"),
        ("blk.0.ffn_up.weight", 20, "I", 999, "is stored as type 999. Expected"),
        (
            "blk.0.ffn_up.weight",
            20,
            "I",
            Type.Q4_K,
            "is [96, 64] in Q4_K. Expected a matrix with rows of a multiple of",
        ),
        ("blk.0.attn_norm.weight", 12, "I", Type.Q4_0, "is [64] in Q4_0. Expected a matrix"),
        ("blk.0.ffn_up.weight", 4, "Q", 32, "blk.0.ffn_up.weight is [96, 32] instead of [96, 64]"),
        ("blk.0.ffn_up.weight", 4, "Q", 0, "is [96, 0] in Q4_0"),
        ("blk.0.ffn_up.weight", 4, "Q", 1 << 62, "the file ends before the data of blk.0.ffn_up.weight"),
        ("blk.0.ffn_up.weight", 24, "Q", 1 << 63, "the file ends before the data of blk.0.ffn_up.weight"),
        ("blk.0.ffn_up.weight", 24, "Q", 0, "the data of token_embd.weight and blk.0.ffn_up.weight overlap"),
        ("blk.0.ffn_up.weight", 24, "Q", 32, "the data of token_embd.weight and blk.0.ffn_up.weight overlap"),
        ("blk.0.ffn_up.weight", 0, "I", 1 << 31, "a tensor has 2147483648 dimensions"),
        ("blk.0.ffn_up.weight", -1, "B", 1, "is there twice or cannot be printed"),
        ("output_norm.weight", -1, "B", ord("s"), "has tensors that its architecture lacks: output_norm.weighs"),
        ("llama.block_count", 4, "I", 1 << 31, "has 2147483648 as llama.block_count"),
        ("llama.block_count", 4, "I", 1 << 20, "has tensors of 1 layers, but block_count is 1048576"),
        ("llama.attention.head_count", 4, "I", 0, "has 0 as llama.attention.head_count. Expected a positive number."),
        ("llama.embedding_length", 4, "I", 1 << 27, "blk.0.attn_norm.weight is [64] instead of [134217728]"),
        ("llama.feed_forward_length", 4, "I", 1 << 27, "instead of [134217728, 64]"),
        ("llama.rope.freq_base", 4, "f", float("nan"), "has nan as llama.rope.freq_base"),
        ("llama.rope.freq_base", 0, "I", 77, "a value of its header has the unknown type 77"),
        ("general.architecture", 4, "Q", 1 << 40, "its header speaks of 1099511627776 bytes of a text"),
    ],
)
def test_damaged_entries(tmp_path: Path, name: str, at: int, form: str, value: Any, part: str) -> None:
    path = tiny_file(tmp_path / "model.gguf")
    with limit_memory(1 << 28):
        assert part in refusal(change(path, name, at, form, value))


@pytest.mark.parametrize(
    ("start", "part"),
    [
        (b"", "is no GGUF file"),
        (b"GGUF", "the file ends inside its header"),
        (b"PK\x03\x04" * 8, "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "has version 1 of GGUF. Expected version 2 or 3, little endian."),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "has version 50331648 of GGUF"),
        (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "speaks of 1152921504606846976 tensors, more than 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63), "values, more than 65536"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 0), "holds a model of the architecture 'None'"),
        (b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"ab", 9, 0, 1 << 50), "items of an array, more than"),
        (b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"ab", 9, 9, 1), "has the unknown type 9"),
        (b"GGUF" + struct.pack("<IQQQ2sIIQ", 3, 0, 1, 2, b"ab", 9, 8, 1 << 20), "the file ends inside its header"),
        (b"GGUF" + struct.pack("<IQQQ2sI", 3, 0, 1, 2, b"a\n", 0), "cannot be printed"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + struct.pack("<Q2sIB", 2, b"ab", 0, 1) * 2, "'ab' is there twice"),
    ],
)
def test_damaged_beginnings(tmp_path: Path, start: bytes, part: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(start)
    with limit_memory(1 << 28):
        assert part in refusal(path)
        assert "model.gguf" in refusal(path, gguf_tokenizer) if "None" not in part else gguf_tokenizer(path) is None


def test_the_embedding_says_how_many_tokens_there_are(tmp_path: Path) -> None:
    path = change(tiny_file(tmp_path / "model.gguf"), "llama.vocab_size", 4, "I", 5)
    assert open_gguf(path).config.vocab_size == tiny_config("llama").vocab_size


@pytest.mark.parametrize(
    ("architecture", "field", "key"),
    [
        ("llama", "rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
        ("gemma2", "rms_norm_eps", "gemma2.attention.layer_norm_rms_epsilon"),
        ("starcoder2", "norm_epsilon", "starcoder2.attention.layer_norm_epsilon"),
        ("llama", "max_position_embeddings", "llama.context_length"),
    ],
)
def test_a_missing_setting_is_named(architecture: str, field: str, key: str, tmp_path: Path) -> None:
    """llama.cpp refuses such files too; transformers would take a value of its own."""
    model, path = tiny_model(architecture, **CHANGES[architecture]), tmp_path / "model.gguf"
    vars(model.config)[field] = None  # transformers checks assignments
    write(path, model, matrices=Type.F32, architecture=architecture, values=HEADERS.get(architecture, ()))
    assert f"lacks {key}. Expected every setting of its architecture." in refusal(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [cut, replaced])
def test_a_file_that_changes_while_it_is_read_is_one_sentence(change: Callable[[Path], None], tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "model.gguf", tiny_tokens)
    stored = open_gguf(path)
    change(path)
    for read in (
        lambda _: stored.matrix("model.layers.0.mlp.up_proj", torch.float32),
        lambda _: stored.dense(torch.float32),
    ):
        assert refusal(path, read) == (
            f"'{path}' was changed while it was read. Expected a file that stays as it is. Load it again when nothing "
            "writes there."
        )


@pytest.mark.parametrize("num_bytes", [100 << 20, 300 << 20], ids=["KV rows", "rotary tables"])
def test_a_context_that_memory_does_not_hold_is_one_sentence(num_bytes: int, tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "model.gguf", context=1 << 20)
    LLM(str(path), dtype="float32", max_num_seqs=1, max_model_len=64)
    with limit_memory(num_bytes), pytest.raises(ModelError) as caught:
        LLM(str(path), dtype="float32", max_num_seqs=1)
    assert str(caught.value) == (
        f"there is no memory for the KV rows and tables of '{path}', 1 x 1048576 tokens. Expected more free memory, or "
        "a smaller max_model_len or max_num_seqs."
    )


def test_no_file_stays_open_or_mapped_after_loading(tmp_path: Path) -> None:
    path = tiny_file(tmp_path / "model.gguf", tiny_tokens)
    stored = open_gguf(path)
    module, _ = build(stored, str(path), torch.float32)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path not in [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    path.write_bytes(b"")
    with torch.no_grad():
        assert module(torch.arange(12)[None]).logits.isfinite().all()


def test_files_that_are_not_there(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    assert refusal(path) == f"there is no file '{path}'. Expected a GGUF file. Check the path."
    assert "is a directory. Expected a regular file" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_norm.weight"])
def test_scales_that_are_not_finite(tmp_path: Path, name: str) -> None:
    path = tiny_file(tmp_path / "model.gguf")
    tensor = next(each for each in gguf.GGUFReader(path).tensors if each.name == name)
    data = bytearray(path.read_bytes())
    wrong = np.array([np.nan], np.float32 if "norm" in name else np.float16).tobytes()
    data[tensor.data_offset : tensor.data_offset + len(wrong)] = wrong
    path.write_bytes(data)
    stored = open_gguf(path)
    parts = {"token_embd.weight": "model.embed_tokens", "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj"}

    def read(_: Path) -> Any:
        return stored.matrix(parts[name], torch.float32) if name in parts else stored.dense(torch.float32)

    message = refusal(path, read)
    assert message == f"{name} of '{path}' holds NaN or infinite values. Copy or download the file again."


def tiny_tokens(writer: GGUFWriter) -> None:
    """A vocabulary of letters in byte-level BPE, with a few merges."""
    tokens = ["<end>", *"abcdefgh", "ab", "cd", "abcd"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["a b", "c d", "ab cd"])
    writer.add_eos_token_id(0)


def opened_whole(path: Path) -> bool:
    """Reads all of a file: whether it worked, or was refused in one line."""
    try:
        stored = open_gguf(path)
        tensors = stored.dense(torch.float32)
        for part in {*stored.linears, stored.embedding} - {None}:
            stored.matrix(part, torch.float32)
        gguf_tokenizer(path)
    except ModelError as err:
        message = str(err)
    else:
        return all(each.isfinite().all() for each in tensors.values())
    assert str(path) in message
    assert "\n" not in message
    return False


def test_a_file_that_is_cut_anywhere_is_refused(tmp_path: Path) -> None:
    data = tiny_file(tmp_path / "model.gguf", tiny_tokens).read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data)
    assert opened_whole(path)
    for size in [*range(0, 2000, 13), *range(2000, len(data), 3001), len(data) - 40]:
        path.write_bytes(data[:size])
        assert not opened_whole(path), size


def test_headers_with_changed_bytes_are_read_or_refused(tmp_path: Path) -> None:
    whole = tiny_file(tmp_path / "model.gguf", tiny_tokens)
    data, path, rng = whole.read_bytes(), tmp_path / "changed.gguf", random.Random(0)
    end = min(tensor.data_offset for tensor in gguf.GGUFReader(whole).tensors)
    found = []
    with limit_memory(1 << 30):
        for _ in range(400):
            changed = bytearray(data)
            at = rng.randrange(end)
            match rng.randrange(3):
                case 0:
                    changed[at] ^= 1 << rng.randrange(8)
                case 1:
                    changed[at : at + 8] = rng.choice([0, 1, 1 << 31, 1 << 63, (1 << 64) - 1]).to_bytes(8, "little")
                case _:
                    changed[at] = rng.randrange(256)
            path.write_bytes(changed)
            found.append(opened_whole(path))
    assert 10 < sum(found) < 390
