"""The file that long work appends to: what is in it after an interruption, and what it refuses."""

import json
from pathlib import Path

import pytest

from foretoken.core.errors import ConfigError
from foretoken.files.atomic_files import JournalFile

CONDITIONS = {"seed": 0, "sizes": (1, 2), "model": "m"}


def opened(path: Path, **changes: object) -> JournalFile:
    return JournalFile(path, {**CONDITIONS, **changes}, advice="Give another --out.")


def test_lines_come_back_and_every_torn_end_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "lines.jsonl"
    first = opened(path)
    for number in range(2):
        first.add({"number": number, "text": "é\n\u2028"})
    whole = path.read_bytes()
    begins = [0, *(at + 1 for at, byte in enumerate(whole) if byte == ord("\n"))]
    for end in range(len(whole) + 1):  # a crash may leave any part of the file
        path.write_bytes(whole[:end])
        kept = opened(path)
        wanted = max(0, sum(begin <= end for begin in begins) - 2)
        assert [line["number"] for line in kept.lines] == list(range(wanted))
        kept.add({"number": 9, "text": ""})
        assert [line["number"] for line in opened(path).lines] == [*range(wanted), 9]
    path.write_bytes(whole)
    assert opened(path).lines[1] == {"number": 1, "text": "é\n\u2028"}
    assert JournalFile(path, advice="").conditions == json.loads(json.dumps(CONDITIONS))


@pytest.mark.parametrize(
    ("changes", "part"),
    [({"seed": 1}, "with seed 0, and seed is 1 now"), ({"more": True}, "with more None, and more is True now")],
)
def test_other_conditions_are_refused(tmp_path: Path, changes: dict[str, object], part: str) -> None:
    path = tmp_path / "lines.jsonl"
    opened(path).add({})
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=rf"{part}\. .* Give another --out\."):
        opened(path, **changes)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["[1]\n", '{"a": 1}\n', "no JSON\n", '{"conditions": {}, "date": "d"}\n{"a\n', "\xff\n"]
)
def test_other_files_are_refused_and_stay(tmp_path: Path, text: str) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"lines\.jsonl.* Give another --out\."):
        opened(path)
    assert path.read_bytes() == text.encode("latin-1")


def test_there_may_be_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds no results yet\. Name another"):
        JournalFile(tmp_path / "lines.jsonl", advice="Name another.")
    assert not list(tmp_path.iterdir())
