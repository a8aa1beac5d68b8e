"""Encodes records as documents with the target's tokenizer, many records a call."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from foretoken.training.data.chats import ChatEncoder
from foretoken.training.data.document import Document

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from foretoken.training.data.records import Record

_BATCH_RECORDS = 256
_BATCH_CHARACTERS = 4_000_000
NO_COMPLETION = "prompts without a completion"
NO_TOKENS = "records without a token"


class Encoder:
    """Encodes records.

    Attributes:
        skipped: Records left out, by reason.
        num_resumed: Documents that an earlier run made; none here.
    """

    num_resumed = 0

    def __init__(self, tokenizer: Any) -> None:
        """Remembers the tokenizer; its chat template is looked at when a conversation comes."""
        self._tokenizer = tokenizer
        self._chats: ChatEncoder | None = None
        self.skipped: Counter[str] = Counter()

    @property
    def chats(self) -> ChatEncoder:
        """The encoder of conversations; raises `ConfigError` when the tokenizer has no template."""
        if self._chats is None:
            self._chats = ChatEncoder(self._tokenizer)
        return self._chats

    def documents(self, records: Iterable[Record]) -> Iterator[tuple[Record, Document]]:
        """Documents, in order.

        Plain text becomes what the tokenizer makes of it, all of it supervised. A prompt and its completion are encoded
        as one text; supervised is what differs from the prompt's own encoding, which is the completion, with a token
        that reaches over the border. Conversations: see `chats.py`.
        """
        for batch in _batches(records):
            yield from self._encoded(batch)

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        """Texts as the tokenizer encodes them, its special tokens included."""
        if not texts:
            return []
        ids: list[list[int]] = self._tokenizer(texts, verbose=False)["input_ids"]
        return ids

    def _encoded(self, batch: list[Record]) -> Iterator[tuple[Record, Document]]:
        """One batch: one call of the tokenizer for each form of record."""
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
    """A document of which all that is not the prompt is supervised."""
    start = 0
    while start < min(len(prompt), len(whole)) and prompt[start] == whole[start]:
        start += 1
    return Document(whole, [place >= start for place in range(len(whole))])


def _skip(*encoded: Iterator[list[int]]) -> str:
    """Leaves out a prompt that has nothing to learn."""
    for each in encoded:
        next(each)
    return NO_COMPLETION


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
    """Records in lists of bounded length and text."""
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
