"""Drafting level by level with weights: draws, passes, quantized copies of weights, and a draft model's KV cache.

A draft model is fed committed tokens once. Its classes work with its own ids; only logits for expansions and frontiers
from them use the target's ids, and a `VocabularyMap` translates.

Letters: B sequences, P parents of one level, W nodes that were fed, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from foretoken.core.backend import integers_on
from foretoken.core.errors import ConfigError
from foretoken.core.passes import Pass
from foretoken.core.token_tree import common_prefix_len
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.cuda_graphs import GraphDecoder, captured_nodes
from foretoken.decoder.native import NativeDecoder
from foretoken.drafters.captured import CapturedExpansion, Prefixes
from foretoken.drafters.native.trees import draft_trees
from foretoken.runner.runner import Runner
from foretoken.sampling.draft_draws import DraftDraws
from foretoken.trees.dynamic import begin_expansion

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from foretoken.decoder.quantized import Quantization
    from foretoken.drafters.base import DraftContext, TargetHandle
    from foretoken.drafters.draft_tokens import DraftTokens
    from foretoken.drafters.vocabularies import VocabularyMap
    from foretoken.drafters.windows import PartialRows
    from foretoken.models.loaded import LoadedModel
    from foretoken.trees.dynamic import AnyShape, ShapedExpansion
    from foretoken.trees.expansion import Expansion, Frontier
    from foretoken.trees.merge import Pruning
    from foretoken.trees.stopping import StopRule

_LONGEST_CATCH_UP = 2  # after full acceptance, the last drafted token and the bonus token are new to the draft model
_LONGEST_MAPPED_CATCH_UP = 8  # longer if tokens of the target are several of the draft model's


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
        if self._decoder is not self._runner.decoder:  # another one follows writes to the weights
            self._decoder, self._expand = self._runner.decoder, self._expansion()
        expansion, fed = self._expand.expand(shape, roots, draws, [self.logits(work)], prefixes)
        return expansion, (fed[0].clone(), fed[1].clone())  # a graph overwrites them in the next call

    def _expansion(self) -> CapturedExpansion[tuple[Tensor, Tensor]]:
        runner = self._runner
        is_capturable = runner.name == GraphDecoder.name and self._mapping is None and not runner.cache.is_shared
        return CapturedExpansion(self._grow, runner.device, is_capturable=is_capturable)

    def _grow(self, expansion: Expansion, logits: Tensor, prefixes: Prefixes) -> tuple[Tensor, Tensor]:
        """Returns the (B, W) tokens and parents that were fed; logits: (B, V), after the roots."""
        passes = LevelPasses(prefixes, logits.device, last_position=self._runner.last_position)
        draft_by_levels(
            expansion, logits, passes, self.logits, vocab_size=self._runner.vocab_size,
            fed=None if self._mapping is None else self._mapping.fed,
        )  # fmt: skip
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
    """Fills expansions with a draft model's tokens."""

    def __init__(
        self,
        runner: Runner,
        rows: PartialRows,
        *,
        vocab_size: int,
        mapping: VocabularyMap | None = None,
        drafted: DraftTokens | None = None,
    ) -> None:
        """Starts with an empty cache.

        Args:
            mapping: Translates the target's ids; None for the same vocabulary.
            drafted: The tokens that the runner drafts, which follow the texts; None for all.
        """
        self._runner, self._rows, self._vocab_size = runner, rows, vocab_size
        self._longest_catch_up = _LONGEST_CATCH_UP if mapping is None else _LONGEST_MAPPED_CATCH_UP
        self._slots: dict[int, _SlotState] = {}
        self._drafted_tokens = drafted
        self._trees = TreeDrafts(runner, vocab_size=vocab_size, mapping=mapping)

    def begin(self, slot: int, source: int | None = None, tokens: Sequence[int] = ()) -> None:
        """Starts a sequence; the first draft reads the prompt.

        Args:
            source: A slot with a text of the same prefix, possibly the same slot; None for an empty cache.
            tokens: The draft model's ids of the prompt, compared with those of that text.
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
        self,
        slots: Sequence[int],
        tokens: Sequence[Sequence[int]],
        shape: AnyShape,
        roots: Tensor,
        draws: DraftDraws,
    ) -> ShapedExpansion:
        """Feeds new tokens of B sequences, and returns drafts after them; valid until the next call.

        Args:
            tokens: Ids of each whole sequence.
            roots: (B,) int64, the target's ids of the last tokens.
        """
        self.follow_weights()
        work, lengths = self._catch_up(slots, tokens), [len(ids) for ids in tokens]
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
        del state.tokens[len(tokens) - 1 :]  # the last proposal was discarded: its root is fed again for its logits
        start = len(state.tokens)
        if state.drafted is not None and start < len(tokens) - 1:
            drafted, row = state.drafted
            path, first = drafted.path(row, tokens[start:-1]), self._rows.row(slot, start)
            self._runner.cache.move_rows(slot, [first + node for node in path], first)
            state.tokens.extend(tokens[start : start + len(path)])
        state.drafted = None
        return state

    def _embeddable(self, tokens: Sequence[int]) -> Sequence[int]:
        last = self._runner.vocab_size - 1
        return tokens if last >= self._vocab_size - 1 else [min(token, last) for token in tokens]


QuantizationOption = Literal["auto", "int4", "int8", "none"]
SampleMethod = Literal["greedy", "probabilistic"]
_Made = TypeVar("_Made")


def with_quantization(option: QuantizationOption, make: Callable[[Quantization | None], _Made]) -> _Made:
    """Returns the result of `make` for quantized weights if they are wanted and possible, else for those as stored.

    Args:
        option: "int4" and "int8" require them, "auto" takes int8 if possible.
        make: Makes the result; raises `UnsuitableError` if the drafter cannot be quantized.

    Raises:
        ConfigError: For "int4" and "int8" if it is not possible.
    """
    if option == "none":
        return make(None)
    try:
        return make("int8" if option == "auto" else option)
    except UnsuitableError as err:
        if option != "auto":
            raise ConfigError(
                f"quantization '{option}' cannot be had: {err} Leave it out to draft with the weights as they are "
                "stored."
            ) from err
        return make(None)


class KeptDraws:
    """The draws of the last proposal."""

    def __init__(self, method: SampleMethod, pruning: Pruning | None = None, stop: StopRule | None = None) -> None:
        self._is_greedy, self._pruning, self._stop = method == "greedy", pruning, stop
        self._draws: DraftDraws | None = None
        self._are_coupled: list[bool] = []

    def of(self, context: DraftContext, rows: Sequence[int], device: torch.device) -> tuple[Tensor, DraftDraws]:
        """Returns (B,) int64 root tokens and the draws of some sequences of a batch; `rows` ascend."""
        last: list[int] = []
        lengths: list[int] = []
        are_coupled: list[bool] = []
        for row in rows:
            last.append(context.tokens[row][-1])
            lengths.append(len(context.tokens[row]) - 1)
            are_coupled.append(context.is_coupled[row])
        roots, positions = integers_on([last, lengths], device).unbind()
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


def draft_by_levels(
    expansion: Expansion,
    logits: Tensor,
    passes: LevelPasses,
    logits_of: Callable[[Pass], Tensor],
    *,
    vocab_size: int | None = None,
    fed: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Fills trees with one pass per level.

    Args:
        logits: (B, V), after the roots.
        logits_of: Runs a pass; returns (R, V).
        vocab_size: Of the model, if the trees may have larger ids; these are fed as the last one.
        fed: Maps tokens of the trees to those that are fed; None for the same.
    """
    for depth in expansion.levels():
        if not depth:
            expansion.grow(depth, logits.unsqueeze(1))
            continue
        frontier = expansion.frontier(depth)
        work = passes.next(frontier if fed is None else frontier._replace(tokens=fed(frontier.tokens)))
        work = replace(
            work,
            tokens=work.tokens if vocab_size is None else work.tokens.clamp_max(vocab_size - 1),
            logit_rows=torch.arange(work.num_tokens, device=work.tokens.device),
        )
        expansion.grow(depth, logits_of(work).unflatten(0, frontier.tokens.shape))


def draft_runner(
    model: LoadedModel,
    target: TargetHandle,
    num_fed: int,
    option: QuantizationOption,
    partial_rows: int | None = None,
    drafted: DraftTokens | None = None,
) -> Runner:
    """Returns the runner of a draft model that feeds at most `num_fed` nodes of a draft; see `with_quantization`.

    Args:
        partial_rows: Rows of slots that hold a part of a text; None for slots with the whole text.
        drafted: The tokens that it drafts; None for all.

    Raises:
        ConfigError: For a model with recurrent layers; for a part of a text if the model slides windows over it:
            decoders take row i of a window for position i; if there is no memory for these rows; or if required tokens
            cannot be drafted alone.
    """
    if partial_rows is not None and _has_windows(model.config.get_text_config()):
        raise ConfigError(
            f"'{model.name}' has layers that slide a window over its text, from which no other rows can be chosen. "
            "Expected a model with full attention in every layer. Use another method, or leave draft_window_size out."
        )
    runner = Runner(
        model, num_slots=target.num_slots, context_len=partial_rows or target.context_len, max_nodes=num_fed + 1,
        runner=target.runner, has_partial_texts=partial_rows is not None,
    )  # fmt: skip
    if runner.cache.states is not None:
        raise ConfigError(
            f"'{model.name}' has recurrent layers. Expected a draft model with attention in every layer: the states of "
            "its drafts cannot be kept yet."
        )
    if partial_rows is not None and runner.context_len < min(partial_rows, model.context_len):
        raise ConfigError(
            f"slots of {partial_rows} KV rows for drafts with '{model.name}' do not fit into half of the free memory, "
            f"only {runner.context_len} rows a slot. Lower max_num_seqs, or kv_budget or draft_window_size, or free "
            "memory."
        )

    def quantize(quantization: Quantization | None) -> None:  # leaves the model as it is if it raises
        if quantization is not None and model.quantization is not None:
            raise UnsuitableError(f"'{model.name}' was quantized to {model.quantization} before.")
        if drafted is not None:
            try:
                runner.draft_with(quantization, torch.tensor(drafted.ids))
            except UnsuitableError:
                if drafted.is_required:
                    raise
            else:
                return
        if quantization is not None:
            runner.draft_with(quantization)

    try:
        with_quantization(option, quantize)
    except UnsuitableError as err:
        raise ConfigError(f"a draft vocabulary cannot be had: {err} Leave 'draft_vocab_size' out.") from err
    return runner


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind != "full_attention" for kind in kinds)
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
