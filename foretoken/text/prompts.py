"""Reads prompts in all their forms, and turns them into checked token ids."""

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
    """Raises `ConfigError` unless `get_vocab` of a tokenizer, if it exists, returns tokens with their ids."""
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
    """Returns ids that the tokenizer lacks; many models pad their vocabulary to a round number of rows.

    Args:
        tokenizer: A transformers tokenizer. None, or a tokenizer without `get_vocab`, has every id.
        target: The runner; its end-of-sequence ids always exist.

    Returns:
        (U,) int64 on the target's device, or None without such ids.
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
    """Further keys of a prompt; see `LLM.generate`."""

    prediction: str | Sequence[int]
    cache_salt: str
    speculative: Mapping[str, Any]


class TextPrompt(_Options):
    """A prompt as text."""

    prompt: str


class TokensPrompt(_Options):
    """A prompt as token ids, optionally with its text."""

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
    """A checked prompt.

    Attributes:
        text: The text of a text prompt; None for token ids.
        token_ids: At least one token.
        prediction: Token ids that the output probably repeats in part; None for none.
        cache_salt: See `foretoken.drafters.base.DraftRequest`.
        max_nodes: Most nodes of a tree, root included, so 1 for no drafts; None for no limit.
    """

    text: str | None
    token_ids: list[int]
    prediction: list[int] | None
    cache_salt: str | None
    max_nodes: int | None = None


def split_prompts(prompts: Any) -> list[Any]:
    """Returns a list of prompts from one or several prompts.

    Args:
        prompts: One prompt, or a list, tuple, array or tensor of prompts, or the output of a tokenizer (`input_ids`,
            with `attention_mask` for padded rows).

    Returns:
        Prompts, not checked yet.

    Raises:
        RequestError: For anything else.
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
        self._codec, self._vocab_size, self._context_len = codec, vocab_size, context_len

    def read(self, prompt: Any) -> ReadPrompt:
        """Returns a prompt as token ids, with its other keys.

        Raises:
            RequestError: When a part has an unknown form, is empty or too long, is text without a tokenizer, or holds
                ids that do not exist.
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
        ids = self._token_ids(given, "the prediction", "the prediction is {}. Expected text or a list of token ids.")
        if len(ids) > self._context_len:
            raise RequestError(
                f"the prediction has {len(ids)} tokens. Expected at most {self._context_len}, the context length. "
                "Shorten it."
            )
        return ids

    def _token_ids(self, given: Any, where: str, other: str) -> list[int]:
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
        """Returns the token ids of text; a prompt gets the special tokens that the tokenizer adds."""
        if self._codec is None:
            raise RequestError(f"{where} is text but the model has no tokenizer. Pass token ids.")
        check_text(where, text)
        if where == "the prompt":
            self._codec.check_length(text, where, self._context_len - 1, "one less than the context length")
            return self._codec.encode(text, where)
        self._codec.check_length(text, where, self._context_len, "the context length")
        return self._codec.encode(text, where, add_special_tokens=False)


def _salt(given: Any) -> str:
    check_text("cache_salt", given)
    if not 0 < len(given) <= _LONGEST_SALT:
        raise RequestError(f"cache_salt has {len(given)} characters. Expected 1 to {_LONGEST_SALT}, or None.")
    return str(given)


def _max_nodes(speculative: Any) -> int | None:
    """Returns the most nodes of a request's trees by its checked `speculative`; None for no limit."""
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
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)


def _value(prompt: Mapping[str, Any]) -> Any:
    """Returns the token ids of a mapping, else its text."""
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
    """Returns the first keys of a mapping, for a message."""
    names = [shown(key) for key in islice(prompt, _KEYS_SHOWN + 1)]
    return f"[{', '.join(names if len(names) <= _KEYS_SHOWN else [*names[:-1], '…'])}]"


def _encoded(encoding: Mapping[str, Any]) -> list[list[Any]]:
    """Returns the rows of a tokenizer's output, without padding."""
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
    return value.tolist() if hasattr(value, "tolist") else value


def _length(row: Any) -> int:
    """Returns the length of a row; -1 for other values."""
    return len(row) if _is_list(row) else -1
