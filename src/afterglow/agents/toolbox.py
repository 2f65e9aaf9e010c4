"""Tools of agents: functions with an effect, and the tools of MCP servers."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from afterglow.agents.permissions import EFFECTS, Effect
from afterglow.chat.tools.tool import Tool, parse_tools
from afterglow.errors import InvalidArgument

EFFECT_ATTRIBUTE = "__afterglow_effect__"
FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])


def effect(kind: Effect) -> Callable[[FunctionT], FunctionT]:
    """Return a decorator that declares what a function does: `read`, `write` or `external`.

    A function without a declaration is `external`.

    >>> @effect("read")
    ... def look(place: str) -> str:
    ...     "Look at a place."
    ...     return "a door"
    >>> build_function_tool(look).effect
    'read'
    """
    if kind not in EFFECTS:
        raise InvalidArgument("effect", f"must be one of {', '.join(EFFECTS)}, not {kind!r}")

    def decorate(function: FunctionT) -> FunctionT:
        setattr(function, EFFECT_ATTRIBUTE, kind)
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class AgentTool:
    """A tool that an agent executes: its definition, its effect, and the function for the JSON arguments of a call."""

    tool: Tool
    effect: Effect
    execute: Callable[[str], Awaitable[Any]]


class ToolSource(Protocol):
    """Provides tools that are known only after it was opened, e.g. an MCP server."""

    name: str

    async def open(self) -> Sequence[AgentTool]:
        """Start what the tools need, and return them."""

    async def close(self) -> None:
        """Release everything. May be called twice."""


AgentToolLike: TypeAlias = Callable[..., Any] | Tool | AgentTool | ToolSource


def build_function_tool(value: Callable[..., Any] | Tool, where: str = "tools") -> AgentTool:
    """Build the tool of a function. Functions that are not coroutines run in a thread."""
    (tool,) = parse_tools([value])
    function = tool.function
    if function is None:
        raise InvalidArgument(where, f"{tool.name} has no function to execute")

    async def execute(arguments: str) -> Any:
        if inspect.iscoroutinefunction(function):
            return await tool.call(arguments)
        value = await run_in_thread(lambda: tool.call(arguments))
        return await value if inspect.isawaitable(value) else value  # of a decorated coroutine function

    return AgentTool(tool, getattr(function, EFFECT_ATTRIBUTE, "external"), execute)


async def run_in_thread(function: Callable[[], Any]) -> Any:
    """Run a function in a daemon thread: one that never returns must not keep the program from ending."""
    loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if not future.done():
            future.set_result(value) if error is None else future.set_exception(error)

    def run() -> None:
        try:
            value, error = function(), None
        except StopIteration as stop:  # a future cannot hold it
            value, error = None, RuntimeError(f"StopIteration: {stop}")
        except BaseException as caught:
            value, error = None, caught  # type: ignore[assignment]
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:  # the loop was closed meanwhile
            return

    threading.Thread(target=run, name="afterglow-tool", daemon=True).start()
    return await future
