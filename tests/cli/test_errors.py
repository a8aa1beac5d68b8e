"""Bad input: one clear sentence on standard error, exit code 2, no traceback.

Also a head where a model belongs, a model where a head belongs, and a path where a method belongs.
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
from command_line import MODEL, ROOT, assert_refused, output_of, run

from foretoken.bench.workload import load_prompts

HEAD, DRAFT = "models/tinycode-hydra", "models/tinycode-draft"
IS_NO_MODEL = (f"'{HEAD}' is a hydra head, not a model", "trained for ('models/tinycode')", f"-s hydra:model={HEAD}")


def copied_model(tmp_path: Path) -> Path:
    """A model directory that a test may damage; weights are linked until then."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (ROOT / MODEL).iterdir():
        (copy / path.name).symlink_to(path)
    return copy


def test_missing_model_names_the_nearest() -> None:
    parts = ("there is no model 'models/tinycod'", "Did you mean 'models/tinycode'?")
    assert_refused(parts, "generate", "models/tinycod", "-p", "x")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("ngrm", ("'ngrm' does not exist", "Did you mean 'ngram'?")),
        ("dflash", ("'dflash' is not there yet. Available: draft_model, eagle, eagle3,",)),
        ("oracle", ("must know the text beforehand",)),
        ('"ngram"', ("speculative_config is 'ngram'",)),
        ("@no-such-file.json", ("there is no file 'no-such-file.json'",)),
    ],
)
def test_speculative_config(config: str, parts: tuple[str, ...]) -> None:
    assert_refused(parts, "generate", MODEL, "-p", "x", "-s", config)


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("--temperature", "-1"), ("temperature is -1.0", "at least 0")),
        (("--temperature", "nan"), ("temperature is nan",)),
        (("--top-p", "0"), ("top_p is 0.0", "above 0")),
        (("--dtype", "float31"), ("dtype 'float31' does not exist", "Did you mean 'float32'?")),
        (("--stop", ""), ("empty string",)),
        (("--stop", "\udcff"), ("--stop is not UTF-8 text",)),
        (("--threads", "100000"), ("threads is 100000", "cores that are really free")),
        (("--max-tokens", "1024"), ("--max-tokens is 1024", "a context of 1024 tokens", "at most 1023")),
        (("--max-tokens", "9" * 30), ("--max-tokens is 9999", "at most 2147483647")),
        (("--max-tokens", "0"), ("--max-tokens", "greater than or equal to 1")),
        (("--seed", "one"), ("--seed",)),
        (("-s", "ngram", "-s", "ngram"), ("takes one --speculative-config",)),
        (("-s", "ngram", "--spec-type", "ngram,hydra"), ("--spec-type ngram,hydra", "Pass one of them.")),
        (("--spec-type", "ngram,"), ("--spec-type is 'ngram,'", "Expected names of methods with commas")),
        (("--spec-type", "ngram,ngrams"), ("'ngrams' does not exist", "Did you mean 'ngram'")),
    ],
)
def test_parameters(arguments: tuple[str, ...], parts: tuple[str, ...]) -> None:
    assert_refused(parts, "generate", MODEL, "-p", "x = 1", *arguments)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "latin"
    file.write_bytes("é".encode("latin-1"))
    assert_refused("latin' is not UTF-8 text: byte 0 is 0xe9", "generate", MODEL, "-f", str(file))
    assert_refused("standard input is not UTF-8 text: byte 1 is 0xff", "generate", MODEL, stdin=b"a\xff")
    assert_refused("--prompt is not UTF-8 text: character 1", "generate", MODEL, "-p", "a\udcff")
    assert_refused(("cannot be read", "Expected JSON"), "generate", MODEL, "-p", "x", "-s", f"@{file}")
    assert_refused("is not UTF-8 text", "bench", MODEL, "--prompts", str(file))
    assert_refused("cannot be read: Is a directory", "generate", MODEL, "-f", str(tmp_path))


@pytest.mark.parametrize("option", ["--num-prompts", "--batch-size", "--repeats", "--max-tokens"])
def test_counts_of_nothing(option: str) -> None:
    assert_refused((option, "greater than or equal to 1", "bench --help"), "bench", MODEL, option, "0")


@pytest.mark.parametrize("command", ["bench", "verify", "doctor"])
def test_more_tokens_than_the_context(command: str) -> None:
    more = ("models/tinycode-hydra",) if command == "doctor" else ()
    assert_refused(("--max-tokens is 5000", "context of 1024"), command, MODEL, *more, "--max-tokens", "5000")


def test_empty_prompt() -> None:
    assert_refused(("the prompt is empty", "at least one token"), "generate", MODEL, "-p", "")
    assert_refused("the prompt is empty", "generate", MODEL, stdin="")


def test_prompt_longer_than_the_context() -> None:
    assert_refused(("tokens. Expected at most", "Shorten it"), "generate", MODEL, stdin="value = 1\n" * 2000)


def test_prompt_from_two_places(tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("x")
    assert_refused("both as text and as --file", "generate", MODEL, "-p", "x", "-f", str(file))
    assert_refused("cannot be read", "generate", MODEL, "-f", str(tmp_path / "none.py"))


def test_corrupt_safetensors(tmp_path: Path) -> None:
    copy = copied_model(tmp_path)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_refused("model.safetensors is damaged", "generate", str(copy), "-p", "x")


def test_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    copy = copied_model(tmp_path)
    (copy / "model.safetensors").unlink()
    marker = tmp_path / "marker"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (marker,))  # type: ignore[return-value]

    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert_refused(("pickle weights", "Expected safetensors"), "generate", str(copy), "-p", "x")
    assert not marker.exists()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ('{"txt": "b"}', "has the columns ['txt'], none that is known. Expected 'messages', 'conversations', 'turns'"),
        ("[1]", "is list. Expected an object with 'messages'"),
        ("7", "is int. Expected an object with 'messages'"),
        ("{", "is not valid JSON"),
        ("[" * 100_000, "is not valid JSON"),
        ('{"prompt": 7}', "'prompt' is 7. Expected text"),
        ('{"prompt": null}', "holds no text. Expected a prompt that is not empty"),
        ('{"prompt": ""}', "holds no text. Expected a prompt that is not empty"),
        ('{"prompt": "\\ud800"}', "holds a lone surrogate"),
        ('{"prompt": "a", "category": 3}', "'category' is 3. Expected text"),
        ('{"turns": "a"}', "'turns' is 'a'. Expected a list of texts that are not empty"),
        ('{"turns": []}', "'turns' is []. Expected a list of texts that are not empty"),
        ('{"messages": [{"role": "bot", "content": "a"}]}', "turn 0 of 'messages' has the role 'bot'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "holds no text. Expected a prompt"),
    ],
)
def test_lines_of_prompt_sets(line: str, sentence: str, tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n' + line + "\n")
    assert_refused(("prompts.jsonl:2", sentence), "bench", MODEL, "--prompts", str(lines))


def test_a_line_separator_inside_a_prompt(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\r\n', encoding="utf-8", newline="")
    assert load_prompts(str(lines)) == ["a\u2028b", "c"]


def test_prompt_sets(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n{"txt": "b"}\n')
    assert_refused("prompts.jsonl:2 has the columns ['txt']", "bench", MODEL, "--prompts", str(lines))
    assert_refused("there is no prompt file 'none.jsonl'", "verify", MODEL, "--prompts", "none.jsonl")


def test_inspect_of_something_else(tmp_path: Path) -> None:
    assert_refused("has no config.json", "inspect", str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    assert_refused("is not valid JSON", "inspect", str(tmp_path))


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
    assert_refused(IS_NO_MODEL, *(argument.format(out=tmp_path / "out") for argument in arguments))


def test_a_head_of_another_format_for_a_model(tmp_path: Path) -> None:
    head = str(tmp_path / "head")
    output_of("convert", HEAD, head, "--to", "hydra", "--target", MODEL)
    assert_refused(("is a hydra head, not a model", f"-s hydra:model={head}"), "generate", head, "-p", "x")


def test_a_model_for_a_head(tmp_path: Path) -> None:
    sentence = f"'{DRAFT}' is a model and holds no draft head"
    write = f"-s draft_model:model={DRAFT}"
    assert_refused((sentence, write), "doctor", MODEL, DRAFT)
    assert_refused((sentence, write), "convert", DRAFT, str(tmp_path / "out"))


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
    assert_refused((sentence, f"Write {write}"), command, MODEL, *more, "-s", given)


def test_a_method_without_its_weights() -> None:
    for method in ("medusa", "draft_model"):
        parts = (f"There is no '{DRAFT}-{method.removesuffix('_model')}'", f"Write {method}:model=PLACE")
        assert_refused(parts, "generate", DRAFT, "-p", "x", "-s", method)


def test_an_option_in_words_is_checked() -> None:
    assert_refused("Did you mean 'num_spec", "generate", MODEL, "-p", "x", "-s", "ngram:num_speculative_tokns=8")
    assert_refused("is 'many'", "generate", MODEL, "-p", "x", "-s", "ngram:num_speculative_tokens=many")


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
    parts = (f"error: '{out}", "cannot be written: Not a directory.")
    assert_refused(parts, *(argument.format(out=out, new=new) for argument in arguments))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_missing_parents_are_made(tmp_path: Path) -> None:
    out = tmp_path / "new" / "tree.json"
    quick = ("--num-prompts", "1", "--max-tokens", "2", "--temperature", "0")
    output_of("tune", "tree", MODEL, "-s", "medusa", "--nodes", "2", "--out", str(out), *quick)
    assert out.is_file()


@pytest.mark.parametrize("command", ["generate", "verify", "bench", "doctor"])
def test_devices(command: str) -> None:
    more = {"generate": ("-p", "x"), "doctor": ("--method", "medusa")}.get(command, ())
    refusals = {
        "meta": ("device 'meta' cannot be used: it holds shapes and no numbers",),
        "nonsense": ("device 'nonsense' cannot be used", "Expected 'auto'"),
    }
    if not torch.cuda.is_available():
        reason = "was built without CUDA" if torch.version.cuda is None else "nvidia-smi"
        refusals["cuda"] = (reason, "Expected 'auto'")
    for device, parts in refusals.items():
        assert_refused(parts, command, MODEL, *more, "--device", device)


@pytest.mark.parametrize("arguments", [("inspect", "owner/name"), ("doctor", MODEL, "owner/name")])
def test_hub_ids_without_a_network(arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert_refused(("'owner/name' cannot be fetched from the hub", "in the cache"), *arguments)


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
