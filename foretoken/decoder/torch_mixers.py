"""Recurrent layers in torch, on any device: the nodes of a pass that are equally deep are one batch.

Every node begins with its parent's state. Only the states of one depth and one layer exist at a time: a pass keeps the
state behind the settled nodes of a sequence, and the inputs of the others, which the next pass computes again by the
same code (`foretoken.decoder.recurrent_states`). Convolutions need no order and are computed for all tokens at once.

An item is a token to compute: the tokens that are computed again, and the nodes of the pass. A table of rows has the
inputs of a layer: first those of the windows before each sequence, then those of known items, then those of the pass.

Letters: S sequences, M tokens of the pass, I items, L recurrent layers, C channels, K taps of a convolution, H heads,
Dk and Dv the sizes of keys and values, W numbers in a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.core.backend import integers_on
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.fused_linear import fuse
from foretoken.decoder.mixers import LinearAttention, ShortConvolution
from foretoken.decoder.recurrent_states import PathStates, sorted_by_depth

if TYPE_CHECKING:
    from collections.abc import Sequence

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


_Ends = list[tuple[int, TorchBlock]]


class _Level(NamedTuple):
    """Items that are equally deep.

    Attributes:
        items: Of all items, which are in this order.
        parents: (n,) int64, the places of their parents in the level before, or of their sequences; None: in order.
        ends: Places whose states blocks keep.
    """

    items: slice
    parents: Tensor | None
    ends: _Ends


class _Plan:
    """Lists of the items of a pass, on the host.

    Attributes:
        above: Of each item, the item before; ~s for one that sequence s begins with.
        taps: Of each item, rows of the table, the oldest first.
        tokens: Of each token, its item.
        kept: Of each sequence, rows of the table that its block keeps.
        ends: Blocks by the item whose state they keep, or ~s.
    """

    def __init__(self, work: Pass, states: PathStates[TorchBlock], window: int) -> None:
        self.above, self.taps, self.tokens, self.kept = list[int](), list[list[int]](), list[int](), list[list[int]]()
        self.ends: dict[int, TorchBlock] = {}
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
            if block.state is not None:
                self.ends[len(self.above) - len(rows) + settled - 1 if settled else ~sequence] = block

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
        tokens: (M,) int64, the item of each token.
    """

    def __init__(self, work: Pass, slots: RecurrentStates, sizes: MixerSizes) -> None:
        """Allocates blocks; raises `PassError` as `RecurrentStates.begin`."""
        self._slots, self._sizes = slots, sizes
        self.states: PathStates[TorchBlock] = PathStates.of(
            work, slots, lambda num_rows, has_states: TorchBlock.of(sizes, num_rows, has_states=has_states)
        )
        self._begins = self.states.begins()
        known = [row for sequence in range(work.num_sequences) for row in self.states.known(sequence)]
        self._before = _rows_before(self._begins, known, sizes)
        plan = _Plan(work, self.states, sizes.window)
        levels, places = sorted_by_depth(plan.above)
        starts = [*accumulate((len(level.nodes) for level in levels), initial=0)]
        in_order = [node for level in levels for node in level.nodes]
        parents = [
            None if level.parents == list(range(before)) else level.parents
            for level, before in zip(
                levels, [work.num_sequences, *map(len, (each.nodes for each in levels))], strict=False
            )
        ]
        lists = [
            [row for item in in_order for row in plan.taps[item]],
            [starts[places[item][0]] + places[item][1] for item in plan.tokens],
            [row for rows in plan.kept for row in rows],
            *(each for each in parents if each is not None),
        ]
        packed = integers_on([number for each in lists for number in each], sizes.device)
        taps, self.tokens, self._kept, *rest = packed.split(list(map(len, lists)))
        self._taps, self._num_kept = taps.view(-1, sizes.window + 1), list(map(len, plan.kept))
        ends: list[_Ends] = [[] for _ in levels]
        for item, block in plan.ends.items():
            if item >= 0:
                ends[places[item][0]].append((places[item][1], block))
        self._first_ends: _Ends = [(~item, block) for item, block in plan.ends.items() if item < 0]
        self._levels = [
            _Level(slice(*span), None if own is None else rest.pop(0), kept)
            for span, own, kept in zip(pairwise(starts), parents, ends, strict=True)
        ]

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

    def read_states(
        self, layer: int, heads: tuple[Tensor, Tensor, Tensor], decay: Tensor, rate: Tensor, *, is_delta: bool
    ) -> Tensor:
        """Computes S = decay * S; S = S + k (rate * (v - k^T S))^T, or + k (rate * v)^T; and returns S^T q.

        Args:
            layer: Its number.
            heads: Queries and keys, (I, H, Dk) each, and values, (I, H, Dv).
            decay: (I, H).
            rate: (I, H).
            is_delta: Which of both.

        Returns:
            (I, H, Dv).
        """
        (query, key, value), outputs = heads, list[Tensor]()
        state = self._states_before(layer)
        _keep(layer, state, self._first_ends)
        for level in self._levels:
            state = state if level.parents is None else state.index_select(0, level.parents)
            state *= decay[level.items, :, None, None]
            own, added = key[level.items], value[level.items]
            if is_delta:
                added = added - (own.unsqueeze(2) @ state).squeeze(2)
            state.addcmul_(own.unsqueeze(3), (added * rate[level.items, :, None]).unsqueeze(2))
            outputs.append((query[level.items].unsqueeze(2) @ state).squeeze(2))
            _keep(layer, state, level.ends)
        return torch.cat(outputs)

    def _states_before(self, layer: int) -> Tensor:
        """Returns a new tensor (S, H, Dk, Dv)."""
        sizes, states = self._sizes, list[Tensor]()
        assert sizes.state is not None, "the layers have states"
        for begin in self._begins:
            if begin.block is None:
                states.append(torch.zeros(sizes.state, dtype=sizes.state_dtype, device=sizes.device))
            else:
                assert begin.block.state is not None, "texts begin behind blocks with states"
                states.append(begin.block.state[layer])
        return torch.stack(states)


def _keep(layer: int, states: Tensor, ends: _Ends) -> None:
    kept = [block.state[layer] for _, block in ends if block.state is not None]
    if kept:
        torch._foreach_copy_(kept, [states[place] for place, _ in ends])


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
        mixer, heads = self._mixer, self._mixer.num_heads
        columns = self._projections(x)
        if self._order is not None:
            columns = columns[:, self._order]
        if self._factors is not None:
            columns = (columns * self._factors).to(x.dtype)
        at, gate_at = mixer.columns
        width = self._convolution.channels + heads * (2 if mixer.beta_scale else 1)
        windows = mixed.windows(self._number, columns[:, at : at + width])
        query, key, value = self._heads(functional.silu(self._convolution(windows)))
        raw = windows[:, -1, self._convolution.channels :].to(value.dtype)
        step = functional.softplus(raw[:, :heads] + self._step_bias)
        rate = raw[:, heads:].sigmoid() * mixer.beta_scale if mixer.beta_scale else step
        read = mixed.read_states(
            self._number, (query, key, value), (self._decay * step).exp(), rate, is_delta=mixer.beta_scale != 0
        )
        if self._skip is not None:
            read = read + self._skip * value
        gate = functional.silu(columns[:, gate_at : gate_at + heads * mixer.value_dim].to(read.dtype))
        output: Tensor = self._output(self._gated(read[mixed.tokens].flatten(1), gate).to(x.dtype))
        return output * mixer.output_factor

    def _heads(self, channels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries and keys, (I, H, Dk) each, and values, (I, H, Dv)."""
        mixer = self._mixer
        query_at, key_at, value_at = mixer.channels
        size, shared = mixer.num_key_heads * mixer.key_dim, mixer.num_heads // mixer.num_key_heads
        query, key = (
            channels[:, begin : begin + size].unflatten(1, (mixer.num_key_heads, mixer.key_dim))
            for begin in (query_at, key_at)
        )
        if mixer.beta_scale:
            query, key = _of_length_one(query) * mixer.key_dim**-0.5, _of_length_one(key)
        values = channels[:, value_at : value_at + mixer.num_heads * mixer.value_dim]
        return (
            query.repeat_interleave(shared, 1),
            key.repeat_interleave(shared, 1),
            values.unflatten(1, (mixer.num_heads, mixer.value_dim)),
        )

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
