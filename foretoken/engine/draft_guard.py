"""Checks what a drafter returns: whatever it does, a valid tree over the right roots goes on to the target.

A drafter that raises or returns what is no tree costs the draft of that iteration; a token outside the vocabulary or
past the context limit costs its subtree. After several failures in a row the drafter is switched off for good, which is
said once. Ctrl-C alone passes.
"""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from foretoken.core.errors import described
from foretoken.core.token_tree import TokenTree
from foretoken.drafters.base import Committed, Lookup, PrefixKeeper
from foretoken.engine.tree_checks import cut_invalid_nodes, find_fault

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from foretoken.drafters.base import DraftContext, Drafter, DraftRequest

_FAILURES_IN_A_ROW = 5
_log = logging.getLogger(__name__)


class SafeDraft(NamedTuple):
    """What came of asking a drafter.

    Attributes:
        tree: A valid one.
        error: Why the drafter's own was dropped, or None.
        num_proposed: Nodes of its tree before any was cut, of each sequence; see `SequenceStep`.
    """

    tree: TokenTree
    error: str | None
    num_proposed: Sequence[int] | None


@dataclass(slots=True)
class _Call:
    """One call of a drafter.

    Attributes:
        error: What is wrong with what came of it; None where nothing is.
    """

    error: str | None = None


class DraftGuard:
    """Calls a drafter and outlives its failures.

    Attributes:
        name: The drafter's name, also after it has been switched off.
    """

    def __init__(self, drafter: Drafter, *, vocab_size: int, max_nodes: int, device: torch.device) -> None:
        self._drafter: Drafter | None = drafter
        self._vocab_size, self._max_nodes, self._device = vocab_size, max_nodes, device
        self.name, self._has_features = drafter.name, bool(drafter.reads.taps)
        self._failures: Counter[str] = Counter()  # in a row, by call
        self._logged: set[tuple[str, str]] = set()  # calls and kinds of failure

    @property
    def is_active(self) -> bool:
        """Whether the drafter has not been switched off."""
        return self._drafter is not None

    def begin(self, slot: int, request: DraftRequest) -> None:
        """Passes on that a sequence begins, and what of it need not be read, see `PrefixKeeper`."""
        if self._drafter is None:
            return
        with self._guarded("begin"):
            self._drafter.begin(slot, request)
        if request.prefix is not None and not isinstance(self._drafter, PrefixKeeper):
            tokens = request.prompt[: request.prefix.length]
            self.commit(Committed(slots=[slot], starts=[0], tokens=[tokens], features=None))

    def reusable(self, slot: int, length: int) -> int:
        """How many of the first positions of a slot need not be read again for the drafter, see `PrefixKeeper`."""
        drafter = self._drafter
        if drafter is None:
            return length
        if not isinstance(drafter, PrefixKeeper):
            return 0 if self._has_features else length
        found = 0
        with self._guarded("reusable"):
            found = drafter.reusable(slot, length)
        return min(max(found, 0), length)

    def propose(self, context: DraftContext) -> SafeDraft:
        """The drafter's tree without invalid nodes, or roots alone.

        Args:
            context: What the drafter is told; `max_depth` is enforced.
        """
        roots, error = context.roots, None
        tree: TokenTree | None = None
        num_proposed: Sequence[int] | None = [0] * len(roots)
        if self._drafter is not None:
            with self._guarded("propose") as call:
                draft = self._drafter.propose(context)
                finding = find_fault(draft, roots, self._max_nodes, self._device)
                call.error = finding.fault
                if call.error is None:
                    tree = cut_invalid_nodes(draft, self._vocab_size, context.max_depth)
                    num_proposed = finding.num_proposed
            error = call.error
        tree = TokenTree.roots(roots, device=self._device) if tree is None else tree
        return SafeDraft(tree, error, num_proposed)

    @property
    def can_continue(self) -> bool:
        """Whether the drafter continues text that is not committed, see `Lookup`."""
        return isinstance(self._drafter, Lookup)

    def continue_from(self, slot: int, tokens: Sequence[int], path: Sequence[int], depth: int) -> list[int]:
        """What the drafter says that a path is followed by, cut before the first token that is none; see `Lookup`."""
        drafter = self._drafter
        if not isinstance(drafter, Lookup):
            return []
        found: list[int] = []
        with self._guarded("continue_from"):
            found = drafter.continue_from(slot, tokens, path, depth)
        return list(takewhile(lambda token: 0 <= token < self._vocab_size, found[:depth]))

    def commit(self, committed: Committed) -> None:
        """Passes on what was committed."""
        if self._drafter is None:
            return
        with self._guarded("commit"):
            self._drafter.commit(committed)

    def release(self, slot: int) -> None:
        """Passes on that a slot is free."""
        if self._drafter is None:
            return
        with self._guarded("release"):
            self._drafter.release(slot)

    @contextmanager
    def _guarded(self, method: str) -> Iterator[_Call]:
        """A call of the drafter, counted by how it ended: whatever it raises goes no further and costs no text.

        Args:
            method: Which of the drafter's methods.

        Yields:
            Where the block notes what is wrong with an answer. After the block it says what was raised as well.
        """
        call, kind = _Call(), "tree"
        try:
            yield call
        except KeyboardInterrupt:
            raise
        except BaseException as err:  # noqa: BLE001 - see above; SystemExit and the panics of Rust are no `Exception`
            call.error, kind = described(err), type(err).__name__
        self._count(method, kind, call.error)

    def _count(self, call: str, kind: str, error: str | None) -> None:
        """Switches the drafter off after too many failures in a row; calls that succeed excuse only themselves.

        Args:
            call: Which of the drafter's methods.
            kind: Of the failure; the first of each kind is a warning.
            error: What went wrong; None where nothing did.
        """
        self._failures[call] = 0 if error is None else self._failures[call] + 1
        if error is None:
            return
        is_new = (call, kind) not in self._logged
        self._logged.add((call, kind))
        _log.log(
            logging.WARNING if is_new else logging.DEBUG, "drafter '%s' failed in %s; decoding goes on: %s",
            self.name, call, error,
        )  # fmt: skip
        if self._failures[call] >= _FAILURES_IN_A_ROW:
            _log.warning(
                "drafter '%s' failed %d times in a row in %s and is switched off; decoding goes on without it: %s",
                self.name, self._failures[call], call, error,
            )  # fmt: skip
            self._drafter = None
