"""The package keeps to the words of `docs/glossary.md`."""

import re
from itertools import accumulate
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
_SOURCES = {".py", ".h", ".cpp", ".js", ".html"}


def _rows(section: str) -> list[list[str]]:
    """The cells of a section's table, without its heading."""
    page = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def _avoided() -> dict[str, str]:
    """Every word that the package avoids, with the word that it uses."""
    rows = [row for section in ("Decoding", "Machine", "Sentences") for row in _rows(section)]
    return {word: row[0] for row in rows for word in re.findall(r"`([^`]+)`", row[-1])}


def _words(line: str) -> str:
    """The words of names and sentences in a line, in small letters; punctuation stays, so that it ends a phrase."""
    line = re.sub(r"([a-z0-9])(?=[A-Z])|([A-Z])(?=[A-Z][a-z])", r"\1\2 ", line)
    return "".join(f"{word} " for word in re.findall(r"[a-z]+|[.,;:!?(){}\[\]=|]", line.lower()))


def _found(path: Path, avoided: dict[str, str]) -> list[str]:
    lines = [_words(line) for line in path.read_text(encoding="utf-8").splitlines()]
    ends, text = list(accumulate(map(len, lines))), "".join(lines)
    return [
        f"{path.name}:{1 + sum(end <= match.start() for end in ends)}: '{match[0]}', where the glossary has '{word}'"
        for phrase, word in avoided.items()
        if phrase in text
        for match in re.finditer(rf"\b{re.escape(phrase)}s?\b", text)
    ]


def test_the_package_uses_the_words_of_the_glossary():
    avoided, found = _avoided(), []
    foreign = {(file.strip("`"), word.strip("`")) for word, file, _ in _rows("Names of other programs")}
    assert len(avoided) > 40
    for path in sorted((ROOT / "foretoken").rglob("*")):
        if path.suffix in _SOURCES:
            file = path.relative_to(ROOT / "foretoken").as_posix()
            found += _found(path, {phrase: word for phrase, word in avoided.items() if (file, phrase) not in foreign})
    assert not found, "\n".join(found)


def test_names_of_other_programs_are_still_used():
    avoided = _avoided()
    for word, file, _ in _rows("Names of other programs"):
        phrase = word.strip("`")
        assert _found(ROOT / "foretoken" / file.strip("`"), {phrase: avoided[phrase]})


@pytest.mark.parametrize(
    "line",
    [
        "class DraftWorker:",
        "def accept_length(steps): ...",
        "    raise ValueError('the verifier refused')",
        "# the proposers, one\n# of which is asked",
        '"""Returns the LAW of a node."""',
        "auxHiddenStates = 1",
    ],
)
def test_an_avoided_word_is_found_in_names_and_sentences(tmp_path, line):
    (tmp_path / "planted.py").write_text(line)
    assert _found(tmp_path / "planted.py", _avoided())


def test_words_across_punctuation_are_no_phrase(tmp_path):
    (tmp_path / "planted.py").write_text("# as the base. Models, be they small, give it (up)\nbylaw = lawn = 1\n")
    assert _found(tmp_path / "planted.py", _avoided()) == []
