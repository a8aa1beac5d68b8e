"""`--threads` beyond what a machine can have."""

from __future__ import annotations

from command_line import MODEL, run


def test_absurd_numbers_of_threads_are_refused() -> None:
    done = run("generate", MODEL, "--threads", "100000", "--prompt", "x", "--max-tokens", "1")
    assert done.returncode == 2
    assert done.stderr.startswith("error: threads is 100000. Expected 1..")
