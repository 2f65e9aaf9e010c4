"""A conversation that remembers: ask, regenerate, rewind, fork. What was computed stays in the model's memory."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from afterglow.answering import Answering
from afterglow.chat.content import Attachable, attached
from afterglow.chat.messages import Message, ToolCall, Writable, plain
from afterglow.chat.messages import messages as read_messages
from afterglow.chat.parts import Part
from afterglow.chat.reply import Delta, Turn, TurnStream
from afterglow.chat.tools.tool import Offered, Tool
from afterglow.chat.tools.tool import tools as read_tools
from afterglow.errors import InvalidArgument

MAX_ROUNDS = 8  # of calling tools before the model has to answer


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
        model: Answering,
        *,
        system: str | None = None,
        messages: Sequence[Writable] = (),
        tools: Sequence[Offered] = (),
        **options: Any,
    ) -> None:
        self.model = model
        self.messages: list[Message] = [Message(role="system", content=system)] if system else []
        self.messages += read_messages(messages) if messages else []
        self.tools = read_tools(tools)
        self.options = options
        self.last: Turn | None = None  # the newest answer

    def ask(
        self, text: str, *, images: Sequence[Attachable] = (), audio: Sequence[Attachable] = (), **options: Any
    ) -> Turn:
        """Say something and wait for the answer. An answer that fails leaves the conversation as it was.

        `images` and then `audio` stand before the text: bytes, a `Path`, or what an `image_url` may be.
        """
        return self._answer([*self.messages, question(text, images, audio)], options)

    async def ask_async(
        self, text: str, *, images: Sequence[Attachable] = (), audio: Sequence[Attachable] = (), **options: Any
    ) -> Turn:
        """The same for asyncio."""
        history = [*self.messages, question(text, images, audio)]
        for asked in self._rounds(options):
            turn = self.last = await self.model.chat_async(history, tools=self.tools, **asked)
            history.append(turn.message)
            if not self._callable(turn):
                break
            history += self._results(turn)
        self.messages = history
        return turn

    def stream(
        self, text: str, *, images: Sequence[Attachable] = (), audio: Sequence[Attachable] = (), **options: Any
    ) -> Iterator[Part]:
        """Say something; the parts of the answer as they come. Abandoning it leaves the conversation as it was."""
        return (part for delta in self.deltas(text, images=images, audio=audio, **options) for part in delta.parts)

    def deltas(
        self, text: str, *, images: Sequence[Attachable] = (), audio: Sequence[Attachable] = (), **options: Any
    ) -> Iterator[Delta]:
        """The same with the tokens and the progress behind the parts."""
        return self._deltas([*self.messages, question(text, images, audio)], options)

    def regenerate(self, **options: Any) -> Turn:
        """Answer the last question again; with a `temperature`, differently. The old answer is forgotten."""
        return self._answer(self._up_to_question(), options)

    def regenerate_deltas(self, **options: Any) -> Iterator[Delta]:
        """The same as it comes."""
        return self._deltas(self._up_to_question(), options)

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
        Path(path).write_text(json.dumps([plain(one) for one in self.messages], ensure_ascii=False, indent=2) + "\n")

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read messages that were saved; they take the place of the ones that are here."""
        try:
            values = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            raise InvalidArgument("path", f"is not a saved conversation: {error}") from None
        self.messages = read_messages(values)

    # --- answering

    def _answer(self, history: list[Message], options: dict[str, Any]) -> Turn:
        turn: Turn
        for asked in self._rounds(options):
            turn = self.last = self.model.chat(history, tools=self.tools, **asked)
            history.append(turn.message)
            if not self._callable(turn):
                break
            history += self._results(turn)
        self.messages = history
        return turn

    def _deltas(self, history: list[Message], options: dict[str, Any]) -> Iterator[Delta]:
        for asked in self._rounds(options):
            stream: TurnStream = self.model.chat(history, stream=True, tools=self.tools, **asked)
            yield from stream.deltas()
            self.last = stream.turn
            history.append(stream.turn.message)
            if not self._callable(stream.turn):
                break
            history += self._results(stream.turn)
        self.messages = history

    def _up_to_question(self) -> list[Message]:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return self.messages[: index + 1]
        raise InvalidArgument("messages", "have no question yet that could be answered again")

    # --- tools

    def _rounds(self, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The options of each answer while tools are called; the last one can only be words."""
        asked = {**self.options, **options}
        yield from itertools.repeat(asked, MAX_ROUNDS)
        yield {**asked, "tool_choice": "none"}

    def _callable(self, turn: Turn) -> bool:
        """Whether the model called tools, all of which can be called here."""
        functions = {tool.name for tool in self.tools if tool.function is not None}
        return bool(turn.calls) and all(call.name in functions for call in turn.calls)

    def _results(self, turn: Turn) -> list[Message]:
        tools = {tool.name: tool for tool in self.tools}
        return [
            Message(role="tool", name=call.name, tool_call_id=call.id, content=result_of(tools[call.name], call))
            for call in turn.calls
        ]


def question(text: str, images: Sequence[Attachable] = (), audio: Sequence[Attachable] = ()) -> Message:
    """What a user says, after the pictures and sounds it is about.

    >>> question("What is this?", ["https://example.com/cat.png"]).attachments[0].kind
    'image'
    """
    return Message(role="user", content=text, attachments=(*attached("image", images), *attached("audio", audio)))


def result_of(tool: Tool, call: ToolCall) -> str:
    """What a tool returns, as text; an error is told to the model, which may try again."""
    try:
        value = tool.call(call.arguments)
    except Exception as error:  # the model's mistake or the tool's: either way the conversation goes on
        return f"error: {error}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
