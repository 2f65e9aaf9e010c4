"""A model as an MCP server: the tools `ask`, `explain` and `fork` for other agents."""

from __future__ import annotations

import asyncio
from typing import Any, Unpack

from afterglow.agents.agent import Agent
from afterglow.api.model import Model
from afterglow.api.options import ChatGenerationOptions
from afterglow.errors import UnsupportedOperation

MAX_TASKS = 64


def build_mcp_server(model: Model, **options: Unpack[ChatGenerationOptions]) -> Any:
    """Return an `MCPServer` of the `mcp` package that answers with a model. `options` are those of `Model.chat`."""
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.types import ToolAnnotations
    except ImportError:
        raise UnsupportedOperation("MCP", "install it with `pip install afterglow-llm[agents]`") from None

    server = MCPServer("afterglow")
    read_only = ToolAnnotations(read_only_hint=True, open_world_hint=False)

    @server.tool(annotations=read_only)
    async def ask(question: str, context: str = "") -> str:
        """Ask the local model one question. The same context in later calls is not computed again."""
        return (await Agent(model, context, **options).start(question)).text

    @server.tool(annotations=read_only)
    async def fork(context: str, tasks: list[str]) -> list[str]:
        """Give several tasks about the same context to the local model at once. The context is computed once."""
        if len(tasks) > MAX_TASKS:
            raise ValueError(f"at most {MAX_TASKS} tasks, not {len(tasks)}")
        agent = Agent(model, context, **options)
        outcomes = await asyncio.gather(*(agent.start(task) for task in tasks))
        return [outcome.text for outcome in outcomes]

    @server.tool(annotations=read_only)
    async def explain(question: str, context: str = "") -> dict[str, Any]:
        """Explain how many tokens of a question are cached, how many would be computed, and why."""
        messages = [*([("system", context)] if context else []), ("user", question)]
        found = await asyncio.to_thread(lambda: model.explain(model.apply_chat_template(messages)))
        return {
            "prompt_tokens": found.prompt_entries,
            "cached_tokens": found.reused_entries,
            "computed_tokens": found.computed_entries,
            "cause": found.cause,
        }

    return server
