"""Tools of MCP servers as plain functions."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence

import pytest

from afterglow.agents.permissions import ALLOW_ALL
from afterglow.agents.sync_tools import SyncTools
from afterglow.agents.toolbox import AgentTool
from afterglow.chat.tools.tool import Tool


class Waiting:
    """A source with a tool that waits until it is cancelled."""

    name = "source"

    def __init__(self) -> None:
        self.is_cancelled = threading.Event()

    async def open(self) -> Sequence[AgentTool]:
        """Return the tool."""
        return [AgentTool(Tool(name="wait"), "read", self._wait)]

    async def _wait(self, arguments: str) -> None:
        interrupted = threading.main_thread().ident
        assert interrupted is not None
        threading.Timer(0.1, signal.pthread_kill, (interrupted, signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.is_cancelled.set()
            raise

    async def close(self) -> None:
        """Do nothing."""


def test_a_call_that_is_interrupted_is_cancelled() -> None:
    source = Waiting()
    with SyncTools([source], ALLOW_ALL, lambda question: None, call_seconds=60) as toolbox:
        (tool,) = toolbox.tools
        with pytest.raises(KeyboardInterrupt):
            tool.call("{}")
        assert source.is_cancelled.wait(5)


def test_a_tool_that_accepts_any_properties_gets_them() -> None:
    class Echo(Waiting):
        async def open(self) -> Sequence[AgentTool]:
            """Return a tool whose arguments are free."""

            async def echo(arguments: str) -> str:
                return arguments

            schema = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
            return [AgentTool(Tool(name="echo", parameters=schema), "read", echo)]

    with SyncTools([Echo()], ALLOW_ALL, lambda question: None, call_seconds=60) as toolbox:
        (tool,) = toolbox.tools
        assert tool.call('{"city": "Rome"}') == '{"city": "Rome"}'
