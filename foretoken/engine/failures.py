"""What one sequence's part of an iteration raises ends that sequence alone."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import described

if TYPE_CHECKING:
    from collections.abc import Callable

    from foretoken.engine.sequence import Sequence

_log = logging.getLogger(__name__)


def contained(sequence: Sequence, work: Callable[..., None], *arguments: Any) -> None:
    """Does one sequence's part of an iteration; whatever it raises ends that sequence.

    Args:
        sequence: Whose.
        work: Called with the sequence and the arguments.
        arguments: More of them.
    """
    try:
        work(sequence, *arguments)
    except Exception as err:  # noqa: BLE001 - one request's failure, whatever it is, must not end the others
        fail(sequence, err)


def fail(sequence: Sequence, error: Exception) -> None:
    """Ends a sequence with what its part of an iteration raised."""
    sequence.fail(f"decoding failed: {described(error)}.")
    _log.warning("request %s failed and was ended; others go on: %s", sequence.request_id, sequence.error)
    _log.debug("where request %s failed", sequence.request_id, exc_info=error)
