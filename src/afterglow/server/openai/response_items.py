"""Items of /v1/responses: conversion of input items to messages and of output parts to items and events."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.server.errors import invalid_request_error
from afterglow.server.schema.chat import MessageDict, dump_fields
from afterglow.server.schema.responses import (
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputItem,
    MessageItem,
    MessagePart,
    ReasoningItem,
)

ResponseEvent: TypeAlias = dict[str, Any]


def parse_input_items(items: str | list[InputItem]) -> list[MessageDict]:
    """Convert the input to messages. Consecutive reasoning, text and calls of the assistant form one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[MessageDict] = []
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                _get_assistant_message(messages, "content")["content"] = join_text(item.content)
            case MessageItem(role="user"):
                messages.append({"role": "user", "content": parse_content(item.content)})
            case MessageItem():
                messages.append({"role": "system", "content": join_text(item.content)})
            case ReasoningItem():
                reasoning = "".join(part.text for part in item.content or ())
                _get_assistant_message(messages, "reasoning_content")["reasoning_content"] = reasoning
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _get_assistant_message(messages, "").setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": join_text(item.output)})
    return messages


def _get_assistant_message(messages: list[MessageDict], field: str) -> MessageDict:
    """Return the assistant message that takes `field`: the last one, or a new one if `field` is already set."""
    is_assistant = bool(messages) and messages[-1]["role"] == "assistant"
    is_set = is_assistant and (field in messages[-1] or (field and "tool_calls" in messages[-1]))
    if not is_assistant or is_set or (field == "reasoning_content" and "content" in messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def join_text(content: str | Sequence[MessagePart]) -> str:
    """Return the text of an item. Raises if it contains images."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        raise invalid_request_error("input", "only user messages may contain images")
    return "".join(_get_part_text(part) for part in content)


def parse_content(content: str | Sequence[MessagePart]) -> str | list[dict[str, Any]]:
    """Convert the content of a user message to text, or to parts if it contains images."""
    if isinstance(content, str) or not any(isinstance(part, InputImage) for part in content):
        return join_text(content)
    return [
        dump_fields(part) if isinstance(part, InputImage) else {"type": "text", "text": _get_part_text(part)}
        for part in content
    ]


def _get_part_text(part: MessagePart) -> str:
    assert not isinstance(part, InputImage)
    return part.refusal if part.type == "refusal" else part.text


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
