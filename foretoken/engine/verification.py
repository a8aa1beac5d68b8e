"""What an iteration asks of the target, what acceptance decides, and what follows for caller, drafters and records.

Letters: B sequences, N nodes, V vocabulary, K tokens of one sequence.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from foretoken.core.backend import integers_on, reads_are_free
from foretoken.core.passes import Pass, TokenChoice
from foretoken.core.records import SequenceStep
from foretoken.drafters.base import Committed, Verified
from foretoken.engine.sequence import slot_of

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from foretoken.acceptance.decisions import Acceptance
    from foretoken.acceptance.rules import ChosenPath
    from foretoken.core.records import TreeTrace
    from foretoken.core.token_tree import HostFacts, TokenTree
    from foretoken.decoder.base import PassOutput
    from foretoken.drafting.drafting import Draft, Drafting
    from foretoken.engine.prefill import Chunk, Prefill
    from foretoken.engine.sequence import Sequence
    from foretoken.runner.runner import Runner
    from foretoken.sampling.node_scores import NodeScores


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


def outcomes_on_host(scores: NodeScores, acceptance: Acceptance) -> list[Outcome]:
    """Brings all outcomes of an iteration to the host in one transfer; `scores` has the tree without probes."""
    tree, path, nodes = scores.tree, acceptance.path, acceptance.path.clamp_min(0)
    is_finite = scores.by_node(torch.isfinite(scores.logits.amax(1)))
    columns = [
        acceptance.num_accepted.unsqueeze(1), acceptance.next_token.unsqueeze(1), path, tree.tokens.gather(1, nodes),
        is_finite[:, :1], is_finite.gather(1, nodes),
    ]  # fmt: skip
    facts = _facts_of_drafts(tree)
    if facts is None:
        is_drafted = tree.parents >= 0
        columns += [is_drafted.sum(1, keepdim=True), (tree.depths * is_drafted).amax(1, keepdim=True)]
    if tree.source is not None:
        columns += [tree.source.gather(1, nodes), torch.where(tree.parents >= 0, tree.source, 0)]
    outcomes, depth = [], path.shape[1]
    for row, values in enumerate(torch.cat(columns, dim=1).tolist()):  # the synchronisation
        accepted, next_token = values[:2]
        on_path, tokens, is_valid = values[2 : 2 + depth], values[2 + depth : 2 + 2 * depth], values[2 + 2 * depth :]
        rest = values[3 + 3 * depth :]
        num_drafted, tree_depth = (facts.num_nodes[row] - 1, facts.depths[row]) if facts is not None else rest[:2]
        # Each token needs a finite row of logits at the root or on the path; the first bad row ends the sequence. A
        # row without a possible token draws -1: the request's parameters may exclude all tokens.
        num_valid = min([*is_valid[: accepted + 1], 0].index(0), accepted + (next_token >= 0))
        outcomes.append(
            Outcome(
                path=on_path[:accepted],
                tokens=[*tokens[:accepted], next_token],
                num_valid=num_valid,
                num_drafted=num_drafted,
                tree_depth=tree_depth,
                sources=rest[2 : 2 + accepted] if tree.source is not None else [1] * accepted,
                drafted=[1] * num_drafted if tree.source is None else [each for each in rest[2 + depth :] if each],
            )
        )
    return outcomes


def outcomes_of_paths(tree: TokenTree, paths: Seq[ChosenPath]) -> list[Outcome]:
    """Returns the outcomes of accepted paths.

    Args:
        tree: Without probes, on a device where reads are free.
        paths: B; a last token of -1 means that its logits are not finite.
    """
    facts = _facts_of_drafts(tree)
    rows = _drafted_of_rows(tree) if facts is None else []
    outcomes = []
    for row, (nodes, tokens) in enumerate(paths):
        if facts is None:
            sources, num_drafted, tree_depth, drafted = rows[row]
        else:
            num_drafted, tree_depth = facts.num_nodes[row] - 1, facts.depths[row]
            sources, drafted = None, [1] * num_drafted
        outcomes.append(
            Outcome(
                path=nodes,
                tokens=tokens,
                num_valid=len(nodes) + (tokens[-1] >= 0),
                num_drafted=num_drafted,
                tree_depth=tree_depth,
                sources=[1] * len(nodes) if sources is None else [sources[node] for node in nodes],
                drafted=drafted,
            )
        )
    return outcomes


def _facts_of_drafts(tree: TokenTree) -> HostFacts | None:
    """Returns host facts of trees without probes, if they hold all that outcomes need."""
    facts = tree.host_facts
    return facts if facts is not None and tree.source is None and facts.are_depths_exact else None


class _Drafted(NamedTuple):
    """Nodes of one tree that could be accepted; fields as in `TokenTree` and `Outcome`."""

    sources: list[int] | None
    num_drafted: int
    tree_depth: int
    drafted: list[int]


def _drafted_of_rows(tree: TokenTree) -> list[_Drafted]:
    sources = [None] * tree.batch_size if tree.source is None else tree.source.tolist()
    rows = []
    for parents, depths, of_nodes in zip(tree.parents.tolist(), tree.depths.tolist(), sources, strict=True):
        num_nodes, deepest = 0, 0
        drafted: list[int] = []
        for node, parent in enumerate(parents):
            if parent >= 0:
                num_nodes, deepest = num_nodes + 1, max(deepest, depths[node])
                source = 1 if of_nodes is None else of_nodes[node]
                if source:
                    drafted.append(source)
        rows.append(_Drafted(of_nodes, num_nodes, deepest, drafted))
    return rows


def greatest_on_host(logits: Tensor) -> list[int]:
    """Returns R tokens with the greatest logit of (R, V) float32 on a CPU, the lowest among equals.

    A token is -1 if the greatest logit is not finite.
    """
    rows = logits.numpy()  # NumPy's argmax is vectorised along a row, torch's is not
    best = rows.argmax(1)
    is_finite = np.isfinite(rows[np.arange(len(rows)), best])  # argmax treats NaN as the greatest
    tokens: list[int] = np.where(is_finite, best, -1).tolist()
    return tokens


def newly_committed(
    roots: list[int],
    trees: Pass,
    tree: TokenTree,
    outcomes: list[Outcome],
    output: PassOutput,
    top_ids: Tensor | None,
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


class Launched(NamedTuple):
    """One iteration of some sequences whose pass was launched; `output` is read by acceptance."""

    asked: Verification
    draft: Draft
    output: PassOutput


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


def token_choice(
    sequences: Seq[Sequence], offsets: Seq[int], impossible_ids: Tensor | None, device: torch.device
) -> TokenChoice | None:
    """Tells a decoder how to choose tokens of requests that use temperature alone; None if greatest logits are enough.

    For other requests the decoder's choice is ignored. `offsets` are B + 1, the first row of logits of each tree.
    `impossible_ids`, (U,) int64 or None, are never generated.
    """
    params = [s.params for s in sequences]
    scales = [p.inverse_temperature if p.is_plain else 0.0 for p in params]
    if not reads_are_free(device) or (impossible_ids is None and not any(scales)):
        return None
    counts = np.diff(offsets)
    seeds = np.array([s.sampling.seed for s in sequences], dtype=np.int64)
    return TokenChoice(
        inverse_temperature=torch.from_numpy(np.repeat(np.array(scales, dtype=np.float32), counts)),
        seeds=torch.from_numpy(np.repeat(seeds, counts)),
        impossible_ids=impossible_ids,
    )
