"""Describes draft heads and their weights for the native kernels.

A head is K steps. Step i chooses the children of the nodes of depth i. Its LM head reads y:

- "feature" (Medusa): y is the feature, whatever the tokens are;
- "path" (Hydra): y = a + silu(b), a and b the halves of first(u), u = [feature; embeddings of the tokens from the root
  to the node];
- "state" (MLP speculator): y = gelu(norm(first(state of the parent) + embedding of the node's token)); y is also the
  node's state, and the state of the root's parent is the feature.

Then y <- y + silu(block(y)) for each block, before the LM head.

Letters: E hidden size of the target, W width of y, V vocabulary, Vd rows of the LM heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from foretoken.decoder.lean.native_head import AutoregressiveHeadStruct, HeadParts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor, nn

    from foretoken.decoder.blocks import Norm


class ScaledEmbedding(NamedTuple):
    """An embedding table.

    Attributes:
        weight: (V, E), or (V, W) for "state".
        scale: Factor of every row.
    """

    weight: Tensor
    scale: float = 1.0


class BiasedNorm(NamedTuple):
    """Computes x / rms(x) * weight + bias; both vectors (W,)."""

    weight: Tensor
    bias: Tensor
    epsilon: float


class LmHead(NamedTuple):
    """A linear layer, and the model's change to logits: softcap * tanh(scale * logit / softcap).

    Attributes:
        layer: (..., W) to (..., Vd).
        scale: 1 for none.
        softcap: 0 for none.
    """

    layer: nn.Module
    scale: float = 1.0
    softcap: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadStep:
    """One step, see the module. Layers come from `fast_linear`.

    Attributes:
        first: (..., (i + 2) E) to (..., 2 W) of "path"; (..., E), later (..., W), to (..., W) of "state".
        norm: Of "state".
        embedding: Of "path" and "state".
        blocks: (..., W) to (..., W).
        head: Computes the logits.
    """

    first: nn.Module | None = None
    norm: BiasedNorm | None = None
    embedding: ScaledEmbedding | None = None
    blocks: Sequence[nn.Module] = ()
    head: LmHead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadSteps:
    """A head.

    Attributes:
        kind: See the module.
        hidden_size: E.
        width: W.
        vocab_size: V.
        steps: K steps.
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
        width: W.
        vocab_size: V.
        embedding: (V, W).
        head: (..., W) to (..., Vd) logits.
        token_map: (Vd,) int64, the token of each row of the LM head, or None if rows are tokens.
        fuse: (..., 2 W) to (..., W), or None if the embedding is the block's second input.
        norm: (W,), an RMS norm before the LM head, or None.
        state_norm: (W,), an RMS norm of the state before the block, or None. Only without `fuse`.
        feeds_normed: Whether the next state is the input of the LM head. Only without `fuse`.
    """

    width: int
    vocab_size: int
    embedding: ScaledEmbedding
    head: LmHead
    token_map: Tensor | None = None
    fuse: nn.Module | None = None
    norm: Norm | None = None
    state_norm: Norm | None = None
    feeds_normed: bool = False


class NativeAutoregressiveHead:
    """The kernels' description of an autoregressive head, and its tensors.

    Attributes:
        structure: See `kernels/head_interface.h`.
    """

    def __init__(self, head: AutoregressiveSteps) -> None:
        """Takes addresses; copies the norms and the token map.

        Raises:
            UnsuitableError: If a layer is not native, or a size differs from the head's.
        """
        parts, width = HeadParts(), head.width
        rows = head.vocab_size if head.token_map is None else head.token_map.numel()
        self.structure = AutoregressiveHeadStruct(
            lm_head=parts.layer("the LM head", head.head.layer, rows, width),
            token_map=parts.token_map(head.token_map, head.vocab_size),
            vocab=head.vocab_size,
            **parts.embedding(head.embedding, head.vocab_size, width),
            feeds_normed=head.feeds_normed,
            logit_scale=head.head.scale,
            logit_softcap=head.head.softcap,
        )
        if head.fuse is not None:
            has_norms = head.state_norm is not None or head.feeds_normed
            parts.require(not has_norms, "norms of the state, and a layer that fuses it", "one of them")
            self.structure.fuse = parts.layer("the layer that fuses", head.fuse, width, 2 * width)
        for name, norm in (("norm", head.norm), ("state_norm", head.state_norm)):
            if norm is not None:
                parts.require(norm.kind == "rms", f"a {norm.kind} norm", "an RMS norm")
                setattr(self.structure, name, parts.norm("a norm of the width", norm.weight, None, norm.epsilon, width))
        self._parts, self._memory = parts, parts.held_memory()

    def has_moved(self) -> bool:
        """Whether a tensor has moved, so that the structure is invalid."""
        return self._memory.has_changed()
