"""A head where a model belongs, a model where a head belongs, a path where a method belongs: what to write instead."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import MODEL, ROOT, Finished, run

from foretoken.core.errors import ConfigError
from foretoken.entrypoints.config import parse_setup

HEAD, DRAFT = "models/tinycode-hydra", "models/tinycode-draft"
IS_NO_MODEL = (f"'{HEAD}' is a hydra head, not a model", "trained for ('models/tinycode')", f"-s hydra:model={HEAD}")


def assert_refused(result: Finished, *parts: str) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1
    for part in parts:
        assert part in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", HEAD, "-p", "x"),
        ("generate", HEAD, "-p", "x", "-s", "hydra"),
        ("verify", HEAD),
        ("bench", HEAD),
        ("doctor", HEAD, HEAD),
        ("data", HEAD, "--text", "README.md", "--out", "{out}"),
        ("data", HEAD, "--text", "README.md", "--out", "{out}", "--self-distill"),
    ],
)
def test_a_head_for_a_model(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert_refused(run(*(argument.format(out=tmp_path / "out") for argument in arguments)), *IS_NO_MODEL)


def test_a_head_of_another_format_for_a_model(tmp_path: Path) -> None:
    head = str(tmp_path / "head")
    assert run("convert", HEAD, head, "--to", "hydra", "--target", MODEL).returncode == 0
    assert_refused(run("generate", head, "-p", "x"), "is a hydra head, not a model", f"-s hydra:model={head}")


def test_a_model_for_a_head(tmp_path: Path) -> None:
    sentence = f"'{DRAFT}' is a model and holds no draft head"
    write = f"-s draft_model:model={DRAFT}"
    assert_refused(run("doctor", MODEL, DRAFT), sentence, write)
    assert_refused(run("convert", DRAFT, str(tmp_path / "out")), sentence, write)


@pytest.mark.parametrize(
    ("given", "sentence", "write"),
    [
        (json.dumps({"method": HEAD}), f"'{HEAD}' is a hydra head, not a method", f"{{'model': '{HEAD}'}}"),
        (
            f"draft_model:{DRAFT}",
            f"'{DRAFT}' is a model, and 'draft_model:{DRAFT}' takes it for a tree",
            f"draft_model:model={DRAFT}",
        ),
        (f"draft_model:model={HEAD}", "method 'draft_model' needs a model", f"hydra:model={HEAD}"),
        (f"hydra:model={DRAFT}", "method 'hydra' needs a hydra head", f"draft_model:model={DRAFT}"),
        (f"medusa:model={HEAD}", "method 'medusa' needs a medusa head", f"hydra:model={HEAD}"),
        (json.dumps({"method": "medusa", "model": HEAD}), "is a hydra head", f"hydra:model={HEAD}"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "bench"])
def test_weights_and_methods_that_do_not_fit(command: str, given: str, sentence: str, write: str) -> None:
    more = ("-p", "x") if command == "generate" else ()
    assert_refused(run(command, MODEL, *more, "-s", given), sentence, f"Write {write}")


def test_a_method_without_its_weights() -> None:
    for method in ("medusa", "draft_model"):
        result = run("generate", DRAFT, "-p", "x", "-s", method)
        assert_refused(result, f"there is no '{DRAFT}-{method.removesuffix('_model')}'", f"Write {method}:model=PLACE")


@pytest.mark.parametrize(
    ("text", "name", "config"),
    [
        ("ngram", "ngram", {"method": "ngram"}),
        ("ngram:tree", "ngram:tree", {"method": "ngram", "tree": "tree"}),
        (
            "ngram:num_speculative_tokens=8",
            "ngram num_speculative_tokens=8",
            {"method": "ngram", "num_speculative_tokens": 8},
        ),
        (
            "hydra:chain:model=a:b/c:max_nodes=4",
            "hydra:chain max_nodes=4",
            {"method": "hydra", "tree": "chain", "model": "a:b/c", "max_nodes": 4},
        ),
        ('x:tree=[[0],[1]]:widths={"a": 1}', 'x tree=[[0],[1]] widths={"a": 1}', None),
        ("plain", "plain", None),
    ],
)
def test_setups_in_words(text: str, name: str, config: dict[str, object] | None) -> None:
    setup = parse_setup(text)
    assert setup.name == name
    if config is not None or text == "plain":
        assert setup.config == config
    else:
        assert setup.config == {"method": "x", "tree": [[0], [1]], "widths": {"a": 1}}


def test_keys_given_twice() -> None:
    for text in ("ngram:max_nodes=4:max_nodes=5", "ngram:tree:tree=chain", "ngram:method=hydra"):
        with pytest.raises(ConfigError, match=r"twice\. Expected it once"):
            parse_setup(text)


def test_an_option_in_words_is_checked() -> None:
    assert_refused(run("generate", MODEL, "-p", "x", "-s", "ngram:num_speculative_tokns=8"), "Did you mean 'num_spec")
    assert_refused(run("generate", MODEL, "-p", "x", "-s", "ngram:num_speculative_tokens=many"), "is 'many'")


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "owner/name", "-p", "x", "--trace", "{out}"),
        ("plan", "owner/name", "--out", "{out}.svg"),
        ("plan", "owner/name", "--save-acceptance", "{out}"),
        ("tune", "tree", "owner/name", "-s", f"hydra:model={HEAD}", "--out", "{out}"),
        ("train", "medusa", "owner/name", "--data", "nothing", "--out", "{out}", "--run-dir", "{new}"),
        ("train", "medusa", "owner/name", "--data", "nothing", "--out", "{new}", "--joint", "lora_rank=1",
         "--target-out", "{out}"),
        ("data", "owner/name", "--text", "nothing", "--out", "{out}"),
        ("data", "index", "nothing", "--out", "{out}"),
    ],
)  # fmt: skip
def test_places_that_cannot_be_written_to(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are told before anything is read."""
    monkeypatch.setattr("foretoken.models.names._asked", lambda *_: (["config.json", "model.safetensors"], ""))
    (tmp_path / "file").touch()
    out, new = tmp_path / "file" / "out", tmp_path / "new"
    result = run(*(argument.format(out=out, new=new) for argument in arguments))
    assert_refused(result, f"error: '{out}", "cannot be written: Not a directory.")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_parents_are_made(tmp_path: Path) -> None:
    out = tmp_path / "new" / "tree.json"
    quick = ("--num-prompts", "1", "--max-tokens", "2", "--temperature", "0")
    assert run("tune", "tree", MODEL, "-s", "medusa", "--nodes", "2", "--out", str(out), *quick).returncode == 0
    assert out.is_file()


@pytest.mark.parametrize("command", ["generate", "verify", "bench", "doctor"])
def test_devices(command: str) -> None:
    more = {"generate": ("-p", "x"), "doctor": ("--method", "medusa")}.get(command, ())
    assert_refused(
        run(command, MODEL, *more, "--device", "meta"), "device 'meta' cannot be used: it holds shapes and no numbers"
    )
    assert_refused(
        run(command, MODEL, *more, "--device", "nonsense"), "device 'nonsense' cannot be used", "Expected 'auto'"
    )
    if not torch.cuda.is_available():
        reason = "was built without CUDA" if torch.version.cuda is None else "nvidia-smi"
        assert_refused(run(command, MODEL, *more, "--device", "cuda"), reason, "Expected 'auto'")


@pytest.mark.parametrize("arguments", [("inspect", "owner/name"), ("doctor", MODEL, "owner/name")])
def test_hub_ids_without_a_network(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_refused(run(*arguments), "'owner/name' cannot be fetched from the hub", "in the cache")


@pytest.mark.parametrize(
    "arguments", [("inspect", "owner/name"), ("doctor", MODEL, "owner/name", "--num-prompts", "1")]
)
def test_hub_ids(arguments: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the hub's client gives is examined as a directory would be."""
    asked = []

    def snapshot(name: str, **options: object) -> str:
        asked.append((name, options["revision"]))
        return str(ROOT / HEAD)

    monkeypatch.setattr("foretoken.models.names._asked", lambda *_: (["config.json", "model.safetensors"], ""))
    monkeypatch.setattr("foretoken.formats.files.snapshot_download", snapshot)
    result = run(*arguments)
    assert result.returncode in (0, 1), result.stderr
    assert "hydra" in result.stdout or "head fits" in result.stdout
    assert asked == [("owner/name", None)]
