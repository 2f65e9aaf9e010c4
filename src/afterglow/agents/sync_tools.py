"""Tools of MCP servers as plain functions, for `Conversation`, which has no event loop."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any

from afterglow.agents.events import Question
from afterglow.agents.execution import execute_call
from afterglow.agents.permissions import Decision, Permissions
from afterglow.agents.toolbox import AgentTool, ToolSource
from afterglow.chat.messages import ToolCall
from afterglow.chat.tools.tool import Tool
from afterglow.closeable import Closeable


class SyncTools(Closeable):
    """Opens sources of tools on an event loop in a thread of its own. `tools` ask the person as permissions say."""

    def __init__(
        self,
        sources: Sequence[ToolSource],
        permissions: Permissions,
        ask: Callable[[Question], Decision | None],
        *,
        call_seconds: float,
    ) -> None:
        self._sources = sources
        self._permissions, self._ask, self._call_seconds = permissions, ask, call_seconds
        self.tools: list[Tool] = []
        if not sources:
            return
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="afterglow-tools", daemon=True)
        self._thread.start()
        try:
            opened = [tool for source in sources for tool in self._run(source.open())]
        except BaseException:
            self.close()
            raise
        self.tools = [self._build_tool(tool) for tool in opened]

    def _build_tool(self, tool: AgentTool) -> Tool:
        def call(**values: Any) -> str:
            made = ToolCall(id="", name=tool.tool.name, arguments=json.dumps(values, ensure_ascii=False))
            decision, reason = self._permissions.find_decision(made.name, tool.effect)
            if decision == "ask":
                decision = self._ask(Question("", made, tool.effect, reason)) or "deny"
                reason = "the person refused this call"
            if decision == "deny":
                return f"error: {made.name} is not permitted: {reason}"
            result: str = self._run(execute_call(tool, made, seconds=self._call_seconds)).text
            return result

        return replace(tool.tool, function=call)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C

    def close(self) -> None:
        if not self._sources or self._loop.is_closed():
            return
        for source in self._sources:
            self._run(source.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
