"""Calls that a test holds up, to show that others go on meanwhile."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

MOST_S = 60  # of waiting, before a test fails


class HeldCalls:
    """The calls of one function, which do their work as ever and then wait.

    `with held:` begins once a call has begun, and lets all of them go at its end.
    """

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, holds: Callable[..., bool] = lambda *_: True
    ) -> None:
        """Holds up calls of `owner.name`; holds: which of them, by their arguments."""
        self._has_begun, self._may_end = threading.Event(), threading.Event()
        original = getattr(owner, name)

        def held_up(*given: Any, **options: Any) -> Any:
            if not holds(*given):
                return original(*given, **options)
            self._has_begun.set()
            made = original(*given, **options)
            assert self._may_end.wait(MOST_S), "others waited"
            return made

        monkeypatch.setattr(owner, name, held_up)

    def __enter__(self) -> None:
        assert self._has_begun.wait(MOST_S)

    def __exit__(self, *_: object) -> None:
        self._may_end.set()
