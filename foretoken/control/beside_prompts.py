"""Whether drafts have room in a pass that also reads prompts.

Drafting pays where a pass of a few more tokens takes hardly longer. A pass that reads prompts may be so wide that every
token adds what it costs to compute. Then a drafted node, which is not always accepted, costs as much as the next token
of plain decoding, which is; and tokens generated there are cheap as they are, since the pass is made for the prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from foretoken.runner.cost_curve import CostCurve

_LARGEST_SHARE = 0.75  # of what a token of the pass costs that a further one may add


class BesidePrompts:
    """What nodes add to passes that read prompts."""

    def __init__(self, cost: CostCurve) -> None:
        """Takes costs.

        Args:
            cost: Seconds of a pass.
        """
        self._cost = cost

    def has_room(self, num_sequences: int, num_prompt_tokens: int) -> bool:
        """Whether drafts may pay in a pass; always where it reads no prompts.

        Args:
            num_sequences: That are decoding, a token each.
            num_prompt_tokens: Of others' prompts.
        """
        if not num_prompt_tokens:
            return True
        width = num_sequences + num_prompt_tokens
        return self._cost(2 * width) - self._cost(width) <= _LARGEST_SHARE * self._cost(width)
