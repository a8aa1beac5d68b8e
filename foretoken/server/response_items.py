"""The output items of `/v1/responses` (thoughts, messages, calls) and the events of their stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from foretoken.server.message_parts import MessageParts

# For each type of item: the prefix of its id, and the name of its text in events.
_TYPES = {
    "reasoning": ("rs", "reasoning_text"), "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}  # fmt: skip


class OutputItems:
    """Builds the output items of a response; the last item is open until `close`.

    Attributes:
        done: The closed items.
    """

    def __init__(self, name: str) -> None:
        """Starts without items; name: a unique part of every item's id."""
        self._name, self._fields, self._texts, self._logprobs = name, dict[str, Any](), list[str](), list[Any]()
        self._waiting: list[Any] = []  # log-probabilities of tokens whose text is held back
        self.done: list[dict[str, Any]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is no item, closed or open."""
        return not self.done and not self._fields

    def add_parts(self, parts: MessageParts, logprobs: Sequence[Any]) -> list[dict[str, Any]]:
        """Adds the parts of a text and returns the events; `logprobs` go to the message that is open or comes next."""
        self._waiting += logprobs
        events = self.add("reasoning", parts.reasoning) if parts.reasoning else []
        if parts.content:
            events += self.add("message", parts.content, self._taken())
        for call in parts.calls:
            named = {"call_id": call["id"], "name": call["function"]["name"]} if "id" in call else {}
            events += self.add("function_call", call["function"]["arguments"], **named)
        return events

    def add(self, kind: str, text: str, logprobs: Sequence[Any] = (), **named: str) -> list[dict[str, Any]]:
        """Adds text to the open item, or to a new one, and returns the events.

        Args:
            kind: The type of the item. An open item of another type is closed first.
            text: The text to add.
            logprobs: Log-probabilities of its tokens.
            named: `call_id` and `name`, which begin a new call.
        """
        events = []
        if named or self._fields.get("type") != kind:
            events = self.close("completed")
            begin = f"{_TYPES[kind][0]}_{self._name}"
            self._fields = {"id": f"{begin}_{len(self.done)}" if self.done else begin, "type": kind, **named}
            item = {**self._item("in_progress"), **({} if kind == "function_call" else {"content": []})}
            events.append({"type": "response.output_item.added", "output_index": len(self.done), "item": item})
            if kind != "function_call":
                events.append(self._event("response.content_part.added", part=self._part()))
        self._texts.append(text)
        self._logprobs += logprobs
        if text or logprobs:
            told = {"logprobs": list(logprobs)} if kind == "message" else {}
            events.append(self._event(f"response.{_TYPES[kind][1]}.delta", delta=text, **told))
        return events

    def close(self, status: str) -> list[dict[str, Any]]:
        """Closes the open item, if any, and returns the events."""
        if not self._fields:
            return []
        kind = self._fields["type"]
        events = self.add(kind, "", self._taken()) if kind == "message" else []
        item = self._item(status)
        if kind == "function_call":
            told = {"arguments": item["arguments"], "name": item["name"]}
            ends = []
        else:
            part = self._part()
            told = {key: part[key] for key in ("text", "logprobs") if key in part}
            ends = [self._event("response.content_part.done", part=part)]
        events += [self._event(f"response.{_TYPES[kind][1]}.done", **told), *ends]
        events.append({"type": "response.output_item.done", "output_index": len(self.done), "item": item})
        self.done.append(item)
        self._fields, self._texts, self._logprobs = {}, [], []
        return events

    def _taken(self) -> list[Any]:
        """Returns the log-probabilities that wait for a message, and forgets them."""
        taken, self._waiting = self._waiting, []
        return taken

    def _item(self, status: str) -> dict[str, Any]:
        """Returns the open item with a status."""
        item = {**self._fields, "status": status}
        if item["type"] == "function_call":
            return {**item, "arguments": "".join(self._texts)}
        return {**item, **({"role": "assistant"} if item["type"] == "message" else {"summary": []}), "content": [
            self._part()
        ]}  # fmt: skip

    def _part(self) -> dict[str, Any]:
        """Returns the single content part of the open item."""
        text = {"type": _TYPES[self._fields["type"]][1], "text": "".join(self._texts)}
        return text if self._fields["type"] == "reasoning" else {**text, "annotations": [], "logprobs": self._logprobs}

    def _event(self, kind: str, **more: Any) -> dict[str, Any]:
        """Returns an event about the open item's text."""
        content = {} if self._fields["type"] == "function_call" else {"content_index": 0}
        return {"type": kind, "item_id": self._fields["id"], "output_index": len(self.done), **content, **more}
