"""The CUDA kernel against the definition of attention: its very text, compiled for the CPU unless a GPU is asked for.

What this cannot show without a GPU: that NVIDIA's driver accepts the calls, and how its `expf` and `tanhf` round.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import cuda_tree
import pytest
import torch
from cuda_tree import (
    BlockShape,
    KernelModule,
    TreeAttentionArguments,
    compile_source,
    find_nvrtc,
    kernel_source,
    tree_attention_cuda,
)
from kernel_device import DEVICE, few
from torch import Tensor

from foretoken.attention.layout import AttentionLayout, reference_attention
from foretoken.core import passes
from foretoken.core.errors import ConfigError

# A block of few threads loops over every dimension.
SHAPE = BlockShape(threads=128) if DEVICE == "cuda" else BlockShape(threads=4)
# Half a unit in the last place of the output, and what float32 loses in sums of some hundred terms of order 1.
TOLERANCES = {
    torch.float32: {"rtol": 2.0**-20, "atol": 2e-6},
    torch.float16: {"rtol": 2.0**-11 + 2.0**-18, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2.0**-8 + 2.0**-15, "atol": 4e-6},
}
HERE = Path(__file__).parent
SOURCE = Path(cuda_tree.__file__).with_name("tree_attention.cu")

only_emulated = pytest.mark.skipif(DEVICE == "cuda", reason="looks into the emulation of a GPU on the CPU")
needs_nvrtc = pytest.mark.skipif(find_nvrtc() is None, reason="NVRTC is missing: pip install nvidia-cuda-nvrtc-cu12")


def compiled(folder: Path, program: str, *flags: str) -> Path:
    """Builds C++ around the kernel; skips without a compiler."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to compile the kernel for the CPU")
    source, built = folder / "kernel.cpp", folder / "kernel"
    source.write_text(f'#include "cuda_on_cpu.h"\n#include "tree_attention.cu"\nKERNELS_TAKE(TreeAttention)\n{program}')
    includes = [f"-I{HERE}", f"-I{SOURCE.parent}"]
    strict = ["-std=c++20", "-Wall", "-Wextra", "-Werror", "-fno-strict-aliasing", "-pthread"]
    subprocess.run([compiler, *strict, *includes, *flags, str(source), "-o", str(built), "-ldl"], check=True)
    return built


PARTING_THREADS = """
void part(int num_waiting) {
    if (threadIdx.x < static_cast<unsigned>(num_waiting)) __syncthreads();
}
extern "C" int run_parting(int num_waiting) { return run_kernel(part, num_waiting, {1, 1, 1}, 4, 0); }
"""


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelModule | None:
    """The kernel in the emulated driver; None on a GPU, where the wrapper compiles its own."""
    if DEVICE == "cuda":
        return None
    built = compiled(tmp_path_factory.mktemp("cuda"), PARTING_THREADS, "-O1", "-shared", "-fPIC")
    return KernelModule(str(built).encode(), device=0, driver=ctypes.CDLL(str(built)))


@dataclass(frozen=True, kw_only=True)
class Pass:
    """One random pass over a random cache, on the CPU, padded to the widest; every row that no node may read is NaN.

    Padding nodes have parent -1 and see the prefix and themselves, causal tokens have no parents.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: list[int]
    prefix: list[int]
    positions: Tensor
    parents: Tensor | None
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    scale: float = 1.0

    @property
    def layout(self) -> AttentionLayout:
        """Of the same pass, padding nodes included."""
        return layout_of(self.slots, self.prefix, self.positions, self.parents)

    def expected(self) -> Tensor:
        """(B, T, H, Dv) float64, by the definition."""
        rows, layout = [], self.layout
        for row, slot in enumerate(self.slots):
            mask = layout.mask(row, self.window)
            seen = torch.ones(1, dtype=torch.bool) if mask is None else mask.any(0)
            end = layout.num_keys(row)
            key, value = (cache[slot, :, :end].double() for cache in (self.keys, self.values))
            # NaN times the probability 0 is NaN: rows that no node sees do not enter.
            key, value = (torch.where(seen.unsqueeze(1), cached, 0.0) for cached in (key, value))
            rows.append(
                reference_attention(
                    self.query[row].double(),
                    key,
                    value,
                    mask,
                    scale=self.scale,
                    softcap=self.softcap,
                    sinks=None if self.sinks is None else self.sinks.double(),
                )
            )
        return torch.stack(rows).transpose(1, 2)

    def run(self, kernels: KernelModule | None, shape: BlockShape = SHAPE) -> Tensor:
        """(B, T, H, Dv), by the kernel; on the CPU afterwards."""

        def table(values: Sequence[int] | Tensor) -> Tensor:
            return torch.as_tensor(values).to(DEVICE, torch.int32)

        return tree_attention_cuda(
            self.query.to(DEVICE),
            self.keys.to(DEVICE),
            self.values.to(DEVICE),
            table(self.slots),
            table(self.prefix),
            table(self.positions),
            None if self.parents is None else table(self.parents),
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=None if self.sinks is None else self.sinks.to(DEVICE),
            shape=shape,
            kernels=kernels,
        ).cpu()

    def check(self, kernels: KernelModule | None, shape: BlockShape = SHAPE) -> None:
        """Kernel and definition agree to half a unit in the last place."""
        ours = self.run(kernels, shape)
        assert ours.dtype == self.query.dtype
        torch.testing.assert_close(ours.double(), self.expected(), **TOLERANCES[self.query.dtype])


def layout_of(slots: list[int], prefix: list[int], positions: Tensor, parents: Tensor | None) -> AttentionLayout:
    """The layout of a pass whose sequences all have as many nodes."""
    batch, nodes = positions.shape
    links = torch.arange(-1, nodes - 1).expand(batch, nodes) if parents is None else parents
    return AttentionLayout(
        passes.Pass(
            tokens=torch.zeros(batch * nodes, dtype=torch.int64), positions=positions.flatten(),
            parents=links.flatten(), slots=slots, prefix_lens=prefix, offsets=range(0, batch * nodes + 1, nodes),
            logit_rows=None, is_causal=parents is None,
        )
    )  # fmt: skip


def random_pass(
    trees: list[list[int]] | int,
    prefix: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    has_sinks: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    spread: float = 1.5,
    seed: int = 0,
) -> Pass:
    """A pass of trees given by parents, or of so many causal tokens; slots in reverse, one spare in between.

    `spread` is the standard deviation of scores.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    batch = len(prefix)
    slots = [2 * (batch - row) - 1 for row in range(batch)]
    if isinstance(trees, int):
        queries, parents = trees, None
        depths = torch.arange(queries).expand(batch, queries)
    else:
        queries = max(map(len, trees))
        padded = [[*row, *[-1] * (queries - len(row))] for row in trees]
        parents = torch.tensor(padded)
        depths = torch.zeros_like(parents)
        for row, node in product(range(batch), range(queries)):
            parent = padded[row][node]
            depths[row, node] = depths[row, parent] + 1 if parent >= 0 else 0
    positions = torch.tensor(prefix).unsqueeze(1) + depths
    layout = layout_of(slots, prefix, positions, parents)
    capacity = max(prefix) + queries + 3
    # Neither query nor cache is contiguous: heads and rows are swapped in memory, as projections and some caches are.
    query = normal(batch, queries, heads[0], widths[0]).transpose(1, 2)
    keys, values = (normal(2 * batch, capacity, heads[1], width).transpose(1, 2) for width in widths)
    is_read = torch.zeros(2 * batch, capacity, dtype=torch.bool)
    for row, slot in enumerate(slots):
        mask = layout.mask(row, window)
        is_read[slot, : layout.num_keys(row)] = True if mask is None else mask.any(0)
    for cache in (keys, values):
        cache.masked_fill_(~is_read[:, None, :, None], float("nan"))
    return Pass(
        query=query,
        keys=keys,
        values=values,
        slots=slots,
        prefix=prefix,
        positions=positions,
        parents=parents,
        window=window,
        softcap=softcap,
        sinks=normal(heads[0]) if has_sinks else None,
        scale=spread / widths[0] ** 0.5,
    )


TREES: dict[str, tuple[list[list[int]] | int, list[int]]] = {
    "ragged trees": ([[-1, 0, 0, 1, 1, 2, 5], [-1, 0, 1], [-1]], [9, 4, 13]),
    "chains": ([[-1, 0, 1, 2, 3], [-1, 0, 1]], [3, 8]),
    "star": ([[-1, 0, 0, 0, 0, 0]], [5]),
    "causal": (6, [7, 2]),
    "one token": (1, [6, 11]),
    "one root": ([[-1], [-1]], [6, 11]),
    "no prefix, tree": ([[-1, 0, 0, 1], [-1, 0]], [0, 5]),
    "no prefix, causal": (5, [0]),
}


@pytest.mark.parametrize(
    ("name", "window", "softcap", "has_sinks"), few(list(TREES), [None, 1, 3, 6], [None, 2.0], [False, True])
)
def test_equals_the_definition(
    kernels: KernelModule | None, name: str, window: int | None, softcap: float | None, has_sinks: bool
) -> None:
    trees, prefix = TREES[name]
    random_pass(trees, prefix, window=window, softcap=softcap, has_sinks=has_sinks, seed=len(name)).check(
        kernels, replace(SHAPE, chunk=5)
    )


@pytest.mark.parametrize(
    ("widths", "dtype", "heads"),
    few(
        [(1, 1), (64, 64), (80, 80), (128, 128), (192, 128), (7, 256), (256, 13)], list(TOLERANCES),
        [(2, 2), (6, 2), (3, 1)],
    ),
)  # fmt: skip
def test_head_sizes_groups_and_dtypes(
    kernels: KernelModule | None, dtype: torch.dtype, widths: tuple[int, int], heads: tuple[int, int]
) -> None:
    random_pass([[-1, 0, 0, 1]], [6], heads=heads, widths=widths, dtype=dtype, has_sinks=True).check(kernels)


@pytest.mark.parametrize(
    ("chunk", "spread", "threads"), few([1, 2, 3, 8, 17, 18, 19, 20, 21, 4096], [1.5, 60.0], [1, 2, 16])
)
def test_chunks_and_threads_change_nothing(
    kernels: KernelModule | None, chunk: int, spread: float, threads: int
) -> None:
    # Nodes see 17 to 20 keys. Scores of ±200 are beyond exp in float32, and maxima rise from chunk to chunk; the larger
    # the scores, the larger what a rounding of them does to their exponentials.
    case = random_pass([[-1, 0, 0, 1, 3, 2]], [16], spread=spread, has_sinks=True)
    ours = case.run(kernels, BlockShape(threads=threads, chunk=chunk))
    torch.testing.assert_close(ours.double(), case.expected(), rtol=0.0, atol=2e-6 * spread)


def test_prefix_beyond_ordinary_shared_memory(kernels: KernelModule | None) -> None:
    case = random_pass([[-1, 0, 0]], [14000], heads=(1, 1), widths=(4, 4))
    for chunk in (4096, 14003):
        case.check(kernels, replace(SHAPE, chunk=chunk))


@pytest.mark.parametrize("trees", [[[-1, 0, 0, 1, 2, 2], [-1, 0]], 5], ids=["tree", "causal"])
@pytest.mark.parametrize("window", [None, 2])
def test_a_node_reads_only_what_it_sees(
    kernels: KernelModule | None, trees: list[list[int]] | int, window: int | None
) -> None:
    case = random_pass(trees, [4, 3], window=window)
    expected = case.expected()
    layout = case.layout
    for node in range(case.query.shape[2]):
        keys, values = case.keys.clone(), case.values.clone()
        for row, slot in enumerate(case.slots):
            mask = layout.mask(row, window)
            assert mask is not None
            for cache in (keys, values):
                cache[slot, :, : mask.shape[1]].masked_fill_(~mask[node][:, None], float("nan"))
        ours = replace(case, keys=keys, values=values).run(kernels)
        torch.testing.assert_close(ours[:, node].double(), expected[:, node], **TOLERANCES[torch.float32])


@pytest.mark.parametrize("lost", ["parents", "window", "softcap", "sinks"])
def test_control_what_is_lost_shows(kernels: KernelModule | None, lost: str) -> None:
    case = random_pass([[-1, 0, 0, 1, 2]], [5], window=4, softcap=1.0, has_sinks=True)
    case = replace(case, keys=case.keys.nan_to_num(0.0), values=case.values.nan_to_num(0.0))
    case.check(kernels)
    wrong = replace(case, **{lost: None}).run(kernels)
    assert (wrong - case.expected()).abs().max() > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_is_read_and_rounded_as_torch_does(kernels: KernelModule | None, dtype: torch.dtype) -> None:
    patterns = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).view(1, 1, 256, 256)
    zero = torch.zeros(1, 1, 256, 1, dtype=dtype)
    lonely = torch.full((1, 256), -1)
    alone = Pass(
        query=zero, keys=zero, values=patterns, slots=[0], prefix=[0], positions=torch.zeros_like(lonely),
        parents=lonely,
    )  # fmt: skip
    torch.testing.assert_close(alone.run(kernels)[0, :, 0], patterns[0, 0], rtol=0, atol=0, equal_nan=True)
    # With the one prefix row at equal scores, outputs are means, exact in float32; of neighbours they are ties.
    prefix_row = torch.full((1, 1, 1, 256), 0.0, dtype=dtype)
    for other in (patterns[0, 0, 129, 1], patterns[0, 0, 200, 0], patterns[0, 0, 3, 3]):
        values = torch.cat([prefix_row + other, patterns], dim=2)
        two = replace(alone, keys=torch.zeros(1, 1, 257, 1, dtype=dtype), values=values, prefix=[1])
        means = (patterns[0, 0].float() * 0.5 + other.float() * 0.5).to(dtype)
        torch.testing.assert_close(two.run(kernels)[0, :, 0], means, rtol=0, atol=0, equal_nan=True)


def test_an_empty_batch_launches_nothing(kernels: KernelModule | None) -> None:
    case = random_pass([[-1, 0]], [3])
    none = replace(case, query=case.query[:0], parents=None, slots=[], prefix=[], positions=case.positions[:0])
    assert none.run(kernels).shape == (0, 2, 4, 16)


@pytest.mark.parametrize("wrong", ["dtype", "device", "nodes"])
def test_what_the_kernel_cannot_do_is_said(kernels: KernelModule | None, wrong: str) -> None:
    if wrong == "dtype":
        case, message = random_pass(1, [2], dtype=torch.float64), "torch.float64. Expected one of torch.float32"
    elif wrong == "nodes":
        many = torch.zeros(1, 1, 60_000, 1)
        positions = torch.arange(60_000).unsqueeze(0)
        case = Pass(query=many, keys=many, values=many, slots=[0], prefix=[0], positions=positions, parents=None)
        message = r"needs 2\d+ bytes of shared memory for 60000 nodes\..* Pass fewer nodes"
    elif DEVICE == "cuda":
        pytest.skip("tensors are on a CUDA device here")
    else:
        case, message, kernels = random_pass(1, [2]), "tensors on 'cpu'. Expected a CUDA device", None
    with pytest.raises(ConfigError, match=message):
        case.run(kernels)


@only_emulated
def test_the_structs_are_one(kernels: KernelModule) -> None:
    # Swapped fields of one size would show in every other test.
    assert kernels._driver.argument_bytes() == ctypes.sizeof(TreeAttentionArguments)


@only_emulated
def test_the_driver_s_refusals_are_said(kernels: KernelModule) -> None:
    driver = kernels._driver
    with pytest.raises(ConfigError, match=r"refused cuModuleLoadData: refused by .* \(200\)"):
        KernelModule(b"no such image", device=0, driver=driver)
    with pytest.raises(ConfigError, match=r"refused cuDeviceGet: "):
        KernelModule(b"", device=1, driver=driver)
    with pytest.raises(ConfigError, match=r"refused cuModuleGetFunction: .* \(500\)"):
        kernels.launch(
            "tree_attention_float8", TreeAttentionArguments(), grid=(1, 1, 1), threads=1, shared_bytes=0, stream=0
        )
    random_pass(1, [2]).check(kernels)  # the context is not left current after an error


@only_emulated
def test_no_byte_of_shared_memory_is_missing_or_spare(kernels: KernelModule) -> None:
    class Stingy:
        """Grants a block one number less than it asks for."""

        max_shared_bytes = kernels.max_shared_bytes

        def launch(self, name: str, arguments: ctypes.Structure, *, shared_bytes: int, **where: object) -> None:
            kernels.launch(name, arguments, shared_bytes=shared_bytes - 4, **where)

    case = random_pass([[-1, 0, 1, 2]], [5])  # the last node's path is as long as a path can be
    case.check(kernels)
    with pytest.raises(ConfigError, match="a block wrote past its shared memory"):
        case.run(Stingy())


@only_emulated
@pytest.mark.parametrize(("num_waiting", "status"), [(0, 0), (1, 719), (3, 719), (4, 0)])
def test_threads_that_part_at_a_barrier_are_found(kernels: KernelModule, num_waiting: int, status: int) -> None:
    """On a GPU they would wait for ever, or not."""
    assert kernels._driver.run_parting(num_waiting) == status


RACE_PROGRAM = """
int main(int, char **arguments) {
    skipped_line = std::atoi(arguments[1]);
    std::vector<float> query(3 * 2 * 8, 0.5f), keys(9 * 8, 0.25f), values(9 * 8, 2.0f), output(3 * 2 * 8);
    const int slot = 0, prefix = 5, positions[] = {5, 6, 6}, parents[] = {-1, 0, 0};
    const TreeAttention pass = {query.data(), keys.data(), values.data(), output.data(), &slot, &prefix, positions,
                                parents, nullptr, {48, 24, 8}, {72, 72, 8}, {72, 72, 8}, 1, 8, 8, 0, 2, 1.0f, 0.0f};
    const Status status = run_kernel(tree_attention_float32, pass, {3, 2, 1}, 4, 4 * (8 + 8 + 4 + 2 + 1 + 3));
    if (status != SUCCESS) return 1;
    for (float mixed : output) {
        if (skipped_line == 0 && mixed != 2.0f) return 1;
    }
}
"""


@pytest.mark.slow
@only_emulated
def test_each_barrier_is_needed_and_none_is_missing(tmp_path: Path) -> None:
    # ThreadSanitizer finds two accesses that no barrier orders, whether or not they met in this run.
    probe = tmp_path / "probe.cpp"
    probe.write_text("int main() {}")
    built = tmp_path / "probe"
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to compile the kernel for the CPU")
    subprocess.run(["g++", "-fsanitize=thread", str(probe), "-o", str(built)], capture_output=True, check=False)
    if not built.exists() or subprocess.run([built], capture_output=True, check=False).returncode:
        pytest.skip("ThreadSanitizer does not work on this machine")
    program = compiled(tmp_path, RACE_PROGRAM, "-O1", "-g", "-fsanitize=thread")

    # The first race ends the run: threads that disagree on the number of keys would wait for each other for ever.
    halt = {**os.environ, "TSAN_OPTIONS": "halt_on_error=1"}

    def run(skipped: int) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, str(skipped)], capture_output=True, text=True, check=False, env=halt, timeout=60
        )

    whole = run(0)
    assert whole.returncode == 0, whole.stderr
    lines = [number for number, line in enumerate(SOURCE.read_text().splitlines(), 1) if "__syncthreads()" in line]
    assert len(lines) == 5
    for line in lines:
        assert "ThreadSanitizer: data race" in run(line).stderr, f"the barrier in line {line} orders nothing"


@needs_nvrtc
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_compiles_for_gpus(arch: str) -> None:
    cubin = compile_source(kernel_source(), arch=arch)
    assert cubin[:4] == b"\x7fELF"
    for dtype in ("float32", "float16", "bfloat16"):
        assert f".text.tree_attention_{dtype}\0".encode() in cubin


@needs_nvrtc
def test_the_compiler_s_complaints_are_said() -> None:
    with pytest.raises(ConfigError, match=r"(?s)does not compile for 'sm_90'.*foretoken\.cu\(2\): error: .*nonsense"):
        compile_source("__device__ int x;\nnonsense", arch="sm_90")
    with pytest.raises(ConfigError, match=r"(?s)for 'sm_999'.*Expected an architecture that this NVRTC \d+\.\d+ knows"):
        compile_source(kernel_source(), arch="sm_999")


def test_without_nvrtc_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_tree, "find_nvrtc", lambda: None)
    monkeypatch.setattr(cuda_tree, "find_library", lambda name: None)
    with pytest.raises(ConfigError, match="pip install nvidia-cuda-nvrtc"):
        cuda_tree._nvrtc.__wrapped__()


def test_the_nvrtc_of_torch_s_cuda_is_preferred(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cuda_nvrtc/lib/libnvrtc.so.12", "cu13/lib/libnvrtc.so.13", "cu13/lib/libnvrtc-builtins.so.13.0"):
        (tmp_path / "nvidia" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "nvidia" / name).touch()
    (tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.alt.so.12").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    for release, name in (("12.8", "libnvrtc.so.12"), ("13.0", "libnvrtc.so.13"), (None, "libnvrtc.so.13")):
        monkeypatch.setattr(torch.version, "cuda", release)
        found = find_nvrtc()
        assert found is not None
        assert found.name == name
    monkeypatch.setattr("sys.path", [str(tmp_path / "nothing")])
    assert find_nvrtc() is None
