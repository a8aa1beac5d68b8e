"""What a block began is undone when it raises, and only then."""

import asyncio

import pytest

from foretoken.core.errors import undone_on_error


@pytest.mark.parametrize(
    "error", [ValueError("a fault"), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
)
def test_whatever_is_raised_undoes_the_block_once_and_goes_on(error: BaseException) -> None:
    undone: list[int] = []
    with pytest.raises(type(error)) as caught, undone_on_error(lambda: undone.append(1)):
        raise error
    assert caught.value is error
    assert undone == [1]


def test_a_block_that_ends_well_is_not_undone() -> None:
    undone: list[int] = []
    with undone_on_error(lambda: undone.append(1)):
        pass
    assert not undone


def test_an_error_of_undoing_is_raised_with_what_it_was_for() -> None:
    def undo() -> None:
        raise OSError("no room to put it back")

    with pytest.raises(OSError, match="no room") as caught, undone_on_error(undo):
        raise ValueError("a fault")
    assert isinstance(caught.value.__context__, ValueError)
