"""Published policies of the speculation length, for studies and as baselines of `Goodput`.

Each policy here chooses one depth for all sequences of a batch, and whole drafts are verified. The stop rules of
`STOP_CONTROLS` decide while a draft is made, see `foretoken.trees.stopping`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken.core.checks import check_number, shown
from foretoken.core.errors import ConfigError, nearest_name_hint
from foretoken.drafting.base import Allotment, Allowance, Fixed
from foretoken.trees.stopping import STOP_CONTROLS

if TYPE_CHECKING:
    from foretoken.core.records import StepRecord
    from foretoken.runner.costs import CostCurve

CONTROLS = ("goodput", "fixed", "heuristic", "smartspec", *STOP_CONTROLS)
BatchTable = tuple[tuple[int, int, int], ...]  # least and most sequences, and the depth; 0 for plain decoding


def check_control(name: object) -> str:
    """Returns the name of a policy; raises ConfigError, with the nearest name, if there is none."""
    if not isinstance(name, str) or name not in CONTROLS:
        raise ConfigError(f"there is no control {shown(name)}. {nearest_name_hint(shown(name), CONTROLS)}")
    return name


THRESHOLD, _USUAL_THRESHOLD = "confidence_threshold", 0.4  # transformers' `assistant_confidence_threshold`


def check_threshold(value: Any, control: str | BatchTable) -> float:
    """Returns the confidence below which drafts end; raises ConfigError if there is one and `control` has no use."""
    if value is None:
        return _USUAL_THRESHOLD
    if control != "confidence":
        raise ConfigError(f"'{THRESHOLD}' needs 'control': 'confidence'. Pass both, or leave it out.")
    check_number(f"'{THRESHOLD}'", value, 0.0, 1.0, low_open=True, error=ConfigError)
    return float(value)


def check_batch_table(value: object) -> BatchTable:
    """Returns vLLM's `num_speculative_tokens_per_batch_size`: [least, most, depth] by rising batch size.

    Raises:
        ConfigError: If the value is no such list, or two ranges overlap.
    """
    rows = value if isinstance(value, list | tuple) else []
    is_table = bool(rows) and all(
        isinstance(row, list | tuple) and len(row) == 3 and all(type(each) is int for each in row) for row in rows
    )
    table = tuple((row[0], row[1], row[2]) for row in rows) if is_table else ()
    ends = [0, *(most for _, most, _ in table)]
    if not table or not all(
        end < least <= most and 0 <= depth <= 64 for end, (least, most, depth) in zip(ends, table, strict=False)
    ):
        raise ConfigError(
            f"'num_speculative_tokens_per_batch_size' is {shown(value)}. Expected [least, most, tokens] for rising "
            "numbers of sequences, as [[1, 64, 3], [65, 128, 1]]."
        )
    return table


class _OneDepth(Fixed):
    """One depth for the whole batch; whole drafts are verified."""

    def depth(self, batch_size: int) -> int:
        """Returns the depth of the next draft; 0 for plain decoding."""
        raise NotImplementedError

    def allot(self, batch_size: int, num_prompt_tokens: int = 0) -> Allotment:
        """Returns the same depth for every sequence, also beside prompts."""
        del num_prompt_tokens
        depth = self.depth(batch_size)
        if not depth:
            return Allotment.nothing(batch_size)
        return Allotment(allowances=[Allowance(depth=depth, nodes=self._max_nodes)] * batch_size)


class ByBatchSize(_OneDepth):
    """vLLM's table of depths by the number of sequences; numbers outside the table decode plainly."""

    def __init__(self, table: BatchTable, max_nodes: int, most_nodes: Sequence[int] | None = None) -> None:
        """Takes a checked table; for the other arguments see `Fixed`."""
        super().__init__(max_nodes, most_nodes)
        self._table = table

    def depth(self, batch_size: int) -> int:
        """Returns the depth of the range that holds the batch size."""
        return next((depth for least, most, depth in self._table if least <= batch_size <= most), 0)


class Heuristic(_OneDepth):
    """The schedule of assisted generation in transformers: two deeper after full acceptance, else one shallower.

    Source: transformers, `generation/candidate_generator.py`, `num_assistant_tokens_schedule="heuristic"`.
    """

    def __init__(self, max_nodes: int, most_nodes: Sequence[int] | None = None) -> None:
        """Starts with five tokens, as transformers did; for the arguments see `Fixed`."""
        super().__init__(max_nodes, most_nodes)
        self._depth = 5

    def depth(self, batch_size: int) -> int:
        """Returns the depth of the next draft, for any batch size."""
        del batch_size
        return self._depth

    def learn_step(self, record: StepRecord) -> None:
        """Learns whether all drafted tokens of all sequences were accepted."""
        drafted = [step for step in record.sequences if step.tree_depth]
        if drafted:
            is_full = all(step.num_accepted == step.tree_depth for step in drafted)
            self._depth = self._depth + 2 if is_full else max(self._depth - 1, 1)


class SmartSpec(_OneDepth):
    """The greatest goodput of the batch, with one acceptance rate and linear costs.

    A draft of k levels is expected to emit (1 - a^(k+1)) / (1 - a) tokens for each of B sequences. The draft takes
    d_0 + d_1 k seconds, the pass c_0 + c_1 B (k + 1), and k = 0 takes c_0 + c_1 B. The costs are fitted once, to what
    was measured at load. The paper profiles drafts of all batch sizes; here those of one sequence are timed, and their
    factor for each batch size is a moving average.

    Source: Liu et al. 2024 (arXiv 2406.14066), section 4: goodput, one length for the batch.
    """

    _RATE = 0.05  # weight of an iteration in moving averages; a choice, the paper names none
    _LONGEST = 4.0  # an interrupted draft counts as so many times the usual one at most; a choice
    _START = 0.7  # acceptance rate before any draft; a choice, the paper names none

    def __init__(
        self,
        cost: CostCurve,
        timed: Sequence[Sequence[tuple[int, float]]],
        nodes_by_depth: Sequence[Sequence[int]],
        max_nodes: int,
    ) -> None:
        """Fits the costs: seconds of passes by tokens, and depth and seconds of each drafter's timed drafts."""
        super().__init__(max_nodes, [nodes[-1] for nodes in nodes_by_depth])
        deepest = max(len(nodes) for nodes in nodes_by_depth)
        self._depths = np.arange(deepest)
        widths, seconds = np.array(cost.points).T
        self._pass = np.polynomial.Polynomial.fit(widths, seconds, 1 if len(widths) > 1 else 0)
        self._draft = np.zeros(deepest)
        for drafts in timed:
            if drafts:
                depths, each = np.array(drafts).T
                line = np.polynomial.Polynomial.fit(depths, each, 1 if len(set(depths)) > 1 else 0)
                self._draft += np.maximum(line(self._depths), 0.0)
        self._draft[0] = 0.0
        self._nodes = np.array(
            [sum(nodes[min(k, len(nodes) - 1)] - 1 for nodes in nodes_by_depth) for k in range(deepest)]
        )
        self._acceptance = self._START
        self._factors: defaultdict[int, float] = defaultdict(lambda: 1.0)  # of a draft's seconds, by batch size

    def depth(self, batch_size: int) -> int:
        """Returns the depth with the greatest goodput."""
        tokens = self._acceptance**self._depths
        seconds = self._draft * self._factors[batch_size] + self._pass(batch_size * (1 + self._nodes))
        return int((tokens.cumsum() / seconds).argmax())

    def learn_step(self, record: StepRecord) -> None:
        """Moves the averages; the acceptance rate is accepted tokens over accepted and first rejected ones."""
        timed = sum(float(self._draft[min(asked.depth, len(self._draft) - 1)]) for asked in record.asked)
        if timed > 0.0:
            usual = self._factors[len(record.sequences)]
            found = min(sum(asked.seconds for asked in record.asked) / timed, self._LONGEST * usual)
            self._factors[len(record.sequences)] = usual + self._RATE * (found - usual)
        accepted = sum(step.num_accepted for step in record.sequences)
        rejected = sum(0 <= step.num_accepted < step.tree_depth for step in record.sequences)
        if accepted + rejected:
            rate = min(accepted / (accepted + rejected), 0.99)
            self._acceptance += self._RATE * (rate - self._acceptance)
