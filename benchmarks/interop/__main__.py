"""Command line: python -m benchmarks.interop --medusa-repo DIR --hydra-repo DIR … (see README.md beside this file).

Exit code 1: another project's code makes something else of a file than foretoken says.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from benchmarks.interop import eagle, fms, pickles, speculators, tgi
from benchmarks.interop.borrowed import UnusableError
from benchmarks.interop.outcome import Outcome, as_json, as_table
from benchmarks.interop.samples import Target

if TYPE_CHECKING:
    Comparisons = Callable[[Path, Target, Path], Iterator[Outcome]]

# Option, whose code, what is compared.
PROGRAMS: dict[str, tuple[str, Comparisons]] = {
    "medusa": ("FasterDecoding/Medusa", pickles.medusa),
    "hydra": ("zankner/Hydra", pickles.hydra),
    "fms-extras": ("foundation-model-stack/fms-extras", fms.outcomes),
    "eagle": ("SafeAILab/EAGLE", eagle.official),
    "specforge": ("sgl-project/SpecForge", eagle.specforge),
    "sglang": ("sgl-project/sglang, or rather a site-packages directory with it", eagle.sglang),
    "tgi": ("huggingface/text-generation-inference", tgi.outcomes),
    "vllm": ("vllm-project/vllm, or a site-packages directory with it", eagle.vllm),
    "speculators": ("vllm-project/speculators, or a site-packages directory with it", speculators.outcomes),
}
# Options of programs that read a given head.
_OF_GIVEN_HEADS = ("eagle", "specforge", "sglang", "vllm")


def main(arguments: list[str]) -> int:
    """Compares with every clone that is named; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.interop", description=__doc__)
    for option, (whose, _) in PROGRAMS.items():
        parser.add_argument(f"--{option}-repo", type=Path, metavar="DIR", help=f"a clone of {whose}")
    parser.add_argument("--head", type=Path, metavar="DIR", help="compare this head, whose file is ours, and no others")
    parser.add_argument("--target", metavar="MODEL", help="the target of that head")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the outcomes as JSON")
    chosen = vars(parser.parse_args(arguments))
    if (chosen["head"] is None) != (chosen["target"] is None):
        parser.error("--head and --target belong together")
    options = PROGRAMS if chosen["head"] is None else _OF_GIVEN_HEADS
    repos = {option: chosen[f"{option.replace('-', '_')}_repo"] for option in options}
    with _quiet():
        given = None if chosen["head"] is None else Target.loaded(chosen["target"], chosen["head"])
        found = compare_all(repos, given)
    print(as_table(found))
    ran = sum(one.found != "skipped" for one in found)
    wrong = sum(not one.is_as_stated for one in found)
    print(f"\n{ran} comparisons ran, {len(found) - ran} were skipped, {wrong} contradict what foretoken says.")
    if chosen["json"] is not None:
        chosen["json"].write_text(json.dumps(as_json(found), indent=1) + "\n", encoding="utf-8")
    return 1 if wrong else 0


def compare_all(repos: dict[str, Path | None], given: Target | None = None) -> list[Outcome]:
    """Every comparison; where a clone is not named, or cannot be used, one row that says why.

    `repos` are clones by the keys of `PROGRAMS`; `given` is a target with a head to compare instead of random ones.
    """
    found: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="foretoken-interop-") as folder:
        target = given or Target.made(Path(folder) / "target")
        for option, repo in repos.items():
            whose, comparisons = PROGRAMS[option]
            if repo is None:
                found.append(_skipped(whose, f"no --{option}-repo"))
                continue
            work = Path(folder) / option
            work.mkdir()
            known = len(found)
            try:
                found += comparisons(repo.resolve(), target, work)
                if len(found) == known:
                    found.append(_skipped(whose, "foretoken writes no file of such a head for it"))
            except UnusableError as err:
                found.append(_skipped(whose, str(err)))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Without warnings and progress of transformers, which loads a target for every case."""
    kept, had_bars = logging.root.manager.disable, is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    disable_progress_bar()
    try:
        yield
    finally:
        logging.disable(kept)
        if had_bars:
            enable_progress_bar()


def _skipped(whose: str, reason: str) -> Outcome:
    return Outcome(program=whose, case="all", claimed=None, found="skipped", note=reason)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
