"""Measures what one sequence of a batch costs the others: a wide tree among roots, and prompts that join.

    python -m benchmarks.batches [MODEL] [--dtype bfloat16] [--runner auto]

Every figure is a ratio of medians within one run; nothing else may run meanwhile.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from foretoken import LLM, SamplingParams
from foretoken.core.token_tree import TokenTree, TreeRow
from foretoken.drafters.base import TargetReads

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.drafters.base import Committed, DraftContext, DraftRequest, TargetHandle

_WIDE, _BATCH, _STEPS = 64, 8, 40
_JOINING, _PROMPT_LEN, _NORMAL = 7, 480, 250


class WideTree:
    """Drafts a fixed number of tokens for the first sequence of a batch, and none for the others."""

    reads = TargetReads()

    def __init__(self, num_nodes: int) -> None:
        self.name, self.nodes_by_depth = f"{num_nodes} nodes for one", (1, num_nodes)

    def attach(self, target: TargetHandle) -> None:
        """See `Drafter`."""

    def begin(self, slot: int, request: DraftRequest) -> None:
        """See `Drafter`."""

    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`: a root with wrong children, so that nothing is accepted."""
        first, *others = context.roots
        drafted = self.nodes_by_depth[-1] - 1
        tree = TreeRow([first, *[7] * drafted], [-1, *[0] * drafted])
        return TokenTree.from_rows([tree, *(TreeRow([root], [-1]) for root in others)])

    def commit(self, committed: Committed) -> None:
        """See `Drafter`."""

    def release(self, slot: int) -> None:
        """See `Drafter`."""


def ragged(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Seconds of a pass over 64 nodes of one sequence and 7 roots, and of as many nodes of a single sequence."""

    def seconds(num_nodes: int, batch: int) -> float:
        records: list[StepRecord] = []

        llm = LLM(
            model,
            drafter=partial(WideTree, num_nodes),
            max_num_seqs=batch,
            max_model_len=512,
            on_step=records.append,
            **options,
        )
        params = SamplingParams(temperature=0.0, max_tokens=_STEPS, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5 + row] * 40} for row in range(batch)], params)
        full = [record.seconds.verify for record in records if len(record.sequences) == batch]
        return float(statistics.median(full[len(full) // 2 :]))

    pairs = [(seconds(_WIDE, _BATCH), seconds(_WIDE + _BATCH - 1, 1)) for _ in range(5)]
    batched, single = (statistics.median(column) for column in zip(*pairs, strict=True))
    return {"batch_s": batched, "one_row_s": single, "ratio": statistics.median(b / s for b, s in pairs)}


def joining(model: str, options: dict[str, Any]) -> dict[str, float]:
    """Gaps between tokens of a running sequence while prompts join, in its normal steps.

    The first gap includes taking in the requests; the others are steps alone.
    """
    steps: list[tuple[float, StepRecord]] = []

    def keep(record: StepRecord) -> None:
        steps.append((time.perf_counter(), record))

    llm = LLM(model, max_num_seqs=_BATCH, max_model_len=1024, on_step=keep, enable_prefix_caching=False, **options)
    prompts = [{"prompt_token_ids": [(11 * i + row) % 4000 + 5 for i in range(_PROMPT_LEN)]} for row in range(_JOINING)]
    short = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate(prompts, short)  # warms up
    gc.collect()
    gc.freeze()  # a collection looks at every object of torch and transformers, which takes many steps
    normal, undisturbed, first, others, total = [], [], [], [], []
    for _ in range(5):
        steps.clear()
        long = SamplingParams(temperature=0.0, max_tokens=980, ignore_eos=True)
        running: Any = llm.stream({"prompt_token_ids": [9] * 40}, long)
        for _ in range(_NORMAL):
            next(running)
        begun, began = len(steps), time.perf_counter()
        llm.generate(prompts, short)
        total.append(time.perf_counter() - began)
        running.close()
        times = [at for at, _ in steps]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        normal.append(statistics.median(gaps[20 : begun - 1]))
        undisturbed.append(max(gaps[20 : begun - 1]) / normal[-1])
        first.append(gaps[begun - 1] / normal[-1])
        others.append(sorted(gap / normal[-1] for gap in gaps[begun:]))
    return {
        "normal_s": statistics.median(normal),
        "longest_normal": statistics.median(undisturbed),
        "first": statistics.median(first),
        "typical": statistics.median(map(statistics.median, others)),
        "19_in_20": statistics.median(each[len(each) * 19 // 20] for each in others),
        "longest_but_first": statistics.median(each[-1] for each in others),
        "prompts_done_s": statistics.median(total),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="models/tinycode")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--runner", default="auto")
    given = parser.parse_args()
    options = {"dtype": given.dtype, "runner": given.runner}
    print(json.dumps({"ragged": ragged(given.model, options), "joining": joining(given.model, options)}, indent=1))


if __name__ == "__main__":
    main()
