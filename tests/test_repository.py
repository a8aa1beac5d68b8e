"""What `make lint` refuses in the repository's own files, and the picture of its layers."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest

import foretoken

ROOT = Path(__file__).parents[1]
_CHECK = ROOT / ".ci" / "check_repository.py"


def _check(directory: Path, check: Path = _CHECK) -> subprocess.CompletedProcess[str]:
    subprocess.run(["git", "init", "-q"], cwd=directory, check=True)
    subprocess.run(["git", "add", "-A"], cwd=directory, check=True)
    return subprocess.run([sys.executable, check, str(directory)], capture_output=True, text=True, check=False)


def _commit(directory: Path, subject: str) -> None:
    _check(directory)
    author = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", *author, "commit", "-q", "--allow-empty", "-m", subject], cwd=directory, check=True)


def test_ordinary_files_pass(tmp_path):
    (tmp_path / "a.md").write_text("a relative path, models/tinycode, and https://example.org/a\n")
    assert _check(tmp_path).returncode == 0


def test_symbolic_links_are_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    result = _check(tmp_path)
    assert result.returncode == 1
    assert "link: a symbolic link" in result.stdout


def test_paths_of_a_machine_are_refused(tmp_path):
    (tmp_path / "notes.md").write_text("first\nsee " + "/home" + "/someone/runs\n")
    result = _check(tmp_path)
    assert result.returncode == 1
    assert "notes.md:2: an absolute path" in result.stdout


def test_long_subjects_are_refused_after_the_commit_that_added_the_check(tmp_path):
    origin, clone = tmp_path / "origin", tmp_path / "clone"
    (origin / ".ci").mkdir(parents=True)
    _commit(origin, "before: " + "a" * 80)
    shutil.copy(_CHECK, origin / ".ci")
    _commit(origin, "adds the check: " + "a" * 80)
    _commit(origin, "a" * 72)
    assert _check(origin).returncode == 0
    _commit(origin, "a" * 73)
    result = _check(origin)
    assert result.returncode == 1
    assert re.findall("a subject of [0-9]+ characters", result.stdout) == ["a subject of 73 characters"]
    subprocess.run(["git", "clone", "-q", "--depth", "1", origin.as_uri(), clone], check=True)
    assert _check(clone).returncode == 0


@pytest.mark.parametrize(
    ("name", "limit", "message"),
    [
        ("package_lines", 200, "no size above its limit"),
        ("package_lines", 101, "package_lines is 102. Expected at most 101."),
        ("package_lines", 300, "package_lines is 102, and its limit 300. Set the limit to 200."),
        ("package_files", 1, "package_files is 2. Expected at most 1."),
        ("package_files", 3, "package_files is 2, and its limit 3. Set the limit to 2."),
        ("test_lines", 0, "test_lines is 1. Expected at most 0."),
        ("benchmark_lines", 0, "benchmark_lines is 1. Expected at most 0."),
        ("long_functions_percent", 49.9, "long_functions_percent is 50.0. Expected at most 49.9."),
    ],
)
def test_sizes_keep_to_their_limits(tmp_path, name, limit, message):
    """Of the two functions, one has 50 lines and one 51."""
    code = "".join(f"def {name}():\n" + "    pass\n" * length for name, length in (("short", 49), ("long", 50)))
    other = {"foretoken/b.h": "int b;\n", "tests/a.py": "a = 1\n", "benchmarks/a.py": "a = 1\n"}
    files = {"foretoken/core/a.py": code, **other}
    limits = {"package_lines": 200, "package_files": 2, **dict.fromkeys(("test_lines", "benchmark_lines"), 1)}
    limits |= {"long_functions_percent": 50, name: limit}
    files[".ci/limits.toml"] = "".join(f"{key} = {value}\n" for key, value in limits.items())
    for file, text in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(text)
    result = _check(tmp_path, ROOT / ".ci" / "check_size.py")
    assert message in result.stdout
    assert result.returncode == (message != "no size above its limit")


def test_versions_of_the_changelog_are_those_of_the_package_and_its_tags() -> None:
    """A version without a tag may be described; a tag without a section may not exist."""
    headings = re.findall(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    released = [version for version, date in headings if date != "unreleased"]
    assert released[0] == foretoken.__version__
    tags = subprocess.run(["git", "tag", "--list", "v*"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert {tag.removeprefix("v") for tag in tags.split()} <= set(released)


def test_picture_shows_the_layers() -> None:
    """docs/iteration.svg is drawn by hand: each package once, those of lower layers before those of higher ones."""
    drawn = re.findall(r">([a-z]+)</text>", (ROOT / "docs" / "iteration.svg").read_text(encoding="utf-8"))
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    layers = [re.findall(r"\w+", layer) for layer in reversed(settings["contracts"][0]["layers"])]
    places = [[drawn.index(name) for name in layer] for layer in layers]
    assert all(max(lower) < min(higher) for lower, higher in pairwise(places))


def test_one_verb_ends_a_request_early() -> None:
    """A request is aborted; nothing is given up, left or disconnected, from the server down to the engine."""
    rooms = ("engine", "entrypoints", "server")
    for path in (path for room in rooms for path in (ROOT / "foretoken" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [getattr(node, field, None) for field in ("name", "attr", "id", "arg")]
            for name in (name for name in names if isinstance(name, str)):
                assert not re.search(r"give_up|given_up|disconnected|^leave$", name), f"{path.name}: {name}"


def test_no_public_class_name_stands_for_two_things() -> None:
    """`Options` is every drafter's own, by its contract."""
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "foretoken").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    assert all(path.startswith("foretoken/drafters/") for path in places.pop("Options"))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
