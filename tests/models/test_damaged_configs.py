"""Every field of config.json, damaged in every way: the model works, or one sentence refuses it, soon and cheaply."""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import limit_memory
from model_files import MISSING, damage, damages, edit_config, edit_weights, outcome, refusal, saved

from foretoken import LLM, SamplingParams
from foretoken.core.checks import shown
from foretoken.decoder import slot_cache
from foretoken.models.loading import load_model

ARCHITECTURES = ("llama", "gpt2", "gpt_oss")  # rotary and learned positions; experts, windows and sinks
_SHARES = 6  # of all damages: a number without a factor of the 13 ways
_MEMORY = 3 << 30  # bytes of address space above what the process has: these models have thousands
_GATE = "model.layers.1.mlp.gate_proj.weight"


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No memory beyond `_MEMORY`: what is asked for in vain raises a MemoryError or RuntimeError."""
    monkeypatch.setattr(slot_cache, "free_bytes", lambda device: 1 << 26)  # what a long context may take
    with limit_memory(_MEMORY):
        yield


def serve(directory: Path) -> None:
    """Loads a model and decodes two prompts in one batch, with drafts."""
    llm = LLM(directory, max_num_seqs=2, speculative_config={"method": "ngram", "num_speculative_tokens": 2})
    outputs = llm.generate([[5, 6, 5, 6, 5], [8, 9]], SamplingParams(max_tokens=3, temperature=0.0))
    assert all(len(output.outputs[0].token_ids) > 0 for output in outputs)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is bounded by Linux's limits")
@pytest.mark.parametrize(
    ("architecture", "share"),
    [
        pytest.param(architecture, share, marks=() if share == place else pytest.mark.slow)
        for place, architecture in enumerate(ARCHITECTURES)
        for share in range(_SHARES)
    ],
)
def test_no_field_can_do_harm(architecture: str, share: int, tmp_path: Path, bounded: None) -> None:
    """Every field damaged in some ways, which are others for the next field and in the other shares."""
    directory = saved(tmp_path / "tiny", architecture)
    sound = (directory / "config.json").read_text()
    works, refused = [], []
    for field, kind in list(damages(json.loads(sound)))[share::_SHARES]:
        damage(directory, field, kind)
        (refused if outcome(directory, serve) else works).append((field, kind))
        (directory / "config.json").write_text(sound)
    assert outcome(directory, serve) is None
    assert len(refused) > len(works) > 0
    sizes = [name for name in ("hidden_size", "n_embd", "vocab_size", "num_hidden_layers", "n_layer") if name in sound]
    assert not [(field, kind) for field, kind in works if field in sizes and kind != MISSING], "sizes are in the files"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.bool], ids=str)
def test_numbers_that_nobody_says_how_to_read(dtype: torch.dtype, directory: Path) -> None:
    """Quantised weights without their configuration would be taken as they are."""
    edit_weights(directory, lambda tensors: tensors.update({_GATE: tensors[_GATE].to(dtype)}))
    message = refusal(directory)
    assert f"{_GATE} of '{directory}' is stored as " in message
    assert "has no quantization_config that says what the numbers mean" in message


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_real_numbers_of_other_widths_are_read(dtype: torch.dtype, directory: Path) -> None:
    edit_weights(directory, lambda tensors: tensors.update({_GATE: tensors[_GATE].to(dtype)}))
    assert load_model(directory).dtype == torch.float32


@pytest.mark.parametrize("key", ["text_config", "decoder", "generator", "text_encoder"])
@pytest.mark.parametrize("value", [{"a": 1}, 5, [1], "llama"], ids=str)
def test_a_text_configuration_that_its_architecture_does_not_have(key: str, value: Any, directory: Path) -> None:
    edit_config(directory, **{key: value})
    message = refusal(directory)
    assert f"the text configuration inside config.json of '{directory}' is {shown(value)}" in message
    assert "but its architecture has no such part. Copy or download config.json again." in message


def test_buffers_of_integers_are_no_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Published GPT-2 checkpoints carry their causal masks."""
    directory = saved(tmp_path / "tiny", "gpt2")
    mask = torch.ones(1, 1, 4, 4, dtype=torch.uint8)
    edit_weights(directory, lambda tensors: tensors.update({"transformer.h.0.attn.masked": mask}))
    with caplog.at_level(logging.WARNING, logger="foretoken"):
        load_model(directory)


@pytest.mark.parametrize(("architecture", "field"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
def test_a_model_is_not_cut_in_silence(architecture: str, field: str, tmp_path: Path) -> None:
    directory = saved(tmp_path / "tiny", architecture)
    edit_config(directory, **{field: 2})
    assert "num_hidden_layers is 2, but the files have a layer" in refusal(directory)


def test_layers_behind_the_last_that_the_configuration_names(directory: Path) -> None:
    """Multi-token prediction heads are stored as further layers; a plain causal LM has no use for them."""
    layers = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    edit_config(directory, **layers)
    assert load_model(directory).num_layers == 2
    edit_config(directory, **{**layers, "num_nextn_predict_layers": 0})
    assert "num_hidden_layers is 2, but the files have a layer model.layers.2" in refusal(directory)


@pytest.mark.parametrize("eos", ["2", 2.5, True, -1, [2, [3]], [2, None]], ids=str)
def test_end_tokens_of_a_generation_config_that_are_none(eos: Any, directory: Path) -> None:
    path = directory / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": eos}))
    assert str(directory) in refusal(directory)


def test_experts_that_the_files_do_not_have(tmp_path: Path) -> None:
    directory = saved(tmp_path / "tiny", "gpt_oss")
    edit_config(directory, num_local_experts=10**6)
    assert "num_local_experts is 1000000, but no tensor is larger than" in refusal(directory)
