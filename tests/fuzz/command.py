"""The command line of the fuzz targets."""

import argparse
import collections
import importlib
import math
import time

import torch

from fuzz.worker import Report, Settings, run_cases

TARGETS = ("requests", "threads", "models", "checkpoints", "caches", "bodies")
_PROGRESS = 25  # cases between two lines that say how far a run is


def main() -> int:
    """Runs a target until enough is done; the exit status is 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--count", type=int, default=1000, help="requests (or models, … whatever the target makes)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="the run ends after them, too")
    parser.add_argument("--seed", type=int, default=0, help="of the run")
    parser.add_argument("--start", type=int, default=0, help="number of the first case")
    parser.add_argument("--only", type=int, help="the one case to run")
    parser.add_argument("--runner", default="lean-native", help="of the target, for those that take one")
    parser.add_argument("--dtype", default="bfloat16", help="likewise")
    parser.add_argument("--limit", type=float, default=120.0, help="seconds after which a case counts as stuck")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    settings = Settings(seed=chosen.seed, runner=chosen.runner, dtype=chosen.dtype, limit_s=chosen.limit)
    run = importlib.import_module(f"fuzz.{chosen.target}").run
    numbers = range(chosen.start, 1 << 62) if chosen.only is None else range(chosen.only, chosen.only + 1)
    begin, cases, size, found, told = time.monotonic(), 0, 0, 0, ""
    counts: collections.Counter[str] = collections.Counter()
    for report in run_cases(run, chosen.target, numbers, settings):
        cases, size = cases + 1, size + report.size
        counts.update(report.counts)
        if report.finding is not None:
            found += 1
            print(described(report, chosen.target, settings), flush=True)
        told = f"{chosen.target}: {size} in {cases} cases, {found} findings, {time.monotonic() - begin:.0f} s"
        if size >= chosen.count or time.monotonic() - begin >= chosen.seconds:
            break
        if cases % _PROGRESS == 0:
            print(told, flush=True)
    print(told)
    print("; ".join(f"{name} {count}" for name, count in sorted(counts.items())))
    return int(found > 0)


def described(report: Report, target: str, settings: Settings) -> str:
    """A finding with the command that shows it again."""
    again = f"--seed {settings.seed} --only {report.number} --runner {settings.runner} --dtype {settings.dtype}"
    return f"FINDING: python -m tests.fuzz {target} {again}\n  {report.doing}\n{report.finding}\n"
