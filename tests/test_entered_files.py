"""How many files of the package one `generate` enters: as many as a reader opens to follow a request."""

import gc
import sys
from pathlib import Path
from types import FrameType

import pytest

import foretoken
from foretoken import LLM, SamplingParams

PACKAGE = Path(foretoken.__file__).parent
PROMPT = "def read_config(path):\n"


@pytest.mark.parametrize(("drafter", "limit"), [("ngram", 41), ("draft_model", 47), ("ngram+draft_model", 48)])
def test_generate_enters_few_files(drafter: str, limit: int) -> None:
    """The limits may only fall: two above the most of 120 calls, since measured costs decide which ways a call takes.

    Files that only the first call of an engine enters do not count. Garbage is collected before, since an engine that
    is collected stores its acceptance.
    """
    llm = LLM(str(PACKAGE.parent / "models" / "tinycode"), speculative_config=drafter)
    params = SamplingParams(temperature=0, max_tokens=96, ignore_eos=True)
    llm.generate(PROMPT, params)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.add(frame.f_code.co_filename)

    gc.collect()
    sys.setprofile(note)
    try:
        for _ in range(3):
            llm.generate(PROMPT, params)
    finally:
        sys.setprofile(None)
    entered = sorted(file for file in files if Path(file).is_relative_to(PACKAGE))
    assert len(entered) <= limit, "\n".join(entered)
