"""GGUF files on the command line: described where they can be, else refused in one sentence."""

import struct
from pathlib import Path

import pytest
import torch
from command_line import output_of, refused, report_of
from gguf import GGMLQuantizationType as Type
from models.gguf_files import TINYCODE, write
from transformers import AutoModelForCausalLM

from foretoken.models.stored.gguf import gguf_tokenizer
from foretoken.models.stored.gguf_file import read_gguf
from foretoken.training.data.packed import PackedTokens


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Tinycode in Q8_0, with a chat template."""
    path = tmp_path_factory.mktemp("gguf") / "whole.gguf"
    model = AutoModelForCausalLM.from_pretrained(TINYCODE, dtype=torch.float32)
    extra = [lambda writer: writer.add_chat_template("{{ messages[0].content }}"), lambda writer: writer.add_name("T")]
    write(path, model, matrices=Type.Q8_0, tied=True, tokenizer=True, adds=extra)
    return path.read_bytes()


@pytest.fixture
def model(content: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(content)
    return path


def test_a_file_is_described(model: Path) -> None:
    facts = report_of("inspect", str(model))
    size, types = facts.pop("weight_bytes"), facts.pop("weight_dtypes")
    assert facts == {
        "file": str(model),
        "name": "T",
        "architecture": "llama",
        "layers": 12,
        "hidden_size": 256,
        "context": 1024,
        "vocabulary": 6144,
        "parameters": 11016448,
        "has_tokenizer": True,
        "tokenizer": "gpt2, gpt-2",
        "end_tokens": {"0": "<|endoftext|>"},
        "has_chat_template": True,
        "can_be_target": "yes, if it loads and the self-test agrees",
    }
    assert types == {"F32": {"tensors": 25, "bytes": 25 * 256 * 4}, "Q8_0": {"tensors": 85, "bytes": size - 25600}}
    assert size < model.stat().st_size < size + 300_000
    shown = output_of("inspect", str(model), "--verify")
    assert "Q8_0 11.2 MiB (85)" in shown
    assert "no findings: every tensor is there" in shown


def test_numbers_that_are_not_finite_are_found(model: Path) -> None:
    data = bytearray(model.read_bytes())
    scale = read_gguf(model).tensors["blk.3.ffn_up.weight"].start
    data[scale : scale + 2] = struct.pack("<e", float("nan"))
    model.write_bytes(data)
    (finding,) = report_of("inspect", str(model), "--verify", code=1)["findings"]
    assert finding.startswith("blk.3.ffn_up.weight of ")
    assert "holds NaN or infinite values" in finding


def test_files_that_cannot_be_targets_are_described_too(model: Path) -> None:
    model.write_bytes(model.read_bytes().replace(b"llama.rope.freq_base", b"llama.rope.freq_mase"))
    told = report_of("inspect", str(model))["can_be_target"]
    assert "has llama.rope.freq_mase, which may change the model" in told


def test_text_is_packed_with_the_files_tokenizer(model: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "data"
    text.write_text("def f(x):\n    return x\n" * 50)
    output_of("data", str(model), "--text", str(text), "--out", str(out))
    expected = [*gguf_tokenizer(model).encode(text.read_text()), 0]  # the end of the document
    assert PackedTokens.open(out / "train").tokens.tolist() == expected
    assert len(expected) > 100


def test_a_described_machine_is_planned_for(model: Path) -> None:
    machine = ("--bandwidth", "50", "--flops", "1", "--memory", "16", "--batch-size", "1")
    assert report_of("plan", str(model), *machine)["bytes_per_weight"] == pytest.approx(34 / 32, rel=0.01)


@pytest.mark.parametrize(
    "arguments",
    [
        ("convert", "FILE", "OUT"),
        ("doctor", "models/tinycode", "FILE"),
        ("generate", "models/tinycode", "-p", "x", "-s", "hydra:model=FILE"),
    ],
)
def test_a_file_in_the_place_of_a_head_is_a_model(model: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    told = refused(*(each.replace("FILE", str(model)).replace("OUT", str(tmp_path / "out")) for each in arguments))
    assert "is a model" in told
    assert "pickle" not in told


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect",),
        ("generate", "-p", "x"),
        ("data", "--text", "README.md", "--out", "OUT"),
        ("plan", "--num-prompts", "1"),
        ("plan", "--bandwidth", "50", "--flops", "1", "--memory", "16"),
        ("bench", "-s", "ngram"),
        ("chat",),
    ],
)
def test_a_missing_file_is_missing(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path, (command, *others) = tmp_path / "none.gguf", arguments
    told = refused(command, str(path), *(each.replace("OUT", str(tmp_path / "out")) for each in others))
    assert told.startswith(f"error: there is no file '{path}'. Expected a GGUF file. Known: ")
    assert told.count("\n") == 1
