"""Describes the networks of heads for the native kernels, which draft whole trees with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foretoken.decoder.blocks import LmHead, Norm, ScaledEmbedding


class BiasedNorm(NamedTuple):
    """Computes x / rms(x) * weight + bias; both vectors (W,)."""

    weight: Tensor
    bias: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadStep:
    """One step, see `HeadStep` in `drafters/native/kernels/heads.h`. Layers come from `fast_linear`.

    Attributes:
        first: (..., (i + 2) E) to (..., 2 W) of "path"; (..., E), later (..., W), to (..., W) of "state".
        norm: Of "state".
        embedding: Of "path" and "state".
        blocks: (..., W) to (..., W).
    """

    first: nn.Module | None = None
    norm: BiasedNorm | None = None
    embedding: ScaledEmbedding | None = None
    blocks: Sequence[nn.Module] = ()
    head: LmHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSteps:
    """A head with K steps over sizes E, W and V.

    Attributes:
        kind: What a step reads: the feature alone ("feature", as Medusa); also the tokens drafted before ("path", as
            Hydra); or the state of the parent node and the node's token ("state", as the MLP speculator).
        token_map: (Vd,) int64, the token of each row of the LM heads, or None if rows are tokens.
        feature_rms: Root mean square that features of "state" are scaled to, 0 for no scaling.
        feature_epsilon: Added to their mean square.
    """

    kind: Literal["feature", "path", "state"]
    hidden_size: int
    width: int
    vocab_size: int
    steps: Sequence[HeadStep]
    token_map: Tensor | None = None
    feature_rms: float = 0.0
    feature_epsilon: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AutoregressiveSteps:
    """An autoregressive head without its block. Layers come from `fast_linear`.

    Attributes:
        embedding: (V, W).
        head: (..., W) to (..., Vd) logits.
        token_map: (Vd,) int64, the token of each row of the LM head, or None if rows are tokens.
        fuse: (..., 2 W) to (..., W), or None if the embedding is the block's second input.
        norm: (W,), an RMS norm before the LM head, or None.
        state_norm: (W,), an RMS norm of the state before the block or `fuse`, or None.
        embedding_norm: (W,), an RMS norm of the embedding there, or None.
        feeds_normed: Whether the next state is the input of the LM head.
    """

    width: int
    vocab_size: int
    embedding: ScaledEmbedding
    head: LmHead
    token_map: Tensor | None = None
    fuse: nn.Module | None = None
    norm: Norm | None = None
    state_norm: Norm | None = None
    embedding_norm: Norm | None = None
    feeds_normed: bool = False
