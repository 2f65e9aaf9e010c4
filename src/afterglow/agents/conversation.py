"""Conversation: message history with regenerate, rewind, edit and fork. The prefix cache makes each of them cheap."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Unpack

from afterglow.agents.execution import call_tool, call_tool_async
from afterglow.agents.limits import Limits, Spent
from afterglow.agents.loop import Execute, Generate, Policy, RunState, ToolResult, decide
from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions, check_options
from afterglow.chat.content import AttachmentSource, check_text
from afterglow.chat.messages import (
    Message,
    MessageLike,
    ToolCall,
    build_user_message,
    parse_messages,
    to_openai_message,
)
from afterglow.chat.output.parts import OutputPart
from afterglow.chat.output.response import ChatResponse, ChatStream, Delta
from afterglow.chat.tools.tool import ToolLike, parse_tools
from afterglow.errors import InvalidArgument, UnsupportedOperation
from afterglow.llama.atomic_write import write_atomically
from afterglow.llama.checks import check_integer

MAX_TOOL_ROUNDS = 8  # rounds of tool calls before the model must answer in text
CHAT_ARGUMENTS = ("n", "on_token", "cancel")  # of `Model.chat`, which checks them
MISPLACED_OPTIONS = {
    "stream": "is a method of a conversation, not an option: call .stream(text)",
    "tools": "belongs to the conversation: Conversation(model, tools=…)",
}


class Conversation:
    """A message history and the model that answers it.

    Args:
        model: The model. Several conversations may share it.
        system: Text of the system message.
        messages: Earlier messages, as for `Model.chat`.
        tools: Python functions are called if the model calls them, and the model continues with their results. Tools
            given as dictionaries are not called: their calls are in `ChatResponse.tool_calls`.
        options: Options of `Model.chat` for every response, e.g. `max_tokens=200`. `overflow` is `shift` by default: if
            the history exceeds the context, its oldest turns are left out of the prompt. `messages` keeps them, and
            `ChatResponse.truncation` reports them.

    `messages` is the history and may be changed. `last_response` is the newest response.

    >>> chat = Conversation(model, system="You are a helpful assistant.", temperature=0)
    >>> chat.ask("What is the capital of France?").text
    'The capital of France is Paris.'
    >>> len(chat.messages)
    3
    """

    def __init__(
        self,
        model: Model,
        *,
        system: str | None = None,
        messages: Sequence[MessageLike] = (),
        tools: Sequence[ToolLike] = (),
        **options: Unpack[ChatGenerationOptions],
    ) -> None:
        check_chat_options(options, ("system", "messages", "tools"))
        self.model = model
        self.messages: list[Message] = [Message(role="system", content=check_text(system, "system"))] if system else []
        self.messages += parse_messages(messages) if messages else []
        self.tools = parse_tools(tools)
        defaults: ChatGenerationOptions = {"overflow": "shift"}
        self.options: ChatGenerationOptions = {**defaults, **options}
        self.last_response: ChatResponse | None = None

    def ask(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Unpack[ChatGenerationOptions],
    ) -> ChatResponse:
        """Send a user message and return the response. If generation fails, the history does not change.

        `images` and then `audio` are placed before the text. Each is bytes, a `Path`, or any value allowed in an
        `image_url`. `options` override those of the conversation. `n`, `on_token` and `cancel` are as for `Model.chat`;
        of several responses the first one continues the conversation.

        >>> chat = Conversation(model, max_tokens=10)
        >>> chat.ask("What is 2+2?", max_tokens=3).finish_reason
        'length'
        """
        return self._generate([*self.messages, build_user_message(text, images, audio)], options)

    async def ask_async(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Unpack[ChatGenerationOptions],
    ) -> ChatResponse:
        """Asyncio version of `ask`. Tools that are coroutines run in this event loop, others in a thread."""
        rounds = ToolRounds(self, [*self.messages, build_user_message(text, images, audio)], options)
        while (chat_options := await rounds.get_next_options_async()) is not None:
            rounds.add(await self.model.chat_async(rounds.messages, tools=self.tools, **chat_options))
        return rounds.finish()

    def stream(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Unpack[ChatGenerationOptions],
    ) -> Iterator[OutputPart]:
        """Send a user message and yield the parts of the response as they are generated.

        Closing the iterator early cancels the response and leaves the history unchanged.

        >>> chat = Conversation(model, system="You are a helpful assistant.", temperature=0)
        >>> "".join(part.text for part in chat.stream("What is the capital of France?"))
        'The capital of France is Paris.'
        """
        return (
            part for delta in self.stream_deltas(text, images=images, audio=audio, **options) for part in delta.parts
        )

    def stream_deltas(
        self,
        text: str,
        *,
        images: Sequence[AttachmentSource] = (),
        audio: Sequence[AttachmentSource] = (),
        **options: Unpack[ChatGenerationOptions],
    ) -> Iterator[Delta]:
        """Like `stream`, but yield `Delta` objects with the tokens and the prefill progress behind the parts."""
        return self._stream_history([*self.messages, build_user_message(text, images, audio)], options)

    def regenerate(self, **options: Unpack[ChatGenerationOptions]) -> ChatResponse:
        """Replace the last response with a new one. With temperature 0 it is the same one.

        >>> chat = Conversation(model, max_tokens=20)
        >>> first = chat.ask("Name an animal.")
        >>> second = chat.regenerate(temperature=1.0, seed=1)
        >>> len(chat.messages)
        2
        """
        return self._generate(self._get_history_to_question(), options)

    def stream_regeneration(self, **options: Unpack[ChatGenerationOptions]) -> Iterator[Delta]:
        """Streaming version of `regenerate`."""
        return self._stream_history(self._get_history_to_question(), options)

    def rewind(self, count: int) -> None:
        """Keep only the first `count` messages; a negative `count` removes that many from the end.

        >>> chat = Conversation(model, messages=[("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye")])
        >>> chat.rewind(-1)
        >>> chat.messages[-1].content
        'Hello!'
        """
        if not -len(self.messages) <= check_integer("count", count) <= len(self.messages):
            raise InvalidArgument("count", f"must be within the {len(self.messages)} messages, not {count}")
        self.messages = self.messages[:count]

    def edit(self, index: int, text: str) -> None:
        """Replace the text of message `index` and remove all messages after it.

        >>> chat = Conversation(model, messages=[("user", "Hi"), ("assistant", "Hello!")])
        >>> chat.edit(0, "Good morning")
        >>> [message.content for message in chat.messages]
        ['Good morning']
        """
        check_text(text, "text")
        if not 0 <= check_integer("index", index) < len(self.messages):
            raise InvalidArgument("index", f"must be from 0 to {len(self.messages) - 1}, not {index}")
        message = self.messages[index]
        attachments = tuple(
            replace(attachment, offset=min(attachment.offset, len(text))) for attachment in message.attachments
        )
        self.messages = [*self.messages[:index], replace(message, content=text, attachments=attachments)]

    def fork(self) -> Conversation:
        """Return a new conversation with the same history. The common prefix is computed once.

        >>> chat = Conversation(model, messages=[("user", "Hi"), ("assistant", "Hello!")])
        >>> branch = chat.fork()
        >>> branch.rewind(1)
        >>> len(chat.messages), len(branch.messages)
        (2, 1)
        """
        branch = Conversation(self.model, tools=self.tools, **self.options)
        branch.messages = list(self.messages)
        return branch

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the messages to a JSON file, as OpenAI message dictionaries; complete or not at all."""
        content = [to_openai_message(message) for message in self.messages]
        text = json.dumps(content, ensure_ascii=False, indent=2) + "\n"
        write_atomically(Path(path), [text.encode("utf-8", "surrogatepass")])

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace the messages with those of a file written by `save`."""
        try:
            values = json.loads(Path(path).read_bytes().decode("utf-8", "surrogatepass"))
        except (OSError, ValueError) as error:
            raise InvalidArgument("path", f"is not a saved conversation: {error}") from None
        self.messages = [] if values == [] else parse_messages(values)

    def __repr__(self) -> str:
        return f"<Conversation of {len(self.messages)} messages with {self.model!r}>"

    def __reduce__(self) -> NoReturn:
        raise UnsupportedOperation(
            "pickling or copying a conversation",
            "its model belongs to one process: `fork()` copies it, and `save(path)` writes its messages",
        )

    # --- generation

    def _generate(self, history: list[Message], options: ChatGenerationOptions) -> ChatResponse:
        rounds = ToolRounds(self, history, options)
        while (chat_options := rounds.get_next_options()) is not None:
            rounds.add(self.model.chat(rounds.messages, tools=self.tools, **chat_options))
        return rounds.finish()

    def _stream_history(self, history: list[Message], options: ChatGenerationOptions) -> Iterator[Delta]:
        rounds = ToolRounds(self, history, options)

        def stream_rounds() -> Iterator[Delta]:
            while (chat_options := rounds.get_next_options()) is not None:
                stream: ChatStream = self.model.chat(rounds.messages, stream=True, tools=self.tools, **chat_options)
                yield from stream.deltas()
                rounds.add(stream.response)
            rounds.finish()

        return stream_rounds()

    def _get_history_to_question(self) -> list[Message]:
        for index in range(len(self.messages) - 1, -1, -1):
            if self.messages[index].role == "user":
                return self.messages[: index + 1]
        raise InvalidArgument("messages", "have no question yet to answer again")


def check_chat_options(options: ChatGenerationOptions, others: Sequence[str]) -> None:
    """Check the options of a conversation or of a question. `others` are its further keywords, for suggestions."""
    for name in options.keys() & MISPLACED_OPTIONS.keys():
        raise InvalidArgument(name, MISPLACED_OPTIONS[name])
    values = {name: value for name, value in options.items() if name not in CHAT_ARGUMENTS}
    check_options(ChatGenerationOptions, values, others=(*others, *CHAT_ARGUMENTS))


class ToolRounds:
    """The loop of agents for one question of a conversation: all calls are allowed, and run in the calling thread."""

    def __init__(self, conversation: Conversation, history: list[Message], options: ChatGenerationOptions) -> None:
        self._conversation = conversation
        self._options: ChatGenerationOptions = {**conversation.options, **options}
        check_chat_options(self._options, ("images", "audio"))
        self._tools = {tool.name: tool for tool in conversation.tools}
        self._state = RunState(messages=history)
        self._response: ChatResponse | None = None
        self._policy = Policy(
            tools=self._tools,
            effects=dict.fromkeys(self._tools, "external"),
            allowed=self._tools,
            limits=Limits(rounds=MAX_TOOL_ROUNDS, calls=None, repeats=None),
        )

    @property
    def messages(self) -> list[Message]:
        """The history of the next request."""
        return self._state.messages

    def get_next_options(self) -> ChatGenerationOptions | None:
        """Execute calls until the model must write, and return the options of its message; None at the end."""
        while isinstance(step := self._get_next_step(), list):
            for call in step:
                self._state.add_result(call.id, ToolResult("ok", call_tool(self._tools[call.name], call)))
        return step

    async def get_next_options_async(self) -> ChatGenerationOptions | None:
        """Asyncio version of `get_next_options`."""
        while isinstance(step := self._get_next_step(), list):
            for call in step:
                text = await call_tool_async(self._tools[call.name], call)
                self._state.add_result(call.id, ToolResult("ok", text))
        return step

    def _get_next_step(self) -> list[ToolCall] | ChatGenerationOptions | None:
        """Return the calls to execute, or the options of the next message; None at the end."""
        if not self._can_call_tools():
            return None
        match decide(self._state, self._policy):
            case Generate(stopping):
                return {**self._options, "tool_choice": "none"} if stopping else self._options
            case Execute(verdicts):
                return [verdict.call for verdict in verdicts]
            case _:
                return None

    def add(self, response: ChatResponse) -> None:
        """Add the response to a request."""
        self._response = self._conversation.last_response = response
        self._state.add_message(response.message, Spent(rounds=1))

    def finish(self) -> ChatResponse:
        """Keep the messages in the conversation and return the last response."""
        assert self._response is not None
        self._conversation.messages = self._state.messages
        return self._response

    def _can_call_tools(self) -> bool:
        """Return whether all calls of the last message are of functions. The caller executes others."""
        return all(
            call.name in self._tools and self._tools[call.name].function is not None for call in self._state.pending
        )
