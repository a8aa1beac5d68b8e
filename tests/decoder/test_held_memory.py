"""Weights that move, shrink or go while somebody reads them by their address: the process goes on, or hears a sentence.

Where one of these tests fails the process may end with a signal: that is the failure.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing  # teaches ForkingPickler tensors
from pairwise import slow_products
from tiny_models import tiny_model
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ModelError, PassError
from foretoken.core.results import CompletionOutput
from foretoken.core.token_tree import TokenTree
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.memory import HeldMemory, check_memory, has_memory
from foretoken.decoder.native import NativeBlocks
from foretoken.decoder.native_linear import NativeLinear
from foretoken.formats import native
from foretoken.formats.checkpoint import HeadCheckpoint
from foretoken.heads.base import build_head
from foretoken.heads.hydra import HydraConfig
from foretoken.models.lean_weights import read_weights
from foretoken.models.loaded import DTYPES
from foretoken.models.loading import load_model, wrap_model
from foretoken.models.parts import target_parts
from foretoken.runner.runner import Runner

pytestmark = pytest.mark.native

RUNNERS = ["lean-native", "lean-stock", "generic"]
LOST = "was freed or cut"


def storages(module: nn.Module) -> list[Any]:
    return [parameter.untyped_storage() for parameter in module.parameters()]


def extend(module: nn.Module) -> None:
    """Every storage lies elsewhere afterwards, with what it held."""
    for storage in storages(module):
        storage.resize_(storage.nbytes() + 64)


def replace_data(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = torch.zeros_like(parameter)


def overwrite_freed_memory() -> None:
    """What is still read from freed memory is noise afterwards, or no memory at all."""
    for exponent in range(5, 16):
        _ = [torch.full((1 << exponent,), float("nan")) for _ in range(16)]


MOVES: dict[str, Callable[[nn.Module], Any]] = {
    "share_memory": lambda module: module.share_memory(),
    "sent to a process": lambda module: ForkingPickler.dumps(module.state_dict()),
    "made longer": extend,
    "other data": replace_data,
    "another dtype": lambda module: module.to(torch.float16),
    "another dtype and back": lambda module: module.half().float(),
}


def decoded(llm: LLM) -> CompletionOutput:
    return llm.generate([[5, 9, 3]], SamplingParams(temperature=0.0, max_tokens=8))[0].outputs[0]


@pytest.mark.parametrize(
    ("move", "runner", "dtype"), slow_products(list(MOVES), RUNNERS, [torch.float32, torch.bfloat16], each=1)
)
def test_text_stays_what_it_was_when_weights_move(move: str, runner: str, dtype: torch.dtype) -> None:
    module = tiny_model("llama_tied").to(dtype)
    llm = LLM(module, speculative_config={"method": "ngram"}, runner=runner)
    expected = decoded(llm)
    for _ in range(2):
        MOVES[move](module)
        overwrite_freed_memory()
        assert decoded(llm) == expected


@pytest.mark.parametrize("own", ["share_memory", "made longer"])
def test_weights_of_a_loaded_model_may_move_too(own: str, tmp_path: Path) -> None:
    tiny_model("qwen3").save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    llm = LLM(loaded, runner="lean-native")
    expected = decoded(llm)
    MOVES[own](loaded.module)
    overwrite_freed_memory()
    assert decoded(llm) == expected


@pytest.mark.parametrize(
    ("which", "sizes", "runner"),
    slow_products(
        ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm"],
        [[0], [8], [1000, 8], [8, 8]],
        RUNNERS,
    ),
)
def test_weights_that_are_freed_end_the_request(which: str, sizes: list[int], runner: str) -> None:
    """Also one that comes back to its address with fewer bytes; the native kernels have norms of their own."""
    module = tiny_model("llama")
    llm = LLM(module, runner=runner)
    expected = decoded(llm)
    for name, parameter in module.named_parameters():
        if name.startswith(which):
            for size in sizes:
                parameter.untyped_storage().resize_(min(size, parameter.nbytes - 4))
    for _ in range(2):
        output = decoded(llm)
        if which == "model.norm" and runner == "lean-native":
            assert output == expected
            continue
        assert output.finish_reason == "error"
        assert LOST in str(output.error)
        assert "PassError" in str(output.error)


def test_a_model_without_its_memory_is_refused() -> None:
    module = tiny_model("llama")
    storages(module)[3].resize_(0)
    with pytest.raises(ModelError, match=LOST):
        LLM(module)


def test_in_place_changes_are_the_models() -> None:
    """What `HeldMemory` is not for: the same place, another value."""
    module = tiny_model("llama")
    target = Runner(wrap_model(module, name="tiny"), num_slots=1, max_nodes=4, runner="lean-native")
    before = target.verify([0], [0], TokenTree.roots([5])).logits
    with torch.no_grad():
        module.lm_head.weight.mul_(2)
    torch.testing.assert_close(target.verify([0], [0], TokenTree.roots([5])).logits, before * 2)


def ruin(path: Path, how: str) -> None:
    """What a copy over it, a download to it, or a full disk makes of a file that is in use."""
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "cut":
            file.truncate(100)
        else:
            file.write(bytes(size))


@pytest.mark.parametrize(
    ("dtype", "runner", "how"), slow_products(["float32", "bfloat16"], RUNNERS, ["cut", "written over"])
)
def test_files_are_not_read_after_loading(dtype: str, runner: str, how: str, tmp_path: Path) -> None:
    """Weights that are wanted as the file has them would be its pages, and a cut file the end of the process."""
    tiny_model("gpt2" if runner == "generic" else "llama", dtype=DTYPES[dtype]).save_pretrained(tmp_path)
    llm = LLM(tmp_path, dtype=dtype, runner=runner)
    expected = decoded(llm)
    ruin(tmp_path / "model.safetensors", how)
    assert decoded(llm) == expected


@pytest.mark.parametrize("how", ["cut", "written over"])
def test_head_files_are_not_read_after_loading(how: str, tmp_path: Path) -> None:
    config = HydraConfig(hidden_size=32, vocab_size=67, num_heads=2, num_layers=2)
    torch.manual_seed(0)
    weights = {name: torch.randn(part.shape) for name, part in build_head(config).state_dict().items()}
    native.write_checkpoint(HeadCheckpoint(config=config, weights=weights), tmp_path / "head")
    read = native.read_checkpoint(tmp_path / "head", json.loads((tmp_path / "head" / "config.json").read_text()))
    module = read.module(dtype=torch.float32)
    ruin(tmp_path / "head" / "model.safetensors", how)
    assert all(torch.equal(part, weights[name]) for name, part in module.state_dict().items())


@pytest.mark.parametrize("part", ["weight", "bias"])
def test_native_layers_follow_their_weights(part: str) -> None:
    layer, x = nn.Linear(40, 300), torch.randn(3, 40)
    native = NativeLinear(layer.weight, layer.bias)
    expected = native(x)
    getattr(layer, part).untyped_storage().resize_(300 * 41 * 4)
    overwrite_freed_memory()
    assert torch.equal(native(x), expected)
    getattr(layer, part).untyped_storage().resize_(8)
    with pytest.raises(PassError, match=LOST):
        native(x)
    with pytest.raises(UnsuitableError, match="with memory"):
        NativeLinear(layer.weight, layer.bias)


def test_the_head_that_drafters_share_follows_too() -> None:
    module = tiny_model("llama")
    parts = target_parts(wrap_model(module, name="tiny"), is_inference=True)
    x = torch.randn(2, 32)
    expected = parts.lm_head(x)
    module.share_memory()
    overwrite_freed_memory()
    assert torch.equal(parts.lm_head(x), expected)


class Wrapper(torch.Tensor):
    """As quantized and distributed weights are made: shape and dtype of a tensor, and no memory."""

    @staticmethod
    def __new__(cls, shape: Any) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.float32, device="cpu")
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Wrapper(args[0].shape)
        raise NotImplementedError(func)


def test_tensors_that_only_look_like_some() -> None:
    with pytest.raises(UnsuitableError, match="a Wrapper"):
        NativeLinear(Wrapper((5, 8)))
    loaded = wrap_model(tiny_model("llama"), name="tiny")
    target, module = Runner(loaded, num_slots=1, runner="lean-native"), loaded.module
    module.get_submodule("model.layers.0.mlp.up_proj").weight = nn.Parameter(Wrapper((48, 32)), requires_grad=False)
    with pytest.raises(UnsuitableError, match=r"up_proj\.weight is a Wrapper, not a plain tensor"):
        NativeBlocks(read_weights(loaded, 40).layers, target.cache, [])


def test_what_counts_as_changed() -> None:
    tensors = [torch.zeros(6), torch.zeros(4, 3)]
    tensors.append(tensors[1][1:])
    held = HeldMemory(tensors)
    tensors[0].add_(1)
    assert not held.has_changed()
    tensors[2].untyped_storage().resize_(24)
    assert held.has_changed()
    assert [has_memory(tensor) for tensor in tensors] == [True, False, False]
    assert has_memory(torch.empty(4, 3).T)
    assert has_memory(torch.empty(2, 3)[2:])
    transposed = torch.empty(4, 3).T
    transposed.untyped_storage().resize_(44)
    assert not has_memory(transposed)
    check_memory(tensors[:1])
    with pytest.raises(PassError, match=r"\(4, 3\) torch.float32 was freed or cut: 24 bytes are left of 48"):
        check_memory(tensors)
