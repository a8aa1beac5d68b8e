"""What a head of one decoder block computes around the block (`heads/autoregressive.py`), for the native kernels.

Of a state s and the embedding e of the token after it the block reads fuse([e; s]), or, where there is no such layer,
the norm of s, and e as its second input. The logits are read after a norm of the block's output, if there is one; the
next state is what the LM head reads, or what is before that norm.

Letters: W width of the block, V vocabulary, Vd rows of the LM head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.decoder.lean.head_parts import HeadParts
from foretoken.decoder.lean.head_structures import AutoregressiveHead

if TYPE_CHECKING:
    from torch import Tensor, nn

    from foretoken.decoder.blocks import Norm
    from foretoken.decoder.lean.head_steps import LmHead, ScaledEmbedding


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
        self.structure = AutoregressiveHead(
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
