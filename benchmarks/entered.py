"""Counts the files of the package that one greedy `generate` enters, and the Python calls of an iteration.

    python -m benchmarks.entered [-s ngram -s draft_model -s ngram+draft_model]

The first call of `generate` is left out, so that nothing is counted that happens once.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import foretoken
from foretoken import LLM, SamplingParams

if TYPE_CHECKING:
    from types import FrameType

_PACKAGE = str(Path(foretoken.__file__).parent)
_MODEL = Path(__file__).resolve().parents[1] / "models" / "tinycode"
_PROMPT = "def read_config(path):\n"


def entered(drafter: str) -> tuple[set[str], float]:
    """Returns the files that a request of 96 tokens enters, and the calls of each of its iterations."""
    llm = LLM(str(_MODEL), speculative_config=drafter)
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    llm.generate(_PROMPT, params)
    files: set[str] = set()
    num_calls = 0

    def count(frame: FrameType, event: str, _: object) -> None:
        nonlocal num_calls
        if event == "call" and frame.f_code.co_filename.startswith(_PACKAGE):
            files.add(frame.f_code.co_filename)
            num_calls += 1

    sys.setprofile(count)
    try:
        output = llm.generate(_PROMPT, params)[0]
    finally:
        sys.setprofile(None)
    return files, num_calls / output.metrics.steps


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-s", dest="drafters", action="append", help="as `foretoken generate -s` takes it")
    for name in parser.parse_args().drafters or ["ngram", "draft_model", "ngram+draft_model"]:
        found, calls = entered(name)
        print(f"{name}: {len(found)} files, {calls:.0f} calls an iteration")
