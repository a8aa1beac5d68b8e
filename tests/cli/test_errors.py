"""Bad input: one clear sentence on standard error, exit code 2, no traceback."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
from command_line import MODEL, ROOT, Finished, run

from foretoken import LLM
from foretoken.bench.workload import load_prompts
from foretoken.core.errors import RequestError


def assert_refused(result: Finished, *parts: str) -> None:
    assert result.returncode == 2, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr


def copied_model(tmp_path: Path) -> Path:
    """A model directory that a test may damage; weights are linked until then."""
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (ROOT / MODEL).iterdir():
        (copy / path.name).symlink_to(path)
    return copy


def test_missing_model_names_the_nearest() -> None:
    result = run("generate", "models/tinycod", "-p", "x")
    assert_refused(result, "there is no model 'models/tinycod'", "Did you mean 'models/tinycode'?")


@pytest.mark.parametrize(
    ("config", "parts"),
    [
        ("ngrm", ("'ngrm' does not exist", "Did you mean 'ngram'?")),
        ("dflash", ("'dflash' is not there yet. Available: draft_model, eagle, eagle3,",)),
        ("oracle", ("must know the text beforehand",)),
        ("[1, 2]", ("speculative_config is [1, 2]",)),
        ('"ngram"', ("speculative_config is 'ngram'",)),
        ("[" * 100_000, ("not valid JSON",)),
        (
            '{"method": "ngram", "prompt_lookup_mx": 3}',
            ("no key 'prompt_lookup_mx'", "Did you mean 'prompt_lookup_max'?"),
        ),
        ('{"method": "ngram", "num_speculative_tokens": 0}', ("num_speculative_tokens", "greater than or equal to 1")),
        ('{"method": "ngram", "quantization": "fp8"}', ("has no key 'quantization'",)),
        ('{"method": ngram}', ("not valid JSON",)),
        ('{"num_speculative_tokens": 3}', ("no 'method'",)),
        ("@no-such-file.json", ("there is no file 'no-such-file.json'",)),
    ],
)
def test_speculative_config(config: str, parts: tuple[str, ...]) -> None:
    assert_refused(run("generate", MODEL, "-p", "x", "-s", config), *parts)


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
    assert_refused(run("generate", MODEL, "-p", "x = 1", *arguments), *parts)


def test_text_that_is_not_utf_8(tmp_path: Path) -> None:
    file = tmp_path / "latin"
    file.write_bytes("é".encode("latin-1"))
    assert_refused(run("generate", MODEL, "-f", str(file)), "latin' is not UTF-8 text: byte 0 is 0xe9")
    assert_refused(run("generate", MODEL, stdin=b"a\xff"), "standard input is not UTF-8 text: byte 1 is 0xff")
    assert_refused(run("generate", MODEL, "-p", "a\udcff"), "--prompt is not UTF-8 text: character 1")
    assert_refused(run("generate", MODEL, "-p", "x", "-s", f"@{file}"), "cannot be read", "Expected JSON")
    assert_refused(run("bench", MODEL, "--prompts", str(file)), "is not UTF-8 text")
    assert_refused(run("generate", MODEL, "-f", str(tmp_path)), "cannot be read: Is a directory")


@pytest.mark.parametrize("option", ["--num-prompts", "--batch-size", "--repeats", "--max-tokens"])
def test_counts_of_nothing(option: str) -> None:
    assert_refused(run("bench", MODEL, option, "0"), option, "greater than or equal to 1", "bench --help")


@pytest.mark.parametrize("command", ["bench", "verify", "doctor"])
def test_more_tokens_than_the_context(command: str) -> None:
    more = ("models/tinycode-hydra",) if command == "doctor" else ()
    assert_refused(run(command, MODEL, *more, "--max-tokens", "5000"), "--max-tokens is 5000", "context of 1024")


def test_empty_prompt() -> None:
    assert_refused(run("generate", MODEL, "-p", ""), "the prompt is empty", "at least one token")
    assert_refused(run("generate", MODEL, stdin=""), "the prompt is empty")


def test_prompt_longer_than_the_context() -> None:
    result = run("generate", MODEL, stdin="value = 1\n" * 2000)
    assert_refused(result, "tokens. Expected at most", "Shorten it")


def test_prompt_from_two_places(tmp_path: Path) -> None:
    file = tmp_path / "prompt.py"
    file.write_text("x")
    assert_refused(run("generate", MODEL, "-p", "x", "-f", str(file)), "both as text and as --file")
    assert_refused(run("generate", MODEL, "-f", str(tmp_path / "none.py")), "cannot be read")


def test_corrupt_safetensors(tmp_path: Path) -> None:
    copy = copied_model(tmp_path)
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[: len(whole) // 2])
    assert_refused(run("generate", str(copy), "-p", "x"), "model.safetensors is damaged")


def test_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    copy = copied_model(tmp_path)
    (copy / "model.safetensors").unlink()
    marker = tmp_path / "marker"

    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (marker,))  # type: ignore[return-value]

    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Payload()))
    assert_refused(run("generate", str(copy), "-p", "x"), "pickle weights", "Expected safetensors")
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
    assert_refused(run("bench", MODEL, "--prompts", str(lines)), "prompts.jsonl:2", sentence)


def test_a_line_separator_inside_a_prompt(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a\u2028b"}\n\n{"prompt": "c"}\r\n', encoding="utf-8", newline="")
    assert load_prompts(str(lines)) == ["a\u2028b", "c"]


def test_prompt_sets(tmp_path: Path) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text('{"prompt": "a"}\n{"txt": "b"}\n')
    assert_refused(run("bench", MODEL, "--prompts", str(lines)), "prompts.jsonl:2 has the columns ['txt']")
    assert_refused(run("verify", MODEL, "--prompts", "none.jsonl"), "there is no prompt file 'none.jsonl'")


def test_inspect_of_something_else(tmp_path: Path) -> None:
    assert_refused(run("inspect", str(tmp_path)), "has no config.json")
    (tmp_path / "config.json").write_text("{")
    assert_refused(run("inspect", str(tmp_path)), "is not valid JSON")


def test_ids_outside_the_vocabulary() -> None:
    with pytest.raises(RequestError, match=r"holds token id 999999. Expected integers in 0\.\.6143"):
        LLM(str(ROOT / MODEL)).generate([[1, 2, 999999]])


def test_draft_model_with_another_vocabulary(tmp_path: Path) -> None:
    copy = copied_model(tmp_path)
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    first, second = list(tokenizer["model"]["vocab"])[300:302]
    vocab = tokenizer["model"]["vocab"]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = json.dumps({"method": "draft_model", "model": str(copy)})
    assert_refused(run("generate", MODEL, "-p", "x", "-s", config), "has another vocabulary", "same tokenizer")
