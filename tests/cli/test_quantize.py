"""`foretoken quantize`: what it writes, that foretoken, compressed-tensors and killed runs read it, and refusals."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from cli.test_killed_commands import contents, run_killed
from command_line import MODEL, ROOT, output_of, refused, report_of, run
from limits import full_disk
from pairwise import slow_products
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.decoder.quantized import round_groups, round_rows
from foretoken.decoder.quantized_modules import QuantizedLinear
from foretoken.models.loading import load_model
from foretoken.models.making import calibration, writing
from foretoken.models.making.calibration import Calibration, gptq
from foretoken.models.making.writing import SCHEMES, Scheme

SMALL = ("--group-size", "32")
EXPERTS = {"moe_intermediate_size": 32}


def saved(directory: Path, architecture: str = "llama", **more: int) -> Any:
    """A tiny target in bfloat16, whose files have the bundled tokenizer."""
    sizes = {"vocab_size": 6144, "max_position_embeddings": 1024, "intermediate_size": 64}
    module = tiny_model(architecture, **sizes, **more).bfloat16()
    module.save_pretrained(directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(ROOT / MODEL / name, directory / name)
    return module


@pytest.fixture
def small(tmp_path: Path) -> Path:
    saved(tmp_path / "small")
    return tmp_path / "small"


def quantized_to_nearest(weight: torch.Tensor, scheme: str) -> torch.Tensor:
    """The weights that a scheme keeps, with scales as they are stored."""

    def as_stored(scale: torch.Tensor) -> torch.Tensor:
        return scale.bfloat16().float()

    numbers, scales = round_groups(weight, 32, as_stored) if scheme == "W4A16" else round_rows(weight, as_stored)
    return numbers * scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)


@pytest.mark.parametrize(
    "scheme", [pytest.param(each, marks=pytest.mark.slow) if each == "W8A16" else each for each in SCHEMES]
)
def test_a_model_is_rounded_written_and_read(scheme: str, small: Path, tmp_path: Path) -> None:
    out, more = tmp_path / "out", SMALL if scheme == "W4A16" else ()
    facts = report_of("quantize", str(small), str(out), "--scheme", scheme, *more)
    assert facts["bytes"] == sum(path.stat().st_size for path in out.glob("*.safetensors"))
    made, original = load_model(out, dtype="float32", device="cpu"), load_model(small, device="cpu")
    linears = {name: part for name, part in made.module.named_modules() if isinstance(part, QuantizedLinear)}
    assert len(linears) == 21
    for name, part in linears.items():
        weight = original.module.get_submodule(name).weight.detach()
        assert torch.equal(part.weight, quantized_to_nearest(weight, scheme))
    for name, parameter in made.module.named_parameters():
        assert torch.equal(parameter, dict(original.module.named_parameters())[name])

    quality, card = facts["quality"], (out / "README.md").read_text()
    assert quality["num_tokens"] > 10000
    assert 0 < quality["kl_divergence"] < 0.5
    assert f"{quality['kl_divergence']:.5f}" in card
    described = report_of("inspect", str(out))
    assert described["rounding_quality"] == quality
    assert described["quantization"] == f"compressed-tensors {scheme}"
    assert described["parameters"] == sum(each.numel() for each in original.module.parameters())
    assert report_of("inspect", str(out), "--original", str(small))["rounding_quality"] == quality


def test_compressed_tensors_reads_the_same_weights(small: Path, tmp_path: Path) -> None:
    """The reference of the format unpacks and scales the numbers."""
    from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
    from compressed_tensors.quantization import QuantizationConfig

    out = tmp_path / "out"
    output_of("quantize", str(small), str(out), *SMALL, "--no-compare")
    config = QuantizationConfig.model_validate(json.loads((out / "config.json").read_text())["quantization_config"])
    assert config.config_groups["group_0"].weights.group_size == 32
    tensors: dict[str, Any] = {}
    for path in out.glob("*.safetensors"):
        tensors |= load_file(path)
    made = load_model(out, dtype="float32", device="cpu")
    for name, part in made.module.named_modules():
        if isinstance(part, QuantizedLinear):
            shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
            numbers = unpack_from_int32(tensors[f"{name}.weight_packed"], 4, shape)
            scales = tensors[f"{name}.weight_scale"].float().repeat_interleave(32, 1)
            assert torch.equal(part.weight, numbers * scales)


@pytest.mark.parametrize("numbers", [(4,), pytest.param((1, 2, 7, -1), marks=pytest.mark.slow)], ids=str)
def test_a_killed_run_goes_on(small: Path, tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """Numbers of the files that it does not bring to disk; -1 for that after the weights."""
    arguments = ["quantize", str(small), "{out}", *SMALL, "--no-compare"]
    whole = tmp_path / "whole"
    setup = "import foretoken.models.making.writing as w; w._SHARD_BYTES = 8000\n"
    assert run_killed([each.format(out=whole) for each in arguments], 0, setup=setup)[0] == 0
    expected: Any = contents(whole)
    shards = [name for name in expected if name.endswith(".safetensors")]
    assert len(shards) > 7
    for number in (each if each > 0 else 2 * len(shards) + 3 for each in numbers):  # first a file, then its name
        out = tmp_path / str(number) / "whole"
        code, _ = run_killed([each.format(out=out) for each in arguments], number, setup=setup)
        assert code == -signal.SIGKILL
        assert not (out / "config.json").exists()
        assert run("inspect", str(out)).returncode == 2  # no model
        kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
        assert len(kept) >= min((number - 3) // 2, len(shards))
        code, errors = run_killed([each.format(out=out) for each in arguments], 0, setup=setup)
        assert code == 0, errors
        found: Any = contents(out)
        assert found.keys() == expected.keys()
        for name in found:  # the order of metadata in safetensors is random
            assert name in shards or found[name] == expected[name]
        for name in shards:
            tensors, others = load_file(out / name), load_file(whole / name)
            assert tensors.keys() == others.keys()
            assert all(torch.equal(tensors[key], others[key]) for key in tensors)
        assert all((out / name).stat().st_mtime_ns == made for name, made in kept.items())


def test_files_that_a_killed_run_began_go_away(small: Path, tmp_path: Path) -> None:
    arguments = ("quantize", str(small), str(tmp_path / "out"), *SMALL, "--no-compare")
    output_of(*arguments)
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    for name in ("README.md", "config.json", "model-00001-of-00001.safetensors"):
        (tmp_path / "out" / f".{name}-0123abcd").touch()
    output_of(*arguments)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


@pytest.mark.parametrize("architecture", ["gemma3", "qwen3"])
def test_blocks_get_their_own_arguments(architecture: str, tmp_path: Path) -> None:
    """Masks and rotations of layers with a window are others: unrounded blocks give what transformers computes."""
    module = tiny_model(architecture).eval()
    module.save_pretrained(tmp_path)
    text = [5, 9, 3, 7, 11, 2, 40, 30, 20, 10, 4, 8]
    made = Calibration(writing.Original(tmp_path), Scheme(8, 0), [text])
    expected = module(torch.tensor([text]), output_hidden_states=True).hidden_states
    with mock.patch.object(
        calibration, "gptq", lambda name, weight, *_: writing.Quantized(weight, torch.ones(len(weight), 1))
    ):
        for index in range(3):
            assert (made._hidden[0] - expected[index]).abs().max() <= 1e-5 * expected[index].abs().max()
            made._quantize_block(index)


def test_calibration_brings_outputs_closer(small: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text((ROOT / "foretoken/core/checks.py").read_text())
    qualities = []
    for name, more in (("nearest", ()), ("gptq", ("--calibrate", str(text)))):
        facts = report_of("quantize", str(small), str(tmp_path / name), *SMALL, *more)
        qualities.append(facts["quality"]["kl_divergence"])
    assert qualities[1] < 0.95 * qualities[0]
    assert "quantized by GPTQ on" in (tmp_path / "gptq" / "README.md").read_text()


@pytest.mark.parametrize("scheme", [Scheme(4, 32), Scheme(4, 128), Scheme(8, 0)], ids=str)
def test_gptq_lowers_the_error_of_outputs(scheme: Scheme) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(40, 256, generator=generator)
    inputs = torch.randn(600, 256, generator=generator) @ torch.randn(256, 256, generator=generator) * 0.1
    made = gptq("w", weight, inputs.T @ inputs, scheme)
    nearest = writing.quantize_linear("w", weight, scheme)
    errors = [((inputs @ (each.dequantized() - weight).T).square().sum()) for each in (made, nearest)]
    assert errors[0] < 0.7 * errors[1]
    assert torch.equal(made.scales, nearest.scales)
    least, most = (-8, 7) if scheme.bits == 4 else (-127, 127)
    assert made.numbers.min() >= least
    assert made.numbers.max() <= most
    squares = torch.eye(256)  # independent inputs: each weight for itself
    assert torch.equal(gptq("w", weight, squares, scheme).numbers, nearest.numbers)


def test_speculative_text_of_a_written_model_is_plain_text(tmp_path: Path) -> None:
    out = tmp_path / "tinycode"
    output_of("quantize", MODEL, str(out), "--no-compare")
    prompts = ["def read_lines(path):", "import os\n\nclass File:", "for name in names:\n    print("]
    params = SamplingParams(temperature=0.0, max_tokens=60)
    texts = []
    for drafter in (None, {"model": str(ROOT / "models/tinycode-hass")}):
        llm = LLM(str(out), dtype="bfloat16", speculative_config=drafter)
        assert llm.target.name == "lean-native"
        texts.append([each.outputs[0].text for each in llm.generate(prompts, params)])
    assert texts[0] == texts[1]


def test_a_full_disk_is_one_sentence_and_the_run_goes_on(tmp_path: Path) -> None:
    """Files of three sizes: none fits, the first ones fit, and all but the index do."""
    model, out = tmp_path / "small", tmp_path / "out"
    tiny_model("llama", vocab_size=8).bfloat16().save_pretrained(model)
    arguments = (str(model), str(out), "--scheme", "W8A16", "--no-compare")
    kept: dict[str, int] = {}
    with mock.patch.object(writing, "_SHARD_BYTES", 6000):
        for room in (64, 3600, 5000):
            with full_disk(room):
                errors = refused("quantize", *arguments)
            assert errors.count("\n") == 1
            assert "cannot be written: " in errors
            assert "File too large" in errors
            assert "it goes on after the last whole file" in errors
            assert not (out / "config.json").exists()
            found = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
            assert found.items() >= kept.items()
            kept = found
        assert len(kept) == 12  # the index alone was missing
        output_of("quantize", *arguments)
    assert all((out / name).stat().st_mtime_ns == made for name, made in kept.items())
    assert load_model(out, dtype="float32", device="cpu").quantization == "compressed-tensors W8A16"


def test_refusals(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "--scheme is 'W2A16'" in refused("quantize", str(small), str(out), "--scheme", "W2A16")
    assert "Expected 32, 64 or 128, with W4A16" in refused("quantize", str(small), str(out), "--group-size", "48")
    assert "Expected 32, 64 or 128, with W4A16" in refused("quantize", str(small), str(out), "--scheme", "W8A8", *SMALL)
    assert "has 64 inputs. Expected a multiple of it. Pass --group-size 32" in refused("quantize", str(small), str(out))
    for option in ("--calibrate", "--text"):
        assert "there is no prompt file" in refused("quantize", str(small), str(out), *SMALL, option, "nowhere.txt")
    assert not out.exists()
    output_of("quantize", str(small), str(out), *SMALL, "--no-compare")
    before = contents(out)
    output_of("quantize", str(small), str(out), *SMALL, "--no-compare")  # nothing is left to do
    assert contents(out) == before
    assert "with other settings" in refused("quantize", str(small), str(out), "--scheme", "W8A8")
    assert "are quantized already" in refused("quantize", str(out), str(tmp_path / "twice"))
    assert "holds other files" in refused("quantize", str(small), str(small), *SMALL)
    assert contents(out) == before
    weights = load_file(small / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(weights, small / "model.safetensors", metadata={"format": "pt"})
    assert "up_proj.weight holds NaN" in refused("quantize", str(small), str(tmp_path / "nan"), *SMALL)
    assert not (tmp_path / "nan" / "config.json").exists()


@pytest.mark.parametrize(("architecture", "scheme"), slow_products(["qwen3_moe", "mixtral"], ["W4A16", "W8A8"], each=1))
def test_experts_are_rounded_written_and_read(architecture: str, scheme: str, tmp_path: Path) -> None:
    more = EXPERTS if architecture == "qwen3_moe" else {}
    original, out = saved(tmp_path / "small", architecture, **more), tmp_path / "out"
    size = SMALL if scheme == "W4A16" else ()
    assert "KL divergence" in output_of("quantize", str(tmp_path / "small"), str(out), "--scheme", scheme, *size)
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    assert settings["ignore"] == ["lm_head", r"re:.*\.gate$"]
    made: Any = load_model(out, dtype="float32", device="cpu")
    for ours, theirs in zip(made.backbone.layers, original.model.layers, strict=True):
        down = theirs.mlp.experts.down_proj.detach()
        for expert, weight in enumerate(down):
            expected = quantized_to_nearest(weight, scheme)
            found = ours.mlp.experts.down.rows(expert * len(weight), (expert + 1) * len(weight)).dequantized()
            assert torch.equal(found.bfloat16(), expected.bfloat16())


def test_calibrated_experts_change_outputs_less(tmp_path: Path) -> None:
    module = saved(tmp_path, "qwen3_moe", **EXPERTS).float()
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(0, 6144, (200,), generator=generator).tolist() for _ in range(6)]
    source, scheme = writing.Original(tmp_path), Scheme(4, 32)
    assert sum(".experts." in name for name in source.linears.values()) == 3 * 4 * 3
    calibrated, seen = Calibration(source, scheme, texts[:5]), []
    layer = module.model.layers[0].mlp
    layer.experts.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    with torch.no_grad():
        module(torch.tensor([texts[0]]))
        exact = layer.experts(*seen[0])
        errors = []
        for rounded in (calibrated.quantized, lambda name, weight: writing.quantize_linear(name, weight, scheme)):
            for key, name in source.linears.items():
                expert, part = name.split(".")[-3:-1]
                if not name.startswith("model.layers.0.mlp.experts."):
                    if name.startswith("model.layers.0."):
                        rounded(name, source.read(key))
                    continue
                made = rounded(name, source.read(key)).dequantized()
                gate, up = layer.experts.gate_up_proj.data[int(expert)].chunk(2)
                place = {"gate_proj": gate, "up_proj": up, "down_proj": layer.experts.down_proj.data[int(expert)]}[part]
                place.copy_(made)
            errors.append((layer.experts(*seen[0]) - exact).norm() / exact.norm())
    assert errors[0] < 0.9 * errors[1]


def test_models_whose_layers_are_not_found_are_refused(tmp_path: Path) -> None:
    tiny_model("gpt_oss").save_pretrained(tmp_path / "experts")
    assert "has weights of another layout in model.layers.0.mlp.experts" in refused(
        "quantize", str(tmp_path / "experts"), str(tmp_path / "out"), "--scheme", "W8A8"
    )
    tiny_model("gpt2").save_pretrained(tmp_path / "gpt2")
    assert "no linear layers" in refused("quantize", str(tmp_path / "gpt2"), str(tmp_path / "out"), "--scheme", "W8A8")
    tiny_model("jamba").save_pretrained(tmp_path / "jamba")  # its mixer reads the weights of its linear layers itself
    assert "has weights of another layout in model.layers.0.mamba" in refused(
        "quantize", str(tmp_path / "jamba"), str(tmp_path / "out"), "--scheme", "W8A8"
    )


@pytest.mark.parametrize("architecture", ["qwen3_5", pytest.param("bamba", marks=pytest.mark.slow), "lfm2"])
def test_recurrent_layers_keep_their_convolution(architecture: str, tmp_path: Path) -> None:
    module = saved(tmp_path / "small", architecture)
    output_of("quantize", str(tmp_path / "small"), str(tmp_path / "out"), "--scheme", "W8A16", "--no-compare")
    plain, drafting = (
        LLM(str(tmp_path / "out"), dtype="float32", device="cpu", speculative_config=drafter)
        for drafter in (None, {"method": "draft_model", "model": str(tmp_path / "small"), "num_speculative_tokens": 3})
    )

    def weights(name: str) -> Any:
        return plain.target.model.module.get_submodule(name).weight

    for name, part in module.named_modules():
        if isinstance(part, torch.nn.Conv1d):
            assert torch.equal(weights(name), part.weight.float())
        elif type(part) is torch.nn.Linear and name != "lm_head":
            assert torch.equal(weights(name), quantized_to_nearest(part.weight, "W8A16"))
    assert plain.target.name == "lean-native"
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [each.generate("class Queue:", params)[0] for each in (plain, drafting)]
    assert texts[0].outputs[0].token_ids == texts[1].outputs[0].token_ids
    assert texts[1].metrics.num_accepted > 0


def test_a_source_that_changes_meanwhile_is_noticed(small: Path, tmp_path: Path) -> None:
    class Changing(writing.Original):
        def read(self, key: str) -> torch.Tensor:
            os.utime(small / "model.safetensors")
            return super().read(key)

    with mock.patch.object(writing, "Original", Changing):
        assert "was changed meanwhile" in refused("quantize", str(small), str(tmp_path / "out"), *SMALL)
    assert not (tmp_path / "out" / "config.json").exists()


def test_files_that_transformers_does_not_read_are_left_out(small: Path, tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.full((32,), 9.0)}, small / "consolidated.safetensors")
    output_of("quantize", str(small), str(tmp_path / "out"), *SMALL, "--no-compare")
    [path] = (tmp_path / "out").glob("*.safetensors")
    assert load_file(path)["model.norm.weight"].max() < 9


def test_a_source_that_changes_is_noticed(small: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with mock.patch.object(writing, "_SHARD_BYTES", 8000):
        output_of("quantize", str(small), str(out), *SMALL, "--no-compare")
        (out / "config.json").unlink()
        shutil.copyfile(small / "model.safetensors", small / "other.safetensors")
        (small / "other.safetensors").replace(small / "model.safetensors")
        assert "was begun from other files" in refused("quantize", str(small), str(out), *SMALL)
