"""Records of one iteration, for statistics, benchmarks and controllers, and the sums that make a request's metrics."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from enum import StrEnum


class NodeOutcome(StrEnum):
    """The result of verification for a node."""

    ROOT = "root"
    ACCEPTED = "accepted"
    REJECTED = "rejected"  # tested; another token follows its parent
    UNREACHED = "unreached"  # its parent was not accepted
    ENDED = "ended"  # the text ended at its parent
    PROBE = "probe"  # verified only to read the target's answer, or below such a node


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeTrace:
    """One sequence's tree of one iteration.

    "The target's distribution" is the distribution that the request decodes from: after processors, and for sampled
    requests after temperature and truncation. For greedy requests the temperature is 1.

    Attributes:
        rule: The acceptance rule: "greedy", "coupled", "sequential", "block", "traversal", "lenient", "typical"
            or "synthetic".
        position: Position of the root in the sequence, prompt included.
        tokens: N token ids; node 0 is the root, the last token of the text so far.
        parents: N, `parents[i] < i`, -1 for the root.
        drafters: N, names of the drafters that proposed the node; empty for the root.
        probes: Nodes that were verified only to read the target's answer.
        scores: N, the drafter's estimate of the log-probability that the whole path down to the node is accepted; None
            without estimates.
        draft_probs: N, the exact draft probability of the node's token; None for nodes that were chosen, and None as a
            whole if all were chosen.
        token_probs: N, the probability of the node's token after its parent in the target's distribution; None for the
            root, and if logits are not finite.
        target_tokens: N, the target's own token after each node. With the rules "greedy" and "coupled" plain decoding
            writes this token, -1 if none is possible. Other rules test nodes by chance: then the most probable token.
        target_probs: N, the probability of `target_tokens` in the target's distribution, None if not finite.
        path: Accepted nodes in order that entered the text.
        next_token: The correction or bonus token after the path; None if the text ended before it.
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

    def outcomes(self) -> list[NodeOutcome]:
        """Returns the outcome of each of the N nodes."""
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
        """Returns the text's token after the root or an accepted node; None for other nodes and at the text's end."""
        nodes = [0, *self.path]
        if node not in nodes:
            return None
        following = nodes.index(node) + 1
        return self.tokens[nodes[following]] if following < len(nodes) else self.next_token


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSeconds:
    """Wall-clock seconds of the four stages of one iteration, or their sums."""

    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        """Sum of the four stages."""
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
    """Record of one iteration for one sequence.

    Attributes:
        request_id: Id of the sequence's request, unique within an engine.
        num_drafted: Drafted nodes of its tree that were verified, without root and probes.
        tree_depth: Greatest depth of its tree.
        num_accepted: Drafted tokens that were accepted, 0..tree_depth.
        num_emitted: Tokens added to the output: `num_accepted + 1`, or fewer when the sequence stopped inside the path.
        tokens: The tokens added to the output.
        accepted_by: Accepted nodes by drafter name; a node that two drafters proposed counts for both.
        drafted_by: The nodes of `num_drafted` by drafter name; a node that two drafters proposed counts for both.
        num_proposed: Nodes that drafters proposed, without roots and probes, before trees were cut, merged or selected.
            A node that two drafters proposed counts twice, a dropped tree not at all. None if no drafter was asked for
            this sequence, or if a trusted drafter's tree has `host_facts` and `source`: only the device knows its
            probes.
        accepted_from: For each of the `num_accepted` tokens the names of the drafters that proposed it.
        ends_prompt: Whether the pass read the end of its prompt; its tree was the root alone for that reason.
        trace: Trace of its tree; None without `LLM(trace=True)`.
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
    """Why no draft was requested: the best draft promised fewer tokens per second than plain decoding.

    Attributes:
        width: Tokens of a pass over that draft, root included, over the whole batch.
        pass_cost: Seconds of that pass divided by those of a pass without drafts.
        draft_cost: Seconds of drafting divided by those of a pass without drafts.
        acceptance: Estimated P(the first drafted token is accepted); None before the first draft.
        hit_rate: Share of recent calls in which the drafter proposed anything.
        reading_cost: Seconds in which the drafter would read what it missed, divided by those of such a pass.
    """

    width: int
    pass_cost: float
    draft_cost: float
    acceptance: float | None
    hit_rate: float
    reading_cost: float = 0.0

    def __str__(self) -> str:
        acceptance = "not known yet" if self.acceptance is None else f"{self.acceptance:.2f}"
        reading = f", reading the text first {self.reading_cost:.0f}x" if self.reading_cost >= 1 else ""
        hits = f", a draft in {self.hit_rate:.0%} of calls" if self.hit_rate < 0.95 else ""
        return (
            f"a pass of {self.width} tokens costs {self.pass_cost:.1f}x one without drafts, drafting "
            f"{self.draft_cost:.1f}x, acceptance {acceptance}{hits}{reading}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedDrafter:
    """A drafter that was asked for drafts in an iteration.

    Attributes:
        index: Index among the engine's drafters, as in the bits of `TokenTree.source`.
        depth: Greatest depth of its proposals for the batch, or an upper bound; 0 without proposals.
        seconds: Time of its proposal, part of `StageSeconds.draft`.
        num_missed: Tokens of all sequences that were committed while it was not asked; a whole prompt at first. A
            drafter with a KV cache of its own reads them before it drafts.
    """

    index: int
    name: str
    depth: int
    seconds: float
    num_missed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """Record of one iteration for the batch.

    Attributes:
        sequences: One entry for each sequence of the batch.
        num_tokens: Nodes that the target verified, roots included.
        num_prompt_tokens: Prompt tokens that the same pass read, without the last token of a prompt, which is a root.
        asked: The drafters that were asked, in that order.
        draft_error: Why a drafter was ignored in this iteration, or None.
        declined: Why the controller chose not to draft. None if a drafter was asked, without drafters, without room for
            drafts, and if the iteration measures plain decoding.
        lossy_tv: Mean total-variation distance per tested position of a lossy rule; 0 for lossless rules, NaN where a
            lossy rule does not know it.
        is_synthetic: Whether the engine accepts as many tokens as given rates say, without comparing tokens.
        plain_seconds: Measured seconds of an iteration without drafts for as many sequences; None before a measurement.
    """

    sequences: Sequence[SequenceStep]
    num_tokens: int
    seconds: StageSeconds
    num_prompt_tokens: int = 0
    asked: Sequence[AskedDrafter] = ()
    draft_error: str | None = None
    declined: Declined | None = None
    lossy_tv: float = 0.0
    is_synthetic: bool = False
    plain_seconds: float | None = None

    @property
    def decode_seconds(self) -> StageSeconds:
        """`seconds` without prefill: the prompt tokens' share of the pass, by number of tokens."""
        if not self.num_prompt_tokens:
            return self.seconds
        share = self.num_tokens / (self.num_tokens + self.num_prompt_tokens)
        return replace(self.seconds, verify=self.seconds.verify * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterShare:
    """Counts of one drafter over some passes.

    Attributes:
        num_asked: Passes before which it was asked for a draft.
        num_drafted: Its verified nodes; a node that two drafters proposed counts for both.
        num_accepted: Accepted tokens among these.
        seconds: Wall-clock seconds of its proposals.
    """

    num_asked: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    seconds: float = 0.0

    def __add__(self, other: DrafterShare) -> DrafterShare:
        return DrafterShare(
            num_asked=self.num_asked + other.num_asked,
            num_drafted=self.num_drafted + other.num_drafted,
            num_accepted=self.num_accepted + other.num_accepted,
            seconds=self.seconds + other.seconds,
        )

    def __str__(self) -> str:
        return f"asked in {self.num_asked} passes, {self.num_accepted} tokens accepted, {self.seconds:.2f} s"


class DrafterShares(dict[str, DrafterShare]):
    """Shares by drafter name, which can be added."""

    @classmethod
    def of_step(cls, step: SequenceStep, record: StepRecord) -> DrafterShares:
        """Returns the shares of one sequence in an iteration; drafters with the same name count together."""
        seconds: defaultdict[str, float] = defaultdict(float)
        for asked in record.asked:
            seconds[asked.name] += asked.seconds
        shares = cls()
        for name, each in seconds.items():
            drafted, accepted = step.drafted_by.get(name, 0), step.accepted_by.get(name, 0)
            shares[name] = DrafterShare(num_asked=1, num_drafted=drafted, num_accepted=accepted, seconds=each)
        return shares

    def __add__(self, other: DrafterShares) -> DrafterShares:
        total = DrafterShares(self)
        for name, share in other.items():
            total[name] = total[name] + share if name in total else share
        return total


@dataclass(slots=True, kw_only=True)
class GenerationMetrics:
    """Counts and seconds of one request, or the sum over several.

    `steps` counts target passes after prefill. The last pass of prefill gives the first token, unless nothing was left
    to read or the prompt was scored. `mean_acceptance_length` (tau) counts the correction or bonus token: the mean
    number of tokens per such pass, 1.0 for plain decoding.

    Attributes:
        steps: Target passes after prefill in which the sequence took part.
        num_prefill_emitted: Output tokens that prefill gave: the first one, and one more after every preemption.
        drafted_at_depth: Passes with a tree that reached depth d, by d (1-based).
        accepted_at_depth: Passes that accepted at least d drafted tokens, by d (1-based).
        accepted_by: Accepted tokens by drafter name.
        by_drafter: Calls, nodes, accepted tokens and seconds of each drafter.
        draft_errors: Passes with a draft that was dropped because the drafter failed.
        num_declined: Passes for which the controller chose not to draft.
        seconds: Wall-clock seconds in draft / verify / accept / commit of these passes, without the prompt tokens'
            share of verify.
        prefill_seconds: Seconds of prefill: the prompt tokens' share of each pass, and the whole of a pass without
            decoding sequences in which prompts ended.
        num_prefix_queries: Prompt tokens that were looked up in the prefix cache.
        num_cached_tokens: Prompt tokens that were found there and not read again.
        num_prefix_lost: Prompt tokens that were found there and read again, because the state of recurrent layers
            behind them was not kept.
        num_preemptions: Number of preemptions; after each, tokens outside cached prefixes were read again.
        lossy_tv: Sum of `StepRecord.lossy_tv`; 0 for lossless rules, NaN where a lossy rule does not know it.
        num_synthetic: Passes with synthetic acceptance, see `StepRecord.is_synthetic`.
        compared_seconds: Seconds of passes without prompt tokens, if the engine had measured plain decoding by then.
        plain_seconds: Seconds that plain decoding takes for the tokens of these passes, by that measurement.
    """

    steps: int = 0
    num_emitted: int = 0
    num_prefill_emitted: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    drafted_at_depth: Counter[int] = field(default_factory=Counter)
    accepted_at_depth: Counter[int] = field(default_factory=Counter)
    accepted_by: Counter[str] = field(default_factory=Counter)
    by_drafter: DrafterShares = field(default_factory=DrafterShares)
    draft_errors: int = 0
    num_declined: int = 0
    seconds: StageSeconds = field(default_factory=StageSeconds)
    prefill_seconds: float = 0.0
    num_prefix_queries: int = 0
    num_cached_tokens: int = 0
    num_prefix_lost: int = 0
    num_preemptions: int = 0
    lossy_tv: float = 0.0
    num_synthetic: int = 0
    compared_seconds: float = 0.0
    plain_seconds: float = 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per target pass after prefill (tau), the correction or bonus token included."""
        return (self.num_emitted - self.num_prefill_emitted) / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of target passes after prefill, for each sequence; 0 without such passes."""
        seconds = self.seconds.total
        return (self.num_emitted - self.num_prefill_emitted) / seconds if seconds else 0.0

    @property
    def speedup(self) -> float | None:
        """Speed divided by that of plain decoding, over the passes of `compared_seconds`; None without such passes."""
        return self.plain_seconds / self.compared_seconds if self.compared_seconds else None

    @property
    def acceptance_by_depth(self) -> list[float]:
        """P(accepted at depth d | the tree reached depth d), from depth 1."""
        return [self.accepted_at_depth[d] / n for d, n in sorted(self.drafted_at_depth.items())]

    @property
    def tree_nodes(self) -> float:
        """Drafted nodes per target pass."""
        return self.num_drafted / self.steps if self.steps else 0.0

    @property
    def tree_utilisation(self) -> float:
        """Share of the drafted nodes that was accepted."""
        return self.num_accepted / self.num_drafted if self.num_drafted else 0.0

    def add_step(self, step: SequenceStep, record: StepRecord) -> None:
        """Adds one iteration. Changes this object."""
        self.add_sequence(step)
        if step.ends_prompt:  # drafts of this pass belong to other sequences
            if all(each.ends_prompt for each in record.sequences):
                self.prefill_seconds += record.decode_seconds.total / len(record.sequences)
            return
        self.seconds += record.decode_seconds
        self.lossy_tv += record.lossy_tv
        self.num_synthetic += record.is_synthetic
        if record.asked:
            self.by_drafter += DrafterShares.of_step(step, record)
        self.draft_errors += record.draft_error is not None
        self.num_declined += record.declined is not None
        if record.plain_seconds is not None and not record.num_prompt_tokens:
            self.compared_seconds += record.seconds.total
            self.plain_seconds += step.num_emitted * record.plain_seconds

    def add_sequence(self, step: SequenceStep) -> None:
        """Adds one sequence's part of an iteration, without the time. Changes this object."""
        self.num_emitted += step.num_emitted
        if step.ends_prompt:
            self.num_prefill_emitted += step.num_emitted
            return
        self.steps += 1
        self.num_drafted += step.num_drafted
        self.num_accepted += step.num_accepted
        if step.tree_depth:
            self.drafted_at_depth.update(range(1, step.tree_depth + 1))
            self.accepted_at_depth.update(range(1, step.num_accepted + 1))
            self.accepted_by.update(step.accepted_by)

    @classmethod
    def total(cls, parts: Iterable[GenerationMetrics]) -> GenerationMetrics:
        """Returns the sum over several requests; seconds of shared passes count once for each request."""
        total = cls()
        for part in parts:
            for field_ in fields(cls):
                setattr(total, field_.name, getattr(total, field_.name) + getattr(part, field_.name))
        return total

    def as_dict(self) -> dict[str, object]:
        """Returns a JSON-ready dictionary with the names of the attributes."""
        return {
            "steps": self.steps,
            "num_emitted": self.num_emitted,
            "num_prefill_emitted": self.num_prefill_emitted,
            "num_drafted": self.num_drafted,
            "num_accepted": self.num_accepted,
            "mean_acceptance_length": self.mean_acceptance_length,
            "tree_nodes": self.tree_nodes,
            "tree_utilisation": self.tree_utilisation,
            "acceptance_by_depth": self.acceptance_by_depth,
            "drafted_at_depth": [count for _, count in sorted(self.drafted_at_depth.items())],
            "accepted_at_depth": [self.accepted_at_depth[depth] for depth in sorted(self.drafted_at_depth)],
            "accepted_by": dict(self.accepted_by),
            "by_drafter": {name: asdict(share) for name, share in self.by_drafter.items()},
            "draft_errors": self.draft_errors,
            "num_declined": self.num_declined,
            "draft_seconds": self.seconds.draft,
            "verify_seconds": self.seconds.verify,
            "accept_seconds": self.seconds.accept,
            "commit_seconds": self.seconds.commit,
            "prefill_seconds": self.prefill_seconds,
            "num_prefix_queries": self.num_prefix_queries,
            "num_cached_tokens": self.num_cached_tokens,
            "num_prefix_lost": self.num_prefix_lost,
            "num_preemptions": self.num_preemptions,
            "lossy_tv": None if math.isnan(self.lossy_tv) else self.lossy_tv,
            "num_synthetic": self.num_synthetic,
        }
