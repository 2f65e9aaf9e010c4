"""A conversation that remembers: ask, regenerate, rewind, fork. What was computed stays in the model's memory."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from afterglow.api.base import TextModel
from afterglow.chat.content import AttachmentSource, build_attachments
from afterglow.chat.messages import Message, MessageLike, ToolCall, to_openai_message
from afterglow.chat.messages import parse_messages as read_messages
from afterglow.chat.output.parts import OutputPart
from afterglow.chat.response import ChatResponse, ChatStream, Delta
from afterglow.chat.tools.tool import Tool, ToolLike
from afterglow.chat.tools.tool import parse_tools as read_tools
from afterglow.errors import InvalidArgument

MAX_TOOL_ROUNDS = 8  # of calling tools before the model has to answer


class Conversation:
    """A history of messages and the model that answers it.

    `tools` that are functions are called when the model asks for them, and it goes on with what they return.
    `options` are those of `Model.chat`, for every answer.

    >>> talk = Conversation(model, system="You are a helpful assistant.")
    >>> talk.ask("What is the capital of France?").text
    'The capital of France is Paris.'
    >>> len(talk.messages)
    3
    """

    def __init__(
        self,
        model: TextModel,
        *,
        system: str | None = None,
        messages: Sequence[MessageLike] = (),
        tools: Sequence[ToolLike] = (),
        **options: Any,
    ) -> None:
        self.model = model
        self.messages: list[Message] = [Message(role="system", content=system)] if system else []
        self.messages += read_messages(messages) if messages else []
        self.tools = read_tools(tools)
        self.options = options
        self.last_response: ChatResponse | None = None  # the newest answer

    def ask(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Any,
    ) -> ChatResponse:
        """Say something and wait for the answer. An answer that fails leaves the conversation as it was.

        `images` and then `audio` stand before the text: bytes, a `Path`, or what an `image_url` may be.
        """
        return self._generate([*self.messages, build_user_message(text, images, audio)], options)

    async def ask_async(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Any,
    ) -> ChatResponse:
        """The same for asyncio."""
        history = [*self.messages, build_user_message(text, images, audio)]
        for asked in self._iterate_tool_rounds(options):
            turn = self.last_response = await self.model.chat_async(history, tools=self.tools, **asked)
            history.append(turn.message)
            if not self._can_call_tools(turn):
                break
            history += self._call_tools(turn)
        self.messages = history
        return turn

    def stream(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Any,
    ) -> Iterator[OutputPart]:
        """Say something; the parts of the answer as they come. Abandoning it leaves the conversation as it was."""
        return (
            part for delta in self.stream_deltas(text, images=images, audio=audio, **options) for part in delta.parts
        )

    def stream_deltas(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Any,
    ) -> Iterator[Delta]:
        """The same with the tokens and the progress behind the parts."""
        return self._stream_history([*self.messages, build_user_message(text, images, audio)], options)

    def regenerate(self, **options: Any) -> ChatResponse:
        """Answer the last question again; with a `temperature`, differently. The old answer is forgotten."""
        return self._generate(self._get_history_to_question(), options)

    def stream_regeneration(self, **options: Any) -> Iterator[Delta]:
        """The same as it comes."""
        return self._stream_history(self._get_history_to_question(), options)

    def rewind(self, count: int) -> None:
        """Keep the first `count` messages; a negative number drops that many from the end."""
        if not -len(self.messages) <= count <= len(self.messages):
            raise InvalidArgument("count", f"must be within the {len(self.messages)} messages, not {count}")
        self.messages = self.messages[:count]

    def edit(self, index: int, text: str) -> None:
        """Change what message `index` says, and forget everything after it."""
        if not 0 <= index < len(self.messages):
            raise InvalidArgument("index", f"must be from 0 to {len(self.messages) - 1}, not {index}")
        message = self.messages[index]
        kept = tuple(replace(one, offset=min(one.offset, len(text))) for one in message.attachments)
        self.messages = [*self.messages[:index], replace(message, content=text, attachments=kept)]

    def fork(self) -> Conversation:
        """Another conversation with the same past; what the two share is computed once."""
        twin = Conversation(self.model, tools=self.tools, **self.options)
        twin.messages = list(self.messages)
        return twin

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages to a JSON file, as OpenAI's dictionaries."""
        Path(path).write_text(
            json.dumps([to_openai_message(one) for one in self.messages], ensure_ascii=False, indent=2) + "\n"
        )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read messages that were saved; they take the place of the ones that are here."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument("path", f"is not a saved conversation: {error}") from None
        self.messages = read_messages(values)

    # --- answering

    def _generate(self, history: list[Message], options: dict[str, Any]) -> ChatResponse:
        turn: ChatResponse
        for asked in self._iterate_tool_rounds(options):
            turn = self.last_response = self.model.chat(history, tools=self.tools, **asked)
            history.append(turn.message)
            if not self._can_call_tools(turn):
                break
            history += self._call_tools(turn)
        self.messages = history
        return turn

    def _stream_history(self, history: list[Message], options: dict[str, Any]) -> Iterator[Delta]:
        for asked in self._iterate_tool_rounds(options):
            stream: ChatStream = self.model.chat(history, stream=True, tools=self.tools, **asked)
            yield from stream.deltas()
            self.last_response = stream.response
            history.append(stream.response.message)
            if not self._can_call_tools(stream.response):
                break
            history += self._call_tools(stream.response)
        self.messages = history

    def _get_history_to_question(self) -> list[Message]:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return self.messages[: index + 1]
        raise InvalidArgument("messages", "have no question yet that could be answered again")

    # --- tools

    def _iterate_tool_rounds(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The options of each answer while tools are called; the last one can only be words."""
        asked = {**self.options, **options}
        yield from itertools.repeat(asked, MAX_TOOL_ROUNDS)
        yield {**asked, "tool_choice": "none"}

    def _can_call_tools(self, response: ChatResponse) -> bool:
        """Whether the model called tools, all of which can be called here."""
        functions = {tool.name for tool in self.tools if tool.function is not None}
        return bool(response.tool_calls) and all(call.name in functions for call in response.tool_calls)

    def _call_tools(self, response: ChatResponse) -> list[Message]:
        tools = {tool.name: tool for tool in self.tools}
        return [
            Message(role="tool", name=call.name, tool_call_id=call.id, content=call_tool(tools[call.name], call))
            for call in response.tool_calls
        ]


def build_user_message(
    text: str, images: Sequence[AttachmentSource] = (), audio: Sequence[AttachmentSource] = ()
) -> Message:
    """What a user says, after the pictures and sounds it is about.

    >>> question("What is this?", ["https://example.com/cat.png"]).attachments[0].kind
    'image'
    """
    return Message(
        role="user", content=text, attachments=(*build_attachments("image", images), *build_attachments("audio", audio))
    )


def call_tool(tool: Tool, call: ToolCall) -> str:
    """What a tool returns, as text; an error is told to the model, which may try again."""
    try:
        value = tool.call(call.arguments)
    except Exception as error:  # the model's mistake or the tool's: either way the conversation goes on
        return f"error: {error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
