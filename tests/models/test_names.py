"""Names of models become places: directories, GGUF files and what holds them, on this machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub.constants  # noqa: F401 - before another user looks for it
import pytest
from gguf_files import write_header
from model_files import message_of

from foretoken.models.names import is_gguf, local_models, main_files, preferred, resolve_model, tag_of, with_tag


def refused(name: str | Path) -> str:
    return message_of(lambda: resolve_model(name))


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write_header(tmp_path_factory.mktemp("names") / "a.gguf").read_bytes()


def put(content: bytes, *paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def test_directories_and_files_stand_for_themselves(content: bytes, directory: Path, tmp_path: Path) -> None:
    put(content, tmp_path / "Model.GGUF", tmp_path / "sha256-abc", directory / "beside.gguf")
    for place in (directory, directory / "model.safetensors", tmp_path / "Model.GGUF", tmp_path / "sha256-abc"):
        assert resolve_model(place) == str(place)
    assert is_gguf(tmp_path / "Model.GGUF")
    assert is_gguf(tmp_path / "sha256-abc")  # by its first bytes
    assert not is_gguf(directory / "model.safetensors")
    assert is_gguf(tmp_path / "none.gguf")  # so that the error speaks of a file
    assert not is_gguf("x\0y")


def test_a_folder_with_one_model_is_that_model(content: bytes, tmp_path: Path) -> None:
    first = tmp_path / "one" / "model-Q8_0-00001-of-00002.gguf"
    companions = ("mmproj-model-f16.gguf", "model.imatrix.gguf", "mtp-model-Q8_0.gguf", "README.md")
    put(
        content, first, tmp_path / "one" / "model-Q8_0-00002-of-00002.gguf", *(tmp_path / "one" / n for n in companions)
    )
    assert resolve_model(tmp_path / "one") == str(first)
    assert resolve_model(f"{tmp_path}/one:q8_0") == str(first)


def test_a_folder_with_several_models_needs_a_tag(content: bytes, tmp_path: Path) -> None:
    names = [f"model-{tag}.gguf" for tag in ("BF16", "F16", "Q4_K_M", "Q4_K_S", "UD-Q4_K_XL")]
    put(content, *(tmp_path / name for name in names))
    message = refused(tmp_path)
    assert f"holds 5 GGUF files: {', '.join(names)}. Expected the name of one. Write '{tmp_path}:BF16'" in message
    for tag, name in (("f16", "model-F16.gguf"), ("Q4_K_M", names[2]), ("ud-q4_k_xl", names[4]), (names[3], names[3])):
        assert resolve_model(f"{tmp_path}:{tag}") == str(tmp_path / name)
    message = refused(f"{tmp_path}:Q4_K")
    assert (
        "has no GGUF file 'Q4_K'. Expected a tag such as Q4_K_M. Known: BF16, F16, Q4_K_M, Q4_K_S, UD-Q4_K_XL"
        in message
    )
    (tmp_path / "empty").mkdir()
    assert "It holds no GGUF file." in refused(f"{tmp_path}/empty:Q8_0")


def test_files_are_chosen_as_llama_cpp_chooses_them() -> None:
    files = main_files(["b/M.Q8_0.gguf", "a/M-IQ2_XS.gguf", "c/M-Q4_K_M-00001-of-00003.gguf", "mmproj-F16.gguf"])
    assert files == ["a/M-IQ2_XS.gguf", "b/M.Q8_0.gguf", "c/M-Q4_K_M-00001-of-00003.gguf"]
    assert preferred(files) == files[2]
    assert preferred(files[:2]) == files[1]
    assert preferred(files[:1]) == files[0]
    assert [tag_of(each, files) for each in files] == ["IQ2_XS", "Q8_0", "Q4_K_M"]
    assert with_tag(files, "Q2_XS") is None
    assert tag_of("model.gguf", ["model.gguf"]) == "model.gguf"


def test_missing_names_are_refused_with_the_nearest(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(content, tmp_path / "places" / "story.gguf")
    monkeypatch.chdir(tmp_path)
    assert "there is no file 'places/storm.gguf'. Expected a GGUF file. Did you mean 'places/story.gguf'?" in (
        refused("places/storm.gguf")
    )
    assert "Did you mean 'models/tinycode'?" not in refused("places/none")
    for name in ("a/b/c", "./none", "", "x y"):
        assert f"there is no model '{name}'. Expected a directory with config.json" in refused(name)


def test_names_that_no_path_can_have(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(content, tmp_path / "known.gguf")
    monkeypatch.chdir(tmp_path)
    for name in ("a" * 5000, f"{'a' * 5000}:Q8_0", "a\nb", "x\0y:Q4", "\x1b[31mred"):
        assert refused(name).startswith(f"there is no model {name!r}. Expected a directory")
    for name in ("a" * 5000, "\n"):
        assert refused(f"{name}.gguf").startswith("there is no file ")


def test_what_cannot_be_named_is_not_suggested(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken.gguf").symlink_to("none")
    (tmp_path / "loop").symlink_to("loop")
    put(content, tmp_path / "bro\nken.gguf", tmp_path / "other.gguf")
    monkeypatch.chdir(tmp_path)
    assert refused("broken.gguf").endswith("Known: other.gguf.")
    assert "there is no model 'loop'" in refused("loop")


@pytest.fixture
def no_rights(content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a folder that may not be read: the test runs as a user who is not root."""
    put(content, tmp_path / "models/locked/m.gguf", tmp_path / "models/open/m.gguf")
    monkeypatch.chdir(tmp_path)
    user = os.geteuid()
    tmp_path.chmod(0o755)
    (tmp_path / "models/locked").chmod(0)
    try:
        if user == 0:
            os.seteuid(65534)
        yield tmp_path
    finally:
        os.seteuid(user)
        (tmp_path / "models/locked").chmod(0o700)


def test_folders_without_rights_hide_no_other_model(no_rights: Path) -> None:
    assert str(Path("models/open")) in [each.name for each in local_models()]
    assert refused("models/locked").startswith("'models/locked' cannot be read: ")
    assert refused("models/locked/m.gguf").startswith("'models/locked/m.gguf' cannot be reached: Permission denied.")
    assert "there is no model './none'" in refused("./none")
