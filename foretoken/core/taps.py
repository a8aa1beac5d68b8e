"""Names the target's features by the boundary between its blocks."""

from typing import Literal

Tap = int | Literal["final"]
"""0 is the input of the first block (embeddings as the model scales them), i the output of block i before any later
norm; `final` is the output of the norm after the last block, what the LM head reads."""
