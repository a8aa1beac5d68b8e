"""A draft head as the native kernels see it; see `head_parts`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from foretoken.decoder.lean.head_parts import HeadParts
from foretoken.decoder.lean.head_structures import Head, HeadMatrix, Step

if TYPE_CHECKING:
    from foretoken.decoder.lean.head_steps import HeadSteps

_KINDS = {"feature": 0, "path": 1, "state": 2}


class NativeHead:
    """What the kernels are handed of a head, and the tensors behind it, which live as long as this.

    Attributes:
        structure: See `kernels/head_interface.h`.
    """

    def __init__(self, head: HeadSteps) -> None:
        """Takes addresses; copies norms and nothing else.

        Raises:
            UnsuitableError: When a layer is not native, or something is not what the sizes of the head say.
        """
        self._head, self._parts = head, HeadParts()
        self._blocks = [
            (HeadMatrix * len(step.blocks))(
                *(self._parts.layer("a block", each, head.width, head.width) for each in step.blocks)
            )
            for step in head.steps
        ]
        self._steps = (Step * len(head.steps))(*map(self._step, range(len(head.steps))))
        self.structure = Head(
            kind=_KINDS[head.kind],
            num_steps=len(head.steps),
            hidden=head.hidden_size,
            width=head.width,
            vocab=head.vocab_size,
            token_map=self._parts.token_map(head.token_map, head.vocab_size),
            feature_rms=head.feature_rms,
            feature_epsilon=head.feature_epsilon,
            steps=self._steps,
        )
        self._memory = self._parts.held_memory()

    def has_moved(self) -> bool:
        """Whether the structure no longer says where the tensors lie: another one has to be made."""
        return self._memory.has_changed()

    def _step(self, index: int) -> Step:
        """One step."""
        head, step, parts = self._head, self._head.steps[index], self._parts
        rows = head.vocab_size if head.token_map is None else head.token_map.numel()
        made = {
            "lm_head": parts.layer("the LM head", step.head.layer, rows, head.width),
            "logit_scale": step.head.scale,
            "logit_softcap": step.head.softcap,
            "blocks": self._blocks[index],
            "num_blocks": len(step.blocks),
        }
        if head.kind == "feature":
            parts.require(head.width == head.hidden_size, f"a width of {head.width}", f"{head.hidden_size}")
            return Step(**made)
        parts.require(step.first is not None and step.embedding is not None, "a step without a part", "all of them")
        assert step.embedding is not None, "just looked"
        if head.kind == "path":
            size, inputs, outputs = head.hidden_size, (index + 2) * head.hidden_size, 2 * head.width
        else:
            size, inputs, outputs = head.width, head.width if index else head.hidden_size, head.width
            parts.require(step.norm is not None, "a step without a norm", f"({size},)")
            assert step.norm is not None, "just looked"
            made["norm"] = parts.norm("a step's norm", *step.norm, size)
        return Step(
            **made,
            first=parts.layer("the first layer of a step", step.first, outputs, inputs),
            **parts.embedding(step.embedding, head.vocab_size, size),
        )
