"""What was learned of drafters' acceptance, from one process to the next: entries of the user's cache.

They are estimates to begin with: what is generated does not depend on them, and a process learns on from there. An
entry is believed only where it can be true.
"""

from __future__ import annotations

import hashlib
import json
import logging
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from foretoken.core.errors import ForetokenError
from foretoken.files.user_cache import KeptEntries, is_number
from foretoken.formats.checkpoint import TargetFingerprint

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from foretoken.hf.loading import LoadedModel

_KEPT = KeptEntries(
    file="foretoken-acceptance.json", mark="foretoken_acceptance", holder="drafters",
    what="estimates of drafters' acceptance",
)  # fmt: skip
_FORMAT = 2
_LEAST_LEARNED = 64  # iterations, below which nothing is kept
_EVERY = 4096  # iterations, after which it is kept for a process that may not end by itself
_MOST, _MOST_KEPT = 1e6, 20.0  # observations that a bin may claim, and that it is believed to have: texts change
_log = logging.getLogger(__name__)


def pair_key(model: LoadedModel, drafters: Sequence[object]) -> str | None:
    """Names a target and the drafters for it; None for weights that are a caller's own, which may change.

    Args:
        model: The target.
        drafters: Their options, which print all they say.
    """
    if model.is_borrowed:
        return None
    try:
        target = TargetFingerprint.of(model).model_dump(exclude={"name"})
    except ForetokenError as err:
        _log.debug("acceptance is not kept for '%s': %s", model.name, err)
        return None
    facts = [_FORMAT, target, [repr(each) for each in drafters]]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:24]


class Learner(Protocol):
    """What counts observations in bins."""

    def counts(self) -> NDArray[np.float64]:
        """(2, …): how often each bin was observed, and how often what it stands for was right."""

    def restore(self, counts: NDArray[np.float64]) -> None:
        """Begins from counts of the same shape."""


class KeptAcceptance:
    """Gives learners what earlier ones counted, and keeps what they count."""

    def __init__(self, learners: Sequence[Learner], key: str) -> None:
        """Restores what is kept under a key."""
        self._learners, self._key, self._num_learned = learners, key, 0
        entry = _KEPT.read(key)
        found = _dense(entry.get("counts"), [each.counts().shape for each in learners]) if entry is not None else None
        for learner, counts in zip(learners, found or (), strict=found is not None):
            learner.restore(counts)

    def learned(self) -> None:
        """An iteration was learned from."""
        self._num_learned += 1
        if self._num_learned % _EVERY == 0:
            self.keep()

    def keep(self) -> None:
        """Keeps what was counted, where that is enough to tell anything."""
        if self._num_learned >= _LEAST_LEARNED:
            _KEPT.keep(self._key, {"counts": [_sparse(each.counts()) for each in self._learners]})


def _sparse(counts: NDArray[np.float64]) -> list[list[float]]:
    """(bin, seen, right) of each bin in which anything was seen."""
    seen, right = counts.reshape(2, -1)
    return [[int(at), round(float(seen[at]), 4), round(float(right[at]), 4)] for at in np.flatnonzero(seen > 1e-3)]


def _dense(kept: Any, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.float64]] | None:
    """Counts of some shapes, of what `_sparse` gave; None where a value of JSON cannot be that."""
    if not isinstance(kept, list) or len(kept) != len(shapes):
        return None
    result = []
    for bins, shape in zip(kept, shapes, strict=True):
        counts = np.zeros((2, int(np.prod(shape[1:]))))
        if not isinstance(bins, list) or not all(_is_bin(each, counts.shape[1]) for each in bins):
            return None
        for at, seen, right in bins:
            counts[:, at] = min(seen, _MOST_KEPT), right * min(seen, _MOST_KEPT) / seen
        result.append(counts.reshape(shape))
    return result


def _is_bin(value: Any, num_bins: int) -> bool:
    """Whether a value of JSON is a bin's number, how often it was observed, and how often it was right."""
    if not isinstance(value, list) or len(value) != 3 or type(value[0]) is not int:
        return False
    at, seen, right = value
    return is_number(seen) and is_number(right) and 0 <= at < num_bins and 0 <= right <= seen and 0 < seen <= _MOST
