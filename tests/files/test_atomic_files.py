"""What is written appears whole or not at all, whatever ends the writing and wherever links lead."""

import ast
import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from disks import everything
from limits import full_disk

import foretoken
from foretoken.core.errors import ConfigError, ForetokenError
from foretoken.files.atomic_files import new_directory, new_file, told_as, write_file


def write_over(place: Path) -> None:
    """A file in the place of another one."""
    write_file(place / "a", "new" * 1000)


def write_beside(place: Path) -> None:
    """A file where there was none."""
    write_file(place / "c", b"new" * 1000)


def filled(directory: Path) -> None:
    for name in ("a", "b", "config.json"):
        (directory / name).write_text(f"new {name}" * 1000)
    (directory / "deeper").mkdir()
    (directory / "deeper" / "d").write_text("new d")


def make(place: Path) -> None:
    """A directory whose parents are missing."""
    with new_directory(place / "x" / "y" / "z") as new:
        filled(new)


def replace(place: Path) -> None:
    """A directory in the place of another one."""
    with new_directory(place, existing="replace") as new:
        filled(new)


def merge(place: Path) -> None:
    """A directory whose files go beside and over those of another one."""
    with new_directory(place, existing="merge", last="config.json") as new:
        filled(new)


WRITERS = [write_over, write_beside, make, replace, merge]
CALLS = ["open", "fsync", "rename", "replace", "mkdir", "chmod", "close"]


def made_place(root: Path) -> Path:
    """A directory that holds something."""
    made = root / "place"
    made.mkdir(parents=True)
    for name in ("a", "config.json", "other"):
        (made / name).write_text(f"old {name}")
    return made


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return made_place(tmp_path)


def below(root: Path) -> dict[Path, bytes | str | None]:
    return {path.relative_to(root): data for path, data in everything(root).items()}


def failing_at(number: int, error: BaseException, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets the call of that number fail, of all that are made of `CALLS`; gives a list that fills with their names."""
    made: list[str] = []

    def watched(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def may_fail(*args: object, **kwargs: object) -> object:
            made.append(name)
            if len(made) == number:
                raise error
            return call(*args, **kwargs)

        return may_fail

    for name in CALLS:
        monkeypatch.setattr(os, name, watched(name, getattr(os, name)))
    return made


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.EIO, "broken")])
@pytest.mark.parametrize("write", WRITERS)
def test_a_failure_at_any_call_leaves_all_or_nothing(
    write: Callable[[Path], None], error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call to the system fails in its turn: all is as before and nothing beside it, or new and whole."""
    before, written = below(made_place(tmp_path / "0").parent), made_place(tmp_path / "whole")
    write(written)
    after, num_unchanged, number = below(written.parent), 0, 0
    while True:
        number += 1
        place = made_place(tmp_path / str(number))
        is_told = False
        with monkeypatch.context() as patched:
            made = failing_at(number, error, patched)
            try:
                write(place)
            except type(error):
                is_told = True
        found = below(place.parent)
        if found == before:
            assert is_told
            num_unchanged += 1
        else:  # what came after could not be done, such as removing the old directory
            assert {path: found[path] for path in found if not any(n.startswith(".") for n in path.parts)} == after
        if len(made) < number:
            break
    assert num_unchanged >= 5


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_is_one_sentence(write: Callable[[Path], None], place: Path) -> None:
    before = everything(place.parent)
    with full_disk(), pytest.raises(ConfigError) as error, told_as(ConfigError, "'place'", "Make room."):
        write(place)
    assert str(error.value) == "'place' cannot be written: File too large. Nothing was changed there. Make room."
    assert everything(place.parent) == before


@pytest.mark.parametrize("write", WRITERS)
def test_what_was_written(write: Callable[[Path], None], place: Path) -> None:
    before = everything(place.parent)
    write(place)
    after = everything(place.parent)
    new = {path.relative_to(place): data for path, data in after.items() if before.get(path, "") != data}
    text = {Path(name): f"new {name}".encode() * 1000 for name in ("a", "b", "config.json")}
    whole = text | {Path("deeper"): None, Path("deeper/d"): b"new d"}
    assert (
        new
        == {
            write_over: {Path("a"): b"new" * 1000},
            write_beside: {Path("c"): b"new" * 1000},
            make: {Path("x"): None, Path("x/y"): None, Path("x/y/z"): None}
            | {"x/y/z" / key: whole[key] for key in whole},
            replace: whole,
            merge: whole,
        }[write]
    )
    assert (place / "other").exists() == (write is not replace)


def test_old_files_are_kept_where_they_cannot_be_put_back(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was there is removed, and the error says where it lies."""
    rename, before = os.rename, {path.name: path.read_text() for path in place.iterdir()}

    def once(*args: object) -> None:
        monkeypatch.setattr(os, "rename", broken)
        rename(*args)

    def broken(*args: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(os, "rename", once)
    monkeypatch.setattr(os, "replace", broken)
    is_told = pytest.raises(ForetokenError, match="broken; what was there before lies in '")
    with is_told as error, told_as(ForetokenError, "'place'", "Make room."):
        replace(place)
    assert "Nothing was changed" not in str(error.value)
    where = Path(str(error.value).split("lies in '")[1].split("'")[0])
    assert {path.name: path.read_text() for path in where.iterdir()} == before


def test_permissions(place: Path) -> None:
    """Those of what is replaced, those that were asked for, or those that any new file here gets."""
    for mode in (0o600, 0o640, 0o444):
        (place / "a").chmod(mode)
        write_file(place / "a", "new")
        assert stat.S_IMODE((place / "a").stat().st_mode) == mode
    write_file(place / "a", "new", mode=0o600)
    write_file(place / "c", "new")
    (place / "d").touch()
    modes = [stat.S_IMODE((place / name).stat().st_mode) for name in "acd"]
    assert modes == [0o600, modes[2], modes[2]]
    place.chmod(0o700)
    replace(place)
    assert stat.S_IMODE(place.stat().st_mode) == 0o700


def test_a_private_file_is_private_while_it_is_written(place: Path) -> None:
    before = os.umask(0)
    try:
        with new_file(place / "a", mode=0o600) as new:
            assert stat.S_IMODE(new.stat().st_mode) == 0o600
    finally:
        os.umask(before)


@pytest.mark.parametrize("leads", ["to what is there", "nowhere yet"])
def test_links_are_written_through(leads: str, place: Path) -> None:
    """The link stays, and what it leads to is made or replaced."""
    if leads == "nowhere yet":
        (place / "a").unlink()
    (place.parent / "file").symlink_to(place / "a")
    write_file(place.parent / "file", "new")
    assert (place.parent / "file").readlink() == place / "a"
    assert (place / "a").read_text() == "new"
    if leads == "nowhere yet":
        place.rename(place.parent / "elsewhere")
    (place.parent / "link").symlink_to("place")
    replace(place.parent / "link")
    assert (place.parent / "link").readlink() == Path("place")
    assert not place.is_symlink()
    assert sorted(path.name for path in place.iterdir()) == ["a", "b", "config.json", "deeper"]


def test_links_that_are_neither_followed_nor_replaced(place: Path) -> None:
    """Where they are not trusted, where they lead in a circle, and among files that are merged."""
    root = place.parent
    (root / "private").symlink_to(place / "a")
    (root / "one").symlink_to(root / "other")
    (root / "other").symlink_to(root / "one")
    (place / "b").symlink_to(place / "other")
    before = everything(root)
    with pytest.raises(OSError, match="it is a symbolic link"):
        write_file(root / "private", "new", follows_links=False)
    for write in (lambda path: write_file(path, "new"), replace, merge):
        with pytest.raises(OSError, match="Too many levels of symbolic links"):
            write(root / "one")
    with pytest.raises(OSError, match="'b' is a symbolic link there"):
        merge(place)
    assert everything(root) == before


def test_what_is_in_the_place_and_is_no_such_thing_stays(place: Path) -> None:
    os.mkfifo(place.parent / "pipe")
    with pytest.raises(IsADirectoryError):
        write_file(place, "new")
    for write, error in ((lambda path: write_file(path, "new"), FileExistsError), (replace, NotADirectoryError)):
        with pytest.raises(error):
            write(place.parent / "pipe")
    for write in (replace, merge):
        with pytest.raises(NotADirectoryError):
            write(place / "a")
    with pytest.raises(OSError, match="not empty"), new_directory(place):
        pytest.fail("it is refused before the work")
    assert (place.parent / "pipe").is_fifo()
    assert (place / "a").read_text() == "old a"


def test_a_directory_that_is_empty_may_be_in_the_place(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with new_directory(tmp_path / "out") as new:
        (new / "file").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(OSError, match="not empty"), new_directory(tmp_path / "late"):
        made_place(tmp_path / "late")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["late", "out"]


def test_long_names(tmp_path: Path) -> None:
    name = "ü" * 120  # 240 bytes of the 255 that a name may have
    write_file(tmp_path / name, "new")
    replace(tmp_path / f"{name}y")
    assert sorted(path.name for path in tmp_path.iterdir()) == [name, f"{name}y"]


def test_nothing_else_in_the_package_renames_files_into_place() -> None:
    """A second way to do it would lack what the one here has. (Compiled kernels are linked where they will lie.)"""
    root = Path(foretoken.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name, is_of_one = node.func.attr, len(node.args) == 1 and not node.keywords
                if name in ("mkstemp", "mkdtemp", "NamedTemporaryFile") or (
                    name in ("replace", "rename") and is_of_one
                ):
                    found.add(str(path.relative_to(root)))
    assert found == {"files/atomic_files.py", "decoder/library.py"}
