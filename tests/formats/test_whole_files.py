"""Writing that fails leaves nothing behind and nothing changed, whatever the format.

A limit on file sizes stands for a full disk.
"""

import os
from pathlib import Path

import pytest
from disks import everything
from limits import full_disk
from tiny_heads import medusa, random_head

from foretoken.core.errors import ConfigError
from foretoken.formats import native
from foretoken.formats.files import whole_files, write_config, write_weights
from foretoken.formats.registry import read_head, write_head

HEAD = medusa()
FORMATS = [
    ("native", {}),
    ("medusa", {}),
    ("medusa", {"as_safetensors": True}),
    ("vllm_medusa", {}),
    ("tensorrt_llm", {"tp_size": 2}),
]


def test_full_disk(tmp_path: Path) -> None:
    big = random_head(HEAD.model_copy(update={"hidden_size": 32, "vocab_size": 64}), target=None)  # some 30 kB
    native.write_checkpoint(big, tmp_path / "big")
    native.write_checkpoint(random_head(HEAD.model_copy(update={"hidden_size": 2}), target=None), tmp_path / "small")
    write_head("medusa", random_head(HEAD), tmp_path / "old")
    before = everything(tmp_path)
    head = read_head(tmp_path / "big")[1]
    for name, options in FORMATS:
        for place in ("new", "new/and/deeper", "old"):
            for replaces in (True, False):
                with full_disk(4096), pytest.raises(ConfigError) as caught:
                    write_head(name, head, tmp_path / place, **options, replaces=replaces)
                assert str(caught.value).startswith(f"'{tmp_path / place}' cannot be written: "), name
                assert "File too large" in str(caught.value)
                assert "Nothing was changed there. Expected a directory with enough room" in str(caught.value)
    with full_disk(4096):  # what fits is written: it was the room that was missing
        write_head("native", read_head(tmp_path / "small")[1], tmp_path / "fits")
    assert read_head(tmp_path / "fits")[0] == "native"
    after = everything(tmp_path)
    assert {path: after[path] for path in after if path.relative_to(tmp_path).parts[0] != "fits"} == before


@pytest.mark.parametrize(("name", "options"), FORMATS)
def test_places_that_cannot_be_written_to(tmp_path: Path, name: str, options: dict[str, object]) -> None:
    """A file where a directory is needed, and a file system that takes no files from anybody, root included."""
    (tmp_path / "file").write_text("text")
    for place in (tmp_path / "file" / "out", tmp_path / "file" / "a" / "b", Path("/proc/foretoken-head")):
        with pytest.raises(ConfigError, match=rf"'{place}' cannot be written: .*Name another place, or make room\."):
            write_head(name, random_head(HEAD), place, **options)
    assert everything(tmp_path) == {tmp_path / "file": b"text"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_directory(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o555)
    with pytest.raises(ConfigError, match="cannot be written: Permission denied"):
        write_head("medusa", random_head(HEAD), tmp_path / "closed" / "out")
    assert not list((tmp_path / "closed").iterdir())


@pytest.mark.parametrize("replaces", [True, False])
def test_what_else_lies_there(tmp_path: Path, replaces: bool) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("a card")
    (out / "config.json").write_text("old")
    native.write_checkpoint(random_head(HEAD), out, replaces=replaces)
    others = [] if replaces else ["README.md"]
    assert sorted(path.name for path in out.iterdir()) == [*others, "config.json", "model.safetensors"]
    assert read_head(out)[1].config == HEAD
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def fail_while_writing(directory: Path) -> None:
    with whole_files(directory) as new:
        write_config(new, {})
        write_weights(new / "x.pt", {})
        raise ZeroDivisionError


def test_any_other_error_leaves_nothing_and_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        fail_while_writing(tmp_path / "a" / "b")
    assert everything(tmp_path) == {}


def test_files_may_be_read_by_others(tmp_path: Path) -> None:
    """Not the rights of a private temporary file: those that any new file here gets."""
    (tmp_path / "new").touch()
    (tmp_path / "directory").mkdir()
    write_head("medusa", random_head(HEAD), tmp_path / "out")
    write_head("native", random_head(HEAD), tmp_path / "ours")
    for path in (tmp_path / "out", tmp_path / "ours"):
        assert path.stat().st_mode == (tmp_path / "directory").stat().st_mode
        assert {file.stat().st_mode for file in path.iterdir()} == {(tmp_path / "new").stat().st_mode}


@pytest.mark.parametrize("last", ["config.json", "z.safetensors"])
def test_files_that_were_merged_come_back_when_the_last_one_fails(tmp_path: Path, last: str) -> None:
    """The last file's place is taken by a directory: what had been moved before it is as it was."""
    there = tmp_path / "there"
    (there / last).mkdir(parents=True)
    (there / "a.safetensors").write_text("old")
    before = everything(tmp_path)

    def write() -> None:
        with whole_files(there) as new:
            for name in ("a.safetensors", "b.safetensors", last):
                (new / name).write_text("new")

    with pytest.raises(ConfigError, match="Nothing was changed there"):
        write()
    assert everything(tmp_path) == before
