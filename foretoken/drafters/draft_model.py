"""A smaller language model with the target's vocabulary drafts a chain or a tree, on its own KV cache.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (2302.01318) for chains; sampled trees draw
children without replacement as Sequoia does (2402.12374). Coupled requests draft with the target's noise (2408.07978).

Letters: B sequences, P parents of one level, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import (
    LONGEST_CHAIN,
    Committed,
    DraftContext,
    Drafter,
    DrafterOptions,
    DraftRequest,
    TargetHandle,
    TargetReads,
)
from foretoken.drafters.kept_draws import KeptDraws
from foretoken.drafters.level_passes import LevelPasses
from foretoken.drafters.quantization import QuantizationOption, with_quantization
from foretoken.hf.loading import load_model, load_tokenizer
from foretoken.runner.runner import Runner
from foretoken.trees.choices import TreeShape
from foretoken.trees.dynamic import begin_expansion
from foretoken.trees.expansion import TreeExpansion
from foretoken.trees.pruning import Pruning

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.lean.int8 import Quantization
    from foretoken.hf.loading import LoadedModel
    from foretoken.trees.dynamic import AnyShape
    from foretoken.trees.expansion import Expansion

# Best node first: any beginning of the list is a tree.
_BRANCHING = (
    (0,), (0, 0), (1,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 0, 0), (2,), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0, 0),
)  # fmt: skip
_LONGEST_CATCH_UP = 2  # after full acceptance the last drafted token and the bonus token are new to the draft model


class Options(DrafterOptions):
    """Options of a draft model.

    Attributes:
        model: Directory or hub id of the draft model.
        revision: Of the hub, where `model` is a hub id; None for its main branch.
        draft_sample_method: "probabilistic" draws drafts from the draft model's warped distribution for sampled
            requests; "greedy" always takes its most probable tokens.
        quantization: "int8" drafts with copies of all matrices in int8, a scale for each row, on native kernels (CPUs,
            float32 and bfloat16; no mixture of experts): a byte a weight beside the model's own. "none" drafts with the
            weights as they are stored; "auto" with int8 where that can be.
    """

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)

    revision: str | None = None
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    quantization: QuantizationOption = "auto"


class _Drafted:
    """What the last proposal fed below the roots, looked at when the next one asks: by then nobody has to wait for it.

    It need not be what was proposed: nodes without children are not fed, and fed ones may have been left out.
    """

    def __init__(self, tokens: Tensor, parents: Tensor) -> None:
        """W nodes of each sequence.

        Args:
            tokens: (B, W) int64.
            parents: (B, W) or (1, W) int64, of each node among these; -1 below the root.
        """
        self._tokens, self._parents = tokens, parents

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        """Tokens and parents of each sequence."""
        rows: list[list[list[int]]] = torch.stack([self._tokens, self._parents.expand_as(self._tokens)], dim=1).tolist()
        return rows

    def child(self, row: int, node: int, token: int) -> int | None:
        """The first child of a node, -1 for the root, that was fed with a token."""
        tokens, parents = self.rows[row]
        return next((i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token), None)


@dataclass(slots=True)
class _SlotState:
    """What the draft model's KV holds for one sequence.

    Attributes:
        tokens: Tokens whose rows are in place, positions 0 …
        drafted: What the last proposal fed after them, and which row of it is this sequence's; node i lies in cache row
            `len(tokens) + i`.
    """

    tokens: list[int]
    drafted: tuple[_Drafted, int] | None = None


class DraftModelDrafter:
    """Drafts with a language model, level by level."""

    name = "draft_model"
    reads = TargetReads(is_last_enough=True)

    def __init__(self, options: Options, load: Callable[[TargetHandle], LoadedModel]) -> None:
        """A drafter whose model is not loaded yet.

        Args:
            options: Of the drafter.
            load: Gives the draft model for a target.
        """
        self._options, self._load = options, load
        self._shape: AnyShape = (
            options.dynamic_shape(LONGEST_CHAIN)
            if options.tree == "dynamic"
            else options.shape(lambda: TreeShape.from_choices(_BRANCHING))
        )
        self._shapes = [self._shape.truncated(depth) for depth in range(self._shape.depth + 1)]
        self.nodes_by_depth: Sequence[int] = [shape.num_nodes for shape in self._shapes]
        self._slots: dict[int, _SlotState] = {}
        self._draws = KeptDraws(greedy=options.draft_sample_method == "greedy", pruning=options.pruning)

    def attach(self, target: TargetHandle) -> None:
        """Loads the model, and allocates its KV cache."""
        self._target = target
        shape = self._shape
        most_fed = shape.num_nodes if isinstance(shape, TreeShape) else shape.num_expanded
        self._runner = Runner(
            self._load(target), num_slots=target.num_slots, context_len=target.context_len,
            max_nodes=most_fed + 1, runner=target.runner,
        )  # fmt: skip
        with_quantization(self._options.quantization, self._quantize)

    def _quantize(self, quantization: Quantization | None) -> None:
        """Quantises the model, or leaves it as it is stored.

        Raises:
            UnsuitableError: When it cannot be quantised; it is as it was.
        """
        if quantization is not None:
            self._runner.quantize(quantization)

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Starts with an empty cache; the prompt is read when the first draft is asked for."""
        del request
        self._slots[slot] = _SlotState([])

    def propose(self, context: DraftContext) -> TokenTree:
        """The shape, expanded level by level."""
        room = [
            min(depth, self._runner.context_len - len(tokens))
            for depth, tokens in zip(context.max_depth, context.tokens, strict=True)
        ]
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=self._target.device)
        slots, tokens = [context.slots[row] for row in active], [context.tokens[row] for row in active]
        work = self._catch_up(slots, tokens)
        expansion = self._expansion(context, active, self._shapes[min(max(room), self._shape.depth)])
        drafted = self._drafted_at_once(work, expansion) or self._drafted_by_levels(work, expansion)
        for row, (slot, ids) in enumerate(zip(slots, tokens, strict=True)):
            state = self._slots[slot]
            state.tokens.extend(ids[len(state.tokens) :])
            state.drafted = drafted, row
        return expansion.finish(active, room, context.roots)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn: the next proposal reads the accepted path off the committed tokens."""

    def release(self, slot: int) -> None:
        """Forgets the sequence."""
        self._slots.pop(slot, None)

    def _catch_up(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Pass:
        """Brings the draft model's KV close to the roots; gives the pass over what is left, with their logits."""
        states = [self._keep_accepted(slot, ids) for slot, ids in zip(slots, tokens, strict=True)]
        for slot, state, ids in zip(slots, states, tokens, strict=True):
            while len(ids) - len(state.tokens) > _LONGEST_CATCH_UP:
                start = len(state.tokens)
                chunk = ids[start : min(start + self._runner.prefill_chunk, len(ids) - 1)]
                self._runner.prefill(slot, self._embeddable(chunk), start)
                state.tokens.extend(chunk)
        prefix_lens = [len(state.tokens) for state in states]
        return Pass.of_chains(
            [self._embeddable(ids[known:]) for ids, known in zip(tokens, prefix_lens, strict=True)],
            slots=slots,
            prefix_lens=prefix_lens,
            device=self._runner.device,
            has_last_logits=True,
        )

    def _keep_accepted(self, slot: int, tokens: Sequence[int]) -> _SlotState:
        """Moves the rows of drafted nodes that were accepted into place; forgets the others."""
        state = self._slots[slot]
        del state.tokens[len(tokens) - 1 :]  # the last proposal was thrown away: its root is fed again for its logits
        path: list[int] = []
        if state.drafted is not None:
            drafted, row = state.drafted
            for token in tokens[len(state.tokens) : -1]:
                child = drafted.child(row, path[-1] if path else -1, token)
                if child is None:
                    break
                path.append(child)
        start = len(state.tokens)
        if path:
            self._runner.cache.move_rows(slot, [start + node for node in path], start)
            state.tokens.extend(tokens[start : start + len(path)])
        state.drafted = None
        return state

    def _expansion(self, context: DraftContext, active: Sequence[int], shape: AnyShape) -> Expansion:
        """An empty proposal for some sequences of the batch."""
        roots, draws = self._draws.of(context, active, self._runner.device)
        return begin_expansion(shape, roots, draws)

    def _drafted_at_once(self, work: Pass, expansion: Expansion) -> _Drafted | None:
        """Fills static trees in one call of the decoder, which feeds all levels but the last; None where it cannot."""
        if not isinstance(expansion, TreeExpansion) or not self._runner.draft_trees(
            work, expansion, vocab_size=self._target.vocab_size
        ):
            return None
        nodes = slice(1, self.nodes_by_depth[expansion.depth - 1])
        return _Drafted(expansion.tokens[:, nodes], expansion.parents[None, nodes] - 1)

    def _drafted_by_levels(self, work: Pass, expansion: Expansion) -> _Drafted:
        """Fills trees with a pass for each level; work: the one that ends with their roots."""
        lengths = [end - start for start, end in pairwise(work.offsets)]
        prefix_lens = [known + new for known, new in zip(work.prefix_lens, lengths, strict=True)]
        passes = LevelPasses(work.slots, prefix_lens, self._runner.device)
        for depth in expansion.levels():
            if depth:
                logits = self._level_logits(passes.next(expansion.frontier(depth)))
            else:
                logits = self._logits(work).unsqueeze(1)
            expansion.grow(depth, logits)
        return _Drafted(passes.tokens, passes.parents)

    def _level_logits(self, level: Pass) -> Tensor:
        """(B, P, V), after every node of a level."""
        work = replace(
            level,
            tokens=level.tokens.clamp_max(self._runner.vocab_size - 1),
            # A sequence near the draft model's context limit is fed past its own depth along with deeper ones; what it
            # drafts there is cut off, so its positions only have to be valid.
            positions=level.positions.clamp_max(self._runner.context_len - 1),
            logit_rows=torch.arange(level.num_tokens, device=level.tokens.device),
        )
        logits = self._logits(work)
        return logits.view(level.num_sequences, -1, logits.shape[-1])

    def _logits(self, work: Pass) -> Tensor:
        """(R, V), of a pass."""
        logits = self._runner.run(work).logits
        assert logits is not None, "the pass asks for them"
        return self._in_target_vocabulary(logits)

    def _embeddable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with ids that only the target has replaced by one that the draft model can embed."""
        last = self._runner.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Cuts or pads the last dimension to V; the two differ at most in unused padding ids."""
        missing = self._target.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


def create(options: Options) -> Drafter:
    """See `foretoken.drafters.registry`.

    Raises:
        ConfigError: Without a model.
    """
    if options.model is None:
        raise ConfigError("method 'draft_model' needs a model. Expected the draft model's directory. Set 'model'.")
    return DraftModelDrafter(options, lambda target: load_draft_model(options, target, target.tokenizer))


def load_draft_model(options: Options, target: TargetHandle | LoadedModel, target_tokenizer: Any) -> LoadedModel:
    """The draft model.

    Args:
        options: With a model.
        target: What it drafts for.
        target_tokenizer: The target's, or None.

    Raises:
        ConfigError: When its vocabulary is not the target's.
        ModelError: When it cannot be loaded.
    """
    name = options.model
    assert name is not None, "asked for before"
    dtype, device = str(target.dtype).removeprefix("torch."), str(target.device)
    model = load_model(name, dtype=dtype, device=device, revision=options.revision)
    tokenizer = load_tokenizer(name, options.revision)
    if tokenizer is not None and hasattr(target_tokenizer, "get_vocab"):
        ours, theirs = target_tokenizer.get_vocab(), tokenizer.get_vocab()
        if ours != theirs:
            differing = len(set(ours.items()) ^ set(theirs.items()))
            raise ConfigError(
                f"draft model '{name}' has another vocabulary than '{target.name}': {differing} entries "
                "differ. Expected the same tokenizer. Use a draft model of the same family."
            )
    elif model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model '{name}' has {model.vocab_size} tokens, the target {target.vocab_size}, and there "
            "are no tokenizers to compare. Expected the same vocabulary."
        )
    return model
