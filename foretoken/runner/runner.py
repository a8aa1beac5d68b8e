"""The runner: a model over preallocated KV slots, as a target or as a draft model.

The engine calls prefill, verify and commit; draft models call `run` to expand a tree level by level. The caller keeps
the cache lengths.

A decoder computes the passes. It is chosen when the runner is made: among the decoders that fit the model, measured
times at the widths of the engine's passes decide. "auto" promises that a token's logits have the same bits in every
pass if an exact decoder fits the model (see `Decoder`). It then compares exact decoders only. "fastest" compares all
decoders. Where two tokens score nearly the same, plain and speculative decoding may then choose differently;
`foretoken verify` shows such cases. "lean" is "auto" without the transformers model. Nothing is measured if only one
decoder is left.

Letters: B sequences, T tokens fed, N tree nodes, V vocabulary, D hidden size, F taps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn

from foretoken.core.backend import is_out_of_memory
from foretoken.core.errors import ConfigError, ModelError, PassError, RequestError, nearest_name_hint
from foretoken.core.passes import Pass, Tap
from foretoken.core.token_tree import MAX_NODES, TokenTree
from foretoken.decoder.base import Decoder, PassOutput, UnsuitableError
from foretoken.decoder.slot_cache import GRANULE, SlotCache, affordable_rows, share_of_free
from foretoken.decoder.state_snapshots import SPACING
from foretoken.models.borrowed import WeightWrites
from foretoken.runner.costs import CostWatch, PassCosts, pass_costs
from foretoken.runner.decoders import (
    DECODERS,
    EXACT,
    check_architecture,
    decoders_for,
    drafting_decoder,
    kernels_need_dtype,
    layer_shapes,
    proven_decoder,
    state_bytes,
)
from foretoken.runner.self_test import NUM_ROWS

if TYPE_CHECKING:
    from foretoken.decoder.native_linear import HeadRows
    from foretoken.decoder.quantized import Quantization
    from foretoken.models.loaded import LoadedModel

_TIE = 1.05  # costs within this ratio differ by noise alone; a choice, as repeated bursts scatter by a few percent
_TREE_TOKENS = 2  # of a verification; a choice: published acceptance lengths are 2 to 4, but not every tree is drafted


class PassWidths(NamedTuple):
    """The widths of a runner's passes.

    `max_nodes`: nodes of the widest tree of a sequence, root included; 1 for plain decoding.
    """

    num_slots: int
    max_nodes: int = 16
    prompt_chunk: int = 512

    def passes(self, costs: PassCosts) -> list[tuple[int, float]]:
        """Returns tokens and seconds of a plain step, of the widest verification (if any), and of a prompt chunk."""
        num_tokens = self.num_slots * self.max_nodes
        step, prompt = costs.step(self.num_slots), costs.prompt(self.prompt_chunk)
        trees = [(num_tokens, costs.verification(self.num_slots, num_tokens))] if self.max_nodes > 1 else []
        return [(self.num_slots, step), *trees, (self.prompt_chunk, prompt)]

    def seconds(self, costs: PassCosts) -> float:
        """Returns the cost by which decoders are compared: one step, one verification, and prompt tokens for both.

        The step generates one token a sequence and the verification about two. The prompt is assumed as long as the
        generated text. Without trees: one step, and one prompt token a sequence.
        """
        *decoding, (_, chunk_seconds) = self.passes(costs)
        generated = self.num_slots * (1 if self.max_nodes == 1 else 1 + _TREE_TOKENS)
        return sum(seconds for _, seconds in decoding) + generated * chunk_seconds / self.prompt_chunk


def ranked(costs: Mapping[str, PassCosts], widths: PassWidths) -> list[tuple[str, str]]:
    """Returns decoders, the fastest first, each with a sentence that compares pass times.

    Of costs that differ by noise alone, the earlier key comes first.
    """
    seconds = {name: widths.seconds(costs[name]) for name in costs}
    first = next((name for name in costs if seconds[name] <= _TIE * min(seconds.values())), None)
    order = sorted(costs, key=lambda name: (name != first, seconds[name]))
    return [(name, _comparison(name, costs, widths)) for name in order]


def _comparison(name: str, costs: Mapping[str, PassCosts], widths: PassWidths) -> str:
    def milliseconds(each: str) -> str:
        values = [1e3 * seconds for _, seconds in widths.passes(costs[each])]
        return " / ".join(f"{value:.0f}" if value >= 10 else f"{value:.2g}" for value in values)

    if len(costs) == 1:
        return ""
    tokens = " / ".join(str(number) for number, _ in widths.passes(costs[name]))
    others = ", ".join(f"{other} {milliseconds(other)}" for other in costs if other != name)
    return f"{name} is used: passes of {tokens} tokens take {milliseconds(name)} ms ({others})"


_log = logging.getLogger(__name__)
RUNNERS = ("auto", "fastest", "lean", *DECODERS)
_said: set[str] = set()


class ChosenDecoder(NamedTuple):
    """The chosen decoder, and the reason as a sentence."""

    decoder: Decoder
    reason: str


def choose_decoder(
    model: LoadedModel,
    cache: SlotCache,
    taps: Sequence[Tap],
    *,
    runner: str,
    widths: PassWidths,
    context_len: int,
    costs: Callable[[str], PassCosts],
) -> ChosenDecoder:
    """Makes the fastest decoder that fits, and proves it on the model; says why others do not fit.

    Args:
        cache: For the decoder; no sequence is in it. Measured candidates have caches of their own.
        costs: Returns pass costs by decoder, see `pass_costs`; called only if there is a choice.

    Raises:
        ConfigError: If `runner` does not exist.
        ModelError: If no requested decoder fits the model.
    """
    candidates = _Candidates(model, runner, widths, costs)
    for name, reason in candidates.in_order():
        try:
            decoder = proven_decoder(name, model, cache, taps, context_len=context_len)
        except ModelError as err:
            candidates.refuse(name, err)
            continue
        if candidates.reasons:
            _say_once(logging.WARNING, f"{model.name} runs on the {name} runner. {candidates.refusals()}")
        if name == "generic" != runner and cache.states is not None and kernels_need_dtype(model):
            _say_once(
                logging.WARNING, f"{model.name} has recurrent layers, which are slow on the generic runner in "
                f"{str(model.dtype).removeprefix('torch.')}. Pass dtype='bfloat16' or 'float32' for lean-native.",
            )  # fmt: skip
        if reason:
            _say_once(logging.INFO, f"{model.name}: {reason}")
        return ChosenDecoder(decoder, reason or f"{name} is used: {_why_alone(name, runner)}")
    raise candidates.failure()


def likely_decoder(model: LoadedModel, runner: str, widths: PassWidths, *, costs: Callable[[str], PassCosts]) -> str:
    """Returns what `choose_decoder` will probably choose, before a cache exists; arguments and errors are the same."""
    candidates = _Candidates(model, runner, widths, costs)
    for name, _ in candidates.in_order():
        try:
            costs(name)
        except ModelError as err:
            candidates.refuse(name, err)
            continue
        return name
    raise candidates.failure()


class _Candidates:
    """The decoders that may be used; `reasons` says why others may not, each with their names."""

    def __init__(self, model: LoadedModel, runner: str, widths: PassWidths, costs: Callable[[str], PassCosts]) -> None:
        if runner not in RUNNERS:
            raise ConfigError(f"runner '{runner}' does not exist. {nearest_name_hint(runner, RUNNERS)}")
        self._model, self._runner, self._widths, self._costs = model, runner, widths, costs
        self.reasons: dict[str, list[str]] = {}
        self._generic_error: ModelError | None = None

    def in_order(self) -> Iterator[tuple[str, str]]:
        for group in self._groups():
            fitting = [name for name in group if len(group) == 1 or self._is_known(name)]
            costs, unmeasured = {}, []
            for name in fitting if len(fitting) > 1 else []:
                try:
                    costs[name] = self._costs(name)
                except ModelError as err:
                    self.refuse(name, err)
                except (PassError, MemoryError, RuntimeError) as err:
                    if not isinstance(err, PassError) and not is_out_of_memory(err):
                        raise
                    _log.warning("passes of the %s runner cannot be timed: %s", name, err)
                    unmeasured.append(name)
            yield from ranked(costs, self._widths)
            yield from ((name, "") for name in fitting if len(fitting) == 1)
            yield from ((name, f"{name} is used: its passes could not be timed") for name in unmeasured)

    def refuse(self, name: str, err: ModelError) -> None:
        self.reasons.setdefault(str(err), []).append(name)
        if name == "generic" and not isinstance(err, UnsuitableError):
            self._generic_error = err.with_traceback(None)  # the frames hold the decoder and its cache

    def refusals(self) -> str:
        return " ".join(f"{', '.join(names)}: {reason}" for reason, names in self.reasons.items())

    def failure(self) -> ModelError:
        return self._generic_error or ModelError(
            f"runner '{self._runner}' cannot run '{self._model.name}'. {self.refusals()}"
        )

    def _groups(self) -> list[list[str]]:
        """Returns names that are compared with each other; a later group only serves if no earlier decoder does."""
        if self._runner in DECODERS:
            return [[self._runner]]
        names = [name for name in decoders_for(self._model) if name != "generic" or self._runner != "lean"]
        if self._runner == "fastest":
            return [names]
        return [[name for name in names if name in EXACT], [name for name in names if name not in EXACT]]

    def _is_known(self, name: str) -> bool:
        try:
            check_architecture(name, self._model)
        except ModelError as err:
            self.refuse(name, err)
            return False
        return True


def _why_alone(name: str, runner: str) -> str:
    if name == runner:
        return "it was asked for"
    is_promised = name in EXACT and runner != "fastest"
    return "no other one gives a token the same bits in every pass" if is_promised else "no other one fits the model"


def _say_once(level: int, message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.log(level, "%s", message)


# Of the memory for KV rows, at most: of states of recurrent layers inside texts. A choice: some 40 states of
# Qwen3.5-35B-A3B (60 MiB each) beside 20 GiB.
_SNAPSHOT_SHARE = 1 / 8
_MORE_SNAPSHOTS = 4  # of a slot, beside those inside a long prompt; a choice: of a few turns and common beginnings
_FEWER = "Decode fewer sequences at once (max_num_seqs of LLM, --batch-size)"
_MORE = "raise kv_cache_memory_bytes"


class Runner:
    """Runs a model over preallocated KV slots.

    Attributes:
        vocab_size: V, the width of the logits.
        context_len: Most tokens a sequence may reach.
        last_position: The largest position of a pass.
        max_nodes: Nodes of the widest tree, root included.
        prefill_chunk: Prompt tokens of a pass.
        choice: The chosen decoder and the reason, as a sentence.
        decoder: Computes the passes; writes to weights and `draft_with` replace it.
        head_rows: Of the LM head, if the decoder computes a part of the logits; otherwise None.
    """

    def __init__(  # noqa: PLR0913 - what there is to choose, each by its name
        self,
        model: LoadedModel,
        *,
        num_slots: int,
        context_len: int | None = None,
        max_nodes: int = 64,
        usual_nodes: int | None = None,
        taps: Sequence[Tap] = (),
        prefill_chunk: int = 512,
        runner: str = "auto",
        costs: Callable[[str], PassCosts] | None = None,
        shares_rows: bool = False,
        kv_cache_memory_bytes: int | None = None,
        has_partial_texts: bool = False,
        feeds_again: bool = False,
    ) -> None:
        """Allocates the cache and proves on the model that tree attention is correct.

        Args:
            context_len: Most tokens a sequence may reach; None for the model's limit. Cut, with a warning, to fit into
                memory.
            usual_nodes: Nodes of a frequent wide tree, for the choice of the decoder; None for `max_nodes`.
            prefill_chunk: Prompt tokens of a pass.
            runner: A decoder, or a way to choose one; see the module.
            costs: Returns pass costs by decoder; None reads or measures them, see `pass_costs`.
            shares_rows: Whether slots share KV rows if memory is too small for the longest sequence in every slot. The
                caller then calls `cache.reserve` before a pass writes rows.
            kv_cache_memory_bytes: Memory for KV rows; None for half of the free memory.
            has_partial_texts: Whether slots hold some rows of longer texts, so that positions may exceed the rows.
            feeds_again: Whether the last token of a slot is fed again after a discarded draft, as draft models do:
                recurrent layers then keep the state before it, too.

        Raises:
            ConfigError: If `runner` does not exist.
            ModelError: If the model ignores the attention plug-in, a tap cannot be read, memory is too small, or the
                requested decoder does not fit.
        """
        self.model, self.device, self.vocab_size = model, model.device, model.vocab_size
        self.max_nodes = min(max_nodes, MAX_NODES)
        self.prefill_chunk = prefill_chunk
        self._make_cache(
            num_slots, context_len, kv_cache_memory_bytes, runner=runner, shares_rows=shares_rows,
            has_partial_texts=has_partial_texts, feeds_again=feeds_again,
        )  # fmt: skip
        self.last_position = min(model.context_len, self.cache.num_positions) - 1
        self._taps = tuple(taps)
        self.quantization: Quantization | None = None  # of quantized copies of the weights
        self.head_rows: HeadRows | None = None
        # Nobody else holds weights that were read for lean decoders alone.
        self._writes = WeightWrites(nn.Module() if model.lean is not None else model.module)
        decoder, self.choice = choose_decoder(
            model,
            self.cache,
            taps,
            runner=runner,
            widths=PassWidths(
                num_slots, min(usual_nodes or MAX_NODES, self.max_nodes), min(prefill_chunk, self.context_len)
            ),
            context_len=self.context_len,
            costs=partial(pass_costs, model) if costs is None else costs,
        )
        self.decoder: Decoder = decoder
        self._watch = CostWatch(model, decoder.name)
        self._writes.leave_out_written()

    def _make_cache(
        self,
        num_slots: int,
        context_len: int | None,
        memory_bytes: int | None,
        *,
        runner: str,
        shares_rows: bool,
        has_partial_texts: bool,
        feeds_again: bool,
    ) -> None:
        """Allocates the KV cache, and cuts the context to what memory holds; arguments: see `__init__`."""
        model = self.model
        shapes = layer_shapes(model)
        kinds: dict[str, Any] = {
            "dtype": model.dtype, "device": model.device, "is_rounded": model.kv_cache_dtype == "int8",
        }  # fmt: skip
        wanted = min(context_len or model.context_len, model.context_len)
        memory = share_of_free(model.device) if memory_bytes is None else memory_bytes
        states = state_bytes(
            model, shapes, runner, num_slots=num_slots, max_nodes=self.max_nodes, feeds_again=feeds_again
        )
        most = num_slots * (wanted // SPACING + _MORE_SNAPSHOTS) * states.snapshot
        snapshot_bytes = min(int(_SNAPSHOT_SHARE * memory), most)
        rows = affordable_rows(shapes, memory_bytes=memory - states.slots - snapshot_bytes, **kinds)
        has_states = any(shape.state is not None for shape in shapes)  # they are kept by slot, not by place
        shares_rows = shares_rows and rows < num_slots * (wanted + self.max_nodes) and not has_states
        longest = rows // GRANULE * GRANULE if shares_rows else rows // num_slots
        self.context_len = min(wanted, longest - self.max_nodes)
        if self.context_len < min(wanted, NUM_ROWS):
            least = "a sequence" if shares_rows else f"{num_slots} sequences"
            raise ModelError(
                f"there is no memory for the KV cache of '{model.name}', {least} of {NUM_ROWS} tokens and trees of "
                f"{self.max_nodes} nodes. {_FEWER}, or {'free memory' if memory_bytes is None else _MORE}."
            )
        if self.context_len < wanted:
            _log.warning(
                "%s: KV rows for %d sequences of %d tokens do not fit into the memory for them; the context is cut to "
                "%d. For longer ones: %s.", model.name, num_slots, wanted, self.context_len, _FEWER,
            )  # fmt: skip
        self.cache = SlotCache(
            shapes,
            num_slots=num_slots,
            capacity=max(self.context_len + self.max_nodes, NUM_ROWS),
            **kinds,
            num_rows=longest if shares_rows else None,
            num_positions=model.context_len if has_partial_texts else None,
        )
        if self.cache.states is not None:
            self.cache.states.snapshots.most_bytes = snapshot_bytes

    def draft_with(self, quantization: Quantization | None, head_tokens: Tensor | None = None) -> None:
        """Uses quantized copies of all matrices, or a part of the LM head; for draft models: the distribution changes.

        The copies lie beside the originals. For arguments see `drafting_decoder`. Raises `UnsuitableError`, and changes
        nothing, if the decoder has no kernels for the format, the weights cannot be quantized, or it is `generic`.
        """
        decoder, self.head_rows = drafting_decoder(
            self.name, self.model, self.cache, self._taps, quantization=quantization, head_tokens=head_tokens
        )
        self.decoder = decoder
        self.quantization = quantization

    def follow_weights(self) -> bool:
        """Renews the decoder's joined, packed and copied weights after writes to the model's weights.

        Returns whether the weights changed since the last call. All KV rows are then invalid. Raises `ModelError` if
        the decoder cannot run on the new weights; the next call tries again.
        """
        if not self._writes.are_new():
            return False
        if self.model.quantization is not None:
            raise ModelError(
                f"weights of '{self.model.name}' were written, whose matrices were quantized before. Make a new LLM."
            )
        if self.quantization is not None or self.head_rows is not None:
            self.draft_with(self.quantization, None if self.head_rows is None else self.head_rows.tokens)
        elif self.name != "generic":  # `generic` keeps no copies
            self.decoder = DECODERS[self.name](self.model, self.cache, self._taps)
        self._writes.mark_known()
        return True

    @property
    def name(self) -> str:
        """The decoder's name, one of `DECODERS`; reports show it."""
        return self.decoder.name

    @property
    def is_exact(self) -> bool:
        """Whether a token's logits have the same bits at any width, batch and number of threads; see `Decoder`."""
        return self.decoder.is_exact

    def run(self, work: Pass) -> PassOutput:
        """Computes one pass over new tokens of several sequences; writes the cache rows of their nodes.

        Raises `PassError` if the rows do not fit the cache, or the pass does not fit the model.
        """
        if self._watch.is_over or self.quantization is not None or self.head_rows is not None:
            return self.decoder.run(self.placed(work))
        begin = time.perf_counter()
        output = self.decoder.run(self.placed(work))
        self._watch.saw(work, time.perf_counter() - begin)
        return output

    def prefill(self, slot: int, tokens: Sequence[int], start: int) -> Tensor | None:
        """Feeds up to `prefill_chunk` prompt tokens of one sequence, from position `start` on, without logits.

        Returns (T, F, D) tapped features, or None without taps. Raises `RequestError` if the prompt does not fit.
        """
        end = start + len(tokens)
        if end > self.context_len:
            raise RequestError(f"{end} tokens do not fit. Expected at most {self.context_len}. Shorten the prompt.")
        return self.run(Pass.of_chains([tokens], slots=[slot], prefix_lens=[start], device=self.device)).features

    def verification(
        self, slots: Sequence[int], lengths: Sequence[int], tree: TokenTree, *, has_features: bool = True
    ) -> Pass:
        """Returns the pass that computes target logits at every node of B trees. Committed rows stay unchanged.

        `lengths` are the committed KV rows of each: the root goes to position `lengths[b]`.
        """
        return Pass.of_tree(
            tree, slots=slots, prefix_lens=lengths, last_position=self.last_position, has_features=has_features
        )

    def verify(self, slots: Sequence[int], lengths: Sequence[int], tree: TokenTree) -> PassOutput:
        """Runs `verification` as a pass of its own."""
        return self.run(self.verification(slots, lengths, tree))

    def commit(self, slots: Sequence[int], lengths: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Moves the KV rows of the accepted paths, without their roots, behind the committed rows.

        `lengths` are the committed rows before this iteration; the root's row is `lengths[b]`.
        """
        self.cache.move_paths(slots, lengths, paths)

    def copy_prefix(self, source: int, slot: int, length: int) -> None:
        """Copies the first `length` rows of slot `source` to `slot`; both texts begin with the same tokens."""
        self.cache.copy_rows(source, slot, length)

    def keep_state(self, slot: int, length: int) -> None:
        """Keeps the state of recurrent layers behind `length` tokens of a slot, where other texts begin."""
        if self.cache.states is not None:
            self.cache.states.keep(slot, length)

    def placed(self, work: Pass, num_drafted: int = 0) -> Pass:
        """Returns a pass with the places of its slots in the cache, for a decoder.

        Raises `PassError` if slots lack rows for the pass, and for `num_drafted` nodes behind it.
        """
        if work.tables is not None:
            return work
        cache, ends = self.cache, work.node_offsets
        for row, (slot, prefix) in enumerate(zip(work.slots, work.prefix_lens, strict=True)):
            needed = prefix + ends[row + 1] - ends[row]
            if cache.is_shared:
                needed += num_drafted
            if needed > cache.capacity or (cache.is_shared and needed > cache.rows(slot)):
                raise PassError(f"the pass needs {needed} rows of a slot, which has {cache.rows(slot)}. Feed fewer.")
        return replace(work, slots=cache.places(work.slots)) if cache.is_shared else work
