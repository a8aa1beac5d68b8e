"""Measures and proves on a GPU, in under nine minutes; rehearses on a CPU.

python -m benchmarks.gpu_suite --out benchmarks/results/gpu-NAME
python -m benchmarks.gpu_suite --out /tmp/rehearsal --rehearse
"""

import argparse
import datetime
import json
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_suite.goals import is_proven, proofs, speeds
from benchmarks.gpu_suite.processes import SectionRun
from benchmarks.gpu_suite.report import as_markdown
from benchmarks.gpu_suite.work import NEEDS, SECTIONS, Section
from benchmarks.machine import commit, describe_machine

_LIMIT_S = 515.0
_WRITE_EVERY_S = 5.0


def main(arguments: Sequence[str]) -> int:
    """Runs the sections; 0 when everything is proven, 1 when something is not or broke down, 2 when nothing can run."""
    options = _parser().parse_args(arguments)
    try:
        sections = chosen_sections(options.only)
    except ValueError as err:
        print(f"Error: {err}", file=sys.stderr)
        return 2
    if not options.rehearse and not torch.cuda.is_available():
        print("Error: there is no GPU. Expected one, or --rehearse for toy sizes on the CPU.", file=sys.stderr)
        return 2
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    record: dict[str, Any] = {
        "suite": "gpu",
        "rehearsal": options.rehearse,
        "command": shlex.join(["python", "-m", "benchmarks.gpu_suite", *arguments]),
        "commit": options.commit or commit(),
        "begun": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seed": seed,
        "seconds": 0.0,
        "machine": describe_machine(),
        "device": {},
        "sections": {},
        "goals": [],
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    print(f"seed {seed}; results go to {options.out}.json", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the sections' processes are ended too
    _run(sections, record, options.out, limit_s=options.limit, seed=seed)
    report = as_markdown(record)
    print(report)
    if not is_proven(record):
        print("FAILED: see the top of the report.", file=sys.stderr)
        return 1
    return 0


def chosen_sections(only: str | None) -> list[Section]:
    """The sections asked for, all if None, and what their figures are fractions of, in order.

    Raises:
        ValueError: When there is no such section.
    """
    known = [section.name for section in SECTIONS]
    names = known if only is None else [name for name in only.split(",") if name]
    unknown = sorted(set(names) - set(known))
    if unknown or not names:
        raise ValueError(f"--only names '{', '.join(unknown)}'. Expected some of {', '.join(known)}.")
    wanted = {*names, *(need for name in names for need in NEEDS.get(name, ()))}
    return [section for section in SECTIONS if section.name in wanted]


def limits(sections: Sequence[Section], left_s: float, *, is_rehearsal: bool) -> float:
    """Seconds that the first of the remaining sections may take: its share, and what is to spare beyond all shares."""
    shares = [section.rehearsal_seconds if is_rehearsal else section.seconds for section in sections]
    spare = left_s - sum(shares)
    if spare < 0:  # later than planned: everyone gives
        return max(shares[0] * left_s / sum(shares), 1.0)
    return shares[0] + spare * shares[0] / sum(shares)


def _run(sections: Sequence[Section], record: dict[str, Any], out: Path, *, limit_s: float, seed: int) -> None:
    """Runs sections one after the other and keeps the files up to date."""
    begin, is_rehearsal = time.monotonic(), record["rehearsal"]
    written = 0.0

    def keep(name: str, section: dict[str, Any]) -> None:
        nonlocal written
        record["sections"][name] = section
        record["seconds"] = time.monotonic() - begin
        for facts in section["tables"].get("device", []):
            record["device"] |= facts
        if section["status"] != "running" or time.monotonic() - written > _WRITE_EVERY_S:
            written = time.monotonic()
            _write(record, out)

    with tempfile.TemporaryDirectory(prefix="gpu_suite") as folder:
        started: dict[str, SectionRun] = {}
        try:
            for number, section in enumerate(sections):
                # The next section's processes import while this one works; they touch the GPU when it is their turn.
                for each in sections[number : number + 2]:
                    if each.name not in started:
                        started[each.name] = SectionRun(each, is_rehearsal=is_rehearsal, seed=seed, logs=Path(folder))
                left = limit_s - (time.monotonic() - begin)
                seconds = limits(sections[number:], left, is_rehearsal=is_rehearsal)
                print(f"{section.name}: up to {seconds:.0f} s", flush=True)
                run = started[section.name]
                result = run.finish(seconds, lambda found, name=section.name: keep(name, found))  # type: ignore[misc]
                run.close()
                print(f"{section.name}: {result['status']} after {result['seconds']} s", flush=True)
        finally:
            for run in started.values():
                run.close()


def _write(record: dict[str, Any], out: Path) -> None:
    record["goals"] = [goal._asdict() for goal in (*proofs(record), *speeds(record))]
    for suffix, text in ((".json", json.dumps(record, indent=1) + "\n"), (".md", as_markdown(record))):
        partial = out.with_name(out.name + suffix + ".partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(out.with_name(out.name + suffix))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_suite", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="files to write, without suffix")
    parser.add_argument("--only", help=f"some of {','.join(section.name for section in SECTIONS)}")
    parser.add_argument("--seed", type=int, help="of all random inputs; a new one, printed, if left out")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--limit", type=float, default=_LIMIT_S, help="seconds for everything")
    parser.add_argument("--rehearse", action="store_true", help="toy sizes on the CPU; nothing it prints is a result")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
