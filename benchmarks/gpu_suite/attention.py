"""Times tree attention: our kernels, SDPA with a dense mask, and FlexAttention, on the same cache and tree.

One call is one layer of one pass. Calls go round over as many sequences of the cache as it takes for each to find its
keys in memory, not in L2.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu_suite.timing import Program, interleave, prepare
from foretoken.attention.layout import AttentionLayout
from foretoken.core.backend import has_cuda_runtime
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree, TreeRow, ancestor_mask

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work

Calls = dict[str, Callable[[int], Tensor]]  # by candidate: output (B, N, H, D) of the copy of that number

_OURS = ("mask-free", "masked")
# Contexts and batches by importance: what is not timed when time is up matters least.
_PLACES = (
    (1, 2048), (1, 8192), (8, 2048), (1, 32768), (8, 8192), (32, 2048), (1, 512), (32, 512), (8, 32768), (8, 512),
    (32, 8192), (32, 32768),
)  # fmt: skip
_NODES = (64, 8, 1, 16, 128, 340)
_FLEX = (
    (1, 2048, 64), (1, 8192, 64), (1, 32768, 64), (1, 8192, 8), (8, 8192, 64), (1, 2048, 1), (1, 8192, 128),
    (1, 8192, 340), (1, 8192, 1), (1, 8192, 16), (1, 512, 64), (32, 2048, 64),
)  # fmt: skip
_FLEX_SHARE = 0.45  # of the section's time
_ROTATED_BYTES = 192 * 2**20  # three times the L2 of an H200
_MOST_COPIES = 64
_LARGEST_DIFFERENCE = 3e-2  # relative, in the norm, of what two kernels give: bfloat16 stays below 1e-2
_SECONDS_A_CASE = 0.3


class WrongResultError(Exception):
    """A kernel gives something else than the others."""


@dataclass(frozen=True, slots=True)
class Heads:
    """The sizes of one layer's attention."""

    query: int = 32
    key: int = 8
    width: int = 128
    dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One shape of pass over a cache that holds it several times.

    Attributes:
        batch: B.
        prefix: L.
        nodes: N.
        copies: Batches that the cache holds.
        keys: (copies B, Hk, capacity, D).
        values: Likewise.
        query: (B, H, N, D).
        layout: Of the first copy.
        ancestors: (B, N, N) bool.
        mask: (B, 1, N, L + N) bool, dense.
        scale: Factor of the dot products.
    """

    batch: int
    prefix: int
    nodes: int
    copies: int
    keys: Tensor
    values: Tensor
    query: Tensor
    layout: AttentionLayout
    ancestors: Tensor
    mask: Tensor
    scale: float

    @property
    def length(self) -> int:
        """Rows that a sequence's queries see or hide: L + N."""
        return self.prefix + self.nodes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a call must read."""
        return kv_bytes(self.batch, self.length, self.keys)

    @property
    def flop(self) -> int:
        """Floating-point operations of the two products, hidden pairs included."""
        return 4 * self.batch * self.nodes * self.query.shape[1] * self.query.shape[3] * self.length

    def rows(self, store: Tensor, copy: int) -> Tensor:
        """(B, Hk, L + N, D) one copy's keys or values."""
        return store[copy * self.batch : (copy + 1) * self.batch, :, : self.length]


def run(work: Work) -> None:
    """Emits `attention` and `flex`."""
    heads = Heads(4, 2, 32, torch.float32) if work.is_rehearsal else Heads()
    nodes = (5,) if work.is_rehearsal else _NODES
    flex = ((1, 24, 5),) if work.is_rehearsal else _FLEX
    places = ((1, 24), (2, 24)) if work.is_rehearsal else _PLACES
    flex_seconds = 1.0 if work.is_rehearsal else work.deadline.left * _FLEX_SHARE
    for batch, prefix in places:
        if not work.deadline.allows(flex_seconds):
            work.left_out(f"batch {batch}, L={prefix}", "time")
            continue
        try:
            store = _store(batch, prefix, max(nodes), heads, work)
        except torch.OutOfMemoryError:
            work.left_out(f"batch {batch}, L={prefix}", "memory")
            continue
        for count in nodes:
            if not work.deadline.allows(flex_seconds):
                work.left_out(f"batch {batch}, L={prefix}, N={count}", "time")
                continue
            _time_scene(work, make_scene(store, batch, prefix, count, heads, work.seed))
        del store
        _tidy(work.device)
    for batch, prefix, count in flex:
        if not work.deadline.allows(0 if work.is_rehearsal else 20.0):
            work.left_out(f"FlexAttention, batch {batch}, L={prefix}, N={count}", "time")
            continue
        store = _store(batch, prefix, count, heads, work)
        _time_flex(work, make_scene(store, batch, prefix, count, heads, work.seed))
        del store
        _tidy(work.device)


def kv_bytes(batch: int, length: int, keys: Tensor) -> int:
    """Bytes of keys and values of `batch` sequences of that length, one layer."""
    return 2 * batch * length * keys.shape[1] * keys.shape[3] * keys.itemsize


def make_scene(store: tuple[Tensor, Tensor], batch: int, prefix: int, nodes: int, heads: Heads, seed: int) -> Scene:
    """A pass over the rows of a cache.

    Args:
        store: Keys and values.
        batch: B.
        prefix: L.
        nodes: N; a node's children follow three by three, so that the tree is as deep as log N.
        heads: Sizes.
        seed: Of the queries.
    """
    keys, values = store
    device = keys.device
    parents = [-1, *((node - 1) // 3 for node in range(1, nodes))]
    tree = TokenTree.from_rows([TreeRow([0] * nodes, parents)] * batch, device=device)
    work = Pass.of_tree(tree, slots=range(batch), prefix_lens=[prefix] * batch, last_position=prefix + nodes)
    work = work.to(device)
    ancestors = ancestor_mask(tree.parents)
    seen = torch.ones(batch, nodes, prefix, dtype=torch.bool, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    query = torch.randn(batch, nodes, heads.query, heads.width, device=device, generator=generator).to(heads.dtype)
    return Scene(
        batch=batch, prefix=prefix, nodes=nodes, copies=keys.shape[0] // batch, keys=keys, values=values,
        query=query.transpose(1, 2), layout=AttentionLayout(work), ancestors=ancestors,
        mask=torch.cat([seen, ancestors], dim=2).unsqueeze(1), scale=heads.width**-0.5,
    )  # fmt: skip


def candidates(scene: Scene) -> Calls:
    """Every kernel that needs no compiler of its own, by name."""
    from benchmarks.gpu_suite.triton_masked import masked_attention_triton
    from foretoken.attention.triton_tree import tree_attention_triton

    device, batch, heads = scene.keys.device, scene.batch, scene.query.shape[1]
    first = scene.layout.tables()
    tables = [replace(first, slots=first.slots + copy * batch) for copy in range(scene.copies)]
    num_keys = torch.full((batch,), scene.length, dtype=torch.int32, device=device)
    dense = scene.mask[:, 0].contiguous()
    kv_heads, packed = scene.keys.shape[1], scene.query.transpose(1, 2).flatten(0, 1)
    packed_query = scene.query.reshape(batch, kv_heads, -1, scene.query.shape[3])
    packed_mask = scene.mask.repeat(1, 1, heads // kv_heads, 1)

    def mask_free(copy: int) -> Tensor:
        output = tree_attention_triton(packed, scene.keys, scene.values, tables[copy], scale=scene.scale)
        return output.view(batch, scene.nodes, heads, -1)

    def masked(copy: int) -> Tensor:
        return masked_attention_triton(
            scene.query, scene.keys, scene.values, tables[copy].slots, num_keys, dense, scale=scene.scale
        )

    def sdpa(copy: int) -> Tensor:
        key, value = scene.rows(scene.keys, copy), scene.rows(scene.values, copy)
        return scaled_dot_product_attention(
            scene.query, key, value, scene.mask, scale=scene.scale, enable_gqa=True
        ).transpose(1, 2)

    def sdpa_packed(copy: int) -> Tensor:
        key, value = scene.rows(scene.keys, copy), scene.rows(scene.values, copy)
        output = scaled_dot_product_attention(packed_query, key, value, packed_mask, scale=scene.scale)
        return output.reshape(batch, heads, scene.nodes, -1).transpose(1, 2)

    return {"mask-free": mask_free, "masked": masked, "sdpa": sdpa, "sdpa-packed": sdpa_packed}


def _store(batch: int, prefix: int, nodes: int, heads: Heads, work: Work) -> tuple[Tensor, Tensor]:
    """Random keys and values of as many sequences as leave no room for any in L2."""
    capacity = prefix + nodes
    row = 2 * batch * capacity * heads.key * heads.width * heads.dtype.itemsize
    copies = 2 if work.is_rehearsal else min(max(-(-_ROTATED_BYTES // row), 1), _MOST_COPIES)
    shape = (copies * batch, heads.key, capacity, heads.width)
    generator = torch.Generator(work.device).manual_seed(work.seed)
    keys, values = (torch.empty(shape, dtype=heads.dtype, device=work.device) for _ in range(2))
    return keys.normal_(generator=generator), values.normal_(generator=generator)


def _time_scene(work: Work, scene: Scene) -> None:
    """Emits the row of one scene."""
    row = _row(scene)
    programs: dict[str, Program] = {}
    wanted: Tensor | None = None
    for name, call in candidates(scene).items():
        cell: dict[str, Any] = {}
        row["kernels"][name] = cell
        try:
            output = call(0)
            wanted = output.float() if wanted is None else wanted
            cell["difference"] = _difference(output, wanted)
            del output
            programs[name] = prepare([partial(call, copy) for copy in range(scene.copies)], work.device)
            cell["is_replayed"] = programs[name].is_replayed
        except torch.OutOfMemoryError:
            cell["left_out"] = "out of memory"
            programs.pop(name, None)
            _tidy(work.device)
        except Exception as err:  # noqa: BLE001 - a kernel that cannot run is a finding, and the others go on
            cell[_why(name, err)] = _sentence(err)
    row["sdpa_backend"] = _backend(scene)
    for name, times in interleave(programs, work.device, seconds=_SECONDS_A_CASE, max_rounds=40).items():
        row["kernels"][name] |= times.as_dict()
    work.emit("attention", row)


def _time_flex(work: Work, scene: Scene) -> None:
    """Emits FlexAttention's row, with our kernel timed beside it."""
    row = _row(scene)
    try:
        call, facts = _flex(scene, is_compiled=has_cuda_runtime(work.device))
        calls = {"mask-free": candidates(scene)["mask-free"], "flex": call}
        begin = time.perf_counter()
        output = call(0)
        _wait(work.device)
        facts["first_call_s"] = round(time.perf_counter() - begin, 2)
        row["kernels"]["flex"] = {"difference": _difference(output, calls["mask-free"](0).float()), **facts}
        programs = {
            name: prepare([partial(each, copy) for copy in range(scene.copies)], work.device)
            for name, each in calls.items()
        }
        for name, times in interleave(programs, work.device, seconds=_SECONDS_A_CASE, max_rounds=40).items():
            cell = row["kernels"].setdefault(name, {})
            cell |= {"is_replayed": programs[name].is_replayed, **times.as_dict()}
    except Exception as err:  # noqa: BLE001 - whatever its compiler raises is the finding
        row["kernels"]["flex"] = {_why("flex", err): _sentence(err)}
    work.emit("flex", row)


def _flex(scene: Scene, *, is_compiled: bool) -> tuple[Callable[[int], Tensor], dict[str, Any]]:
    """FlexAttention over the ancestor table, and what making its block mask took."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    ancestors, nodes, device = scene.ancestors, scene.nodes, scene.keys.device
    prefix = torch.full((scene.batch,), scene.prefix, device=device)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        del h
        scratch = kv - prefix[b]
        return (scratch < 0) | ancestors[b, q, scratch.clamp(0, nodes - 1)]

    # Otherwise a later shape would find the number of recompilations exhausted and run without being compiled.
    torch.compiler.reset()
    compiled: Any = torch.compile(flex_attention, dynamic=False) if is_compiled else flex_attention
    made = []
    for _ in range(3):
        begin = time.perf_counter()
        block_mask = create_block_mask(mask_mod, scene.batch, None, nodes, scene.length, device=device)
        _wait(device)
        made.append(time.perf_counter() - begin)

    def call(copy: int) -> Tensor:
        key, value = scene.rows(scene.keys, copy), scene.rows(scene.values, copy)
        output: Tensor = compiled(scene.query, key, value, block_mask=block_mask, scale=scene.scale, enable_gqa=True)
        return output.transpose(1, 2)

    return call, {"block_mask_us": min(made) * 1e6, "is_compiled": is_compiled}


def _row(scene: Scene) -> dict[str, Any]:
    """A scene's conditions."""
    return {
        "batch": scene.batch, "prefix": scene.prefix, "nodes": scene.nodes, "copies": scene.copies,
        "heads": [scene.query.shape[1], scene.keys.shape[1], scene.keys.shape[3]], "dtype": str(scene.keys.dtype)[6:],
        "kv_bytes": scene.kv_bytes, "flop": scene.flop, "kernels": {},
    }  # fmt: skip


def _difference(output: Tensor, wanted: Tensor) -> float:
    """Relative difference in the norm.

    Raises:
        WrongResultError: When two kernels do not compute the same.
    """
    difference = float((output.float() - wanted).norm() / wanted.norm())
    if not difference <= _LARGEST_DIFFERENCE:
        raise WrongResultError(f"it differs from the mask-free kernel's by {difference:.1e}")
    return difference


def _why(kernel: str, err: Exception) -> str:
    """Whether a kernel failed, or is merely not there: others' may not take every shape."""
    return "failure" if kernel in _OURS or isinstance(err, WrongResultError) else "left_out"


def _sentence(err: Exception) -> str:
    """An exception in one line."""
    lines = [line for line in str(err).splitlines() if line.strip()] or [""]
    return f"{type(err).__name__}: {lines[0][:200]}"


def _backend(scene: Scene) -> str:
    """Which of torch's implementations SDPA takes."""
    key, value = scene.rows(scene.keys, 0), scene.rows(scene.values, 0)
    try:
        choice = torch._fused_sdp_choice(
            scene.query, key, value, scene.mask, 0.0, False, scale=scene.scale, enable_gqa=True
        )
    except (RuntimeError, TypeError):  # private, so it may go
        return "unknown"
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(int(choice), str(choice))


def _wait(device: torch.device) -> None:
    """Until the device has done everything."""
    if has_cuda_runtime(device):
        torch.cuda.synchronize(device)


def _tidy(device: torch.device) -> None:
    """Gives memory back, captured graphs' included."""
    gc.collect()
    if has_cuda_runtime(device):
        torch.cuda.empty_cache()
