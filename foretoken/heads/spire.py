"""SPiRe's draft model: a few of the target's blocks, attention over first and last tokens, and a feedback memory.

With feedback, every block attends to one memory vector for each earlier token instead of keys and values of its own:

    m_i = sum over l of softmax(w)_l h_i^l

h_i^0 is the embedding of token i, and h_i^l its state after block l. All blocks share one projection of m_i to a key,
and one to a value. So a token has one KV row, not one for each block.

The memories of committed tokens come from the target's own states, after the blocks that the draft keeps. Those of
drafted tokens come from the draft. This differs from a Feedback Transformer, which computes all memories itself, one
token after another. Here committed tokens need no pass of the draft, and training runs over all positions at once.
Without feedback the network is a small transformer over its own states, and reads no feature of the target.

A token at position p sees the tokens at positions below `sinks`, and those less than `window` positions back. A token
has no memory before its last block, so with feedback it does not see itself.

Source: Neelam et al. 2025 (SPiRe, arXiv 2504.06419). We had its abstract and summaries alone: layers, window and
training are our reconstruction. Feedback memory: Fan et al. 2020 (arXiv 2002.09402), equation 3. Sinks: Xiao et al.
2023 (arXiv 2309.17453).

Letters: B sequences, S positions, Q followed positions, M tokens, T keys, E hidden size, L kept blocks, H, Hk and Dh as
in `decoder_layer`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from typing_extensions import override

from foretoken.core.errors import ConfigError
from foretoken.decoder.base import UnsuitableError
from foretoken.decoder.blocks import Block, FeedForward
from foretoken.heads.base import IN_PLACE, AutoregressiveConfig, UnrolledHead, WindowPositions
from foretoken.heads.decoder_layer import DecoderLayer, Heads, KeyValue, Placement, causal_attention, unrolled_attention

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.models.parts import TargetParts

    # Takes the index of a block, (B, M, H, Dh) queries and, without feedback, the tokens' own keys and values; returns
    # (B, M, H, Dh).
    Attention = Callable[[int, Tensor, KeyValue | None], Tensor]


def evenly_spaced(target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Returns `num_layers` of the target's blocks, counted from 0: the first, the last, and even steps between."""
    last = target_layers - 1
    return tuple(round(index * last / max(num_layers - 1, 1)) for index in range(num_layers))


class SpireConfig(AutoregressiveConfig):
    """Sizes of the draft model; widths and heads are the target's."""

    method: ClassVar[str] = "spire"

    target_layers: int = Field(ge=1)
    num_layers: int = Field(default=2, ge=1)  # L
    kept_layers: tuple[int, ...] = Field(  # the target's blocks that the draft starts from and reads, ascending, from 0
        default_factory=lambda known: evenly_spaced(known["target_layers"], known["num_layers"])
    )
    sinks: int = Field(default=4, ge=0)  # first tokens that every token sees
    window: int = Field(default=256, ge=2)  # tokens that a token sees, itself included
    is_pruned: bool = True  # whether blocks start as copies of the target's; else with fresh weights
    has_feedback: bool = True  # whether blocks attend to memories

    @model_validator(mode="after")
    def _check_layers(self) -> Self:
        kept, last = self.kept_layers, self.target_layers - 1
        if self.num_layers > self.target_layers:
            raise ValueError(f"num_layers is {self.num_layers}, and the target has {self.target_layers} blocks")
        if len(kept) != self.num_layers or list(kept) != sorted({*kept}) or not 0 <= kept[0] <= kept[-1] <= last:
            raise ValueError(
                f"kept_layers is {list(kept)}. Expected {self.num_layers} ascending numbers from 0 to {last}"
            )
        return self

    @property
    def taps(self) -> tuple[Tap, ...]:
        """The states after the kept blocks; without feedback `final`, which is not read."""
        return tuple(layer + 1 for layer in self.kept_layers) if self.has_feedback else ("final",)

    def in_sight(self, tokens: Tensor, keys: Tensor) -> Tensor:
        """Decides which keys tokens see, of those before them; int64 positions that broadcast, to bool."""
        return (keys < self.sinks) | (tokens - keys < self.window)


# Of the mix before training, for the embedding: keys of the first block begin near the target's. A choice: after 40
# steps on a target of 11 M weights the loss is 3.1 a token with 2 or 5, and 4.1 with 0. With 2 the other states have a
# tenth each.
_EMBEDDING_LEAD = 2.0


class FeedbackMemory(nn.Module):
    """The KV rows that all blocks read."""

    def __init__(self, config: SpireConfig, **placement: Unpack[Placement]) -> None:
        super().__init__()
        layer, width = config.layer, config.hidden_size
        values = layer.num_key_value_heads * layer.head_dim
        self.mix = nn.Parameter(
            torch.empty(config.num_layers + 1, **placement)
        )  # w, of the embedding and of each block
        self.norm = nn.Parameter(torch.empty(width, **placement))  # before the projections
        self.k_proj = nn.Linear(width, values, bias=layer.attention_bias, **placement)
        self.v_proj = nn.Linear(width, values, bias=layer.attention_bias, **placement)

    def initialize(self) -> None:
        """Draws projections as `DecoderLayer.initialize`; memories start as the mean of the states."""
        self.mix.zero_()
        self.norm.fill_(1.0)
        for part in (self.k_proj, self.v_proj):
            part.weight.normal_(std=0.02)
            if part.bias is not None:
                part.bias.zero_()

    def rows(self, states: Sequence[Tensor], positions: Tensor, block: DecoderLayer) -> KeyValue:
        """Returns keys and values for a block's queries, from L + 1 states (B, M, E)."""
        mixed = torch.stack([w * state for w, state in zip(self.mix.softmax(0), states, strict=True)]).sum(0)
        return block.key_value(block.normed(mixed, self.norm), positions, self.k_proj, self.v_proj)


class SpireHead(UnrolledHead):
    """The network: L blocks, and with feedback `memory` in place of their keys and values."""

    config: SpireConfig

    def __init__(self, config: SpireConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(
            DecoderLayer(config.layer, config.hidden_size, has_keys=not config.has_feedback, **placement)
            for _ in range(config.num_layers)
        )
        self.memory = FeedbackMemory(config, **placement) if config.has_feedback else None

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Copies the kept blocks, or draws weights.

        Copies of blocks come with keys, values and norm of the first one for the memory, which starts near the
        embedding. With drawn weights the memory starts as the mean of the states. Raises `ConfigError` if the target
        has no final norm, or its blocks are not those of a Llama.
        """
        if parts.final_norm is None:
            raise ConfigError("the target's final norm is not found. Expected a target of a known architecture.")
        with torch.no_grad():
            for layer in self._blocks():
                layer.initialize()
            if self.memory is not None:
                self.memory.initialize()
            if self.config.is_pruned:
                self._copy_blocks(parts)

    def _copy_blocks(self, parts: TargetParts) -> None:
        advice = "Expected blocks as Llama's. Pass --set is_pruned=false to begin with fresh weights."
        if parts.blocks is None:
            raise ConfigError(f"the target's blocks are not at hand. {advice}")
        try:
            layers = parts.blocks()
        except UnsuitableError as err:
            raise ConfigError(f"the target's blocks cannot be copied: {err} {advice}") from err
        blocks = layers.attention
        if len(blocks) < len(layers.blocks):
            raise ConfigError(f"the target's blocks cannot be copied: some are recurrent. {advice}")
        for index, layer in zip(self.config.kept_layers, self._blocks(), strict=True):
            weights = _weights(blocks[index])
            own, shared = layer.state_dict(keep_vars=True), dict[str, Tensor]()
            if self.memory is not None:
                shared = {key: part for key, part in self.memory.named_parameters() if "_proj" in key}
            shapes = {key: part.shape for key, part in (own | shared).items()}
            if not _is_llama(blocks[index]) or shapes != {key: part.shape for key, part in weights.items()}:
                raise ConfigError(f"block {index} of the target is no plain Llama block. {advice}")
            for key, part in (own if index > self.config.kept_layers[0] else own | shared).items():
                part.copy_(weights[key])
            if self.memory is not None and index == self.config.kept_layers[0]:
                self.memory.norm.copy_(weights["input_norm"])
                self.memory.mix[0] = _EMBEDDING_LEAD

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of states."""
        return next(self._blocks()).post_attention_norm.dtype

    def _blocks(self) -> Iterator[DecoderLayer]:
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer), "the constructor makes no other"
            yield layer

    def states(self, tokens: Tensor, positions: Tensor, attention: Attention, parts: TargetParts) -> list[Tensor]:
        """Returns L + 1 states (B, M, E) of (B, M) int64 tokens: their embeddings, and the output of each block.

        `positions`: (B, M) or (1, M) int64.
        """
        x = parts.embed(tokens).to(self.dtype)
        states = [x]
        for index, layer in enumerate(self._blocks()):
            if self.config.has_feedback:
                query, own = layer.query(x, positions), None
            else:
                query, *both = layer.projected(x, positions)
                own = KeyValue(*both)
            x = layer.finished(x, attention(index, query, own))
            states.append(x)
        return states

    def output(self, states: list[Tensor], parts: TargetParts) -> Tensor:
        """Returns (B, M, E), the input of the target's LM head."""
        assert parts.final_norm is not None, "`initialize` looks"
        return parts.final_norm(states[-1])

    def memory_rows(self, states: Sequence[Tensor], positions: Tensor) -> KeyValue:
        """Returns the keys and values of the memories of L + 1 states (B, M, E)."""
        assert self.memory is not None, "the network has feedback"
        return self.memory.rows(states, positions, next(self._blocks()))

    def committed_rows(self, features: Tensor, tokens: Tensor, positions: Tensor, parts: TargetParts) -> KeyValue:
        """Returns the keys and values of tokens (B, M) from the target's features (B, M, L E) at their positions."""
        kept = features.to(self.dtype).chunk(self.config.num_layers, dim=-1)
        return self.memory_rows([parts.embed(tokens).to(self.dtype), *kept], positions)

    @override
    def unrolled(
        self,
        features: Tensor,
        tokens: Tensor,
        parts: TargetParts,
        positions: WindowPositions = IN_PLACE,
        *,
        starts: slice = slice(None),
        is_detached: bool = False,
    ) -> Iterator[Tensor]:
        if not self.config.has_feedback:
            yield from self._shifted(tokens, parts, positions, starts)
            return
        places = begins = torch.arange(tokens.shape[1], device=tokens.device)
        first = self.committed_rows(features, tokens, positions.of(places), parts)
        later, drafted = list[KeyValue](), list[Tensor]()
        for index in range(self.config.num_steps):
            at = begins + index + 1  # of the token, one after the last feature
            following = tokens.roll(-(index + 1), dims=1)
            before = torch.cat([places.expand(len(at), -1), *drafted], dim=1)
            seen = self.config.in_sight(at.unsqueeze(1), before)
            seen[:, : len(places)] &= places <= begins.unsqueeze(1)
            states = self.states(
                following[:, starts] if index else following,
                positions.of(at),
                _unrolled_over(begins, first, later, seen),
                parts,
            )
            yield self.output(states, parts)
            if not index:
                begins, at, states = begins[starts], at[starts], [state[:, starts] for state in states]
            row = self.memory_rows(states, positions.of(at))
            later.append(KeyValue(row.key.detach(), row.value.detach()) if is_detached else row)
            drafted.append(at.unsqueeze(1))

    def _shifted(
        self, tokens: Tensor, parts: TargetParts, positions: WindowPositions, starts: slice
    ) -> Iterator[Tensor]:
        """Yields the output at the token of each step: it does not depend on where a draft begins."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        seen = self.config.in_sight(places.unsqueeze(1), places) & (places <= places.unsqueeze(1))

        def attention(index: int, query: Tensor, own: KeyValue | None) -> Tensor:
            del index
            assert own is not None, "the network has no feedback"
            return causal_attention(Heads(query, *own), seen)

        output = self.output(self.states(tokens, positions.of(places), attention, parts), parts)
        for index in range(self.config.num_steps):
            following = output.roll(-(index + 1), dims=1)
            yield following[:, starts] if index else following


def _unrolled_over(begins: Tensor, first: KeyValue, later: list[KeyValue], seen: Tensor) -> Attention:
    def attention(index: int, query: Tensor, own: KeyValue | None) -> Tensor:
        del index, own  # all blocks read the memories
        if not later:
            return causal_attention(Heads(query, *first), seen)
        return unrolled_attention(query, begins, first, later, seen)

    return attention


def _is_llama(block: Block) -> bool:
    spec = block.spec
    return (
        spec.activation == "silu"
        and spec.softcap is None
        and spec.attention_scale == spec.head_dim**-0.5
        and isinstance(block.mlp, FeedForward)
        and block.query_norm is block.attention_post_norm is block.mlp_post_norm is None
        and all(norm is not None and norm.kind == "rms" for norm in (block.attention_norm, block.mlp_norm))
        and block.rotary is not None
        and 2 * block.rotary.cos.shape[1] == spec.head_dim
    )


def _weights(block: Block) -> dict[str, Tensor]:
    """Returns the tensors of a block by the names of `DecoderLayer`, as many as it has."""
    parts = {"q_proj": block.query, "k_proj": block.key, "v_proj": block.value, "o_proj": block.output}
    if isinstance(block.mlp, FeedForward):
        parts |= {"up_proj": block.mlp.up, "down_proj": block.mlp.down}
        if block.mlp.gate is not None:
            parts["gate_proj"] = block.mlp.gate
    tensors = {f"{name}.weight": part.dense().detach() for name, part in parts.items()}
    tensors |= {f"{name}.bias": part.bias.detach() for name, part in parts.items() if part.bias is not None}
    norms = {"input_norm": block.attention_norm, "post_attention_norm": block.mlp_norm}
    return tensors | {name: norm.weight for name, norm in norms.items() if norm is not None}


HEAD = SpireHead
CONFIG = SpireConfig
