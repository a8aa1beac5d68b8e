"""How many prompt tokens a step computes: all that fit while nobody is decoding, few enough beside those who are.

A step that also reads a chunk of a prompt takes longer, and every sequence that is decoding waits for it. Left to
itself the budget learns what such steps cost here and aims at `_LONGEST_STEP` times a step without prompts.
"""

from __future__ import annotations

_LONGEST_STEP = 2.5  # steps without prompt tokens that one with some may take
_FADE = 0.8  # weight of what was known when a step adds to it


class PrefillBudget:
    """Prompt tokens a step.

    Attributes:
        max_num_batched_tokens: Most tokens of a pass, drafted nodes included; None leaves it to costs.
    """

    def __init__(self, max_num_batched_tokens: int | None = None) -> None:
        """Nothing is known yet.

        Args:
            max_num_batched_tokens: See the class.
        """
        self.max_num_batched_tokens = max_num_batched_tokens
        self._step_seconds: float | None = None  # of a step without prompt tokens
        self._token_seconds: float | None = None  # of a prompt token

    def tokens(self, num_decoding: int, chunk: int) -> int:
        """Prompt tokens of the next step, at least 1.

        Args:
            num_decoding: Tokens of the pass that belong to sequences that are decoding.
            chunk: Most prompt tokens of any pass.
        """
        budget = chunk
        if self.max_num_batched_tokens is not None:
            budget = min(budget, self.max_num_batched_tokens - num_decoding)
        elif num_decoding and self._step_seconds is not None and self._token_seconds is not None:
            spare = (_LONGEST_STEP - 1) * self._step_seconds
            budget = min(budget, int(spare / max(self._token_seconds, 1e-9)))
        return max(budget, 1)

    def learn(self, seconds: float, *, num_decoding: int, num_prompt: int) -> None:
        """Learns from a step.

        Args:
            seconds: Of the pass.
            num_decoding: Its tokens that belong to sequences that are decoding.
            num_prompt: Its prompt tokens.
        """
        if num_decoding and not num_prompt:
            self._step_seconds = _mixed(self._step_seconds, seconds)
        elif num_prompt:
            share = seconds - (self._step_seconds or 0.0) if num_decoding else seconds
            self._token_seconds = _mixed(self._token_seconds, max(share, 0.0) / num_prompt)


def _mixed(known: float | None, seen: float) -> float:
    """What is known and what was seen."""
    return seen if known is None else _FADE * known + (1 - _FADE) * seen
