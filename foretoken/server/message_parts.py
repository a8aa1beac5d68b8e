"""Splits the text of an answer into thoughts, content and tool calls, whole or piece by piece."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from foretoken.server.tools import FORCED, Tags, ToolFormat, ToolUse, thinking_tags, tool_format
from foretoken.server.xml_calls import KnownTools, Schemas

if TYPE_CHECKING:
    from foretoken.entrypoints.llm import LLM
    from foretoken.server.call_syntax import ReadCalls

_LONGEST_PIECE = 4096  # characters that are read at once; a choice: failed attempts copy no more
_MOST_REREAD = 1 << 23  # characters of one message that are read again; a choice: bounds the work of hostile texts
_MOST_SPACES = 64  # white space that may precede the opening tag of thoughts; a choice


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageForm:
    """Says how to read the text of one answer.

    Attributes:
        tags: The tags around thoughts; None for an answer without thoughts.
        is_thinking: Whether the prompt already contains the opening tag.
        calls: The format of tool calls; None for an answer without calls.
        schemas: The JSON schema of each tool's parameters, by the tool's name.
        forced: The named tool; the whole answer is its arguments. None if the request names no tool.
        is_parallel: Whether an answer may have several calls.
        has_special_markers: Whether a marker of calls or thoughts is a special token, which decoded text omits.
    """

    tags: Tags | None = None
    is_thinking: bool = False
    calls: ToolFormat | None = None
    schemas: Schemas = field(default_factory=dict)
    forced: str | None = None
    is_parallel: bool = True
    has_special_markers: bool = False
    decode: Callable[[Sequence[int]], str] = lambda _: ""

    def num_thoughts(self, token_ids: Sequence[int]) -> int:
        """Returns the number of tokens in the thoughts of an answer, with the tokens of both tags."""
        if self.tags is None or not (self.is_certain or self.decode(token_ids).lstrip().startswith(self.tags.begin)):
            return 0
        end, most = self.tags.end, len(token_ids)
        return bisect_left(range(most), True, key=lambda count: end in self.decode(token_ids[:count]))

    @property
    def is_certain(self) -> bool:
        """Whether the text begins with thoughts even without the opening tag."""
        return self.is_thinking or (self.tags is not None and self.tags.is_certain)

    @property
    def thoughts(self) -> tuple[str, str] | None:
        """The opening and closing tag for `StructuredOutputsParams.reasoning`; None without thoughts."""
        return None if self.tags is None else ("" if self.is_certain else self.tags.begin, self.tags.end)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFormats:
    """The formats in which a model writes calls and thoughts; see `MessageForm`."""

    calls: ToolFormat | None = None
    tags: Tags | None = None
    has_special_markers: bool = False
    decode: Callable[[Sequence[int]], str] = lambda _: ""

    @classmethod
    def of_llm(
        cls, llm: LLM, template: str | None, *, tool_parser: str = "auto", reasoning_parser: str = "auto"
    ) -> AnswerFormats:
        """Returns the formats of a model and its template; raises `ConfigError` for an unknown name of a parser."""
        tokenizer = llm.tokenizer
        own = template or getattr(tokenizer, "chat_template", None) or ""
        source = own if isinstance(own, str) else "\n".join(map(str, own.values()))
        calls, tags = tool_format(tool_parser, source), thinking_tags(reasoning_parser, source)
        tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in tokens if getattr(token, "special", False)}
        markers = {*(calls.markers if calls else ()), *(tags[1:3] if tags else ())}
        return cls(calls=calls, tags=tags, has_special_markers=bool(special & markers), decode=llm.decode)

    def __str__(self) -> str:
        """The names of both parsers, as the options of `serve` take them."""
        calls, thoughts = self.calls and self.calls.names[0], self.tags and self.tags.names[0]
        return f"tool calls {calls or 'none'}, thoughts {thoughts or 'none'}"

    def form(self, begun: str, tools: ToolUse | None, *, is_continued: bool = False) -> MessageForm | None:
        """Returns how to read an answer; None if all text is content.

        Args:
            begun: The assistant's part of the prompt. Its last tag says whether thoughts are open or over.
            tools: The tools of the request.
            is_continued: Whether the answer goes on with text of the prompt, so that it cannot begin with thoughts.
        """
        tags, is_thinking = self.tags, False
        if tags is not None:
            begin, end = begun.rfind(tags.begin), begun.rfind(tags.end)
            is_thinking = begin > end
            tags = tags if is_thinking or (end < 0 and not is_continued) else None
        use = tools if tools is not None and tools.choice != "none" else None
        calls = None if use is None else FORCED if use.choice == "required" else self.calls
        if tags is None and calls is None:
            return None
        return MessageForm(
            tags=tags, is_thinking=is_thinking, calls=calls,
            schemas=use.schemas if use else {}, forced=use.forced if use else None,
            is_parallel=use is None or use.is_parallel, has_special_markers=self.has_special_markers,
            decode=self.decode,
        )  # fmt: skip


@dataclass(slots=True)
class MessageParts:
    """The parts that a piece of text adds to a message; calls: in OpenAI's form for deltas of a stream."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)

    def delta(self) -> dict[str, Any]:
        """Returns these parts as the delta of a stream."""
        thoughts = {"reasoning_content": self.reasoning, "reasoning": self.reasoning} if self.reasoning else {}
        content = {"content": self.content} if self.content else {}
        return {**thoughts, **content, **({"tool_calls": self.calls} if self.calls else {})}

    def message(self) -> dict[str, Any]:
        """Returns these parts as a whole message; content is null for a message with calls alone."""
        calls = [{key: value for key, value in call.items() if key != "index"} for call in self.calls]
        content = self.content or (None if calls else "")
        return {**self.delta(), "content": content, **({"tool_calls": calls} if calls else {})}


class MessageReader:
    """Reads the text of one message piece by piece.

    Any division into pieces gives the same message. Text that may begin a call or end thoughts is held back until more
    text decides. A call is returned whole. If a text does not parse as a call, its marker is content, and the text
    behind the marker is read again. Time is linear in the text.
    """

    def __init__(self, form: MessageForm) -> None:
        self._form, self._rest, self._mark = form, "", ""
        self._calls, self._tags = form.calls or ToolFormat(), form.tags or Tags()
        self._unread: deque[str] = deque()
        self._num_reread = 0
        self._tools = KnownTools(form.schemas)
        self._thoughts, self._content = _Spaced(is_begun=False), _Spaced(is_begun=True)
        self._held: list[str] = []
        self._stray = ""  # a closing marker that may be doubled
        self.num_calls = 0
        self._step = self._find_thoughts if form.tags is not None else self._after_thoughts()
        self._marker = re.compile("|".join(map(re.escape, self._calls.markers)) or "(?!)")

    def push(self, text: str) -> MessageParts:
        """Reads the next piece of text and returns the parts it adds."""
        parts = MessageParts()
        self._unread.append(text)
        while self._unread:
            piece = self._unread.popleft()
            if len(piece) > _LONGEST_PIECE:
                self._unread.appendleft(piece[_LONGEST_PIECE:])
            self._rest += piece[:_LONGEST_PIECE]
            while self._step(parts):
                pass
        return parts

    def finish(self) -> MessageParts:
        """Ends the text and returns the parts that were held back."""
        parts = MessageParts()
        if self._step == self._find_thoughts:
            self._step = self._read_thoughts if self._form.is_certain else self._after_thoughts()
            parts = self.push("")
        while self._step == self._read_call:
            self._end_call(parts, self._reader.finish())
            parts = joined(parts, self.push(""))
        if self._step == self._read_thoughts:
            parts.reasoning += self._thoughts.add(self._rest)
        else:
            parts.content += self._content.add(self._rest)
        self._rest = ""
        if not self.num_calls:
            parts.content += self._content.flush()
        return parts

    def _after_thoughts(self) -> Any:
        return self._read_edge if self._form.forced is None else self._read_arguments

    def _find_thoughts(self, _: MessageParts) -> bool:
        begin, text = self._tags.begin, self._rest.lstrip()
        is_far = len(self._rest) - len(text) > _MOST_SPACES
        if not is_far and text.startswith(begin):
            self._rest, self._step = text[len(begin) :], self._read_thoughts
        elif not is_far and begin.startswith(text):
            return False
        else:
            self._step = self._read_thoughts if self._form.is_certain else self._after_thoughts()
        return True

    def _read_thoughts(self, parts: MessageParts) -> bool:
        thoughts, end, rest = self._rest.partition(self._tags.end)
        if not end:
            thoughts, rest = _cut(self._rest, (self._tags.end,))
        parts.reasoning += self._thoughts.add(thoughts)
        self._rest = rest
        if end:
            self._step, self._content = self._after_thoughts(), _Spaced(is_begun=False)
        return bool(end)

    def _read_edge(self, parts: MessageParts) -> bool:
        """Reads the start of the text, or what follows a call: another call without a marker, or a doubled marker."""
        form = self._calls
        if not (form.bare or self._stray):
            self._step = self._read_content
            return True
        text = self._rest.lstrip(form.between + " \t\r\n")
        parts.content += self._content.add(self._rest[: len(self._rest) - len(text)], is_space=True)
        self._rest = text
        if not text or (self._stray and self._stray.startswith(text) and text != self._stray):
            return False
        if self._stray and text.startswith(self._stray):
            self._rest = text[len(self._stray) :]
        elif form.bare and text[0] == form.bare:
            self._begin_call("")
        else:
            self._step = self._read_content
        return True

    def _read_content(self, parts: MessageParts) -> bool:
        found = self._marker.search(self._rest)
        if found is None:
            text, self._rest = _cut(self._rest, self._calls.markers)
            parts.content += self._content.add(text)
            return False
        parts.content += self._content.add(self._rest[: found.start()])
        self._rest = self._rest[found.end() :]
        if found[0] in self._calls.opens:
            self._begin_call(found[0])
        elif self._calls.bare:
            self._step = self._read_edge
        return True

    def _begin_call(self, mark: str) -> None:
        self._mark, self._held, self._step = mark, [], self._read_call
        self._reader = self._calls.reader(mark, self._tools)

    def _read_call(self, parts: MessageParts) -> bool:
        piece, self._rest = self._rest, ""
        self._held.append(piece)
        found = self._reader.feed(piece)
        if found is not None:
            self._end_call(parts, found)
        return found is not None

    def _end_call(self, parts: MessageParts, found: ReadCalls) -> None:
        """Adds the calls, or the text that turned out to be none; the text behind is read next."""
        form, text = self._calls, "".join(self._held)
        is_certain = bool(self._mark) and self._mark not in form.weak
        calls, end = found.calls, found.end
        if calls and not (is_certain or all(call.name in self._form.schemas for call in calls)):
            calls, end = (), 0
        if calls:
            self._content.drop()
            for call in calls:
                self._add_call(parts, call.name, call.arguments)
            self._stray, self._step = form.opens.get(self._mark, ""), self._read_edge
            self._stray = "" if self._mark in form.weak else self._stray
        else:
            self._num_reread += len(text) - end
            end = end if self._num_reread <= _MOST_REREAD else len(text)
            parts.content += self._content.add(self._mark + text[:end])
            self._step = self._read_content
        self._unread.appendleft(text[end:] + self._rest)
        self._rest = ""

    def _read_arguments(self, parts: MessageParts) -> bool:
        text, self._rest = self._rest, ""
        if self.num_calls and text:
            parts.calls.append({"index": 0, "function": {"arguments": text}})
        elif text.lstrip():
            self._add_call(parts, self._form.forced or "", text.lstrip())
        return False

    def _add_call(self, parts: MessageParts, name: str, arguments: str) -> None:
        if self.num_calls and not self._form.is_parallel:
            return
        call = {"id": self._calls.new_id(), "type": "function", "function": {"name": name, "arguments": arguments}}
        parts.calls.append({"index": self.num_calls, **call})
        self.num_calls += 1


def whole_message(form: MessageForm, text: str) -> MessageParts:
    """Returns the parts of an answer's whole text."""
    reader = MessageReader(form)
    return joined(reader.push(text), reader.finish())


def joined(first: MessageParts, second: MessageParts) -> MessageParts:
    """Returns the parts of two consecutive pieces as one."""
    return MessageParts(first.reasoning + second.reasoning, first.content + second.content, first.calls + second.calls)


class _Spaced:
    """Holds back white space at the end of a text until more text follows."""

    def __init__(self, *, is_begun: bool) -> None:
        self._spaces: list[str] = []
        self._is_begun = is_begun

    def add(self, text: str, *, is_space: bool = False) -> str:
        """Returns all text up to the last visible character; is_space: whether all of `text` is white space."""
        body = "" if is_space else text.rstrip()
        if not body:
            self._spaces.append(text)
            return ""
        shown = "".join(self._spaces) + body if self._is_begun else body.lstrip()
        self._spaces, self._is_begun = [text[len(body) :]], True
        return shown

    def drop(self) -> None:
        self._spaces = []

    def flush(self) -> str:
        shown = "".join(self._spaces) if self._is_begun else ""
        self._spaces = []
        return shown


def _cut(text: str, markers: tuple[str, ...]) -> tuple[str, str]:
    """Splits a text before its longest end that may begin a marker."""
    most = max(map(len, markers), default=1) - 1
    for at in range(max(0, len(text) - most), len(text)):
        if any(marker.startswith(text[at:]) for marker in markers):
            return text[:at], text[at:]
    return text, ""
