"""What one iteration did, as a value that statistics, benchmarks and controllers all read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class NodeOutcome(StrEnum):
    """What became of a node."""

    ROOT = "root"
    ACCEPTED = "accepted"
    REJECTED = "rejected"  # tested, and another token was written in its place
    UNREACHED = "unreached"  # its parent was not accepted
    ENDED = "ended"  # the text ended at its parent
    PROBE = "probe"  # verified only to read the target's answer there, or below such a node


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTrace:
    """One sequence's tree of one iteration.

    "The target's distribution" is the one that the request decodes from: after processors, and for sampled requests
    after temperature and truncation. Of greedy requests it is that at temperature 1, after processors.

    Attributes:
        rule: The acceptance rule: "greedy", "coupled", "sequential", "block", "lenient" or "typical".
        position: Of the root in the sequence, the prompt counted.
        tokens: N token ids; node 0 is the root, the last token of the text so far.
        parents: N, `parents[i] < i`, -1 of the root.
        depths: N.
        drafters: N, the names of those who proposed the node; none for the root.
        probes: Nodes that were verified only to read the target's answer.
        scores: N log-probabilities that the whole path down to a node is accepted, as its drafter estimated them; None
            where it has no estimate.
        draft_probs: N, the exact probability with which the node's token was drawn under its parent; None where it was
            chosen. None as a whole where all nodes were.
        token_probs: N, the probability of the node's token after its parent in the target's distribution; None for the
            root, and where logits are not finite.
        target_tokens: N, the target's own token after each node. With the rules "greedy" and "coupled" it is the one
            that plain decoding writes there, -1 where none is possible; with the others, which test nodes by chance,
            the most probable one.
        target_probs: N, the probability of `target_tokens` in the target's distribution, None as above.
        path: Accepted nodes in order, as far as they entered the text.
        next_token: The correction or bonus token after the path; None where the text ended before it.
    """

    rule: str
    position: int
    tokens: Sequence[int]
    parents: Sequence[int]
    depths: Sequence[int]
    drafters: Sequence[tuple[str, ...]]
    probes: frozenset[int]
    scores: Sequence[float] | None
    draft_probs: Sequence[float | None] | None
    token_probs: Sequence[float | None]
    target_tokens: Sequence[int]
    target_probs: Sequence[float | None]
    path: Sequence[int]
    next_token: int | None

    @property
    def is_accepted(self) -> list[bool]:
        """N, whether a node is on the accepted path; the root is not counted."""
        accepted = set(self.path)
        return [node in accepted for node in range(len(self.tokens))]

    def outcomes(self) -> list[NodeOutcome]:
        """What became of each of the N nodes."""
        reached, end = {0, *self.path}, [0, *self.path][-1]
        outcomes: list[NodeOutcome] = []
        for node, parent in enumerate(self.parents):
            if not node:
                outcomes.append(NodeOutcome.ROOT)
            elif node in self.probes or outcomes[parent] is NodeOutcome.PROBE:
                outcomes.append(NodeOutcome.PROBE)
            elif node in reached:
                outcomes.append(NodeOutcome.ACCEPTED)
            elif parent not in reached:
                outcomes.append(NodeOutcome.UNREACHED)
            elif parent == end and self.next_token is None:
                outcomes.append(NodeOutcome.ENDED)
            else:
                outcomes.append(NodeOutcome.REJECTED)
        return outcomes

    def written_after(self, node: int) -> int | None:
        """The token of the text after the root or an accepted node; None after others, and where the text ended."""
        nodes = [0, *self.path]
        if node not in nodes:
            return None
        place = nodes.index(node) + 1
        return self.tokens[nodes[place]] if place < len(nodes) else self.next_token


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
