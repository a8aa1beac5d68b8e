"""The decoding loop: prefill → [ propose → verify → accept → commit ]* → finish, over a ragged batch.

One iteration makes one target pass over all running sequences and one transfer to the host, the packed outcome of
acceptance; before it, the guard asks once about a tree whose producer guarantees nothing. Sequences join when a slot is
free and leave when they stop; nobody waits for anybody. What fails for one sequence ends that sequence alone: until
something is committed an iteration changes nothing, so a batch that fails is decoded again one sequence at a time.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from foretoken.acceptance.select import AcceptancePolicy, accept
from foretoken.core.backend import has_triton_kernels, integers_on, reads_are_free
from foretoken.core.errors import described
from foretoken.core.records import StepRecord
from foretoken.core.token_tree import MAX_NODES
from foretoken.drafters.base import DraftContext
from foretoken.engine.engine_counts import EngineCounts
from foretoken.engine.failures import contained, fail
from foretoken.engine.memory_pressure import MemoryPressure, is_out_of_memory
from foretoken.engine.outcomes import (
    Outcome,
    greatest_on_host,
    newly_committed,
    outcomes_of_choices,
    outcomes_on_host,
    sequence_step,
    token_scores,
)
from foretoken.engine.prefill import Chunk, Prefill
from foretoken.engine.scheduler import Scheduler
from foretoken.engine.stage_clock import StageClock
from foretoken.engine.torch_state import restored_torch_state
from foretoken.engine.tracing import traced
from foretoken.engine.verification import Verified, logits_of, token_choice
from foretoken.grammars.drafts import GrammarBounds
from foretoken.sampling.batch import SamplingBatch
from foretoken.sampling.grammar import GrammarMask
from foretoken.sampling.history import History, HistoryTable
from foretoken.sampling.node_scores import NodeScores

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from foretoken.core.metrics import Metric
    from foretoken.core.passes import Pass
    from foretoken.core.token_tree import TokenTree
    from foretoken.core.tree_trace import TreeTrace
    from foretoken.decoder.base import PassOutput
    from foretoken.engine.drafting import Draft, Drafting
    from foretoken.engine.sequence import Sequence
    from foretoken.engine.slot_pool import SlotPool
    from foretoken.runner.runner import Runner

NO_TOKEN = "no token is possible: the target's logits, or what the request's parameters make of them, are not finite."
_log = logging.getLogger(__name__)


class Engine:
    """Runs sequences on a target with a drafter.

    Attributes:
        target: The runner.
        policy: How sampled requests are verified.
        counts: What it has done so far.
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
        """An idle engine.

        Args:
            target: With at least as many slots as there are in `slots`.
            drafting: The drafters and their controller.
            policy: How sampled requests are verified.
            slots: One for each sequence that is decoded at once.
            on_step: Called with every iteration's record.
            impossible_ids: (U,) int64, token ids that are never generated; None for none.
            max_num_batched_tokens: See `PrefillBudget`.
            has_traces: Whether step records say what became of every node; see `SequenceStep`.
        """
        self.target, self.policy, self._impossible_ids = target, policy, impossible_ids
        self._drafting, self._on_step, self._has_traces = drafting, on_step, has_traces
        self._prefill = Prefill(target, drafting, max_num_batched_tokens)
        self._history = HistoryTable(slots.num_slots, target.vocab_size, target.device)
        self.counts, self._memory = EngineCounts(), MemoryPressure(target.device)
        self._scheduler = Scheduler(target, drafting, self._history, slots, self.counts)
        self._batch: tuple[list[Sequence], SamplingBatch] | None = None

    @property
    def has_work(self) -> bool:
        """Whether any sequence is waiting or running."""
        return self._scheduler.has_work

    def metrics(self) -> list[Metric]:
        """Figures over all requests so far."""
        return self.counts.metrics(
            model_name=self.target.model.name, num_running=len(self._scheduler.running),
            num_waiting=self._scheduler.num_waiting, kv_usage=self._scheduler.kv_usage,
            num_out_of_memory=self._memory.num_failures,
        )  # fmt: skip

    @property
    def num_free_slots(self) -> int:
        """Sequences that can join at once."""
        return self._scheduler.num_free_slots

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence."""
        self._scheduler.add(sequence)

    def abort(self, sequences: Iterable[Sequence] | None = None, *, error: str | None = None) -> None:
        """Ends sequences that are waiting or running and frees their slots.

        Args:
            sequences: Which; all of them when None.
            error: Why, in one sentence, where they failed; None where nobody waits for them any more.
        """
        for sequence in self._scheduler.all() if sequences is None else list(sequences):
            if sequence.finish_reason is not None:
                continue
            if error is None:
                contained(sequence, lambda one: one.abort())  # a tokenizer may fail even then
            else:
                sequence.fail(error)
        self._scheduler.leave()

    def step(self) -> list[Sequence]:
        """One iteration: one pass over a tree of each decoding sequence, and over chunks of prompts as far as they fit.

        Returns:
            The sequences that took part in a verified pass, with new tokens or over.
        """
        self._scheduler.schedule()
        running = self._scheduler.running
        joining = [s for s in running if s.finish_reason is None and not self._prefill.is_over(s)]
        for sequence in joining:
            if sequence.wants_prompt_scores:
                self._feed_scored(self._prefill.next_chunks([sequence], 0))
        ready = [s for s in running if s.finish_reason is None and self._prefill.is_over(s)]
        joining = [s for s in joining if not s.wants_prompt_scores]
        if ready:
            self._decode(ready, joining)
        else:
            self._feed(self._prefill.next_chunks(joining, 0))
        self._scheduler.leave()
        return ready

    def _feed(self, chunks: list[Chunk]) -> None:
        """A pass over chunks of prompts alone, one by one where it fails for all of them together."""
        if not chunks:
            return
        begin = time.perf_counter()
        try:
            output = self.target.run(self._prefill.as_pass(chunks))
        except Exception as err:  # noqa: BLE001 - as in `_decode`
            if len(chunks) == 1:
                fail(chunks[0].sequence, err)
                return
            for chunk in chunks:
                self._feed([chunk])
            return
        self._prefill.learn(chunks, output.features, time.perf_counter() - begin, 0)

    def _feed_scored(self, chunks: list[Chunk]) -> None:
        """A pass over one chunk of a prompt, with the log-probabilities of the tokens that follow its own."""
        chunk, begin = chunks[0], time.perf_counter()
        sequence, end = chunk.sequence, chunk.start + len(chunk.tokens) + 1
        try:
            output = self.target.run(self._prefill.as_pass(chunks).with_all_logits())
            logits = logits_of(output)
            if self._impossible_ids is not None:
                logits = logits.index_fill(1, self._impossible_ids, float("-inf"))
            count = sequence.params.prompt_logprobs or 0
            sequence.prompt_scores += token_scores(logits, sequence.tokens[chunk.start + 1 : end], count)
        except Exception as err:  # noqa: BLE001 - as in `_decode`
            fail(sequence, err)
            return
        self._prefill.learn(chunks, output.features, time.perf_counter() - begin, 0)

    def _decode(self, sequences: list[Sequence], joining: list[Sequence], most_nodes: int | None = None) -> None:
        """One iteration of sequences whose prompt is in the cache, another way where it fails for all of them together.

        Args:
            sequences: Those that are decoding.
            joining: Those whose prompt is not in the cache yet.
            most_nodes: Of a tree, root included; None for as many as the target takes.
        """
        clock = StageClock(self.target.device)
        draft: Draft | None = None
        verified: Verified | None = None
        try:
            draft = self._propose(sequences, joining, most_nodes)
            verified = self._verify(sequences, joining, draft, clock)
        except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
            is_memory_short = is_out_of_memory(err)
            width = draft.tree.width if draft is not None and is_memory_short else 1
            fewer = min(width, most_nodes or width) // 2
            if not fewer and len(sequences) == 1 and not joining:
                fail(sequences[0], err)
                return
        if draft is None or verified is None:  # here, where the error no longer holds what the pass had allocated
            if is_memory_short:
                self._memory.note()
            for group in [sequences] if fewer else [[sequence] for sequence in sequences]:
                self._decode(group, [], fewer or most_nodes)
            for sequence in joining:
                self._feed(self._prefill.next_chunks([sequence], 0))
            return
        record = self._commit(sequences, verified, clock)
        if not verified.draft.has_forced:  # whose acceptance and cost say nothing of the drafters'
            self._drafting.learn(record)
        self._call_back(record)

    def _call_back(self, record: StepRecord) -> None:
        """Hands a record to the caller. A callback that raises is called no more: the iteration is over, all go on."""
        if self._on_step is None:
            return
        try:
            with restored_torch_state():
                self._on_step(record)
        except Exception as err:  # noqa: BLE001 - the caller's code, which has nothing to do with the requests
            self._on_step = None
            _log.warning("on_step raised %s. It is not called any more.", described(err))
            _log.debug("where on_step raised", exc_info=err)

    def _propose(self, sequences: list[Sequence], joining: list[Sequence], most_nodes: int | None) -> Draft:
        """What is verified; arguments as `_decode`'s."""
        most = most_nodes if self._memory.allows_drafts else 1
        widest = min(most or self.target.max_nodes, self.target.max_nodes)
        context = self._draft_context(sequences, self._sampling_batch(sequences), widest)
        draft = self._drafting.propose(context, self._prefill.num_next_tokens(joining, len(sequences)))
        if any(s.grammar is not None for s in sequences):
            draft = self._drafting.constrained(draft, [self._grammar_bounds(s, most) for s in sequences])
        return draft

    def _verify(self, sequences: list[Sequence], joining: list[Sequence], draft: Draft, clock: StageClock) -> Verified:
        """Verify, accept, and move accepted KV rows into place. The sequences themselves stay as they are."""
        batch = self._sampling_batch(sequences)
        if any(s.grammar is not None for s in sequences):
            mask = GrammarMask([s.grammar for s in sequences])
            batch = replace(batch, processors=(mask, *batch.processors))
        tree = draft.tree.without_probes()
        clock.mark()
        slots, lengths = [_slot(s) for s in sequences], [len(s.tokens) - 1 for s in sequences]
        work = trees = self.target.verification(slots, lengths, draft.tree)
        chunks = self._prefill.next_chunks(joining, trees.num_tokens)
        if chunks:
            work = trees.with_chains(self._prefill.as_pass(chunks))
        has_features = draft.is_committed or bool(chunks)
        choice = token_choice(sequences, trees, self._impossible_ids, self.target.device)
        output = self._run(replace(work, choice=choice, has_features=has_features))
        clock.mark()
        outcomes, lossy_tv = self._accept(sequences, batch, tree, trees, output)
        clock.mark()
        traces: Seq[TreeTrace | None] = [None] * len(sequences)
        if self._has_traces:
            with clock.paused():
                traces = self._traces(sequences, batch, draft.tree, trees, output, outcomes)
        self.target.commit(slots, lengths, [outcome.path for outcome in outcomes])
        return Verified(trees, chunks, draft, output, outcomes, lossy_tv, traces)

    def _run(self, work: Pass) -> PassOutput:
        """A pass with logits in which impossible tokens have none."""
        output = self.target.run(work)
        if self._impossible_ids is not None and output.logits is not None and output.chosen is None:
            with torch.inference_mode():  # the logits may be an inference tensor, which nothing else may write to
                output.logits[..., self._impossible_ids] = float("-inf")
        return output

    def _accept(
        self, sequences: list[Sequence], batch: SamplingBatch, tree: TokenTree, trees: Pass, output: PassOutput
    ) -> tuple[list[Outcome], float]:
        """What survives of each tree, and what a lossy rule spent; see `StepRecord`.

        Args:
            sequences: One a tree.
            batch: Their sampling parameters.
            tree: Without probes.
            trees: The pass without its chunks of prompts.
            output: Of the whole pass.
        """
        device, logits = tree.tokens.device, logits_of(output)
        rules = self._rules(sequences, tree, output)
        if not batch.processors and reads_are_free(device) and {"greedy", "drawn"}.issuperset(rules):
            chosen = greatest_on_host(logits) if output.chosen is None else output.chosen.tolist()
            return outcomes_of_choices(tree, chosen, trees.offsets), 0.0
        scores, roots = self._node_scores(sequences, batch, tree, trees, output)
        acceptance = accept(scores, rules, self.policy, roots)
        lossy_tv = float(acceptance.lossy_tv.mean()) if self.policy.is_lossy else 0.0
        return outcomes_on_host(scores, acceptance), lossy_tv

    def _rules(self, sequences: list[Sequence], tree: TokenTree, output: PassOutput) -> list[str]:
        """The acceptance rule of each sequence; tree: without probes."""
        has_kernels = output.chosen is not None or has_triton_kernels(tree.tokens.device)
        are_merged = len(self._drafting.names) > 1
        return [
            self.policy.rule_for(
                tree, is_greedy=s.params.is_greedy, is_seeded=s.is_seeded, row=row,
                is_plain=s.params.is_plain and has_kernels, is_mixed=are_merged or s.grammar is not None,
            )
            for row, s in enumerate(sequences)
        ]  # fmt: skip

    def _node_scores(
        self, sequences: list[Sequence], batch: SamplingBatch, tree: TokenTree, trees: Pass, output: PassOutput
    ) -> tuple[NodeScores, Tensor]:
        """The target's answer to some trees, and (B,) int64 the positions of their roots; arguments as `_accept`'s."""
        starts, roots = integers_on([trees.offsets[:-1], trees.prefix_lens], tree.tokens.device).unbind()
        scores = NodeScores(
            tree=tree,
            logits=logits_of(output),
            starts=starts,
            has_row_for_each=trees.num_tokens == tree.tokens.numel(),
            batch=batch,
            history=self._histories(sequences, batch),
            chosen=output.chosen,
        )
        return scores, roots

    def _traces(
        self,
        sequences: list[Sequence],
        batch: SamplingBatch,
        tree: TokenTree,
        trees: Pass,
        output: PassOutput,
        outcomes: list[Outcome],
    ) -> Seq[TreeTrace | None]:
        """What became of every node, before anything is committed; tree: with its probes.

        None for all where that cannot be found out, which is logged: a request never fails for its trace.
        """
        try:
            with torch.no_grad():
                scores, roots = self._node_scores(sequences, batch, tree, trees, output)
                rules = self._rules(sequences, tree.without_probes(), output)
                unmasked = None if output.chosen is None else self._impossible_ids
                return traced(scores, rules, roots, outcomes, self._drafting.credit, unmasked)
        except Exception as err:  # noqa: BLE001 - as in `_call_back`
            _log.warning("an iteration could not be traced: %s", described(err))
            _log.debug("where the trace failed", exc_info=err)
            return [None] * len(sequences)

    def _commit(self, sequences: list[Sequence], verified: Verified, clock: StageClock) -> StepRecord:
        """Appends tokens to the sequences, tells the drafter, and records the iteration."""
        lengths, roots = [len(s.tokens) for s in sequences], [s.tokens[-1] for s in sequences]
        for row, (sequence, outcome) in enumerate(zip(sequences, verified.outcomes, strict=True)):
            logits = verified.logits_of(row) if sequence.params.logprobs is not None else None
            contained(sequence, self._emit, outcome, logits)
        generated = [sequence.tokens[before:] for sequence, before in zip(sequences, lengths, strict=True)]
        num_decoding, features = verified.trees.num_tokens, verified.output.features
        if verified.draft.is_committed:
            self._drafting.commit(
                newly_committed(
                    roots, verified.trees, verified.draft.tree, verified.outcomes, features, self._top_ids(verified)
                )
            )
        clock.mark()
        seconds = clock.seconds()
        features = None if features is None else features[num_decoding:]
        self._prefill.learn(verified.chunks, features, seconds.verify, num_decoding)
        record = StepRecord(
            sequences=[
                sequence_step(self._drafting, *each)
                for each in zip(
                    sequences, verified.outcomes, generated, verified.draft.num_proposed, verified.traces, strict=True
                )
            ],
            num_tokens=num_decoding,
            num_prompt_tokens=sum(len(chunk.tokens) for chunk in verified.chunks),
            seconds=seconds,
            asked=self._drafting.asked(verified.draft),
            draft_error=verified.draft.error,
            declined=verified.draft.declined,
            lossy_tv=verified.lossy_tv,
        )
        for sequence, step in zip(sequences, record.sequences, strict=True):
            sequence.metrics.add_step(step, record)
            sequence.credit(step)
        self.counts.add(record)
        return record

    def _top_ids(self, verified: Verified) -> Tensor | None:
        """(M, k) the most probable tokens after every verified node, where drafters read them."""
        count, logits = self._drafting.reads.top_k, verified.output.logits
        if not count or logits is None:
            return None
        return logits.topk(min(count, logits.shape[1]), dim=1).indices

    def _draft_context(self, sequences: list[Sequence], batch: SamplingBatch, widest: int) -> DraftContext:
        """What the drafter is told. A pass always emits one token of the target's own, so drafts leave room for it."""
        return DraftContext(
            slots=[_slot(s) for s in sequences],
            tokens=[s.tokens for s in sequences],
            max_depth=[min(_most_depth(s), widest - 1) for s in sequences],
            max_nodes=[min(s.max_nodes or widest, widest) for s in sequences],
            sampling=batch,
            is_coupled=[self.policy.is_coupled(is_seeded=s.is_seeded) for s in sequences],
        )

    def _grammar_bounds(self, sequence: Sequence, most_nodes: int | None) -> GrammarBounds | None:
        """What of a sequence's draft its grammar lets be, and how much may be added: the cache has room for chains.

        Args:
            sequence: Any.
            most_nodes: Of its tree, root included; None for as many as there is room for.
        """
        if sequence.grammar is None:
            return None
        room = self.target.cache.rows(_slot(sequence)) - (len(sequence.tokens) - 1)
        most = most_nodes or max(self.target.max_nodes, min(room, MAX_NODES))
        return GrammarBounds(
            state=sequence.grammar,
            max_depth=min(_most_depth(sequence), most - 1),
            max_nodes=min(sequence.max_nodes or most, most),
        )

    def _sampling_batch(self, sequences: list[Sequence]) -> SamplingBatch:
        """Parameters as tensors, built anew only when the batch changes."""
        if self._batch is None or self._batch[0] != sequences:
            requests = [s.sampling for s in sequences]
            self._batch = (list(sequences), SamplingBatch.build(requests, self.target.vocab_size, self.target.device))
        return self._batch[1]

    def _histories(self, sequences: list[Sequence], batch: SamplingBatch) -> History | None:
        """What processors read, or None when none is in use."""
        if not batch.processors:
            return None
        return self._history.view(
            [_slot(s) for s in sequences], [s.tokens for s in sequences], [s.num_prompt for s in sequences],
            batch.tail_len,
        )  # fmt: skip

    def _emit(self, sequence: Sequence, outcome: Outcome, logits: Tensor | None) -> None:
        """Appends what was decided to one sequence; logits: (N, V) of its tree where their values are asked for."""
        before = len(sequence.tokens)
        valid = outcome.tokens[: outcome.num_valid]
        if sequence.params.logprobs is not None and logits is not None and valid:
            nodes = torch.tensor([0, *outcome.path][: len(valid)], device=logits.device)
            sequence.scores += token_scores(logits[nodes], valid, sequence.params.logprobs)
        sequence.emit(valid)
        self._history.append(_slot(sequence), sequence.tokens[before:])
        if sequence.finish_reason is None and outcome.num_valid < len(outcome.tokens):
            sequence.fail(NO_TOKEN)
        sequence.num_cached = len(sequence.tokens) - 1


def _most_depth(sequence: Sequence) -> int:
    """How deep a sequence's draft may be: a pass emits a token of the target's own besides, and trees have bounds."""
    return min(sequence.remaining, sequence.max_nodes or sequence.remaining) - 1


def _slot(sequence: Sequence) -> int:
    """The slot of a running sequence."""
    if sequence.slot is None:
        raise RuntimeError(f"request {sequence.request_id} has no slot: only running sequences are decoded")
    return sequence.slot
