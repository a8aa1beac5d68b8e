"""Tree attention over the slot cache: which rows each token of a pass sees, and the kernels that compute it.

Masks and kernel tables are made once for all layers. The Triton kernel runs on GPUs, stock kernels elsewhere. Each
sequence reads exactly its own rows of the cache. The content of uncommitted rows, NaN included, therefore cannot
matter, and a sequence's result does not depend on the lengths of other sequences of the batch.

Letters: S sequences, M tokens of the pass, T tokens and N nodes of one sequence, W nodes of all.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from foretoken.core.backend import has_cuda_runtime, has_triton
from foretoken.core.checks import require
from foretoken.core.passes import Pass, PassTables
from foretoken.core.token_tree import ancestor_mask, ancestor_words

if TYPE_CHECKING:
    from foretoken.attention.triton_weights import WeighedTokens


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


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Computes softmax attention of one sequence with grouped KV heads.

    Args:
        query: (H, T, Dk).
        key: (Hk, S, Dk), H a multiple of Hk; query head h reads KV head h // (H / Hk).
        value: (Hk, S, Dv).
        mask: (T, S) bool, true where a query sees a key; None for everywhere.
        scale: Factor of the dot products.
        softcap: c in c tanh(score / c), applied before the mask (Gemma 2), or None.
        sinks: (H,) logits that take part in the softmax and have no value (GPT-OSS), or None.

    Returns:
        (H, T, Dv) in the query's dtype; the softmax runs in at least float32.
    """
    heads, queries, _ = query.shape
    probs = _probabilities(query, key, mask, scale=scale, softcap=softcap, sinks=sinks).to(value.dtype)
    return (probs @ value).view(heads, queries, -1)


def _probabilities(
    query: Tensor, key: Tensor, mask: Tensor | None, *, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Returns (Hk, H / Hk * T, S), the softmax of `reference_attention` in at least float32."""
    (heads, queries, width), num = query.shape, key.shape[0]
    grouped = query.reshape(num, heads // num * queries, width)
    scores = (grouped @ key.transpose(1, 2)).view(heads, queries, -1) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(heads, 1, 1).expand(-1, queries, 1)], dim=2)
    return scores.softmax(-1)[:, :, : key.shape[1]].reshape(num, heads // num * queries, -1)


_KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_WIDEST_HEAD = 256
_log = logging.getLogger(__name__)


def tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: AttentionLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Returns (M, H, Dv), the attention of every token of a pass; further arguments as in `reference_attention`.

    Args:
        query: (M, H, Dk).
        keys: (slots, Hk, capacity, Dk), one layer of the cache, this pass's rows already written.
        values: (slots, Hk, capacity, Dv).
    """
    if layout.has_weights:
        layout.keep_weights(_summed_weights(query, keys, layout, window, scale=scale, softcap=softcap, sinks=sinks))
    if layout.is_captured or has_cuda_runtime(query.device):
        kernel = _triton_kernel(query.dtype, max(query.shape[-1], values.shape[-1]))
        if kernel is not None:
            output: Tensor = kernel(
                query, keys, values, layout.tables(), scale=scale, window=window, softcap=softcap, sinks=sinks
            )
            return output
        require(not layout.is_captured, "passes are captured only where the kernel runs, see `has_kernel`")
    outputs = []
    for row, slot in enumerate(layout.slots):
        own, end = query[layout.tokens_of(row)].transpose(0, 1), layout.num_keys(row)
        key, value = keys[slot, :, :end], values[slot, :, :end]
        mask = layout.mask(row, window)
        if softcap is None and sinks is None:
            output = scaled_dot_product_attention(
                own[None], key[None], value[None], mask, scale=scale, enable_gqa=own.shape[0] != key.shape[0]
            )[0]
        else:
            output = reference_attention(own, key, value, mask, scale=scale, softcap=softcap, sinks=sinks)
        outputs.append(output.transpose(0, 1))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _summed_weights(query: Tensor, keys: Tensor, layout: AttentionLayout, window: int | None, **terms: Any) -> Tensor:
    """Returns (S, Hk, C), the weights of one layer, see `PassOutput.attention`; reads the keys once more."""
    is_plain = window is None and terms["softcap"] is None and terms["sinks"] is None
    if is_plain and has_cuda_runtime(query.device) and has_kernel(query.dtype, query.shape[-1]):
        from foretoken.attention.triton_weights import attention_weights_triton, fits

        weighed = layout.weighed_tensors()
        if fits(query, keys, weighed):
            found: Tensor = attention_weights_triton(query, keys, layout.tables(), weighed, scale=terms["scale"])
            return found
    count = range(len(layout.slots))
    weights = torch.zeros(len(count), keys.shape[1], max(map(layout.num_keys, count)), device=keys.device)
    for row, slot in enumerate(layout.slots):
        tokens, end = layout.weighed_tokens(row), layout.num_keys(row)
        if tokens:
            mask, first = layout.mask(row, window), layout.tokens_of(row).start
            seen = None if mask is None else mask[[token - first for token in tokens]]
            probs = _probabilities(query[tokens].transpose(0, 1), keys[slot, :, :end], seen, **terms)
            weights[row, :, :end] = probs.sum(1)
    return weights


def has_kernel(dtype: torch.dtype, head_width: int) -> bool:
    """Returns whether the Triton kernel supports a dtype and head size, so that attention can be captured."""
    return _triton_kernel(dtype, head_width) is not None


@cache
def _triton_kernel(dtype: torch.dtype, head_width: int) -> Any:
    """Returns the kernel, or None; logs the reason once."""
    if dtype not in _KERNEL_DTYPES or head_width > _WIDEST_HEAD:
        reason = (
            f"it takes heads of at most {_WIDEST_HEAD} in float32, float16 and bfloat16, not {head_width} in {dtype}"
        )
    elif not has_triton():
        reason = "triton is not installed. Run in foretoken's repository: pip install '.[kernels]'"
    else:
        from foretoken.attention.triton_tree import tree_attention_triton

        return tree_attention_triton
    _log.warning("attention runs on stock kernels, sequence by sequence, instead of the Triton kernel: %s.", reason)
    return None
