"""How many prompt tokens a step computes: all that fit while nobody is decoding, few enough beside those who are.

A step that also reads a chunk of a prompt takes longer, and every sequence that is decoding waits for it. Left to
itself the budget is steered so that such steps take `_LONGEST_STEP` times a step without prompts: it grows while they
take less and shrinks when they take more. What a pass costs need not be known for that, only what it took.
"""

from __future__ import annotations

_LONGEST_STEP = 2.4  # steps without prompt tokens that one with some is to take
_LEAST = 4  # prompt tokens of a step: a pass of a few tokens takes what one of two does
_FIRST = 16  # prompt tokens of the first step beside decoding sequences, where nothing is known
_FADE = 0.8  # weight of what was known when a step adds to it
_LEAST_FACTOR, _GREATEST_FACTOR = 0.75, 1.25  # by which one step changes the budget, however long it took


class PrefillBudget:
    """Prompt tokens a step.

    Attributes:
        max_num_batched_tokens: Most tokens of a pass, drafted nodes included; None leaves it to what passes take.
    """

    def __init__(self, max_num_batched_tokens: int | None = None) -> None:
        """Nothing is known yet.

        Args:
            max_num_batched_tokens: See the class.
        """
        self.max_num_batched_tokens = max_num_batched_tokens
        self._step_seconds: dict[int, float] = {}  # of steps without prompt tokens, by the size of what is decoding
        self._tokens: float | None = None  # the budget as it is steered

    def tokens(self, num_decoding: int, chunk: int) -> int:
        """Prompt tokens of the next step, at least 1.

        Args:
            num_decoding: Tokens of the pass that belong to sequences that are decoding.
            chunk: Most prompt tokens of any pass.
        """
        budget = chunk
        if self.max_num_batched_tokens is not None:
            budget = min(budget, self.max_num_batched_tokens - num_decoding)
        elif num_decoding:
            # As many as are decoding cost about as much as these: prompts must not starve beside wide steps.
            budget = min(budget, max(int(self._tokens or _FIRST), num_decoding, _LEAST))
        return max(budget, 1)

    def learn(self, seconds: float, *, num_decoding: int, num_prompt: int) -> None:
        """Learns from a step.

        Args:
            seconds: Of the pass.
            num_decoding: Its tokens that belong to sequences that are decoding.
            num_prompt: Its prompt tokens.
        """
        if not num_decoding:
            return
        size = num_decoding.bit_length()
        if not num_prompt:
            known = self._step_seconds.get(size, seconds)
            self._step_seconds[size] = _FADE * known + (1 - _FADE) * seconds
        elif self._step_seconds:
            nearest = min(self._step_seconds, key=lambda each: abs(each - size))
            wanted = _LONGEST_STEP * self._step_seconds[nearest]
            factor = min(max(wanted / max(seconds, 1e-9), _LEAST_FACTOR), _GREATEST_FACTOR)
            tokens = self._tokens or _FIRST
            if factor < 1.0 or num_prompt >= int(tokens):  # a short chunk says nothing of longer ones
                self._tokens = max(min(tokens, num_prompt) * factor if factor < 1.0 else tokens * factor, _LEAST)
