"""Self-distillation: the target writes the responses that its heads are trained on.

Responses are kept in a file of JSON lines after each batch: a header with the settings, then one line a document, in
order. An interrupted run continues after the last whole line. Seeds belong to documents, so the finished file is the
same as without the interruption.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from foretoken.core.checks import shown
from foretoken.core.errors import ConfigError, ModelError, RequestError
from foretoken.core.sampling_params import SamplingParams
from foretoken.core.token_ids import tokenizer_sha
from foretoken.files.bounded_reads import check_regular
from foretoken.training.data.encoding import NO_TOKENS, Encoder
from foretoken.training.data.records import Document

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from foretoken.entrypoints.llm import LLM
    from foretoken.training.data.records import Record

_BATCHES_A_CALL = 4  # prompts a call, in multiples of max_num_seqs: slots stay busy while long responses end
_PROMPTS_A_READ = 64
_FORMAT, _VERSION = "foretoken-self-distillation", 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillSettings:
    """Settings of the responses, besides target and prompts.

    Attributes:
        prompt_tokens: Number of first tokens of a plain text that form its prompt; other prompts are taken whole.
        max_new_tokens: Most tokens of a response.
        temperature: 0 for greedy decoding.
        seed: Seed of the first document; the i-th gets `seed + i`.

    Raises:
        ConfigError: When a number is out of range.
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


class SelfDistiller:
    """Makes documents of prompts and the target's own responses.

    Attributes:
        skipped: Number of records left out, by reason.
        num_resumed: Documents of the last call of `documents` that its file already held.
    """

    def __init__(
        self, llm: LLM, settings: DistillSettings, path: Path, *, max_num_seqs: int = 8, supervise_all: bool = False
    ) -> None:
        """Checks that prompts and responses fit the target.

        Args:
            llm: The target with its tokenizer; a drafter makes it faster and changes no response.
            settings: The settings of the responses.
            path: The file of responses.
            max_num_seqs: `max_num_seqs` of `llm`.
            supervise_all: Whether prompts count as labels too.

        Raises:
            ConfigError: When prompts and responses do not fit.
        """
        self._prompt_limit = llm.target.context_len - settings.max_new_tokens
        if settings.prompt_tokens > self._prompt_limit:
            raise ConfigError(
                f"prompts of {settings.prompt_tokens} tokens and responses of {settings.max_new_tokens} exceed the "
                f"context length {llm.target.context_len}. Lower prompt_tokens or max_new_tokens."
            )
        if llm.tokenizer is None:
            raise ConfigError("the target has no tokenizer. Expected one to read text with. Pass tokenizer to LLM.")
        self._llm, self._settings, self._path = llm, settings, path
        self._tokenizer: Any = llm.tokenizer
        self._call = max_num_seqs * _BATCHES_A_CALL
        self._supervise_all = supervise_all
        self._encoder = Encoder(self._tokenizer)
        self.skipped: Counter[str] = self._encoder.skipped
        self.num_resumed = 0

    def documents(self, records: Iterable[Record]) -> Iterator[tuple[Record, Document]]:
        """Yields documents in the order of the records; writes new ones to the file before they are yielded.

        A prompt is the start of a plain text, the prompt of a completion, or a conversation up to the last user turn
        that leaves room for the response. Only the response is supervised. An EOS that the target did not write is
        appended unsupervised.

        Raises:
            RequestError: When the file is of other settings, another target or other records, or cannot be written.
            ModelError: When the target fails.
        """
        stored = self._stored()
        self.num_resumed = len(stored)
        prompts = self._prompts(records)
        for index, (line, (record, prompt)) in enumerate(zip(stored, prompts, strict=False)):
            if line["prompt"] != prompt:
                raise RequestError(
                    f"'{self._path}': document {index} has another prompt than {record.where}. Expected the same data "
                    "as in the run to continue. Delete the file to begin anew."
                )
            yield record, self._document(prompt, line["response"])
        index = len(stored)
        while batch := list(islice(prompts, self._call)):
            lines = self._generated([prompt for _, prompt in batch], index)
            self._append("".join(json.dumps(line) + "\n" for line in lines))
            for (record, prompt), line in zip(batch, lines, strict=True):
                yield record, self._document(prompt, line["response"])
            index += len(batch)

    def _prompts(self, records: Iterable[Record]) -> Iterator[tuple[Record, list[int]]]:
        """Yields a prompt for each record that has one."""
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
        """Returns the prompt of a record, or the reason why there is none."""
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
        """Returns lines of the file for some prompts."""
        outputs = self._llm.generate(prompts, [self._settings.sampling(first + i) for i in range(len(prompts))])
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
        """Returns the first line: all settings that the responses depend on."""
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
            raise RequestError(f"'{self._path}' cannot be written: {err}. Choose another place.") from err
