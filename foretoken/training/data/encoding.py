"""Encodes records as documents with the target's tokenizer, many records a call."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from foretoken.core.errors import ConfigError, one_line
from foretoken.training.data.records import Document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from foretoken.training.data.records import Message, Record

_GENERATION_BLOCK = re.compile(r"\{%-?\s*generation\s*-?%\}")
NO_ASSISTANT = "conversations without an assistant turn"
REFUSED = "conversations that the chat template refuses"
DISAGREES = "conversations whose assistant turns cannot be told apart in the chat template's text"


class ChatEncoder:
    """Turns conversations into documents."""

    def __init__(self, tokenizer: Any) -> None:
        """Reads the chat template; raises `ConfigError` when the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise ConfigError(
                f"the tokenizer of '{tokenizer.name_or_path}' has no chat template, but the data holds conversations. "
                "Expected an instruction-tuned target. Use plain text, or prompts with completions."
            )
        self._tokenizer = tokenizer
        self._has_mask = tokenizer.is_fast and bool(_GENERATION_BLOCK.search(str(tokenizer.chat_template)))
        self._is_warned: set[str] = set()

    def documents(self, chats: Sequence[Sequence[Message]]) -> list[Document | str]:
        """Returns a document for each conversation, or the reason why there is none.

        Args:
            chats: Turns with `role` and `content`; those after the last assistant turn are left out.
        """
        return [self._by_mask(chat) for chat in chats] if self._has_mask else self._by_prefixes(chats)

    def prompt(self, messages: Sequence[Message], limit: int) -> list[int] | str:
        """Returns the longest fitting prompt, which ends where the assistant answers a user turn.

        Args:
            messages: Turns.
            limit: Most tokens.

        Returns:
            Token ids, or the reason why there is no prompt.
        """
        asked = [place + 1 for place, message in enumerate(messages) if message["role"] in ("user", "tool")]
        for end in reversed(asked):
            text = self._render(messages[:end], is_open=True)
            if text is None:
                return REFUSED
            tokens = list(self._encode([text])[0])
            if len(tokens) <= limit:
                return tokens
        return "prompts too long for the context" if asked else "conversations without a user turn"

    def _by_mask(self, chat: Sequence[Message]) -> Document | str:
        """Returns a document with the labels of the template's own mask."""
        turns = _to_last_assistant(chat)
        if not turns:
            return NO_ASSISTANT
        out = self._applied(
            turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True,
            tokenizer_kwargs={"verbose": False},
        )  # fmt: skip
        if out is None:
            return REFUSED
        flags = [bool(flag) for flag in out["assistant_masks"]]
        return Document(list(out["input_ids"]), flags) if any(flags) else NO_ASSISTANT

    def _by_prefixes(self, chats: Sequence[Sequence[Message]]) -> list[Document | str]:
        """Returns documents from rendered prefixes; encodes all texts of all conversations in one call."""
        rendered = [self._prefixes(chat) for chat in chats]
        texts = [text for parts in rendered if not isinstance(parts, str) for text in parts]
        encoded = iter(self._encode(texts))
        results: list[Document | str] = []
        for parts in rendered:
            if isinstance(parts, str):
                results.append(parts)
                continue
            whole, *prefixes = (next(encoded) for _ in parts)
            flags = [False] * len(whole)
            for before, upto in zip(prefixes[::2], prefixes[1::2], strict=True):
                start, end = _common(before, whole), _common(upto, whole)
                last_eos = max((i for i in range(start, end) if whole[i] == self._tokenizer.eos_token_id), default=None)
                end = end if last_eos is None else last_eos + 1
                flags[start:end] = [True] * (end - start)
            results.append(Document(whole, flags) if any(flags) else NO_ASSISTANT)
        return results

    def _prefixes(self, chat: Sequence[Message]) -> list[str] | str:
        """Returns the whole text and the prefixes up to start and end of every assistant turn, or a reason."""
        turns = _to_last_assistant(chat)
        if not turns:
            return NO_ASSISTANT
        whole = self._render(turns, is_open=False)
        if whole is None:
            return REFUSED
        texts = [whole]
        for place, message in enumerate(turns):
            if message["role"] != "assistant" or place == 0:
                continue  # without an earlier turn no prompt tells where the answer begins
            before = self._render(turns[:place], is_open=True)
            upto = self._render(turns[: place + 1], is_open=False)
            if before is None or upto is None or not (whole.startswith(before) and whole.startswith(upto)):
                self._warned(DISAGREES, "the template renders a turn differently when others follow it")
            else:
                texts += [before, upto]
        return texts if len(texts) > 1 else DISAGREES

    def _render(self, messages: Sequence[Message], *, is_open: bool) -> str | None:
        """Returns the template's text, with the start of an assistant turn if `is_open`; None if it refuses."""
        text = self._applied(list(messages), tokenize=False, add_generation_prompt=is_open)
        return None if text is None else str(text)

    def _applied(self, messages: list[Message], **options: Any) -> Any | None:
        """Applies the template; returns None, with a warning, if it refuses the messages."""
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as err:  # noqa: BLE001 - templates raise what they like
            self._warned(REFUSED, one_line(err))
            return None

    def _encode(self, texts: list[str]) -> list[list[int]]:
        """Returns token ids of rendered texts, without added special tokens."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return ids

    def _warned(self, reason: str, cause: str) -> str:
        """Returns the reason; logs it once, with its first cause."""
        if reason not in self._is_warned:
            self._is_warned.add(reason)
            logging.getLogger(__name__).warning("there are %s; these turns teach nothing: %s", reason, cause)
        return reason


def _to_last_assistant(chat: Sequence[Message]) -> list[Message]:
    last = max((place for place, message in enumerate(chat) if message["role"] == "assistant"), default=-1)
    return list(chat[: last + 1])


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    """Returns the length of the longest common prefix, without a token that reaches across the end of `left`."""
    for place, (a, b) in enumerate(zip(left, right, strict=False)):
        if a != b:
            return place
    return min(len(left), len(right))


_BATCH_RECORDS = 256
_BATCH_CHARACTERS = 4_000_000
NO_COMPLETION = "prompts without a completion"
NO_TOKENS = "records without a token"


class Encoder:
    """Encodes records.

    Attributes:
        skipped: Number of records left out, by reason.
        num_resumed: Documents of an earlier run; always 0 here.
    """

    num_resumed = 0

    def __init__(self, tokenizer: Any) -> None:
        """Takes the tokenizer; its chat template is read at the first conversation."""
        self._tokenizer = tokenizer
        self._chats: ChatEncoder | None = None
        self.skipped: Counter[str] = Counter()

    @property
    def chats(self) -> ChatEncoder:
        """The encoder of conversations; raises `ConfigError` if the tokenizer has no template."""
        if self._chats is None:
            self._chats = ChatEncoder(self._tokenizer)
        return self._chats

    def documents(self, records: Iterable[Record]) -> Iterator[tuple[Record, Document]]:
        """Yields documents, in order.

        Plain text is encoded as it is, all of it supervised. A prompt and its completion are encoded as one text;
        tokens that differ from the prompt's own encoding are supervised, that is the completion, with a token across
        the border.
        Conversations: see `ChatEncoder`.
        """
        for batch in _batches(records):
            yield from self._encoded(batch)

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        """Returns the tokens of texts, with the tokenizer's special tokens."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, verbose=False)["input_ids"]
        return ids

    def _encoded(self, batch: list[Record]) -> Iterator[tuple[Record, Document]]:
        """Encodes one batch, with one call of the tokenizer for each form of record."""
        chats = [record.messages for record in batch if record.messages is not None]
        conversations = iter(self.chats.documents(chats) if chats else [])
        texts = [record for record in batch if record.messages is None]
        whole = iter(self.token_ids([(record.prompt or "") + record.text for record in texts]))
        prompts = iter(self.token_ids([record.prompt for record in texts if record.prompt is not None]))
        for record in batch:
            document: Document | str
            if record.messages is not None:
                document = next(conversations)
            elif record.prompt is None:
                document = Document(next(whole))
            else:
                document = _completed(next(prompts), next(whole)) if record.text else _skip(whole, prompts)
            if isinstance(document, str) or not document.tokens:
                self.skipped[document if isinstance(document, str) else NO_TOKENS] += 1
            else:
                yield record, document


def _completed(prompt: list[int], whole: list[int]) -> Document:
    """Returns a document in which all but the prompt is supervised."""
    start = 0
    while start < min(len(prompt), len(whole)) and prompt[start] == whole[start]:
        start += 1
    return Document(whole, [place >= start for place in range(len(whole))])


def _skip(*encoded: Iterator[list[int]]) -> str:
    """Skips a prompt without anything to learn; returns the reason."""
    for each in encoded:
        next(each)
    return NO_COMPLETION


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Yields lists of records with bounded length and text."""
    batch: list[Record] = []
    characters = 0
    for record in records:
        batch.append(record)
        characters += len(record.text) + len(record.prompt or "")
        if len(batch) == _BATCH_RECORDS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
