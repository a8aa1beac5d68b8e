"""Drafting level by level with weights: draws, passes, int8 copies of weights, and a draft model's KV cache.

A draft model is fed committed tokens once. Its classes work with its own ids; only logits for expansions and frontiers
from them use the target's ids, and a `VocabularyMap` translates.

Letters: B sequences, P parents of one level, W nodes that were fed, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_ids import common_prefix_len
from foretoken.decoder.base import UnsuitableError
from foretoken.sampling.draft_draws import DraftDraws

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.native_linear import Quantization
    from foretoken.drafters.base import DraftContext
    from foretoken.drafters.vocabularies import VocabularyMap
    from foretoken.runner.runner import Runner
    from foretoken.trees.dynamic import ShapedExpansion
    from foretoken.trees.expansion import Expansion, Frontier
    from foretoken.trees.merge import Pruning

_LONGEST_CATCH_UP = 2  # after full acceptance, the last drafted token and the bonus token are new to the draft model
_LONGEST_MAPPED_CATCH_UP = 8  # longer if tokens of the target are several of the draft model's


class _Drafted:
    """The nodes that the last proposal fed below the roots. Read by the next proposal, so that nothing waits.

    Fed nodes may differ from proposed ones: nodes without children are not fed, and fed nodes may have been left out.
    """

    def __init__(self, tokens: Tensor, parents: Tensor) -> None:
        """tokens: (B, W) int64; parents: (B, W) or (1, W) int64, indices among these nodes, -1 below the root."""
        self._tokens, self._parents = tokens, parents

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        """Returns tokens and parents of each sequence."""
        rows: list[list[list[int]]] = torch.stack([self._tokens, self._parents.expand_as(self._tokens)], dim=1).tolist()
        return rows

    def child(self, row: int, node: int, token: int) -> int | None:
        """Returns the first child of a node, -1 for the root, that was fed with a token."""
        tokens, parents = self.rows[row]
        return next((i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token), None)


@dataclass(slots=True)
class _SlotState:
    """The draft model's KV rows of one sequence.

    Attributes:
        tokens: Tokens with rows, positions 0 …
        drafted: Nodes that the last proposal fed after them, and the index of this sequence; node i is in cache row
            `len(tokens) + i`.
    """

    tokens: list[int]
    drafted: tuple[_Drafted, int] | None = None


class DraftLevels:
    """Fills expansions with a draft model's tokens."""

    def __init__(self, runner: Runner, *, vocab_size: int, mapping: VocabularyMap | None = None) -> None:
        """Starts with an empty cache.

        Args:
            runner: Of the draft model.
            vocab_size: V.
            mapping: From the target's vocabulary to the draft model's; None if they are the same.
        """
        self._runner, self._vocab_size, self._mapping = runner, vocab_size, mapping
        self._longest_catch_up = _LONGEST_CATCH_UP if mapping is None else _LONGEST_MAPPED_CATCH_UP
        self._slots: dict[int, _SlotState] = {}

    def begin(self, slot: int, source: int | None = None, tokens: Sequence[int] = ()) -> None:
        """Starts a sequence; the first draft reads the prompt.

        Args:
            slot: Of the sequence.
            source: A slot whose text has the same prefix, possibly the same slot; None for an empty cache.
            tokens: The draft model's ids of the prompt, compared with those of that text.
        """
        known = self._slots[source].tokens if source is not None and source in self._slots else []
        length = common_prefix_len(known, tokens)
        if length and source is not None and source != slot:
            self._runner.copy_prefix(source, slot, length)
        self._slots[slot] = _SlotState(list(tokens[:length]))

    def crop(self, slot: int, length: int) -> None:
        """Forgets a sequence's rows from position `length` on, and its drafted rows."""
        state = self._slots[slot]
        if length < len(state.tokens):
            del state.tokens[length:]
            state.drafted = None

    def fill(self, slots: Sequence[int], tokens: Sequence[Sequence[int]], expansion: ShapedExpansion) -> None:
        """Feeds the new tokens of some sequences, and expands drafts after them.

        Args:
            slots: B slots.
            tokens: The draft model's ids of each whole sequence, the root last; they continue what was fed before.
            expansion: Of B sequences; filled.
        """
        if self._runner.follow_weights():
            self._slots = {slot: _SlotState([]) for slot in self._slots}
        work = self._catch_up(slots, tokens)
        drafted = self._drafted_at_once(work, expansion) or self._drafted_by_levels(work, expansion)
        for row, (slot, ids) in enumerate(zip(slots, tokens, strict=True)):
            state = self._slots[slot]
            state.tokens.extend(ids[len(state.tokens) :])
            state.drafted = drafted, row

    def _catch_up(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Pass:
        """Feeds all but the last new tokens; returns the pass over the rest, with logits of the roots."""
        states = [self._keep_accepted(slot, ids) for slot, ids in zip(slots, tokens, strict=True)]
        for slot, state, ids in zip(slots, states, tokens, strict=True):
            while len(ids) - len(state.tokens) > self._longest_catch_up:
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
        """Moves the rows of accepted drafted nodes into place; forgets the others."""
        state = self._slots[slot]
        del state.tokens[len(tokens) - 1 :]  # the last proposal was discarded: its root is fed again for its logits
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

    def _drafted_at_once(self, work: Pass, expansion: ShapedExpansion) -> _Drafted | None:
        """Fills trees in one call of the decoder, which feeds all levels but the last; None if it cannot.

        The decoder feeds the ids that it chooses, so a map of vocabularies needs the loop over levels.
        """
        if self._mapping is not None or not self._runner.draft_trees(work, expansion, vocab_size=self._vocab_size):
            return None
        return _Drafted(*expansion.fed_nodes())

    def _drafted_by_levels(self, work: Pass, expansion: Expansion) -> _Drafted:
        """Fills trees with one pass per level; work: the pass that ends with their roots."""
        lengths = [end - start for start, end in pairwise(work.offsets)]
        prefix_lens = [known + new for known, new in zip(work.prefix_lens, lengths, strict=True)]
        passes = LevelPasses(work.slots, prefix_lens, self._runner.device)
        for depth in expansion.levels():
            if not depth:
                expansion.grow(depth, self._logits(work).unsqueeze(1))
                continue
            frontier = expansion.frontier(depth)
            if self._mapping is not None:
                frontier = frontier._replace(tokens=self._mapping.fed(frontier.tokens))
            expansion.grow(depth, self._level_logits(passes.next(frontier)))
        return _Drafted(passes.tokens, passes.parents)

    def _level_logits(self, level: Pass) -> Tensor:
        """(B, P, V), after every node of a level."""
        work = replace(
            level,
            tokens=level.tokens.clamp_max(self._runner.vocab_size - 1),
            # A sequence near the draft model's context limit is fed beyond its own depth, together with deeper ones.
            # Its drafts there are cut off, so its positions only have to be valid.
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
        """Replaces ids that only the target has by an id that the draft model can embed."""
        last = self._runner.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _in_target_vocabulary(self, logits: Tensor) -> Tensor:
        """Maps the last dimension to V, or cuts or pads it: one vocabulary differs at most in unused padding ids."""
        if self._mapping is not None:
            return self._mapping.to_target(logits)
        missing = self._vocab_size - logits.shape[-1]
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


QuantizationOption = Literal["auto", "int8", "none"]
_Made = TypeVar("_Made")


def with_quantization(option: QuantizationOption, make: Callable[[Quantization | None], _Made]) -> _Made:
    """Returns the result of `make` for int8 if it is wanted and possible, else for the weights as stored.

    Args:
        option: "int8" requires it, "auto" takes it if possible.
        make: Makes the result; raises `UnsuitableError` if the drafter cannot be quantised.

    Raises:
        ConfigError: For "int8" if it is not possible.
    """
    if option == "none":
        return make(None)
    try:
        return make("int8")
    except UnsuitableError as err:
        if option == "int8":
            raise ConfigError(
                f"quantization 'int8' cannot be had: {err} Leave it out to draft with the weights as they are stored."
            ) from err
        return make(None)


class KeptDraws:
    """The draws of the last proposal."""

    def __init__(self, *, greedy: bool, pruning: Pruning | None = None) -> None:
        """Starts without draws."""
        self._is_greedy, self._pruning = greedy, pruning
        self._draws: DraftDraws | None = None
        self._are_coupled: list[bool] = []

    def of(self, context: DraftContext, rows: Sequence[int], device: torch.device) -> tuple[Tensor, DraftDraws]:
        """Returns roots and draws of some sequences of a batch.

        Args:
            context: Of the whole batch.
            rows: B of its sequences, ascending.
            device: Where trees lie.

        Returns:
            (B,) int64 root tokens, and the draws of these sequences.
        """
        texts = [context.tokens[row] for row in rows]
        last = [[tokens[-1] for tokens in texts], [len(tokens) - 1 for tokens in texts]]
        roots, positions = integers_on(last, device).unbind()
        sampling, are_coupled = context.sampling, [context.is_coupled[row] for row in rows]
        if len(rows) < len(context.slots):
            sampling = sampling.select(torch.tensor(rows, device=device))
        draws = self._draws
        if draws is None or draws.batch is not sampling or self._are_coupled != are_coupled:
            draws = DraftDraws.build(sampling, are_coupled, positions, greedy=self._is_greedy)
            self._draws, self._are_coupled = draws, are_coupled
        return roots, replace(draws, root_positions=positions, pruning=self._pruning)


class LevelPasses:
    """The passes over the levels below the roots, from the first one on; the roots lie in the prefix.

    Attributes:
        tokens: (B, W) int64.
        parents: (B, W) int64, parents among the nodes that were fed, -1 below the roots.
    """

    def __init__(self, slots: Sequence[int], prefix_lens: Sequence[int], device: torch.device) -> None:
        """Starts before the first level."""
        self._slots, self._prefix_lens = slots, prefix_lens
        self.tokens = self.parents = torch.zeros(len(slots), 0, dtype=torch.int64, device=device)
        self._positions = self.tokens  # (B, W)
        self._next_positions = integers_on(prefix_lens, device).unsqueeze(1)
        self._above: range | None = None  # nodes of the level above

    def next(self, frontier: Frontier) -> Pass:
        """Returns the pass over a frontier, without logits. A node of depth d is d - 1 positions after the prefix."""
        tokens, origins = frontier
        (batch, count), earlier = tokens.shape, self.tokens.shape[1]
        if self._above is None:
            parents = torch.full_like(tokens, -1)
        elif origins is None:
            parents = torch.arange(self._above.start, self._above.stop, device=tokens.device).expand(batch, -1)
        else:
            parents = (origins + self._above.start).expand(batch, -1)
        self._above = range(earlier, earlier + count)
        self.tokens = torch.cat([self.tokens, tokens], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        self._positions = torch.cat([self._positions, self._next_positions.expand(batch, count)], dim=1)
        self._next_positions = self._next_positions + 1
        return Pass(
            tokens=tokens.flatten(),
            positions=self._positions.flatten(),
            parents=self.parents.flatten(),
            slots=self._slots,
            prefix_lens=self._prefix_lens,
            offsets=range(0, batch * count + 1, count),
            num_earlier=[earlier] * batch,
            logit_rows=None,
        )
