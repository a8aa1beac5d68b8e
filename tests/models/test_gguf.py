"""GGUF files: matrices, configurations and tokenizers are those that llama.cpp's package and transformers read."""

import logging
import os
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_files import SMALL, TINYCODE, add_tokenizer, tiny_file, write, write_header, written
from limits import limit_memory
from model_files import message_of
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
VALUES: dict[str, dict[str, Any]] = {
    "phi3": {"attention.sliding_window": 6},
    "starcoder2": {"attention.sliding_window": 6},
    "gemma2": {
        "attention.sliding_window": 6, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 200.0,
    },
    "gemma3": {
        "attention.sliding_window": 6, "final_logit_softcapping": 200.0,
        "attention.sliding_window_pattern": [True, False, True],
    },
}  # fmt: skip
_UNSAID = ("architectures", "dtype", "_name_or_path", "initializer_range", "bos_token_id", "eos_token_id")


def same_logits(path: Path, reference: Any, share: float = 1e-5) -> None:
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
def test_matrices_and_the_embedding_are_what_the_file_says(path: Path, type_: Type) -> None:
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
def test_matrices_that_are_no_integers_stay_as_they_are(path: Path, type_: Type) -> None:
    weights = write(path, tiny_model("llama", **SMALL), matrices=type_)
    stored = open_gguf(path)
    assert (stored.label, stored.linears, stored.embedding) == ("GGUF, not quantized", frozenset(), None)
    dense = stored.dense(torch.float32)
    assert all(each.dtype == torch.float32 for each in dense.values())
    assert dense.keys() == weights.keys()
    assert all(torch.equal(dense[key].float(), weights[key]) for key in weights)


@pytest.mark.parametrize("architecture", CHANGES)
@pytest.mark.parametrize("type_", [Type.Q4_0, Type.BF16])
def test_whole_models_are_those_of_their_weights(path: Path, architecture: str, type_: Type) -> None:
    is_tied, values = architecture == "llama_tied", VALUES.get(architecture)
    model = tiny_model(architecture, **CHANGES[architecture])
    written(path, model, matrices=type_, tied=is_tied, values=values)
    config = open_gguf(path).config
    assert config.tie_word_embeddings == (is_tied and type_ == Type.BF16)
    config.tie_word_embeddings = is_tied
    assert told(config) == told(model.config)
    same_logits(path, model)


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
def test_transformers_reads_the_same_model(path: Path, architecture: str, changes: Any, tied: bool) -> None:
    write(path, tiny_model(architecture, **changes), matrices=mixed, tied=tied)
    same_logits(path, AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32), 1e-4)
    assert open_gguf(path).label == "GGUF, Q4_K and Q6_K"


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


def llama3_factors(changes: dict[str, Any]) -> dict[str, np.ndarray]:
    """The tensor of factors of positions that stands for `LLAMA3`."""
    plain, scaled = (tiny_model("llama", **changes, rope_parameters=each | {"rope_theta": 10000.0}).model.rotary_emb
                     for each in ({"rope_type": "default"}, LLAMA3))  # fmt: skip
    factors = plain.inv_freq / scaled.inv_freq
    assert (factors.min(), factors.max()) == (1, 8)
    return {"rope_freqs.weight": factors.numpy()}


@pytest.mark.parametrize(
    ("rope", "values"),
    [
        ({"rope_type": "linear", "factor": 4.0}, {"factor": 4.0, "type": "linear"}),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24},
            {"factor": 4.0, "original_context_length": 24, "type": "yarn"},
        ),
        (LLAMA3, {}),
    ],
    ids=["linear", "yarn", "llama3"],
)
def test_scaled_positions(path: Path, rope: Any, values: Any) -> None:
    model = tiny_model("llama", **SMALL, rope_parameters=rope | {"rope_theta": 10000.0})
    values = {f"rope.scaling.{key}": value for key, value in values.items()}
    written(path, model, matrices=Type.Q8_0, values=values, tensors={} if values else llama3_factors(SMALL))
    assert told(open_gguf(path).config) == told(model.config)
    same_logits(path, model)
    plain = tiny_model("llama", **SMALL)
    plain.load_state_dict(model.state_dict())
    with pytest.raises(AssertionError):
        same_logits(path, plain)


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
def test_what_a_file_leaves_out_of_its_rope_is_as_in_llama_cpp(path: Path, values: Any, rope: Any) -> None:
    config = open_gguf(tiny_file(path, values={f"rope.{key}": value for key, value in values.items()})).config
    assert config.max_position_embeddings == 96
    assert config.rope_parameters == rope | {"rope_theta": config.rope_parameters["rope_theta"]}


def test_large_gemma_has_another_scale_of_scores(path: Path) -> None:
    model = tiny_model("gemma2", **_GEMMA | {"hidden_size": 64, "num_hidden_layers": 46, "layer_types": None})
    write(path, model, matrices=Type.Q4_0, values=VALUES["gemma2"], tied=True)
    config = open_gguf(path).config
    assert config.query_pre_attn_scalar == 64 // 4
    assert config.layer_types == ["sliding_attention", "full_attention"] * 23
    assert config.sliding_window == 6


def test_a_window_of_0_is_none(path: Path) -> None:
    """As of Phi-4."""
    values = {"attention.sliding_window": 0}
    model = written(path, tiny_model("phi3", **SMALL, sliding_window=None), matrices=Type.Q8_0, values=values)
    assert open_gguf(path).config.sliding_window is None
    same_logits(path, model)


@pytest.fixture(scope="module")
def tinycode(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    model = AutoModelForCausalLM.from_pretrained(TINYCODE, dtype=torch.float32)
    values = {"tokenizer.chat_template": "{{ messages[0].content }}", "tokenizer.ggml.eot_token_id": 7}
    write(path, model, matrices=Type.Q8_0, tied=True, tokenizer=True, values=values)
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


def test_tokenizer_is_the_one_that_transformers_reads(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_file(path, with_tokens)
    with caplog.at_level(logging.WARNING):
        tokenizer = gguf_tokenizer(path)
    assert not caplog.text
    expected = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    for text in ("def add(a, b):\n    return a + b  # 12345\n", "", "Déjà vu"):
        assert tokenizer.encode(text) == expected.encode(text)
        assert tokenizer.encode(text)[0] == 0


def test_a_file_without_a_tokenizer_has_none(path: Path) -> None:
    assert gguf_tokenizer(tiny_file(path)) is None


def refusal(path: Path, opened: Callable[[Path], Any] = open_gguf) -> str:
    message = message_of(lambda: opened(path))
    assert str(path) in message
    assert len(message) - len(str(path)) < 700
    return message


@pytest.mark.parametrize(
    ("key", "value", "part"),
    [
        ("expert_count", 8, "lacks llama.expert_used_count"),
        ("attention.scale", 0.5, "has llama.attention.scale, which may change the model"),
        ("attention.sliding_window", 64, "has llama.attention.sliding_window, which may change the model"),
        ("rope.scaling.type", "longrope", "scales positions by 'longrope'. Expected rope_factors_short.weight and"),
        ("rope.scaling.type", "ntk", "scales positions by 'ntk'. Expected none, linear, yarn or longrope."),
        ("rope.scaling.attn_factor", 1.5, "has a factor of attention without the scaling of positions"),
        ("rope.freq_base_swa", 500.0, "rotates by another base in layers with a window"),
        ("rope.scaling.type", "linear", "lacks llama.rope.scaling.factor."),
        ("tokenizer.ggml.eos_token_id", "x", "tokenizer.ggml.eos_token_id is 'x', and no token id"),
        ("split.count", 3, "is a part of a model in 3 files. Expected the first one with its own name"),
        ("general.alignment", 3, "general.alignment is 3, not a power of 2"),
        ("attention.head_count_kv", [2, 1], "has [2, 1] as llama.attention.head_count_kv"),
    ],
)
def test_settings_that_are_refused(path: Path, key: str, value: Any, part: str) -> None:
    assert part in refusal(tiny_file(path, values={key: value}))


@pytest.mark.parametrize("name", ["qwen2moe", "bert", "clip"])
def test_architectures_that_are_refused(path: Path, name: str) -> None:
    message = refusal(write_header(path, architecture=name))
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


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (
            {"leave_out": ["blk.0.ffn_up.weight", "output_norm.weight"]},
            "do not fit its settings: model.layers.0.mlp.up_proj.weight is missing, model.norm",
        ),
        (
            {"tensors": {"blk.0.ffn_gate_inp.weight": np.ones((2, 64), np.float32)}},
            "has tensors that its architecture lacks: blk.0.ffn_gate_inp.weight.",
        ),
        (
            {"tensors": {"rope_freqs.weight": np.full(8, 3, np.float32)}},
            "has factors of positions in rope_freqs.weight that no formula gives",
        ),
    ],
)
def test_missing_and_foreign_tensors_are_named(path: Path, options: dict[str, Any], part: str) -> None:
    assert part in refusal(tiny_file(path, **options))


def change(path: Path, name: str, at: int, form: str, value: Any) -> Path:
    """Overwrites bytes behind a name in the header."""
    data = bytearray(path.read_bytes())
    length = struct.pack("<Q", len(name))
    end = data.index(length + name.encode()) + 8 + len(name)
    struct.pack_into(f"<{form}", data, end + at, value)
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
        ("blk.0.ffn_up.weight", 20, "I", Type.Q4_K, "is [96, 64] in Q4_K. Expected a matrix with rows of a multiple"),
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
def test_damaged_entries(path: Path, name: str, at: int, form: str, value: Any, part: str) -> None:
    tiny_file(path)
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
def test_damaged_beginnings(path: Path, start: bytes, part: str) -> None:
    path.write_bytes(start)
    with limit_memory(1 << 28):
        assert part in refusal(path)
        assert "model.gguf" in refusal(path, gguf_tokenizer) if "None" not in part else gguf_tokenizer(path) is None


def test_the_embedding_says_how_many_tokens_there_are(path: Path) -> None:
    assert open_gguf(tiny_file(path, values={"vocab_size": 5})).config.vocab_size == tiny_config("llama").vocab_size


@pytest.mark.parametrize(
    ("architecture", "key"),
    [
        ("llama", "attention.layer_norm_rms_epsilon"), ("gemma2", "attention.layer_norm_rms_epsilon"),
        ("starcoder2", "attention.layer_norm_epsilon"), ("llama", "context_length"),
    ],
)  # fmt: skip
def test_a_missing_setting_is_named(architecture: str, key: str, path: Path) -> None:
    """llama.cpp refuses such files too; transformers would take a value of its own."""
    model = tiny_model(architecture, **CHANGES[architecture])
    write(path, model, matrices=Type.F32, values=VALUES.get(architecture, {}) | {key: None})
    assert f"lacks {architecture}.{key}. Expected every setting of its architecture." in refusal(path)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def replaced(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize("change", [cut, replaced])
def test_a_file_that_changes_while_it_is_read_is_one_sentence(change: Callable[[Path], None], path: Path) -> None:
    tiny_file(path, tiny_tokens)
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


@pytest.mark.parametrize("num_bytes", [100 << 20, 250 << 20], ids=["KV rows", "rotary tables"])
def test_a_context_that_memory_does_not_hold_is_one_sentence(num_bytes: int, path: Path) -> None:
    tiny_file(path, context=1 << 20)
    LLM(str(path), dtype="float32", max_num_seqs=1, max_model_len=64)
    with limit_memory(num_bytes):
        message = message_of(lambda: LLM(str(path), dtype="float32", max_num_seqs=1))
    assert message == (
        f"there is no memory for the KV rows and tables of '{path}', 1 x 1048576 tokens. Expected more free memory, or "
        "a smaller max_model_len or max_num_seqs."
    )


def test_no_file_stays_open_or_mapped_after_loading(path: Path) -> None:
    module, _ = build(open_gguf(tiny_file(path, tiny_tokens)), str(path), torch.float32)
    assert str(path) not in Path("/proc/self/maps").read_text()
    assert path not in [each.resolve() for each in Path("/proc/self/fd").iterdir()]
    path.write_bytes(b"")
    with torch.no_grad():
        assert module(torch.arange(12)[None]).logits.isfinite().all()


def test_files_that_are_not_there(path: Path) -> None:
    assert refusal(path) == f"there is no file '{path}'. Expected a GGUF file. Check the path."
    assert "is a directory. Expected a regular file" in refusal(path.parent)


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_up.weight", "blk.0.attn_norm.weight"])
def test_scales_that_are_not_finite(path: Path, name: str) -> None:
    tensor = next(each for each in gguf.GGUFReader(tiny_file(path)).tensors if each.name == name)
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
