"""Times tree attention: our kernel, and SDPA with a dense mask, on the same cache and tree.

One call is one layer of one pass. Calls go round over as many sequences of the cache as it takes for each to find its
keys in memory, not in L2.
"""

from __future__ import annotations

import gc
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

# Contexts and batches by importance: what is not timed when time is up matters least.
_PLACES = (
    (1, 2048), (1, 8192), (8, 2048), (1, 32768), (8, 8192), (32, 2048), (1, 512), (32, 512), (8, 32768), (8, 512),
    (32, 8192), (32, 32768),
)  # fmt: skip
_NODES = (64, 8, 1, 16, 128, 340)
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
    """One shape of pass over a cache that holds it several times; keys and values (copies B, Hk, capacity, D)."""

    batch: int
    prefix: int
    nodes: int
    copies: int
    keys: Tensor
    values: Tensor
    query: Tensor  # (B, H, N, D)
    layout: AttentionLayout  # of the first copy
    mask: Tensor  # (B, 1, N, L + N) bool
    scale: float

    @property
    def length(self) -> int:
        """Rows that a sequence's queries see or hide: L + N."""
        return self.prefix + self.nodes

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values that a call must read."""
        _, kv_heads, _, width = self.keys.shape
        return 2 * self.batch * self.length * kv_heads * width * self.keys.itemsize

    @property
    def flop(self) -> int:
        """Floating-point operations of the two products, hidden pairs included."""
        return 4 * self.batch * self.nodes * self.query.shape[1] * self.query.shape[3] * self.length

    def rows(self, store: Tensor, copy: int) -> Tensor:
        """(B, Hk, L + N, D) one copy's keys or values."""
        return store[copy * self.batch : (copy + 1) * self.batch, :, : self.length]


def run(work: Work) -> None:
    """Emits `attention`."""
    heads = Heads(4, 2, 32, torch.float32) if work.is_rehearsal else Heads()
    nodes = (5,) if work.is_rehearsal else _NODES
    for batch, prefix in ((1, 24), (2, 24)) if work.is_rehearsal else _PLACES:
        if not work.deadline.allows(0):
            work.left_out(f"batch {batch}, L={prefix}", "time")
            continue
        try:
            store = _store(batch, prefix, max(nodes), heads, work)
        except torch.OutOfMemoryError:
            work.left_out(f"batch {batch}, L={prefix}", "memory")
            continue
        for count in nodes:
            if work.deadline.allows(0):
                _time_scene(work, make_scene(store, batch, prefix, count, heads, work.seed))
            else:
                work.left_out(f"batch {batch}, L={prefix}, N={count}", "time")
        del store
        _tidy(work.device)


def make_scene(store: tuple[Tensor, Tensor], batch: int, prefix: int, nodes: int, heads: Heads, seed: int) -> Scene:
    """A pass over the rows of a cache; a node's children follow three by three, so the tree is as deep as log N."""
    keys, values = store
    device = keys.device
    parents = [-1, *((node - 1) // 3 for node in range(1, nodes))]
    tree = TokenTree.from_rows([TreeRow([0] * nodes, parents)] * batch, device=device)
    work = Pass.of_tree(tree, slots=range(batch), prefix_lens=[prefix] * batch, last_position=prefix + nodes)
    work = work.to(device)
    seen = torch.ones(batch, nodes, prefix, dtype=torch.bool, device=device)
    generator = torch.Generator(device).manual_seed(seed)
    query = torch.randn(batch, nodes, heads.query, heads.width, device=device, generator=generator).to(heads.dtype)
    return Scene(
        batch=batch, prefix=prefix, nodes=nodes, copies=keys.shape[0] // batch, keys=keys, values=values,
        query=query.transpose(1, 2), layout=AttentionLayout(work),
        mask=torch.cat([seen, ancestor_mask(tree.parents)], dim=2).unsqueeze(1), scale=heads.width**-0.5,
    )  # fmt: skip


def candidates(scene: Scene) -> Calls:
    """Every kernel, by name."""
    from foretoken.attention.triton_tree import tree_attention_triton

    batch, heads = scene.batch, scene.query.shape[1]
    first = scene.layout.tables()
    tables = [replace(first, slots=first.slots + copy * batch) for copy in range(scene.copies)]
    kv_heads, packed = scene.keys.shape[1], scene.query.transpose(1, 2).flatten(0, 1)
    packed_query = scene.query.reshape(batch, kv_heads, -1, scene.query.shape[3])
    packed_mask = scene.mask.repeat(1, 1, heads // kv_heads, 1)

    def mask_free(copy: int) -> Tensor:
        output = tree_attention_triton(packed, scene.keys, scene.values, tables[copy], scale=scene.scale)
        return output.view(batch, scene.nodes, heads, -1)

    def sdpa(copy: int) -> Tensor:
        key, value = scene.rows(scene.keys, copy), scene.rows(scene.values, copy)
        return scaled_dot_product_attention(
            scene.query, key, value, scene.mask, scale=scene.scale, enable_gqa=True
        ).transpose(1, 2)

    def sdpa_packed(copy: int) -> Tensor:
        key, value = scene.rows(scene.keys, copy), scene.rows(scene.values, copy)
        output = scaled_dot_product_attention(packed_query, key, value, packed_mask, scale=scene.scale)
        return output.reshape(batch, heads, scene.nodes, -1).transpose(1, 2)

    return {"mask-free": mask_free, "sdpa": sdpa, "sdpa-packed": sdpa_packed}


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
    row: dict[str, Any] = {
        "batch": scene.batch, "prefix": scene.prefix, "nodes": scene.nodes, "copies": scene.copies,
        "heads": [scene.query.shape[1], scene.keys.shape[1], scene.keys.shape[3]], "dtype": str(scene.keys.dtype)[6:],
        "kv_bytes": scene.kv_bytes, "flop": scene.flop, "kernels": {},
    }  # fmt: skip
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
            is_ours = name == "mask-free" or isinstance(err, WrongResultError)  # SDPA may not take every shape
            lines = [line for line in str(err).splitlines() if line.strip()] or [""]
            cell["failure" if is_ours else "left_out"] = f"{type(err).__name__}: {lines[0][:200]}"
    for name, times in interleave(programs, work.device, seconds=_SECONDS_A_CASE, max_rounds=40).items():
        row["kernels"][name] |= times.as_dict()
    work.emit("attention", row)


def _difference(output: Tensor, wanted: Tensor) -> float:
    """Relative difference in the norm.

    Raises:
        WrongResultError: When two kernels do not compute the same.
    """
    difference = float((output.float() - wanted).norm() / wanted.norm())
    if not difference <= _LARGEST_DIFFERENCE:
        raise WrongResultError(f"it differs from the mask-free kernel's by {difference:.1e}")
    return difference


def _tidy(device: torch.device) -> None:
    """Gives memory back, captured graphs' included."""
    gc.collect()
    if has_cuda_runtime(device):
        torch.cuda.empty_cache()
