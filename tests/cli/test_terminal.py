"""What is printed is safe to look at: control characters are shown, tables fit, closed streams end in a sentence."""

import itertools
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, TextIO

import pytest
from command_line import MODEL, ROOT, Terminal, run, run_main, run_process
from forked import ForkedCommand
from hypothesis import given
from hypothesis import strategies as st
from pairwise import slow_products

from foretoken.cli.terminal import (
    ProgressBar,
    StartClock,
    fact,
    growing_table,
    percent_by_depth,
    print_note,
    print_table,
    step_progress,
    visible,
)
from foretoken.training.trainer import StepReport

HEAD = "models/tinycode-hydra"
COMMAND = [sys.executable, "-m", "foretoken"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred", r"\x1b[31mred"),
        ("\x9b31m", r"\x9b31m"),
        ("over\rwritten\b\x00\x07\x7f", r"over\rwritten\x08\x00\x07\x7f"),
        ("\u202eesrever\u2066\u200e", r"\u202eesrever\u2066\u200e"),
        ("in\u200bvisible\ufeff\U000e0041", r"in\u200bvisible\ufeff\U000e0041"),
        ("a\u2028b", r"a\u2028b"),
        ("\ud800", r"\ud800"),
        ("\tdéjà\n\u05e9\u05dc\u05d5\u05dd 漢 👩\u200d💻", "\tdéjà\n\u05e9\u05dc\u05d5\u05dd 漢 👩\u200d💻"),
    ],
)
def test_what_a_terminal_would_obey_or_hide_is_shown(text: str, shown: str) -> None:
    assert visible(text) == shown


@given(st.text(), st.integers(0, 20))
def test_a_stream_may_be_cut_anywhere(text: str, cut: int) -> None:
    assert visible(text[:cut]) + visible(text[cut:]) == visible(text)
    assert all(char.isprintable() or char in "\n\t\u200c\u200d " or not char.isascii() for char in visible(text))


def test_shares_of_each_depth_line_up() -> None:
    assert percent_by_depth([1.0, 0.5]) == "100  50   -   -   -   -   -   -"
    assert percent_by_depth([0.07] * 9) == " ".join(["  7"] * 8)


PROMPT = "x = '\x1b[31m\u202e'\n"
GENERATE = ("generate", MODEL, "-p", PROMPT, "--max-tokens", "4")


def test_a_prompt_does_not_reach_the_terminal_raw() -> None:
    shown = run(*GENERATE, is_terminal=True).stdout
    assert shown.startswith("x = '\\x1b[31m\\u202e'\n")
    assert "\x1b" not in shown
    assert run(*GENERATE, "--raw", is_terminal=True).stdout.startswith(PROMPT)
    assert run(*GENERATE).stdout.startswith(PROMPT)


def test_names_and_errors_are_shown(tmp_path: Path) -> None:
    result = run("inspect", "models/\x1b[31mnone")
    assert "'models/\\x1b[31mnone'" in result.stderr
    for arguments in (("--\x1b[31mbogus",), ("inspect", "--\x1b[31mbogus"), ("\x1b[31mbogus",), ("bench", "a", "\x1b")):
        result = run(*arguments)
        assert result.returncode == 2
        assert "\x1b" not in result.stderr
        assert "\\x1b" in result.stderr
    odd = tmp_path / "a\x1b[31m\nb"
    odd.symlink_to(ROOT / HEAD)
    shown = run("inspect", str(odd), is_terminal=True).stdout
    assert "\x1b" not in shown
    assert "\\x1b[31m\\nb" in shown


@pytest.mark.parametrize("command", ["bench", pytest.param("verify", marks=pytest.mark.slow)])
def test_tables_fit_80_columns(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    setup = '{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1, "tree": "tree", "max_nodes": 12}'
    sizes = ("--num-prompts", "1", "--max-tokens", "6")
    result = run(command, MODEL, "-s", setup, "-s", "ngram", *sizes, is_terminal=True)
    assert result.returncode == 0, result.stderr
    _, table = re.sub(r"\x1b\[[\d;]*m", "", result.stdout).split("\n", 1)
    assert max(map(len, table.splitlines())) <= 80
    assert "..." not in table.replace("1, 2, ...", "")
    assert "tau" in table
    wide = run(command, MODEL, "-s", "ngram", *sizes, *(["--wide"] if command == "bench" else []))
    assert ("host ms" in wide.stdout) == (command == "bench")


def steps_shown(
    monkeypatch: pytest.MonkeyPatch, columns: int, *, after_s: float = 0.0, steps: Sequence[int] = (1, 2, 3)
) -> list[str]:
    """What a terminal of some columns is told of `steps` of a run with three."""
    monkeypatch.setenv("COLUMNS", str(columns))
    told = Terminal()
    monkeypatch.setattr(sys, "stderr", told)
    clock = itertools.count(100.0, 10.0)
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    with step_progress(3) as show:
        for step in steps:
            show(
                StepReport(
                    step=step, done=step / 3, loss=12.5, head_losses=[1.0] * 7, head_matches=[0.5] * 7, rate=1e-3,
                    grad_norm=1.0, tokens_per_s=321.0, held_out_tau=1.25, seconds_after=after_s,
                )
            )  # fmt: skip
    return told.getvalue().removesuffix("\n").split("\r\x1b[K")[1:]


def test_a_line_of_progress_fits_and_names_all_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = steps_shown(monkeypatch, 80, after_s=90)
    assert [line.split(" left")[0] for line in shown] == ["step 1/3, 1:50", "step 2/3, 1:40", "step 3/3, 1:30"]
    assert "loss 12.5000, held-out tau 1.250 (step 1)" in shown[0]
    assert max(map(len, shown)) < 80
    assert max(map(len, steps_shown(monkeypatch, 40))) < 40
    resumed = steps_shown(monkeypatch, 80, steps=[2, 3])
    assert [line.partition(" loss")[0] for line in resumed] == ["step 2/3,", "step 3/3, 0:00 left,"]
    assert "matches 50% 50% 50% 50% 50% 50% 50%, 321 tokens/s, lr 1.0e-03" in steps_shown(monkeypatch, 200)[0]


def test_no_bar_before_there_is_something_to_show(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Terminal()
    monkeypatch.setattr(sys, "stderr", told)
    with ProgressBar("tokens"):
        pass
    assert told.getvalue() == ""
    with ProgressBar("tokens") as show:
        show(3, 8)
    assert "3/8" in told.getvalue()


def test_results_are_printed_in_place_of_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pause the bar is gone, and it comes back with the next report."""
    told = Terminal()
    monkeypatch.setattr(sys, "stderr", told)
    with ProgressBar("tokens") as bar:
        bar(3, 8)
        bar.pause()
        before = told.getvalue()
        bar.pause()
        assert told.getvalue() == before
        bar(5, 8)
    assert "5/8" in told.getvalue().removeprefix(before)


def test_a_stage_of_a_start_is_shown_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    told, clock = Terminal(), StartClock()
    monkeypatch.setattr(sys, "stderr", told)
    with clock.stage("libraries", lambda: ", 3 of 8 MB"):
        assert "libraries: 0 s, 3 of 8 MB" in told.getvalue()
    assert told.getvalue().endswith("\x1b[2K")  # the line is erased
    assert list(clock.seconds) == ["Python and command", "libraries"]


def test_stages_of_a_start_leave_pipes_alone(capsys: pytest.CaptureFixture[str]) -> None:
    clock = StartClock()
    with clock.stage("libraries"):
        pass
    assert capsys.readouterr().err == ""
    clock.seconds = {"libraries": 2.04, "weights and tokenizer": 0.31}
    clock.print_table()
    assert capsys.readouterr().err.splitlines() == [
        "start                   seconds",
        " libraries                  2.0",
        " weights and tokenizer      0.3",
        " all                        2.4",
    ]


@pytest.mark.parametrize(("columns", "is_printed_at_once"), [(80, True), (24, False)])
def test_rows_are_printed_as_they_come(
    columns: int, is_printed_at_once: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the terminal is too narrow: a table is then split, which needs all rows."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    with growing_table(["drafter", "tokens/s", "tau"], ["draft_model", "12345.6", "10.00"], num_keys=1) as add:
        add(["plain", "40.1", "1.00"])
        first = capsys.readouterr().out
        add(["ngram\x1b[2J", "80.2", "2.00"])
    shown = first + re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert ("plain" in first) == is_printed_at_once
    if is_printed_at_once:
        heading, line, *rows = shown.splitlines()
        assert heading == " drafter     tokens/s   tau"
        assert line == " " + "─" * (len(heading) - 1)
        assert rows == [" plain           40.1  1.00", r" ngram\x1b[2J     80.2  2.00"]
    assert max(map(len, shown.splitlines())) <= columns
    assert {"plain", "40.1", "80.2", "2.00"} <= set(shown.split())


def test_a_table_that_is_too_wide_is_several_whose_words_are_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [f"eagle:dynamic num_speculative_tokens={depth}" for depth in (2, 4)]
    rows = [[name, "0.8", *[f"{column:.2f}" for column in range(40, 60)]] for name in names]
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table(["point", "T", *(f"figure {column}" for column in range(40, 60))], rows, num_keys=2, title="word " * 30)
    lines = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out).splitlines()
    assert max(map(len, lines)) <= 80
    words = " ".join(lines).split()
    assert words.count("word") == 30
    assert words.count("figure") == 20, "every column once"
    for depth in (2, 4):
        assert words.count(f"num_speculative_tokens={depth}") == words.count("point"), "in every part, and whole"
    assert words.count("0.8") == 2 * words.count("point")
    assert [words.count(f"{column:.2f}") for column in range(40, 60)] == [2] * 20


def test_what_is_longer_than_a_line_is_broken_between_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = "\n[asked in 12 passes: " + "words " * 20 + "`a command that is whole`]"
    print_note(line)
    fact("a_name", "words " * 20, 10)
    piped = capsys.readouterr()
    assert piped.err == f"{line}\n"
    assert len(piped.out.splitlines()) == 1
    monkeypatch.setenv("COLUMNS", "40")
    for stream in ("stdout", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    print_note(line)
    fact("a_name", "words " * 20, 10)
    shown = capsys.readouterr()
    assert shown.err.split() == line.split()
    assert shown.err.startswith("\n[asked in 12 passes: words words")
    assert "`a command that is whole`]\n" in shown.err
    name, *below = shown.out.splitlines()
    assert name.startswith("a name      words")
    assert all(part.startswith(" " * 12 + "words") for part in below)
    assert max(map(len, [*shown.out.splitlines(), *shown.err.splitlines()])) <= 40


def test_a_column_of_words_gives_its_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The widest column here is one word; the second has two."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    print_table(["model", "format"], [["m" * 20, "safetensors BF16-and-more"]], texts=["format"])
    told = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out)
    assert max(map(len, told.splitlines())) <= 40


def test_piped_tables_are_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    setup = '{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 1}'
    result = run("verify", MODEL, "-s", setup, "--num-prompts", "1", "--max-tokens", "4")
    assert "ngram prompt_lookup_max=4 prompt_lookup_min=1" in result.stdout


def finished(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command that ran in a process of its own."""
    return run_process("-m", "foretoken", *arguments, **options)


def assert_sentence(result: subprocess.CompletedProcess[str], code: int, part: str) -> None:
    assert result.returncode == code, result.stderr
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert part in result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", HEAD),
        pytest.param(("--help",), marks=pytest.mark.slow),
        pytest.param(("inspect", HEAD, "--json"), marks=pytest.mark.slow),
    ],
)
def test_a_full_standard_output(arguments: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        assert_sentence(finished(*arguments, stdout=full, stderr=subprocess.PIPE), 2, "No space left on device")


@contextmanager
def full() -> Iterator[TextIO]:
    with Path("/dev/full").open("w") as device:
        yield device


@contextmanager
def unread() -> Iterator[TextIO]:
    """A pipe whose reader has gone away."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        yield pipe


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("stream", "called"),
    slow_products(
        [full, unread],
        [
            (("generate", MODEL, "-p", "import os\n", "--max-tokens", "2"), 0),
            (("verify", MODEL, "--num-prompts", "1", "--max-tokens", "2", "--threads", "1"), 0),
            (("inspect", HEAD), 0),
            (("inspect", "models/none"), 2),
            (("inspect", "--bogus"), 2),
        ],
        each=1,
    ),
)
def test_a_standard_error_that_cannot_be_written_changes_no_result(
    stream: Callable[[], AbstractContextManager[TextIO]], called: tuple[tuple[str, ...], int]
) -> None:
    """What a command says beside its result, its own error, and that of the parser of options."""
    arguments, code = called
    whole = run(*arguments)
    with stream() as errors:
        result = run(*arguments, stderr=errors)
    assert (result.returncode, result.stdout) == (whole.returncode, whole.stdout) == (code, whole.stdout)
    assert whole.stderr or code == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    ("stream", "option", "code"),
    [
        (full, "--bogus", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((full, HEAD, 0), (unread, "--bogus", 2), (unread, HEAD, 0))
        ),
    ],
)
def test_a_standard_error_that_cannot_be_written_at_the_end_of_a_process(
    stream: Callable[[], AbstractContextManager[TextIO]], option: str, code: int
) -> None:
    """The interpreter flushes once more."""
    with stream() as errors:
        ended = finished("inspect", option, stdout=subprocess.PIPE, stderr=errors)
    assert (ended.returncode, ended.stdout) == (code, run("inspect", option).stdout)


@pytest.mark.slow
def test_both_streams_full() -> None:
    with Path("/dev/full").open("w") as full:
        assert finished("inspect", HEAD, stdout=full, stderr=full).returncode == 2


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1, 2])
def test_standard_streams_that_are_closed(number: int) -> None:
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    result = finished("inspect", HEAD, **pipes, preexec_fn=lambda: os.close(number))
    if number == 1:
        assert_sentence(result, 2, "standard output is closed")
    else:
        assert "hydra" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        pytest.param(("inspect", MODEL, "--json"), marks=pytest.mark.slow),
        pytest.param(("twin", "--help"), marks=pytest.mark.slow),
        pytest.param(("inspect", HEAD), marks=pytest.mark.slow),
    ],
)
def test_a_reader_that_goes_away(arguments: tuple[str, ...]) -> None:
    """What rich and typer make of it on their own is exit code 1."""
    with unread() as pipe:
        result = finished(*arguments, stdout=pipe, stderr=subprocess.PIPE)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="locales of POSIX")
def test_prompts_in_utf_8_under_a_locale_of_ascii(tmp_path: Path) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    place = tmp_path / "é"
    place.mkdir()
    arguments = ("generate", MODEL, "-p", "é = 1\nü", "--stop", "ß", "--max-tokens", "2", "--trace", str(place / "t"))
    result = finished(*arguments, env=environment)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("\\xe9 = 1\n\\xfc"), "as this locale can write it"
    assert (place / "t").is_file()
    wrong = subprocess.run(
        [*COMMAND, "generate", MODEL, "-p", b"a\xff"], cwd=ROOT, env=environment, capture_output=True, check=False
    )
    assert wrong.returncode == 2
    assert b"--prompt is not UTF-8 text: character 1" in wrong.stderr


def test_an_encoding_without_the_characters() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = finished("inspect", "--modèles", env=environment)
    assert_sentence(result, 2, r"--mod\xe8les")


def test_ctrl_c_keeps_the_text_so_far() -> None:
    command = ("generate", MODEL, "-p", "import os\n", "--max-tokens", "1000", "--ignore-eos", "--runner", "generic")
    with ForkedCommand(*command) as process:
        start = process.stdout.readline() + process.stdout.read(30)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted]" in errors
    assert start.startswith("import os\n")
    assert rest.endswith("\n")


@pytest.mark.slow
def test_ctrl_c_while_a_command_is_ending() -> None:
    """What libraries do at exit is cut short without their tracebacks."""
    code = (
        "import atexit, time, sys; atexit.register(time.sleep, 60); sys.argv = ['foretoken', 'version']\n"
        "from foretoken.cli.main import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509 - as above
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline()
        time.sleep(0.5)  # the version is written; what remains is the exit
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (-signal.SIGINT, "")


def test_ctrl_c_that_a_library_takes_for_a_missing_module() -> None:
    setup = (
        "class Interrupted:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'foretoken.models.describe':\n"
        "            try:\n"
        "                raise KeyboardInterrupt\n"
        "            except KeyboardInterrupt as err:\n"
        "                raise ModuleNotFoundError(name) from err\n"
        "sys.meta_path.insert(0, Interrupted())"
    )
    result = run_main(setup, "inspect", MODEL)
    assert (result.returncode, result.stderr) == (130, "")


def test_torch_that_is_missing() -> None:
    result = run_main("sys.modules['torch'] = None", "generate", MODEL, "-p", "x")
    assert_sentence(result, 2, "torch is not installed. Install it first; without a GPU its CPU build is enough")


def test_a_full_disk_while_packing(tmp_path: Path) -> None:
    """Files may grow to a few bytes only: nothing is left behind, and the sentence says why."""
    text = tmp_path / "text.txt"
    text.write_text("value = 1\n" * 200)

    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"
    with ForkedCommand("data", MODEL, "--text", str(text), "--out", str(tmp_path / "out"), setup=limit) as process:
        _, errors = process.communicate()
    assert process.returncode == 2, errors
    assert "Traceback" not in errors
    assert "File too large" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
