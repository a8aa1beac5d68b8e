"""Compiling the native kernels: once a machine, never in the way."""

import platform
import re
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_model

from foretoken.core.errors import ModelError
from foretoken.core.passes import Pass
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.decoder import library
from foretoken.drafters.native.trees import draft_trees
from foretoken.models.loading import wrap_model
from foretoken.runner.runner import Runner
from foretoken.sampling.batch import SamplingBatch, SamplingRequest
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.choices import TreeShape
from foretoken.trees.expansion import TreeExpansion
from tests.tree_checks import check_tree

pytestmark = pytest.mark.native


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache, and nothing loaded yet."""
    monkeypatch.setenv("FORETOKEN_CACHE", str(tmp_path / "cache"))
    library.native_library.cache_clear()
    yield tmp_path / "cache"
    library.native_library.cache_clear()


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def llama_runner(kind: str = "auto") -> Runner:
    return Runner(wrap_model(tiny_model("llama"), name="tiny llama"), num_slots=1, runner=kind)


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("printf 'In file included:\\nx.h: error: no such thing\\n' >&2; exit 1", "its kernels: x.h: error: no such"),
        ("exit 1", "cannot compile its kernels: no message"),
        ("printf 'na\\357ve\\n' >&2; exit 1", "cannot compile its kernels: na\ufffdve"),  # not UTF-8
        ("exit 0", "its kernels cannot be compiled"),  # says it did, and wrote nothing
        ('for last; do :; done; echo rubbish > "$last"', "its kernels cannot be loaded"),
    ],
)
@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails(
    compiler: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", compiler))
    monkeypatch.setattr("foretoken.runner.runner._said", set())
    assert llama_runner("lean").name == "lean-stock"
    assert message in caplog.text
    with pytest.raises(ModelError, match="runner 'lean-native' cannot run 'tiny llama'"):
        llama_runner("lean-native")


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_takes_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever waits is told what it takes and that it goes on; one that never ends is ended."""
    monkeypatch.setattr(library, "_SAYS_SO_S", 1)
    monkeypatch.setattr(library, "_TIMEOUT_S", 2)
    monkeypatch.setattr("foretoken.runner.runner._said", set())
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", "exec sleep 600"))
    with caplog.at_level("INFO", logger=library.__name__):
        assert llama_runner("lean").name == "lean-stock"
    assert "once on this machine: takes up to half a minute" in caplog.text
    assert [record.getMessage() for record in caplog.records if "still" in record.getMessage()] == [
        "still compiling the CPU kernels: 1 s so far", "still compiling the CPU kernels: 2 s so far",
    ]  # fmt: skip
    assert "timed out after 2 seconds" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_no_compiler_at_all(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("foretoken.runner.runner._said", set())
    monkeypatch.setenv("PATH", "")
    assert llama_runner("lean").name == "lean-stock"
    assert "there is no C++ compiler for its kernels. Install one, such as g++." in caplog.text


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names a generation of x86 processors")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ["qwen3", "gemma2", "qwen3_moe"])
def test_older_processors(architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without 512-bit registers and bf16 dot products the same source serves, with the same bits at any batch size."""
    model = wrap_model(tiny_model(architecture, dtype=dtype), name="tiny")
    newer = Runner(model, num_slots=1, max_nodes=8, runner="lean-native")
    monkeypatch.setattr(library, "_fitting_processors", lambda: [library._Processor("older", ("-march=x86-64-v3",))])
    library.native_library.cache_clear()
    try:
        older = Runner(model, num_slots=1, max_nodes=8, runner="lean-native")
    finally:
        library.native_library.cache_clear()
    assert older.decoder.library is not newer.decoder.library
    tree = TokenTree.from_rows([TreeRow([5, 6, 7, 8, 9], [-1, 0, 0, 1, 3])])
    for made in (newer, older):
        made.prefill(0, [3, 4, 5, 6, 7, 8, 9, 10, 11], 0)
    ours, theirs = (made.verify([0], [9], tree).logits for made in (older, newer))
    assert (ours - theirs).abs().max() < (1e-5 if dtype == torch.float32 else 0.1) * theirs.abs().max()
    assert torch.equal(older.verify([0], [9], TokenTree.roots([5])).logits[0], ours[0])
    drafted = [drafted_tree(made) for made in (older, newer)]
    if dtype == torch.float32:
        assert torch.equal(drafted[0].tokens, drafted[1].tokens)
    for tree in drafted:
        check_tree(tree)


def drafted_tree(made: Runner) -> TokenTree:
    """A tree below a prefix of nine tokens, drawn without replacement."""
    batch = SamplingBatch.build([SamplingRequest(params=SamplingParams(), seed=4)], made.vocab_size)
    draws = DraftDraws.build(batch, [False], torch.tensor([9]))
    expansion = TreeExpansion(TreeShape.cartesian((2, 2)), torch.tensor([5]), draws)
    root = Pass.of_chains([[5]], slots=[0], prefix_lens=[9], has_last_logits=True)
    assert draft_trees(made, root, expansion, vocab_size=made.vocab_size)
    return expansion.finish([0], [2], [5])


_AVX2 = {"avx2", "fma3", "f16c", "bmi", "bmi2", "lzcnt"}
_AVX512 = _AVX2 | {f"avx512_{each}" for each in ("f", "bw", "cd", "dq", "vl")}
_BF16 = _AVX512 | {"avx512_vnni", "avx512_bf16"}


@pytest.mark.parametrize(
    ("has", "allows_tiles", "machine", "want"),
    [
        (_BF16 | {"amx_tile", "amx_int8", "amx_bf16"}, True, "x86_64", "amx"),
        (_BF16 | {"amx_tile", "amx_int8", "amx_bf16"}, False, "x86_64", "avx512-bf16"),
        (_BF16, True, "x86_64", "avx512-bf16"),
        (_AVX512 | {"avx512_vnni"}, False, "AMD64", "avx512-vnni"),
        (_AVX512, False, "x86_64", "avx512"),
        (_AVX2 | {"avx_vnni"}, False, "x86_64", "avx2-vnni"),
        (_AVX2, False, "x86_64", "avx2"),
        ({"avx2"}, False, "x86_64", "native"),
        (_BF16, False, "aarch64", "native"),
    ],
)  # fmt: skip
def test_the_best_kernels_that_a_processor_runs(
    has: set[str], allows_tiles: bool, machine: str, want: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Matrix units need the system's permission: without it their registers end the process."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: dict.fromkeys(has, True) | {"l2_cache_size": 1})
    monkeypatch.setattr(library, "_may_use_tiles", lambda: allows_tiles)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    best, *others = library._fitting_processors()
    assert best.name == want
    assert [best, *others][-1].name == ("native" if want == "native" else "avx2")


def test_processors_are_named_as_torch_names_them() -> None:
    """A misspelt name would never fit."""
    text = (library._KERNELS / "processors.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    needed = {name for line in lines for name in line.split("|")[1].split()}
    assert needed
    if platform.machine() == "x86_64":
        assert needed <= set(torch.cpu.get_capabilities())


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """The kernels' folder as a wheel has it, with the library of this processor."""
    library.native_library()
    library.native_library.cache_clear()  # what was compiled just now was loaded from a directory that is gone
    made, folder = Path(library.native_library()._name), tmp_path / "kernels"
    shutil.copytree(library._KERNELS, folder)
    name = library._fitting_processors()[0].name
    shutil.copy(made, folder / f"decoder-{name}.so")
    request.getfixturevalue("fresh")
    monkeypatch.setattr(library, "_KERNELS", folder)
    return folder / f"decoder-{name}.so"


def test_installed_kernels_need_no_compiler(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    assert llama_runner("lean-native").name == "lean-native"
    assert library.native_library()._name == str(installed)


def test_installed_kernels_that_cannot_be_loaded(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    installed.rename(tmp_path / "good.so")
    installed.write_text("rubbish")
    monkeypatch.setenv("CXX", script(tmp_path / "compiler", f'for last; do :; done; cp {tmp_path}/good.so "$last"'))
    assert llama_runner("lean-native").name == "lean-native"
    assert f"the installed kernels '{installed.name}' are compiled anew: its kernels cannot be loaded" in caplog.text


@pytest.mark.usefixtures("fresh")
def test_a_compiler_older_than_the_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next older processor is tried; with another error it is not."""
    new, old = library._Processor("new", ("-mnew",)), library._Processor("old", ("-mold",))
    monkeypatch.setattr(library, "_fitting_processors", lambda: [new, old])
    log, message = tmp_path / "log", "g++: error: unrecognized command-line option '-mnew'"
    for text, runs in ((message, 2), ("x.h: error: no such thing", 1)):
        log.unlink(missing_ok=True)
        monkeypatch.setenv("CXX", script(tmp_path / "compiler", f'echo run >> {log}; echo "{text}" >&2; exit 1'))
        with pytest.raises(library.UnsuitableError, match=text[-12:]):
            library.native_library()
        assert log.read_text().count("run") == runs


def test_a_system_that_refuses_matrix_units(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    has = {**torch.cpu.get_capabilities(), "amx_tile": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(library, "_TILE_DATA", 63)  # which no processor has
    library._may_use_tiles.cache_clear()
    with caplog.at_level("INFO", logger=library.__name__):
        assert not library._may_use_tiles()
    library._may_use_tiles.cache_clear()
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        assert re.search(r"does not let this process use matrix units \(.+\): vector registers are used", caplog.text)


def test_asking_for_matrix_units() -> None:
    """The answer is the same however often one asks; a processor without them never allows them."""
    library._may_use_tiles.cache_clear()
    first = library._may_use_tiles()
    library._may_use_tiles.cache_clear()
    assert library._may_use_tiles() == first
    assert torch.cpu.get_capabilities().get("amx_tile") or not first
