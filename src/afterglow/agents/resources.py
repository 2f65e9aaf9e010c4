"""What the runs of an agent share: endpoint, tools, permissions, the person, roles and the store."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeAlias, Unpack, cast

from afterglow.agents.endpoints import LocalEndpoint, ModelEndpoint
from afterglow.agents.events import Question
from afterglow.agents.limits import DEFAULT_LIMITS, Limits
from afterglow.agents.permissions import DEFAULT_PERMISSIONS, Decision, Permissions
from afterglow.agents.roles import Role, load_roles
from afterglow.agents.store import RunStore
from afterglow.agents.toolbox import AgentTool, AgentToolLike, ToolSource, build_function_tool, run_in_thread
from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions, check_options
from afterglow.chat.content import check_text
from afterglow.errors import InvalidArgument

AskFunction: TypeAlias = Callable[[Question], Awaitable[Decision | None] | Decision | None]
CALL_SECONDS = 120.0
DEFAULT_OPTIONS: ChatGenerationOptions = {"overflow": "compact"}  # runs outgrow the context


class AgentResources:
    """Base class of `Agent`: everything that its runs use."""

    def __init__(
        self,
        model: Model | ModelEndpoint,
        system: str = "",
        *,
        tools: Sequence[AgentToolLike] = (),
        permissions: Permissions = DEFAULT_PERMISSIONS,
        limits: Limits = DEFAULT_LIMITS,
        ask: AskFunction | None = None,
        store: str | os.PathLike[str] | RunStore | None = None,
        roles: str | os.PathLike[str] | Sequence[Role] = (),
        call_seconds: float = CALL_SECONDS,
        **options: Unpack[ChatGenerationOptions],
    ) -> None:
        check_options(
            ChatGenerationOptions, options, others=("tools", "permissions", "limits", "ask", "store", "roles")
        )
        check_arguments(model, tools, permissions, limits, ask, call_seconds)
        self.endpoint: ModelEndpoint = LocalEndpoint(model) if isinstance(model, Model) else model
        self.system = check_text(system, "system")
        self.permissions, self.limits = permissions, limits
        self.options: ChatGenerationOptions = {**DEFAULT_OPTIONS, **options}
        self.call_seconds = call_seconds
        self.roles: Mapping[str, Role] = load_roles(roles)
        self._ask = ask
        self._loop: asyncio.AbstractEventLoop | None = None  # of the locks
        self._ask_lock = asyncio.Lock()  # one question at a time
        self._sources: list[ToolSource] = []
        self._tools: list[AgentTool | ToolSource] = []
        for index, value in enumerate(tools):
            if isinstance(value, AgentTool):
                self._tools.append(value)
            elif hasattr(value, "open") and hasattr(value, "close") and hasattr(value, "name"):
                self._tools.append(cast(ToolSource, value))
            else:
                self._tools.append(build_function_tool(cast(Any, value), f"tools[{index}]"))
        self._opened: list[AgentTool] | None = None
        self._open_lock = asyncio.Lock()
        self.store = store if isinstance(store, RunStore) else RunStore(store)

    def get_role(self, name: str | None) -> Role | None:
        """Return the role of a name."""
        if name is not None and name not in self.roles:
            raise InvalidArgument("role", f"must be one of {', '.join(self.roles) or 'none'}, not {name!r}")
        return None if name is None else self.roles[name]

    async def open_tools(self) -> Sequence[AgentTool]:
        """Return all tools; MCP servers are started on the first call."""
        self._replace_locks()
        async with self._open_lock:
            if self._opened is None:
                opened: list[AgentTool] = []
                for item in self._tools:
                    if isinstance(item, AgentTool):
                        opened.append(item)
                    else:
                        self._sources.append(item)
                        opened += await item.open()
                names = [tool.tool.name for tool in opened]
                if twice := {name for name in names if names.count(name) > 1}:
                    raise InvalidArgument("tools", f"the name {min(twice)!r} is used twice")
                self._opened = opened
            return self._opened

    async def ask_person(self, question: Question) -> Decision | None:
        """Ask the person about a call, one question at a time."""
        if self._ask is None:
            return None
        ask = self._ask
        self._replace_locks()
        async with self._ask_lock:
            answer: Any = (
                ask(question) if inspect.iscoroutinefunction(ask) else await run_in_thread(lambda: ask(question))
            )
            answer = await answer if inspect.isawaitable(answer) else answer
        if answer not in ("allow", "deny", None):
            raise InvalidArgument("ask", f"must return 'allow', 'deny' or None, not {answer!r}")
        return cast(Decision | None, answer)

    def _replace_locks(self) -> None:
        """Replace the locks of another event loop. A program may run several, one after the other."""
        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._open_lock, self._ask_lock = asyncio.Lock(), asyncio.Lock()

    async def close(self) -> None:
        """Close the MCP servers and the connection; the next run opens them again. The model stays open."""
        sources, self._sources, self._opened = self._sources, [], None
        for source in sources:
            await source.close()
        await self.endpoint.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()


def check_arguments(
    model: object, tools: object, permissions: object, limits: object, ask: object, call_seconds: object
) -> None:
    """Raise `InvalidArgument` for an argument of an agent that has the wrong type."""
    if not isinstance(model, Model) and not hasattr(model, "start"):
        raise InvalidArgument("model", f"must be a loaded model, e.g. afterglow.load('smollm2'), not {model!r}")
    if isinstance(tools, str | bytes | Mapping) or not isinstance(tools, Sequence):
        raise InvalidArgument("tools", f"must be a list of functions and MCP servers, not {tools!r}")
    if not isinstance(permissions, Permissions):
        raise InvalidArgument("permissions", f"must be Permissions(…), not {permissions!r}")
    if not isinstance(limits, Limits):
        raise InvalidArgument("limits", f"must be Limits(…), not {limits!r}")
    if ask is not None and not callable(ask):
        raise InvalidArgument("ask", f"must be a function, not {ask!r}")
    if isinstance(call_seconds, bool) or not isinstance(call_seconds, int | float) or not call_seconds > 0:
        raise InvalidArgument("call_seconds", f"must be a number above 0, not {call_seconds!r}")
