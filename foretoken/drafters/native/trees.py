"""Draft trees as the native kernels see them, and those of a language model, drafted in one call.

Letters: B sequences, V vocabulary.
"""

from __future__ import annotations

from ctypes import Structure, addressof, byref, c_float, c_int64, c_void_p
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.arguments import Status
from foretoken.decoder.native import NativeDecoder

if TYPE_CHECKING:
    from foretoken.core.passes import Pass
    from foretoken.runner.runner import Runner
    from foretoken.trees.dynamic import ShapedExpansion

_TREE_TENSORS = (
    "parents", "ranks", "tokens", "scores", "kinds", "row_of", "rows", "node_parents", "node_numbers", "candidates",
    "path_scores", "candidate_parents", "lengths",
)  # fmt: skip


class DraftArguments(Structure):
    """Draft trees of one shape, and the choice of their tokens; see `Draft` in `kernels/children.h`."""

    _fields_ = (
        *((name, c_int64) for name in ("num_sequences", "num_nodes", "num_candidates", "num_rows", "vocab")),
        *((name, c_void_p) for name in (
            "parents", "ranks", "draws", "inverse_temperature", "seeds", "root_positions", "tokens", "scores", "kinds",
            "row_of", "rows", "node_parents", "node_numbers", "candidates", "path_scores", "candidate_parents",
            "floors", "intercepts", "lengths",
        )),
        ("slope", c_float),
    )  # fmt: skip


class Draw(IntEnum):
    """The choice of a sequence's draft tokens."""

    GREEDILY = 0
    COUPLED = 1
    SAMPLED = 2


class NativeDraft:
    """Draft trees for the kernels; `arguments` are valid as long as this object lives."""

    def __init__(self, expansion: ShapedExpansion, vocab_size: int, *, is_shared: bool = False) -> None:
        """Takes addresses of a tree that `can_draft` accepts; `is_shared`: one row of logits serves a whole level."""
        tree, draws = expansion.tensors(vocab_size, is_shared=is_shared), expansion.draws
        each = zip(draws.is_coupled.tolist(), draws.is_sampled.tolist(), strict=True)
        codes = [Draw.COUPLED if coupled else Draw.SAMPLED if sampled else Draw.GREEDILY for coupled, sampled in each]
        kinds, scales = (c_int64 * len(codes))(*codes), draws.batch.inverse_temperature
        seeds, positions = draws.batch.noise.seeds.contiguous(), draws.root_positions.contiguous()
        self._held: list[Any] = [tree, kinds, scales, seeds, positions]
        self.arguments = DraftArguments(
            num_sequences=len(tree.tokens),
            num_nodes=len(tree.parents),
            num_candidates=tree.num_candidates,
            num_rows=0 if tree.rows is None else tree.rows.shape[1],
            vocab=vocab_size,
            draws=addressof(kinds),
            inverse_temperature=scales.data_ptr(),
            seeds=seeds.data_ptr(),
            root_positions=positions.data_ptr(),
            **{name: part.data_ptr() for name in _TREE_TENSORS if (part := getattr(tree, name)) is not None},
        )
        if draws.floors is not None:
            depth = expansion.depth
            by_depth = [(c_float * depth)(*each[:depth]) for each in (draws.floors.floors, draws.floors.intercepts)]
            self._held += by_depth
            self.arguments.floors, self.arguments.intercepts = map(addressof, by_depth)
            self.arguments.slope = draws.floors.slope


def can_draft(expansion: ShapedExpansion, width: int) -> bool:
    """Decides whether the kernels can choose children: on a CPU, with temperature as the only processor.

    They draft whole trees. Pruning and stop rules need one level at a time, so that nothing is drafted below. They
    draw siblings without replacement. The candidates must not outnumber the `width` logits of the draft model or head.
    """
    draws, is_here = expansion.draws, runs_cpu_kernels(expansion.roots.device)
    return is_here and not draws.looks_at_levels and draws.is_plain and expansion.num_candidates <= width


def draft_trees(runner: Runner, work: Pass, expansion: ShapedExpansion, *, vocab_size: int) -> bool:
    """Computes a pass of a language model that ends with the roots of trees, and the trees below them, in one call.

    Node i of a tree, among the levels that have children, uses the i-th cache row behind the pass.

    Args:
        work: Chains of the B sequences of the expansion, with the logits after the last token of each.
        expansion: Trees of roots, filled in place.
        vocab_size: V, one past the largest token that may be drafted; logits are padded or cut to V.

    Returns:
        Whether the trees were drafted. False, without any change, if the kernels do not run the model, or cannot draft
            for these requests. States of recurrent layers are then known behind the nodes that were fed.

    Raises:
        PassError: See `Runner.run`.
    """
    blocks = runner.decoder
    if not isinstance(blocks, NativeDecoder) or not can_draft(expansion, min(vocab_size, blocks.num_logits)):
        return False
    work = runner.placed(work, num_drafted=expansion.num_fed)
    ready, draft = blocks.prepared(work), NativeDraft(expansion, vocab_size)
    drafted = blocks.behind_ends(ready, expansion.num_fed)
    rows = None if drafted is None else (c_void_p * len(drafted.made))(*(each.first_row for each in drafted.made))
    num_replayed = 0 if ready.states is None else ready.states.num_replayed
    sizes = map(c_int64, (work.node_offsets[-1], ready.arguments.num_threads, num_replayed))
    model, drawn = byref(ready.model), byref(draft.arguments)
    size = blocks.library.foretoken_draft_bytes(model, drawn, *sizes)
    memory = blocks.workspaces.take(size, f"a draft of {draft.arguments.num_nodes} nodes")
    ready.arguments.workspace = memory.data_ptr()
    last_position = c_int64(runner.last_position)
    status = blocks.library.foretoken_draft(model, byref(ready.arguments), drawn, last_position, rows)
    blocks.workspaces.give_back(memory)
    if status:
        raise PassError(blocks.complaint(Status(status), work))
    if drafted is not None:
        blocks.finish(work, ready, drafted.of_nodes(expansion.fed_nodes()[1]))
    return True
