"""Weights side by side: a few allocations a model, the same values, and every weight still its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from foretoken.models.loaded import gather_weights
from foretoken.models.loading import load_model

MODEL = str(Path(__file__).parents[2] / "models" / "tinycode")


def allocations(module: nn.Module) -> set[int]:
    return {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2", "gpt2"])
def test_one_allocation_a_block_and_one_for_the_rest(name: str) -> None:
    module = tiny_model(name)
    before = {key: tensor.clone() for key, tensor in module.state_dict().items()}
    tied = {key: id(parameter) for key, parameter in module.named_parameters(remove_duplicate=False)}
    gather_weights(module)
    assert len(allocations(module)) == module.config.num_hidden_layers + 1
    assert tied == {key: id(parameter) for key, parameter in module.named_parameters(remove_duplicate=False)}
    for key, tensor in module.state_dict().items():
        assert torch.equal(tensor, before[key])
        assert tensor.data_ptr() % 64 == 0 or key not in tied


def test_weights_of_two_dtypes_and_no_numbers() -> None:
    """Each dtype has an allocation of its own; what holds nothing takes no room."""
    module = nn.ModuleList([nn.Linear(3, 5), nn.Linear(3, 5).to(torch.bfloat16)])
    module.register_parameter("nothing", nn.Parameter(torch.empty(0, 5)))
    before = [parameter.clone() for parameter in module.parameters()]
    gather_weights(module)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))


def test_writing_to_one_weight_leaves_its_neighbours() -> None:
    module = tiny_model("llama")
    gather_weights(module)
    before = {key: parameter.clone() for key, parameter in module.named_parameters()}
    with torch.no_grad():
        module.model.layers[0].self_attn.k_proj.weight.fill_(7.0)
    changed = [key for key, parameter in module.named_parameters() if not torch.equal(parameter, before[key])]
    assert changed == ["model.layers.0.self_attn.k_proj.weight"]


def test_a_loaded_model_has_few_allocations_and_can_be_saved(tmp_path: Path) -> None:
    model = load_model(MODEL, dtype="bfloat16")
    assert len(allocations(model.module)) == model.num_layers + 1
    model.module.save_pretrained(tmp_path)
    saved = load_model(str(tmp_path), dtype="bfloat16")
    pairs = zip(model.module.parameters(), saved.module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
