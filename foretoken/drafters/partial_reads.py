"""Options of drafters with weights, and what these may leave unread: KV rows, and rows of the LM head for rare tokens.

**KV rows.** `PartialRows` are small slots with listed rows and those of recent positions. Keys keep their true
positions. When a slot is full, its rows are listed anew: from a store of whole texts, or without one by moving the
recent rows behind the first ones.

**Tokens.** The LM head is a large part of a small model with a large vocabulary, and most of a head that shares its
target's. `DraftTokens` are the most frequent tokens, and those that the texts had lately; the target verifies over all
tokens, so texts do not change. Most tokenizers number tokens by frequency, and texts repeat rare words: on texts of
other authors a quarter of Qwen's vocabulary held 94.3 % of the tokens by number, and 97.3 % with those of prompt and
text, see "A draft vocabulary" in `benchmarks/NOTES.md`.

Sources: StreamingLLM (arXiv 2309.17453) for sinks; SpecExtend for retrieval by the target's attention: chunks of 32
positions, the best 32 of them, chosen anew every eight verifications; FR-Spec (2502.14856) for draft vocabularies, with
a fixed vocabulary from a corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import ConfigError
from foretoken.decoder.base import UnsuitableError
from foretoken.drafters.base import Committed, DrafterOptions, TargetHandle, TargetReads
from foretoken.formats.draft_vocabulary import DraftVocabulary
from foretoken.runner.runner import Runner
from foretoken.trees.merge import Pruning

if TYPE_CHECKING:
    from foretoken.decoder.native_linear import HeadRows
    from foretoken.decoder.quantized import Quantization
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.models.loaded import LoadedModel

QuantizationOption = Literal["auto", "int4", "int8", "none"]
SampleMethod = Literal["greedy", "probabilistic"]
_LEAST_ROOM, _MOST_ROOM = 32, 512  # rows for newer tokens behind a window; a choice: a chunk of a prompt
_CHUNK, _BEST_CHUNKS, _EVERY = 32, 32, 8  # SpecExtend
_SHARE = 4  # of a large vocabulary one token in so many is drafted; see the notes
_RECENT = 4  # one drafted token in so many is exchanged for those of the texts; see the notes


class WeightOptions(DrafterOptions):
    """Options of draft models and heads.

    Attributes:
        revision: Of the hub, if `model` is a hub id; None for its main branch.
        draft_sample_method: "probabilistic" draws drafts from the drafter's warped distribution for sampled requests
            without a seed, siblings without replacement; "greedy" always takes its most probable tokens.
        quantization: "int8" drafts with all matrices in int8, with a scale per row, on native kernels (CPUs, float32
            and bfloat16): one more byte per weight. "int4" takes half of that, "none" drafts with the weights as
            stored. "auto" takes int8 where possible.
        draft_window_size: Last positions that drafts attend to; None for the whole text. SGLang's
            `speculative_draft_window_size`.
        draft_sink_size: First positions that drafts attend to beside a window.
        draft_retrieval: Whether drafts also attend to the 32 chunks of 32 positions that the target attends to most.
            Keeps all rows of the drafter beside those that it reads.
        draft_vocab_size: Tokens that are drafted: the most frequent ones, and those that texts had lately. Rows of
            other tokens in the LM head are not read. "all" for the whole vocabulary; "auto" for a quarter of a large
            one, or those that a head learned over, on CPUs where the decoder can. Heads with an LM head of their own
            draft its tokens.
        draft_vocab: File of `foretoken data vocab` with the most frequent tokens. Without it the first ids count as
            such, which is so in most tokenizers.
    """

    is_trusted: ClassVar[bool] = True
    has_dynamic_trees: ClassVar[bool] = True
    prunable_by: ClassVar[frozenset[str]] = frozenset(Pruning.model_fields)
    large_vocabulary: ClassVar[int] = 1 << 16  # tokens; a choice: the LM head of a smaller one costs little

    revision: str | None = None
    draft_sample_method: SampleMethod = "probabilistic"
    quantization: QuantizationOption = "auto"
    draft_window_size: int | None = Field(default=None, ge=1, le=1 << 20)
    draft_sink_size: int = Field(default=4, ge=0, le=1024)
    draft_retrieval: bool = False
    draft_vocab_size: Annotated[int, Field(ge=1)] | Literal["auto", "all"] = "auto"
    draft_vocab: str | None = None

    @model_validator(mode="after")
    def _retrieves_beside_a_window(self) -> Self:
        if self.draft_retrieval and self.draft_window_size is None:
            raise ConfigError(
                "draft_retrieval chooses rows beside a window, and draft_window_size is missing. Set it, for example "
                "to 256, or leave draft_retrieval out."
            )
        return self

    @property
    def partial_rows(self) -> int | None:
        """Rows of a slot without those of drafted nodes; None for the whole text."""
        window = self.draft_window_size
        if window is None:
            return None
        return self.draft_sink_size + self.draft_retrieval * _CHUNK * _BEST_CHUNKS + window + _room(window)

    def with_attention(self, reads: TargetReads) -> TargetReads:
        """Returns what a drafter reads of the target, with what retrieval needs."""
        return replace(reads, attention_tokens=1, attention_every=_EVERY) if self.draft_retrieval else reads

    def drafted_tokens(self, model: LoadedModel, learned: Sequence[int] | None = None) -> DraftTokens | None:
        """Returns the tokens of an LM head that are drafted; None for all.

        Args:
            model: The draft model, or the target whose LM head drafts.
            learned: Tokens that a head learned over, which "auto" drafts.

        Raises:
            ConfigError: If the file is missing or damaged, or has tokens that the model lacks; or `draft_vocab_size`
                is larger than the vocabulary.
        """
        size, total, is_on_cpu = self.draft_vocab_size, model.vocab_size, runs_cpu_kernels(model.device)
        listed: Sequence[int] = (
            () if self.draft_vocab is None else DraftVocabulary.read(Path(self.draft_vocab)).token_ids
        )
        is_required = size != "auto" or bool(listed)
        if not is_required and learned is not None and is_on_cpu:
            listed = learned
        if listed and max(listed) >= total:
            raise ConfigError(
                f"'draft_vocab' names token {max(listed)}, and the model '{model.name}' has ids below {total}. "
                "Expected the vocabulary of its own tokenizer. Make it with `foretoken data vocab`."
            )
        if isinstance(size, int) and size > total:
            raise ConfigError(
                f"'draft_vocab_size' is {size}, and the model '{model.name}' has {total} tokens. Expected at "
                'most as many, or "all".'
            )
        if size == "auto":
            is_large = total >= self.large_vocabulary and is_on_cpu  # elsewhere it was not measured
            size = len(listed) or (total // _SHARE if is_large else total)
        if size in ("all", total):
            return None
        order = dict.fromkeys(chain((each for each in model.eos_ids if each < total), listed, range(total)))
        return DraftTokens(list(order)[: int(size)], total, is_required=is_required)


def _room(window: int) -> int:
    return min(max(window, _LEAST_ROOM), _MOST_ROOM)


@dataclass(slots=True)
class _Slot:
    """The rows of one text: `num_listed` listed ones, then those of the positions from `first` on.

    Attributes:
        listed: (n,), (L, n) or (L, Hk, n) int64, ascending: positions to list; None for the first ones.
        end: Positions from here on are newer than the list; None to list what lies before the window.
        is_stale: Whether the slot does not hold this list yet.
        shared: Positions before this one are equal in the slot and in the store, or not in the slot.
    """

    listed: Tensor | None = None
    end: int | None = None
    is_stale: bool = False
    num_listed: int = 0
    first: int = 0
    shared: int = 0


@dataclass(slots=True)
class PartialRows:
    """Slots with a part of the KV rows of longer texts; without a window row i holds position i.

    Attributes:
        cache: Of the drafter's passes.
        most_fed: Rows that stay free for the nodes of a draft.
        sinks: First positions to list.
        window: Returns the recent positions to keep of a text by its length.
        store: Rows of whole texts; None lists `sinks` alone.
        is_copy: Whether rows come from the store. Otherwise the drafter's passes write them, and the store copies them.
        most_at_once: Positions of a text that fit into a slot at once.
        most: Returns the most rows to read of a text by its length; None for all that a slot holds.
    """

    cache: SlotCache
    most_fed: int
    sinks: int = 0
    window: Callable[[int], int] | None = None
    store: SlotCache | None = None
    is_copy: bool = False
    most_at_once: int = _MOST_ROOM
    most: Callable[[int], int] | None = None
    _slots: list[_Slot] = field(init=False)

    def __post_init__(self) -> None:
        self._slots = [_Slot() for _ in range(self.cache.num_slots)]

    @classmethod
    def own(
        cls, cache: SlotCache, most_fed: int, options: WeightOptions | None = None, context_len: int = 0
    ) -> PartialRows:
        """Returns the rows that a drafter's own passes write; `options`: None for whole texts.

        `context_len`: the target's, for retrieval. Raises `ConfigError` if there is no memory for the rows that it
        keeps.
        """
        if options is None or options.draft_window_size is None:
            return cls(cache, most_fed)
        size, sinks, store = options.draft_window_size, options.draft_sink_size, None
        if options.draft_retrieval:
            rows = min(cache.num_positions, context_len + 1)
            if not cache.affords(rows):
                raise ConfigError(
                    f"draft_retrieval keeps {rows} KV rows of the drafter for each of {cache.num_slots} sequences, and "
                    "the free memory does not hold them. Lower max_model_len or max_num_seqs, or leave it out."
                )
            store = cache.with_capacity(rows)
        return cls(cache, most_fed, sinks, lambda _: size, store, most_at_once=_room(size))

    def begin(self, slot: int, source: int | None = None, length: int = 0) -> None:
        """Starts a text, with the first `length` positions of another text that `reusable` allowed."""
        if source is None or not length:
            self._slots[slot] = _Slot(is_stale=self.is_copy)
        elif source != slot:
            theirs = self._slots[source]
            self._slots[slot] = replace(theirs, shared=min(theirs.shared, length))
            self.cache.copy_rows(source, slot, self.row(source, length))
            if self.store is not None:
                self.store.copy_rows(source, slot, min(theirs.shared, length))
        elif self._slots[slot].shared > length:
            self._slots[slot].shared = length

    @property
    def room(self) -> int:
        """Rows of a slot for its text."""
        return self.cache.capacity - self.most_fed

    def forget(self) -> None:
        """Lists the rows of all slots anew before their next use."""
        for state in self._slots:
            state.is_stale = True

    def reusable(self, slot: int, length: int) -> int:
        """Returns how many of the first positions of a slot another text can take, at most `length`."""
        first = self._slots[slot].first
        least = first + self.window(length) // 2 if first and self.window is not None else 0
        return self.cache.reusable(slot, length) if length >= least else 0

    def row(self, slot: int, position: int) -> int:
        """Returns the row of a position that is not listed."""
        state = self._slots[slot]
        return state.num_listed + position - state.first

    def make_room(self, slot: int, length: int, count: int = 0) -> int:
        """Makes room for `count` positions behind the first `length`; returns the row of the first of them.

        At most `most_at_once` positions fit. Rows of drafted nodes are lost.
        """
        state = self._slots[slot]
        if self.window is not None and (
            self.row(slot, length) + count > self._room_for(length)
            or (state.is_stale and (self.is_copy or length > self.window(length)))
        ):
            self._list(slot, state, length, self.window(length))
        if self.is_copy and state.shared < length:
            self._copy(slot, state, length)
        return self.row(slot, length)

    def _room_for(self, length: int) -> int:
        return self.room if self.most is None else min(self.room, self.most(length))

    def choose(self, slot: int, listed: Tensor, end: int | None = None) -> None:
        """Takes the positions to list from now on, and where the newer ones begin; see `_Slot`."""
        state = self._slots[slot]
        state.listed, state.end, state.is_stale = listed, end, True

    def retrieve(self, committed: Committed) -> None:
        """Chooses chunks of positions by the target's attention in its last block, where there is any."""
        if self.store is None or committed.attention is None:  # the weights may be for another drafter
            return
        for slot, weights in zip(committed.slots, committed.attention, strict=True):
            if weights is None or weights.shape[2] < _CHUNK:
                continue
            by_row = weights[-1].mean(0)
            chunks = by_row[: len(by_row) // _CHUNK * _CHUNK].view(-1, _CHUNK).mean(1)
            best = chunks.topk(min(_BEST_CHUNKS, len(chunks))).indices.sort().values
            within = torch.arange(_CHUNK, device=best.device)
            self.choose(slot, (_CHUNK * best.unsqueeze(1) + within).flatten())

    def _list(self, slot: int, state: _Slot, length: int, window: int) -> None:
        """Lists rows behind the first `length` positions, and the recent rows behind these."""
        cache, store, row = self.cache, self.store, self.row(slot, length)
        sinks = min(self.sinks, length)
        first = max(length - window, sinks)
        if store is None:
            cache.move_rows(slot, range(row - (length - first), row), sinks)
            state.num_listed, state.first = sinks, first
            return
        start = max(state.shared, state.first)
        if not self.is_copy and start < length:
            store.copy_from(cache, (slot, slot), range(self.row(slot, start), row), start)
        listed = torch.arange(sinks, device=cache.keys[0].device)
        if state.listed is not None and state.end is not None:
            listed = state.listed
            half = (self._room_for(length) - listed.shape[-1]) // 2  # the other half is left for rows to come
            first = max(state.end, length - half)
        elif state.listed is not None:
            listed = torch.cat([listed, state.listed[(state.listed >= sinks) & (state.listed < first)]])
        rows = listed if listed.dim() > 1 else listed.expand(len(cache.keys), -1)
        cache.gather_from(store, (slot, slot), rows, 0)
        state.is_stale, state.num_listed = False, rows.shape[-1]
        state.first = state.shared = first
        self._copy(slot, state, length)

    def _copy(self, slot: int, state: _Slot, length: int) -> None:
        """Copies the rows of positions from `shared` to `length` from the store."""
        assert self.store is not None, "copies come from it"
        new = range(state.shared, length)
        self.cache.copy_from(self.store, (slot, slot), new, self.row(slot, new.start))
        state.shared = length


class DraftTokens:
    """The tokens that a drafter drafts.

    Attributes:
        ids: One for each row of its LM head.
        is_required: Whether the caller asked for them; otherwise all tokens are drafted where a part cannot be.
    """

    def __init__(self, ids: Sequence[int], vocab_size: int, *, is_required: bool = True) -> None:
        """Starts with different ids below `vocab_size`, the most frequent first: the last quarter is exchanged."""
        self.ids, self._num_recent, self.is_required = list(ids), max(1, len(ids) // _RECENT), is_required
        self._next = 0  # of the recent ones
        self._has = bytearray(vocab_size)
        for token in ids:
            self._has[token] = 1

    def learn(self, tokens: Iterable[int], rows: HeadRows) -> None:
        """Exchanges the oldest recent tokens for those of a text, in the rows of `ids` of an LM head."""
        new = [token for token in dict.fromkeys(tokens) if not self._has[token]][-self._num_recent :]
        if not new:
            return
        first = len(self.ids) - self._num_recent
        places = [first + (self._next + i) % self._num_recent for i in range(len(new))]
        self._next = (self._next + len(new)) % self._num_recent
        for place, token in zip(places, new, strict=True):
            self._has[self.ids[place]] = 0
            self.ids[place] = token
            self._has[token] = 1
        rows.exchange(*(torch.tensor(each, device=rows.tokens.device) for each in (places, new)))


_Made = TypeVar("_Made")


def with_quantization(option: QuantizationOption, make: Callable[[Quantization | None], _Made]) -> _Made:
    """Returns the result of `make` for quantized weights if they are wanted and possible, else for those as stored.

    `make` raises `UnsuitableError` if the drafter cannot be quantized, or has no part of its vocabulary that must be
    drafted. These are `ConfigError`, except where "auto" takes the weights as stored.
    """
    if option != "none":
        try:
            return make("int8" if option == "auto" else option)
        except UnsuitableError as err:
            if option != "auto":
                raise ConfigError(
                    f"quantization '{option}' cannot be had: {err} Leave it out to draft with the weights as they are "
                    "stored."
                ) from err
    try:
        return make(None)
    except UnsuitableError as err:
        raise ConfigError(f"a draft vocabulary cannot be had: {err} Leave 'draft_vocab_size' out.") from err


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
        ConfigError: For a part of a text if the model has recurrent layers, or slides windows over it: decoders take
            row i of a window for position i; if there is no memory for these rows; or if required tokens cannot be
            drafted alone.
    """
    if partial_rows is not None and _has_windows(model.config.get_text_config()):
        raise ConfigError(
            f"'{model.name}' has layers that slide a window over its text, from which no other rows can be chosen. "
            "Expected a model with full attention in every layer. Use another method, or leave draft_window_size out."
        )
    runner = Runner(
        model, num_slots=target.num_slots, context_len=partial_rows or target.context_len, max_nodes=num_fed + 1,
        runner=target.runner, has_partial_texts=partial_rows is not None, feeds_again=True,
    )  # fmt: skip
    if partial_rows is not None and runner.cache.states is not None:
        raise ConfigError(
            f"'{model.name}' has recurrent layers, which read a whole text. Expected a model with attention in every "
            "layer. Use another draft model, or leave draft_window_size out."
        )
    if partial_rows is not None and runner.context_len < min(partial_rows, model.context_len):
        raise ConfigError(
            f"slots of {partial_rows} KV rows for drafts with '{model.name}' do not fit into half of the free memory, "
            f"only {runner.context_len} rows a slot. Lower max_num_seqs, or kv_budget or draft_window_size, or free "
            "memory."
        )
    with_quantization(option, lambda quantization: _prepare(runner, quantization, drafted))
    return runner


def _prepare(runner: Runner, quantization: Quantization | None, drafted: DraftTokens | None) -> None:
    """Quantizes weights and leaves out rows of the LM head; leaves the model as it is if it raises."""
    model = runner.model
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


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return any(kind not in ("full_attention", "linear_attention", "conv") for kind in kinds)
    return bool(getattr(config, "sliding_window", None)) and bool(getattr(config, "use_sliding_window", True))
