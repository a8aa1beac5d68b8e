"""The decoding loop: prefill → [ propose → verify → accept → commit ]* → finish, over a ragged batch.

`Engine.step` is one iteration: a target pass over all running sequences, including prompts that are still being read.
One transfer brings the outcome of acceptance to the host; a tree without `HostFacts` costs the guard one more.
Sequences join when a slot is free and leave when they stop. An iteration changes nothing before it commits, so the
engine decodes a batch that fails again, one sequence at a time. Only a sequence that fails alone ends.

What else hangs on an iteration, and where: prompts to be scored in `_next_parts`, retries in `_smaller`, forced chains
of grammars in `_propose`, predictions in `Drafting.propose`, synthetic acceptance in `Acceptor.outcomes`, traces in
`_accept`, records in `_record`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import StageClock, is_out_of_memory, restored_torch_state
from foretoken.core.errors import ModelError, described
from foretoken.core.records import SequenceStep, StageSeconds, StepRecord, TreeTrace
from foretoken.core.token_tree import MAX_NODES, TokenTree
from foretoken.decoder.cuda_graphs import WARM_UPS
from foretoken.drafters.base import DraftContext
from foretoken.drafting.drafting import Draft, Drafting
from foretoken.engine.acceptor import Acceptor
from foretoken.engine.iteration import Prefill, VerifiedBatch, newly_committed, sequence_step, verification
from foretoken.engine.scheduler import EngineCounts, Scheduler, SlotPool
from foretoken.engine.sequence import MemoryPressure, SamplingState, Sequence, contained, fail, slot_of, token_scores
from foretoken.grammars.drafts import GrammarBounds

if TYPE_CHECKING:
    from foretoken.acceptance.select import AcceptancePolicy
    from foretoken.core.results import Metric
    from foretoken.decoder.base import PassOutput
    from foretoken.engine.iteration import Outcome, Verification
    from foretoken.runner.runner import Runner
    from foretoken.sampling.batch import SamplingBatch

NO_TOKEN = "no token is possible: the target's logits, or what the request's parameters make of them, are not finite."
_log = logging.getLogger(__name__)


class IterationPart(NamedTuple):
    """The sequences of one pass.

    Attributes:
        decoding: Sequences with all KV rows but the root's.
        joining: Sequences with prompts that are still being read. One of the two lists is not empty.
        most_nodes: Cap on the nodes of each tree, after a pass that did not fit into memory; None for no cap.
    """

    decoding: list[Sequence]
    joining: list[Sequence]
    most_nodes: int | None = None


class Engine:
    """Runs sequences on a target with drafters.

    Attributes:
        counts: Of all iterations so far.
        acceptor: Decides which drafts are kept; its policy may be replaced between iterations.
    """

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
        self.target, self.counts = target, EngineCounts()
        self._drafting, self._on_step, self._has_traces = drafting, on_step, has_traces
        self._sampling = SamplingState(slots.num_slots, target.vocab_size, target.device)
        self.acceptor = Acceptor(policy, self._sampling, drafting, impossible_ids)
        self._prefill = Prefill(target, drafting, max_num_batched_tokens)
        self._memory = MemoryPressure(target.device)
        self._num_read = 0  # verified drafts that were passed to the drafters; see `attention_every`
        self._num_warm_ups = WARM_UPS.count
        self._scheduler = Scheduler(target, drafting, self._sampling.table, slots, self.counts)

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
        """Ends waiting and running sequences and frees their slots. None means all.

        With an `error` they fail with this message; without one their finish reason is an abort.
        """
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
        token. If weights were written to since the last iteration, all cached KV rows are dropped first. A part that
        fails runs again in smaller parts.
        """
        if not self.follow_weights():
            return
        self._scheduler.schedule()
        parts = self._next_parts()
        while parts:
            draft: Draft | None = None
            part, clock, is_memory_short = parts.pop(0), StageClock(self.target.device), False
            try:
                draft = self._propose(part)
                verified = self._accept(draft, *self._verify(part, draft, clock), clock)
            except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
                smaller = self._smaller(err, part, draft)
                parts, is_memory_short = [*smaller, *parts], bool(smaller) and is_out_of_memory(err)
            else:
                self._commit(verified, clock)
                del verified  # it holds the logits of the pass
            if is_memory_short:  # outside `except`: neither the error nor its causes hold tensors of the pass
                self._memory.note_failure()
        self._scheduler.remove_finished()

    def _next_parts(self) -> list[IterationPart]:
        """Returns the work of an iteration, at most one part; a prompt to be scored first has a pass of its own."""
        decoding, joining = self._prefill.divided(self._scheduler.running)
        if any(sequence.wants_prompt_scores for sequence in joining):
            scored = self._scheduler.fewest_first([s for s in joining if s.wants_prompt_scores])
            self._prefill.score_chunk(scored[0], len(decoding), self.acceptor.exclude_impossible)
            decoding, joining = self._prefill.divided(self._scheduler.running)
            joining = [s for s in joining if not s.wants_prompt_scores]
        if not (decoding or joining):
            return []
        return [IterationPart(decoding, self._scheduler.fewest_first(joining) if joining else [])]

    def _smaller(self, error: Exception, part: IterationPart, draft: Draft | None) -> list[IterationPart]:
        """Returns the parts in which a failed part runs again; none if a single sequence failed and was ended.

        Without memory trees become narrower; anything else, and what fails with roots alone, runs one by one.
        """
        decoding, joining, most_nodes = part
        fewer = 0
        if is_out_of_memory(error):
            width = 1 if draft is None else draft.tree.width
            fewer = min(width, most_nodes or width) // 2
        if not fewer and len(decoding) + len(joining) == 1:
            fail([*decoding, *joining][0], error)
            return []
        groups = [decoding] if fewer else [[sequence] for sequence in decoding]
        return [*(IterationPart(group, [], fewer or most_nodes) for group in groups),
                *(IterationPart([], [each]) for each in joining)]  # fmt: skip

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

    def _propose(self, part: IterationPart) -> Draft:
        sequences, joining, most_nodes = part
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

    def _verify(self, part: IterationPart, draft: Draft, clock: StageClock) -> tuple[Verification, PassOutput]:
        """Runs the target on the drafts and on chunks of prompts; on an accelerator it may still be at work then."""
        clock.mark()
        every = self._drafting.reads.attention_every if _is_read(draft) else 0
        has_attention = every > 0 and self._num_read % every == 0
        asked, work = verification(
            self.target, self._prefill, part.decoding, part.joining, draft, has_attention=has_attention
        )
        choice = self.acceptor.choice(asked, self.target.device)
        output = self.target.run(work if choice is None else replace(work, choice=choice))
        clock.mark()
        return asked, output

    def _accept(self, draft: Draft, asked: Verification, output: PassOutput, clock: StageClock) -> VerifiedBatch:
        """Brings the outcome to the host, and moves accepted KV rows into place. Leaves the sequences unchanged."""
        lossy_tv = 0.0
        outcomes: list[Outcome] = []
        traces: list[TreeTrace | None] = [None] * len(asked.sequences)
        if asked.sequences:
            if output.logits is not None and output.chosen is None:
                self.acceptor.exclude_impossible(output.logits)
            outcomes, lossy_tv = self.acceptor.outcomes(asked, output)
            if self._has_traces:
                with clock.paused():
                    traces = self.acceptor.traces(asked, output, outcomes)
        clock.mark()
        if asked.trees is not None:
            paths = [outcome.path for outcome in outcomes[: draft.tree.batch_size]]
            if self.target.cache.states is not None:  # rows past a stop token do no harm, a state past it is lost
                ended = zip(asked.sequences, outcomes, paths, strict=False)
                paths = [sequence.until_stop(path, outcome.tokens) for sequence, outcome, path in ended]
            self.target.commit(asked.trees.slots, asked.trees.prefix_lens, paths)
        return VerifiedBatch(asked, draft, output, outcomes, lossy_tv, traces)

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
            is_synthetic=self.acceptor.is_synthetic,
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

    def _call_back(self, on_step: Callable[[StepRecord], None], record: StepRecord) -> None:
        """Calls `on_step`. A callback that raises is not called again."""
        try:
            with restored_torch_state():
                on_step(record)
        except Exception as err:  # noqa: BLE001 - the caller's code must not end requests
            self._on_step = None
            _log.warning("on_step raised %s. It is not called any more.", described(err))
            _log.debug("where on_step raised", exc_info=err)

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
            is_coupled.append(self.acceptor.is_coupled(sequence))
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
