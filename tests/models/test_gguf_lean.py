"""Weights for lean decoders straight from a GGUF file are those that are found in transformers' model of the file."""

import subprocess
import sys
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from gguf_files import SMALL, tiny_file, write
from test_gguf import llama3_factors
from tiny_models import tiny_model

from foretoken.core.errors import ModelError
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import load_model, wrap_model
from foretoken.models.stored.gguf import lean_file
from foretoken.models.stored.gguf_config import read_settings
from foretoken.models.stored.gguf_file import read_gguf

_GEMMA = SMALL | {"head_dim": 32, "query_pre_attn_scalar": 32, "rope_parameters": None}


def mixed(key: str) -> Type:
    return Type.Q8_0 if "v_proj" in key or "embed" in key else Type.Q4_0


# Architecture, changes of the model, and how its file is written.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", SMALL, {}),
    "llama tied": ("llama", SMALL, {"tied": True}),
    "llama in bf16, tied": ("llama", SMALL, {"tied": True, "matrices": Type.BF16}),
    "llama with biases": ("llama", SMALL | {"attention_bias": True, "mlp_bias": True}, {}),
    "llama, linear": ("llama", SMALL, {"values": {"rope.scaling.factor": 4.0}}),
    "llama 3": ("llama", SMALL, {"tensors": llama3_factors(SMALL)}),
    "qwen2": ("qwen2", SMALL, {"tied": True}),
    "qwen3": ("qwen3", SMALL | {"head_dim": 32}, {}),
    "gemma3": (
        "gemma3", _GEMMA,
        {"tied": True, "values": {
            "attention.sliding_window": 6, "attention.sliding_window_pattern": [True, False, True],
        }},
    ),
}  # fmt: skip


def written(path: Path, case: str) -> Path:
    architecture, changes, options = CASES[case]
    write(path, tiny_model(architecture, **changes), **{"matrices": mixed} | options)
    return path


def same(found: Any, expected: Any, where: str) -> None:
    """Compares values, tensors by their bits, layers and matrices by what they hold."""
    assert type(found) is type(expected) or {type(found), type(expected)} <= {torch.Tensor, torch.nn.Parameter}, where
    if isinstance(found, torch.Tensor):
        assert found.dtype == expected.dtype, where
        assert torch.equal(found, expected), where
    elif isinstance(found, torch.nn.Module):
        same(dict(found.named_parameters()), dict(expected.named_parameters()), where)
        same(dict(found.named_buffers()), dict(expected.named_buffers()), where)
    elif is_dataclass(found):
        for field in fields(found):
            same(getattr(found, field.name), getattr(expected, field.name), f"{where}.{field.name}")
    elif isinstance(found, dict):
        assert found.keys() == expected.keys(), where
        for key in found:
            same(found[key], expected[key], f"{where}[{key}]")
    elif isinstance(found, list):
        assert len(found) == len(expected), where
        for index, pair in enumerate(zip(found, expected, strict=True)):
            same(*pair, f"{where}[{index}]")
    else:
        assert found == expected, where


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", CASES)
def test_all_weights_have_the_same_bits(case: str, dtype: str, path: Path) -> None:
    model = load_model(written(path, case), dtype=dtype)
    assert model.lean is not None
    of_module = wrap_model(model.module, name="module")
    found, expected = model.lean(40), read_weights(of_module, 40)
    expected = replace(expected, is_borrowed=False)
    if case == "llama 3":  # the file has the factors, rounded; transformers computes them again
        for one, other in zip(found.layers.blocks, expected.layers.blocks, strict=True):
            torch.testing.assert_close(one.rotary.cos, other.rotary.cos, atol=1e-5, rtol=0)
            object.__setattr__(other, "rotary", one.rotary)
    same(found, expected, case)
    for name in ("vocab_size", "context_len", "num_layers", "eos_ids"):
        assert getattr(model, name) == getattr(of_module, name), name


def test_matrices_are_in_memory_once(path: Path) -> None:
    """The module and the lean weights share them, and a tied head shares the embedding."""
    model = load_model(written(path, "llama tied"))
    weights: Any = read_weights(model, 8)
    module: Any = model.module
    assert model.module is module
    assert module.model.layers[1].mlp.down_proj.matrix is weights.layers.blocks[1].mlp.down.weight
    assert module.lm_head.matrix is weights.embedding is weights.head.matrix


def test_transformers_models_stay_out_of_the_way(path: Path) -> None:
    """They take seconds to import."""
    program = """
import sys
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import load_model
from foretoken.entrypoints.llm import LLM
read_weights(load_model(sys.argv[1]), 8)
heavy = ("modeling_utils", "core_model_loading", "activations")
print([name for name in heavy if f"transformers.{name}" in sys.modules])
"""
    command = [sys.executable, "-c", program, str(written(path, "llama"))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    assert done.stdout == "[]\n"


SLOW = """
import atexit, os, sys, time
from foretoken.models.lean_weights import read_weights
from foretoken.models.loading import load_model
from foretoken.models.stored.gguf_file import GgufFile
read, parent, seen = GgufFile.matrix, os.getpid(), []
def slow(*args, **kwargs):
    if os.getpid() == parent:
        seen.append(args)
        time.sleep(1)
    return read(*args, **kwargs)
GgufFile.matrix = slow
model = load_model(sys.argv[1])
if os.fork() == 0:
    read_weights(model, 8)
    print("read", flush=True)
    os._exit(0)
os.wait()
atexit.register(lambda: print(len(seen)))
raise KeyboardInterrupt
"""


def test_a_process_ends_while_weights_are_read(path: Path) -> None:
    """At Ctrl-C the thread that reads is not waited for; a forked process has none, and reads itself."""
    command = [sys.executable, "-c", SLOW, str(written(path, "llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    first, number = done.stdout.splitlines()
    assert first == "read"
    assert int(number) < 22  # matrices


@pytest.mark.parametrize(
    "options",
    [
        {"values": {"attention.sliding_window": 6}},
        {"leave_out": ["blk.0.ffn_up.weight"]},
        {"tensors": {"blk.0.other.weight": np.zeros(4, np.float32)}},
        {"tensors": {"blk.0.attn_q.bias": np.zeros(4, np.float32)}},
    ],
    ids=["a setting", "a missing tensor", "another tensor", "a wrong shape"],
)
def test_other_files_are_left_to_transformers(options: dict[str, Any], path: Path) -> None:
    """Which then refuses them with its own reason."""
    tiny_file(path, **options)
    assert lean_file(read_settings(read_gguf(path)), torch.float32) is None
    with pytest.raises(ModelError, match=r"may change the model|is missing|lacks|instead of"):
        load_model(path)


_HEAD_NORMS = [f"blk.{layer}.attn_{part}_norm.weight" for layer in range(3) for part in "qk"]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {"tensors": dict.fromkeys(_HEAD_NORMS, np.ones(16, np.float32))}),
        ("llama", {"tensors": {"blk.1.attn_q.bias": np.ones(64, np.float32)}}),
        ("llama", {"tensors": {"blk.0.ffn_up.bias": np.ones(96, np.float32)}}),
        ("qwen2", {"leave_out": ["blk.1.attn_q.bias"]}),
        ("qwen2", {"tensors": {"blk.0.attn_output.bias": np.ones(64, np.float32)}}),
        ("qwen3", {"leave_out": _HEAD_NORMS}),
        ("qwen3", {"leave_out": _HEAD_NORMS[1:2]}),
        ("gemma3", {"leave_out": _HEAD_NORMS}),
        ("gemma3", {"tensors": {"blk.2.attn_k.bias": np.ones(32, np.float32)}}),
    ],
)
def test_norms_and_biases_of_other_models_are_refused(architecture: str, options: dict[str, Any], path: Path) -> None:
    """A file without a norm of its heads would be another model, and say nothing."""
    model = tiny_model(architecture, **(_GEMMA if architecture == "gemma3" else SMALL | {"head_dim": 16}))
    write(path, model, matrices=Type.Q8_0, tied=True, **options)
    assert lean_file(read_settings(read_gguf(path)), torch.float32) is None
    with pytest.raises(ModelError, match=r"is missing|is not used"):
        load_model(path)


def test_other_rotations_are_left_to_transformers(path: Path) -> None:
    scaling = {"factor": 4.0, "type": "yarn", "original_context_length": 24}
    values = {f"rope.scaling.{key}": value for key, value in scaling.items()}
    assert load_model(tiny_file(path, values=values)).lean is None


def test_scales_that_are_not_finite(path: Path) -> None:
    tiny_file(path, matrices=Type.Q4_0)
    stored = read_gguf(path).tensors["blk.0.ffn_up.weight"]
    with path.open("r+b") as file:
        file.seek(stored.start)
        file.write(np.array([np.nan], np.float16).tobytes())
    with pytest.raises(ModelError, match=r"blk\.0\.ffn_up\.weight of .* holds NaN or infinite values"):
        read_weights(load_model(path), 8)


def test_a_model_that_memory_does_not_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path / "model.gguf", "llama")
    tiny_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr("foretoken.models.loaded.free_bytes", lambda device: 1000)
    monkeypatch.setattr("foretoken.models.stored.gguf_file.GgufFile.matrix", None)
    for name in ("model.gguf", "model"):
        with pytest.raises(
            ModelError, match=r"weights of .*model.* need 0\.0 GB of memory on 'cpu', where 0\.0 GB are"
        ):
            load_model(tmp_path / name)


def test_bytes_in_memory_are_told_before(path: Path) -> None:
    file = lean_file(read_settings(read_gguf(written(path, "llama"))), torch.bfloat16)
    assert file is not None
    done, total = file.bytes_read()
    assert 0 == done < total < path.stat().st_size
    weights = file.weights(8)
    assert file.bytes_read() == (total, total)
    tensors = {each.data_ptr(): each.nbytes for each in weights.tensors()}
    assert file.num_bytes == pytest.approx(sum(tensors.values()), rel=0.3)  # panels are filled up
