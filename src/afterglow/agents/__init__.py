"""Agents on one model: a tool loop with permissions, limits, forks, marks and an audit. See docs/agents.md."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from afterglow.agents.agent import Agent
    from afterglow.agents.conversation import Conversation
    from afterglow.agents.events import (
        AgentEvent,
        Calling,
        Compacted,
        Decided,
        Finished,
        Forked,
        Outcome,
        Question,
        Result,
        Said,
        Thought,
    )
    from afterglow.agents.limits import Limits, Spent
    from afterglow.agents.mcp_client import load_mcp_servers, mcp
    from afterglow.agents.permissions import Permissions
    from afterglow.agents.roles import Role
    from afterglow.agents.run import Mark, Run
    from afterglow.agents.store import RunStore
    from afterglow.agents.terminal_questions import terminal
    from afterglow.agents.toolbox import effect

__all__ = [
    "Agent",
    "AgentEvent",
    "Calling",
    "Compacted",
    "Conversation",
    "Decided",
    "Finished",
    "Forked",
    "Limits",
    "Mark",
    "Outcome",
    "Permissions",
    "Question",
    "Result",
    "Role",
    "Run",
    "RunStore",
    "Said",
    "Spent",
    "Thought",
    "effect",
    "load_mcp_servers",
    "mcp",
    "terminal",
]

# Imported on first use, so that a conversation need not wait for agents, MCP and HTTP clients.
_MODULES = {
    "Agent": "afterglow.agents.agent",
    "AgentEvent": "afterglow.agents.events",
    "Calling": "afterglow.agents.events",
    "Compacted": "afterglow.agents.events",
    "Conversation": "afterglow.agents.conversation",
    "Decided": "afterglow.agents.events",
    "Finished": "afterglow.agents.events",
    "Forked": "afterglow.agents.events",
    "Limits": "afterglow.agents.limits",
    "Mark": "afterglow.agents.run",
    "Outcome": "afterglow.agents.events",
    "Permissions": "afterglow.agents.permissions",
    "Question": "afterglow.agents.events",
    "Result": "afterglow.agents.events",
    "Role": "afterglow.agents.roles",
    "Run": "afterglow.agents.run",
    "RunStore": "afterglow.agents.store",
    "Said": "afterglow.agents.events",
    "Spent": "afterglow.agents.limits",
    "Thought": "afterglow.agents.events",
    "effect": "afterglow.agents.toolbox",
    "load_mcp_servers": "afterglow.agents.mcp_client",
    "mcp": "afterglow.agents.mcp_client",
    "terminal": "afterglow.agents.terminal_questions",
}

if not TYPE_CHECKING:  # a type checker must report unknown names

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'afterglow.agents' has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
