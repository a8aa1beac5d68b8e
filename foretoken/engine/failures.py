"""What one sequence's part of an iteration raises ends that sequence alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, TypeVar

from foretoken.core.errors import described

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.engine.sequence import Sequence

T = TypeVar("T")
_log = logging.getLogger(__name__)


def contained(sequence: Sequence, work: Callable[..., T], *arguments: Any) -> T | None:
    """Does one sequence's part of an iteration; whatever it raises ends that sequence.

    Args:
        sequence: Whose.
        work: Called with the sequence and the arguments.
        arguments: More of them.

    Returns:
        What it gives; None where it raised.
    """
    try:
        return work(sequence, *arguments)
    except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
        fail(sequence, err)
        return None


def fail(sequence: Sequence, error: Exception) -> None:
    """Ends a sequence with what its part of an iteration raised."""
    sequence.fail(f"decoding failed: {described(error)}.")
    _log.warning("request %s failed and was ended; others go on: %s", sequence.request_id, sequence.error)
    _log.debug("where request %s failed", sequence.request_id, exc_info=error)
