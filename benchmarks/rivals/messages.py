"""Messages between the comparison and its workers: JSON lines, standard library only.

The comparison writes `{"ask": QUESTION, ...}` to a worker's standard input, and the worker answers with one line on its
standard output: an object, or `{"error": SENTENCE}`.

    load      fields of `LoadRequest`                   -> fields of `Loaded`
    generate  prompt_ids, max_tokens, temperature, seed -> fields of `Generation`
    forward   width, context, repeats                   -> {"seconds": median}
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """Everything a worker is told before it is asked anything.

    Attributes:
        mode: Which of the rival's ways to decode.
        model: Directory of the target, Hugging Face layout.
        draft_model: Directory of the draft model, in mode "eagle3" of an EAGLE-3 head, or None.
        dtype: "bfloat16" or "float32", of weights, activations and KV cache.
        weights: The rival's name of the format in 4 or 8 bits that it rounds weights to, or None for `dtype`.
        threads: Compute threads, exactly.
        max_len: Most tokens a sequence reaches, prompt included.
        max_width: Widest forward pass that will be asked for.
        cache_dir: Where converted weights are kept.
        options: The rival's own settings, passed through.
    """

    mode: str
    model: str
    draft_model: str | None = None
    dtype: str
    weights: str | None = None
    threads: int
    max_len: int
    max_width: int = 1
    cache_dir: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """What a worker is, once loaded.

    Attributes:
        versions: Package name to version.
        can_forward: Whether it can time a forward pass of chosen width.
        model_bytes: Of the target's weights as prepared: in their file, or in memory if they are rounded there.
        draft_bytes: The same of a draft model or head; None without one, and where it is not known.
        notes: Sentences on what it does that others do not.
    """

    versions: dict[str, str]
    can_forward: bool = False
    model_bytes: int | None = None
    draft_bytes: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One request, timed inside the worker.

    A chunk is what becomes certain at once: one token in plain decoding, one pass's tokens in speculative decoding. The
    first chunk ends the prefill; decoding is what follows it, so that its rate says nothing about prompts.

    Attributes:
        token_ids: Output tokens.
        seconds: From the prompt's ids as a list to the output's ids as a list.
        first_seconds: From the start to the first chunk; None where the rival does not tell.
        decode_seconds: From the first chunk to the last; None where the rival does not tell.
        decode_tokens: Tokens that came after the first chunk; None where the rival does not tell.
        decode_passes: Target passes after the one that gave the first chunk; None where the rival does not tell.
    """

    token_ids: list[int]
    seconds: float
    first_seconds: float | None = None
    decode_seconds: float | None = None
    decode_tokens: int | None = None
    decode_passes: int | None = None

    @property
    def tau(self) -> float | None:
        """Mean tokens per target pass, the target's own token included; None where unknown."""
        if not self.decode_passes or self.decode_tokens is None:
            return None
        return self.decode_tokens / self.decode_passes
