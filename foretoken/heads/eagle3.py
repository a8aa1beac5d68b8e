"""EAGLE-3's head: three fused features of the target, a decoder block that also reads the embedding, an LM head.

The block's attention reads [norm(embedding); norm(state)]. Its output replaces the fused features in the next step.
After a norm, the head's own LM head reads the output; this LM head may cover a part of the vocabulary.

Source: Li et al. 2025 (arXiv 2503.01840), with the variants of later releases: `norm_before_residual` (speculators),
`norm_before_fc` (gpt-oss heads), `fc_norms` and `feeds_normed` (EAGLE-3.1, arXiv 2605.09992).
Letters as in `base`; W width of the block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import embedding, rms_norm
from typing_extensions import override

from foretoken.decoder.blocks import LmHead, ScaledEmbedding
from foretoken.heads.base import AutoregressiveConfig, AutoregressiveHead, BlockInputs, BlockOutputs
from foretoken.heads.decoder_layer import DecoderLayer, Placement
from foretoken.heads.steps import AutoregressiveSteps

if TYPE_CHECKING:
    from foretoken.core.passes import Tap
    from foretoken.models.parts import TargetParts


class Eagle3Config(AutoregressiveConfig):
    """Sizes of an EAGLE-3 head."""

    method: ClassVar[str] = "eagle3"

    # The taps, see `foretoken.core.passes`; the paper takes 2, L // 2 and L - 3 of L blocks.
    boundaries: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    draft_hidden_size: int | None = Field(default=None, ge=1)  # W; None for E
    # Vd, if drafts cover a part of the vocabulary; None for all of it.
    draft_vocab_size: int | None = Field(default=None, ge=1)
    own_embedding: bool = False  # whether the head embeds tokens itself; needed if W differs from E
    norm_before_residual: bool = False  # whether the block's residual is the normed state
    norm_before_fc: bool = False  # whether one norm over all features comes before the fusion
    fc_norms: bool = False  # whether each feature has a norm of its own before the fusion
    # Whether the next step reads the output after the norm, like the LM head, instead of before it.
    feeds_normed: bool = False

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if (self.draft_vocab_size or 0) > self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}. Expected at most {self.vocab_size}")
        if self.width != self.hidden_size and not self.own_embedding:
            raise ValueError(
                f"a head {self.width} wide cannot read the target's embeddings, which are {self.hidden_size} wide. "
                "Expected own_embedding"
            )
        if self.norm_before_fc and self.fc_norms:
            raise ValueError("norm_before_fc and fc_norms exclude each other. Expected one of them")
        return self

    @property
    def taps(self) -> tuple[Tap, ...]:
        """`boundaries`."""
        return self.boundaries

    @property
    def width(self) -> int:
        """W."""
        return self.draft_hidden_size or self.hidden_size


class Eagle3Head(AutoregressiveHead):
    """The network; without an embedding of its own the head reads the target's."""

    config: Eagle3Config

    def __init__(self, config: Eagle3Config, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        width, taps, size = config.width, len(config.boundaries), config.hidden_size

        def empty(*sizes: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*sizes, **placement))

        self.fc = nn.Linear(taps * size, width, bias=False, **placement)  # fuses the features
        self.feature_norm = empty(taps * size) if config.norm_before_fc else None  # of all features together
        self.feature_norms = empty(taps, size) if config.fc_norms else None  # of each feature
        self.state_norm = empty(width) if config.norm_before_residual else None  # the normed state is the residual
        self.layer = DecoderLayer(
            config.layer, width, has_input_norm=not config.norm_before_residual, has_side=True, **placement,
        )  # fmt: skip
        self.norm = empty(width)  # before the LM head
        rows = config.draft_vocab_size or config.vocab_size
        self.lm_head = nn.Linear(width, rows, bias=False, **placement)
        self.embedding = empty(config.vocab_size, width) if config.own_embedding else None
        if config.draft_vocab_size is not None:
            self.token_map = torch.arange(rows, device=placement.get("device"))

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Passes the last feature on to a copy of the target's LM head; keeps `token_map`."""
        config = self.config
        with torch.no_grad():
            self.fc.weight.normal_(std=0.02)
            same = min(config.width, config.hidden_size)
            self.fc.weight[:same, -config.hidden_size :][:, :same].add_(torch.eye(same, device=self.fc.weight.device))
            for weight in (self.feature_norm, self.feature_norms, self.state_norm, self.norm):
                if weight is not None:
                    weight.fill_(1.0)
            if config.width == config.hidden_size:
                rows = parts.lm_head_weight
                self.lm_head.weight.copy_(rows if self.token_map is None else rows[self.token_map])
            else:
                self.lm_head.weight.normal_(std=0.02)
            if self.embedding is not None and config.width == config.hidden_size:
                self.embedding.copy_(parts.embed(torch.arange(config.vocab_size, device=self.embedding.device)))
            elif self.embedding is not None:
                self.embedding.normal_(std=0.02)
        self.layer.initialize()

    @override
    def initial_state(self, features: Tensor) -> Tensor:
        config = self.config
        if self.feature_norm is not None:
            features = self.layer.normed(features, self.feature_norm)
        if self.feature_norms is not None:
            each = features.unflatten(-1, self.feature_norms.shape)
            normed = rms_norm(each, each.shape[-1:], None, config.layer.rms_norm_eps)
            features = (normed * self.feature_norms).flatten(-2)
        result: Tensor = self.fc(features)
        return result

    @override
    def embed(self, tokens: Tensor, parts: TargetParts) -> Tensor:
        return parts.embed(tokens) if self.embedding is None else embedding(tokens, self.embedding)

    @override
    def paired(self, state: Tensor, embedded: Tensor) -> BlockInputs:
        return BlockInputs(state if self.state_norm is None else self.layer.normed(state, self.state_norm), embedded)

    @override
    def outputs(self, x: Tensor) -> BlockOutputs:
        hidden = self.layer.normed(x, self.norm)
        return BlockOutputs(hidden if self.config.feeds_normed else x, hidden)

    @property
    @override
    def has_target_lm_head(self) -> bool:
        return False

    @override
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        logits: Tensor = self.lm_head(hidden)
        return logits

    @override
    def native_steps(self, parts: TargetParts) -> AutoregressiveSteps | None:
        embedding = None if parts.native is None else parts.native.embedding
        if self.embedding is not None:
            embedding = ScaledEmbedding(self.embedding)
        if embedding is None:
            return None
        return AutoregressiveSteps(
            width=self.config.width,
            vocab_size=self.config.vocab_size,
            embedding=embedding,
            head=LmHead(self.lm_head),
            token_map=self.token_map,
            norm=self.layer.as_norm(self.norm),
            state_norm=self.layer.as_norm(self.state_norm),
            feeds_normed=self.config.feeds_normed,
        )


HEAD = Eagle3Head
CONFIG = Eagle3Config
