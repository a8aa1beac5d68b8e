"""Exception types, hints at similar names, short lists of names, and errors of other libraries in one line.

Every message has three parts: what is wrong (with the value), what was expected, how to mend it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import accumulate
from typing import NoReturn

_LONGEST_DESCRIPTION = 300  # characters
_LONGEST_TYPE_NAME = 80
_LONGEST_LINE = 300
_LONGEST_NAME, _LONGEST_LIST = 120, 220


class ForetokenError(Exception):
    """Base of every error that a user can cause; its text is one or two clear sentences."""


class ConfigError(ForetokenError):
    """A parameter, key or method name that does not exist or does not fit."""


class ModelError(ForetokenError):
    """A model directory that cannot be loaded, or a model that the engine cannot decode without error."""


class RequestError(ForetokenError):
    """A prompt or a sampling parameter that cannot be served."""


class FormError(RequestError):
    """Raised for a form of output that cannot be followed.

    `path` leads to the keyword of a JSON schema that is at fault; it may be empty.
    """

    def __init__(self, kind: str, fault: str, advice: str, path: tuple[str, ...] = ()) -> None:
        """`kind` is a field of `structured_outputs`, which begins the sentence that `fault` ends."""
        self.fault, self.advice, self.path = fault, advice, path
        super().__init__(self.about(f"{kind} of structured_outputs", path, advice))

    def about(self, subject: str, path: tuple[str, ...], advice: str) -> str:
        """Returns the message for another name of the form."""
        at = f" at {'.'.join(path)[:200]}" if path else ""
        return f"{subject}{at} {self.fault}. {advice}"


class QueueFull(ForetokenError):
    """The queue is full; `retry_after_s` are the seconds until waiting requests have probably been served."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStopped(ForetokenError):
    """An `AsyncLLM` that serves no requests any more: it was closed, its thread failed, or the process was forked."""


class TreeError(ForetokenError):
    """A token tree that breaks the invariants of `TokenTree`."""


class PassError(ForetokenError, ValueError):
    """Tensors of a forward pass that do not fit the model, the KV cache or the memory; nothing was computed."""


class BuiltPerProcess:
    """A base class that refuses copies and pickles: its objects hold a model, engine memory, locks and threads."""

    def __reduce__(self) -> NoReturn:
        """Refuses `copy.copy`, `copy.deepcopy`, `pickle.dumps` and arguments of `multiprocessing`."""
        name = type(self).__name__
        raise ConfigError(
            f"an object of type {name} cannot be copied or pickled: it holds a loaded model and a running engine. "
            f"Expected one {name} in each process. Pass the model's name to the other process and build it there."
        )


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """Returns "Did you mean 'x'? Known: a, b, x.", with the question only if a known name is similar."""
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    question = f"Did you mean '{close[0]}'? " if close else ""
    return f"{question}Known: {', '.join(names)}."


def listed(names: Iterable[str]) -> str:
    """Returns sorted names in about 250 characters: the first names, and the number of the rest."""
    ordered = sorted(names)
    cut = [name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 1]}…" for name in ordered]
    lengths = accumulate(len(name) + 2 for name in cut)
    shown = max(bisect_right(list(lengths), _LONGEST_LIST), 1)
    more = len(ordered) - shown
    return ", ".join(cut[:shown]) + (f" and {more} more" if more > 0 else "")


@contextmanager
def foreign_errors_as(
    error: type[Exception], told: Callable[[Exception], str], *, passing: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Turns any `Exception` of the block into one type; Ctrl-C and the like pass.

    For code of users, tokenizers, chat templates and readers of damaged files, which may raise anything.

    Args:
        told: Makes the message from the original; may itself raise a better error.
        passing: Types that pass unchanged.
    """
    try:
        yield
    except passing:
        raise
    except Exception as err:
        raise error(told(err)) from err


def described(error: BaseException) -> str:
    """Returns type and first line of an exception, at most 300 printable characters, even if `str()` raises."""
    name = _type_name(error)
    try:
        text = _first_line(str(error), _LONGEST_DESCRIPTION - len(name) - 2).rstrip(". ")
    except Exception as err:  # noqa: BLE001 - foreign code makes the text
        text = f"its text cannot be shown, str() raised {_type_name(err)}"
    return f"{name}: {text or 'no message'}"


def one_line(err: BaseException) -> str:
    """Returns a library's message in one line, without the final stop; cuts the middle of a long line.

    The cause stands at either end: some messages quote whole files after it, others list all allowed values before it.
    """
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    if not lines:
        return type(err).__name__
    if isinstance(err, KeyError):
        return f"it names {lines[0]}, which is not known"
    # Errors of several lines have the cause in the second line.
    line = " ".join(lines[:2] if lines[0].endswith(":") else lines[:1]).rstrip(".")
    half = _LONGEST_LINE // 2
    return line if len(line) <= _LONGEST_LINE else f"{line[:half]} … {line[-half:]}"


def _type_name(error: BaseException) -> str:
    """Returns the name of an exception's class, even if a metaclass overrides `__name__`."""
    return _first_line(type.__dict__["__name__"].__get__(type(error)), _LONGEST_TYPE_NAME)


def _first_line(text: str, longest: int) -> str:
    line = next((line.strip() for line in text[: 100 * longest].splitlines() if line.strip()), "")
    line = "".join(character if character.isprintable() else " " for character in line)
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


@contextmanager
def undone_on_error(undo: Callable[[], object]) -> Iterator[None]:
    """Calls `undo` if the block raises anything, and re-raises; does nothing otherwise."""
    try:
        yield
    except BaseException:
        undo()
        raise
