"""Numbers of any size, names of nothing: every command refuses them in one sentence, before it does anything."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from command_line import MODEL, ROOT, assert_refused, output_of, refused

from foretoken.cli.commands import app

HUGE = "9" * 20
HEAD = "models/tinycode-medusa"
MACHINE = ("--bandwidth", "100", "--flops", "10", "--memory", "8")
# What each command needs beside the option that is tried; {out} is a new place.
NEEDED = {
    "generate": (MODEL, "-p", "x"),
    "chat": (MODEL,),
    "serve": (MODEL, "--port", "0"),
    "batch": ("README.md", "{out}", "--model", MODEL),
    "report": ("README.md",),
    "verify": (MODEL,),
    "bench": (MODEL,),
    "bench serve": (),
    "sweep": (MODEL, "--out", "{out}"),
    "plan": (MODEL,),
    "twin": (MODEL, "{out}"),
    "quantize": (MODEL, "{out}"),
    "inspect": (MODEL,),
    "models": (),
    "convert": (HEAD, "{out}", "--to", "tensorrt_llm", "--target", MODEL),
    "data": (MODEL, "--text", "README.md", "--out", "{out}"),
    "data vocab": ("{out}", "--size", "4", "--out", "{out}"),
    "data index": ("{out}", "--out", "{out}"),
    "train": ("medusa", MODEL, "--data", "{out}", "--out", "{out}"),
    "tune tree": (MODEL, "-s", "hydra"),
    "tune acceptance": (MODEL, HEAD, "--out", "{out}"),
    "tune stop": (MODEL, "-s", "draft_model"),
    "doctor": (MODEL, HEAD),
}
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
OPTIONS = [(name, param) for name, command in COMMANDS.items() for param in command.params]
INTEGERS = [
    (name, param.opts[0]) for name, param in OPTIONS if param.metavar == "N" and param.param_type_name == "option"
]
FLOATS = [(name, param.opts[0]) for name, param in OPTIONS if param.metavar == "X"]
PATHS = [(name, param.opts[0]) for name, param in OPTIONS if param.metavar == "PATH"]
ARGUMENTS = [
    (name, place, param.metavar)
    for name, command in COMMANDS.items()
    for place, param in enumerate(param for param in command.params if param.param_type_name == "argument")
]


def refusal(name: str, arguments: tuple[str, ...], out: Path) -> str:
    """The one sentence that a command says."""
    sentence, *more = refused(*name.split(), *(argument.format(out=out) for argument in arguments)).splitlines()
    assert not more or more[0].startswith("Try '")
    assert not out.exists()
    return sentence


def test_every_command_is_tried() -> None:
    assert set(NEEDED) == set(COMMANDS) - {"version"}
    assert len(INTEGERS) > 70
    assert len(FLOATS) > 25
    assert len(PATHS) > 30


@pytest.mark.parametrize(("name", "option"), INTEGERS)
@pytest.mark.parametrize("value", [HUGE, f"-{HUGE}"])
def test_integers_that_nothing_has(name: str, option: str, value: str, tmp_path: Path) -> None:
    sentence = refusal(name, (*NEEDED[name], option, value), tmp_path / "out")
    assert f"{option} is {value}. Expected" in sentence or f"Invalid value for '{option}'" in sentence


@pytest.mark.parametrize(("name", "option"), FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e300"])
def test_numbers_that_nothing_has(name: str, option: str, value: str, tmp_path: Path) -> None:
    sentence = refusal(name, (*NEEDED[name], option, value), tmp_path / "out")
    assert f"error: {option} is {float(value)}. Expected at least " in sentence


@pytest.mark.parametrize(("name", "option"), PATHS)
def test_paths_without_a_name(name: str, option: str, tmp_path: Path) -> None:
    """`Path("")` is the current directory."""
    sentence = refusal(name, (*NEEDED[name], option, ""), tmp_path / "out")
    assert sentence == f"error: {option} is empty. Expected a name; . is this directory."


@pytest.mark.parametrize(("name", "place", "shown"), ARGUMENTS)
def test_arguments_without_a_name(name: str, place: int, shown: str, tmp_path: Path) -> None:
    arguments = (*NEEDED[name][:place], "", *NEEDED[name][place + 1 :])
    assert f"error: {shown} is empty. Expected a name" in refusal(name, arguments, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "arguments", "part"),
    [
        ("convert", ("--tp-size", "2147483647"), "tp_size is 2147483647. Expected 1 to 4096 ranks."),
        (
            "train",
            ("--batch-size", "65537"),
            "--batch-size is 65537. Expected at least 1 and at most 65536.",
        ),
        ("plan", ("--bandwidth", "1e-300"), "--bandwidth is 1e-300. Expected at least 0.001 and at most 1000000000."),
        ("plan", ("--batch-size", "1000000000"), "--batch-size is 1000000000. Expected at least 1 and at most 65536."),
        ("plan", (*MACHINE, "--context", "1025"), "--context is 1025, but 'models/tinycode' has a context of 1024."),
        ("twin", ("--hidden-size", str(256 * 4**7)), "a twin of 24 layers of 4194304 takes "),
        ("twin", ("--layers", "999999999"), "a twin of 999999999 layers of 1024 takes "),
    ],
)
def test_sizes_that_follow_from_the_arguments(name: str, arguments: tuple[str, ...], part: str, tmp_path: Path) -> None:
    """Looked at before anything is made: of these no memory and no disk would hold the result."""
    sentence = refusal(name, (*NEEDED[name], *arguments), tmp_path / "out")
    assert part in sentence
    assert list(tmp_path.iterdir()) == []


def test_more_requests_in_flight_than_lines(tmp_path: Path) -> None:
    """A task for each of a billion filled the memory."""
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = '{"model": "tinycode", "prompt": "x", "max_tokens": 1}'
    source.write_text(f'{{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {body}}}\n')
    options = ("--model", MODEL, "--served-model-name", "tinycode", "--max-in-flight", "999999999")
    output_of("batch", str(source), str(out), *options)
    assert json.loads(out.read_text())["custom_id"] == "a"


def test_the_current_directory_may_be_named(tmp_path: Path) -> None:
    assert_refused("'.' is not empty", "convert", HEAD, ".")
    assert (ROOT / "README.md").is_file()
