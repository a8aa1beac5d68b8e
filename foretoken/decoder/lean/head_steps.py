"""What a draft head computes, and its weights: the description from which the native kernels draft.

A head is K steps. Step i chooses the children of the nodes of depth i. With y what its LM head reads:

- "feature" (Medusa): y is the feature, whatever the tokens are;
- "path" (Hydra): y = a + silu(b), a and b the halves of first(u), u = [feature; embeddings of the tokens from the root
  down to the node];
- "state" (MLP speculator): y = gelu(norm(first(state of the parent) + embedding of the node's token)), which is also
  the node's state; that of the root's parent is the feature.

Then y <- y + silu(block(y)) for each block, and the logits are those of its LM head.

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
    """Rows that are looked up by token.

    Attributes:
        weight: (V, E), or (V, W) where steps pass on a state.
        scale: Factor of every row.
    """

    weight: Tensor
    scale: float = 1.0


class BiasedNorm(NamedTuple):
    """x / rms(x) * weight + bias; both vectors (W,)."""

    weight: Tensor
    bias: Tensor
    epsilon: float


class LmHead(NamedTuple):
    """A linear layer, and what its model does to logits: softcap * tanh(scale * logit / softcap).

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
    """One step, see the module. Layers are as `fast_linear` gives them.

    Attributes:
        first: (..., (i + 2) E) to (..., 2 W) of "path"; (..., E), later (..., W), to (..., W) of "state".
        norm: Of "state".
        embedding: Of "path" and "state".
        blocks: (..., W) to (..., W).
        head: Gives the logits.
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
        token_map: (Vd,) int64, the token of each row of the LM heads, or None where they are the vocabulary.
        feature_rms: Root mean square that features of "state" are scaled to, 0 to leave them as they are.
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
    """Such a head without its block. Layers are as `fast_linear` gives them.

    Attributes:
        width: W.
        vocab_size: V.
        embedding: (V, W).
        head: (..., W) to (..., Vd) logits.
        token_map: (Vd,) int64, the token of each row of the LM head, or None where they are the vocabulary.
        fuse: (..., 2 W) to (..., W), or None where the embedding is the block's second input.
        norm: (W,), an RMS norm before the LM head; None for none.
        state_norm: (W,), an RMS norm of the state before the block; None for none. Without `fuse` alone.
        feeds_normed: Whether the next state is what the LM head reads. Likewise.
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
    """What the kernels are handed of it, and the tensors behind it, which live as long as this.

    Attributes:
        structure: See `kernels/head_interface.h`.
    """

    def __init__(self, head: AutoregressiveSteps) -> None:
        """Takes addresses; copies the norms and the token map.

        Raises:
            UnsuitableError: When a layer is not native, or something is not what the sizes of the head say.
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
        """Whether the structure no longer says where the tensors lie: another one has to be made."""
        return self._memory.has_changed()
