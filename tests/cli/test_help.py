"""`--help` at several widths: plain names for values, whole paragraphs, examples that a user can paste."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import pytest
import typer.main
from command_line import MODEL, ROOT, run

from foretoken.cli import options
from foretoken.cli.commands import app, flattened
from foretoken.entrypoints.config import parse_setup

COMMANDS = [
    "generate", "verify", "chat", "bench", "bench serve", "batch", "serve", "sweep", "plan", "twin", "quantize",
    "models", "inspect", "convert",
    "data", "data vocab", "data index", "train", "tune tree", "tune acceptance", "tune stop", "doctor", "report",
]  # fmt: skip
VALUE = r"(N|X|TEXT|PATH|NAME|URL|MODEL|DRAFTER=PATH|DRAFTER|KEY=\w+)"


@cache
def shown(command: str, width: int) -> list[str]:
    """The lines of a command's help, without the spaces at their ends."""
    with mock.patch.dict(os.environ, {"COLUMNS": str(width)}):
        result = run(*command.split(), "--help")
    assert result.returncode == 0, result.stderr
    return [line.rstrip() for line in result.stdout.splitlines()]


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_values_have_plain_names_and_nothing_is_cut(command: str, width: int) -> None:
    lines = shown(command, width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert not re.search(r"<\w+|\{\w+\}|INTEGER|BOOLEAN|\w…", text)
    assert any(line.strip().startswith("Exit codes: 0 done") for line in lines)
    rows = [line for line in lines if re.match(r"│ [* ]{0,6}--\w", line)]
    assert rows
    for row in rows:
        names, rest = re.match(r"│ \*?\s*(--[\w-]+(?:\s+-\w)?)\s+(.*)│", row).groups()  # type: ignore[union-attr]
        is_flag = not re.match(VALUE + r"( \[[\dx<>=]+\])?\s\s", rest)
        assert is_flag == (names.split()[0] in flags(command)), row


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_listed(command: str) -> None:
    group: Any = typer.main.get_command(app)
    context = group.commands[command].make_context("foretoken", [], resilient_parsing=True)
    rows = {line.replace("*", "").split()[1] for line in shown(command, 80) if re.match(r"│ [* ]{0,6}--\w", line)}
    options = [each for each in group.commands[command].get_params(context) if each.param_type_name == "option"]
    assert {each.opts[0] for each in options} <= rows


@pytest.mark.parametrize("command", COMMANDS)
def test_no_word_is_taken_for_markup(command: str) -> None:
    """As `[report]` after a package's name, which markup swallows."""
    group: Any = typer.main.get_command(app)
    said = group.commands[command].callback.__doc__ if command in group.commands else ""
    assert not set((said or "").split()) - {"\b"} - set(" ".join(shown(command, 120)).split())


@cache
def flags(command: str) -> set[str]:
    """Options of a command that take no value."""
    group: Any = typer.main.get_command(app)
    found = group if not command else group.commands[command]
    context = found.make_context("foretoken", [], resilient_parsing=True)
    return {name for param in found.get_params(context) if getattr(param, "is_flag", False) for name in param.opts}


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("command", COMMANDS)
def test_paragraphs_are_folded_at_the_width(command: str, width: int) -> None:
    lines = shown(command, width)
    usage = next(i for i, line in enumerate(lines) if "Usage:" in line)
    end = next(i for i, line in enumerate(lines) if line.startswith("╭"))
    for line, after in zip(lines[usage + 1 : end], lines[usage + 2 : end], strict=False):
        if line and after:
            assert len(line) + 1 + len(after.split()[0]) > width - 1, "a line ends although the next word fits"


def test_all_commands_are_looked_at() -> None:
    group: Any = typer.main.get_command(app)
    assert {*COMMANDS, "version"} == {name for name, command in group.commands.items() if not command.hidden}


def test_a_switch_that_is_hidden_in_the_help_still_works() -> None:
    group: Any = typer.main.get_command(app)
    shown("serve", 80)
    for switch, is_on in (("--no-enable-prefix-caching", False), ("--enable-prefix-caching", True)):
        values = group.commands["serve"].make_context("serve", ["models/tinycode", switch]).params
        assert values["enable_prefix_caching"] is is_on


def test_arguments_are_named_as_in_the_text() -> None:
    assert any(line.endswith("doctor [OPTIONS] MODEL [HEAD]") for line in shown("doctor", 80))
    assert any(line.endswith("convert [OPTIONS] SOURCE OUT") for line in shown("convert", 80))
    assert "Missing argument 'METHOD'" in run("train").stderr


def examples(command: str) -> list[list[str]]:
    """The arguments of each example, after `foretoken`."""
    lines = shown(command, 80)
    text = "\n".join(lines[lines.index(" Examples:") + 1 :]).split("\n\n")[0].replace("\\\n", " ")
    found = [shlex.split(line) for line in text.splitlines()]
    assert all(words[0] == "foretoken" for words in found), found
    return [words[1:] for words in found]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_understood(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Options exist and have values of their type, methods fit their weights, bundled models are there."""
    group: Any = typer.main.get_command(app)
    found = examples(command)
    assert len(found) > 1
    monkeypatch.chdir(ROOT)
    # `data vocab` and `data index` are shown with what makes their input or takes their output.
    assert any(words[: len(command.split())] == command.split() for words in found)
    for example in found:
        # Files of the user's own stand for the bundled models.
        words = [word.replace("model.gguf", MODEL).replace("small.gguf", f"{MODEL}-draft") for word in example]
        name, resolved, arguments = group.resolve_command(group.make_context("foretoken", []), list(words))
        assert command in (name, "data vocab", "data index")
        values = resolved.make_context(name, list(arguments)).params
        for setup in values.get("speculative_config") or ():
            assert parse_setup(setup, target=values.get("model")).config is not None
        for value in arguments:
            assert not value.startswith("models/") or Path(value).is_dir()


def test_examples_work(tmp_path: Path) -> None:
    for command in ("generate", "inspect", "convert"):
        for arguments in examples(command):
            prompt = tmp_path / "prompt.txt"
            prompt.write_text("import os\n")
            more = ("--max-tokens", "4") if command == "generate" else ()
            placed = [argument.replace("runs/", f"{tmp_path}/") for argument in arguments]  # nothing is left behind
            result = run(*(str(prompt) if argument == "prompt.txt" else argument for argument in placed), *more)
            assert result.returncode == 0, result.stderr


def test_help_needs_no_torch() -> None:
    """Nor an extra: every command is loaded before one runs."""
    missing = (
        "torch", "transformers", "huggingface_hub", "accelerate", "datasets", "fastapi", "httpx", "llguidance",
        "matplotlib", "peft", "prometheus_client", "pyarrow", "ray", "starlette", "tensorboard", "triton", "uvicorn",
    )  # fmt: skip
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({missing}))\n"
        "from foretoken.cli.main import main\n"
        "for command in sys.argv[1:]:\n"
        "    sys.argv = ['foretoken', *command.split(), '--help']\n"
        "    try: main()\n"
        "    except SystemExit as stop: assert not stop.code, command\n"
        "    assert command or not {'pydantic', 'numpy'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code, "", *COMMANDS]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("Usage: foretoken") == 1 + len(COMMANDS)


GIVEN: list[Any] = []
FEW = options.PromptOptions(num_prompts=3)


def command(
    model: str,
    *,
    loading: Annotated[options.LoadOptions, ("device", "dtype")],
    force: bool = False,
    drafter: options.DrafterChoice,
    asked: Annotated[options.PromptOptions, ("num_prompts", "prompts")] = FEW,
) -> None:
    GIVEN.append((model, loading, force, drafter, asked))


def test_typer_reads_the_fields_in_order_and_the_command_gets_the_groups() -> None:
    flat = flattened(command)
    parameters = inspect.signature(flat).parameters
    names = ["model", "device", "dtype", "force", "speculative_config", "spec_type", "num_prompts", "prompts"]
    assert list(parameters) == names
    assert [each.default for each in parameters.values()][1:] == ["auto", "auto", False, None, None, 3, "heldout"]
    assert parameters["device"].annotation == options.Device
    given = {"speculative_config": ["ngram"], "spec_type": None, "num_prompts": 2, "prompts": "edit"}
    flat(model="m", device="cpu", dtype="float32", force=True, **given)
    loading = options.LoadOptions(device="cpu", dtype="float32")
    drafter = options.DrafterChoice(speculative_config=["ngram"])
    assert GIVEN.pop() == ("m", loading, True, drafter, options.PromptOptions(num_prompts=2, prompts="edit"))
