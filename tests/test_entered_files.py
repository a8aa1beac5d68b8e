"""How many files of the package one `generate` enters: as many as a reader opens to follow a request."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

import foretoken
from foretoken import LLM, SamplingParams

PACKAGE = Path(foretoken.__file__).parent
PROMPT = "def read_config(path):\n"


@pytest.mark.parametrize(("drafter", "limit"), [("ngram", 40), ("draft_model", 45), ("ngram+draft_model", 48)])
def test_generate_enters_few_files(drafter: str, limit: int) -> None:
    """The limits may only fall: two above what most calls enter, the median of five.

    Measured costs decide which ways a call takes. Files that only the first call of an engine enters do not count.
    Garbage is collected before, since an engine that is collected stores its acceptance.
    """
    llm = LLM(str(PACKAGE.parent / "models" / "tinycode"), speculative_config=drafter)
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    llm.generate(PROMPT, params)
    calls = sorted((entered(lambda: llm.generate(PROMPT, params)) for _ in range(5)), key=len)
    assert len(calls[2]) <= limit, "\n".join(calls[2])


def entered(call: Callable[[], object]) -> list[str]:
    """The package's files in which a call runs a function."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    gc.collect()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(file for file in files if Path(file).is_relative_to(PACKAGE))
