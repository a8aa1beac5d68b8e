"""Every command that takes MODEL takes it in every form: it is served, or refused by name with what to do instead.

Slow because twenty commands read nine forms each.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import MODEL, output_of, refused, report_of
from gguf import GGMLQuantizationType as Type
from models.gguf_files import TINYCODE, write
from tiny_models import tiny_model
from transformers import AutoTokenizer

from foretoken import LLM
from foretoken.core.errors import ConfigError, ModelError
from foretoken.entrypoints import model_arguments
from foretoken.entrypoints.config import checked_setup, parse_speculative_config
from foretoken.training import train

HEAD = "models/tinycode-hydra"
SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "vocab_size": 6144}
FORMS = (
    "directory", "file", "upper case", "blob", "split", "folder", "folder with a tag", "hub with a tag", "package"
)  # fmt: skip
_MACHINE = ("--bandwidth", "50", "--flops", "1", "--memory", "16", "--batch-size", "1")
LOADING = {  # commands that load MODEL: the path up to the loaded model is the real one
    "generate": ("generate", "MODEL", "-p", "x"),
    "chat": ("chat", "MODEL"),
    "serve": ("serve", "MODEL", "--port", "0"),
    "batch": ("batch", "REQUESTS", "OUT", "--model", "MODEL"),
    "verify": ("verify", "MODEL", "-s", "ngram", "--num-prompts", "1"),
    "bench": ("bench", "MODEL", "-s", "ngram", "--num-prompts", "1"),
    "sweep": ("sweep", "MODEL", "-s", "ngram", "--sweep", "max_nodes=4", "--out", "OUT", "--num-prompts", "1"),
    "plan": ("plan", "MODEL", "--num-prompts", "2"),
    "data --self-distill": ("data", "MODEL", "--text", "README.md", "--self-distill", "--out", "OUT"),
    "train": ("train", "medusa", "MODEL", "--data", "DATA", "--out", "OUT"),
    "tune tree": ("tune", "tree", "MODEL", "-s", f"hydra:model={HEAD}", "--num-prompts", "1"),
    "tune acceptance": ("tune", "acceptance", "MODEL", HEAD, "--out", "OUT", "--num-prompts", "1"),
    "tune stop": ("tune", "stop", "MODEL", "-s", f"hydra:model={HEAD}", "--num-prompts", "2"),
    "doctor": ("doctor", "MODEL", "--method", "medusa", "--num-prompts", "1"),
}
READING = {  # commands that read its header or its tokenizer, to the end
    "inspect": ("inspect", "MODEL"),
    "plan for a machine": ("plan", "MODEL", *_MACHINE),
    "data": ("data", "MODEL", "--text", "README.md", "--out", "OUT"),
}
ORIGINALS = {  # commands that need weights before they were rounded
    "quantize": ("quantize", "MODEL", "OUT"),
    "twin": ("twin", "MODEL", "OUT"),
    "convert": ("convert", HEAD, "OUT", "--to", "medusa", "--target", "MODEL"),
    "inspect --target": ("inspect", HEAD, "--verify", "--target", "MODEL"),
    "inspect --original": ("inspect", MODEL, "--original", "MODEL"),
}


class Loaded(ModelError):
    """Ends a command that has loaded its target."""


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """One tiny model with the tokens of tinycode, by every name that it can have."""
    root = tmp_path_factory.mktemp("forms")
    model = tiny_model("llama", **SMALL)
    model.save_pretrained(root / "directory")
    AutoTokenizer.from_pretrained(TINYCODE).save_pretrained(root / "directory")
    write(root / "model.gguf", model, matrices=Type.Q8_0, tied=True, tokenizer=True)
    content = (root / "model.gguf").read_bytes()
    snapshot = root / "hub/models--owner--name/snapshots/c0ffee"
    for place in (
        root / "MODEL.GGUF", root / "sha256-0", root / "one/model.gguf", root / "two/model-Q8_0.gguf",
        root / "two/model-F16.gguf", snapshot / "model-Q8_0.gguf", root / "packages/llm_tale/tale.gguf",
    ):  # fmt: skip
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    (root / "packages/llm_tale/__init__.py").touch()
    (root / "hub/models--owner--name/refs").mkdir()
    (root / "hub/models--owner--name/refs/main").write_text("c0ffee")
    write(root / "split.gguf", model, matrices=Type.Q8_0, tied=True, tokenizer=True, split=6)
    parts = sorted(root.glob("split-*.gguf"))
    assert len(parts) > 1
    names = (
        root / "directory", root / "model.gguf", root / "MODEL.GGUF", root / "sha256-0", parts[0], root / "one",
        f"{root}/two:Q8_0", "hf.co/owner/name:q8_0", "tale",
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(root / "hub"))
        patch.syspath_prepend(str(root / "packages"))
        yield dict(zip(FORMS, map(str, names), strict=True))


@pytest.fixture
def arguments(tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    """Fills a command's words in."""
    body = {"model": "m", "prompt": "x", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "requests.jsonl").write_text(json.dumps(line) + "\n")

    def filled(words: tuple[str, ...], form: str, name: str) -> list[str]:
        out = tmp_path / f"{form}-out"
        places = {"MODEL": name, "OUT": str(out), "DATA": str(tmp_path / "data")}
        places["REQUESTS"] = str(tmp_path / "requests.jsonl")
        return [places.get(word, word) for word in words]

    return filled


@pytest.mark.parametrize("command", LOADING)
def test_commands_that_load_a_model(
    command: str, forms: dict[str, str], arguments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if command == "train":
        output_of("data", MODEL, "--text", "README.md", "--out", str(tmp_path / "made"))
        (tmp_path / "made/train").rename(tmp_path / "data")
    real = model_arguments.load_target

    def load(*given: Any, **options: Any) -> Any:
        target, tokenizer = real(*given, **options)
        assert torch.tensor(tokenizer.encode("def f(x):")).numel() > 3
        kind = "unpacked" if target.quantization is None else target.quantization
        raise Loaded(f"loaded {kind}, {target.vocab_size} tokens")

    monkeypatch.setattr(model_arguments, "load_target", load)
    monkeypatch.setattr(train, "load_target", load)
    is_training = command in ("train", "tune tree", "tune acceptance", "tune stop", "doctor")
    for form, name in forms.items():
        told = refused(*arguments(LOADING[command], form, name)).splitlines()
        kind = "unpacked" if form == "directory" or is_training else "GGUF, Q8_0"
        assert told[-1:] == [f"error: loaded {kind}, 6144 tokens"], (form, told)


@pytest.mark.parametrize("command", READING)
def test_commands_that_read_a_header_or_a_tokenizer(command: str, forms: dict[str, str], arguments: Any) -> None:
    found = {}
    for form, name in forms.items():
        facts = report_of(*arguments(READING[command], form, name))
        key = {"inspect": "vocabulary", "data": "train"}.get(command, "bytes_per_weight")
        found[form] = facts[key] if command != "data" else facts[key]["tokens_sha256"]
    assert len({found[form] for form in FORMS[1:]}) == 1, found


@pytest.mark.parametrize("command", ORIGINALS)
def test_commands_that_need_original_weights(command: str, forms: dict[str, str], arguments: Any) -> None:
    for form in FORMS[1:]:
        told = refused(*arguments(ORIGINALS[command], form, forms[form]))
        assert told.startswith("error: '")
        assert told.endswith(
            "' is a GGUF file. Expected a model directory with config.json and safetensors, because this needs the "
            "weights as they were before they were quantized. Name the directory of the original model.\n"
        )


def test_draft_models_and_tokenizers(forms: dict[str, str]) -> None:
    ids, target = {}, forms["file"]
    for form, name in forms.items():
        for text in (name, f"draft_model:model={name}"):
            setup = checked_setup(text, target=target)
            (found,) = parse_speculative_config(setup.config, target=target).located(target).options
            assert (found.method, Path(str(found.model)).exists()) == ("draft_model", True), form
        tokenizer = model_arguments.target_tokenizer(name, MODEL)
        ids[form] = tuple(tokenizer.encode("def f(x):"))
    assert len(set(ids.values()) - {ids["directory"]}) == 1
    output_of("generate", target, "-p", "def f(", "--max-tokens", "4", "-s", forms["folder with a tag"])


def test_draft_models_are_told_before_the_target_is_loaded(
    forms: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError("weights were read")

    monkeypatch.setattr(model_arguments, "load_model", never)
    missing = tmp_path / "none.gguf"
    with pytest.raises(ModelError, match="there is no file"):
        LLM(forms["file"], speculative_config={"model": str(missing), "method": "draft_model"})
    assert "there is no file" in refused("bench", forms["file"], "-s", str(missing))
    other = tmp_path / "other.gguf"
    content = Path(forms["file"]).read_bytes()
    at = content.index(b"<|endoftext|>")
    other.write_bytes(content[:at] + b"<|endoftexts>" + content[at + 13 :])
    with pytest.raises(ConfigError, match="has another vocabulary than"):
        LLM(forms["file"], speculative_config={"model": str(other), "method": "draft_model"})
    assert "has another vocabulary than" in refused("generate", forms["directory"], "-p", "x", "-s", str(other))
