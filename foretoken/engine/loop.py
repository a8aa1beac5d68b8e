"""The decoding loop: prefill → [ propose → verify → accept → commit ]* → finish, over a ragged batch.

An iteration makes one target pass over all running sequences, including prompts that are still being read. One transfer
brings the outcome of acceptance to the host; a tree without `HostFacts` costs the guard one more. Sequences join when a
slot is free and leave when they stop. An iteration changes nothing before it commits, so the engine decodes a batch
that fails again, one sequence at a time. Only a sequence that fails alone ends.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.acceptance.rules import walk_chosen
from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.acceptance.synthetic import walk_synthetic
from foretoken.core.backend import (
    StageClock,
    has_triton_kernels,
    integers_on,
    is_out_of_memory,
    reads_are_free,
    restored_torch_state,
)
from foretoken.core.errors import ModelError, described
from foretoken.core.records import StepRecord
from foretoken.core.token_tree import MAX_NODES, TokenTree
from foretoken.decoder.cuda_graphs import WARM_UPS
from foretoken.drafters.base import DraftContext
from foretoken.drafting.drafting import Draft
from foretoken.engine.prefill import Chunk, Prefill
from foretoken.engine.scheduler import EngineCounts, Scheduler
from foretoken.engine.sequence import MemoryPressure, SamplingState, contained, fail, slot_of
from foretoken.engine.tracing import traced
from foretoken.engine.verification import (
    Outcome,
    VerifiedBatch,
    greatest_on_host,
    logits_of,
    newly_committed,
    outcomes_of_paths,
    outcomes_on_host,
    sequence_step,
    token_choice,
    token_scores,
    verification,
)
from foretoken.grammars.drafts import GrammarBounds
from foretoken.sampling.node_scores import NodeScores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from foretoken.acceptance.synthetic import LengthSchedule
    from foretoken.core.records import SequenceStep, StageSeconds, TreeTrace
    from foretoken.core.results import Metric
    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Drafting
    from foretoken.engine.scheduler import SlotPool
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.verification import Verification
    from foretoken.runner.runner import Runner
    from foretoken.sampling.batch import SamplingBatch

NO_TOKEN = "no token is possible: the target's logits, or what the request's parameters make of them, are not finite."
# Prompt tokens of one pass with all logits. Other requests wait for the pass: with 512 tokens they took up to 0.74 s,
# see "A server under load" in benchmarks/RESULTS.md. Four passes of 128 tokens take as long as one of 512.
_MOST_SCORED_TOKENS = 128
_log = logging.getLogger(__name__)


class Engine:
    """Runs sequences on a target with drafters; `counts` are those of all iterations so far."""

    def __init__(
        self,
        target: Runner,
        drafting: Drafting,
        *,
        policy: AcceptancePolicy,
        slots: SlotPool,
        on_step: Callable[[StepRecord], None] | None = None,
        impossible_ids: Tensor | None = None,
        max_num_batched_tokens: int | None = None,
        has_traces: bool = False,
    ) -> None:
        """Makes an idle engine.

        Args:
            target: The runner, with at least as many slots as `slots`.
            impossible_ids: (U,) int64, token ids that are never generated; None for none.
            has_traces: Whether step records have a trace of every node; see `SequenceStep`.
        """
        self.target, self.policy, self._impossible_ids = target, policy, impossible_ids
        self._drafting, self._on_step, self._has_traces = drafting, on_step, has_traces
        self._prefill = Prefill(target, drafting, max_num_batched_tokens)
        self._sampling = SamplingState(slots.num_slots, target.vocab_size, target.device)
        self.counts, self._memory = EngineCounts(), MemoryPressure(target.device)
        self._num_read = 0  # verifications of drafts that drafters heard of
        self._scheduler = Scheduler(target, drafting, self._sampling.table, slots, self.counts)

    @property
    def policy(self) -> AcceptancePolicy:
        """How sampled requests are verified."""
        return self._policy

    @policy.setter
    def policy(self, policy: AcceptancePolicy) -> None:
        self._policy, self._is_lossy, self._synthetic = policy, policy.is_lossy, policy.schedule()
        self._num_warm_ups = WARM_UPS.count
        self._are_coupled = {is_seeded: policy.is_coupled(is_seeded=is_seeded) for is_seeded in (False, True)}

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return self._scheduler.has_work

    def metrics(self) -> list[Metric]:
        """Returns figures over all requests so far."""
        return self.counts.metrics(
            model_name=self.target.model.name, num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting, kv_usage=self._scheduler.kv_usage,
            num_out_of_memory=self._memory.num_failures,
        )  # fmt: skip

    @property
    def num_free_slots(self) -> int:
        """Number of sequences that can join at once."""
        return self._scheduler.num_free_slots

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence] | None = None, *, error: str | None = None) -> None:
        """Ends sequences, all if None, that wait or run, and frees their slots; without an `error` they are aborted."""
        for sequence in self._scheduler.all() if sequences is None else list(sequences):
            if sequence.finish_reason is not None:
                continue
            if error is None:
                contained(sequence, lambda one: one.abort())  # a tokenizer may fail even then
            else:
                sequence.fail(error)
        self._scheduler.remove_finished()

    def step(self) -> None:
        """Runs one iteration: a pass over a tree of each decoding sequence and over chunks of prompts.

        The last chunk of a prompt ends with its first root, so the pass that reads the chunk also gives the first
        token. If weights were written to since the last iteration, all cached KV rows are dropped first.
        """
        if not self.follow_weights():
            return
        self._scheduler.schedule()
        decoding, joining = self._prefill.divided(self._scheduler.running)
        scored = [s for s in joining if s.wants_prompt_scores] if joining else []
        if scored:  # one chunk an iteration, because other requests wait for the pass
            self._feed_scored(self._scheduler.fewest_first(scored)[0], len(decoding))
            decoding, joining = self._prefill.divided(self._scheduler.running)
            joining = [s for s in joining if not s.wants_prompt_scores]
        joining = self._scheduler.fewest_first(joining) if joining else []
        if decoding or joining:
            self._iterate(decoding, joining)
        self._scheduler.remove_finished()

    def follow_weights(self) -> bool:
        """Drops all KV rows if weights were written to; running sequences are then read again.

        Returns whether the target can run on the weights. If not, all sequences end with an error.
        """
        try:
            if self.target.follow_weights():
                self._scheduler.forget_rows()
        except ModelError as err:
            self.abort(error=f"the weights of the model were changed, and it cannot run on them: {err}")
            return False
        return True

    def _feed_scored(self, sequence: Sequence, num_decoding: int) -> None:
        begin = time.perf_counter()
        chunks = self._prefill.next_chunks([sequence], num_decoding, _MOST_SCORED_TOKENS)
        output = contained(sequence, self._scored, chunks)
        if output is not None:
            self._prefill.finish_chunks(chunks, output, time.perf_counter() - begin, num_decoding)

    def _scored(self, sequence: Sequence, chunks: list[Chunk]) -> PassOutput:
        chunk = chunks[0]
        output = self.target.run(self._prefill.as_pass(chunks).with_all_logits())
        logits = logits_of(output)
        if self._impossible_ids is not None:
            logits = logits.index_fill(1, self._impossible_ids, float("-inf"))
        following = sequence.tokens[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
        sequence.prompt_scores += token_scores(logits, following, sequence.params.prompt_logprobs or 0)
        return output

    def _iterate(self, decoding: list[Sequence], joining: list[Sequence], most_nodes: int | None = None) -> None:
        """Runs and commits one iteration. If the pass fails, retries with narrower trees, then one sequence at a time.

        Sequences in `decoding` have all KV rows but the root's; the prompts of `joining` are being read. One of the two
        is not empty.
        """
        clock = StageClock(self.target.device)
        draft: Draft | None = None
        verified: VerifiedBatch | None = None
        try:
            draft = self._propose(decoding, joining, most_nodes)
            verified = self._verify(decoding, joining, draft, clock)
        except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
            is_memory_short = is_out_of_memory(err)
            width = draft.tree.width if draft is not None and is_memory_short else 1
            fewer = min(width, most_nodes or width) // 2
            if not fewer and len(decoding) + len(joining) == 1:
                fail([*decoding, *joining][0], err)
                return
        if draft is None or verified is None:  # outside `except`: the error no longer holds tensors of the pass
            if is_memory_short:
                self._memory.note_failure()
            for group in [decoding] if fewer else [[sequence] for sequence in decoding]:
                self._iterate(group, [], fewer or most_nodes)
            for sequence in joining:
                self._iterate([], [sequence])
            return
        self._commit(verified, clock)

    def _call_back(self, on_step: Callable[[StepRecord], None], record: StepRecord) -> None:
        """Calls `on_step`. A callback that raises is not called again."""
        try:
            with restored_torch_state():
                on_step(record)
        except Exception as err:  # noqa: BLE001 - the caller's code must not end requests
            self._on_step = None
            _log.warning("on_step raised %s. It is not called any more.", described(err))
            _log.debug("where on_step raised", exc_info=err)

    def _propose(self, sequences: list[Sequence], joining: list[Sequence], most_nodes: int | None) -> Draft:
        if not sequences:
            return Draft(TokenTree.roots([], device=self.target.device), num_proposed=[], is_committed=False)
        most = most_nodes if self._memory.allows_drafts else 1
        widest = min(most or self.target.max_nodes, self.target.max_nodes)
        context = self._draft_context(sequences, self._sampling.batch(sequences), widest)
        num_prompt = self._prefill.num_next_tokens(joining, len(sequences)) if joining else 0
        draft = self._drafting.propose(context, num_prompt)
        if self._sampling.has_grammars:
            draft = self._drafting.constrained(draft, [self._grammar_bounds(s, most) for s in sequences])
        return draft

    def _verify(
        self, decoding: list[Sequence], joining: list[Sequence], draft: Draft, clock: StageClock
    ) -> VerifiedBatch:
        """Verifies, accepts, and moves accepted KV rows into place. Leaves the sequences unchanged."""
        clock.mark()
        every = self._drafting.reads.attention_every if _is_read(draft) else 0
        has_attention = every > 0 and self._num_read % every == 0
        asked, work = verification(
            self.target, self._prefill, decoding, joining, draft, has_attention=has_attention
        )  # fmt: skip
        batch = self._sampling.batch(asked.sequences) if asked.sequences else None
        if batch is not None and not (batch.is_all_greedy and self._impossible_ids is None):
            choice = token_choice(asked.sequences, asked.offsets, self._impossible_ids, self.target.device)
            work = replace(work, choice=choice)
        output = self.target.run(work)
        if self._impossible_ids is not None and output.logits is not None and output.chosen is None:
            with torch.inference_mode():  # the logits may be an inference tensor, which nothing else may write to
                output.logits[..., self._impossible_ids] = float("-inf")
        clock.mark()
        outcomes: list[Outcome] = []
        traces: list[TreeTrace | None] = [None] * len(asked.sequences)
        lossy_tv = 0.0
        if batch is not None:
            batch = self._sampling.masked(batch)
            outcomes, lossy_tv = self._accept(asked, batch, output)
            if self._has_traces:
                traces = self._traces(asked, batch, output, outcomes, clock)
        clock.mark()
        if asked.trees is not None:
            paths = [outcome.path for outcome in outcomes[: len(decoding)]]
            self.target.commit(asked.trees.slots, asked.trees.prefix_lens, paths)
        return VerifiedBatch(asked, draft, output, outcomes, lossy_tv, traces)

    def _accept(self, asked: Verification, batch: SamplingBatch, output: PassOutput) -> tuple[list[Outcome], float]:
        tree, logits = asked.tree.without_probes(), logits_of(output)
        if self._synthetic is not None:
            outcomes = self._accept_synthetic(self._synthetic, asked, tree, batch, output)
            return outcomes, math.nan if tree.max_depth else 0.0
        if batch.is_all_greedy and not self._is_lossy:
            rules = ["greedy"] * len(asked.sequences)
        else:
            rules = self._rules(asked.sequences, tree, output)
        if not batch.processors and reads_are_free(tree.tokens.device) and {"greedy", "drawn"}.issuperset(rules):
            chosen = greatest_on_host(logits) if output.chosen is None else output.chosen.tolist()
            return outcomes_of_paths(tree, walk_chosen(tree, chosen, asked.offsets)), 0.0
        scores, roots = self._node_scores(asked, tree, batch, output)
        acceptance = accept(scores, rules, self._policy, roots)
        lossy_tv = 0.0
        if self._is_lossy and asked.trees is not None:  # trees only: roots of prompts that end are never lossy
            lossy_tv = float(acceptance.lossy_tv[: asked.trees.num_sequences].mean())
        return outcomes_on_host(scores, acceptance), lossy_tv

    def _accept_synthetic(
        self, schedule: LengthSchedule, asked: Verification, tree: TokenTree, batch: SamplingBatch, output: PassOutput
    ) -> list[Outcome]:
        """Returns the outcome of each tree: each draft of a sequence has the next accepted length of the schedule."""
        sequences, logits = asked.sequences, logits_of(output)
        lengths = [schedule.length(s.sampling.seed, s.metrics.drafted_at_depth[1]) for s in sequences]
        are_chosen = batch.is_all_greedy or (
            output.chosen is not None and all(s.params.is_plain or s.params.is_greedy for s in sequences)
        )
        if are_chosen and not batch.processors and reads_are_free(tree.tokens.device):
            chosen = greatest_on_host(logits) if output.chosen is None else output.chosen.tolist()
            return outcomes_of_paths(tree, walk_synthetic(tree, chosen, asked.offsets, lengths))
        scores, roots = self._node_scores(asked, tree, batch, output)
        rules, wanted = ["synthetic"] * len(sequences), integers_on(lengths, tree.tokens.device)
        return outcomes_on_host(scores, accept(scores, rules, self._policy, roots, wanted))

    def _rules(self, sequences: list[Sequence], tree: TokenTree, output: PassOutput) -> list[str]:
        has_kernels = output.chosen is not None or has_triton_kernels(tree.tokens.device)
        are_merged = self._drafting.are_merged
        return [
            self._policy.rule_for(
                tree, is_greedy=s.params.is_greedy, is_seeded=s.is_seeded, row=row,
                is_plain=s.params.is_plain and has_kernels, is_mixed=are_merged or s.grammar is not None,
            )
            for row, s in enumerate(sequences)
        ]  # fmt: skip

    def _node_scores(
        self, asked: Verification, tree: TokenTree, batch: SamplingBatch, output: PassOutput
    ) -> tuple[NodeScores, Tensor]:
        """Returns the target's distributions at the nodes of trees, and the (B,) int64 positions of the roots."""
        positions = [len(s.tokens) - 1 for s in asked.sequences]
        starts, roots = integers_on([asked.offsets[:-1], positions], tree.tokens.device).unbind()
        scores = NodeScores(
            tree=tree,
            logits=logits_of(output),
            starts=starts,
            has_row_for_each=asked.offsets[-1] == tree.tokens.numel(),
            batch=batch,
            history=self._sampling.histories(asked.sequences, batch),
            chosen=output.chosen,
        )
        return scores, roots

    def _traces(
        self, asked: Verification, batch: SamplingBatch, output: PassOutput, outcomes: list[Outcome], clock: StageClock
    ) -> list[TreeTrace | None]:
        try:
            with torch.no_grad(), clock.paused():
                scores, roots = self._node_scores(asked, asked.tree, batch, output)
                rules = self._rules(asked.sequences, asked.tree.without_probes(), output)
                unmasked = None if output.chosen is None else self._impossible_ids
                return [*traced(scores, rules, roots, outcomes, self._drafting.credit, unmasked)]
        except Exception as err:  # noqa: BLE001 - as in `_call_back`
            _log.warning("an iteration could not be traced: %s", described(err))
            _log.debug("where the trace failed", exc_info=err)
            return [None] * len(asked.sequences)

    def _commit(self, verified: VerifiedBatch, clock: StageClock) -> None:
        asked, draft, output = verified.asked, verified.draft, verified.output
        sequences, num_decoding = asked.sequences, draft.tree.batch_size
        roots: list[int] = []
        generated: list[list[int]] = []
        for row, (sequence, outcome) in enumerate(zip(sequences, verified.outcomes, strict=True)):
            before = len(sequence.tokens)
            roots.append(sequence.tokens[-1])
            logits = verified.logits_of(row) if sequence.params.logprobs is not None else None
            try:
                self._emit(sequence, outcome, logits)
            except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
                fail(sequence, err)
            generated.append(sequence.tokens[before:])
        if asked.trees is not None and draft.is_committed:
            outcomes = verified.outcomes[:num_decoding]
            ids = self._top_ids(verified) if self._drafting.reads.top_k else None
            self._num_read += _is_read(draft)
            self._drafting.commit(newly_committed(roots[:num_decoding], asked.trees, draft.tree, outcomes, output, ids))
        clock.mark()
        seconds = clock.seconds()
        prompts = output.without_first(asked.num_decoding, num_decoding)
        self._prefill.finish_chunks(asked.chunks, prompts, seconds.verify, asked.num_decoding)
        if sequences:
            self._record(verified, generated, seconds)

    def _record(self, verified: VerifiedBatch, generated: list[list[int]], seconds: StageSeconds) -> None:
        asked, draft = verified.asked, verified.draft
        num_decoding = draft.tree.batch_size
        num_ending = len(asked.sequences) - num_decoding
        num_proposed = [*draft.num_proposed, *([None] * num_ending)]
        steps: list[SequenceStep] = []
        for row, sequence in enumerate(asked.sequences):
            steps.append(sequence_step(
                self._drafting, sequence, verified.outcomes[row], generated[row], num_proposed[row],
                verified.traces[row], ends_prompt=row >= num_decoding,
            ))  # fmt: skip
        record = StepRecord(
            sequences=steps,
            num_tokens=asked.offsets[-1],
            num_prompt_tokens=sum(chunk.num_prompt for chunk in asked.chunks) if asked.chunks else 0,
            seconds=seconds,
            asked=self._drafting.asked(draft),
            draft_error=draft.error,
            declined=draft.declined,
            lossy_tv=verified.lossy_tv,
            is_synthetic=self._synthetic is not None,
            plain_seconds=self._drafting.plain_seconds(num_decoding),
        )
        for sequence, step in zip(asked.sequences, steps, strict=True):
            sequence.metrics.add_step(step, record)
            sequence.credit(step)
        self.counts.add(record)
        decoded = record if not num_ending else replace(record, sequences=steps[:num_decoding])
        if WARM_UPS.count == self._num_warm_ups:  # else its seconds say nothing of the next iteration's
            self._drafting.learn_step(draft, decoded)
        self._num_warm_ups = WARM_UPS.count
        if self._on_step is not None:
            self._call_back(self._on_step, record)

    def _top_ids(self, verified: VerifiedBatch) -> Tensor | None:
        """Returns (R, k), the most probable tokens after every node of a draft, for drafters that read them."""
        count, logits = self._drafting.reads.top_k, verified.output.logits
        if logits is None:
            return None
        logits = logits[: verified.asked.num_decoding]
        return logits.topk(min(count, logits.shape[1]), dim=1).indices

    def _draft_context(self, sequences: list[Sequence], batch: SamplingBatch, widest: int) -> DraftContext:
        slots, tokens, max_depth, max_nodes, is_coupled = [], [], [], [], []
        for sequence in sequences:
            slots.append(slot_of(sequence))
            tokens.append(sequence.tokens)
            max_depth.append(min(_most_depth(sequence), widest - 1))
            max_nodes.append(min(sequence.max_nodes or widest, widest))
            is_coupled.append(self._are_coupled[sequence.is_seeded])
        return DraftContext(
            slots=slots, tokens=tokens, max_depth=max_depth, max_nodes=max_nodes, sampling=batch, is_coupled=is_coupled
        )

    def _grammar_bounds(self, sequence: Sequence, most_nodes: int | None) -> GrammarBounds | None:
        """Returns what a grammar allows of a draft. Forced chains may use all rows that the slot has left."""
        if sequence.grammar is None:
            return None
        room = self.target.cache.rows(slot_of(sequence)) - (len(sequence.tokens) - 1)
        most = most_nodes or max(self.target.max_nodes, min(room, MAX_NODES))
        return GrammarBounds(
            state=sequence.grammar,
            max_depth=min(_most_depth(sequence), most - 1),
            max_nodes=min(sequence.max_nodes or most, most),
        )

    def _emit(self, sequence: Sequence, outcome: Outcome, logits: Tensor | None) -> None:
        before = len(sequence.tokens)
        valid = outcome.tokens[: outcome.num_valid]
        if sequence.params.logprobs is not None and logits is not None and valid:
            nodes = torch.tensor([0, *outcome.path][: len(valid)], device=logits.device)
            sequence.scores += token_scores(logits[nodes], valid, sequence.params.logprobs)
        sequence.emit(valid)
        self._sampling.table.append(slot_of(sequence), sequence.tokens[before:])
        if sequence.finish_reason is None and outcome.num_valid < len(outcome.tokens):
            sequence.fail(NO_TOKEN)
        sequence.num_cached = len(sequence.tokens) - 1


def _is_read(draft: Draft) -> bool:
    """Whether drafters may read attention weights of the verification: they hear of it, and there is a draft."""
    return draft.is_committed and draft.tree.width > 1


def _most_depth(sequence: Sequence) -> int:
    """Returns the greatest useful depth; one of the remaining tokens is the target's own."""
    remaining = sequence.remaining
    return min(remaining, sequence.max_nodes or remaining) - 1
