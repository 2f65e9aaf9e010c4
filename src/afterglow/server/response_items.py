"""Items of /v1/responses: as messages on their way in, and made out of parts, with their events, on their way out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from afterglow.chat.parts import CallPart, Part, Reasoning, Text
from afterglow.server.errors import invalid
from afterglow.server.types.chat import plain
from afterglow.server.types.response import (
    CallItem,
    CallOutputItem,
    InputImage,
    Item,
    MessageItem,
    MessagePart,
    ReasoningItem,
)

Event: TypeAlias = dict[str, Any]
Message: TypeAlias = dict[str, Any]


def messages_of(items: str | list[Item]) -> list[Message]:
    """The input as messages. What the assistant thought, said and called in one go is one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _turn(messages, "content")["content"] = text_of(item.content)
            case MessageItem(role="user"):
                messages.append({"role": "user", "content": content_of(item.content)})
            case MessageItem():
                messages.append({"role": "system", "content": text_of(item.content)})
            case ReasoningItem():
                thought = "".join(part.text for part in item.content or ())
                _turn(messages, "reasoning_content")["reasoning_content"] = thought
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _turn(messages, "").setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)})
    return messages


def _turn(messages: list[Message], field: str) -> Message:
    """The assistant's message that is being put together; another one where it has that field already."""
    open_turn = bool(messages) and messages[-1]["role"] == "assistant"
    begun = open_turn and (field in messages[-1] or (field and "tool_calls" in messages[-1]))
    if not open_turn or begun or (field == "reasoning_content" and "content" in messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def text_of(content: str | Sequence[MessagePart]) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        raise invalid("input", "only messages of the user may have pictures")
    return "".join(_words(part) for part in content)


def content_of(content: str | Sequence[MessagePart]) -> str | list[dict[str, Any]]:
    """The content of a message: text, or parts where there are pictures among it."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return text_of(content)
    return [plain(part) if isinstance(part, InputImage) else {"type": "text", "text": _words(part)} for part in content]


def _words(part: MessagePart) -> str:
    assert not isinstance(part, InputImage)
    return part.refusal if part.type == "refusal" else part.text


class Writer:
    """Makes output items out of parts as they come, and the events that tell of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: str | None = None  # the type of the last item, while it grows
        self._call: int | None = None

    def take(self, part: Part, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """A part; the events that it makes."""
        match part:
            case Text(text):
                yield from self._begin("message")
                content = self.items[-1]["content"][0]
                content["text"] += text
                content["logprobs"] += logprobs
                yield self._of_part("response.output_text.delta", delta=text, logprobs=list(logprobs))
            case Reasoning(text):
                yield from self._begin("reasoning")
                self.items[-1]["content"][0]["text"] += text
                yield self._of_part("response.reasoning_text.delta", delta=text)
            case CallPart():
                yield from self._begin("function_call", part)
                self.items[-1]["arguments"] += part.arguments
                if part.arguments:
                    yield self._of_item("response.function_call_arguments.delta", delta=part.arguments)

    def finish(self, status: str) -> Iterator[Event]:
        """No more parts come. An answer without any is an empty message."""
        if not self.items:
            yield from self._begin("message")
        yield from self._close(status)

    def _begin(self, kind: str, call: CallPart | None = None) -> Iterator[Event]:
        same_call = call is None or call.index == self._call
        if self._open == kind and same_call:
            return
        yield from self._close("completed")
        self._open, self._call = kind, None if call is None else call.index
        item = _empty(kind, call)
        self.items.append(item)
        yield self._event("response.output_item.added", item={**item, **({"content": []} if "content" in item else {})})
        if kind != "function_call":
            yield self._of_part("response.content_part.added", part=dict(item["content"][0]))

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is None:
            return
        item, kind, self._open = self.items[-1], self._open, None
        item["status"] = status
        if kind == "function_call":
            yield self._of_item("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        else:
            part = item["content"][0]
            if kind == "message":
                yield self._of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            else:
                yield self._of_part("response.reasoning_text.done", text=part["text"])
            yield self._of_part("response.content_part.done", part=part)
        yield self._event("response.output_item.done", item=item)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, item_id=self.items[-1]["id"], **fields)

    def _of_part(self, kind: str, **fields: Any) -> Event:
        return self._of_item(kind, content_index=0, **fields)


def _empty(kind: str, call: CallPart | None) -> dict[str, Any]:
    match kind:
        case "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            head = {"type": kind, "id": new_id("msg"), "role": "assistant"}
            return {**head, "status": "in_progress", "content": [part]}
        case "reasoning":
            thought = {"type": "reasoning_text", "text": ""}
            return {"type": kind, "id": new_id("rs"), "status": "in_progress", "summary": [], "content": [thought]}
    assert call is not None
    head = {"type": kind, "id": new_id("fc"), "call_id": call.id or new_id("call"), "name": call.name or ""}
    return {**head, "arguments": "", "status": "in_progress"}


def new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
