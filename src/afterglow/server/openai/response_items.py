"""Items of /v1/responses: conversion of input items to messages and of output parts to items and events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from afterglow.chat.content import IMAGE_DETAILS, Attachment, join_content
from afterglow.chat.messages import Message, ToolCall
from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.server.errors import invalid_request_error
from afterglow.server.openai.schema.responses import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputItem,
    MessageItem,
    MessagePart,
    ReasoningItem,
)

ResponseEvent: TypeAlias = dict[str, Any]


def parse_input_items(items: str | list[InputItem]) -> list[Message]:
    """Convert the input to messages. Consecutive reasoning, text and calls of the assistant form one message."""
    if isinstance(items, str):
        return [Message(role="user", content=items)]
    messages: list[Message] = []
    for message in map(build_item_message, items):
        last = messages[-1] if messages else None
        if last is None or last.role != "assistant" or message.role != "assistant":
            messages.append(message)
        elif message.tool_calls:
            messages[-1] = replace(last, tool_calls=last.tool_calls + message.tool_calls)
        elif last.reasoning is not None and message.reasoning is None and not (last.content or last.tool_calls):
            messages[-1] = replace(last, content=message.content)
        else:
            messages.append(message)
    return messages


def build_item_message(item: InputItem) -> Message:
    """Convert an item to a message, or to a part of an assistant message."""
    match item:
        case MessageItem(role="user"):
            content, attachments = build_content(item.content)
            return Message(role="user", content=content, attachments=attachments)
        case MessageItem():
            role = "assistant" if item.role == "assistant" else "system"
            return Message(role=role, content=join_text(item.content))
        case ReasoningItem():
            return Message(role="assistant", reasoning="".join(part.text for part in item.content or ()))
        case FunctionCallItem():
            call = ToolCall(id=item.call_id, name=item.name, arguments=item.arguments)
            return Message(role="assistant", tool_calls=(call,))
        case FunctionCallOutputItem():
            return Message(role="tool", tool_call_id=item.call_id, content=join_text(item.output))


def join_text(content: str | Sequence[MessagePart]) -> str:
    """Return the text of an item. Raises if it contains images."""
    text, attachments = build_content(content)
    if attachments:
        raise invalid_request_error("input", "only user messages may contain images")
    return text


def build_content(content: str | Sequence[MessagePart]) -> tuple[str, tuple[Attachment, ...]]:
    """Convert content to text and attachments."""
    return (content, ()) if isinstance(content, str) else join_content(map(_build_part, content))


def _build_part(part: MessagePart) -> str | Attachment:
    if not isinstance(part, InputImage):
        return part.refusal if part.type == "refusal" else part.text
    if part.image_url is None:
        raise invalid_request_error("input", "an `input_image` must have an `image_url`")
    return Attachment(kind="image", source=part.image_url, id=part.id, detail=IMAGE_DETAILS[part.detail])


class OutputItemBuilder:
    """Builds output items and their events from a stream of output parts."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open_type: str | None = None  # type of the last item while it is incomplete
        self._call_index: int | None = None

    def add_part(self, part: OutputPart, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[ResponseEvent]:
        """Append a part and yield its events."""
        match part:
            case TextDelta(text):
                yield from self._open_item("message")
                content = self.items[-1]["content"][0]
                content["text"] += text
                content["logprobs"] += logprobs
                yield self._build_part_event("response.output_text.delta", delta=text, logprobs=list(logprobs))
            case ReasoningDelta(text):
                yield from self._open_item("reasoning")
                self.items[-1]["content"][0]["text"] += text
                yield self._build_part_event("response.reasoning_text.delta", delta=text)
            case ToolCallDelta():
                yield from self._open_item("function_call", part)
                self.items[-1]["arguments"] += part.arguments
                if part.arguments:
                    yield self._build_item_event("response.function_call_arguments.delta", delta=part.arguments)

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """Close the last item. A response without parts has one empty message."""
        if not self.items:
            yield from self._open_item("message")
        yield from self._close_item(status)

    def _open_item(self, item_type: str, call: ToolCallDelta | None = None) -> Iterator[ResponseEvent]:
        is_same_call = call is None or call.index == self._call_index
        if self._open_type == item_type and is_same_call:
            return
        yield from self._close_item("completed")
        self._open_type, self._call_index = item_type, None if call is None else call.index
        item = _build_empty_item(item_type, call)
        self.items.append(item)
        yield self._build_event(
            "response.output_item.added", item={**item, **({"content": []} if "content" in item else {})}
        )
        if item_type != "function_call":
            yield self._build_part_event("response.content_part.added", part=dict(item["content"][0]))

    def _close_item(self, status: str) -> Iterator[ResponseEvent]:
        if self._open_type is None:
            return
        item, item_type, self._open_type = self.items[-1], self._open_type, None
        item["status"] = status
        if item_type == "function_call":
            yield self._build_item_event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            part = item["content"][0]
            if item_type == "message":
                yield self._build_part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            else:
                yield self._build_part_event("response.reasoning_text.done", text=part["text"])
            yield self._build_part_event("response.content_part.done", part=part)
        yield self._build_event("response.output_item.done", item=item)

    def _build_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return {"type": event_type, "output_index": len(self.items) - 1, **fields}

    def _build_item_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return self._build_event(event_type, item_id=self.items[-1]["id"], **fields)

    def _build_part_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return self._build_item_event(event_type, content_index=0, **fields)


def _build_empty_item(item_type: str, call: ToolCallDelta | None) -> dict[str, Any]:
    match item_type:
        case "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            head = {"type": item_type, "id": generate_id("msg"), "role": "assistant"}
            return {**head, "status": "in_progress", "content": [part]}
        case "reasoning":
            part = {"type": "reasoning_text", "text": ""}
            head = {"type": item_type, "id": generate_id("rs"), "status": "in_progress"}
            return {**head, "summary": [], "content": [part]}
    assert call is not None
    head = {"type": item_type, "id": generate_id("fc"), "call_id": call.id or generate_id("call")}
    return {**head, "name": call.name or "", "arguments": "", "status": "in_progress"}


def generate_id(prefix: str) -> str:
    """Return a new random id, e.g. `resp_…`."""
    return f"{prefix}_{uuid.uuid4().hex}"
