"""Where an agent generates: a model of this process, or a server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions
from afterglow.chat.messages import Message
from afterglow.chat.output.parts import OutputPart
from afterglow.chat.output.response import ChatResponse
from afterglow.chat.tools.tool import Tool


class ResponseStream(Protocol):
    """A response while it is generated; `ChatStream` is one."""

    def __aiter__(self) -> AsyncIterator[OutputPart]: ...

    @property
    def response(self) -> ChatResponse:
        """The complete response, after the end."""

    def cancel(self) -> None:
        """Stop the generation."""


class ModelEndpoint(Protocol):
    """Generates the messages of runs."""

    @property
    def fingerprint(self) -> str:
        """Identifies the model."""

    async def start(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatGenerationOptions
    ) -> ResponseStream:
        """Start a response."""

    async def close(self) -> None:
        """Release what the endpoint opened itself."""


class LocalEndpoint:
    """A loaded model. It is not closed with the agent."""

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def fingerprint(self) -> str:
        return self.model.fingerprint

    async def start(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatGenerationOptions
    ) -> ResponseStream:
        def submit() -> ResponseStream:
            return self.model.chat(messages, stream=True, tools=tools, **options)

        return await asyncio.to_thread(submit)  # templates and tokens take milliseconds

    async def close(self) -> None:
        """Do nothing: the model belongs to the caller."""
