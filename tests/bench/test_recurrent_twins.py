"""Cost twins with recurrent layers: the small attention model's logits and drafts, a hybrid's layers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from bench.test_cost_twin import HEADS, TEXT, E, logits, made, random_head, refused, small
from safetensors.torch import load_file
from tiny_models import tiny_model

from foretoken.bench.cost_twin import TwinPlan, check_twin, make_twin_in_memory
from foretoken.bench.padding import PaddedModel, open_model
from foretoken.bench.recurrent_twins import FAMILIES, RecurrentTwin
from foretoken.formats import native
from foretoken.formats.checkpoint import TargetFingerprint
from foretoken.models.loading import load_model
from foretoken.models.recurrent import recurrent_sizes

MIXER = {"qwen3_5": "linear_attn", "lfm2": "conv", "bamba": "mamba"}
# Of a layer at a hidden size of 128: numbers of the state, and of the inputs of the convolution.
STATES = {"qwen3_5": (2 * 128 * 128, 3 * 6 * 128), "lfm2": (0, 2 * 128), "bamba": (256 * 128, 3 * (256 + 2 * 128))}
CASES = [
    ("llama", "qwen3_5", "zeros"), ("llama", "lfm2", "random"), ("llama_tied", "bamba", "random"),
    ("qwen3", "qwen3_5", "random"), ("qwen3", "lfm2", "zeros"),
]  # fmt: skip


@pytest.mark.parametrize(("architecture", "family", "fill"), CASES)
def test_logits_are_those_of_the_small_model(tmp_path: Path, architecture: str, family: str, fill: Any) -> None:
    model = small(tmp_path / "small", architecture, attention_bias=False)
    [part] = made(model, tmp_path / "twin", num_layers=5, fill=fill, recurrent=family)
    twin = load_model(part.path, device="cpu")
    assert twin.config.model_type == FAMILIES[family].model_type
    assert str(twin.cost_twin) == f"cost twin 5 x 128 ({family}) of small"
    sizes, (state, window) = recurrent_sizes(twin.module, twin.config, 4), STATES[family]
    assert sizes is not None
    assert (sizes.layers, sizes.attention_layers) == (2, 3)
    assert (sizes.state_bytes, sizes.window_bytes) == (2 * 4 * state, 2 * 4 * window)
    recurrent = RecurrentTwin(open_model(model), 4, FAMILIES[family])
    foreseen = PaddedModel(small=open_model(model), factor=4, num_layers=5, dtype=None, recurrent=recurrent)
    assert foreseen.num_bytes == 4 * part.num_parameters
    assert foreseen.num_tensors == len(load_file(part.path / "model.safetensors"))
    for decoder in ("lean-native", "generic"):
        ours, theirs = (logits(path, decoder, "float32") for path in (model, part.path))
        assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max()), decoder
    if family == "bamba":  # its attention is Llama's
        for dtype in ("float32", "bfloat16"):
            assert torch.equal(logits(model, "lean-native", dtype), logits(part.path, "lean-native", dtype)), dtype


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_in_bfloat16_hold_the_same_function(tmp_path: Path, family: str) -> None:
    """But for one factor of the scores, a product of two numbers with eight digits each, and small final norms."""
    module = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        module.model.norm.weight += 1.5
        module.model.layers[1].input_layernorm.weight[::2] *= -0.05
    module.save_pretrained(model := tmp_path / "small")
    made(model, tmp_path / "twin", num_layers=4, recurrent=family)
    ours, theirs = (logits(path, "lean-native", "float32") for path in (model, tmp_path / "twin"))
    assert float((ours - theirs).abs().max()) < 2e-4 * float(theirs.abs().max())


def test_recurrent_layers_are_full_and_write_nothing(tmp_path: Path) -> None:
    model = small(tmp_path / "small")
    for family, mixer in MIXER.items():
        made(model, tmp_path / family, num_layers=5, fill="random", recurrent=family)
        tensors = load_file(tmp_path / family / "model.safetensors")
        block = {key: each for key, each in tensors.items() if key.startswith("model.layers.4.")}
        assert any(f".{mixer}." in key for key in block)
        for key, each in block.items():
            is_output = key.endswith(("out_proj.weight", "w2.weight", "down_proj.weight"))
            assert (0 < each.abs().max() < 1e-28) if is_output else each.abs().max() > 1e-3, key
            assert (each != 0).float().mean() > 0.99, key


def test_drafters_propose_the_same(tmp_path: Path) -> None:
    """EAGLE-3 reads residual streams between layers, the others the final features."""
    model = small(tmp_path / "small")
    small(tmp_path / "small-draft", seed=1, hidden_size=16, num_hidden_layers=2, head_dim=8)
    target = TargetFingerprint.of(load_model(model, device="cpu"))
    for name in ("medusa", "hydra++", "eagle", "eagle3"):
        native.write_checkpoint(random_head(HEADS[name], target=target), tmp_path / f"small-{name}")
    parts = made(model, tmp_path / "twin", num_layers=6, recurrent="qwen3_5")
    checks = check_twin(parts, TEXT, max_tokens=8)
    assert [check.what for check in checks] == [
        "logits",
        "greedy text",
        *(f"drafts of {part.source.name}" for part in parts[1:]),
    ]
    assert all(check.is_same and check.num_compared for check in checks), checks
    assert {check.dtype for check in checks} == {"float32"}


def test_a_twin_in_memory_is_the_one_of_files(tmp_path: Path) -> None:
    model = small(tmp_path / "small", "llama_tied", attention_bias=False)
    made(model, tmp_path / "files", recurrent="lfm2")
    plan = TwinPlan(model=model, out=tmp_path / "memory", num_layers=4, hidden_size=4 * E, recurrent="lfm2")
    theirs = dict(load_model(tmp_path / "files", device="cpu").module.named_parameters())
    ours = dict(make_twin_in_memory(plan).module.named_parameters())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(part, theirs[key]) for key, part in ours.items())


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("llama", {"recurrent": "qwen35"}, "recurrent is 'qwen35'. Did you mean 'qwen3_5'?"),
        ("llama", {"num_layers": 3}, "are all needed, and recurrent ones come behind them. Expected at least 4."),
        ("llama", {"dtype": torch.float16}, "numbers that float16 cannot hold. Pass another dtype."),
        ("llama_tied", {}, "is a 'llama' whose 'model.layers.0.self_attn.k_proj.bias' a 'qwen3_5' does not have"),
        ("qwen3", {"recurrent": "bamba"}, "is a 'qwen3' whose 'model.layers.0.self_attn.k_norm.weight' a 'bamba'"),
        ("mistral", {}, "is a 'mistral', or has windows, and cannot become a hybrid. Expected a Llama or Qwen3"),
        ("llama", {"num_layers": 999_999_999}, "GiB. Expected fewer layers or a smaller hidden size."),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(tmp_path: Path, architecture: str, changes: dict[str, Any], message: str) -> None:
    model = small(tmp_path / "small", architecture)
    told = refused(model, tmp_path / "out" / "twin", **{"recurrent": "qwen3_5", **changes})
    assert message.split("GiB")[-1] in told


def test_weights_stored_in_float16_need_another_dtype(tmp_path: Path) -> None:
    model = small(tmp_path / "small", dtype=torch.float16)
    for family in FAMILIES:
        told = refused(model, tmp_path / "out" / "twin", recurrent=family)
        assert "numbers that float16 cannot hold. Pass another dtype." in told
        made(model, tmp_path / family, recurrent=family, dtype=torch.float32)
        ours, theirs = (logits(path, "lean-native", "float32") for path in (model, tmp_path / family))
        assert float((ours - theirs).abs().max()) < 1e-5 * float(theirs.abs().max())
