"""Weights that are stored in integers where no kernel reads them, and with inputs that are rounded to 8 bits.

No kernel reads them on accelerators, and in dtypes that kernels do not take.
"""

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from models.gguf_files import SMALL, tiny_file, write, written
from models.integer_checkpoints import Scheme, small_config
from models.integer_checkpoints import write as write_checkpoint
from models.model_files import edit_config, refusal
from models.test_gguf import WIDE
from models.test_gguf_experts import mixed
from models.test_gguf_experts import written as written_experts
from tiny_models import tiny_model

from foretoken import LLM, SamplingParams
from foretoken.core.errors import ForetokenError, ModelError
from foretoken.decoder.quantized import can_store_blocks
from foretoken.decoder.quantized_modules import QuantizedLinear
from foretoken.models.loaded import LoadedModel
from foretoken.models.loading import load_model

PROMPTS = [[5, 6, 7, 8, 5, 6, 7, 8], [*range(3, 40)]]
_W8A8 = {"format": "int-quantized", "inputs": True}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def texts(model: Any, prompts: Any = PROMPTS, params: Any = GREEDY, **options: Any) -> list[list[int]]:
    outputs = LLM(model, **options).generate(prompts, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def texts_of(reference: Any) -> list[list[int]]:
    """What transformers writes."""
    found = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        made = reference.generate(tokens, max_new_tokens=24, min_new_tokens=24, do_sample=False)
        found.append(made[0, len(prompt) :].tolist())
    return found


def test_weights_in_integers_are_in_bfloat16_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Type.Q4_0, Type.F16):
        write(tmp_path / f"{kind.name}.gguf", tiny_model("llama", **SMALL), matrices=kind)
    checkpoint(tmp_path / "compressed", Scheme("compressed-tensors", group=32))
    names = ["Q4_0.gguf", "F16.gguf", "compressed"]

    def dtypes() -> list[torch.dtype]:
        return [load_model(tmp_path / name).dtype for name in names]

    if can_store_blocks():
        assert dtypes() == [torch.bfloat16, torch.float32, torch.bfloat16]
    monkeypatch.setattr("foretoken.models.loaded.can_store_blocks", lambda: False)
    assert dtypes() == [torch.float32] * 3


def test_a_gguf_file_in_another_dtype_is_the_dequantized_model(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = written(path, tiny_model("llama", **SMALL), matrices=Type.Q4_0, tied=True)
    with caplog.at_level(logging.INFO, "foretoken"):
        loaded = load_model(path, dtype="float64")
    assert (loaded.dtype, loaded.quantization, loaded.lean) == (torch.float64, None, None)
    (line,) = [each for each in caplog.messages if "unpacked" in each]
    assert line.startswith(f"{path}: GGUF, Q4_0 is unpacked to float64 on 'cpu'")
    module, reference = loaded.module, model.double()
    assert module.state_dict().keys() == reference.state_dict().keys()
    for key, weight in reference.state_dict().items():
        assert torch.equal(module.state_dict()[key], weight), key
    expected = texts_of(reference)
    assert texts(loaded) == texts(path, dtype="float64", speculative_config="ngram") == expected


def test_experts_and_offsets_are_unpacked_too(path: Path) -> None:
    sizes = SMALL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    reference = written_experts(path, "mixtral", sizes, matrices=mixed)
    module = load_model(path, dtype="float16").module
    for key, weight in reference.state_dict().items():
        torch.testing.assert_close(module.state_dict()[key], weight.half(), rtol=1e-3, atol=1e-7, msg=key)


def test_an_accelerator_gets_bfloat16(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device "meta" has shapes, dtypes and places, and no numbers."""
    monkeypatch.setattr("foretoken.models.loading.resolve_device", torch.device)
    loaded = load_model(tiny_file(path), device="meta")
    assert (loaded.dtype, loaded.device.type, loaded.quantization) == (torch.bfloat16, "meta", None)
    assert {each.device.type for each in loaded.module.buffers()} == {"meta"}


def test_what_an_accelerator_does_not_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_file(tmp_path / "model.gguf")
    monkeypatch.setattr("foretoken.models.loading.resolve_device", torch.device)
    monkeypatch.setattr("foretoken.models.loaded.free_bytes", lambda device: 1000)
    monkeypatch.setattr("foretoken.models.stored.gguf_file.GgufFile.matrix", None)
    with pytest.raises(ModelError, match=r"need 0\.0 GB of memory on 'meta', where 0\.0 GB are free"):
        load_model(path, device="meta")


def checkpoint(directory: Path, scheme: Scheme) -> Any:
    """Writes a checkpoint in integers; gives the model that it stands for."""
    return write_checkpoint(directory, small_config(), scheme).eval()


@pytest.mark.parametrize("kind", ["compressed-tensors", "gptq", "awq"])
def test_other_formats_are_unpacked_in_another_dtype(kind: str, tmp_path: Path) -> None:
    reference = checkpoint(tmp_path, Scheme(kind, group=32, zeros=True))
    assert texts(str(tmp_path), dtype="float64") == texts_of(reference.double())


def test_rounded_inputs_are_no_weights(tmp_path: Path) -> None:
    checkpoint(tmp_path, Scheme("compressed-tensors", bits=8, group=0, settings=_W8A8))
    with pytest.raises(ModelError, match=r"W8A8 and was asked for in torch.float64. It rounds inputs to 8 bits"):
        load_model(str(tmp_path), dtype="float64")


def test_compressed_tensors_on_an_accelerator_are_read_by_its_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU plays the accelerator: transformers and compressed-tensors take the place of our kernels."""
    pytest.importorskip("accelerate")
    reference = checkpoint(tmp_path, Scheme("compressed-tensors", group=32))
    monkeypatch.setattr("foretoken.models.loading.runs_cpu_kernels", lambda device: False)
    loaded = load_model(str(tmp_path), dtype="float32")
    assert type(loaded.module.hf_quantizer).__name__ == "CompressedTensorsHfQuantizer"
    assert texts(loaded, speculative_config="ngram") == texts(loaded) == texts_of(reference)


@pytest.mark.parametrize(
    ("settings", "package"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, "torchao"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "optimum"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, "gptqmodel"),
    ],
)
def test_a_missing_library_is_named(
    settings: dict[str, Any], package: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    edit_config(directory, quantization_config=settings)
    monkeypatch.setattr("foretoken.models.loading.runs_cpu_kernels", lambda device: False)
    message = refusal(directory)
    assert f"'{directory}' is stored in a format that transformers reads with a library that is missing: " in message
    assert package in message
    assert "docs/runners.md" in message


SAMPLED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, max_tokens=30, top_p=0.9, ignore_eos=True),
]


def gguf_file(path: Path, matrices: Type = Type.Q4_K) -> str:
    write(path, tiny_model("llama", **WIDE), matrices=matrices, tied=True)
    return str(path)


def compressed(path: Path) -> str:
    checkpoint(path, Scheme("compressed-tensors", group=32))
    return str(path)


def input_bits(model: LoadedModel) -> set[int]:
    return {part.matrix.input_bits for part in model.module.modules() if isinstance(part, QuantizedLinear)}


@pytest.mark.native
@pytest.mark.parametrize("make", [gguf_file, compressed])
def test_text_with_drafts_is_text_without(make: Any, path: Path) -> None:
    name = make(path)
    plain, quantized = (LLM(name, quantization=each, max_num_seqs=3).target.model for each in (None, "a8"))
    assert str(quantized.quantization) == f"{plain.quantization}, inputs of 8 bits"
    assert (input_bits(plain), input_bits(quantized), quantized.dtype) == ({16}, {8}, torch.bfloat16)
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    expected, *found = (
        texts(name, [*PROMPTS, [9, 9, 4]], SAMPLED, quantization="a8", speculative_config=config, max_num_seqs=3)
        for config in (None, ngram, {"method": "suffix"})
    )
    assert found == [expected] * 2


@pytest.mark.native
def test_passes_take_rounded_inputs(path: Path) -> None:
    """Logits are near those of inputs as they are, and others."""
    name, params = gguf_file(path), SamplingParams(max_tokens=1, prompt_logprobs=0)

    def scores(**options: Any) -> torch.Tensor:
        rows = LLM(name, **options).generate(PROMPTS[1:], params)[0].prompt_logprobs or []
        return torch.tensor([next(iter(row.values())).logprob for row in rows if row is not None])

    exact, usual, narrow = scores(dtype="float32"), scores(), scores(quantization="a8")
    assert 0 < (usual - exact).abs().max() < (narrow - exact).abs().max() < 0.2


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda path: gguf_file(path, Type.F16), {}, "'.*' has no weights in integers. Expected a GGUF file, GPTQ"),
        (gguf_file, {"dtype": "float64"}, "in torch.float64 on 'cpu'. Only the kernels on CPUs round inputs"),
        (lambda path: load_model(gguf_file(path)), {}, "is in memory. Expected the name of a model"),
        (lambda path: tiny_model("llama"), {}, "is in memory. Expected the name of a model"),
    ],
)
def test_refusals(make: Any, options: dict[str, Any], message: str, path: Path) -> None:
    with pytest.raises(ForetokenError, match=f"quantization 'a8' was asked for.*{message}"):
        LLM(make(path), quantization="a8", **options)
