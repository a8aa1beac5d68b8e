"""Drafting level by level: passes over the levels, whole drafts as CUDA graphs, and a draft model's KV cache.

A CUDA graph is one launch in place of some thirty for each level. A draft model is fed committed tokens once. Its
classes work with its own ids; only logits for expansions and frontiers from them use the target's ids, and a
`VocabularyMap` translates.

Letters: B sequences, P parents of one level, W nodes that were fed, V target vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from foretoken.core.backend import has_cuda_runtime, integers_on
from foretoken.core.passes import Pass
from foretoken.core.token_tree import common_prefix_len
from foretoken.decoder.cuda_graphs import (
    WARM_UPS,
    CapturedGraphs,
    CudaGraphCapture,
    GraphDecoder,
    bound_of,
    captured_nodes,
)
from foretoken.decoder.native import NativeDecoder
from foretoken.drafters.native.trees import draft_trees
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.sampling.noise import KeyedNoise
from foretoken.trees.dynamic import AnyShape, ShapedExpansion, begin_expansion

if TYPE_CHECKING:
    from foretoken.decoder.cuda_graphs import GraphCapture
    from foretoken.drafters.base import DraftContext
    from foretoken.drafters.partial_reads import DraftTokens, PartialRows, SampleMethod
    from foretoken.drafters.vocabularies import VocabularyMap
    from foretoken.runner.runner import Runner
    from foretoken.trees.expansion import Expansion, Frontier
    from foretoken.trees.merge import Pruning
    from foretoken.trees.stopping import StopRule

_LONGEST_CATCH_UP = 2  # after full acceptance, the last drafted token and the bonus token are new to the draft model
_LONGEST_MAPPED_CATCH_UP = 8  # longer if tokens of the target are several of the draft model's
_MAX_GRAPHS = 64  # a choice: batches of up to eight sequences in eight depths
_CAPTURED_USE = 2  # a choice: what is drafted once is not worth the time of a capture
_TRUNCATION = ("top_k", "top_p", "min_p")
Result = TypeVar("Result")


class Prefixes(NamedTuple):
    """The committed rows of B cache slots, which drafts stand behind: on the host, under capture (B,) int32 tensors.

    Attributes:
        slots: Of the KV cache.
        lengths: Of the prefixes.
        bound: Under capture the greatest length that the graph serves; else None.
        positions: Of the first nodes behind the prefixes; None if row i of every slot holds position i.
    """

    slots: Sequence[int] | Tensor
    lengths: Sequence[int] | Tensor
    bound: int | None = None
    positions: Sequence[int] | Tensor | None = None


class CapturedExpansion(Generic[Result]):
    """Expands trees, as CUDA graphs where possible. A graph is captured when its shape is used again."""

    def __init__(
        self,
        fill: Callable[..., Result],
        device: torch.device,
        *,
        is_capturable: bool = True,
        capture: GraphCapture | None = None,
    ) -> None:
        """Prepares; `capture` is how graphs are captured, None for CUDA graphs on GPUs.

        Args:
            fill: Fills a tree of roots in place, without reading any tensor: takes the expansion, the inputs of
                `expand`, and its prefixes if there are any.
            is_capturable: Whether the work of `fill` can be captured.
        """
        self._fill, self._device = fill, device
        if capture is None and has_cuda_runtime(device):
            capture = CudaGraphCapture(device)
        self._graphs: CapturedGraphs[tuple[ShapedExpansion, Result]] | None = None
        if capture is not None and is_capturable:
            self._graphs = CapturedGraphs(capture, device, limit=_MAX_GRAPHS, name="a tree")
        self._uses: Counter[Hashable] = Counter()

    def expand(
        self,
        shape: AnyShape,
        roots: Tensor,
        draws: DraftDraws,
        inputs: Sequence[Tensor],
        prefixes: Prefixes | None = None,
    ) -> tuple[ShapedExpansion, Result]:
        """Returns trees of (B,) int64 roots, filled, and the result of `fill`; both are valid until the next call.

        Args:
            inputs: What `fill` reads, equal in shape and dtype for equal trees and batches.
            prefixes: On the host; None if `fill` reads no KV cache.
        """
        if self._graphs is None:
            expansion = begin_expansion(shape, roots, draws)
            return expansion, self._fill(expansion, *inputs, *(() if prefixes is None else (prefixes,)))
        batch = draws.batch
        truncation = {name: value for name in _TRUNCATION if (value := getattr(batch, name)) is not None}
        own, bound = list(inputs), None
        if prefixes is not None:
            own.append(_packed(prefixes))
            bound = bound_of(max(prefixes.lengths))
        contents = [
            roots, draws.root_positions, draws.is_coupled, draws.is_sampled, batch.noise.seeds, batch.temperature,
            batch.greedy, *own, *truncation.values(),
        ]  # fmt: skip
        kinds = (draws.has_coupled, draws.has_sampled, draws.is_drawn_for_all)
        key = (shape, len(roots), kinds, *truncation, batch.largest_top_k, bound, *(part.shape for part in inputs))
        work = partial(self._captured_tree, shape, draws, list(truncation), bound)
        self._uses[key] += 1
        if self._uses[key] < _CAPTURED_USE:
            WARM_UPS.count += 1
            return work(*(content.to(self._device) for content in contents))
        return self._graphs.run(key, contents, work)

    def _captured_tree(
        self, shape: AnyShape, draws: DraftDraws, limits: Sequence[str], bound: int | None, *contents: Tensor
    ) -> tuple[ShapedExpansion, Result]:
        """The captured function: expands trees with draws from parameters in tensors of its own, `limits` last."""
        roots, root_positions, is_coupled, is_sampled, seeds, temperature, greedy, *others = contents
        inputs: list[Any] = others[: len(others) - len(limits)]
        if bound is not None:
            slots, lengths, positions = (row[: len(roots)] for row in inputs.pop())
            inputs.append(Prefixes(slots, lengths, bound, positions))
        own_limits: dict[str, Any] = dict(zip(limits, others[len(others) - len(limits) :], strict=True))
        # Nothing else of the batch is read, see `DraftDraws.keys`.
        batch = replace(
            draws.batch, noise=KeyedNoise(seeds), temperature=temperature, greedy=greedy, processors=(), **own_limits
        )
        own = replace(draws, batch=batch, root_positions=root_positions, is_coupled=is_coupled, is_sampled=is_sampled)
        expansion = begin_expansion(shape, roots, own)
        return expansion, self._fill(expansion, *inputs)


def _packed(prefixes: Prefixes) -> Tensor:
    """Returns slots, lengths and positions, (3, B or more) int32; each row begins at a multiple of 16 bytes."""
    positions = prefixes.lengths if prefixes.positions is None else prefixes.positions
    rows = [list(prefixes.slots), list(prefixes.lengths), list(positions)]
    return torch.tensor([[*row, *[0] * (-len(row) % 4)] for row in rows], dtype=torch.int32)


class _Drafted:
    """The nodes that the last proposal fed below the roots: nodes with children, some of them not proposed later."""

    def __init__(self, tokens: Tensor, parents: Tensor) -> None:
        """tokens: (B, W) int64; parents: (B, W) or (1, W) int64, indices among these nodes, -1 below the root."""
        self._tokens, self._parents = tokens, parents

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        rows: list[list[list[int]]] = torch.stack([self._tokens, self._parents.expand_as(self._tokens)], dim=1).tolist()
        return rows

    def path(self, row: int, text: Sequence[int]) -> list[int]:
        """Returns the longest path of fed nodes below the root that a text begins with."""
        path: list[int] = []
        above = -1
        for node, (token, parent) in enumerate(zip(*self.rows[row], strict=True)):
            if len(path) == len(text):
                break
            if parent == above and token == text[len(path)]:  # parents come before their children
                path.append(node)
                above = node
        return path


@dataclass(slots=True)
class _SlotState:
    """The tokens of one sequence that the draft model's KV rows hold; the nodes of `drafted` stand behind them."""

    tokens: list[int]
    drafted: tuple[_Drafted, int] | None = None


class TreeDrafts:
    """Drafts trees with a language model below the last tokens of a pass, in one call where the decoder can."""

    def __init__(
        self, runner: Runner, *, vocab_size: int, mapping: VocabularyMap | None = None, num_layers: int | None = None
    ) -> None:
        """Prepares; `mapping` translates the target's ids, None for the same vocabulary; `num_layers` as in `Pass`."""
        self._runner, self._vocab_size, self._mapping, self._num_layers = runner, vocab_size, mapping, num_layers
        self._decoder: object = None  # whose passes are captured

    def draft(
        self, work: Pass, prefixes: Prefixes, shape: AnyShape, roots: Tensor, draws: DraftDraws
    ) -> tuple[ShapedExpansion, tuple[Tensor, Tensor]]:
        """Runs a pass and drafts trees; returns them, valid until the next call, and the nodes that were fed.

        Args:
            work: Ends each sequence with its root, and has the logits of the roots.
            prefixes: With the roots.
            roots: (B,) int64, the target's ids of the roots.

        Returns:
            The trees; and (B, W) tokens and (B, W) or (1, W) parents of fed nodes: those with children, -1 below the
            root. Node i has the i-th cache row behind the root's.
        """
        # The decoder feeds the ids that it chooses, so a map of vocabularies needs the loop over levels.
        if self._mapping is None and isinstance(self._runner.decoder, NativeDecoder):
            begun = begin_expansion(shape, roots, draws)
            cut = replace(work, num_layers=self._num_layers)
            if draft_trees(self._runner, cut, begun, vocab_size=self._vocab_size):
                return begun, begun.fed_nodes()
        runner = self._runner
        if self._decoder is not runner.decoder:  # another one follows writes to the weights
            is_capturable = runner.name == GraphDecoder.name and self._mapping is None and not runner.cache.is_shared
            self._expansion = CapturedExpansion(self._grow, runner.device, is_capturable=is_capturable)
            self._decoder = runner.decoder
        expansion, fed = self._expansion.expand(shape, roots, draws, [self.logits(work)], prefixes)
        return expansion, (fed[0].clone(), fed[1].clone())  # a graph overwrites them in the next call

    def _grow(self, expansion: Expansion, logits: Tensor, prefixes: Prefixes) -> tuple[Tensor, Tensor]:
        """Fills trees with a pass per level; returns the (B, W) tokens and parents that were fed.

        logits: (B, V), after the roots.
        """
        passes = LevelPasses(prefixes, logits.device, last_position=self._runner.last_position)
        for depth in expansion.levels():
            if not depth:
                expansion.grow(depth, logits.unsqueeze(1))
                continue
            frontier = expansion.frontier(depth)
            work = passes.next(
                frontier if self._mapping is None else frontier._replace(tokens=self._mapping.fed(frontier.tokens))
            )
            tokens = work.tokens.clamp_max(self._runner.vocab_size - 1)  # the trees may have larger ids than the model
            logits_here = self.logits(replace(work, tokens=tokens).with_all_logits())
            expansion.grow(depth, logits_here.unflatten(0, frontier.tokens.shape))
        return passes.tokens, passes.parents

    def logits(self, work: Pass) -> Tensor:
        """Returns the (R, V) float32 logits of a pass through the blocks that draft, for the trees' vocabulary."""
        logits = self._runner.run(replace(work, num_layers=self._num_layers)).logits
        assert logits is not None, "the pass asks for them"
        if self._mapping is not None:
            return self._mapping.to_target(logits)
        missing = self._vocab_size - logits.shape[-1]  # one vocabulary differs at most in unused padding ids
        return torch.nn.functional.pad(logits, (0, missing), value=float("-inf")) if missing else logits


class DraftLevels:
    """Fills expansions with a draft model's tokens. Its KV cache starts empty."""

    def __init__(
        self,
        runner: Runner,
        rows: PartialRows,
        *,
        vocab_size: int,
        mapping: VocabularyMap | None = None,
        drafted: DraftTokens | None = None,
    ) -> None:
        """Takes a map of the target's ids, None for the same vocabulary; and the tokens to draft, None for all."""
        self._runner, self._rows, self._vocab_size = runner, rows, vocab_size
        self._longest_catch_up = _LONGEST_CATCH_UP if mapping is None else _LONGEST_MAPPED_CATCH_UP
        self._slots: dict[int, _SlotState] = {}
        self._drafted_tokens = drafted
        self._trees = TreeDrafts(runner, vocab_size=vocab_size, mapping=mapping)

    def begin(self, slot: int, source: int | None = None, tokens: Sequence[int] = ()) -> None:
        """Starts a sequence; the first draft reads the prompt.

        Args:
            source: A slot with a text of the same prefix, possibly the same slot; None for an empty cache.
            tokens: The draft model's ids of the prompt.
        """
        length = 0
        if source is not None and source in self._slots:
            length = self._rows.reusable(source, common_prefix_len(self._slots[source].tokens, tokens))
        self._rows.begin(slot, source, length)
        self._slots[slot] = _SlotState(list(tokens[:length]))

    def common_len(self, slot: int, tokens: Sequence[int]) -> int:
        """Returns how many first tokens of a text a sequence's rows hold."""
        return common_prefix_len(self._slots[slot].tokens, tokens)

    def crop(self, slot: int, length: int) -> None:
        """Forgets a sequence's rows from position `length` on, and its drafted rows."""
        state = self._slots[slot]
        if length < len(state.tokens):
            length = self._rows.reusable(slot, length)
            self._rows.begin(slot, slot, length)
            del state.tokens[length:]
            state.drafted = None

    def follow_weights(self) -> None:
        """Forgets all rows if weights were written to; the next draft reads each text again."""
        if self._runner.follow_weights():
            for slot in self._slots:
                self.begin(slot)

    def draft(
        self, slots: Sequence[int], tokens: Sequence[Sequence[int]], shape: AnyShape, roots: Tensor, draws: DraftDraws
    ) -> ShapedExpansion:
        """Feeds new tokens of B sequences, and returns drafts after them; valid until the next call.

        Args:
            tokens: Ids of each whole sequence.
            roots: (B,) int64, the target's ids of the last tokens.
        """
        self.follow_weights()
        work, lengths = self._catch_up(slots, tokens), list(map(len, tokens))
        rows = [self._rows.row(slot, length) for slot, length in zip(slots, lengths, strict=True)]
        prefixes = Prefixes(slots, rows, positions=lengths)
        expansion, fed = self._trees.draft(work, prefixes, shape, roots, draws)
        drafted = _Drafted(*fed)
        for row, (slot, ids) in enumerate(zip(slots, tokens, strict=True)):
            state = self._slots[slot]
            state.tokens.extend(ids[len(state.tokens) :])
            state.drafted = drafted, row
        return expansion

    def _catch_up(self, slots: Sequence[int], tokens: Sequence[Sequence[int]]) -> Pass:
        """Feeds all but the last new tokens; returns the pass over the rest, with logits of the roots."""
        prefix_lens: list[int] = []
        starts: list[int] = []
        new: list[Sequence[int]] = []
        for slot, ids in zip(slots, tokens, strict=True):
            state = self._keep_accepted(slot, ids)
            if self._drafted_tokens is not None and self._runner.head_rows is not None:
                self._drafted_tokens.learn(self._embeddable(ids[len(state.tokens) :]), self._runner.head_rows)
            while len(ids) - len(state.tokens) > self._longest_catch_up:
                start = len(state.tokens)
                most = min(self._runner.prefill_chunk, self._rows.most_at_once)
                chunk = ids[start : min(start + most, len(ids) - 1)]
                row = self._rows.make_room(slot, start, len(chunk))
                work = self._pass_of([slot], [chunk], [row], [start])
                self._runner.run(work)
                state.tokens.extend(chunk)
            starts.append(len(state.tokens))
            new.append(ids[starts[-1] :])
            prefix_lens.append(self._rows.make_room(slot, starts[-1], len(new[-1])))
        return self._pass_of(slots, new, prefix_lens, starts, has_last_logits=True)

    def _pass_of(
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        rows: Sequence[int],
        starts: Sequence[int],
        *,
        has_last_logits: bool = False,
    ) -> Pass:
        return Pass.of_chains(
            [self._embeddable(ids) for ids in tokens], slots=slots, prefix_lens=rows, first_positions=starts,
            device=self._runner.device, has_last_logits=has_last_logits,
        )  # fmt: skip

    def _keep_accepted(self, slot: int, tokens: Sequence[int]) -> _SlotState:
        state = self._slots[slot]
        # If the last proposal was discarded, its root is fed again for its logits. Recurrent states may begin earlier.
        start = self._runner.cache.reusable(slot, min(len(state.tokens), len(tokens) - 1))
        if start < len(state.tokens):
            del state.tokens[start:]
        elif state.drafted is not None and start < len(tokens) - 1:
            drafted, row = state.drafted
            path = drafted.path(row, tokens[start:-1])
            self._runner.cache.keep_nodes(slot, self._rows.row(slot, start), path)
            state.tokens.extend(tokens[start : start + len(path)])
        state.drafted = None
        return state

    def _embeddable(self, tokens: Sequence[int]) -> Sequence[int]:
        last = self._runner.vocab_size - 1
        return tokens if last >= self._vocab_size - 1 else [min(token, last) for token in tokens]


class KeptDraws:
    """The draws of the last proposal."""

    def __init__(self, method: SampleMethod, pruning: Pruning | None = None, stop: StopRule | None = None) -> None:
        self._is_greedy, self._pruning, self._stop = method == "greedy", pruning, stop
        self._draws: DraftDraws | None = None
        self._are_coupled: list[bool] = []

    def of(self, context: DraftContext, rows: Sequence[int], device: torch.device) -> tuple[Tensor, DraftDraws]:
        """Returns (B,) int64 root tokens and the draws of some sequences of a batch; `rows` ascend."""
        texts, are_coupled = [context.tokens[row] for row in rows], [context.is_coupled[row] for row in rows]
        roots, positions = integers_on([[ids[-1] for ids in texts], [len(ids) - 1 for ids in texts]], device).unbind()
        sampling = context.sampling
        if len(rows) < len(context.slots):
            sampling = sampling.select(torch.tensor(rows, device=device))
        draws = self._draws
        if draws is None or draws.batch is not sampling or self._are_coupled != are_coupled:
            draws = DraftDraws.build(sampling, are_coupled, positions, greedy=self._is_greedy)
            self._draws, self._are_coupled = draws, are_coupled
        return roots, replace(
            draws, root_positions=positions, pruning=self._pruning,
            stop=None if self._stop is None else self._stop.on(device), floors=context.floors,
        )  # fmt: skip


class NodePasses:
    """Passes over new nodes of trees; earlier passes have fed the earlier nodes.

    Attributes:
        positions: (B, W) int64, of all nodes so far.
        parents: (B, W) int64, among the nodes of the sequence, -1 below the prefix.
    """

    def __init__(self, prefixes: Prefixes, device: torch.device) -> None:
        self._prefixes = prefixes
        self.positions = self.parents = torch.empty(len(prefixes.slots), 0, dtype=torch.int64, device=device)

    def add(self, tokens: Tensor, positions: Tensor, parents: Tensor) -> Pass:
        """Returns the pass over new nodes, (B, M) each, without logits."""
        num_earlier, (batch, num) = self.positions.shape[1], positions.shape
        self.positions = torch.cat([self.positions, positions], dim=1)
        self.parents = torch.cat([self.parents, parents], dim=1)
        slots, lengths, bound, _ = self._prefixes
        if isinstance(slots, Tensor) or isinstance(lengths, Tensor):
            assert isinstance(slots, Tensor), "both are on the device"
            assert isinstance(lengths, Tensor), "both are on the device"
            assert bound is not None, "a graph serves prefixes up to a bound"
            return captured_nodes(tokens, self.positions, self.parents, slots, lengths, max_prefix=bound)
        return Pass(
            tokens=tokens.flatten(),
            positions=self.positions.flatten(),
            parents=self.parents.flatten(),
            slots=slots,
            prefix_lens=lengths,
            offsets=range(0, batch * num + 1, num),
            num_earlier=[num_earlier] * batch,
            logit_rows=None,
        )


class LevelPasses(NodePasses):
    """The passes over the levels below the roots, of (B, W) int64 tokens; the roots lie in the prefix.

    `last_position`: Greatest position of a pass; None for no limit.
    """

    def __init__(self, prefixes: Prefixes, device: torch.device, *, last_position: int | None = None) -> None:
        super().__init__(prefixes, device)
        self.tokens = self.parents
        first = prefixes.lengths if prefixes.positions is None else prefixes.positions
        first = first.long() if isinstance(first, Tensor) else integers_on(first, device)
        self._next_positions, self._last_position = first.unsqueeze(1), last_position
        self._above: range | None = None  # nodes of the level above

    def next(self, frontier: Frontier) -> Pass:
        """Returns the pass over a frontier. A node of depth d is d - 1 positions after the prefix."""
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
        positions, self._next_positions = self._next_positions.expand(batch, count), self._next_positions + 1
        if self._last_position is not None:
            # A sequence near the context limit is fed beyond its own depth, together with deeper ones. Its drafts there
            # are cut off, so its positions only have to be valid.
            positions = positions.clamp_max(self._last_position)
        return self.add(tokens, positions, parents)
