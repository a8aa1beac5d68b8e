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


@pytest.mark.usefixtures("even_clock")
@pytest.mark.parametrize(("drafter", "limit"), [("ngram", 40), ("draft_model", 45), ("ngram+draft_model", 48)])
def test_generate_enters_few_files(drafter: str, limit: int) -> None:
    """The limits may only fall. Files that only the first call of an engine enters do not count.

    The clock decides which ways a call takes, so it is one that no other program slows. Garbage is collected before,
    since an engine that is collected stores its acceptance.
    """
    llm = LLM(str(PACKAGE.parent / "models" / "tinycode"), speculative_config=drafter)
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    llm.generate(PROMPT, params)
    files = entered(lambda: llm.generate(PROMPT, params))
    assert len(files) <= limit, "\n".join(files)


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
