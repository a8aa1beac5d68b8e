"""Devices that never end and pipes that nobody writes to: a sentence with the bound, wherever a file is read."""

import os
import threading
from pathlib import Path

import pytest
from command_line import MODEL, ROOT, assert_refused, output_of

from foretoken.files import bounded_reads

HEAD = "models/tinycode-hydra"
SHORT = ("--num-prompts", "1", "--max-tokens", "1")  # of the texts that are decoded before a drafter is loaded


def with_device(directory: Path, original: str, name: str, device: str) -> str:
    """A copy by links of a model or head, in which one file is a device, or a pipe."""
    directory.mkdir()
    for path in (ROOT / original).iterdir():
        if path.name != name:
            (directory / path.name).symlink_to(path)
    if device == "pipe":
        os.mkfifo(directory / name)
    else:
        (directory / name).symlink_to(device)
    return str(directory)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", MODEL, "--file", "/dev/zero"), "'/dev/zero' holds more than 64 MiB"),
        (("generate", MODEL, "-p", "x", "-s", "@/dev/zero"), "'/dev/zero' holds more than 16 MiB"),
        (("verify", MODEL, "-s", "@/dev/zero"), "'/dev/zero' holds more than 16 MiB"),
        (("bench", MODEL, "--prompts", "/dev/zero"), "'/dev/zero' holds more than 512 MiB"),
        (("data", MODEL, "--text", "/dev/zero", "--out", "{out}"), "there is no file '/dev/zero'"),
        (("train", "medusa", MODEL, "--data", "{device}", "--out", "{out}"), "meta.json' is a device"),
        (("doctor", MODEL, "--method", "medusa", "--data", "{device}"), "meta.json' is a device"),
        (
            ("data", MODEL, "--text", "README.md", "--out", "{out}", "--self-distill", "--generated", "/dev/zero"),
            "'/dev/zero' is a device. Expected a regular file",
        ),
    ],
)
def test_a_device_that_never_ends(arguments: tuple[str, ...], sentence: str, tmp_path: Path) -> None:
    (tmp_path / "device").mkdir()
    (tmp_path / "device" / "meta.json").symlink_to("/dev/zero")
    places = {"out": tmp_path / "out", "device": tmp_path / "device"}
    assert_refused(sentence, *(argument.format(**places) for argument in arguments))


def test_standard_input_that_never_ends() -> None:
    with Path("/dev/zero").open("rb") as endless:
        assert_refused("standard input holds more than 64 MiB", "generate", MODEL, stdin=endless)


@pytest.mark.parametrize("device", ["/dev/zero", "pipe"])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("original", [MODEL, HEAD])
def test_files_of_a_model_or_head(original: str, name: str, device: str, tmp_path: Path) -> None:
    odd = with_device(tmp_path / "odd", original, name, device)
    sentence = f"{name}' is {'a pipe' if device == 'pipe' else 'a device'}. Expected a regular file"
    commands = [("inspect", odd), ("inspect", "--verify", odd)]
    if original == HEAD:
        commands += [("convert", odd, str(tmp_path / "out"))]
        # Weights are looked at among doctor's checks, and are a fault there.
        commands += [("doctor", MODEL, odd)] if name == "config.json" else []
    else:
        commands += [("generate", odd, "-p", "x"), ("verify", MODEL, "-s", f"draft_model:model={odd}", *SHORT)]
    for arguments in commands:
        assert_refused(sentence, *arguments)


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "tokenizer_config.json"])
def test_files_that_libraries_read(name: str, tmp_path: Path) -> None:
    odd = with_device(tmp_path / "odd", MODEL, name, "pipe")
    assert_refused(f"{name}' is a pipe", "generate", odd, "-p", "x")


def test_a_pipe_that_nobody_writes_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_reads, "_WRITER_WAIT_S", 0.1)
    os.mkfifo(tmp_path / "pipe")
    pipe = str(tmp_path / "pipe")
    for arguments in (("generate", MODEL, "-f", pipe), ("generate", MODEL, "-p", "x", "-s", f"@{pipe}")):
        assert_refused("is a pipe that no process has opened for writing", *arguments)
    assert_refused("is a pipe that no process has opened for writing", "verify", MODEL, "--prompts", pipe)


def test_process_substitution() -> None:
    """Pipes as the shell names them; one gets its text late."""
    prompt, config = (os.pipe(), os.pipe())

    def write(pipe: tuple[int, int], text: bytes) -> None:
        os.write(pipe[1], text)
        os.close(pipe[1])

    late = threading.Timer(0.3, write, (prompt, b"import os\n"))
    late.start()
    write(config, b'{"method": "ngram"}')
    names = ("-f", f"/dev/fd/{prompt[0]}", "-s", f"@/dev/fd/{config[0]}")
    text = output_of("generate", MODEL, "--max-tokens", "2", *names)
    late.join()
    for reading, _ in (prompt, config):
        os.close(reading)
    assert text.startswith("import os\n")
