"""Passes of the native decoder behind long texts, beside what reading weights and KV rows takes at the rate of memory.

python -m benchmarks.long_passes --model runs/long-24x1024/twin --rows 200 4096 16384 --tokens 1 16 64 --batch 1 4
python -m benchmarks.long_passes --model runs/long-24x1024/twin --rows 128 --tokens 1 16 64 --quantization int8 int4
python -m benchmarks.long_passes --model runs/long-24x1024/twin --rows 4096 16000 --quantization kv w4a8 w4a8+kv

The rate of memory is measured between the passes: two threads sum a buffer of 1 GiB. Rows hold noise, since a pass
costs the same whatever they hold. Passes of quantized models take turns with those in bfloat16; their columns have
milliseconds, and the median of ratios in brackets. "kv" stands for KV rows in int8.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, get_args

import torch

from benchmarks.rivals.machine import describe_machine
from foretoken.core.passes import Pass
from foretoken.decoder.library import set_num_threads
from foretoken.decoder.quantized import Quantization
from foretoken.models.loading import load_model
from foretoken.models.quantization.rounding import quantize_model
from foretoken.runner.runner import Runner

if TYPE_CHECKING:
    from collections.abc import Callable

_KINDS = (*get_args(Quantization), "kv", *(f"{name}+kv" for name in get_args(Quantization)))


def main() -> None:
    """Prints a table: milliseconds of a pass, those of its bytes alone, and their ratio."""
    options = _parser().parse_args()
    set_num_threads(options.threads)
    runners = {name: _runner(options, name) for name in ("bfloat16", *options.quantization)}
    first = runners["bfloat16"]
    weights = sum(each.nbytes for each in first.model.module.parameters())  # the LM head shares the embedding
    row = sum(part.shape[1] * part.shape[3] * part.itemsize for part in (*first.cache.keys, *first.cache.values))
    buffer = torch.ones(1 << 27, dtype=torch.int64)
    print(f"{describe_machine()}\nweights {weights / 1e6:.0f} MB, row {row / 1e3:.1f} kB; load {options.model}")
    columns = ["batch", "rows", "tokens", "ms", "GB/s of memory", "ms of the bytes", "share", *options.quantization]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for batch in options.batch:
        for rows in options.rows:
            for tokens in options.tokens:
                work, rates = _chains(batch, rows, tokens), []
                seconds: dict[str, list[float]] = {name: [] for name in runners}
                for _ in range(options.rounds + 1):
                    rates.append(buffer.nbytes / _seconds(buffer.sum))
                    for name, runner in runners.items():
                        seconds[name].append(_seconds(lambda: runner.run(work)))  # noqa: B023 - called at once
                own = seconds.pop("bfloat16")
                taken, rate = statistics.median(own[1:]), statistics.median(rates[1:])
                floor = (weights + batch * rows * row) / rate
                others = [
                    f"{1e3 * statistics.median(each[1:]):.1f} "
                    f"({statistics.median(x / y for x, y in zip(each[1:], own[1:], strict=True)):.2f})"
                    for each in seconds.values()
                ]
                cells = [f"{1e3 * taken:.1f}", f"{rate / 1e9:.1f}", f"{1e3 * floor:.1f}", f"{floor / taken:.2f}"]
                print(f"| {batch} | {rows} | {tokens} | {' | '.join([*cells, *others])} |", flush=True)


def _runner(options: argparse.Namespace, name: Any) -> Runner:
    model = load_model(options.model, dtype="bfloat16")
    most = max(options.rows) + max(options.tokens)
    if most > model.context_len:
        raise SystemExit(f"Error: {most} positions, and '{options.model}' has {model.context_len}. Pass fewer --rows.")
    weights = name.removesuffix("kv").removesuffix("+")
    if weights not in ("bfloat16", ""):
        model = quantize_model(model, weights)
    if name.endswith("kv"):
        model = replace(model, kv_cache_dtype="int8")
    runner = Runner(
        model, num_slots=max(options.batch), context_len=most, max_nodes=max(options.tokens), runner="lean-native"
    )
    for part in (*runner.cache.keys, *runner.cache.values):
        if runner.cache.is_rounded:
            part.random_(-127, 128)
            part[..., -4:] = torch.tensor([0.02]).view(torch.int8)  # the scale
        else:
            part.normal_()
    return runner


def _chains(batch: int, rows: int, tokens: int) -> Pass:
    return Pass.of_chains(
        [[5] * tokens] * batch, slots=range(batch), prefix_lens=[rows] * batch
    ).with_all_logits()  # fmt: skip


def _seconds(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[200, 4096, 16_000])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--quantization", nargs="+", default=[], choices=_KINDS)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=2)
    return parser


if __name__ == "__main__":
    main()
