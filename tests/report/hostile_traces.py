"""Traces of made-up generations whose tokens are as hostile as text can be."""

from pathlib import Path
from typing import Any

from foretoken.core.records import SequenceStep, StageSeconds, StepRecord, TreeTrace
from foretoken.report.trace_file import TraceRecorder
from foretoken.text.codec import Codec

TEXTS = [
    "</script><script>document.title='broken'</script>",
    "<img src=x onerror=\"document.title='broken'\">",
    "]]><!--<svg onload=document.title='broken'>",
    "\x1b[31m\x00\x07",
    "\u202eesrever\u2066",
    "{{ 7 * 7 }}{% raw %}",
    "\u2028\u2029\ud83d\ude00"[:2] + "é漢\n\t",
    "&amp;\"'`",
    "plain",
]


class Tokenizer:
    """Token i is the i-th of the texts."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(TEXTS[token] for token in tokens)


def step_record(number: int, width: int = 3, depth: int = 1, num_proposed: int | None = None) -> StepRecord:
    """Iteration `number`: node 1 is accepted, the others are not; every text comes up in turn.

    Args:
        number: Of the iteration.
        width: Nodes with the root, all of them its children.
        depth: Of the tree: below the last of these is a chain.
        num_proposed: How many nodes drafters proposed, where that is known.
    """
    count = width + depth - 1
    tokens = [(number + node) % len(TEXTS) for node in range(count)]
    own = (number + width) % len(TEXTS)
    trace = TreeTrace(
        rule="greedy",
        position=number,
        tokens=tokens,
        parents=[-1, *[0] * (width - 1), *range(width - 1, count - 1)],
        depths=[0, *[1] * (width - 1), *range(2, depth + 1)],
        drafters=[(), *[("<b>drafter</b>",)] * (count - 1)],
        probes=frozenset(),
        scores=[0.0, *[-0.5] * (count - 1)],
        draft_probs=None,
        token_probs=[None, 0.5, *[0.02] * (count - 2)],
        target_tokens=[tokens[1], *[own] * (count - 1)],
        target_probs=[0.5] * count,
        path=[1],
        next_token=own,
    )
    step = SequenceStep(
        request_id="0", num_drafted=count - 1, tree_depth=depth, num_accepted=1, num_emitted=2, tokens=[tokens[1], own],
        accepted_by={"<b>drafter</b>": 1}, accepted_from=[("<b>drafter</b>",)], trace=trace, num_proposed=num_proposed,
    )  # fmt: skip
    seconds = StageSeconds(draft=0.001, verify=0.004, accept=0.0005, commit=0.0005)
    return StepRecord(sequences=[step], num_tokens=width, seconds=seconds)


def write_hostile_trace(path: Path, num_iterations: int = 12, **sizes: Any) -> None:
    """A whole file; sizes: see `step_record`."""
    recorder = TraceRecorder(Codec(Tokenizer(), len(TEXTS)), [0])
    for number in range(num_iterations):
        recorder.add_step(step_record(number, **sizes))
    conditions = {"model": TEXTS[0], TEXTS[1]: TEXTS[4]}
    recorder.write_file(path, conditions=conditions, prompt=TEXTS[0], text=None, finish_reason="length")
