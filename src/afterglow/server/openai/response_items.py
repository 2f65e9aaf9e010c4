"""Items of /v1/responses: as messages on their way in, and made out of parts, with their events, on their way out."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta
from afterglow.server.errors import invalid_request_error
from afterglow.server.schema.chat import dump_fields
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
MessageDict: TypeAlias = dict[str, Any]


def parse_input_items(items: str | list[InputItem]) -> list[MessageDict]:
    """The input as messages. What the assistant thought, said and called in one go is one message."""
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
                thought = "".join(part.text for part in item.content or ())
                _get_assistant_message(messages, "reasoning_content")["reasoning_content"] = thought
            case FunctionCallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                _get_assistant_message(messages, "").setdefault("tool_calls", []).append(call)
            case FunctionCallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": join_text(item.output)})
    return messages


def _get_assistant_message(messages: list[MessageDict], field: str) -> MessageDict:
    """The assistant's message that is being put together; another one where it has that field already."""
    open_turn = bool(messages) and messages[-1]["role"] == "assistant"
    begun = open_turn and (field in messages[-1] or (field and "tool_calls" in messages[-1]))
    if not open_turn or begun or (field == "reasoning_content" and "content" in messages[-1]):
        messages.append({"role": "assistant"})
    return messages[-1]


def join_text(content: str | Sequence[MessagePart]) -> str:
    """The text of an item."""
    if isinstance(content, str):
        return content
    if any(isinstance(part, InputImage) for part in content):
        raise invalid_request_error("input", "only messages of the user may have pictures")
    return "".join(_get_part_text(part) for part in content)


def parse_content(content: str | Sequence[MessagePart]) -> str | list[dict[str, Any]]:
    """The content of a message: text, or parts where there are pictures among it."""
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
    """Makes output items out of parts as they come, and the events that tell of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open_type: str | None = None  # the type of the last item, while it grows
        self._call_index: int | None = None

    def add_part(self, part: OutputPart, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[ResponseEvent]:
        """A part; the events that it makes."""
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
        """No more parts come. An answer without any is an empty message."""
        if not self.items:
            yield from self._open_item("message")
        yield from self._close_item(status)

    def _open_item(self, kind: str, call: ToolCallDelta | None = None) -> Iterator[ResponseEvent]:
        same_call = call is None or call.index == self._call_index
        if self._open_type == kind and same_call:
            return
        yield from self._close_item("completed")
        self._open_type, self._call_index = kind, None if call is None else call.index
        item = _build_empty_item(kind, call)
        self.items.append(item)
        yield self._build_event(
            "response.output_item.added", item={**item, **({"content": []} if "content" in item else {})}
        )
        if kind != "function_call":
            yield self._build_part_event("response.content_part.added", part=dict(item["content"][0]))

    def _close_item(self, status: str) -> Iterator[ResponseEvent]:
        if self._open_type is None:
            return
        item, kind, self._open_type = self.items[-1], self._open_type, None
        item["status"] = status
        if kind == "function_call":
            yield self._build_item_event(
                "response.function_call_arguments.done", arguments=item["arguments"], name=item["name"]
            )
        else:
            part = item["content"][0]
            if kind == "message":
                yield self._build_part_event("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
            else:
                yield self._build_part_event("response.reasoning_text.done", text=part["text"])
            yield self._build_part_event("response.content_part.done", part=part)
        yield self._build_event("response.output_item.done", item=item)

    def _build_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return {"type": kind, "output_index": len(self.items) - 1, **fields}

    def _build_item_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._build_event(kind, item_id=self.items[-1]["id"], **fields)

    def _build_part_event(self, kind: str, **fields: Any) -> ResponseEvent:
        return self._build_item_event(kind, content_index=0, **fields)


def _build_empty_item(kind: str, call: ToolCallDelta | None) -> dict[str, Any]:
    match kind:
        case "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            head = {"type": kind, "id": generate_id("msg"), "role": "assistant"}
            return {**head, "status": "in_progress", "content": [part]}
        case "reasoning":
            thought = {"type": "reasoning_text", "text": ""}
            return {"type": kind, "id": generate_id("rs"), "status": "in_progress", "summary": [], "content": [thought]}
    assert call is not None
    head = {"type": kind, "id": generate_id("fc"), "call_id": call.id or generate_id("call"), "name": call.name or ""}
    return {**head, "arguments": "", "status": "in_progress"}


def generate_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
