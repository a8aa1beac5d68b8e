"""The decoding loop: prefill → [ propose → verify → accept → commit ]* → finish, over a ragged batch.

One iteration makes one target pass over all running sequences and one transfer to the host, the packed outcome of
acceptance; before it, the guard asks once about a tree that nobody vouches for. Sequences join when a slot is free and
leave when they stop; nobody waits for anybody.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.core.records import SequenceStep, StepRecord
from foretoken.core.results import TokenLogprob
from foretoken.drafters.base import Committed, DraftContext, Drafter
from foretoken.engine.draft_guard import DraftGuard
from foretoken.engine.stage_clock import StageClock
from foretoken.sampling.batch import SamplingBatch
from foretoken.sampling.history import History, HistoryTable
from foretoken.sampling.node_scores import NodeScores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from foretoken.acceptance.decisions import Acceptance
    from foretoken.core.token_tree import TokenTree
    from foretoken.engine.budget import DepthBudget
    from foretoken.engine.sequence import Sequence
    from foretoken.target.decoder import PassOutput
    from foretoken.target.runner import Runner

_UNBOUNDED = 1 << 20


class Outcome(NamedTuple):
    """What acceptance decided for one sequence, on the host.

    Attributes:
        path: Accepted nodes in order.
        tokens: Accepted tokens and the correction or bonus token.
        num_sound: Leading tokens that rest on target rows free of NaN and infinity.
        num_drafted: Drafted nodes of its tree.
        tree_depth: Greatest depth of its tree.
    """

    path: list[int]
    tokens: list[int]
    num_sound: int
    num_drafted: int
    tree_depth: int


class Engine:
    """Runs sequences on a target with a drafter.

    Attributes:
        target: The runner.
        policy: How sampled requests are verified.
    """

    def __init__(
        self,
        target: Runner,
        drafter: Drafter | None,
        *,
        policy: AcceptancePolicy,
        max_num_seqs: int,
        budget: DepthBudget | None = None,
        on_step: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """An idle engine.

        Args:
            target: With at least `max_num_seqs` slots.
            drafter: None for plain decoding.
            policy: How sampled requests are verified.
            max_num_seqs: Sequences decoded at once.
            budget: Chooses the depth of drafts; None leaves it to the drafter.
            on_step: Called with every iteration's record.
        """
        self.target, self.policy = target, policy
        self._guard = DraftGuard(
            drafter, vocab_size=target.vocab_size, max_nodes=target.max_nodes, device=target.device
        )
        self._budget, self._on_step = budget, on_step
        self._history = HistoryTable(max_num_seqs, target.vocab_size, target.device)
        self._free_slots = list(range(max_num_seqs))[::-1]
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return bool(self._waiting or self._running)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._waiting.append(sequence)

    def abort(self, sequences: Iterable[Sequence] | None = None) -> None:
        """Ends sequences that are waiting or running, all of them when None, and frees their slots."""
        for sequence in [*self._waiting, *self._running] if sequences is None else sequences:
            if sequence.finish_reason is None:
                sequence.fail("abort")
        self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        self._leave()

    def step(self) -> list[Sequence]:
        """One iteration: a chunk of prefill for each joining sequence, one verified tree for each running one.

        Returns:
            The sequences that emitted tokens or ended.
        """
        self._join()
        for sequence in self._running:
            self._prefill_chunk(sequence)
        ready = [s for s in self._running if s.num_cached == len(s.tokens) - 1]
        if ready:
            record = self._decode(ready)
            if self._budget is not None:
                self._budget.learn(record)
            if self._on_step is not None:
                self._on_step(record)
        self._leave()
        return ready

    def _decode(self, sequences: list[Sequence]) -> StepRecord:
        """Propose, verify, accept, commit for sequences whose prompt is in the cache."""
        clock = StageClock(self.target.device)
        batch = self._sampling_batch(sequences)
        draft = self._guard.propose(self._draft_context(sequences, batch))
        tree = draft.tree
        clock.mark()
        slots, lengths = [_slot(s) for s in sequences], [len(s.tokens) - 1 for s in sequences]
        verified = self.target.verify(slots, lengths, tree)
        clock.mark()
        scores = NodeScores(tree=tree, logits=verified.logits, batch=batch, history=self._histories(sequences, batch))
        rules = [
            self.policy.rule_for(
                tree, is_greedy=s.params.is_greedy, is_seeded=s.is_seeded, row=row,
                is_plain=s.params.is_plain and scores.has_kernels,
            )
            for row, s in enumerate(sequences)
        ]  # fmt: skip
        acceptance = accept(scores, rules, self.policy, torch.tensor(lengths, device=tree.tokens.device))
        outcomes = _to_host(tree, verified.logits, acceptance)
        clock.mark()
        self.target.commit(slots, lengths, acceptance.path, acceptance.num_accepted)
        self._add_logprobs(sequences, outcomes, verified.logits)
        emitted = [self._commit(*pair) for pair in zip(sequences, outcomes, strict=True)]
        self._guard.commit(_committed(slots, lengths, outcomes, verified))
        clock.mark()
        record = StepRecord(
            sequences=[
                _sequence_step(self._guard.name, *each) for each in zip(sequences, outcomes, emitted, strict=True)
            ],
            width=tree.width,
            seconds=clock.seconds(),
            draft_error=draft.error,
            lossy_tv=float(acceptance.lossy_tv.mean()) if self.policy.is_lossy else 0.0,
        )  # fmt: skip
        for sequence, step in zip(sequences, record.sequences, strict=True):
            sequence.metrics.add_step(step, record)
        return record

    def _join(self) -> None:
        """Gives free slots to waiting sequences."""
        while self._waiting and self._free_slots:
            sequence = self._waiting.popleft()
            sequence.slot = self._free_slots.pop()
            self._history.start(sequence.slot, sequence.tokens, needs_counts=sequence.params.has_penalties)
            self._running.append(sequence)

    def _leave(self) -> None:
        """Frees the slots of sequences that are over."""
        for sequence in self._running:
            if sequence.finish_reason is not None and sequence.slot is not None:
                self._guard.release(sequence.slot)
                self._free_slots.append(sequence.slot)
                sequence.slot = None
        self._running = [s for s in self._running if s.finish_reason is None]

    def _prefill_chunk(self, sequence: Sequence) -> None:
        """Feeds the next chunk of a prompt, all of it but the root."""
        start, end = sequence.num_cached, len(sequence.tokens) - 1
        if start >= end:
            return
        begin = time.perf_counter()
        chunk = sequence.tokens[start : min(end, start + self.target.prefill_chunk)]
        features = self.target.prefill(_slot(sequence), chunk, start)
        self._guard.commit(Committed(slots=[_slot(sequence)], starts=[start], lengths=[len(chunk)], features=features))
        sequence.num_cached += len(chunk)
        sequence.metrics.prefill_seconds += time.perf_counter() - begin

    def _draft_context(self, sequences: list[Sequence], batch: SamplingBatch) -> DraftContext:
        """What the drafter is told. A pass always emits one token of the target's own, so drafts leave room for it."""
        limit = _UNBOUNDED if self._budget is None else self._budget.depth(len(sequences))
        return DraftContext(
            slots=[_slot(s) for s in sequences],
            tokens=[s.tokens for s in sequences],
            max_depth=[min(s.remaining - 1, limit) for s in sequences],
            sampling=batch,
            is_coupled=[self.policy.is_coupled(is_seeded=s.is_seeded) for s in sequences],
        )

    def _sampling_batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Parameters as tensors, built anew only when the batch changes."""
        if self._batch is None or self._batch[0] != sequences:
            requests = [s.sampling for s in sequences]
            self._batch = (list(sequences), SamplingBatch.build(requests, self.target.vocab_size, self.target.device))
        return self._batch[1]

    def _histories(self, sequences: list[Sequence], batch: SamplingBatch) -> History | None:
        """What processors read, or None when none is in use."""
        if not batch.has_processors:
            return None
        return self._history.view(
            [_slot(s) for s in sequences], [s.tokens for s in sequences], [s.num_prompt for s in sequences],
            batch.tail_len,
        )  # fmt: skip

    def _commit(self, sequence: Sequence, outcome: Outcome) -> int:
        """Emits tokens; gives the number of tokens kept."""
        kept = sequence.emit(outcome.tokens[: outcome.num_sound])
        self._history.append(_slot(sequence), outcome.tokens[:kept])
        if sequence.finish_reason is None and outcome.num_sound < len(outcome.tokens):
            sequence.fail("error")
        if sequence.finish_reason is None:
            sequence.num_cached = len(sequence.tokens) - 1
        return kept

    def _add_logprobs(self, sequences: list[Sequence], outcomes: list[Outcome], logits: Tensor) -> None:
        """Records log-probabilities for requests that asked: one more transfer to the host."""
        for row, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
            count = sequence.params.logprobs
            if count is None or not outcome.num_sound:
                continue
            nodes = torch.tensor([0, *outcome.path][: outcome.num_sound], device=logits.device)
            tokens = outcome.tokens[: outcome.num_sound]
            log_probs = logits[row, nodes].log_softmax(1)
            top = log_probs.topk(min(count, self.target.vocab_size), dim=1)
            chosen = log_probs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))[:, 0]
            for token, value, ids, values in zip(
                tokens, chosen.tolist(), top.indices.tolist(), top.values.tolist(), strict=True
            ):
                sequence.logprobs.append(
                    TokenLogprob(token_id=token, logprob=value, top=dict(zip(ids, values, strict=True)))
                )


def _slot(sequence: Sequence) -> int:
    """The slot of a running sequence."""
    assert sequence.slot is not None, "only running sequences are decoded"
    return sequence.slot


def _to_host(tree: TokenTree, logits: Tensor, acceptance: Acceptance) -> list[Outcome]:
    """Everything the host needs of an iteration in one transfer.

    Args:
        tree: What was verified.
        logits: (B, N, V), to tell whether the rows on the path are finite.
        acceptance: What survived.
    """
    path, nodes = acceptance.path, acceptance.path.clamp_min(0)
    is_finite = torch.isfinite(logits.amax(2))
    packed = torch.cat([
        acceptance.num_accepted.unsqueeze(1), acceptance.next_token.unsqueeze(1), tree.num_nodes.unsqueeze(1),
        tree.depths.amax(1, keepdim=True), path, tree.tokens.gather(1, nodes), is_finite[:, :1],
        is_finite.gather(1, nodes),
    ], dim=1)  # fmt: skip
    outcomes = []
    depth = path.shape[1]
    for row in packed.tolist():  # the synchronisation
        accepted, next_token, num_nodes, tree_depth = row[:4]
        on_path, tokens, is_sound = row[4 : 4 + depth], row[4 + depth : 4 + 2 * depth], row[4 + 2 * depth :]
        # One token rests on the root's row and on each row of the path; the first bad row ends plain decoding.
        outcomes.append(
            Outcome(
                path=on_path[:accepted],
                tokens=[*tokens[:accepted], next_token],
                num_sound=[*is_sound[: accepted + 1], 0].index(0),
                num_drafted=num_nodes - 1,
                tree_depth=tree_depth,
            )
        )
    return outcomes


def _committed(slots: list[int], lengths: list[int], outcomes: list[Outcome], verified: PassOutput) -> Committed:
    """What the drafter learns: root and path of every sequence entered the KV, with their features."""
    counts = [len(outcome.path) + 1 for outcome in outcomes]
    features = None
    if verified.features is not None:
        longest = max(counts)
        if longest == 1:
            return Committed(slots=slots, starts=lengths, lengths=counts, features=verified.features[:, :1])
        nodes = torch.tensor(
            [[0, *o.path] + [0] * (longest - len(o.path) - 1) for o in outcomes], device=verified.features.device
        )
        features = verified.features[torch.arange(len(outcomes), device=nodes.device).unsqueeze(1), nodes]
    return Committed(slots=slots, starts=lengths, lengths=counts, features=features)


def _sequence_step(drafter: str, sequence: Sequence, outcome: Outcome, emitted: int) -> SequenceStep:
    """The record of one sequence's iteration."""
    accepted = min(len(outcome.path), emitted)
    return SequenceStep(
        request_id=sequence.request_id,
        num_drafted=outcome.num_drafted,
        tree_depth=outcome.tree_depth,
        num_accepted=accepted,
        num_emitted=emitted,
        accepted_by={drafter: accepted} if accepted else {},
    )
