"""Drafters in int8: which they are, where they are not, and that the target's weights stay as they were."""

import copy
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from drafting_contexts import attached, context
from end_to_end.tiny_llms import draft_model, llm, noisy, target
from pairwise import slow_products
from test_heads import drafter, saved

from foretoken import SamplingParams
from foretoken.core.errors import ConfigError
from foretoken.decoder.native_linear import NativeLinear
from foretoken.decoder.quantized import QuantizedMatrix
from foretoken.drafters.base import Committed

METHODS = ("medusa", "hydra", "mlp_speculator")


def head_weights(made: Any) -> set[torch.dtype]:
    """Dtypes of all that a drafter's head multiplies by: modules, what it keeps in lists, the block of Hydra++."""
    head = made.head
    lists = [getattr(head, name, []) for name in ("_quick_blocks", "_further")]
    layers = [layer for name, layer in head.named_modules() if not name.startswith("prefix.")]
    layers += [*getattr(head, "_quick_lm_heads", []), *chain.from_iterable(chain.from_iterable(lists))]
    assert not [layer for layer in layers if isinstance(layer, torch.nn.Linear)], "none is left in torch"
    found = {numbers_of(layer).dtype for layer in layers if isinstance(layer, NativeLinear)}
    if getattr(head, "prefix", None) is not None:
        matrix = made._features.stack.native_blocks._described.structure.layers[0].gate
        found.add(torch.int8 if matrix.scales else torch.float32)
    return found


def numbers_of(layer: NativeLinear) -> torch.Tensor:
    """What a layer multiplies by."""
    return layer._weight.numbers if isinstance(layer._weight, QuantizedMatrix) else layer._weight


def is_quantized(runner: Any) -> bool:
    """Whether a runner multiplies by int8, its LM head included."""
    model = runner.decoder._described.structure
    found = {bool(model.head.scales), bool(model.layers[0].query.scales), bool(model.layers[0].down.scales)}
    assert len(found) == 1
    return found.pop()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_draft_model_drafts_in_int8_unless_told_otherwise(dtype: torch.dtype) -> None:
    for option, expected in ((None, True), ("auto", True), ("int8", True), ("none", False)):
        made = attached(draft_model(noisy(dtype=dtype), **({} if option is None else {"quantization": option}))())
        assert is_quantized(made._runner) == expected


@pytest.mark.parametrize("method", METHODS)
def test_heads_draft_in_int8_unless_told_otherwise(method: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "head", method)
    assert head_weights(drafter(directory, method)) == {torch.int8}
    assert head_weights(drafter(directory, method, quantization="int8")) == {torch.int8}
    assert torch.int8 not in head_weights(drafter(directory, method, quantization="none"))


def test_a_draft_model_that_cannot_be_quantized() -> None:
    module = noisy(dtype=torch.float64)
    attached(draft_model(module)())
    with pytest.raises(ConfigError, match=r"quantization 'int8' cannot be had: .* no kernels for int8.* Leave it out"):
        attached(draft_model(module, quantization="int8")())


@pytest.mark.parametrize("runner", ["generic", "lean-stock"])
def test_runners_without_kernels(runner: str) -> None:
    made = draft_model(noisy(dtype=torch.float32), quantization="int8")()
    with pytest.raises(ConfigError, match=f"the {runner} runner has no kernels for int8, only lean-native has"):
        attached(made, runner=runner)


@pytest.mark.parametrize("method", METHODS)
def test_heads_on_other_devices(method: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "head", method)
    with pytest.raises(ConfigError, match="only CPUs have kernels for int8, not meta"):
        drafter(directory, method, changes={"device": torch.device("meta")}, quantization="int8")


@pytest.mark.parametrize(
    ("method", "dtype"),
    slow_products(["draft_model", *METHODS, "eagle", "eagle3"], [torch.float32, torch.bfloat16], each=1),
)
def test_the_target_is_never_quantized(method: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Its decoder reads what it read before, and not a bit of it has changed, shared LM head and embedding included."""
    module = copy.deepcopy(target("llama", dtype))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    if method == "draft_model":
        arguments: dict[str, Any] = {"drafter": draft_model(module, quantization="int8"), "trust_drafter": True}
    else:
        directory = saved(tmp_path / "head", method)
        arguments = {"speculative_config": {"method": method, "model": str(directory), "quantization": "int8"}}
    engine = llm(arguments, module=module, runner="lean-native")
    assert not is_quantized(engine.target)
    after = module.state_dict()
    assert all(torch.equal(after[name], value) and after[name].dtype == dtype for name, value in before.items())
    held = {each.data_ptr() for each in engine.target.decoder._described._kept}
    assert module.lm_head.weight.data_ptr() in held


@pytest.mark.parametrize("method", ["medusa", "eagle", "falcon"])
def test_a_copy_of_the_targets_lm_head_follows_it(method: str, tmp_path: Path) -> None:
    """Drafts of a sequence that begins after a write are those of a drafter that is made after it."""
    module, directory = copy.deepcopy(target("llama", torch.float32)), saved(tmp_path / "head", method)

    def made() -> Any:
        config = {"method": method, "model": str(directory), "quantization": "int8", "allow_other_target": True}
        return llm({"speculative_config": config}, module=module, runner="lean-native")

    def numbers(engine: Any) -> list[torch.Tensor]:
        native = engine.drafters[0].parts.native
        return [each.clone() for each in native.head.layer.tensors()]

    def generated(engine: Any) -> Any:
        return engine.generate([[5, 9, 3, 7]], SamplingParams(temperature=0.0, max_tokens=4))[0].outputs[0].token_ids

    engine = made()
    old = numbers(engine)
    with torch.no_grad():
        module.lm_head.weight.copy_(module.lm_head.weight.flip(0) * 2)
    new = made()
    assert generated(engine) == generated(new)
    for kept, copied, before in zip(numbers(engine), numbers(new), old, strict=True):
        assert torch.equal(kept, copied)
        assert not torch.equal(kept, before)


EAGLES = ("eagle", "eagle3", "falcon")


def drafted(directory: Path, method: str, **changes: Any) -> Any:
    """The tree of a drafter over weights as they are stored, from features of its own target."""
    shape: Any = {"widths": [3, 2]}
    made = drafter(directory, method, quantization="none", tree=shape, draft_sample_method="greedy", changes=changes)
    num_taps = len(made.reads.taps)
    features = torch.randn(6, num_taps, 32, generator=torch.Generator().manual_seed(0))
    made.commit(Committed(slots=[0], starts=[0], tokens=[[5, 9, 3, 7, 8, 4]], features=features))
    return made.propose(context([[5, 9, 3, 7, 8, 4, 6]]))


@pytest.mark.parametrize("method", [*METHODS, *EAGLES])
def test_weights_as_they_are_stored_draft_in_the_targets_precision(method: str, tmp_path: Path) -> None:
    """Beside a float32 target scores are those of torch's modules in float32, also where bfloat16 holds the weights."""
    directory = saved(tmp_path / "head", method, fits_bfloat16=True)
    ours = drafted(directory, method)
    with mock.patch("foretoken.drafters.head_drafter.runs_cpu_kernels", return_value=False):
        torchs = drafted(directory, method)
    assert ours.tokens.tolist() == torchs.tokens.tolist()
    assert ours.parents.tolist() == torchs.parents.tolist()
    assert ours.scores.shape[1] == 10
    torch.testing.assert_close(ours.scores, torchs.scores, rtol=1e-5, atol=1e-6)
