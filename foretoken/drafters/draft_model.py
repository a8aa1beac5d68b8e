"""A smaller language model with the target's vocabulary drafts a chain or a tree, on its own KV cache.

Sources: Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (2302.01318) for chains; sampled trees draw
children without replacement as Sequoia does (2402.12374). Coupled requests draft with the target's noise (2408.07978).

Letters: B sequences, P parents of one level, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from foretoken.attention.layout import AttentionLayout
from foretoken.core.errors import ConfigError
from foretoken.core.token_tree import DraftLaw, DrawKind, TokenTree
from foretoken.drafters.base import Committed, DraftContext, Drafter, DrafterOptions, TargetFacts
from foretoken.sampling.noise import Purpose
from foretoken.sampling.processors import warp
from foretoken.target.loading import load_model, load_tokenizer
from foretoken.target.runner import GenericRunner
from foretoken.trees.choices import TreeShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.sampling.batch import SamplingBatch
    from foretoken.target.taps import Tap

_BRANCHING = TreeShape.from_choices(
    [(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 0, 0, 0), (0, 0, 0, 0, 0)]
)
_LONGEST_CATCH_UP = 2  # after full acceptance the last drafted token and the bonus token are new to the draft model


class Options(DrafterOptions):
    """Options of a draft model.

    Attributes:
        model: Directory or hub id of the draft model.
        draft_sample_method: "probabilistic" draws drafts from the draft model's warped distribution for sampled
            requests; "greedy" always takes its most probable tokens.
    """

    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"


@dataclass(slots=True)
class _SlotState:
    """What the draft model's KV holds for one sequence.

    Attributes:
        tokens: Tokens whose rows are in place, positions 0 …
        drafted: Nodes fed after them in the last proposal as (parent node, token); node i lies in row
            `len(tokens) + i - 1`, parent 0 is the root.
    """

    tokens: list[int]
    drafted: list[tuple[int, int]]


class DraftModelDrafter:
    """Drafts with a language model, level by level."""

    name = "draft_model"
    taps: tuple[Tap, ...] = ()

    def __init__(self, options: Options, target: TargetFacts, runner: GenericRunner) -> None:
        self._options, self._target, self._runner = options, target, runner
        self._shape = options.shape(_BRANCHING)
        self.max_nodes = self._shape.num_nodes
        self._slots: dict[int, _SlotState] = {}

    def propose(self, context: DraftContext) -> TokenTree:
        """See `Drafter`."""
        room = [
            min(depth, self._runner.context_len - len(tokens))
            for depth, tokens in zip(context.max_depth, context.tokens, strict=True)
        ]
        active = [row for row, depth in enumerate(room) if depth > 0]
        if not active:
            return TokenTree.roots(context.roots, device=self._target.device)
        root_logits = self._catch_up([context.slots[row] for row in active], [context.tokens[row] for row in active])
        growth = _Growth(self, context, active, self._shape.truncated(max(room)), root_logits)
        return growth.finish(room)

    def commit(self, committed: Committed) -> None:
        """Nothing to learn: the next proposal reads the accepted path off the committed tokens."""

    def release(self, slot: int) -> None:
        """See `Drafter`."""
        self._slots.pop(slot, None)

    def _catch_up(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Tensor:
        """Brings the draft model's KV up to the root and gives its logits there, (B, V)."""
        states = [self._keep_accepted(slot, ids) for slot, ids in zip(slots, tokens, strict=True)]
        for slot, state, ids in zip(slots, states, tokens, strict=True):
            while len(ids) - len(state.tokens) > _LONGEST_CATCH_UP:
                start = len(state.tokens)
                chunk = ids[start : min(start + self._runner.prefill_chunk, len(ids) - 1)]
                self._runner.prefill(slot, self._embeddable(chunk), start)
                state.tokens.extend(chunk)
        prefix = [len(state.tokens) for state in states]
        new = [list(ids[len(state.tokens) :]) for ids, state in zip(tokens, states, strict=True)]
        width = max(len(ids) for ids in new)
        device = self._runner.device
        positions = torch.tensor(prefix, device=device).unsqueeze(1) + torch.arange(width, device=device)
        padded = torch.tensor([self._embeddable(ids) + [0] * (width - len(ids)) for ids in new], device=device)
        layout = AttentionLayout(slots=slots, prefix=prefix, positions=positions)
        logits = self._runner.forward(padded, layout).logits
        for state, ids in zip(states, new, strict=True):
            state.tokens.extend(ids)
        last = torch.tensor([len(ids) - 1 for ids in new], device=device)
        return self._in_target_vocabulary(logits[torch.arange(len(slots), device=device), last])

    def _keep_accepted(self, slot: int, tokens: Sequence[int]) -> _SlotState:
        """Moves the rows of drafted nodes that were accepted into place; forgets the others."""
        state = self._slots.setdefault(slot, _SlotState([], []))
        del state.tokens[len(tokens) - 1 :]  # the last proposal was thrown away: its root is fed again for its logits
        path: list[int] = []
        node = 0
        for token in tokens[len(state.tokens) : -1]:
            children = [i + 1 for i, child in enumerate(state.drafted) if child == (node, token)]
            if not children:
                break
            node = children[0]
            path.append(node)
        start = len(state.tokens)
        if path:
            self._runner.cache.move_rows(slot, [start + node - 1 for node in path], start)
            state.tokens.extend(tokens[start : start + len(path)])
        state.drafted = []
        return state

    def feed_level(
        self, slots: Sequence[int], tokens: Tensor, parents: Sequence[int], visible: Tensor, depth: int
    ) -> Tensor:
        """Feeds the nodes of one level after the rows of the levels above.

        Args:
            slots: B slots.
            tokens: (B, P) int64, the level's nodes.
            parents: P parents, nodes of the level above.
            visible: (B, P, W) bool, drafted nodes that each sees, the level's own included.
            depth: Their depth.

        Returns:
            (B, P, V) logits.
        """
        states = [self._slots[slot] for slot in slots]
        device = tokens.device
        prefix = [len(state.tokens) for state in states]
        offset = visible.shape[2] - tokens.shape[1]
        scratch_depths = self._shape_depths[: visible.shape[2]].to(device)
        # A sequence near the draft model's context limit is fed past its own depth along with deeper ones; what it
        # drafts there is cut off, so its positions only have to be legal.
        last = self._runner.context_len - 1
        base = torch.tensor(prefix, device=device).unsqueeze(1) - 1
        layout = AttentionLayout(
            slots=slots,
            prefix=prefix,
            offset=offset,
            positions=(base + depth).clamp_max(last).expand(-1, tokens.shape[1]),
            visible=visible,
            scratch_positions=(base + scratch_depths).clamp_max(last),
        )
        logits = self._runner.forward(tokens.clamp_max(self._runner.vocab_size - 1), layout).logits
        for state, ids in zip(states, tokens.tolist(), strict=True):
            state.drafted.extend(zip(parents, ids, strict=True))
        return self._in_target_vocabulary(logits)

    @property
    def _shape_depths(self) -> Tensor:
        """Depths of the drafted nodes."""
        return torch.tensor(self._shape.depths[1:])

    def _embeddable(self, tokens: Sequence[int]) -> list[int]:
        """Tokens with ids that only the target has replaced by one that the draft model can embed."""
        last = self._runner.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Cuts or pads the last dimension to V; the two differ at most in unused padding ids."""
        missing = self._target.vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


class _Growth:
    """One proposal in the making: grows the shape level by level over the active sequences."""

    def __init__(
        self,
        drafter: DraftModelDrafter,
        context: DraftContext,
        active: list[int],
        shape: TreeShape,
        root_logits: Tensor,
    ) -> None:
        rows = torch.tensor(active, device=root_logits.device)
        self._context, self._active, self._shape = context, active, shape
        self._batch: SamplingBatch = context.sampling.select(rows)
        coupled = torch.tensor([context.is_coupled[row] for row in active], device=rows.device)
        # Sampled drafts carry their law; greedy and coupled ones are one-hot and may be chosen at will.
        greedy_drafts = drafter._options.draft_sample_method == "greedy"
        self._uses_noise = ~self._batch.greedy & (not greedy_drafts)
        self._is_coupled = coupled & self._uses_noise
        self._is_sampled = ~coupled & self._uses_noise
        self._any_coupled, self._any_sampled = bool(self._is_coupled.any()), bool(self._is_sampled.any())
        self._roots = torch.tensor([context.roots[row] for row in active], device=rows.device)
        self._root_positions = torch.tensor([len(context.tokens[row]) - 1 for row in active], device=rows.device)
        batch, nodes = len(active), shape.num_nodes
        self._tokens = torch.zeros(batch, nodes, dtype=torch.int64, device=rows.device)
        self._tokens[:, 0] = self._roots
        self._scores = torch.zeros(batch, nodes, device=rows.device)
        self._kinds = torch.zeros_like(self._tokens)
        self._row_of = torch.full_like(self._tokens, -1)
        self._rows: list[Tensor] = []
        self._parents, self._depths, self._ranks = shape.parents, shape.depths, shape.ranks
        self._children: list[list[int]] = [[] for _ in range(nodes)]  # in order of rank
        for node, parent in enumerate(self._parents):
            if node:
                self._children[parent].append(node)
        self._grow(drafter, root_logits)

    def _grow(self, drafter: DraftModelDrafter, root_logits: Tensor) -> None:
        """Fills all nodes; one pass of the draft model a level, the last level is not fed."""
        tree_mask = torch.eye(self._shape.num_nodes, dtype=torch.bool, device=root_logits.device)
        for node, parent in enumerate(self._parents):
            if node:
                tree_mask[node] |= tree_mask[parent]
        slots = [self._context.slots[row] for row in self._active]
        self._expand(0, root_logits)
        for depth in range(1, self._shape.depth):
            nodes = [node for node, d in enumerate(self._depths) if d == depth]
            parents = [self._parents[node] for node in nodes]
            visible = tree_mask[nodes, 1 : nodes[-1] + 1].expand(len(slots), -1, -1)
            logits = drafter.feed_level(slots, self._tokens[:, nodes], parents, visible, depth)
            for index, node in enumerate(nodes):
                self._expand(node, logits[:, index])

    def _expand(self, node: int, logits: Tensor) -> None:
        """Chooses the children of one node from the draft model's logits there, (B, V)."""
        children = self._children[node]
        if not children:
            return
        ranks = torch.tensor([self._ranks[child] for child in children], device=logits.device)
        # Draws are taken in order: one that follows a draw left out, as a shape with gaps in its ranks would have it,
        # has a law that nobody states.
        draws = torch.arange(len(children), device=logits.device)
        places = torch.where(self._is_sampled.unsqueeze(1), draws, ranks)
        log_probs = logits.log_softmax(1)
        keys = log_probs
        if self._any_coupled or self._any_sampled:
            warped = warp(logits, self._batch)
            log_probs = torch.where(self._uses_noise.unsqueeze(1), warped, log_probs)
            keys = log_probs + self._noise(node, logits.shape[1])
        best = keys.topk(int(ranks.max()) + 1, dim=1)
        chosen, chosen_keys = best.indices.gather(1, places), best.values.gather(1, places)
        self._tokens[:, children] = chosen
        self._scores[:, children] = self._scores[:, node : node + 1] + log_probs.gather(1, chosen)
        if self._any_sampled:
            kind = DrawKind.INDEPENDENT if len(children) == 1 else DrawKind.WITHOUT_REPLACEMENT
            # Past the support of the draft distribution any token is a choice, not a draw.
            is_drawn = self._is_sampled.unsqueeze(1) & (chosen_keys > float("-inf"))
            self._kinds[:, children] = torch.where(is_drawn, kind.value, DrawKind.ONE_HOT.value)
            self._row_of[:, children] = torch.where(is_drawn, len(self._rows), -1)
            self._rows.append(log_probs.exp())

    def _noise(self, node: int, vocab_size: int) -> Tensor:
        """(B, V): the target's own noise for coupled sequences, the drafter's for sampled ones, 0 for greedy ones."""
        noise = torch.zeros(len(self._active), vocab_size, device=self._tokens.device)
        keyed = self._batch.noise
        if self._any_coupled:
            positions = self._root_positions + self._depths[node] + 1
            shared = keyed.gumbel(positions, Purpose.TARGET, vocab_size)
            noise = torch.where(self._is_coupled.unsqueeze(1), shared, noise)
        if self._any_sampled:
            own = keyed.gumbel(self._root_positions, Purpose.DRAFT, vocab_size, lane=node)
            noise = torch.where(self._is_sampled.unsqueeze(1), own, noise)
        return noise

    def finish(self, room: Sequence[int]) -> TokenTree:
        """The batch's trees: active sequences cut at their own depth, the others with a root alone."""
        total, width = len(room), self._shape.num_nodes
        device = self._tokens.device
        rows = torch.tensor(self._active, device=device)
        limit = torch.tensor([max(depth, 0) for depth in room], device=device).unsqueeze(1)
        depths = torch.tensor(self._depths, device=device).expand(total, -1)
        is_kept = depths <= limit

        def spread(part: Tensor, empty: float) -> Tensor:
            whole = torch.full((total, width), empty, dtype=part.dtype, device=device)
            whole[rows] = part
            return torch.where(is_kept, whole, empty)

        tokens = spread(self._tokens, 0)
        tokens[:, 0] = torch.tensor(self._context.roots, device=device)
        parents = torch.tensor(self._parents, device=device).expand(total, -1)
        law = None
        if self._rows:
            probs = torch.zeros(total, len(self._rows), self._rows[0].shape[1], device=device)
            probs[rows] = torch.stack(self._rows, dim=1)
            law = DraftLaw(
                kinds=spread(self._kinds, 0),
                rows=probs,
                row_of=spread(self._row_of, -1),
                max_siblings=max(map(len, self._children)),
            )
        return TokenTree(
            tokens=tokens,
            parents=torch.where(is_kept, parents, -1),
            depths=torch.where(is_kept, depths, 0),
            num_nodes=is_kept.sum(1),
            max_depth=self._shape.depth,
            scores=spread(self._scores, 0.0),
            law=law,
        )


def create(options: Options, target: TargetFacts) -> Drafter:
    """See `foretoken.drafters.registry`.

    Raises:
        ConfigError: Without a model, or when its vocabulary is another one.
    """
    if options.model is None:
        raise ConfigError("method 'draft_model' needs a model. Expected the draft model's directory. Set 'model'.")
    model = load_model(options.model, device=str(target.device))
    tokenizer = load_tokenizer(options.model)
    if tokenizer is not None and target.tokenizer is not None:
        ours, theirs = target.tokenizer.get_vocab(), tokenizer.get_vocab()
        if ours != theirs:
            differing = len(set(ours.items()) ^ set(theirs.items()))
            raise ConfigError(
                f"draft model '{options.model}' has another vocabulary than '{target.name}': {differing} entries "
                "differ. Expected the same tokenizer. Use a draft model of the same family."
            )
    elif model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"draft model '{options.model}' has {model.vocab_size} tokens, the target {target.vocab_size}, and there "
            "are no tokenizers to compare. Expected the same vocabulary."
        )
    shape = options.shape(_BRANCHING)
    runner = GenericRunner(
        model, num_slots=target.num_slots, context_len=target.context_len, max_nodes=shape.num_nodes + 1
    )
    return DraftModelDrafter(options, target, runner)
