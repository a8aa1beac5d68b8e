"""The forms in which prompts come, and turning each into checked token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from numbers import Integral
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import torch
from torch import Tensor

from foretoken.core.checks import check_boolean, check_integer, check_text, checked_token_ids, shown
from foretoken.core.errors import ConfigError, RequestError, foreign_errors_as, one_line

if TYPE_CHECKING:
    from foretoken.runner.runner import Runner
    from foretoken.text.codec import Codec


def check_vocabulary(tokenizer: Any) -> None:
    """Refuses a tokenizer whose `get_vocab`, where it has one, gives anything but tokens and their ids.

    Raises:
        ConfigError: Naming what it gives.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return
    with foreign_errors_as(
        ConfigError,
        lambda err: (
            f"get_vocab of the tokenizer fails: {type(err).__name__}: {one_line(err)}. Expected a mapping of tokens "
            "to ids."
        ),
    ):
        values = list(tokenizer.get_vocab().values())
    foreign = [value for value in values if not isinstance(value, Integral) or isinstance(value, bool)]
    if foreign:
        raise ConfigError(
            f"a value in get_vocab of the tokenizer is {shown(foreign[0])}. Expected a mapping of tokens to ids."
        )


def ids_without_token(tokenizer: Any, target: Runner) -> Tensor | None:
    """Ids that the tokenizer does not have: many models pad their vocabulary to a round number of rows.

    Args:
        tokenizer: A transformers tokenizer; None, or one without a vocabulary to look at, knows every id.
        target: The runner; its end-of-sequence ids always count as known.

    Returns:
        (U,) int64 on the target's device, or None when there are none.
    """
    if not hasattr(tokenizer, "get_vocab"):
        return None
    is_unknown = torch.ones(target.vocab_size, dtype=torch.bool)
    known = [token for token in tokenizer.get_vocab().values() if 0 <= token < target.vocab_size]
    is_unknown[[*known, *target.model.eos_ids]] = False
    unknown = is_unknown.nonzero()[:, 0]
    return unknown.to(target.device) if len(unknown) else None


Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt` or `prompt_token_ids`, and perhaps some of `prediction`, `cache_salt` and
`speculative`."""


class _Options(TypedDict, total=False):
    """What a prompt may bring along; see `LLM.generate`."""

    prediction: str | Sequence[int]
    cache_salt: str
    speculative: Mapping[str, Any]


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Options):
    """A prompt as token ids, and perhaps the text that they stand for."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]


_KEYS = ("prompt", "prompt_token_ids")
_MEDIA_KEYS = ("multi_modal_data", "multi_modal_uuids", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds")
_MORE_KEYS = ("prediction", "cache_salt", "speculative")
_SPECULATIVE_KEYS = ("enabled", "max_nodes")
_KEYS_SHOWN = 4
_LONGEST_SALT = 1024  # characters


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadPrompt:
    """A prompt whose parts have been checked.

    Attributes:
        text: As it was given, where that is text; None for token ids, which nobody has to decode.
        token_ids: At least one.
        prediction: Token ids that the output probably repeats in part; None without any.
        cache_salt: See `foretoken.drafters.base.DraftRequest`.
        max_nodes: Most nodes of its trees, root included, so 1 for no drafts; None for no bound of its own.
    """

    text: str | None
    token_ids: list[int]
    prediction: list[int] | None
    cache_salt: str | None
    max_nodes: int | None = None


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

    def __init__(self, codec: Codec | None, vocab_size: int, context_len: int) -> None:
        """Takes the tokenizer, where there is one; vocab_size: V; context_len: most tokens of a sequence."""
        self._codec, self._vocab_size, self._context_len = codec, vocab_size, context_len

    def read(self, prompt: Any) -> ReadPrompt:
        """A prompt as token ids, with what came along with it.

        Raises:
            RequestError: When a part is of no known form, empty, text without a tokenizer, too long, or holds ids that
                do not exist.
        """
        more = prompt if isinstance(prompt, Mapping) else {}
        given = _value(prompt) if isinstance(prompt, Mapping) else prompt
        ids = self._token_ids(given, "the prompt", "a prompt is {}. Expected text, a list of token ids or a mapping.")
        text = more.get("prompt") if isinstance(prompt, Mapping) else prompt
        prediction, salt = more.get("prediction"), more.get("cache_salt")
        return ReadPrompt(
            text=text if isinstance(text, str) else None,
            token_ids=ids,
            prediction=None if prediction is None else self._prediction(prediction),
            cache_salt=None if salt is None else _salt(salt),
            max_nodes=_max_nodes(more.get("speculative")),
        )

    def _prediction(self, given: Any) -> list[int]:
        """A prediction as token ids."""
        ids = self._token_ids(given, "the prediction", "the prediction is {}. Expected text or a list of token ids.")
        if len(ids) > self._context_len:
            raise RequestError(
                f"the prediction has {len(ids)} tokens. Expected at most {self._context_len}, the context length. "
                "Shorten it."
            )
        return ids

    def _token_ids(self, given: Any, where: str, other: str) -> list[int]:
        """Text or ids as checked ids.

        Args:
            given: In any form.
            where: Names it in messages.
            other: What to say of something else, with a place for its type.
        """
        if hasattr(given, "tolist"):
            given = given.tolist()
        if isinstance(given, str):
            ids: Sequence[Any] = self._encode(given, where)
        elif _is_list(given):
            ids = given
        else:
            raise RequestError(other.format(type(given).__name__))
        if not len(ids):
            advice = "" if where == "the prompt" else " Leave it out."
            raise RequestError(f"{where} is empty. Expected at least one token.{advice}")
        return checked_token_ids(ids, self._vocab_size, where)

    def _encode(self, text: str, where: str) -> list[int]:
        """Token ids of text; a prompt's with the special tokens that the tokenizer adds."""
        if self._codec is None:
            raise RequestError(f"{where} is text but the model has no tokenizer. Pass token ids.")
        check_text(where, text)
        if where == "the prompt":
            self._codec.check_length(text, where, self._context_len - 1, "one less than the context length")
            return self._codec.encode(text, where)
        self._codec.check_length(text, where, self._context_len, "the context length")
        return self._codec.encode(text, where, add_special_tokens=False)


def _salt(given: Any) -> str:
    """A checked cache salt."""
    check_text("cache_salt", given)
    if not 0 < len(given) <= _LONGEST_SALT:
        raise RequestError(f"cache_salt has {len(given)} characters. Expected 1 to {_LONGEST_SALT}, or None.")
    return str(given)


def _max_nodes(speculative: Any) -> int | None:
    """Most nodes of a request's trees by its `speculative`, checked; None for no bound."""
    if speculative is None:
        return None
    if not isinstance(speculative, Mapping) or not set(speculative) <= set(_SPECULATIVE_KEYS):
        raise RequestError(
            f"speculative is {shown(speculative)}. Expected a mapping with 'enabled', True or False, or 'max_nodes', "
            "most nodes of a tree, or both."
        )
    enabled, most = speculative.get("enabled"), speculative.get("max_nodes")
    if enabled is not None:
        check_boolean("speculative['enabled']", enabled)
    if most is not None:
        check_integer("speculative['max_nodes']", most, 1)
    return 1 if enabled is not None and not enabled else None if most is None else int(most)


def _is_list(value: Any) -> bool:
    """Whether a value is a list, tuple or range, and not text or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _value(prompt: Mapping[str, Any]) -> Any:
    """What a mapping holds: token ids, or else text."""
    for key in _MEDIA_KEYS:
        if prompt.get(key):
            raise RequestError(f"the prompt has {key}, which is not supported. Expected text or token ids alone.")
    unknown = [key for key in prompt if key not in (*_KEYS, *_MORE_KEYS, *_MEDIA_KEYS)]
    given = {key: prompt[key] for key in _KEYS if prompt.get(key) is not None}
    if unknown or not given:
        raise RequestError(
            f"the prompt has the keys {_names(prompt)}. Expected 'prompt' or 'prompt_token_ids', and perhaps "
            "'prediction', 'cache_salt' and 'speculative'."
        )
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
