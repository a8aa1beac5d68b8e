"""A model directory that loads: its facts, dtypes, end tokens, what is left unused, and where its weights lie."""

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from model_files import edit_config, edit_weights, saved, split_weights
from plain_model import FLOAT32_TOLERANCE, PlainModel, relative_error
from tiny_models import ARCHITECTURES, CONTEXT_LEN, EOS_ID, VOCAB_SIZE, tiny_model
from torch import nn

from foretoken import LLM
from foretoken.core.errors import ModelError
from foretoken.core.token_tree import TokenTree
from foretoken.models.forward_pass import ATTENTION_NAME
from foretoken.models.loaded import DTYPES, gather_weights
from foretoken.models.loading import _context_len, load_model, load_tokenizer, wrap_model
from foretoken.runner.runner import Runner


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_saved_and_loaded_is_the_same_model(architecture: str, tmp_path: Path) -> None:
    model = load_model(str(saved(tmp_path / "tiny", architecture)))
    runner = Runner(model, num_slots=1, max_nodes=8)
    runner.prefill(0, [5, 6, 7], 0)
    ours = runner.verify([0], [3], TokenTree.roots([8])).logits[0]
    assert relative_error(ours, PlainModel(tiny_model(architecture))([5, 6, 7, 8])[-1]) < FLOAT32_TOLERANCE


def test_facts(directory: Path) -> None:
    model = load_model(str(directory))
    assert model.name == str(directory)
    assert (model.vocab_size, model.context_len, model.num_layers) == (VOCAB_SIZE, CONTEXT_LEN, 3)
    assert (model.dtype, model.device) == (torch.float32, torch.device("cpu"))
    assert model.eos_ids == (EOS_ID,)
    assert not model.module.training
    assert model.config._attn_implementation == ATTENTION_NAME
    assert model.backbone is model.module.model


def test_facts_of_a_model_with_other_names_for_them(tmp_path: Path) -> None:
    model = load_model(str(saved(tmp_path / "tiny", "gpt2")))  # n_positions, n_layer
    assert (model.vocab_size, model.context_len, model.num_layers) == (VOCAB_SIZE, CONTEXT_LEN, 3)


@pytest.mark.parametrize("name", DTYPES)
def test_dtype_is_what_was_asked_for(directory: Path, name: str) -> None:
    assert load_model(str(directory), dtype=name).dtype == DTYPES[name]


def test_dtype_auto_is_float32_on_a_cpu(tmp_path: Path) -> None:
    directory = tmp_path / "tiny"
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained(directory)
    assert load_model(str(directory), device="cpu").dtype == torch.float32


def test_unknown_dtype(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"dtype 'bfloat61' does not exist\. Did you mean 'bfloat16'\? Known: auto"):
        load_model(str(directory), dtype="bfloat61")


@pytest.mark.parametrize(
    "device", ["cud", "cpu:x", "cuda:63", "meta", "meta:0", "opencl", "lazy", "hpu", "privateuseone"]
)
def test_device_that_is_not_there(directory: Path, device: str) -> None:
    """Also those that torch has a name for and no tensors, or tensors without numbers."""
    with pytest.raises(ModelError, match=rf"^device '{device}' cannot be used: .*\. Expected 'auto'") as caught:
        LLM(directory, device=device)
    assert len(str(caught.value)) < 320


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_an_accelerator_that_torch_does_not_find(directory: Path) -> None:
    with pytest.raises(ModelError, match=r"'cuda' cannot be used: .*install its driver and the build of torch"):
        LLM(directory, device="cuda")


@pytest.mark.parametrize(("eos", "expected"), [(7, (7,)), ([7, 9], (7, 9)), (None, ())])
@pytest.mark.parametrize("has_generation_config", [True, False])
def test_end_tokens(
    tmp_path: Path, eos: int | list[int] | None, expected: tuple[int, ...], has_generation_config: bool
) -> None:
    directory = saved(tmp_path / "tiny", eos_token_id=eos)
    if not has_generation_config:
        (directory / "generation_config.json").unlink()
    assert load_model(str(directory)).eos_ids == expected


def test_end_tokens_of_the_generation_config_come_first(directory: Path) -> None:
    edit_config(directory, eos_token_id=33)
    assert load_model(str(directory)).eos_ids == (EOS_ID,)  # generation_config.json was left as it was


def test_a_model_in_memory() -> None:
    """Without a generation configuration, in training mode, with another attention: as scripts hold them."""
    module = tiny_model("gpt2", resid_pdrop=0.5).train()
    module.generation_config = None
    model = wrap_model(module, name="mine")
    assert (model.name, model.eos_ids) == ("mine", (EOS_ID,))
    assert not model.module.training
    assert model.config._attn_implementation == ATTENTION_NAME


def test_context_without_a_limit_of_its_own() -> None:
    assert _context_len(SimpleNamespace()) == 4096  # ALiBi: no field for it


def test_shards(directory: Path) -> None:
    whole = load_model(str(directory)).module.state_dict()
    split_weights(directory)
    for key, tensor in load_model(str(directory)).module.state_dict().items():
        assert torch.equal(tensor, whole[key])


def test_unused_weights_are_told_but_no_error(directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    # Published checkpoints carry value heads, multi-token prediction layers and old buffers.
    edit_weights(directory, lambda tensors: tensors.update({"v_head.weight": torch.zeros(1, 32)}))
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        load_model(str(directory))
    assert f"{directory}: unused weights: v_head.weight" in caplog.text


def test_tied_head_needs_no_weight_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = saved(tmp_path / "tiny", "llama_tied")
    edit_weights(directory, lambda tensors: tensors.pop("lm_head.weight", None) and None)
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        module = load_model(str(directory)).module
    assert torch.equal(module.lm_head.weight, module.model.embed_tokens.weight)
    assert not caplog.records


def test_no_tokenizer_is_no_error(directory: Path) -> None:
    assert load_tokenizer(str(directory)) is None


@pytest.mark.parametrize("text", ["{nope", "[]", '{"model": 3}'])
def test_damaged_tokenizer(directory: Path, text: str) -> None:
    (directory / "tokenizer.json").write_text(text)
    with pytest.raises(ModelError, match=r"the tokenizer of '.*tiny' cannot be read: .*"):
        load_tokenizer(str(directory))


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
