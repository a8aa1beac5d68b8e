"""Compiled kernels that are kept: only what this user compiled is ever loaded, and whatever else happens they run."""

import hashlib
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from foretoken.core.errors import ConfigError
from foretoken.decoder import library
from foretoken.decoder.native_linear import NativeLinear
from foretoken.files import user_cache

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that the real compiler made."""
    made = tmp_path_factory.mktemp("real") / "made.so"
    command, cache, processor = library._compiler(), user_cache.open_cache(), library._fitting_processors()[0]
    if cache is not None:
        library.native_library()
        shutil.copy(cache / f"decoder-{library._fingerprint(command, processor)}.so", made)
    else:
        library._compile(command, processor, made)
    return made


@pytest.fixture
def compiler(real: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """An empty cache and a compiler that counts its runs; it copies what the real one made once."""
    log, path = tmp_path / "log", tmp_path / "a compiler"
    path.write_text(f'#!/bin/sh\nfor last; do :; done\necho run >> "{log}"\ncp "{real}" "$last"\n')
    path.chmod(0o700)
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setattr(user_cache, "_said", [])
    library.native_library.cache_clear()
    yield lambda: len(log.read_text().splitlines()) if log.exists() else 0
    library.native_library.cache_clear()


def load() -> None:
    """As a new process would."""
    library.native_library.cache_clear()
    assert torch.equal(NativeLinear(torch.eye(3))(torch.ones(2, 3)), torch.ones(2, 3))


def kept(tmp_path: Path, suffix: str = ".so") -> Path:
    (path,) = (tmp_path / "cache").glob(f"decoder-*{suffix}")
    return path


def hostile(tmp_path: Path) -> Path:
    """A library without our functions that leaves a mark when it is loaded."""
    source, made = tmp_path / "hostile.c", tmp_path / "hostile.so"
    source.write_text(
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void) "
        f'{{ fclose(fopen("{tmp_path / "mark"}", "w")); }}\n'
    )
    subprocess.run(["cc", "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
    return made


def rewrite(path: Path, data: bytes) -> None:
    """Puts another file in its place: this process has the old one mapped."""
    path.unlink()
    path.write_bytes(data)


def damage(path: Path, what: str, tmp_path: Path) -> None:
    digest = path.with_suffix(".sha256")
    match what:
        case "another library":
            rewrite(path, hostile(tmp_path).read_bytes())
        case "a link to another library":
            path.unlink()
            path.symlink_to(hostile(tmp_path))
        case "cut off":
            rewrite(path, path.read_bytes()[:5000])
        case "empty":
            rewrite(path, b"")
        case "a flipped bit":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            rewrite(path, bytes(data))
        case "no digest":
            digest.unlink()
        case "a damaged digest":
            digest.write_bytes(b"\xff" * 64)
        case "everybody may write":
            path.chmod(0o777)
        case "the digest is everybody's":
            digest.chmod(0o666)


@pytest.mark.parametrize(
    "what",
    [
        "another library", "a link to another library", "cut off", "empty", "a flipped bit", "no digest",
        "a damaged digest", "everybody may write", "the digest is everybody's",
    ],
)  # fmt: skip
def test_what_is_not_what_was_compiled_is_compiled_anew(
    what: str, compiler: Callable[[], int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        load()
    assert compiler() == 1
    assert "are compiled anew: " not in caplog.text
    damage(kept(tmp_path), what, tmp_path)
    for _ in range(2):
        load()
    assert compiler() == 2, "once, and then it is sound again"
    assert caplog.text.count("are compiled anew: ") == 1
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize("source", ["/dev/null", None])
def test_what_the_compiler_made_wrong_is_compiled_anew(
    source: str | None, compiler: Callable[[], int], tmp_path: Path
) -> None:
    """A library that lacks functions, and a file that is none; its digest is right."""
    (tmp_path / "cache").mkdir(mode=0o700)
    fingerprint = library._fingerprint(library._compiler(), library._fitting_processors()[0])
    path = tmp_path / "cache" / f"decoder-{fingerprint}.so"
    if source is None:
        path.write_bytes(b"rubbish")
    else:
        subprocess.run(["cc", "-shared", "-x", "c", source, "-o", str(path)], check=True)
    path.with_suffix(".sha256").write_text(hashlib.sha256(path.read_bytes()).hexdigest())
    load()
    assert compiler() == 1


@as_root
@pytest.mark.parametrize("suffix", [".so", ".sha256"])
def test_files_of_another_user_are_not_loaded(suffix: str, compiler: Callable[[], int], tmp_path: Path) -> None:
    load()
    os.chown(kept(tmp_path, suffix), NOBODY, NOBODY)
    for _ in range(2):
        load()
    assert compiler() == 2


def expose(directory: Path, what: str) -> None:
    match what:
        case "another user's":
            os.chown(directory, NOBODY, NOBODY)
        case "everybody's":
            directory.chmod(0o777)
        case "everybody's, sticky":
            directory.chmod(0o1777)
        case "another group's":
            os.chown(directory, -1, NOBODY)
            directory.chmod(0o770)


@as_root
@pytest.mark.parametrize("where", ["cache", "above", "a link"])
@pytest.mark.parametrize("what", ["another user's", "everybody's", "everybody's, sticky", "another group's"])
def test_directories_that_others_can_write_to_are_not_used(
    what: str, where: str, compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    above = tmp_path / "above"
    cache = above / "cache"
    above.mkdir()
    monkeypatch.setenv("FORETOKEN_CACHE", str(cache))
    if where == "a link":
        (tmp_path / "cache").mkdir()
        cache.symlink_to(tmp_path / "cache")
        if what == "another user's":
            os.chown(cache, NOBODY, NOBODY, follow_symlinks=False)
        else:
            expose(tmp_path / "cache", what)
    else:
        cache.mkdir()
        expose(cache if where == "cache" else above, what)
    for _ in range(2):
        load()
    is_trusted = what == "everybody's, sticky" and where == "above"
    assert compiler() == (1 if is_trusted else 2)
    assert bool(list((tmp_path / "above").glob("cache/decoder-*"))) == is_trusted
    assert caplog.text.count("are not kept for the next process: ") == (not is_trusted), "said once"


@pytest.mark.parametrize("what", ["no home", "not to be written", "a file", "a relative home"])
def test_without_a_place_to_keep_them(
    what: str, compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """Kernels run from a temporary directory that is gone once they are loaded."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(library.tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "file").touch()

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    match what:
        case "no home":
            monkeypatch.delenv("FORETOKEN_CACHE")
            monkeypatch.setattr(user_cache.Path, "home", homeless)
        case "not to be written":
            monkeypatch.setenv("FORETOKEN_CACHE", "/proc/self/foretoken")
        case "a file":
            monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "file"))
        case _:
            monkeypatch.delenv("FORETOKEN_CACHE")
            monkeypatch.setattr(user_cache.Path, "home", lambda: Path("here"))
    for _ in range(2):
        load()
    assert compiler() == 2
    assert caplog.text.count("are not kept for the next process: ") == 1
    assert not list((tmp_path / "tmp").iterdir())


@pytest.mark.slow
def test_four_first_compilations_at_once(compiler: Callable[[], int], tmp_path: Path) -> None:
    """Each loads what was compiled whole, and one library is kept with its digest."""
    program = (
        "import torch\nfrom foretoken.decoder.native_linear import NativeLinear\n"
        "print('ready', flush=True)\ninput()\n"
        "print(NativeLinear(torch.eye(2))(torch.ones(1, 2)).tolist(), flush=True)\n"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    children = [subprocess.Popen([sys.executable, "-c", program], text=True, **pipes) for _ in range(4)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 4
    for child in children:  # all are started before any is waited for
        child.stdin.write("\n")
        child.stdin.flush()
    said = [child.communicate(timeout=200) for child in children]
    assert [out for out, _ in said] == ["[[1.0, 1.0]]\n"] * 4, said
    assert 1 <= compiler() <= 4
    load()
    before = compiler()
    load()
    assert compiler() == before, "what is kept is sound, and taken"
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".sha256", ".so"]


@pytest.mark.slow
@as_root
def test_a_user_without_a_name_or_a_home(real: Path) -> None:
    """As in a container that is run with `-u 12345`."""
    program = """
import logging, os
logging.basicConfig(format="%(message)s")
import torch
from foretoken.decoder import library
from foretoken.decoder.native_linear import NativeLinear
os.setgroups([]); os.setgid(12345); os.setuid(12345)  # after the imports: this user may be unable to read Python
if not os.access(library._DRAFTS, os.R_OK):
    raise SystemExit(77)
print(NativeLinear(torch.eye(2))(torch.ones(1, 2)).tolist())
"""
    dropped = ("HOME", "XDG_CACHE_HOME", "FORETOKEN_CACHE")
    environment = {key: value for key, value in os.environ.items() if key not in dropped}
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:  # pytest's own is closed to others
        place = Path(directory)
        shutil.copy(real, place / "made.so")
        (place / "compiler").write_text(f'#!/bin/sh\nfor last; do :; done\ncp "{place}/made.so" "$last"\n')
        for path in (place, *place.iterdir()):
            path.chmod(0o755)
        environment |= {"PYTHONPATH": ":".join(filter(None, sys.path)), "TMPDIR": "/tmp", "CXX": f"{place}/compiler"}
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=200, check=False
        )
    if done.returncode == 77:
        pytest.skip("other users cannot read this repository")
    assert done.stdout == "[[1.0, 1.0]]\n", done.stderr[-2000:]
    assert done.stderr.count("are not kept for the next process: there is no home directory") == 1


def test_the_private_group_of_a_user_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems give each user a group of their own, and a umask that lets it write."""
    import grp
    import pwd

    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path))
    monkeypatch.setattr(user_cache, "_said", [])
    tmp_path.chmod(0o775)
    user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(tmp_path.stat().st_gid)
    own = group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
    assert user_cache.open_cache() == (tmp_path if own else None)
    tmp_path.chmod(0o777)
    assert user_cache.open_cache() is None
    for name, members in (("others", []), (user.pw_name, ["another"])):
        tmp_path.chmod(0o775)
        fake = grp.struct_group((name, "x", user.pw_gid, members))
        monkeypatch.setattr(grp, "getgrgid", lambda gid, fake=fake: fake)
        assert user_cache.open_cache() is None


@pytest.mark.parametrize("form", ["{}", "'{}' -DX=1", "env A=1 '{}'"])
def test_compilers_with_arguments(
    form: str, compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in CXX="ccache g++"; a path with a space in it needs no quotes when it is all there is."""
    monkeypatch.setenv("CXX", form.format(tmp_path / "a compiler"))
    for _ in range(2):
        load()
    assert compiler() == 1
    made = [tmp_path / "cache", *(tmp_path / "cache").iterdir()]
    assert sorted(path.suffix for path in made) == ["", ".sha256", ".so"], "nothing unfinished is left"
    assert not any(stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made), "nobody else may look at them"


def test_compilers_that_cannot_be_read(
    compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "g++ '")
    with pytest.raises(library.UnsuitableError, match=r"CXX is .*No closing quotation\. Set it to a C\+\+ compiler"):
        library.native_library()
    monkeypatch.setenv("CXX", "  ")
    (tmp_path / "c++").symlink_to(tmp_path / "a compiler")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    load()
    assert compiler() == 1, "spaces name none: the first on the path was taken"


def test_a_switch_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_SANITIZE", "yes")
    with pytest.raises(ConfigError, match=r"FORETOKEN_SANITIZE is 'yes'\. Expected 0 or 1\."):
        library.native_library()
