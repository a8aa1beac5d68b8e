"""A pass: the new tokens of several sequences, packed without padding.

A tree of nodes follows the committed prefix of each sequence. A decode step is a root, a verification is a token tree,
a prompt chunk is a chain; one pass may mix them. A draft model expands its tree level by level: nodes of earlier passes
over the same prefix are listed first, and the KV cache already has their keys and values. Node i of a sequence has
cache row `prefix_len + i`.

Letters: S sequences, M new tokens, W nodes (M and those of earlier passes), R rows of logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from foretoken.core.backend import integers_on
from foretoken.core.checks import require

if TYPE_CHECKING:
    from foretoken.core.token_tree import TokenTree

Tap = int | Literal["final"]
"""0 is the input of the first block (embeddings as the model scales them), i the output of block i before any later
norm; `final` is the output of the norm after the last block, what the LM head reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenChoice:
    """How decoders choose the token after each row of logits.

    Attributes:
        inverse_temperature: (R,) float32; 0 takes the greatest logit, other values draw from softmax(logits /
            temperature) by Gumbel-max with `KeyedNoise` of `Purpose.TARGET` at the position after the row's token.
        seeds: (R,) int64, keys of that noise; ignored where the greatest logit is taken.
        impossible_ids: (U,) int64, tokens with logits that become -inf first; None for none.
    """

    inverse_temperature: Tensor
    seeds: Tensor
    impossible_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassTables:
    """The rows of each sequence's keys, and which of them each token sees.

    Every token sees the rows r < prefix of its slot within its sliding window, which takes r for their position. Row
    prefix + i is node i of the sequence; its tokens are the last of its nodes.

    Attributes:
        slots: (S,) int32, cache slots.
        prefix: (S,) int32, prefix lengths.
        starts: (S + 1,) int32, where each sequence's tokens begin.
        node_starts: (S + 1,) int32, where its nodes begin.
        positions: (W,) int32, of the nodes.
        words: (M, N32) int32, bit i % 32 of word i // 32 is set if the token sees node i of its sequence; None if every
            sequence is a chain: a token sees all nodes up to its own.
        written_slots: (M,) int64, the cache slot of each token.
        written_rows: (M,) int64, the cache row of each token; -1 for padding tokens without a sequence.
        max_prefix: Upper bound of `prefix`, known on the host; launches depend on it, results do not.
        max_tokens: Upper bound of the tokens of a sequence, known on the host.
        max_nodes: Upper bound of the nodes of a sequence, known on the host.
    """

    slots: Tensor
    prefix: Tensor
    starts: Tensor
    node_starts: Tensor
    positions: Tensor
    words: Tensor | None
    written_slots: Tensor
    written_rows: Tensor
    max_prefix: int
    max_tokens: int
    max_nodes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """Work for a decoder. A token sees the prefix of its sequence, its ancestors among the nodes, and itself.

    The tensors are on one device: the decoder's, or the host, see `to`.

    Attributes:
        tokens: (M,) int64, one sequence after another. Ignored if other inputs replace the embeddings.
        positions: (W,) int64, rotary position of each node.
        parents: (W,) int64, index of the parent among the nodes of the same sequence, smaller than the node's own; -1
            for a node that sees the prefix alone.
        slots: S cache slots, all different.
        prefix_lens: S committed cache rows that every node of the sequence sees. Row i holds position i, except where a
            drafter keeps a part of a text: then for models without windows alone.
        offsets: S + 1, first token of each sequence; every sequence has at least one token.
        num_earlier: S numbers of nodes that earlier passes computed; None for none.
        logit_rows: (R,) int64, ascending, the tokens that need logits; None for none.
        is_causal: Whether the host knows that every sequence is a chain, node i the child of node i - 1, so that no
            mask is needed. May be False for chains.
        choice: How the tokens after the rows of logits are chosen; None takes the greatest logits.
        has_features: Whether tapped features are needed. A decoder may return them anyway.
        num_layers: Number of blocks to run, from the first, before the final norm and the LM head; None for all. Fewer
            blocks write only their own keys and values, and give no features.
        attention_rows: (A,) int64, ascending, the tokens whose attention weights are needed; None for none.
        tables: Kernel tables of a pass under capture. Lengths and slots of such a pass are bounds without meaning, and
            each token has one position. None for passes that the host knows.
    """

    tokens: Tensor
    positions: Tensor
    parents: Tensor
    slots: Sequence[int]
    prefix_lens: Sequence[int]
    offsets: Sequence[int]
    num_earlier: Sequence[int] | None = None
    logit_rows: Tensor | None
    is_causal: bool = False
    choice: TokenChoice | None = None
    has_features: bool = True
    num_layers: int | None = None
    attention_rows: Tensor | None = None
    tables: PassTables | None = None

    def __post_init__(self) -> None:
        num, earlier = len(self.slots), self.num_earlier
        if not num:
            raise ValueError("a pass has at least one sequence")
        if len(self.prefix_lens) != num:
            raise ValueError(f"{len(self.prefix_lens)} prefixes of {num} sequences")
        if len(self.offsets) != num + 1:
            raise ValueError(f"{len(self.offsets)} offsets of {num} sequences, expected one more")
        if earlier is not None and len(earlier) != num:
            raise ValueError(f"{len(earlier)} numbers of earlier nodes of {num} sequences")
        if self.num_layers is not None and self.num_layers < 1:
            raise ValueError(f"a pass through {self.num_layers} blocks. Expected one at least")

    @property
    def num_sequences(self) -> int:
        """Number of sequences S."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """Number of new tokens M."""
        return self.offsets[-1]

    @property
    def node_offsets(self) -> Sequence[int]:
        """S + 1, first node of each sequence."""
        if self.num_earlier is None:
            return self.offsets
        return [start + before for start, before in zip(self.offsets, [0, *accumulate(self.num_earlier)], strict=True)]

    @property
    def token_positions(self) -> Tensor:
        """(M,) int64, positions of the tokens, which are each sequence's last nodes."""
        if self.num_earlier is None:
            return self.positions
        ends = zip(pairwise(self.offsets), self.node_offsets[1:], strict=True)
        return torch.cat([self.positions[end - (stop - start) : end] for (start, stop), end in ends])

    @property
    def has_all_logits(self) -> bool:
        """Whether every token needs logits."""
        return self.logit_rows is not None and len(self.logit_rows) == self.num_tokens

    @classmethod
    def of_tree(
        cls,
        tree: TokenTree,
        *,
        slots: Sequence[int],
        prefix_lens: Sequence[int],
        last_position: int,
        has_features: bool = True,
    ) -> Pass:
        """Returns the verification of a batch of token trees, roots included, without padding, with all logits.

        Args:
            prefix_lens: See `Pass`; also the positions of the roots.
            last_position: Greatest position of the model. Nodes past it get this position and are never accepted.
        """
        device, width, facts = tree.tokens.device, tree.width, tree.host_facts
        counts = [1] * len(slots) if width == 1 else tree.node_counts()
        offsets = [0, *accumulate(counts)]
        if facts is not None and facts.nodes is not None:  # the tensors stay on the host
            ids, above, depths_of = facts.nodes
            deep = np.minimum(depths_of + np.array(prefix_lens, dtype=np.int64)[:, None], last_position)
            is_node = np.arange(width) < np.array(counts)[:, None]
            tokens, parents, positions = torch.from_numpy(np.stack([ids, above, deep])[:, is_node]).unbind()
            device = tokens.device
        else:
            if min(counts) == width:
                tokens, parents, depths = tree.tokens.flatten(), tree.parents.flatten(), tree.depths
                prefix = prefix_lens[0] if len(slots) == 1 else integers_on(prefix_lens, device).unsqueeze(1)
            else:
                starts = range(0, len(counts) * width, width)
                places = [place for start, n in zip(starts, counts, strict=True) for place in range(start, start + n)]
                prefixes = [length for length, n in zip(prefix_lens, counts, strict=True) for _ in range(n)]
                index, prefix = integers_on([places, prefixes], device).unbind()
                tokens, parents, depths = tree.tokens.take(index), tree.parents.take(index), tree.depths.take(index)
            positions = (depths + prefix).clamp_max_(last_position).flatten()
        logit_rows = torch.arange(offsets[-1], device=device)
        return cls(
            tokens=tokens,
            positions=positions,
            parents=parents,
            slots=slots,
            prefix_lens=prefix_lens,
            offsets=offsets,
            logit_rows=logit_rows,
            is_causal=width == 1,
            has_features=has_features,
        )

    @classmethod
    def of_chains(
        cls,
        tokens: Sequence[Sequence[int]],
        *,
        slots: Sequence[int],
        prefix_lens: Sequence[int],
        first_positions: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
        has_last_logits: bool = False,
    ) -> Pass:
        """Returns a pass over consecutive tokens of several sequences, such as prompt chunks.

        Args:
            tokens: Tokens of S sequences, at least one each, of any length.
            first_positions: Of each; None if row i of every slot holds position i.
            has_last_logits: Whether the last token of each sequence needs logits; the others never do.
        """
        ids: list[int] = []
        positions: list[int] = []
        parents: list[int] = []
        offsets, last = [0], []
        for own, first in zip(tokens, prefix_lens if first_positions is None else first_positions, strict=True):
            ids += own
            positions += range(first, first + len(own))
            parents += range(-1, len(own) - 1)
            offsets.append(len(ids))
            last.append(len(ids) - 1)
        device = torch.device(device)
        columns = integers_on([ids, positions, parents], device).unbind()
        return cls(
            tokens=columns[0], positions=columns[1], parents=columns[2], slots=slots, prefix_lens=prefix_lens,
            offsets=offsets, logit_rows=integers_on(last, device) if has_last_logits else None, is_causal=True,
        )  # fmt: skip

    def to(self, device: torch.device) -> Pass:
        """Returns this pass with its tensors on a device; from the host in one transfer that waits for nothing."""
        if self.tokens.device == device:
            return self
        names = ["tokens", "positions", "parents", "logit_rows", "attention_rows"]
        parts: dict[str, Tensor] = {name: part for name in names if (part := getattr(self, name)) is not None}
        moved = integers_on(torch.cat(list(parts.values())).numpy(), device).split(
            [len(each) for each in parts.values()]
        )
        changes: dict[str, Any] = dict(zip(parts, moved, strict=True))
        return replace(self, **changes)

    def with_all_logits(self) -> Pass:
        """Returns this pass with the logits of all tokens."""
        return replace(self, logit_rows=torch.arange(self.num_tokens, device=self.tokens.device))

    def with_chains(self, chains: Pass) -> Pass:
        """Returns this pass, followed by chains of other sequences without earlier nodes."""
        require(chains.num_earlier is None, "nodes computed earlier belong to the first of both")
        require(self.num_earlier is None, "nodes computed earlier stand before the new ones of their sequence")
        require(self.num_layers is None and chains.num_layers is None, "prompts go through all blocks")
        require(self.choice is None or chains.logit_rows is None, "tokens are chosen after all rows of logits")
        own, count = self.to(chains.tokens.device), self.num_tokens
        return Pass(
            tokens=torch.cat([own.tokens, chains.tokens]),
            positions=torch.cat([own.positions, chains.positions]),
            parents=torch.cat([own.parents, chains.parents]),
            slots=[*self.slots, *chains.slots],
            prefix_lens=[*self.prefix_lens, *chains.prefix_lens],
            offsets=[*self.offsets, *(count + offset for offset in chains.offsets[1:])],
            logit_rows=_joined(own.logit_rows, chains.logit_rows, count),
            is_causal=self.is_causal and chains.is_causal,
            choice=self.choice,
            has_features=self.has_features or chains.has_features,
            attention_rows=_joined(own.attention_rows, chains.attention_rows, count),
        )


def _joined(rows: Tensor | None, more: Tensor | None, num_tokens: int) -> Tensor | None:
    """Returns rows of a pass of `num_tokens` and of the chains behind it."""
    parts = [*([] if rows is None else [rows]), *([] if more is None else [more + num_tokens])]
    return torch.cat(parts) if parts else None
