"""Recurrent layers in torch, on any device; on GPUs a kernel of `triton_kernels` computes the recurrence.

Every node begins with its parent's state. A pass keeps the state behind the settled nodes of a sequence, and the inputs
of the others, which the next pass computes again by the same code (`foretoken.decoder.recurrent_states`). Convolutions
need no order and are computed for all tokens at once.

An item is a token to compute: the tokens that are computed again, and the nodes of the pass. A table of rows has the
inputs of a layer: first those of the windows before each sequence, then those of known items, then those of the pass.

Letters: S sequences, M tokens of the pass, I items, L recurrent layers, C channels, K taps of a convolution, H heads,
Hk heads of queries and keys, Dk and Dv the sizes of keys and values, W numbers in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core.backend import integers_on
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.fused_linear import fuse
from foretoken.decoder.mixers import LinearAttention, ShortConvolution
from foretoken.decoder.recurrent_states import PathStates, sorted_by_depth

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from foretoken.core.passes import Pass
    from foretoken.decoder.recurrent_states import NodeRow, PathState, RecurrentStates


class MixerSizes(NamedTuple):
    """Sizes of the recurrent layers of a model, which are alike.

    Attributes:
        layers: L.
        window: K - 1.
        row: W, of the channels, steps and betas of a token.
        state: (H, Dk, Dv), or None for convolutions alone.
        dtype: Of rows.
        device: Of blocks.
    """

    layers: int
    window: int
    row: int
    state: tuple[int, int, int] | None
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(
        cls, mixers: Sequence[ShortConvolution | LinearAttention], dtype: torch.dtype, device: torch.device
    ) -> MixerSizes | None:
        """Returns the sizes of a model, None without mixers; raises `UnsuitableError` if its layers differ."""
        found = set[tuple[int, int, tuple[int, int, int] | None]]()
        for mixer in mixers:
            channels, taps = map(int, mixer.convolution.weight.shape)
            if isinstance(mixer, LinearAttention):
                state = (mixer.num_heads, mixer.key_dim, mixer.value_dim)
                found.add((taps - 1, channels + mixer.num_heads * (2 if mixer.beta_scale else 1), state))
            else:
                found.add((taps - 1, channels, None))
        if len(found) > 1:
            raise UnsuitableError("it runs recurrent layers of one size alone.")
        return next((cls(len(mixers), *each, dtype, device) for each in found), None)

    @property
    def state_dtype(self) -> torch.dtype:
        """Dtype of states."""
        return torch.promote_types(self.dtype, torch.float32)

    def block_bytes(self, num_rows: int) -> int:
        """Returns the bytes of a block with states and so many rows."""
        heads, keys, values = self.state or (0, 0, 0)
        rows = (self.window + num_rows) * self.row * self.dtype.itemsize
        return self.layers * (heads * keys * values * self.state_dtype.itemsize + rows)


@dataclass(frozen=True, slots=True, eq=False)
class TorchBlock:
    """See `foretoken.decoder.recurrent_states.HeldStates`.

    Attributes:
        state: (L, H, Dk, Dv) in at least float32; None for convolutions alone, and for rows alone.
        rows: (window + n, L, W) in the model's dtype, first those of the window.
        window: K - 1, or 0 for rows alone.
    """

    state: Tensor | None
    rows: Tensor
    window: int

    @classmethod
    def of(cls, sizes: MixerSizes, num_rows: int, *, has_states: bool) -> TorchBlock:
        """Allocates a block."""
        window = sizes.window if has_states else 0
        rows = torch.empty((window + num_rows, sizes.layers, sizes.row), dtype=sizes.dtype, device=sizes.device)
        state = None
        if has_states and sizes.state is not None:
            state = torch.empty((sizes.layers, *sizes.state), dtype=sizes.state_dtype, device=sizes.device)
        return cls(state, rows, window)

    def tensors(self) -> Sequence[Tensor]:
        """See `foretoken.decoder.recurrent_states.HeldStates`."""
        return (self.rows,) if self.state is None else (self.state, self.rows)


class Items(NamedTuple):
    """The items of a pass, and the states (L, H, Dk, Dv) around them.

    Attributes:
        above: Of each item, the item before; ~s for one that sequence s begins with.
        before: Of each sequence, the state that it begins with; None for zeros.
        ends: Of each sequence, an item with the memory that its state is copied to; ~s for the state before the
            sequence, None for no state.
    """

    above: Sequence[int]
    before: Sequence[Tensor | None]
    ends: Sequence[tuple[int, Tensor] | None]


class HeadInputs(NamedTuple):
    """Queries and keys, (I, Hk, Dk) each, and values, (I, H, Dv), with the heads of an item side by side in memory."""

    query: Tensor
    key: Tensor
    value: Tensor


class Levels:
    """The recurrence in torch: items that are equally deep are a batch, whose states alone exist.

    Attributes:
        order: The items in the order of the arguments of `read`.
        lists: Integers that are to be put into `tables`, on the device.
    """

    def __init__(self, items: Items, sizes: MixerSizes) -> None:
        """Sorts the items."""
        self._items, self._sizes = items, sizes
        self.levels, places = sorted_by_depth(items.above)
        self.order = [item for level in self.levels for item in level.nodes]
        widths = [len(items.before), *(len(level.nodes) for level in self.levels)]
        self._is_sorted = [
            level.parents == list(range(width)) for level, width in zip(self.levels, widths, strict=False)
        ]
        self.lists = [level.parents for level, known in zip(self.levels, self._is_sorted, strict=True) if not known]
        self.tables: Sequence[Tensor] = ()
        self._ends: list[list[tuple[int, Tensor]]] = [[] for _ in widths]  # by level, first those before the sequences
        for item, memory in filter(None, items.ends):
            level, place = places[item] if item >= 0 else (-1, ~item)
            self._ends[level + 1].append((place, memory))

    def read(self, layer: int, heads: HeadInputs, decay: Tensor, rate: Tensor, *, is_delta: bool) -> Tensor:
        """Computes S = decay * S; S = S + k (rate * (v - k^T S))^T, or + k (rate * v)^T; and returns S^T q.

        Args:
            layer: Its number.
            heads: Of each item.
            decay: (I, H), contiguous.
            rate: (I, H), contiguous.
            is_delta: Which of both.

        Returns:
            (I, H, Dv).
        """
        shared, outputs, tables = decay.shape[1] // heads.key.shape[1], list[Tensor](), iter(self.tables)
        query, key = (each.repeat_interleave(shared, 1) for each in heads[:2])
        state, first = self._before(layer), 0
        self._keep(layer, state, 0)
        for number, level in enumerate(self.levels):
            own = slice(first, first := first + len(level.nodes))
            state = state if self._is_sorted[number] else state.index_select(0, next(tables))
            state *= decay[own, :, None, None]
            added = heads.value[own]
            if is_delta:
                added = added - (key[own].unsqueeze(2) @ state).squeeze(2)
            state.addcmul_(key[own].unsqueeze(3), (added * rate[own, :, None]).unsqueeze(2))
            outputs.append((query[own].unsqueeze(2) @ state).squeeze(2))
            self._keep(layer, state, number + 1)
        return torch.cat(outputs)

    def _before(self, layer: int) -> Tensor:
        """Returns a new tensor (S, H, Dk, Dv)."""
        sizes = self._sizes
        assert sizes.state is not None, "the layers have states"
        empty = torch.zeros(sizes.state, dtype=sizes.state_dtype, device=sizes.device)
        return torch.stack([empty if each is None else each[layer] for each in self._items.before])

    def _keep(self, layer: int, states: Tensor, level: int) -> None:
        if ends := self._ends[level]:
            torch._foreach_copy_([memory[layer] for _, memory in ends], [states[place] for place, _ in ends])


class DepthFirst:
    """The recurrence in one Triton kernel, which walks over the items of each sequence depth first; see `Levels`.

    A state stays in registers while each item comes right after its parent. Other items load it: from scratch memory,
    where an item with several children stores its own, or from where the sequence begins. The largest subtree is the
    last, so n items need at most log2(n) states of scratch memory, and a chain needs none.
    """

    def __init__(self, items: Items, sizes: MixerSizes, kernels: Any) -> None:
        """Sorts the items; kernels: `triton_kernels`."""
        self._items, self._kernels, self.order = items, kernels, list[int]()
        counts, children = [1] * len(items.above), dict[int, list[int]]()
        for item, parent in reversed([*enumerate(items.above)]):
            children.setdefault(parent, []).append(item)
            if parent >= 0:
                counts[parent] += counts[item]
        for below in children.values():
            below.sort(key=counts.__getitem__, reverse=True)
        sequences, moves, num_states = list[int](), list[int](), 0
        for sequence, (before, end) in enumerate(zip(items.before, items.ends, strict=True)):
            first = len(self.order)
            for item, source, target in _depth_first(children, ~sequence, num_states):
                self.order.append(item)
                moves += [source, target]
            num_states = max([num_states, *(target + 1 for target in moves[2 * first + 1 :: 2])])
            sequences += [first, len(self.order), 0 if before is None else before.data_ptr()]
            if end is None:
                sequences += [-2, 0]
            else:
                place = self.order.index(end[0], first) if end[0] >= 0 else first - 1
                sequences += [place, end[1].data_ptr()]
        self.lists = [sequences, moves]
        self.tables: Sequence[Tensor] = ()
        assert sizes.state is not None, "the layers have states"
        self._scratch = torch.empty((num_states, *sizes.state), dtype=sizes.state_dtype, device=sizes.device)

    def read(self, layer: int, heads: HeadInputs, decay: Tensor, rate: Tensor, *, is_delta: bool) -> Tensor:
        """See `Levels`."""
        out: Tensor = self._kernels.walk_states(
            layer, *heads, decay, rate, *self.tables, self._scratch, is_delta=is_delta
        )
        return out


def _depth_first(children: Mapping[int, Sequence[int]], root: int, used: int) -> Iterator[tuple[int, int, int]]:
    """Yields the items below `root`, with where each one's state comes from and goes to, see `walk_states`.

    used: States of scratch memory that are taken.
    """
    waiting = [(root, -1, used)]
    while waiting:
        item, source, used = waiting.pop()
        below = children.get(item, ())
        target = -1 if len(below) < 2 else used if item >= 0 else -2
        if item >= 0:
            yield item, source, target
        # The last item takes the state out of the scratch memory.
        waiting += [(each, target, used + (target >= 0 and place > 0)) for place, each in enumerate(below)]
        if below:
            waiting[-1] = (below[-1], -1, waiting[-1][2])


class _Plan:
    """Lists of the items of a pass, on the host.

    Attributes:
        above: Of each item, the item before; ~s for one that sequence s begins with.
        taps: Of each item, rows of the table, the oldest first.
        tokens: Of each token, its item.
        kept: Of each sequence, rows of the table that its block keeps.
        ends: See `Items`.
    """

    def __init__(self, work: Pass, states: PathStates[TorchBlock], window: int) -> None:
        self.above, self.taps, self.tokens, self.kept = list[int](), list[list[int]](), list[int](), list[list[int]]()
        self.ends = list[tuple[int, Tensor] | None]()
        num = work.num_sequences
        known = [len(states.known(sequence)) for sequence in range(num)]
        known_at = [*accumulate(known, initial=num * window)]
        for sequence, (first, end) in enumerate(pairwise(work.node_offsets)):
            tokens = range(*(known_at[-1] + offset for offset in work.offsets[sequence : sequence + 2]))
            rows = [*range(*known_at[sequence : sequence + 2]), *tokens]
            replayed = known[sequence] - (end - first - len(tokens))
            above = [*range(-1, replayed - 1), *(replayed + parent for parent in states.parents[first:end])]
            self._add(sequence, rows, above, len(tokens), window)
            settled, block = replayed + states.settled[sequence], states.made[sequence]
            start = sequence * window  # of the window's rows
            before = [rows[at] if at >= 0 else start + window + at for at in range(settled - block.window, settled)]
            self.kept.append([*before, *tokens[states.settled[sequence] :]])
            last = len(self.above) - len(rows) + settled - 1 if settled else ~sequence
            self.ends.append((last, block.state) if tokens and block.state is not None else None)

    def _add(self, sequence: int, rows: list[int], above: list[int], num_tokens: int, window: int) -> None:
        """Adds the items of a sequence, but for earlier nodes that no new one comes after."""
        count, first = len(rows), len(self.above)
        is_needed = [item >= count - num_tokens for item in range(count)]
        for item in reversed(range(count)):
            if is_needed[item] and above[item] >= 0:
                is_needed[above[item]] = True
        numbers = [first + number for number in accumulate(is_needed, initial=0)]
        for item in range(count):
            if is_needed[item]:
                self.above.append(~sequence if above[item] < 0 else numbers[above[item]])
                taps, at = [rows[item]], item
                for _ in range(window):
                    at = above[at] if at >= 0 else at - 1
                    taps.append(rows[at] if at >= 0 else (sequence + 1) * window + at)
                self.taps.append(taps[::-1])
        self.tokens += numbers[count - num_tokens : count]


class MixedPass:
    """What the recurrent layers of a pass share.

    Attributes:
        states: What the pass makes.
        tokens: (M,) int64, the item of each token, in the order of `recurrence`.
        recurrence: Computes the states of a layer.
    """

    def __init__(self, work: Pass, slots: RecurrentStates, sizes: MixerSizes, kernels: Any = None) -> None:
        """Allocates blocks; raises `PassError` as `RecurrentStates.begin`. kernels: `triton_kernels`, or None."""
        self._slots = slots
        self.states: PathStates[TorchBlock] = PathStates.of(
            work, slots, lambda num_rows, has_states: TorchBlock.of(sizes, num_rows, has_states=has_states)
        )
        begins = self.states.begins()
        known = [row for sequence in range(work.num_sequences) for row in self.states.known(sequence)]
        self._before = _rows_before(begins, known, sizes)
        plan = _Plan(work, self.states, sizes.window)
        items = Items(plan.above, [None if each.block is None else each.block.state for each in begins], plan.ends)
        has_kernel = kernels is not None and sizes.state is not None and sizes.state_dtype == torch.float32
        self.recurrence: Levels | DepthFirst = DepthFirst(items, sizes, kernels) if has_kernel else Levels(items, sizes)
        places = {item: place for place, item in enumerate(self.recurrence.order)}
        lists = [
            [row for item in places for row in plan.taps[item]],
            [places[item] for item in plan.tokens],
            [row for rows in plan.kept for row in rows],
            *self.recurrence.lists,
        ]
        packed = integers_on([number for each in lists for number in each], sizes.device)
        taps, self.tokens, self._kept, *self.recurrence.tables = packed.split(list(map(len, lists)))
        self._taps, self._num_kept = taps.view(-1, sizes.window + 1), list(map(len, plan.kept))

    def finish(self, work: Pass) -> None:
        """Keeps the states for later passes; work: what the pass was made of."""
        self._slots.finish(work, self.states)

    def windows(self, layer: int, rows: Tensor) -> Tensor:
        """Returns (I, K, W), the inputs of each item and those before it; keeps what later passes need.

        rows: (M, W), of the tokens.
        """
        table = torch.cat([self._before[:, layer], rows])
        kept = table[self._kept].split(self._num_kept)
        torch._foreach_copy_([block.rows[:, layer] for block in self.states.made], list(kept))
        return table[self._taps]


def _rows_before(
    begins: Sequence[PathState[TorchBlock]], known: Sequence[NodeRow[TorchBlock]], sizes: MixerSizes
) -> Tensor:
    """Returns (S * window + known, L, W): the windows before the sequences, zeros before a text, and known rows."""
    parts = [
        torch.zeros((sizes.window, sizes.layers, sizes.row), dtype=sizes.dtype, device=sizes.device)
        if begin.block is None
        else begin.block.rows[: sizes.window]
        for begin in begins
    ]
    parts += [row.block.rows[row.block.window + row.place].unsqueeze(0) for row in known]
    return torch.cat(parts)


class _TorchConvolution:
    """A causal convolution, in at least float32."""

    def __init__(self, mixer: ShortConvolution | LinearAttention) -> None:
        convolution = mixer.convolution
        self.dtype = torch.promote_types(convolution.weight.dtype, torch.float32)
        self._taps = convolution.weight.to(self.dtype).T.contiguous()
        self._bias = None if convolution.bias is None else convolution.bias.to(self.dtype)
        self.channels = self._taps.shape[1]

    def __call__(self, windows: Tensor) -> Tensor:
        """Turns (I, K, W), whose first columns are channels, into (I, C)."""
        out = (windows[..., : self.channels].to(self.dtype) * self._taps).sum(1)
        return out if self._bias is None else out + self._bias


class TorchShortConvolution:
    """See `ShortConvolution`."""

    def __init__(self, number: int, mixer: ShortConvolution, *, moves_weights: bool) -> None:
        self._number, self._mixer, self._convolution = number, mixer, _TorchConvolution(mixer)
        self._projection = fuse(mixer.projection, moves_weights=moves_weights)
        self._output = fuse(mixer.output)

    def __call__(self, x: Tensor, mixed: MixedPass) -> Tensor:
        """Turns (M, E) into what is added to the block's inputs, (M, E)."""
        parts = self._projection(x).chunk(3, dim=1)
        inputs, gate, factor = (parts[place] for place in self._mixer.order)
        windows = mixed.windows(self._number, inputs * factor)[mixed.tokens]
        output: Tensor = self._output((self._convolution(windows) * gate).to(x.dtype))
        return output * self._mixer.output_factor


class TorchLinearAttention:
    """See `LinearAttention`."""

    def __init__(self, number: int, mixer: LinearAttention, *, moves_weights: bool) -> None:
        self._number, self._mixer, self._convolution = number, mixer, _TorchConvolution(mixer)
        self._projections = fuse(*mixer.projections, moves_weights=moves_weights)
        self._output, device, dtype = fuse(mixer.output), mixer.decay.device, self._convolution.dtype
        self._order = None if mixer.places is None else mixer.places.argsort().to(device)
        self._factors = None if mixer.factors is None else mixer.factors.to(device)
        self._decay, self._step_bias = mixer.decay.to(dtype), mixer.step_bias.to(dtype)
        self._skip = None if mixer.skip is None else mixer.skip.to(dtype).unsqueeze(1)
        self._norm = None if mixer.norm is None else mixer.norm.weight.to(dtype)

    def __call__(self, x: Tensor, mixed: MixedPass) -> Tensor:
        """Turns (M, E) into what is added to the block's inputs, (M, E)."""
        mixer, num = self._mixer, self._mixer.num_heads
        columns = self._projections(x)
        if self._order is not None:
            columns = columns[:, self._order]
        if self._factors is not None:
            columns = (columns * self._factors).to(x.dtype)
        at, gate_at = mixer.columns
        width = self._convolution.channels + num * (2 if mixer.beta_scale else 1)
        windows = mixed.windows(self._number, columns[:, at : at + width])
        heads = self._heads(functional.silu(self._convolution(windows)))
        raw = windows[:, -1, self._convolution.channels :].to(heads.value.dtype)
        step = functional.softplus(raw[:, :num] + self._step_bias)
        rate = raw[:, num:].sigmoid() * mixer.beta_scale if mixer.beta_scale else step
        decay = (self._decay * step).exp()
        read = mixed.recurrence.read(self._number, heads, decay, rate, is_delta=mixer.beta_scale != 0)
        if self._skip is not None:
            read = read + self._skip * heads.value
        gate = functional.silu(columns[:, gate_at : gate_at + num * mixer.value_dim].to(read.dtype))
        output: Tensor = self._output(self._gated(read[mixed.tokens].flatten(1), gate).to(x.dtype))
        return output * mixer.output_factor

    def _heads(self, channels: Tensor) -> HeadInputs:
        mixer = self._mixer
        query_at, key_at, value_at = mixer.channels
        size = mixer.num_key_heads * mixer.key_dim
        query, key = (
            channels[:, begin : begin + size].unflatten(1, (mixer.num_key_heads, mixer.key_dim))
            for begin in (query_at, key_at)
        )
        if mixer.beta_scale:
            query, key = _of_length_one(query) * mixer.key_dim**-0.5, _of_length_one(key)
        values = channels[:, value_at : value_at + mixer.num_heads * mixer.value_dim]
        return HeadInputs(query, key, values.unflatten(1, (mixer.num_heads, mixer.value_dim)))

    def _gated(self, read: Tensor, gate: Tensor) -> Tensor:
        """Returns the outputs of heads, (M, H * Dv), with norm and gate."""
        mixer = self._mixer
        if mixer.gates_first or self._norm is None:
            read = read * gate
        if mixer.norm is None or self._norm is None:
            return read
        groups = read.unflatten(1, (-1, mixer.norm_size))
        normed = functional.rms_norm(groups, (mixer.norm_size,), None, mixer.norm.epsilon).flatten(1) * self._norm
        return normed if mixer.gates_first else normed * gate


def _of_length_one(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


TorchMixer = TorchShortConvolution | TorchLinearAttention


def torch_mixer(number: int, mixer: ShortConvolution | LinearAttention, *, moves_weights: bool) -> TorchMixer:
    """Returns the recurrent part `number` of a model in torch. `moves_weights`: see `FusedLinear`."""
    if isinstance(mixer, LinearAttention):
        return TorchLinearAttention(number, mixer, moves_weights=moves_weights)
    return TorchShortConvolution(number, mixer, moves_weights=moves_weights)
