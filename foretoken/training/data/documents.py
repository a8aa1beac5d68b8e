"""Makes documents of records: encodes them with the target's tokenizer, or lets the target write the responses.

Written responses are kept in a file of JSON lines after each batch: a header with the settings, then one line a
document, in order. An interrupted run continues after the last whole line. Seeds belong to documents, so the finished
file is the same as without the interruption.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError, RequestError, one_line
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_ids import tokenizer_sha
from foretoken.core.token_tree import common_prefix_len
from foretoken.files.bounded_reads import check_regular
from foretoken.training.data.corpus import Record
from foretoken.training.data.packed import Document, check_token

if TYPE_CHECKING:
    from foretoken.entrypoints.llm import LLM
    from foretoken.text.prompt_rows import Message

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
        """Returns for each conversation a document, or the reason why there is none.

        A document ends after the last assistant turn.
        """
        return [self._by_mask(chat) for chat in chats] if self._has_mask else self._by_prefixes(chats)

    def prompt(self, messages: Sequence[Message], limit: int) -> list[int] | str:
        """Returns the longest prompt of at most `limit` tokens that ends at a user turn, or the reason for none."""
        asked = [place + 1 for place, message in enumerate(messages) if message["role"] in ("user", "tool")]
        for end in reversed(asked):
            text = self._render(messages[:end], is_open=True)
            if text is None:
                return REFUSED
            tokens = list(_encode(self._tokenizer, [text], add_special_tokens=False)[0])
            if len(tokens) <= limit:
                return tokens
        return "prompts too long for the context" if asked else "conversations without a user turn"

    def _by_mask(self, chat: Sequence[Message]) -> Document | str:
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
        rendered = [self._prefixes(chat) for chat in chats]
        texts = [text for parts in rendered if not isinstance(parts, str) for text in parts]
        encoded = iter(_encode(self._tokenizer, texts, add_special_tokens=False))
        results: list[Document | str] = []
        for parts in rendered:
            if isinstance(parts, str):
                results.append(parts)
                continue
            whole, *prefixes = (next(encoded) for _ in parts)
            flags = [False] * len(whole)
            for before, upto in zip(prefixes[::2], prefixes[1::2], strict=True):
                start, end = common_prefix_len(before, whole), common_prefix_len(upto, whole)
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
                self._warn(DISAGREES, "the template renders a turn differently when others follow it")
            else:
                texts += [before, upto]
        return texts if len(texts) > 1 else DISAGREES

    def _render(self, messages: Sequence[Message], *, is_open: bool) -> str | None:
        text = self._applied(list(messages), tokenize=False, add_generation_prompt=is_open)
        return None if text is None else str(text)

    def _applied(self, messages: list[Message], **options: Any) -> Any | None:
        try:
            return self._tokenizer.apply_chat_template(messages, **options)
        except Exception as err:  # noqa: BLE001 - templates raise what they like
            self._warn(REFUSED, one_line(err))
            return None

    def _warn(self, reason: str, cause: str) -> None:
        if reason not in self._is_warned:
            self._is_warned.add(reason)
            logging.getLogger(__name__).warning("there are %s; these turns teach nothing: %s", reason, cause)


def _encode(tokenizer: Any, texts: list[str], **options: Any) -> list[list[int]]:
    return tokenizer(texts, verbose=False, **options)["input_ids"] if texts else []


def _to_last_assistant(chat: Sequence[Message]) -> list[Message]:
    last = max((place for place, message in enumerate(chat) if message["role"] == "assistant"), default=-1)
    return list(chat[: last + 1])


_BATCH_RECORDS = 256  # records for one call of the tokenizer; a choice: enough for its threads, little memory
_BATCH_CHARACTERS = 4_000_000  # a choice: bounds the memory of a batch of long records
NO_COMPLETION = "prompts without a completion"
NO_TOKENS = "records without a token"


class Encoder:
    """Encodes records; counts records left out, by reason. `num_resumed` and `num_waiting` are always 0 here."""

    num_resumed = num_waiting = 0

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.skipped: Counter[str] = Counter()

    @cached_property
    def chats(self) -> ChatEncoder:
        """The encoder of conversations; raises `ConfigError` if the tokenizer has no template."""
        return ChatEncoder(self._tokenizer)

    def documents(self, records: Iterable[Record]) -> Iterator[tuple[Record, Document]]:
        """Yields documents, in order.

        Plain text is encoded as it is, all of it supervised. A prompt and its completion are encoded as one text;
        tokens that differ from the prompt's own encoding are supervised, that is the completion, with a token across
        the border. For conversations see `ChatEncoder`.
        """
        for batch in _batches(records):
            yield from self._encoded(batch)

    def token_ids(self, texts: list[str]) -> list[list[int]]:
        """Returns the tokens of texts, with the tokenizer's special tokens."""
        return _encode(self._tokenizer, texts)

    def _encoded(self, batch: list[Record]) -> Iterator[tuple[Record, Document]]:
        chats = [record.messages for record in batch if record.messages is not None]
        conversations = iter(self.chats.documents(chats) if chats else [])
        texts = [record for record in batch if record.messages is None]
        whole = iter(self.token_ids([(record.prompt or "") + record.text for record in texts]))
        prompts = iter(self.token_ids([record.prompt for record in texts if record.prompt is not None]))
        for record in batch:
            found: Document | str
            if record.messages is not None:
                found = next(conversations)
            elif record.prompt is None:
                found = Document(next(whole))
            else:
                tokens = next(whole)
                start = common_prefix_len(next(prompts), tokens)
                found = Document(tokens, [place >= start for place in range(len(tokens))])
                found = found if record.text else NO_COMPLETION
            if isinstance(found, str) or not found.tokens:
                self.skipped[found if isinstance(found, str) else NO_TOKENS] += 1
            else:
                yield record, found


def _batches(records: Iterable[Record]) -> Iterator[list[Record]]:
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


_BATCHES_A_CALL = 4  # prompts a call, in multiples of max_num_seqs; a choice: slots stay busy while long responses end
_PROMPTS_A_READ = 64  # a choice: bounds the prompts in memory
_FORMAT, _VERSION = "foretoken-self-distillation", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """Settings of the responses, besides target and prompts; raises `ConfigError` for numbers out of range.

    The first `prompt_tokens` of a plain text form its prompt; other prompts are taken whole. Document i gets `seed +
    i`. Temperature 0 decodes greedily.
    """

    prompt_tokens: int = 64
    max_new_tokens: int = 256
    temperature: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.max_new_tokens < 1:
            raise ConfigError(
                f"prompt_tokens is {self.prompt_tokens}, max_new_tokens {self.max_new_tokens}. Expected at least 1."
            )
        self.sampling(0)

    def sampling(self, index: int) -> SamplingParams:
        """Returns the sampling parameters of a document's response."""
        return SamplingParams(temperature=self.temperature, seed=self.seed + index, max_tokens=self.max_new_tokens)


class _Responses:
    """Reports the responses of a call to a function, instead of showing a progress bar."""

    def __init__(self, tell: Callable[[int, int], None], total: int, **_: Any) -> None:
        self.n, self._total, self._tell = 0, total, tell

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, count: int) -> None:
        if count:
            self.n += count
            self._tell(self.n, self._total)


class SelfDistiller:
    """Makes documents of prompts and the target's own responses.

    `num_resumed` counts the documents that the file of responses already held, `num_waiting` those that the target has
    written and that are not yielded yet.
    """

    def __init__(
        self, llm: LLM, settings: DistillSettings, path: Path, *, max_num_seqs: int = 8, supervise_all: bool = False,
        on_responses: Callable[[int, int], None] | None = None,
    ) -> None:  # fmt: skip
        """Prepares responses of an `LLM` with a tokenizer; a drafter makes it faster and changes no response.

        `max_num_seqs` is that of `llm`. With `supervise_all` prompts count as labels too. `on_responses` hears how many
        of how many prompts of a call are answered, before its documents are yielded. Raises `ConfigError` when prompts
        and responses do not fit the target.
        """
        self._prompt_limit = llm.target.context_len - settings.max_new_tokens
        if settings.prompt_tokens > self._prompt_limit:
            raise ConfigError(
                f"prompts of {settings.prompt_tokens} tokens and responses of {settings.max_new_tokens} exceed the "
                f"context length {llm.target.context_len}. Lower prompt_tokens or max_new_tokens."
            )
        if llm.tokenizer is None:
            raise ConfigError("the target has no tokenizer. Expected one to encode prompts. Pass tokenizer to LLM.")
        self._llm, self._settings, self._path = llm, settings, path
        self._tokenizer: Any = llm.tokenizer
        self._call = max_num_seqs * _BATCHES_A_CALL
        self._supervise_all, self._on_responses = supervise_all, on_responses
        self._encoder = Encoder(self._tokenizer)
        self.skipped: Counter[str] = self._encoder.skipped
        self.num_resumed = self.num_waiting = 0

    def documents(self, records: Iterable[Record]) -> Iterator[tuple[Record, Document]]:
        """Yields documents in the order of the records; writes new ones to the file before they are yielded.

        Later turns of a record follow all first turns, and the target's own answers.

        A prompt is the start of a plain text, the prompt of a completion, or a conversation up to the last user turn
        that leaves room for the response. Only the response is supervised. An EOS that the target did not write is
        appended unsupervised. Raises `RequestError` when the file is of other settings, another target or other
        records, or cannot be written, `ModelError` when the target fails.
        """
        stored = deque(self._stored())
        self.num_resumed, index = len(stored), 0
        waiting = records
        while True:  # the first turns of all records, then the second turns, and so on
            prompts, later = self._prompts(waiting), list[Record]()
            while batch := list(islice(prompts, self._call)):
                known = [stored.popleft() for _ in batch[: len(stored)]]
                for number, ((record, prompt), line) in enumerate(zip(batch, known, strict=False), start=index):
                    if line["prompt"] != prompt:
                        raise RequestError(
                            f"'{self._path}': document {number} has another prompt than {record.where}. Expected the "
                            "same data as in the run to continue. Delete the file to begin anew."
                        )
                    yield self._finished(record, line, later)
                new = batch[len(known) :]
                if new:
                    lines = self._generated([prompt for _, prompt in new], index + len(known))
                    self._append("".join(json.dumps(line) + "\n" for line in lines))
                    self.num_waiting = len(new)
                    for (record, _), line in zip(new, lines, strict=True):
                        self.num_waiting -= 1
                        yield self._finished(record, line, later)
                index += len(batch)
            if not later:
                return
            waiting = later

    def _finished(self, record: Record, line: dict[str, Any], later: list[Record]) -> tuple[Record, Document]:
        """Returns a record's document; appends the record's next turn, if there is one, to `later`."""
        if record.later_turns:
            answer = str(self._tokenizer.decode(line["response"], skip_special_tokens=True)).strip()
            later.extend(filter(None, [record.followed(answer)]))
        return record, self._document(line["prompt"], line["response"])

    def _prompts(self, records: Iterable[Record]) -> Iterator[tuple[Record, list[int]]]:
        waiting = iter(records)
        while batch := list(islice(waiting, _PROMPTS_A_READ)):
            texts = [record.text if record.prompt is None else record.prompt for record in batch]
            encoded = self._encoder.token_ids([text or " " for text in texts])  # conversations have no text
            for record, tokens in zip(batch, encoded, strict=True):
                prompt = self._prompt(record, tokens)
                if isinstance(prompt, str):
                    self.skipped[prompt] += 1
                else:
                    yield record, prompt

    def _prompt(self, record: Record, tokens: list[int]) -> list[int] | str:
        if record.messages is not None:
            return self._encoder.chats.prompt(record.messages, self._prompt_limit)
        eos_id = self._tokenizer.eos_token_id
        if len(tokens) > 1 and tokens[-1] == eos_id:  # some tokenizers end every text with EOS
            tokens = tokens[:-1]
        if record.prompt is None:
            tokens = tokens[: self._settings.prompt_tokens]
        if len(tokens) > self._prompt_limit:
            return "prompts too long for the context"
        return tokens or NO_TOKENS

    def _generated(self, prompts: list[list[int]], first: int) -> list[dict[str, Any]]:
        check_token(max(map(max, prompts)), self._llm.target.vocab_size, "a prompt")
        params = [self._settings.sampling(first + i) for i in range(len(prompts))]
        bar: Any = False if self._on_responses is None else partial(_Responses, self._on_responses)
        outputs = self._llm.generate(prompts, params, use_tqdm=bar)
        lines = []
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True), start=first):
            done = output.outputs[0]
            if done.finish_reason not in ("stop", "length"):
                raise ModelError(f"the target ended document {index} with '{done.finish_reason}'. Expected a response.")
            lines.append({"index": index, "prompt": prompt, "response": done.token_ids, "finish": done.finish_reason})
        return lines

    def _document(self, prompt: list[int], response: list[int]) -> Document:
        tokens = [*prompt, *response]
        flags = [self._supervise_all] * len(prompt) + [True] * len(response)
        eos_id = self._tokenizer.eos_token_id
        if eos_id is not None and tokens[-1] != eos_id:
            tokens, flags = [*tokens, eos_id], [*flags, False]
        return Document(tokens, flags)

    def _header(self) -> dict[str, Any]:
        model = self._llm.target.model
        return {
            "format": _FORMAT,
            "version": _VERSION,
            "target": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "tokenizer_sha": tokenizer_sha(self._tokenizer),
            **asdict(self._settings),
        }

    def _stored(self) -> list[dict[str, Any]]:
        """Reads the lines of an earlier run; creates the file if missing, and cuts off an unfinished line."""
        try:
            if self._path.exists():
                check_regular(self._path, error=RequestError)
            data = self._path.read_bytes() if self._path.exists() else b""
        except OSError as err:
            raise RequestError(f"'{self._path}' cannot be read: {err}. Mend or delete it.") from err
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:
            self._append(json.dumps(self._header()) + "\n", size=0)
            return []
        try:
            header, *lines = (json.loads(line) for line in whole.splitlines())
            is_in_order = all(
                line["index"] == i and line["prompt"] and "response" in line for i, line in enumerate(lines)
            )
        except (ValueError, KeyError, TypeError) as err:
            raise RequestError(f"'{self._path}' is damaged: {err}. Delete it to begin anew.") from err
        if not isinstance(header, dict) or not is_in_order:
            raise RequestError(f"'{self._path}' is damaged: its lines are not in order. Delete it to begin anew.")
        wanted = self._header()
        differing = [key for key in wanted if header.get(key) != wanted[key]]
        if differing:
            found = ", ".join(f"{key} {shown(header.get(key))} instead of {shown(wanted[key])}" for key in differing)
            raise RequestError(f"'{self._path}' was made with {found}. Delete it, or go on with the same settings.")
        if len(whole) < len(data):
            self._append("", size=len(whole))
        return lines

    def _append(self, text: str, *, size: int | None = None) -> None:
        """Writes whole lines to disk at once; first cuts the file to `size` bytes."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab", buffering=0) as file:
                if size is not None:
                    file.truncate(size)
                if file.write(text.encode()) != len(text.encode()):
                    raise OSError("the disk is full")
                os.fsync(file.fileno())
        except OSError as err:
            raise RequestError(f"'{self._path}' cannot be written: {err}. Choose another path.") from err
