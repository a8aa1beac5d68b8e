"""The forms in which prompts come, and turning each into checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import check_text, checked_token_ids, shown
from foretoken.core.errors import RequestError

if TYPE_CHECKING:
    from foretoken.engine.codec import Codec

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`."""

_KEYS = ("prompt", "prompt_token_ids")
_KEYS_SHOWN = 4


def split_prompts(prompts: Any) -> list[Any]:
    """Several prompts, also where one was given.

    Args:
        prompts: One prompt, or a list, tuple, array or tensor of them, or what a tokenizer returns (`input_ids`, with
            an `attention_mask` where rows are padded).

    Returns:
        Prompts, not checked yet.

    Raises:
        RequestError: When it is none of these.
    """
    if isinstance(prompts, Mapping) and "input_ids" in prompts:
        return _encoded(prompts)
    if hasattr(prompts, "tolist"):
        prompts = prompts.tolist()
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        raise RequestError(f"the prompts are {type(prompts).__name__}. Expected text, token ids or a list of these.")
    return [prompts] if len(prompts) and isinstance(prompts[0], Integral) else list(prompts)


class PromptReader:
    """Reads prompts with a target's tokenizer."""

    def __init__(self, codec: Codec | None, vocab_size: int) -> None:
        """Takes the tokenizer, where there is one; vocab_size: V."""
        self._codec, self._vocab_size = codec, vocab_size

    def token_ids(self, prompt: Any) -> list[int]:
        """A prompt as token ids.

        Raises:
            RequestError: When it is of no known form, empty, text without a tokenizer, or holds ids that do not exist.
        """
        if isinstance(prompt, Mapping):
            prompt = _value(prompt)
        if hasattr(prompt, "tolist"):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            ids: Sequence[Any] = self._encode(prompt)
        elif _is_list(prompt):
            ids = prompt
        else:
            raise RequestError(f"a prompt is {type(prompt).__name__}. Expected text, a list of token ids or a mapping.")
        if not len(ids):
            raise RequestError("the prompt is empty. Expected at least one token.")
        return checked_token_ids(ids, self._vocab_size, "the prompt")

    @staticmethod
    def text(prompt: Any) -> str | None:
        """A prompt as it was given, where that is text; None for token ids, which nobody has to decode."""
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        return given if isinstance(given, str) else None

    def _encode(self, text: str) -> list[int]:
        """Token ids of text, with the special tokens that the tokenizer adds."""
        if self._codec is None:
            raise RequestError("the prompt is text but the model has no tokenizer. Pass token ids.")
        check_text("the prompt", text)
        return self._codec.encode(text, "the prompt")


def _is_list(value: Any) -> bool:
    """Whether a value is a list, tuple or range, and not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _value(prompt: Mapping[str, Any]) -> Any:
    """What a mapping holds: token ids, or else text."""
    unknown = [key for key in prompt if key not in _KEYS]
    given = {key: prompt[key] for key in _KEYS if prompt.get(key) is not None}
    if unknown or not given:
        raise RequestError(f"the prompt has the keys {_names(prompt)}. Expected 'prompt' or 'prompt_token_ids'.")
    return given.get("prompt_token_ids", given.get("prompt"))


def _names(prompt: Mapping[str, Any]) -> str:
    """The first few keys of a mapping, for a message."""
    names = [shown(key) for key in islice(prompt, _KEYS_SHOWN + 1)]
    return f"[{', '.join(names if len(names) <= _KEYS_SHOWN else [*names[:-1], '…'])}]"


def _encoded(encoding: Mapping[str, Any]) -> list[list[Any]]:
    """The rows of what a tokenizer returned, without padding."""
    rows, mask = (_plain(encoding.get(name)) for name in ("input_ids", "attention_mask"))
    if not _is_list(rows):
        raise RequestError(f"input_ids are {shown(rows)}. Expected token ids or rows of them.")
    if len(rows) == 0 or not _is_list(rows[0]):
        rows, mask = [rows], None if mask is None else [mask]
    if mask is None:
        return [list(row) for row in rows]
    if not _is_list(mask) or [_length(row) for row in mask] != [_length(row) for row in rows]:
        raise RequestError("attention_mask has another shape than input_ids. Expected one number for each token.")
    return [
        [token for token, is_real in zip(row, real, strict=True) if is_real]
        for row, real in zip(rows, mask, strict=True)
    ]


def _plain(value: Any) -> Any:
    """An array or tensor as lists."""
    return value.tolist() if hasattr(value, "tolist") else value


def _length(row: Any) -> int:
    """Length of a row; -1 for what is none."""
    return len(row) if _is_list(row) else -1
