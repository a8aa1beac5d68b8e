"""What one iteration did, as a value that statistics, benchmarks and controllers all read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.tree_trace import TreeTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Wall-clock seconds of the four stages of one iteration, or their sums."""

    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the four."""
        return self.draft + self.verify + self.accept + self.commit

    def __add__(self, other: StageSeconds) -> StageSeconds:
        return StageSeconds(
            draft=self.draft + other.draft,
            verify=self.verify + other.verify,
            accept=self.accept + other.accept,
            commit=self.commit + other.commit,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """What one iteration did to one sequence.

    Attributes:
        request_id: The sequence's request, unique in the life of an engine.
        num_drafted: Drafted nodes of its tree that were verified, neither root nor probes counted.
        tree_depth: Greatest depth of its tree.
        num_accepted: Drafted tokens that survived verification, 0..tree_depth.
        num_emitted: Tokens added to the output: `num_accepted + 1`, or fewer when the sequence stopped inside the path.
        tokens: These tokens.
        accepted_by: Accepted nodes per drafter name; a node proposed by two drafters counts for both.
        drafted_by: The nodes of `num_drafted` per drafter name, likewise.
        num_proposed: Nodes that the drafters proposed for it, neither roots nor probes counted, before the guard cut
            any, trees were merged, and the controller selected: a node proposed by two drafters counts twice, a tree
            that was dropped not at all. None where no drafter was asked for this sequence, and where a trusted
            drafter's tree has both `host_facts` and `source`: only the device knows then how many are probes.
        accepted_from: Of each of the `num_accepted` tokens, the names of the drafters that proposed it.
        ends_prompt: Whether the pass read the end of its prompt, and its tree was the root alone for that reason.
        trace: What became of every node of its tree; None unless `LLM(trace=True)` asked for it.
    """

    request_id: str
    num_drafted: int
    tree_depth: int
    num_accepted: int
    num_emitted: int
    tokens: Sequence[int] = ()
    accepted_by: dict[str, int]
    drafted_by: dict[str, int] = field(default_factory=dict)
    num_proposed: int | None = None
    accepted_from: Sequence[tuple[str, ...]] = ()
    ends_prompt: bool = False
    trace: TreeTrace | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Declined:
    """Why no draft was asked for: the best one would have brought fewer tokens a second than plain decoding.

    Attributes:
        width: Tokens of a pass over that draft, root included, over the whole batch.
        pass_cost: Its seconds over those of a pass without drafts.
        draft_cost: Seconds of drafting over the same.
        acceptance: Estimated P(the first drafted token is accepted); None while nothing was drafted.
        hit_rate: Share of recent calls in which the drafter had anything to propose.
    """

    width: int
    pass_cost: float
    draft_cost: float
    acceptance: float | None
    hit_rate: float

    def __str__(self) -> str:
        acceptance = "not known yet" if self.acceptance is None else f"{self.acceptance:.2f}"
        hits = f", a draft in {self.hit_rate:.0%} of calls" if self.hit_rate < 0.95 else ""
        return (
            f"a pass of {self.width} tokens costs {self.pass_cost:.1f}x one without drafts, drafting "
            f"{self.draft_cost:.1f}x, acceptance {acceptance}{hits}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDrafter:
    """A drafter that was asked for drafts in an iteration.

    Attributes:
        index: Its place among the engine's drafters, as of the bits of `TokenTree.source`.
        name: Its name.
        depth: Greatest depth of what it proposed for the batch, or no less than that; 0 for nothing.
        seconds: Of its proposal, part of `StageSeconds.draft`.
    """

    index: int
    name: str
    depth: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """What one iteration did to the batch.

    Attributes:
        sequences: One entry a sequence of the batch.
        num_tokens: Nodes that the target verified, roots included.
        num_prompt_tokens: Tokens of prompts that the same pass read; their last ones, after which tokens are generated,
            count as roots.
        seconds: Where the time went.
        asked: The drafters that were asked, in that order.
        draft_error: Why the drafter was ignored in this iteration, or None.
        declined: Why drafting is not expected to pay, and no drafter was asked; None where one was, where there is
            none, where requests or prompts left no room for drafts, and where the iteration measures plain decoding.
        lossy_tv: Mean total-variation distance per tested position of a lossy rule; 0 for lossless rules.
        plain_seconds: Seconds of an iteration without drafts for as many sequences, as the controller measured them;
            None if it has not.
    """

    sequences: Sequence[SequenceStep]
    num_tokens: int
    seconds: StageSeconds
    num_prompt_tokens: int = 0
    asked: Sequence[AskedDrafter] = ()
    draft_error: str | None = None
    declined: Declined | None = None
    lossy_tv: float = 0.0
    plain_seconds: float | None = None

    @property
    def decode_seconds(self) -> StageSeconds:
        """`seconds` without the share of the pass that prompts take by their number of tokens, which is prefill."""
        if not self.num_prompt_tokens:
            return self.seconds
        share = self.num_tokens / (self.num_tokens + self.num_prompt_tokens)
        return replace(self.seconds, verify=self.seconds.verify * share)
