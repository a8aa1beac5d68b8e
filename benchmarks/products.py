"""Times one small-batch GEMM of a decoding pass on torch's kernels, on oneDNN's and MKL's packed ones, and on our own.

python -m benchmarks.products --sizes 256,1024,3072x1024,1024x3072 --threads 2

Weights rotate over more memory than caches hold, unless they are small enough to stay in one, in huge pages where the
system has them, as a model's do. Kernels take turns, and medians count.
"""

from __future__ import annotations

import argparse
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING

import torch

from foretoken.decoder.memory import use_huge_pages
from foretoken.decoder.native_linear import NativeLinear

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    Product = Callable[[], object]

_ROTATED_BYTES = 150 * 2**20
_TOKENS = (1, 4, 8, 16, 64, 200)


def products(weights: Sequence[Tensor], num_tokens: int) -> dict[str, list[Product]]:
    """Every kernel's calls, one a weight."""
    x = torch.randn(num_tokens, weights[0].shape[1]).to(weights[0].dtype)
    calls: dict[str, list[Product]] = {
        "torch `linear`": [lambda w=w: torch.nn.functional.linear(x, w) for w in weights],  # type: ignore[misc]
    }
    if x.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        onednn = [torch.ops.mkldnn._reorder_linear_weight(weight, 16) for weight in weights]
        calls["oneDNN, packed"] = [
            lambda p=p: torch.ops.mkldnn._linear_pointwise(x, p, None, "none", [], "")  # type: ignore[misc]
            for p in onednn
        ]
    if x.dtype == torch.float32 and torch.backends.mkl.is_available():
        packed = [torch.ops.mkl._mkl_reorder_linear_weight(weight, num_tokens) for weight in weights]
        calls["MKL, packed"] = [
            lambda w=w, p=p: torch.ops.mkl._mkl_linear(x, p, w, None, num_tokens)  # type: ignore[misc]
            for w, p in zip(weights, packed, strict=True)
        ]
    calls["`decoder.cpp`"] = [partial(NativeLinear(weight), x) for weight in weights]
    return calls


def microseconds(calls: dict[str, list[Product]], rounds: int) -> dict[str, float]:
    """Median time of a GEMM by kernel, in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + 1):  # the first round warms up
        for name, kernel in calls.items():
            begin = time.perf_counter()
            for call in kernel:
                call()
            if number:
                times[name].append((time.perf_counter() - begin) / len(kernel) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    """Prints one Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="256,1024,2816", help="rows x columns, or K of square matrices")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    print(f"| rows x columns, dtype | kernel | {' | '.join(f'M={count}' for count in _TOKENS)} |")
    print(f"|{'---|' * (len(_TOKENS) + 2)}")
    for size in options.sizes.split(","):
        rows, cols = (int(part) for part in (size.split("x") * 2)[:2])
        for dtype in (torch.bfloat16, torch.float32):
            # Small layers stay in the cache when decoding too.
            total = 10 * 2**20 if rows * cols < 512**2 else _ROTATED_BYTES
            weights = [torch.randn(rows, cols).to(dtype) for _ in range(total // (rows * cols * dtype.itemsize))]
            use_huge_pages(weights)
            columns = [microseconds(products(weights, count), options.rounds) for count in _TOKENS]
            for row, name in enumerate(columns[0]):
                label = f"{size}, {'bf16' if dtype == torch.bfloat16 else 'fp32'}" if row == 0 else ""
                print(f"| {label} | {name} | {' | '.join(f'{column[name]:.0f}' for column in columns)} |", flush=True)


if __name__ == "__main__":
    main()
