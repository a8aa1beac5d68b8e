"""The MLP speculator: a recurrence over drafted tokens with embeddings and LM heads of its own.

s_{i+1} = gelu(norm_i(P_i s_i + alpha z_i)), z_i the embedding of x_{t+1+i}; logits_i = head_i s_{i+1}.

Source: Wertheimer et al. 2024 (arXiv 2404.19124), section 2; scaling and norm as in the released code.

Letters as in `base`; D inner width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Self, Unpack

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.functional import gelu
from typing_extensions import override

from foretoken.decoder.blocks import LmHead, ScaledEmbedding
from foretoken.heads.base import IN_PLACE, StepHead, StepHeadConfig, WindowPositions
from foretoken.heads.steps import BiasedNorm, HeadStep, HeadSteps

if TYPE_CHECKING:
    from foretoken.heads.decoder_layer import Placement
    from foretoken.models.parts import TargetParts


class MlpSpeculatorConfig(StepHeadConfig):
    """Sizes of an MLP speculator."""

    method: ClassVar[str] = "mlp_speculator"

    num_heads: int = Field(default=3, ge=1, le=64)  # K stages; alpha depends on K, not on the stages that a draft uses
    inner_dim: int = Field(default=256, ge=2)
    tie_weights: bool = True  # whether stages share all but the first projection
    scale_input: bool = True  # whether the feature is first scaled to a root mean square of 1 / sqrt(2)
    top_k: tuple[int, ...] | None = None  # candidates at each depth of the published tree, if there is one
    num_candidates: int = Field(default=5, ge=1)  # leaves of the published tree
    # Of the scaled feature and of the norms; always 1e-6 in the released code.
    rms_norm_eps: float = Field(default=1e-6, gt=0)

    @model_validator(mode="after")
    def _check_sizes(self) -> Self:
        if self.top_k is not None and len(self.top_k) != self.num_heads:
            raise ValueError(f"top_k has {len(self.top_k)} entries. Expected one a head, {self.num_heads}")
        return self

    @property
    def state_weight(self) -> float:
        """Weight of the old state against the new token; half of the state is left after K stages."""
        return math.pow(0.5, 0.5 / self.num_heads)

    @property
    def alpha(self) -> float:
        """Factor of a token's embedding, relative to the projected state."""
        return math.sqrt((1 - self.state_weight**2) * self.inner_dim / 2) / self.state_weight


class MlpSpeculatorHead(StepHead):
    """The network: K embeddings (V, D), projections (D, E) and then (D, D), LM heads (V, D) and norms.

    Tied embeddings, LM heads and norms are one module each, as are tied projections after the first.
    """

    config: MlpSpeculatorConfig

    def __init__(self, config: MlpSpeculatorConfig, **placement: Unpack[Placement]) -> None:
        super().__init__(config)
        stages, width, vocab = config.num_heads, config.inner_dim, config.vocab_size
        own = 1 if config.tie_weights else stages
        self.embeddings = nn.ModuleList(nn.Embedding(vocab, width, **placement) for _ in range(own))
        inputs = [config.hidden_size, *[width] * (min(stages, 2) - 1 if config.tie_weights else stages - 1)]
        self.projections = nn.ModuleList(nn.Linear(size, width, bias=False, **placement) for size in inputs)
        self.lm_heads = nn.ModuleList(nn.Linear(width, vocab, bias=False, **placement) for _ in range(own))
        self.norms = nn.ModuleList(RmsNormWithBias(width, config.rms_norm_eps, **placement) for _ in range(own))

    @override
    def initialize(self, parts: TargetParts) -> None:
        """Draws weights with standard deviation 1 / sqrt(D); norms start neutral."""
        deviation = 1 / math.sqrt(self.config.inner_dim)
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear):
                nn.init.normal_(module.weight, std=deviation)
            elif isinstance(module, RmsNormWithBias):
                nn.init.ones_(module.weight)
                nn.init.zeros_(module.bias)

    @override
    def encode(self, features: Tensor, positions: WindowPositions = IN_PLACE) -> Tensor:
        del positions
        if not self.config.scale_input:
            return features
        return rms_scaled(features, self.config.rms_norm_eps) / math.sqrt(2)

    @override
    def step(self, index: int, state: Tensor, tokens: Tensor, parts: TargetParts) -> tuple[Tensor, Tensor]:
        """Computes the state after the token; `logits` also reads the state."""
        projected = _stage_module(self.projections, index)(state)
        token = _stage_module(self.embeddings, index)(tokens)
        state = gelu(_stage_module(self.norms, index)(projected + self.config.alpha * token))
        return state, state

    @property
    @override
    def has_target_lm_head(self) -> bool:
        return False

    @override
    def draft_logits(self, index: int, hidden: Tensor, parts: TargetParts) -> Tensor:
        logits: Tensor = _stage_module(self.lm_heads, index)(hidden)
        return logits

    @override
    def native_steps(self, parts: TargetParts) -> HeadSteps:
        config = self.config

        def step(index: int) -> HeadStep:
            norm, embedding = _stage_module(self.norms, index), _stage_module(self.embeddings, index)
            assert isinstance(norm, RmsNormWithBias), "the constructor made it"
            return HeadStep(
                first=_stage_module(self.projections, index),
                norm=BiasedNorm(norm.weight, norm.bias, norm.epsilon),
                embedding=ScaledEmbedding(embedding.get_parameter("weight"), config.alpha),
                head=LmHead(_stage_module(self.lm_heads, index)),
            )

        return HeadSteps(
            kind="state",
            hidden_size=config.hidden_size,
            width=config.inner_dim,
            vocab_size=config.vocab_size,
            steps=[step(index) for index in range(config.num_heads)],
            feature_rms=1 / math.sqrt(2) if config.scale_input else 0.0,
            feature_epsilon=config.rms_norm_eps,
        )


class RmsNormWithBias(nn.Module):
    """Computes x / rms(x) * weight + bias; no mean is subtracted."""

    def __init__(self, width: int, epsilon: float, **placement: Unpack[Placement]) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(width, **placement))
        self.bias = nn.Parameter(torch.empty(width, **placement))

    def forward(self, x: Tensor) -> Tensor:
        """Turns (..., D) into (..., D)."""
        return rms_scaled(x, self.epsilon) * self.weight + self.bias


def rms_scaled(x: Tensor, epsilon: float) -> Tensor:
    """Divides by the root mean square over the last dimension."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)


def _stage_module(modules: nn.ModuleList, index: int) -> nn.Module:
    """Returns a stage's module; with tied weights the last one serves all further stages."""
    return modules[min(index, len(modules) - 1)]


HEAD = MlpSpeculatorHead
CONFIG = MlpSpeculatorConfig
