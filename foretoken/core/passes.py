"""A pass: the new tokens of several sequences, packed, so that nothing is computed for padding.

Behind the committed prefix of each sequence stands a tree of nodes. A decode step is a root, a verification is a token
tree, a chunk of a prompt is a chain; one pass may mix them. Nodes that earlier passes computed over the same prefix, as
by a draft model that expands its tree level by level, are listed first and cost nothing: their keys and values lie in
the KV cache. Node i of a sequence has cache row `prefix_len + i`.

Letters: S sequences, M new tokens, W nodes (M and those computed earlier), R rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from foretoken.core.backend import integers_on
from foretoken.core.checks import require

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.core.token_tree import TokenTree

Tap = int | Literal["final"]
"""0 is the input of the first block (embeddings as the model scales them), i the output of block i before any later
norm; `final` is the output of the norm after the last block, what the LM head reads."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenChoice:
    """How the token after each row of logits is chosen, for decoders that do that while they have the logits at hand.

    Attributes:
        inverse_temperature: (R,) float32; 0 takes the greatest logit, others a draw from softmax(logits / temperature)
            by Gumbel-max with `KeyedNoise` of `Purpose.TARGET` at the position after the row's token.
        seeds: (R,) int64, keys of that noise; of no account where the greatest logit is taken.
        impossible_ids: (U,) int64, tokens whose logits become -inf first; None for none.
    """

    inverse_temperature: Tensor
    seeds: Tensor
    impossible_ids: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """What a decoder runs. A token sees the prefix of its sequence, its ancestors among the nodes, and itself.

    Attributes:
        tokens: (M,) int64, one sequence after another. Not read where inputs take the place of their embeddings.
        positions: (W,) int64, rotary position of each node.
        parents: (W,) int64, index of the node before it among the nodes of its own sequence, below its own; -1 for a
            node that sees the prefix alone.
        slots: S cache slots, all different.
        prefix_lens: S committed cache rows that every node of the sequence sees; row i holds position i.
        offsets: S + 1, where the tokens of each sequence begin; every sequence has at least one.
        num_earlier: S numbers of nodes that earlier passes computed; None for none.
        logit_rows: (R,) int64, ascending, the tokens whose logits are wanted; None for none.
        is_causal: Whether every sequence is a chain, node i the child of node i - 1: known on the host, so that no mask
            is needed. May be False for chains.
        choice: How the tokens after the rows of logits are chosen; None takes the greatest logits.
        has_features: Whether tapped features are wanted. A decoder may give them all the same.
        num_layers: How many blocks run, the first ones, before the final norm and the LM head; None for all of them.
            Only these blocks' keys and values are written then, and there are no features.
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

    def __post_init__(self) -> None:
        """Checks what decoders rely on and would not notice."""
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
        """S."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """M."""
        return self.offsets[-1]

    @property
    def node_offsets(self) -> Sequence[int]:
        """S + 1, where the nodes of each sequence begin."""
        if self.num_earlier is None:
            return self.offsets
        return [start + before for start, before in zip(self.offsets, [0, *accumulate(self.num_earlier)], strict=True)]

    @property
    def token_positions(self) -> Tensor:
        """(M,) int64, positions of the tokens: of each sequence's last nodes."""
        if self.num_earlier is None:
            return self.positions
        ends = zip(pairwise(self.offsets), self.node_offsets[1:], strict=True)
        return torch.cat([self.positions[end - (stop - start) : end] for (start, stop), end in ends])

    @property
    def has_all_logits(self) -> bool:
        """Whether the logits of every token are wanted."""
        return self.logit_rows is not None and len(self.logit_rows) == self.num_tokens

    @classmethod
    def of_tree(cls, tree: TokenTree, *, slots: Sequence[int], prefix_lens: Sequence[int], last_position: int) -> Pass:
        """The verification of a batch of token trees, roots included, without their padding; with all logits.

        Args:
            tree: Of S sequences.
            slots: See `Pass`.
            prefix_lens: Likewise: the root goes to this position.
            last_position: Greatest position the model takes. Nodes past it are never accepted; they get it.
        """
        device, width = tree.tokens.device, tree.width
        if width == 1:  # every tree is its root
            offsets = list(range(len(slots) + 1))
            tokens, parents = tree.tokens[:, 0], tree.parents[:, 0]
            each = [[min(prefix, last_position) for prefix in prefix_lens], offsets[:-1]]
            positions, logit_rows = integers_on(each, device).unbind()
        else:
            counts = tree.node_counts()
            offsets = [0, *accumulate(counts)]
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
        )

    @classmethod
    def of_chains(
        cls,
        tokens: Sequence[Sequence[int]],
        *,
        slots: Sequence[int],
        prefix_lens: Sequence[int],
        device: torch.device | str = "cpu",
        has_last_logits: bool = False,
    ) -> Pass:
        """Consecutive tokens of several sequences: chunks of prompts, or what a draft model has not seen yet.

        Args:
            tokens: Of S sequences, at least one each, of any length.
            slots: See `Pass`.
            prefix_lens: Likewise.
            device: Where the tensors go.
            has_last_logits: Whether the logits after the last token of each are wanted; else none are.
        """
        lengths = [len(ids) for ids in tokens]
        offsets = [0, *accumulate(lengths)]
        each = list(zip(prefix_lens, lengths, strict=True))
        packed = [
            [token for ids in tokens for token in ids],
            [position for prefix, length in each for position in range(prefix, prefix + length)],
            [parent for length in lengths for parent in range(-1, length - 1)],
        ]
        device = torch.device(device)
        ids, positions, parents = integers_on(packed, device).unbind()
        return cls(
            tokens=ids, positions=positions, parents=parents, slots=slots, prefix_lens=prefix_lens, offsets=offsets,
            logit_rows=integers_on([end - 1 for end in offsets[1:]], device) if has_last_logits else None,
            is_causal=True,
        )  # fmt: skip

    def with_all_logits(self) -> Pass:
        """This pass with the logits of all its tokens."""
        return replace(self, logit_rows=torch.arange(self.num_tokens, device=self.tokens.device))

    def with_chains(self, chains: Pass) -> Pass:
        """This pass followed by another one of other sequences, which has no earlier nodes."""
        require(chains.num_earlier is None, "nodes computed earlier belong to the first of both")
        require(self.num_earlier is None, "nodes computed earlier stand before the new ones of their sequence")
        require(self.num_layers is None and chains.num_layers is None, "prompts go through all blocks")
        require(self.choice is None or chains.logit_rows is None, "tokens are chosen after all rows of logits")
        logit_rows = self.logit_rows
        if chains.logit_rows is not None:
            rows = chains.logit_rows + self.num_tokens
            logit_rows = rows if logit_rows is None else torch.cat([logit_rows, rows])
        return Pass(
            tokens=torch.cat([self.tokens, chains.tokens]),
            positions=torch.cat([self.positions, chains.positions]),
            parents=torch.cat([self.parents, chains.parents]),
            slots=[*self.slots, *chains.slots],
            prefix_lens=[*self.prefix_lens, *chains.prefix_lens],
            offsets=[*self.offsets, *(self.num_tokens + offset for offset in chains.offsets[1:])],
            logit_rows=logit_rows,
            is_causal=self.is_causal and chains.is_causal,
            choice=self.choice,
            has_features=self.has_features,
        )
