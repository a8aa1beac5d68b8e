"""Checks three tree attention kernels against the reference in float64, on random inputs of every class of shapes.

An error counts by its bound, worked out from the dtype for every number of the output: 1 is as far as rounding can
reach. How far the loss of a single visible key would move the output, in the same unit, tells whether the check could
have seen it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from benchmarks.gpu_suite.attention_inputs import (
    LEVELS,
    REHEARSAL_LEVELS,
    Case,
    Problem,
    covering_cases,
    make_problem,
)
from foretoken.attention.dispatch import reference_attention
from foretoken.attention.layout import AttentionLayout
from foretoken.core.backend import has_cuda_runtime
from foretoken.decoder.cuda_graphs import captured_pass, padded_inputs, shape_of

if TYPE_CHECKING:
    from benchmarks.gpu_suite.work import Work

Kernel = Callable[[Problem, Case], Tensor]
_DTYPE_ORDER = ("bfloat16", "float16", "float32")
_PROBED_QUERIES = 8
_ONE_MORE_S = 8.0  # what another case may take, compiling included


def run(work: Work) -> None:
    """Emits `cases`, round after round with other seeds until the time is up; the first round has every class."""
    kernels = available_kernels(work)
    levels = REHEARSAL_LEVELS if work.is_rehearsal else LEVELS
    number = 0
    while number == 0 or work.deadline.allows(_ONE_MORE_S):
        cases = sorted(
            covering_cases(levels, work.seed + number),
            key=lambda case: (_DTYPE_ORDER.index(case["dtype"]), case["head"]),
        )
        own = list(enumerate(cases))[work.shard :: work.num_shards]
        for done, (index, case) in enumerate(own):
            if not work.deadline.allows(0.5 if work.is_rehearsal else _ONE_MORE_S):
                if number == 0:
                    work.left_out(f"{len(own) - done} of {len(own)} cases of process {work.shard}", "time")
                return
            begin = time.monotonic()
            seed = 1000 * (work.seed + number) + index
            verdicts = check_case(case, kernels, work.device, seed)
            row = {"round": number, "input_seed": seed, "case": case, "kernels": verdicts}
            work.emit("cases", {**row, "seconds": round(time.monotonic() - begin, 2)})
        number += 1
        if work.is_rehearsal:
            return


def available_kernels(work: Work) -> dict[str, Kernel]:
    """The kernels that run here, by name; says which do not."""
    from benchmarks.gpu_suite.triton_masked import masked_attention_triton
    from foretoken.attention.triton_tree import tree_attention_triton

    def options(problem: Problem, case: Case) -> dict[str, Any]:
        return {"scale": problem.scale, "softcap": case["softcap"], "sinks": problem.sinks}

    def mask_free(problem: Problem, case: Case) -> Tensor:
        query, tables = problem.query, problem.layout.tables()
        if case["tables"] == "captured":
            shape = shape_of(problem.work)
            inputs = [part.to(query.device) for part in padded_inputs(problem.work, shape)]
            tables = AttentionLayout(captured_pass(shape, inputs)).tables()
            missing = shape.num_tokens - len(query)
            query = torch.nn.functional.pad(query, (0, 0, 0, 0, 0, missing), value=float("nan"))
        output = tree_attention_triton(
            query, problem.keys, problem.values, tables, window=case["window"], num_splits=case["splits"],
            **options(problem, case),
        )  # fmt: skip
        return output[: len(problem.query)]

    def masked(problem: Problem, case: Case) -> Tensor:
        device, longest = problem.query.device, max(problem.lengths)
        mask = problem.padded(torch.cat([_widened(mask, longest) for mask in problem.visible])).to(device)
        slots, num_keys = torch.tensor(
            [list(problem.work.slots), problem.lengths], dtype=torch.int32, device=device
        )  # fmt: skip
        query = problem.padded(problem.query).transpose(1, 2)
        return problem.packed(
            masked_attention_triton(
                query, problem.keys, problem.values, slots, num_keys, mask, **options(problem, case)
            )
        )  # fmt: skip

    kernels: dict[str, Kernel] = {"mask-free": mask_free, "masked": masked}
    if not has_cuda_runtime(work.device):
        work.left_out("the CUDA kernel", "it needs a GPU")
        return kernels
    from benchmarks.gpu_suite.cuda_tree import tree_attention_cuda

    def cuda(problem: Problem, case: Case) -> Tensor:
        tables, work = problem.layout.tables(), problem.work
        parents = None if work.is_causal else problem.padded(work.parents.to(torch.int32), -1)
        query = problem.padded(problem.query).transpose(1, 2)
        return problem.packed(
            tree_attention_cuda(
                query, problem.keys, problem.values, tables.slots, tables.prefix, problem.padded(tables.positions),
                parents, window=case["window"], **options(problem, case),
            )
        )  # fmt: skip

    return {**kernels, "cuda": cuda}


def check_case(case: Case, kernels: dict[str, Kernel], device: torch.device, seed: int) -> dict[str, Any]:
    """Runs every kernel twice on one problem.

    Args:
        case: A level of every factor.
        kernels: By name.
        device: Where they run.
        seed: Of the inputs.

    Returns:
        By kernel: `error` in units of its bound, `is_repeatable`, `passes`, or `failure`, what it raised. And under
        "one lost key" the most that a single lost key moves the output, in bounds; None where a query sees one alone.
    """
    problem = make_problem(case, device, seed)
    wanted, bounds = expected(problem, case)
    results: dict[str, Any] = {}
    for name, kernel in kernels.items():
        if name == "cuda" and case["structure"] == "levels":
            continue  # it knows the parents of tokens alone, not what earlier passes left
        try:
            results[name] = _judged(kernel, problem, case, wanted, bounds)
        except Exception as err:  # noqa: BLE001 - a kernel that cannot run is a finding, and the others go on
            lines = [line for line in str(err).splitlines() if line.strip()] or [""]
            results[name] = {"passes": False, "failure": f"{type(err).__name__}: {lines[0][:300]}"}
    results["one lost key"] = _lost_key(problem, case, wanted, bounds, random.Random(seed))
    return results


def expected(problem: Problem, case: Case) -> tuple[Tensor, Tensor]:
    """The definition in float64, and how far rounding may carry a kernel from it.

    A kernel rounds the weights and the output to the dtype, u each, or half the spacing of subnormal numbers below the
    smallest normal one, which only float16 reaches; scores and sums are in float32. Errors of scores grow with the
    lengths of queries and keys, and weigh with the values' sizes.

    Returns:
        (M, H, Dv) float64 both.
    """
    outputs, bounds = [], []
    queries = problem.query.double().split(problem.counts)
    for slot, mask, own in zip(problem.work.slots, problem.visible, queries, strict=True):
        end, query = mask.shape[1], own.transpose(0, 1)
        key, value = (part[slot, :, :end].double() for part in (problem.keys, problem.values))
        on_device = mask.to(query.device)
        output, sizes = (
            _definition(query, key, part, on_device, problem, case).transpose(0, 1) for part in (value, value.abs())
        )
        greatest = float(query.norm(dim=-1).max() * key.norm(dim=-1).max()) * problem.scale
        in_float32 = (16 + 4 * greatest + 4 * (case["softcap"] or 0)) * 2.0**-24
        facts = torch.finfo(problem.query.dtype)
        unit, subnormal = facts.eps / 2, facts.smallest_normal * facts.eps / 2
        seen = (on_device.double() @ value.abs()).repeat_interleave(query.shape[0] // len(value), 0).transpose(0, 1)
        outputs.append(output)
        bounds.append(sizes * (2 * unit + in_float32) + subnormal * (1 + seen))
    return torch.cat(outputs), torch.cat(bounds)


def _definition(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, problem: Problem, case: Case) -> Tensor:
    """`reference_attention` in float64."""
    sinks = None if problem.sinks is None else problem.sinks.double()
    return reference_attention(query, key, value, mask, scale=problem.scale, softcap=case["softcap"], sinks=sinks)


def _judged(kernel: Kernel, problem: Problem, case: Case, wanted: Tensor, bounds: Tensor) -> dict[str, Any]:
    """A kernel's error in bounds; twice, since a race shows as a difference."""
    outputs = []
    for _ in range(2):
        # The output will most likely get this memory: what a kernel forgets to write then is NaN.
        torch.full(wanted.shape, float("nan"), dtype=problem.query.dtype, device=wanted.device)
        outputs.append(kernel(problem, case).clone())
    if has_cuda_runtime(wanted.device):
        torch.cuda.synchronize()
    error = float(((outputs[0].double() - wanted).abs() / bounds).nan_to_num(nan=float("inf")).max())
    is_repeatable = torch.equal(outputs[0], outputs[1])
    return {"error": min(error, 1e30), "is_repeatable": is_repeatable, "passes": error <= 1 and is_repeatable}


def _lost_key(
    problem: Problem, case: Case, wanted: Tensor, bounds: Tensor, rng: random.Random
) -> float | None:  # fmt: skip
    """See `check_case`: of some queries, each loses the key of its greatest score."""
    worst: float | None = None
    for _ in range(_PROBED_QUERIES):
        row = rng.randrange(len(problem.visible))
        node = rng.randrange(problem.counts[row])
        mask = problem.visible[row][node : node + 1].to(wanted.device)
        token = problem.work.offsets[row] + node
        if int(mask.sum()) < 2:
            continue
        slot, end = problem.work.slots[row], mask.shape[1]
        query = problem.query[token].double().unsqueeze(1)
        key, value = problem.keys[slot, :, :end].double(), problem.values[slot, :, :end].double()
        grouped = query.reshape(key.shape[0], -1, query.shape[2])
        scores = (grouped @ key.transpose(1, 2)).amax((0, 1)).masked_fill(~mask[0], float("-inf"))
        without = mask.clone()
        without[0, int(scores.argmax())] = False
        moved = (_definition(query, key, value, without, problem, case)[:, 0] - wanted[token]).abs()
        worst = max(worst or 0.0, float((moved / bounds[token]).max()))
    return worst


def _widened(mask: Tensor, keys: int) -> Tensor:
    """(T, keys) a mask with hidden keys behind its own."""
    return torch.nn.functional.pad(mask, (0, keys - mask.shape[1]))
