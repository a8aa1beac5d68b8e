"""One document as tokens, as encoders hand it to the writer of a corpus."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Document:
    """One document as tokens.

    Attributes:
        tokens: Token ids, special ones included.
        supervised: Which of them count as labels, as many as tokens; None for all.
    """

    tokens: Sequence[int]
    supervised: Sequence[bool] | None = None

    def __post_init__(self) -> None:
        """Checks that flags and tokens go together."""
        if self.supervised is not None and len(self.supervised) != len(self.tokens):
            raise RequestError(
                f"a document has {len(self.tokens)} tokens and {len(self.supervised)} flags. Expected one flag a token."
            )
