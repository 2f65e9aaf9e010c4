"""Items of /v1/responses: conversion of input items to messages and of output parts to items and events."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import pydantic

from afterglow.chat.content import IMAGE_DETAILS, Attachment, join_content
from afterglow.chat.messages import Message, ToolCall, locate_attachments
from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.chat.tools.text_input import TextInputReader, wrap_text_input
from afterglow.server.errors import invalid_request_error
from afterglow.server.openai.response_tools import ResponseToolSet
from afterglow.server.openai.schema.chat import dump_fields
from afterglow.server.openai.schema.responses import (
    CustomToolCallItem,
    CustomToolCallOutputItem,
    FunctionCallItem,
    FunctionCallOutputItem,
    InputImage,
    InputItem,
    ItemReference,
    MessageItem,
    MessagePart,
    ReasoningItem,
)
from afterglow.server.sealing import get_sealer

ResponseEvent: TypeAlias = dict[str, Any]
INPUT_ITEM: pydantic.TypeAdapter[InputItem] = pydantic.TypeAdapter(InputItem)
ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}


class InputItemParser:
    """Converts the input of a request to messages."""

    def __init__(self, tools: ResponseToolSet, salt: str, find_item: Callable[[str], dict[str, Any] | None]) -> None:
        """`find_item` returns a stored item by its id."""
        self._tools = tools
        self._salt = salt
        self._find_item = find_item

    def resolve_references(self, items: str | list[InputItem]) -> list[InputItem]:
        """Return the items with stored items in place of references."""
        if isinstance(items, str):
            return [MessageItem(role="user", content=items)]
        return [self._resolve(item, f"input[{index}]") for index, item in enumerate(items)]

    def _resolve(self, item: InputItem, where: str) -> InputItem:
        if not isinstance(item, ItemReference):
            return item
        if (fields := self._find_item(item.id)) is None:
            message = f"the item {item.id[:80]!r} does not exist, was not stored or was evicted; send the item itself"
            raise invalid_request_error(f"{where}.id", message, "item_not_found")
        return INPUT_ITEM.validate_python(fields)

    def build_messages(self, items: Sequence[InputItem]) -> list[Message]:
        """Convert items. Consecutive reasoning, text and calls of the assistant form one message."""
        messages: list[Message] = []
        for index, item in enumerate(items):
            message = self._build_message(item, f"input[{index}]")
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

    def _build_message(self, item: InputItem, where: str) -> Message:
        """Convert an item to a message, or to a part of an assistant message."""
        match item:
            case MessageItem(role="user"):
                content, attachments = build_content(item.content)
                message = Message(role="user", content=content, attachments=attachments)
                return locate_attachments(message, f"{where}.content")
            case MessageItem():
                role = "assistant" if item.role == "assistant" else "system"
                return Message(role=role, content=join_text(item.content))
            case ReasoningItem():
                return Message(role="assistant", reasoning=self._read_reasoning(item, where))
            case FunctionCallItem():
                return self._build_call(item, item.arguments)
            case CustomToolCallItem():
                return self._build_call(item, wrap_text_input(item.input))
            case FunctionCallOutputItem() | CustomToolCallOutputItem():
                return Message(role="tool", tool_call_id=item.call_id, content=join_text(item.output))
            case ItemReference():
                raise AssertionError("references are resolved first")

    def _build_call(self, item: FunctionCallItem | CustomToolCallItem, arguments: str) -> Message:
        name = self._tools.get_name(item.name, item.namespace)
        return Message(role="assistant", tool_calls=(ToolCall(id=item.call_id, name=name, arguments=arguments),))

    def _read_reasoning(self, item: ReasoningItem, where: str) -> str:
        if item.encrypted_content is None:
            return "".join(part.text for part in item.content or item.summary)
        reasoning = get_sealer().decrypt(item.encrypted_content, self._salt)
        if reasoning is None:
            raise invalid_request_error(
                f"{where}.encrypted_content",
                "`encrypted_content` is damaged, or was not encrypted by this server for this API key; "
                "send the item without it",
                "invalid_encrypted_content",
            )
        return reasoning


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


def dump_input_item(item: InputItem) -> dict[str, Any]:
    """Return an input item as a stored item: with an id, and content as a list."""
    fields: dict[str, Any] = dump_fields(item)
    if isinstance(fields.get("content"), str):
        text_type = "output_text" if fields["role"] == "assistant" else "input_text"
        fields["content"] = [{"type": text_type, "text": fields["content"]}]
    for part in fields.get("content", ()):
        part |= {"annotations": part.get("annotations", [])} if part["type"] == "output_text" else {}
        part |= {"detail": part.get("detail", "auto")} if part["type"] == "input_image" else {}
    fields.setdefault("id", generate_id(ID_PREFIXES[item.type]))
    return {**fields, "status": fields.get("status", "completed")}


@dataclass(frozen=True, slots=True)
class OutputItemOptions:
    """What output items contain."""

    tools: ResponseToolSet
    salt: str = ""
    has_summary: bool = False  # the reasoning as a summary, too
    has_encrypted_reasoning: bool = False


class OutputItemBuilder:
    """Builds output items and their events from a stream of output parts."""

    def __init__(self, options: OutputItemOptions) -> None:
        self.items: list[dict[str, Any]] = []
        self._options = options
        self._open_type: str | None = None  # type of the last item while it is incomplete
        self._call_index: int | None = None
        self._input_reader = TextInputReader()  # of an incomplete call of a custom tool

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
                for summary in self.items[-1]["summary"]:
                    summary["text"] += text
                    yield self._build_summary_event("response.reasoning_summary_text.delta", delta=text)
            case ToolCallDelta():
                yield from self._add_call_part(part)

    def finish(self, status: str) -> Iterator[ResponseEvent]:
        """Close the last item. A response without parts has one empty message."""
        if not self.items:
            yield from self._open_item("message")
        yield from self._close_item(status)

    def _add_call_part(self, part: ToolCallDelta) -> Iterator[ResponseEvent]:
        if part.index != self._call_index or self._open_type not in ("function_call", "custom_tool_call"):
            is_custom = self._options.tools.get_client_name(part.name or "").is_custom
            yield from self._open_item("custom_tool_call" if is_custom else "function_call", part)
        if self._open_type == "custom_tool_call":
            yield from self._add_input(self._input_reader.feed(part.arguments))
        elif part.arguments:
            self.items[-1]["arguments"] += part.arguments
            yield self._build_item_event("response.function_call_arguments.delta", delta=part.arguments)

    def _add_input(self, text: str) -> Iterator[ResponseEvent]:
        if text:
            self.items[-1]["input"] += text
            yield self._build_item_event("response.custom_tool_call_input.delta", delta=text)

    def _open_item(self, item_type: str, call: ToolCallDelta | None = None) -> Iterator[ResponseEvent]:
        if self._open_type == item_type and call is None:
            return
        yield from self._close_item("completed")
        self._open_type, self._call_index = item_type, None if call is None else call.index
        self._input_reader = TextInputReader()
        item = self._build_empty_item(item_type, call)
        self.items.append(item)
        lists: dict[str, list[Any]] = {name: [] for name in ("content", "summary") if name in item}
        yield self._build_event("response.output_item.added", item={**item, **lists})
        if "content" in item:
            yield self._build_part_event("response.content_part.added", part=dict(item["content"][0]))
        for summary in item.get("summary", ()):
            yield self._build_summary_event("response.reasoning_summary_part.added", part=dict(summary))

    def _close_item(self, status: str) -> Iterator[ResponseEvent]:
        if self._open_type is None:
            return
        item = self.items[-1]
        match self._open_type:
            case "function_call":
                yield self._build_item_event(
                    "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
                )
            case "custom_tool_call":
                yield from self._add_input(self._input_reader.finish())
                yield self._build_item_event("response.custom_tool_call_input.done", input=item["input"])
            case "message":
                part = item["content"][0]
                yield self._build_part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
                yield self._build_part_event("response.content_part.done", part=part)
            case "reasoning":
                yield from self._close_reasoning(item)
        self._open_type = None
        item["status"] = status
        yield self._build_event("response.output_item.done", item=item)

    def _close_reasoning(self, item: dict[str, Any]) -> Iterator[ResponseEvent]:
        part = item["content"][0]
        yield self._build_part_event("response.reasoning_text.done", text=part["text"])
        yield self._build_part_event("response.content_part.done", part=part)
        for summary in item["summary"]:
            yield self._build_summary_event("response.reasoning_summary_text.done", text=summary["text"])
            yield self._build_summary_event("response.reasoning_summary_part.done", part=summary)
        if self._options.has_encrypted_reasoning:
            item["encrypted_content"] = get_sealer().encrypt(part["text"], self._options.salt)

    def _build_empty_item(self, item_type: str, call: ToolCallDelta | None) -> dict[str, Any]:
        head = {"type": item_type, "id": generate_id(ID_PREFIXES[item_type]), "status": "in_progress"}
        if item_type == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            return {**head, "role": "assistant", "content": [part]}
        if item_type == "reasoning":
            summary = [{"type": "summary_text", "text": ""}] if self._options.has_summary else []
            return {**head, "summary": summary, "content": [{"type": "reasoning_text", "text": ""}]}
        assert call is not None
        tool = self._options.tools.get_client_name(call.name or "")
        namespace = {} if tool.namespace is None else {"namespace": tool.namespace}
        value = {"input": ""} if tool.is_custom else {"arguments": ""}
        return {**head, "call_id": call.id or generate_id("call"), "name": tool.name, **namespace, **value}

    def _build_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return {"type": event_type, "output_index": len(self.items) - 1, **fields}

    def _build_item_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return self._build_event(event_type, item_id=self.items[-1]["id"], **fields)

    def _build_part_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return self._build_item_event(event_type, content_index=0, **fields)

    def _build_summary_event(self, event_type: str, **fields: Any) -> ResponseEvent:
        return self._build_item_event(event_type, summary_index=0, **fields)


def generate_id(prefix: str) -> str:
    """Return a new random id, e.g. `resp_…`."""
    return f"{prefix}_{uuid.uuid4().hex}"
