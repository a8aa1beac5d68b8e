"""The tour of docs/real_model.md runs with SmolLM2, and its steps print what the page shows, figures aside.

Slow because each step loads the model anew, in a process of its own.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / ".ci"))
import make_real_model

MODEL = make_real_model.model_file()
PAGE = make_real_model.PAGE.read_text(encoding="utf-8")
STEPS = [(found["command"].strip(), found["output"]) for found in make_real_model.BLOCK.finditer(PAGE)]
(PROGRAM,) = make_real_model.PROGRAM.finditer(PAGE)
real_model = pytest.mark.skipif(MODEL is None, reason=make_real_model.MISSING)


def test_the_page_has_every_step_with_its_output() -> None:
    kinds = [re.search(r"foretoken (\w+)", command) for command, _ in STEPS]
    assert [kind[1] for kind in kinds if kind] == ["inspect", "chat", "chat", "chat", "generate", "verify", "bench"]
    assert all(output for _, output in STEPS)
    answers = [STEPS[step][1].splitlines()[1] for step in (1, 3)]
    assert answers[0] == answers[1]  # the same question without and with drafts
    assert PROGRAM["output"].startswith("same text: True\n")


def rows(text: str) -> list[list[str]]:
    """Names of the rows of tables: the drafter, and its category if there is one; facts of `inspect` as they are."""
    words = [line.split() for line in text.splitlines() if line.startswith(" ")]
    return [[word for word in row if re.search("[a-z]", word)] for row in words]


def bugs(text: str) -> set[str]:
    """The last column of the table of `verify`."""
    return {line.split()[-1] for line in text.splitlines() if line.startswith((" ngram", " suffix"))}


CHECKS: dict[str, Callable[[str, str], bool]] = {
    "inspect": lambda made, shown: made == shown,
    "chat": lambda made, shown: bool(made.splitlines()[1]) and "; tau " in made and "; tau " in shown,
    "generate": lambda made, shown: all("estimated from passes of this run" in each for each in (made, shown)),
    "verify": lambda made, shown: rows(made) == rows(shown) and bugs(made) == bugs(shown) == {"0"},
    "bench": lambda made, shown: rows(made) == rows(shown) and made.rstrip().splitlines()[-1].startswith("next: "),
}


@real_model
@pytest.mark.slow
@pytest.mark.parametrize("step", range(len(STEPS)), ids=[command[:60] for command, _ in STEPS])
def test_a_step_prints_what_the_page_shows(step: int) -> None:
    command, shown = STEPS[step]
    assert MODEL is not None
    made = make_real_model.output_of(command, MODEL)
    kind = re.search(r"foretoken (\w+)", command)
    assert kind is not None
    assert CHECKS[kind[1]](made, shown), made


@real_model
@pytest.mark.slow
def test_the_program_writes_the_same_text_in_fewer_passes() -> None:
    assert MODEL is not None
    made = make_real_model.output_of_program(PROGRAM["code"], MODEL)
    passes = re.search(r"same text: True\ntarget passes: (\d+) plain, (\d+) with drafts", made)
    assert passes is not None, made
    assert int(passes[2]) < int(passes[1])
