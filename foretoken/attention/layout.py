"""Visibility of KV cache rows for each token of a pass, computed once for all layers: masks and kernel tables.

Letters: S sequences, M tokens of the pass, T tokens and N nodes of one sequence, W nodes of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from foretoken.core.passes import PassTables
from foretoken.core.token_tree import ancestor_mask, ancestor_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.attention.triton_weights import WeighedTokens
    from foretoken.core.passes import Pass


class AttentionLayout:
    """Masks and kernel tables of one pass, built when asked for.

    A pass under capture brings its tables. Then only tables exist, and host values are bounds.
    """

    def __init__(self, work: Pass) -> None:
        self._work, self._node_offsets = work, work.node_offsets
        self._tables = work.tables
        self._masks: dict[tuple[int, int | None], Tensor | None] = {}
        self._weighed = [] if work.attention_rows is None else work.attention_rows.tolist()
        self._weights: list[Tensor] = []
        self._weighed_tensors: WeighedTokens | None = None

    @property
    def is_captured(self) -> bool:
        """Whether the pass is under capture, so that nothing may be read on the host."""
        return self._work.tables is not None

    @property
    def has_weights(self) -> bool:
        """Whether attention weights of some tokens are needed."""
        return bool(self._weighed)

    def weighed_tokens(self, sequence: int) -> list[int]:
        """Returns a sequence's tokens, as indices in the pass, whose attention weights are needed."""
        tokens = self.tokens_of(sequence)
        return [token for token in self._weighed if tokens.start <= token < tokens.stop]

    def weighed_tensors(self) -> WeighedTokens:
        """Returns these tokens of all sequences for the Triton kernel; built once per pass."""
        if self._weighed_tensors is None:
            from foretoken.attention.triton_weights import WeighedTokens

            every = range(len(self.slots))
            tokens, num_keys = [self.weighed_tokens(row) for row in every], max(map(self.num_keys, every))
            self._weighed_tensors = WeighedTokens.of(tokens, num_keys, self._work.positions.device)
        return self._weighed_tensors

    def keep_weights(self, weights: Tensor) -> None:
        """Keeps the weights of the next layer, (S, Hk, C)."""
        self._weights.append(weights)

    @property
    def attention(self) -> Tensor | None:
        """The kept weights, see `PassOutput.attention`."""
        return torch.stack(self._weights, dim=1) if self._weights else None

    @property
    def slots(self) -> Sequence[int]:
        """S cache slots."""
        return self._work.slots

    def tokens_of(self, sequence: int) -> slice:
        """Returns the slice of a sequence's T tokens in the pass."""
        return slice(self._work.offsets[sequence], self._work.offsets[sequence + 1])

    def rows_of(self, sequence: int) -> slice:
        """Returns the cache rows of a sequence's T tokens."""
        end = self.num_keys(sequence)
        return slice(end - self._num_tokens(sequence), end)

    def num_keys(self, sequence: int) -> int:
        """Returns the number of cache rows that a sequence's tokens may see: its prefix and all its nodes."""
        return self._work.prefix_lens[sequence] + self._num_nodes(sequence)

    def mask(self, sequence: int, window: int | None) -> Tensor | None:
        """Returns (T, `num_keys(sequence)`) bool, the keys that a sequence's tokens see; None for all keys.

        With a `window`, tokens see only keys less than this many positions back. Computed once per pass and window.
        """
        if window is not None and self.num_keys(sequence) <= window:
            window = None
        key = (sequence, window)
        if key not in self._masks:
            self._masks[key] = self._build_mask(sequence, window)
        return self._masks[key]

    def tables(self) -> PassTables:
        """Returns the tables for kernels; built once per pass."""
        if self._tables is None:
            self._tables = self._build_tables()
        return self._tables

    def _num_tokens(self, sequence: int) -> int:
        return self._work.offsets[sequence + 1] - self._work.offsets[sequence]

    def _num_nodes(self, sequence: int) -> int:
        return self._node_offsets[sequence + 1] - self._node_offsets[sequence]

    def _build_mask(self, sequence: int, window: int | None) -> Tensor | None:
        work, tokens, nodes = self._work, self._num_tokens(sequence), self._num_nodes(sequence)
        if nodes == 1 and window is None:
            return None
        prefix, device = work.prefix_lens[sequence], work.positions.device
        first, end = self._node_offsets[sequence], self._node_offsets[sequence + 1]
        if work.is_causal:
            own = torch.ones(nodes, nodes, dtype=torch.bool, device=device).tril()
        else:
            own = ancestor_mask(work.parents[first:end].unsqueeze(0))[0]
        seen = torch.ones(tokens, prefix, dtype=torch.bool, device=device)
        mask = torch.cat([seen, own[nodes - tokens :]], dim=1)
        if window is not None:
            positions = work.positions[first:end]
            keys = torch.cat([torch.arange(prefix, device=device), positions])
            mask &= positions[nodes - tokens :].unsqueeze(1) - keys < window
        return mask

    def _build_tables(self) -> PassTables:
        work, num = self._work, self._work.num_sequences
        device = work.positions.device
        nodes = [self._num_nodes(row) for row in range(num)]
        written = [(slot, self.rows_of(row)) for row, slot in enumerate(work.slots)]
        places = torch.tensor(
            [
                [slot for slot, rows in written for _ in range(rows.start, rows.stop)],
                [row for _, rows in written for row in range(rows.start, rows.stop)],
                # of each token among the nodes of all sequences
                [node for row, end in enumerate(self._node_offsets[1:])
                 for node in range(end - self._num_tokens(row), end)],
            ],
            device=device,
        )  # fmt: skip
        sequences = torch.tensor([list(work.slots), list(work.prefix_lens)], dtype=torch.int32, device=device)
        starts = torch.tensor([list(work.offsets), list(self._node_offsets)], dtype=torch.int32, device=device)
        words = None
        if not work.is_causal:
            padded = torch.nn.utils.rnn.pad_sequence(
                list(work.parents.split(nodes)), batch_first=True, padding_value=-1
            )
            # little-endian: the low half of a word comes first
            by_node = ancestor_words(padded).view(torch.int32)
            words = torch.cat([by_node[row, :count] for row, count in enumerate(nodes)])[places[2]]
        return PassTables(
            slots=sequences[0], prefix=sequences[1], starts=starts[0], node_starts=starts[1],
            positions=work.positions.to(torch.int32), words=words, written_slots=places[0], written_rows=places[1],
            max_prefix=max(work.prefix_lens), max_tokens=max(self._num_tokens(row) for row in range(num)),
            max_nodes=max(nodes),
        )  # fmt: skip
