"""The few exception types of the project, and the one way to suggest a name.

Every message has three parts: what was wrong (with the value), what was expected, how to mend it.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class ForetokenError(Exception):
    """Base of every error that a user can cause; its text is one clear sentence or two."""


class ConfigError(ForetokenError):
    """A parameter, key or method name that does not exist or does not fit."""


class ModelError(ForetokenError):
    """A model directory that cannot be loaded, or a model that the engine cannot decode without error."""


class RequestError(ForetokenError):
    """A prompt or a sampling parameter that cannot be served."""


class TreeError(ForetokenError):
    """A token tree that breaks the invariants of `TokenTree`."""


class PassError(ForetokenError, ValueError):
    """Tensors of a forward pass that do not fit the model, the KV cache or the memory; nothing was computed."""


def nearest_name_hint(name: str, known: Iterable[str]) -> str:
    """A sentence that names the nearest known name, or all of them.

    Args:
        name: What the user wrote.
        known: The names that exist.

    Returns:
        "Did you mean 'x'? Known: a, b, x." with the question only when something is near.
    """
    names = sorted(known)
    close = get_close_matches(name, names, n=1, cutoff=0.5)
    question = f"Did you mean '{close[0]}'? " if close else ""
    return f"{question}Known: {', '.join(names)}."
