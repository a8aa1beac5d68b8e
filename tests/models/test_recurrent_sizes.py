"""Sizes of recurrent layers, from configurations alone: those of public models, and what `plan` and `inspect` say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from cli.command_line import output_of, report_of
from tiny_models import RECURRENT_ARCHITECTURES, tiny_config, tiny_model

from foretoken.models.recurrent import RecurrentSizes, recurrent_sizes
from foretoken.models.weight_files import meta_model
from foretoken.planning.plan import make_plan
from foretoken.planning.sizes import Machine, described_sizes, pass_seconds, sizes_of
from foretoken.runner.decoders import probe_layer_shapes

MIB = 1 << 20
_GDN = {"linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
_FULL = ["linear_attention"] * 3 + ["full_attention"]
# Public models; of experts and vocabularies, a few: states do not depend on them.
FEW: dict[str, Any] = {"vocab_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
PUBLIC: dict[str, tuple[Any, tuple[int, int, float, float, float]]] = {
    "Qwen3-Next-80B-A3B": (
        hf.Qwen3NextConfig(**_GDN, linear_num_value_heads=32, num_hidden_layers=48, layer_types=_FULL * 12, **FEW),
        (36, 12, 72, 1.69, 0.571),
    ),
    "Qwen3.5-35B-A3B": (
        hf.Qwen3_5MoeTextConfig(**_GDN, linear_num_value_heads=32, num_hidden_layers=40, layer_types=_FULL * 10, **FEW),
        (30, 10, 60, 1.41, 0.476),
    ),
    "Qwen3.6-27B": (
        hf.Qwen3_5TextConfig(
            **_GDN, linear_num_value_heads=48, num_hidden_layers=64, layer_types=_FULL * 16, vocab_size=64
        ),
        (48, 16, 144, 2.81, 0.955),
    ),
    "Granite-4.0-H-Small": (
        hf.GraniteMoeHybridConfig(
            hidden_size=4096, num_hidden_layers=40, layer_types=["mamba"] * 36 + ["attention"] * 4, mamba_n_heads=128,
            mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1, mamba_expand=2, num_attention_heads=32,
            num_key_value_heads=8, **FEW,
        ),
        (36, 4, 144, 1.74, 0.598),
    ),
    "LFM2-1.2B": (
        hf.Lfm2Config(hidden_size=2048, layer_types=["conv"] * 10 + ["full_attention"] * 6, num_hidden_layers=16),
        (10, 6, 0, 80 / 1024, 40 / 1024),
    ),
}  # fmt: skip


def of_config(config: Any) -> RecurrentSizes:
    """In bfloat16, without weights."""
    sizes = recurrent_sizes(meta_model(config), config, 2)
    assert sizes is not None
    return sizes


@pytest.mark.parametrize("name", PUBLIC)
def test_public_models(name: str) -> None:
    config, (layers, attention, state, window, node) = PUBLIC[name]
    found = of_config(config)
    assert found[:2] == (layers, attention)
    assert [each / MIB for each in found[2:]] == pytest.approx([state, window, node], rel=5e-3)


@pytest.mark.parametrize("architecture", RECURRENT_ARCHITECTURES)
def test_sizes_are_those_of_the_states(architecture: str) -> None:
    """As in transformers' own cache, whose windows have one row more."""
    module = tiny_model(architecture)
    shapes = probe_layer_shapes(module)
    states = [shape.state for shape in shapes if shape.state is not None]
    sizes = recurrent_sizes(module, module.config, 4)
    assert sizes is not None
    assert sizes[:2] == (len(states), sum(shape.num_heads > 0 for shape in shapes))
    assert sizes.state_bytes == sum(each.recurrent.nbytes for each in states if each.recurrent is not None)
    assert sizes.window_bytes == sum(each.window.nbytes - each.window[:, :1].nbytes for each in states)
    assert sizes_of(module, module.config, 4).attention_layers == sizes.attention_layers
    assert recurrent_sizes(tiny_model("llama"), tiny_config("llama"), 4) is None


def test_a_plan_counts_rows_of_attention_layers_and_states() -> None:
    """Of one sequence: keys and values of 12 layers for each token, and 73.7 MiB whatever its length."""
    config, _ = PUBLIC["Qwen3-Next-80B-A3B"]
    target, machine = (
        sizes_of(meta_model(config), config, 2),
        Machine(bytes_per_s=1e12, flops_per_s=1e15, memory_bytes=1),
    )
    assert target.kv_bytes_per_token == 2 * 12 * 2 * 256 * 2
    assert target.state_bytes == pytest.approx(73.69 * MIB, rel=1e-3)
    as_attention = replace(target, recurrent=None)
    assert as_attention.kv_bytes_per_token == 4 * target.kv_bytes_per_token
    seconds = [pass_seconds(each, machine, contexts=[1000] * 2, width=1) for each in (target, as_attention)]
    traffic = 2 * 2 * target.state_bytes - 3 * 2 * 1000 * target.kv_bytes_per_token
    assert seconds[0] - seconds[1] == pytest.approx(traffic / 1e12, rel=1e-6)
    memory = target.weights_bytes + 5.5 * (1000 * target.kv_bytes_per_token + target.state_bytes)
    plan = make_plan([], {}, target, batches=[], context=1000, longest=1000, memory_bytes=memory, peak_flops=1e15)
    assert plan.most_sequences == 5
    told = plan.as_dict()["memory"]
    assert told["kv_bytes_per_sequence"] == 1000 * 24576
    assert told["recurrent_layers"]["layers"] == 36


def test_models_without_attention_have_no_rows() -> None:
    module = tiny_model("mamba2", num_attention_heads=None)
    sizes = sizes_of(module, module.config, 4)
    assert (sizes.kv_bytes_per_token, sizes.attention_layers) == (0, 0)
    assert sizes.state_bytes > 0


def test_inspect_and_plan_name_recurrent_layers(tmp_path: Path) -> None:
    tiny_model("qwen3_5", dtype=torch.bfloat16).save_pretrained(tmp_path)
    expected = of_config(tiny_config("qwen3_5"))
    assert report_of("inspect", str(tmp_path))["recurrent_layers"] == expected._asdict()
    assert "2, with attention 1; of a sequence: states 0.00 MiB" in output_of("inspect", str(tmp_path))
    assert described_sizes(str(tmp_path), "auto")[0].recurrent == expected
    machine = ("--bandwidth", "3350", "--flops", "989", "--memory", "80", "--temperature", "0", "--batch-size", "1")
    told = " ".join(output_of("plan", str(tmp_path), *machine).split())
    assert "in 1 layers with attention; 2 recurrent layers: states of 0.0 MiB and windows of 0.00 MiB" in told
    tiny_model("llama").save_pretrained(tmp_path / "llama")
    assert "recurrent_layers" not in report_of("inspect", str(tmp_path / "llama"))
