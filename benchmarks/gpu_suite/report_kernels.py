"""The report's tables of kernels and of the device."""

from __future__ import annotations

from benchmarks.gpu_suite.goals import Ceilings, Record, Row, kernel_us, table
from benchmarks.gpu_suite.markdown import NONE, cell_of, markdown_table, number, times_of

_FACTORS = (
    "dtype", "head", "group", "nodes", "batch", "prefix", "structure", "tables", "window", "softcap", "sinks", "splits",
)  # fmt: skip
_OTHERS = ("masked", "sdpa", "sdpa-packed")


def show_parity(record: Record) -> str:
    """The worst error of each class."""
    cases = table(record, "parity", "cases")
    if not cases:
        return ""
    kernels = list(dict.fromkeys(name for row in cases for name in row["kernels"] if name != "one lost key"))
    lines = []
    for factor in _FACTORS:
        for level in dict.fromkeys(str(row["case"][factor]) for row in cases):
            own = [row for row in cases if str(row["case"][factor]) == level]
            worst = [max((_error(row, kernel) for row in own), default=None, key=_known) for kernel in kernels]
            lines.append([f"{factor} {level}", str(len(own)), *(number(value) for value in worst)])
    weakest = min((row["kernels"]["one lost key"] for row in cases if row["kernels"]["one lost key"]), default=None)
    legend = (
        f"Largest error over all numbers of all cases of a class, in units of its bound (1: as far as rounding of the "
        f"dtype reaches); against the definition in float64. {len(cases)} cases, {1 + max(r['round'] for r in cases)} "
        f"rounds of fresh inputs, rows that must not be read hold NaN, every kernel runs twice and must repeat itself. "
        f"One lost key would have moved the output by at least {number(weakest)} bounds. `inf` stands for a kernel "
        "that raised or gave NaN."
    )
    return markdown_table(["class", "cases", *kernels], lines) + "\n\n" + legend


def show_ceilings(record: Record) -> str:
    """What the device can do at most."""
    lines = [
        [
            row["what"],
            f"{row['gb_per_s']:.0f} GB/s" if "gb_per_s" in row else f"{row['tflop_per_s']:.0f} TFLOP/s",
            f"{row['bytes'] / 2**30:.2f} GiB moved" if "bytes" in row else f"{row['size']} cubed, {row['dtype']}",
            f"{row['median']:.1f} us ({row['min']:.1f}-{row['max']:.1f}), {row['rounds']} rounds",
        ]
        for row in table(record, "ceilings", "ceilings")
    ]
    if not lines:
        return ""
    shown = markdown_table(["", "speed", "on", "time"], lines)
    linears = table(record, "ceilings", "linears")
    if not linears:
        return shown
    widths = sorted({row["width"] for row in linears})
    by_layer: dict[str, dict[int, Row]] = {}
    for row in linears:
        by_layer.setdefault(f"{row['layer']} {row['outputs']}x{row['inputs']}", {})[row["width"]] = row
    gemms = markdown_table(
        ["GEMM", *(f"{width} tokens" for width in widths)],
        [
            [
                name,
                *(f"{rows[w]['median']:.1f} us, {rows[w]['gb_per_s']:.0f} GB/s" if w in rows else NONE for w in widths),
            ]
            for name, rows in by_layer.items()
        ],
    )
    return f"{shown}\n\nTorch's GEMMs in bfloat16, weights not in any cache, GB/s of weights:\n\n{gemms}"


def show_attention(record: Record) -> str:
    """Kernels side by side."""
    ceilings = Ceilings.of(record)
    rows = sorted(table(record, "attention", "attention"), key=lambda r: (r["batch"], r["prefix"], r["nodes"]))
    if not rows:
        return ""
    lines = []
    for row in rows:
        ours = kernel_us(row, "mask-free")
        lines.append(
            [
                str(row["batch"]), str(row["prefix"]), str(row["nodes"]), cell_of(row, "mask-free"),
                *_rates(row, ours, ceilings),
                *(cell_of(row, name) + times_of(kernel_us(row, name), ours) for name in _OTHERS),
                row.get("sdpa_backend", NONE),
            ]
        )  # fmt: skip
    first = rows[0]
    headings = ["B", "L", "N", "mask-free, us", "GB/s", "of copy", "TFLOP/s", "of matmul", "masked Triton, us"]
    headings += ["SDPA, us", "SDPA packed, us", "SDPA's way"]
    heads, kv_heads, width = first["heads"]
    legend = (
        f"One layer, {heads} query heads, {kv_heads} KV heads of {width}, {first['dtype']}, a tree of N nodes behind L "
        "rows. Medians of one call in microseconds by device events, candidates in turns, calls rotated over caches "
        "beyond L2, launches hidden by CUDA graphs (`*`: queued instead). GB/s: bytes of K and V alone. TFLOP/s: both "
        "products over all L + N rows. In brackets, how many times the mask-free kernel's. SDPA: dense boolean mask "
        "and enable_gqa; packed: the query heads of a KV head as rows of one matrix."
    )
    return markdown_table(headings, lines) + "\n\n" + legend


def show_flex(record: Record) -> str:
    """FlexAttention."""
    rows = table(record, "attention", "flex")
    if not rows:
        return ""
    lines = []
    for row in rows:
        cell, ours = row["kernels"]["flex"], kernel_us(row, "mask-free")
        lines.append(
            [
                str(row["batch"]), str(row["prefix"]), str(row["nodes"]), cell_of(row, "mask-free"),
                cell_of(row, "flex") + times_of(kernel_us(row, "flex"), ours),
                f"{cell['block_mask_us']:.0f}" if "block_mask_us" in cell else NONE,
                f"{cell['first_call_s']:.1f}" if "first_call_s" in cell else NONE,
            ]
        )  # fmt: skip
    headings = ["B", "L", "N", "mask-free, us", "FlexAttention, us", "its block mask, us", "first call, s"]
    return markdown_table(headings, lines) + (
        "\n\nConditions as above; mask_mod over the ancestor table, compiled for each shape. Its block mask has to be "
        "made anew for every pass and is not in its time."
    )


def _rates(row: Row, ours: float | None, ceilings: Ceilings) -> list[str]:
    """The mask-free kernel's bandwidth and arithmetic, absolute and of the ceilings."""
    if ours is None:
        return [NONE] * 4
    bandwidth, arithmetic = row["kv_bytes"] / ours / 1e3, row["flop"] / ours / 1e6
    return [
        f"{bandwidth:.0f}", f"{bandwidth / ceilings.copy:.0%}" if ceilings.copy else NONE,
        f"{arithmetic:.1f}", f"{arithmetic / ceilings.matmul:.0%}" if ceilings.matmul else NONE,
    ]  # fmt: skip


def _error(row: Row, kernel: str) -> float | None:
    """A kernel's error in a case, None where it did not run."""
    verdict = row["kernels"].get(kernel)
    if verdict is None:
        return None
    error: float = verdict.get("error", float("inf"))
    return error if error < 1e30 else float("inf")


def _known(value: float | None) -> float:
    """For a maximum over values of which some are missing."""
    return -1.0 if value is None else value
