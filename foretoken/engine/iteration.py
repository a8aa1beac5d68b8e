"""The work of one iteration, trees of decoding sequences and chunks of prompts in one pass, and what follows from it.

Letters: B sequences, N nodes, V vocabulary, K tokens of one sequence.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.backend import integers_on
from foretoken.core.passes import Pass
from foretoken.core.records import SequenceStep, TreeTrace
from foretoken.drafters.base import Committed, Verified
from foretoken.engine.sequence import Sequence, contained, slot_of, token_scores

if TYPE_CHECKING:
    from torch import Tensor

    from foretoken.core.token_tree import TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Draft, Drafting
    from foretoken.runner.runner import Runner

# Longest time of a step with prompt tokens, in steps without; NOTES, "The longest gap between tokens".
_LONGEST_STEP = 2.4
_LEAST = 4  # prompt tokens of a step; a choice: a pass of four tokens takes about as long as one of two
_FIRST = 16  # prompt tokens of the first step beside decoding sequences, before any measurement; a choice
_FADE = 0.8  # weight of earlier steps in the moving average; a choice: about five steps
_LEAST_FACTOR, _GREATEST_FACTOR = 0.75, 1.25  # bounds on the change that one step makes; a choice
# Prompt tokens of one pass with all logits. Other requests wait for the pass: with 512 tokens they took up to 0.74 s,
# see "A server under load" in benchmarks/RESULTS.md. Four passes of 128 tokens take as long as one of 512.
_MOST_SCORED_TOKENS = 128


class PrefillBudget:
    """Number of prompt tokens in each step; `max_num_batched_tokens` caps a pass, None steers by measured times."""

    def __init__(self, max_num_batched_tokens: int | None = None) -> None:
        self.max_num_batched_tokens = max_num_batched_tokens
        self._step_seconds: dict[int, float] = {}  # of steps without prompt tokens, by bit length of decoding tokens
        self._tokens: float | None = None  # the steered budget

    def tokens(self, num_decoding: int, chunk: int, least: int = _LEAST) -> int:
        """Returns the prompt tokens of the next step, 1 to `chunk`, beside `num_decoding` decoding tokens.

        `least`: as many whatever they cost, if `max_num_batched_tokens` allows.
        """
        budget = chunk
        if self.max_num_batched_tokens is not None:
            budget = min(budget, self.max_num_batched_tokens - num_decoding)
        elif num_decoding:
            # At least as many as decoding tokens, so that prompts do not starve beside wide steps.
            budget = min(budget, max(int(self._tokens or _FIRST), num_decoding, least))
        return max(budget, 1)

    def learn_seconds(self, seconds: float, *, num_decoding: int, num_prompt: int) -> None:
        """Steers the budget by the seconds of a pass with so many tokens of decoding sequences and of prompts."""
        if not num_decoding:
            return
        size = num_decoding.bit_length()
        if not num_prompt:
            known = self._step_seconds.get(size, seconds)
            self._step_seconds[size] = _FADE * known + (1 - _FADE) * seconds
        elif self._step_seconds:
            nearest = min(self._step_seconds, key=lambda each: abs(each - size))
            wanted = _LONGEST_STEP * self._step_seconds[nearest]
            factor = min(max(wanted / max(seconds, 1e-9), _LEAST_FACTOR), _GREATEST_FACTOR)
            tokens = self._tokens or _FIRST
            if factor < 1.0 or num_prompt >= int(tokens):  # a fast short chunk tells nothing about longer ones
                self._tokens = max(min(tokens, num_prompt) * factor if factor < 1.0 else tokens * factor, _LEAST)


class Chunk(NamedTuple):
    """Consecutive prompt tokens of one sequence, from row `start` on; the last chunk ends with the root.

    `ends_prompt`: whether no chunk follows; the root of a scored prompt has a pass of its own.
    """

    sequence: Sequence
    slot: int
    start: int
    tokens: Seq[int]
    is_last: bool
    ends_prompt: bool

    @property
    def num_prompt(self) -> int:
        """Number of its tokens without the root."""
        return len(self.tokens) - self.is_last


class Prefill:
    """Reads prompts, `budget` tokens a pass. A prompt's last token is the first root; the pass gives its logits."""

    def __init__(self, target: Runner, drafting: Drafting, max_num_batched_tokens: int | None = None) -> None:
        self.budget = PrefillBudget(max_num_batched_tokens)
        self._target, self._drafting = target, drafting

    @staticmethod
    def divided(sequences: Seq[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the sequences that decode, and the sequences with unread prompts; leaves out finished ones."""
        decoding: list[Sequence] = []
        unread: list[Sequence] = []
        for sequence in sequences:
            if sequence.finish_reason is None:
                (decoding if sequence.num_cached == len(sequence.tokens) - 1 else unread).append(sequence)
        return decoding, unread

    def next_chunks(self, sequences: Seq[Sequence], num_decoding: int, most: int | None = None) -> list[Chunk]:
        """Returns the prompt chunks of the next pass, first come first served; skips prompts in the cache.

        `num_decoding` tokens of the pass belong to decoding sequences. `most` caps the prompt tokens; None for the
        target's limit. The last chunk of a prompt has all tokens whose attention weights drafters read, if the prompt
        and the cap do. Otherwise a chunk ends where its sequence has a cut.
        """
        if not sequences:
            return []
        most = min(most or self._target.prefill_chunk, self._target.prefill_chunk)
        observed = self._drafting.reads.attention_tokens
        chunks, left = list[Chunk](), self.budget.tokens(num_decoding, most, max(observed, _LEAST))
        observed = min(observed, left)
        for sequence in sequences:
            if sequence.num_cached == len(sequence.tokens) - 1 or sequence.slot is None or left == 0:
                continue
            start, unread = sequence.num_cached, len(sequence.tokens) - sequence.num_cached
            unread -= sequence.wants_prompt_scores  # the root of a scored prompt has a pass of its own
            ends = [end for end in sequence.cuts if start < end <= start + unread - observed]
            count = min(unread, left, min(ends, default=start + unread) - start)
            if 0 < unread - count < observed:
                count = unread - observed
            if count <= 0:  # the rest fits into the next pass as a whole
                continue
            tokens = sequence.tokens[start : start + count]
            is_last = start + count == len(sequence.tokens)
            chunks.append(Chunk(sequence, sequence.slot, start, tokens, is_last, count == unread))
            left -= count
        return chunks

    def num_next_tokens(self, sequences: Seq[Sequence], num_decoding: int) -> int:
        """Returns the number of tokens that `next_chunks` would return for the same arguments."""
        return sum(len(chunk.tokens) for chunk in self.next_chunks(sequences, num_decoding))

    def as_pass(self, chunks: Seq[Chunk]) -> Pass:
        """Returns a pass over some chunks that gives the logits of their roots and the weights that drafters read."""
        work = Pass.of_chains(
            [chunk.tokens for chunk in chunks],
            slots=[chunk.slot for chunk in chunks],
            prefix_lens=[chunk.start for chunk in chunks],
            device=self._target.device,
        )
        spans = list(zip(chunks, pairwise(work.offsets), strict=True))
        if lasts := [end - 1 for chunk, (_, end) in spans if chunk.is_last]:
            work = replace(work, logit_rows=integers_on(lasts, self._target.device))
        most = self._drafting.reads.attention_tokens
        ends = [span for chunk, span in spans if chunk.ends_prompt] if most else []
        if not ends:
            return work
        read = [token for start, end in ends for token in range(max(start, end - most), end)]
        return replace(work, attention_rows=integers_on(read, self._target.device))

    def finish_chunks(self, chunks: Seq[Chunk], output: PassOutput, seconds: float, num_decoding: int) -> None:
        """Records that a pass has filled the rows of chunks, and tells the drafters; output: of the chunks alone."""
        num_tokens = sum(len(chunk.tokens) for chunk in chunks) if chunks else 0
        self.budget.learn_seconds(seconds, num_decoding=num_decoding, num_prompt=num_tokens)
        if not chunks:
            return
        ends = [chunk.start + len(chunk.tokens) if chunk.ends_prompt else 0 for chunk in chunks]
        self._drafting.commit(
            Committed(
                slots=[chunk.slot for chunk in chunks],
                starts=[chunk.start for chunk in chunks],
                tokens=[chunk.tokens for chunk in chunks],
                features=output.features,
                attention=output.attention_over(ends),
            )
        )
        for chunk in chunks:
            chunk.sequence.num_cached = end = chunk.start + len(chunk.tokens)
            if end in chunk.sequence.cuts:
                self._target.keep_state(chunk.slot, end - 1)
            share = chunk.num_prompt / (num_tokens + num_decoding)
            chunk.sequence.metrics.prefill_seconds += seconds * share

    def score_chunk(self, sequence: Sequence, num_decoding: int, exclude: Callable[[Tensor], Tensor]) -> None:
        """Reads and scores the next tokens of a prompt for `prompt_logprobs`.

        `exclude` gets the (R, V) logits and returns them with -inf for tokens that are never generated.
        """
        begin = time.perf_counter()
        chunks = self.next_chunks([sequence], num_decoding, _MOST_SCORED_TOKENS)
        output = contained(sequence, self._scored, chunks, exclude)
        if output is not None:
            self.finish_chunks(chunks, output, time.perf_counter() - begin, num_decoding)

    def _scored(self, sequence: Sequence, chunks: list[Chunk], exclude: Callable[[Tensor], Tensor]) -> PassOutput:
        chunk = chunks[0]
        output = self._target.run(self.as_pass(chunks).with_all_logits())
        following = sequence.tokens[chunk.start + 1 : chunk.start + len(chunk.tokens) + 1]
        scores = token_scores(exclude(output.needed_logits), following, sequence.params.prompt_logprobs or 0)
        sequence.prompt_scores += scores
        return output


class Verification(NamedTuple):
    """The work of one iteration for the target: B trees, and chunks of prompts.

    Attributes:
        sequences: B; decoding sequences, then sequences with prompts that end in this pass.
        tree: The trees of the sequences, probes included; the root alone where a prompt ends.
        offsets: B + 1; node i of tree b has row `offsets[b] + i` of the logits.
        trees: The part of the pass with the trees of decoding sequences; None without any.
        num_decoding: Tokens of that part.
        chunks: Chunks of prompts, the rest of the pass.
    """

    sequences: list[Sequence]
    tree: TokenTree
    offsets: Seq[int]
    trees: Pass | None
    num_decoding: int
    chunks: list[Chunk]


class Outcome(NamedTuple):
    """Decision of acceptance for one sequence, on the host.

    Attributes:
        num_valid: Number of leading tokens with finite target logits that the request's parameters allow.
        num_drafted: Drafted nodes of the tree that could be accepted.
        tree_depth: Greatest depth of these nodes.
        sources: `TokenTree.source` of the accepted nodes; all 1 if one drafter proposed the tree.
        drafted: `TokenTree.source` of the nodes of `num_drafted`, in any order.
    """

    path: list[int]
    tokens: list[int]
    num_valid: int
    num_drafted: int
    tree_depth: int
    sources: list[int]
    drafted: list[int]


class VerifiedBatch(NamedTuple):
    """One iteration of some sequences after acceptance and before commit, with a trace of each sequence."""

    asked: Verification
    draft: Draft
    output: PassOutput
    outcomes: list[Outcome]
    lossy_tv: float
    traces: Seq[TreeTrace | None]

    def logits_of(self, row: int) -> Tensor:
        """Returns the (N, V) logits of one sequence's tree."""
        return self.output.needed_logits[self.asked.offsets[row] : self.asked.offsets[row + 1]]


def verification(
    target: Runner,
    prefill: Prefill,
    decoding: list[Sequence],
    joining: list[Sequence],
    draft: Draft,
    *,
    has_attention: bool = False,
) -> tuple[Verification, Pass]:
    """Returns the work of an iteration and its pass; `draft` is for `decoding`, `joining` still read prompts.

    has_attention: Whether attention weights of the first and last node of each tree are needed.
    """
    trees, num_nodes = None, 0
    if decoding:
        slots, lengths = [], []
        for sequence in decoding:
            slots.append(slot_of(sequence))
            lengths.append(len(sequence.tokens) - 1)
        trees = target.verification(slots, lengths, draft.tree, has_features=draft.is_committed)
        num_nodes = trees.offsets[-1]
        if has_attention:
            ends = {node for start, end in pairwise(trees.offsets) for node in (start, end - 1)}
            trees = replace(trees, attention_rows=integers_on(sorted(ends), trees.tokens.device))
    chunks = prefill.next_chunks(joining, num_nodes) if joining else []
    if not chunks:
        if trees is None:
            raise RuntimeError("an iteration decodes sequences or reads prompts")
        return Verification(decoding, draft.tree, trees.offsets, trees, num_nodes, chunks), trees
    ending = [chunk.sequence for chunk in chunks if chunk.is_last]
    asked = Verification(
        sequences=[*decoding, *ending],
        tree=draft.tree.with_roots([s.tokens[-1] for s in ending]),
        offsets=[*([0] if trees is None else trees.offsets), *range(num_nodes + 1, num_nodes + 1 + len(ending))],
        trees=trees,
        num_decoding=num_nodes,
        chunks=chunks,
    )
    prompts = prefill.as_pass(chunks)
    return asked, prompts if trees is None else trees.with_chains(prompts)


def newly_committed(
    roots: list[int], trees: Pass, tree: TokenTree, outcomes: list[Outcome], output: PassOutput, top_ids: Tensor | None
) -> Committed:
    """Returns what drafters learn: root and accepted path of every sequence, with their features.

    `trees` is the part of the pass with the trees, which others may follow.
    """
    features = output.features
    starts = trees.offsets[:-1]
    paths: list[list[int]] = []
    tokens: list[list[int]] = []
    for root, outcome in zip(roots, outcomes, strict=True):
        paths.append(outcome.path)
        tokens.append([root, *outcome.tokens[: len(outcome.path)]])
    if features is not None:
        nodes = [start + node for start, path in zip(starts, paths, strict=True) for node in (0, *path)]
        if nodes == list(range(len(nodes))):
            # Cloned: drafters keep the features, and a view would keep those of the whole pass.
            features = features if len(nodes) == len(features) else features[: len(nodes)].clone()
        else:
            features = features.index_select(0, integers_on(nodes, features.device))
    return Committed(
        slots=trees.slots,
        starts=trees.prefix_lens,
        tokens=tokens,
        features=features,
        verified=Verified(tree=tree, paths=paths, offsets=trees.offsets, top_ids=top_ids),
        attention=None if trees.attention_rows is None else output.attention_over(trees.prefix_lens),
    )


def sequence_step(
    drafting: Drafting,
    sequence: Sequence,
    outcome: Outcome,
    generated: list[int],
    num_proposed: int | None,
    trace: TreeTrace | None = None,
    *,
    ends_prompt: bool = False,
) -> SequenceStep:
    """Returns the record of one sequence's iteration; cuts the trace if the sequence ended inside the path."""
    accepted = min(len(outcome.path), len(generated))
    if trace is not None and len(generated) <= len(outcome.path):
        trace = replace(trace, path=outcome.path[:accepted], next_token=None)
    names: dict[int, tuple[str, ...]] = {}
    drafted: dict[str, int] = {}
    for source, count in Counter(outcome.drafted).items():
        names[source] = drafting.credit(source)
        for name in names[source]:
            drafted[name] = drafted.get(name, 0) + count
    accepted_from: list[tuple[str, ...]] = []
    accepted_by: dict[str, int] = {}
    for source in outcome.sources[:accepted]:
        accepted_from.append(names[source])
        for name in names[source]:
            accepted_by[name] = accepted_by.get(name, 0) + 1
    return SequenceStep(
        request_id=sequence.request_id,
        num_drafted=outcome.num_drafted,
        tree_depth=outcome.tree_depth,
        num_accepted=accepted,
        num_emitted=len(generated),
        tokens=generated,
        accepted_by=accepted_by,
        drafted_by=drafted,
        num_proposed=num_proposed,
        accepted_from=accepted_from,
        ends_prompt=ends_prompt,
        trace=trace,
    )
