"""The lean decoder on our own kernels for CPUs: `decoder.cpp`, one call a pass.

It reads the module's weights in place. Its arithmetic does not depend on the number of tokens or sequences in a pass: a
tree's path and plain decoding get the same bits, in every dtype.
"""

from __future__ import annotations

from contextlib import contextmanager
from ctypes import addressof, byref, c_float, c_int64, c_void_p
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from foretoken.core.backend import runs_cpu_kernels
from foretoken.core.errors import PassError
from foretoken.decoder.arguments import AutoregressiveHeadStruct, DraftArguments, Draw, Model, PassArguments, Status
from foretoken.decoder.base import PassOutput, UnsuitableError
from foretoken.decoder.blocks import Blocks, LeanWeights, tap_indices
from foretoken.decoder.library import kernel_threads, native_library
from foretoken.decoder.native_model import NativeModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from foretoken.core.passes import Pass, Tap, TokenChoice
    from foretoken.decoder.quantized import Quantization
    from foretoken.decoder.slot_cache import SlotCache
    from foretoken.trees.dynamic import ShapedExpansion

_DTYPES = (torch.float32, torch.bfloat16)
_Wanted = tuple[str, Tensor | None, torch.dtype, tuple[int, ...]]  # name, tensor, expected dtype and shape
_TREE_TENSORS = (
    "parents", "ranks", "tokens", "scores", "kinds", "row_of", "rows", "node_parents", "node_numbers", "candidates",
    "path_scores", "candidate_parents", "lengths",
)  # fmt: skip


class NativeDraft:
    """Draft trees for the kernels; `arguments`: see `kernels/interface.h`; valid as long as this object lives."""

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


class _Workspace(NamedTuple):
    memory: Tensor
    num_nodes: int
    threads: int
    num_weighed: int


class NativeBlocks:
    """Blocks on a slot cache, with embedding and LM head if they are a model's."""

    def __init__(
        self,
        layers: Blocks,
        cache: SlotCache,
        taps: Sequence[int],
        *,
        ends: LeanWeights | None = None,
        quantization: Quantization | None = None,
    ) -> None:
        """Compiles the kernels if needed.

        Args:
            layers: On a CPU, in float32 or bfloat16.
            cache: In the same dtype, or quantized.
            taps: Boundary indices of features: i is the input of block i, L the output of the last block, L + 1 the
                final norm.
            ends: The whole model, for its embedding and LM head; None for blocks alone.

        Raises:
            UnsuitableError: For another dtype or device, if the kernels cannot be compiled, or if sizes do not fit each
                other.
        """
        if layers.dtype not in _DTYPES:
            raise UnsuitableError(f"it runs float32 and bfloat16, not {layers.dtype}.")
        self._library = native_library()
        self._dtype, self._taps = layers.dtype, list(taps)
        if any(not 0 <= tap <= len(layers.blocks) + 1 for tap in self._taps):
            raise UnsuitableError(f"taps {self._taps} do not all exist.")
        self._tap_indices = (c_int64 * len(self._taps))(*self._taps)
        self._described = NativeModel(layers, ends, cache, quantization)  # keeps the structure's tensors alive
        self._idle: list[_Workspace] = []
        self._idle_of_drafts: list[Tensor] = []

    def run(self, work: Pass, inputs: Tensor | None = None, sides: Tensor | None = None) -> PassOutput:
        """Runs a pass in one call of the kernels.

        Args:
            inputs: (M, E) float32, in place of the tokens' embeddings; None for the embeddings.
            sides: (M, E) float32, the second input of the first block, or None.

        Raises:
            PassError: If something does not fit the model or the cache, or a weight's memory was freed; nothing was
                computed.
        """
        described, arguments, held = self._prepared(work, inputs, sides)
        structure = described.structure
        features = logits = chosen = attention = None
        if not work.has_features or work.num_layers is not None:
            arguments.num_taps = 0
        elif self._taps:
            shape = (work.offsets[-1], len(self._taps), structure.hidden)
            features = torch.empty(shape, dtype=self._dtype, device="cpu")
            arguments.features = features.data_ptr()
        if work.logit_rows is not None:
            wanted = (len(work.logit_rows), structure.num_logits)
            logits = torch.empty(wanted, dtype=torch.float32, device="cpu")
            arguments.logits = logits.data_ptr()  # null without rows
            chosen = torch.empty(wanted[0], dtype=torch.int64, device="cpu")
            arguments.chosen = chosen.data_ptr()
        if work.attention_rows is not None:
            layers = structure.num_layers if work.num_layers is None else work.num_layers
            most = max(
                prefix + nodes for prefix, nodes in zip(work.prefix_lens, _lengths(work.node_offsets), strict=True)
            )
            attention = torch.zeros(len(work.slots), layers, structure.kv_heads, most, device="cpu")
            (rows,) = _fitting(("attention_rows", work.attention_rows, torch.int64, (len(work.attention_rows),)))
            held.append(rows)
            arguments.num_attention, arguments.attention_rows = len(rows), rows.data_ptr()
            arguments.attention, arguments.attention_cols = attention.data_ptr(), most
        self._call_kernels(described, arguments, work)
        del held  # the kernels read it until here
        return PassOutput(logits=logits, features=features, chosen=chosen, attention=attention)

    def append(self, work: Pass, inputs: Tensor, sides: Tensor | None = None) -> None:
        """Runs a pass without the rest of the last block after its keys and values; raises `PassError` as `run`."""
        described, arguments, held = self._prepared(replace(work, logit_rows=None), inputs, sides)
        arguments.is_append, arguments.num_taps = 1, 0
        self._call_kernels(described, arguments, work)
        del held

    def draft_trees(self, work: Pass, expansion: ShapedExpansion, *, vocab_size: int, last_position: int) -> bool:
        """See `TreeDrafting`."""
        if not can_draft(expansion, min(vocab_size, self._described.structure.num_logits)):
            return False
        described, arguments, held = self._prepared(work, None)
        draft, library = NativeDraft(expansion, vocab_size), self._library
        nodes, threads = c_int64(work.node_offsets[-1]), c_int64(arguments.num_threads)
        model = described.structure if work.num_layers is None else _cut(described.structure, work.num_layers)
        places = byref(model), byref(arguments), byref(draft.arguments)
        size = library.foretoken_draft_bytes(places[0], places[2], nodes, threads)
        with self._draft_memory(size, draft) as arguments.workspace:
            status = library.foretoken_draft(*places, c_int64(last_position))
        del held  # the kernels read it until here
        if status:
            raise PassError(self._complaint(Status(status), work))
        return True

    def draft_head_trees(
        self, work: Pass, states: Tensor, expansion: ShapedExpansion, head: AutoregressiveHeadStruct
    ) -> None:
        """Runs a pass over pairs of a state and the next token, and drafts the trees below the roots at its end.

        Arguments and errors as `AutoregressiveKernels.draft`. Only nodes with children are fed; they use the cache rows
        behind those of the pass. The caller keeps the tensors of the head.
        """
        described, arguments, held = self._prepared(work, None)
        (states,) = _fitting(("states", states, torch.float32, (work.num_tokens, described.structure.hidden)))
        draft, library = NativeDraft(expansion, head.vocab), self._library
        nodes, threads = c_int64(work.node_offsets[-1]), c_int64(arguments.num_threads)
        places = byref(described.structure), byref(head), byref(arguments), byref(draft.arguments)
        size = library.foretoken_autoregressive_draft_bytes(*places[:2], places[3], nodes, threads)
        last_position = c_int64(described.structure.num_positions - 1)
        with self._draft_memory(size, draft) as arguments.workspace:
            status = library.foretoken_autoregressive_draft(*places, c_void_p(states.data_ptr()), last_position)
        del held  # the kernels read it until here
        if status == Status.TOKENS:
            raise PassError(
                f"tokens lie in {_range(work.tokens)}. Expected ids below {head.embedding.matrix.rows}, the rows "
                "of the head's embedding."
            )
        if status:
            raise PassError(self._complaint(Status(status), work))

    @contextmanager
    def _draft_memory(self, size: int, draft: NativeDraft) -> Iterator[int]:
        memory = self._idle_of_drafts.pop() if self._idle_of_drafts else torch.empty(0, dtype=torch.uint8, device="cpu")
        if memory.numel() < size or size < 0:
            memory = _allocated(size, f"a draft of {draft.arguments.num_nodes} nodes")
        try:
            yield memory.data_ptr()
        finally:
            self._idle_of_drafts.append(memory)

    def _prepared(
        self, work: Pass, inputs: Tensor | None, sides: Tensor | None = None
    ) -> tuple[NativeModel, PassArguments, list[Any]]:
        """Returns the model, the arguments of a pass, and the tensors that must outlive the call."""
        self._described = described = self._described.current()  # kept until the end: another thread may replace it
        num, num_tokens, node_offsets = len(work.slots), work.offsets[-1], work.node_offsets
        lists = [(c_int64 * num)(*work.slots), (c_int64 * num)(*work.prefix_lens)]
        lists += [(c_int64 * (num + 1))(*work.offsets), (c_int64 * (num + 1))(*node_offsets)]
        slots, prefix, starts, node_starts = map(addressof, lists)
        arguments = PassArguments(
            num_threads=kernel_threads(),
            num_sequences=num,
            slots=slots,
            prefix=prefix,
            starts=starts,
            node_starts=node_starts,
            taps=addressof(self._tap_indices),
            num_taps=len(self._taps),
            features_are_bfloat16=self._dtype == torch.bfloat16,
        )
        nodes, hidden = (node_offsets[-1],), (num_tokens, described.structure.hidden)
        wanted: list[_Wanted] = [
            ("positions", work.positions, torch.int64, nodes),
            ("parents", work.parents, torch.int64, nodes),
            ("tokens", work.tokens, torch.int64, (num_tokens,))
            if inputs is None
            else ("inputs", inputs, torch.float32, hidden),
        ]
        if sides is not None:
            wanted.append(("sides", sides, torch.float32, hidden))
        if work.logit_rows is not None:
            arguments.num_logits = len(work.logit_rows)
            wanted.append(("logit_rows", work.logit_rows, torch.int64, (arguments.num_logits,)))
            if work.choice is not None:
                wanted += _of_choice(work.choice, arguments)
        tensors = _fitting(*wanted)
        for (name, *_), tensor in zip(wanted, tensors, strict=True):
            setattr(arguments, name, tensor.data_ptr())
        return described, arguments, [*lists, *tensors]

    def _call_kernels(self, described: NativeModel, arguments: PassArguments, work: Pass) -> None:
        workspace = self._take_workspace(len(work.parents), arguments.num_threads, arguments.num_attention)
        arguments.workspace = workspace.memory.data_ptr()
        model = described.structure if work.num_layers is None else _cut(described.structure, work.num_layers)
        status = self._library.foretoken_decode(byref(model), byref(arguments))
        self._idle.append(workspace)
        if status:
            raise PassError(self._complaint(Status(status), work))

    def _take_workspace(self, num_nodes: int, threads: int, num_weighed: int = 0) -> _Workspace:
        """Returns an idle workspace that is large enough, or a new one; two Python threads never share one."""
        try:
            idle = self._idle.pop()
        except IndexError:
            idle = _Workspace(torch.empty(0, dtype=torch.uint8, device="cpu"), 0, 0, 0)
        if num_nodes <= idle.num_nodes and threads <= idle.threads and num_weighed <= idle.num_weighed:
            return idle
        num_nodes, threads = max(num_nodes, idle.num_nodes), max(threads, idle.threads)
        num_weighed = max(num_weighed, idle.num_weighed)
        size = self._library.foretoken_workspace_bytes(
            byref(self._described.structure), c_int64(num_nodes), c_int64(threads), c_int64(num_weighed)
        )
        try:
            return _Workspace(_allocated(size, f"a pass of {num_nodes} nodes"), num_nodes, threads, num_weighed)
        except PassError:
            self._idle.append(idle)
            raise

    def _complaint(self, status: Status, work: Pass) -> str:
        model = self._described.structure
        match status:
            case Status.TOKENS:
                text = f"tokens lie in {_range(work.tokens)}. Expected ids in 0..{model.vocab - 1}."
            case Status.POSITIONS:
                text = f"positions lie in {_range(work.positions)}. Expected 0..{model.num_positions - 1}."
            case Status.SLOTS:
                text = f"the slots are {list(work.slots)}. Expected 0..{model.num_slots - 1}."
            case Status.CACHE_ROWS:
                text = (
                    f"prefixes {list(work.prefix_lens)} and the nodes after them, {_lengths(work.node_offsets)}, do "
                    f"not fit. Expected at most {model.capacity} rows a slot in all, which end within the cache."
                )
            case Status.PARENTS:
                text = "a node's parent does not come before it. Expected parents in -1..node - 1."
            case Status.SEQUENCES:
                text = (
                    f"the sequences have {_lengths(work.offsets)} tokens and {_lengths(work.node_offsets)} nodes. "
                    "Expected at least one token each, and a node for each token."
                )
            case Status.LOGIT_ROWS:
                text = f"logit_rows are not ascending in 0..{work.num_tokens - 1}."
            case Status.ATTENTION_ROWS:
                text = f"attention_rows are not ascending in 0..{work.num_tokens - 1}."
            case Status.SHAPE | Status.DRAWS:
                text = f"the draft is no tree level by level: {status.name}. Expected children side by side, by rank."
            case Status.NO_MEMORY:
                text = f"there is no memory for a pass of {work.num_tokens} tokens. Feed fewer at once."
            case _:
                text = (
                    f"the pass lacks something: {status.name}. Expected tensors with memory, and at least one thread."
                )
        return text


class NativeDecoder(NativeBlocks):
    """The lean decoder on the native CPU kernels, see `Decoder`."""

    name = "lean-native"
    is_exact = True

    def __init__(
        self, weights: LeanWeights, cache: SlotCache, taps: Sequence[Tap], *, quantization: Quantization | None = None
    ) -> None:
        """Compiles the kernels if needed. Quantization of a draft model's matrices: see `NativeModel`.

        Raises `UnsuitableError` if the weights are not float32 or bfloat16 on a CPU, a tap does not exist, the kernels
        cannot be compiled, or the model cannot be quantized.
        """
        if not self.runs(weights.device, weights.dtype):
            raise UnsuitableError(f"it runs float32 and bfloat16 on CPUs, not {weights.dtype} on {weights.device}.")
        super().__init__(
            weights.layers, cache, tap_indices(taps, weights.num_layers), ends=weights, quantization=quantization
        )

    @staticmethod
    def runs(device: torch.device, dtype: torch.dtype) -> bool:
        """Decides whether the kernels support a device and a dtype."""
        return runs_cpu_kernels(device) and dtype in _DTYPES


def _cut(model: Model, num_layers: int) -> Model:
    if num_layers > model.num_layers:
        raise PassError(f"the pass goes through {num_layers} blocks, the target has {model.num_layers}.")
    cut = Model.from_buffer_copy(model)
    cut.num_layers = num_layers
    return cut


def _of_choice(choice: TokenChoice, arguments: PassArguments) -> list[_Wanted]:
    """Returns the tensors of a choice by the names of their arguments; sets the number of impossible tokens."""
    rows = (arguments.num_logits,)
    wanted: list[_Wanted] = [
        ("inverse_temperature", choice.inverse_temperature, torch.float32, rows),
        ("seeds", choice.seeds, torch.int64, rows),
    ]
    if choice.impossible_ids is not None:
        arguments.num_impossible = choice.impossible_ids.numel()
        wanted.append(("impossible_ids", choice.impossible_ids, torch.int64, (arguments.num_impossible,)))
    return wanted


def _allocated(size: int, what: str) -> Tensor:
    """Returns (size,) uint8; a negative size stands for a number beyond 64 bits."""
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    except RuntimeError as err:  # torch has no type for it
        raise PassError(f"there is no memory for {what}. Feed fewer at once.") from err


def _lengths(offsets: Sequence[int]) -> list[int]:
    return [end - start for start, end in pairwise(offsets)]


def _fitting(*wanted: _Wanted) -> list[Tensor]:
    found = []
    for name, tensor, dtype, shape in wanted:
        if tensor is None or tensor.dtype is not dtype or tensor.shape != shape or not tensor.is_cpu:
            raise PassError(f"{name} is {_described(tensor)}. Expected {shape} {dtype} on a CPU.")
        found.append(tensor.contiguous())
    return found


def _described(tensor: Tensor | None) -> str:
    return "None" if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"


def _range(values: Tensor) -> str:
    return f"{values.min()}..{values.max()}"
