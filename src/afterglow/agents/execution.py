"""Executes tool calls: time limit, retries, and results as text that is safe for a prompt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from afterglow.agents.loop import ToolResult
from afterglow.agents.toolbox import AgentTool
from afterglow.chat.messages import ToolCall
from afterglow.chat.tools.tool import Tool
from afterglow.errors import InvalidArgument

logger = logging.getLogger("afterglow.agents")
MAX_RESULT_CHARACTERS = 32_000
MAX_ERROR_CHARACTERS = 2_000
READ_ATTEMPTS = 2  # of a read that fails with an error of the connection
TRANSIENT_ERRORS = (ConnectionError,)
INVALID_CHARACTERS = re.compile("[\\x00\\ud800-\\udfff]")


async def execute_call(
    tool: AgentTool, call: ToolCall, *, seconds: float | None, attempt: int = 1, limit: int = MAX_RESULT_CHARACTERS
) -> ToolResult:
    """Execute a call and return its result. An error becomes a result too, so that the model can try again."""
    attempts = READ_ATTEMPTS if tool.effect == "read" else 1
    for number in range(1, attempts + 1):
        try:
            value = await asyncio.wait_for(execute_alone(tool, call), seconds)
        except TRANSIENT_ERRORS as error:
            failure = describe_failure(error)
            if number == attempts:
                break
            continue
        except TimeoutError as error:
            failure = str(error) or f"{call.name} did not end within {seconds:g} seconds"
            break
        except Exception as error:
            failure = describe_failure(error)
            break
        note = f"[after {number} attempts]\n" if number > 1 else ""
        return ToolResult("ok", note + clean_text(format_value(value), limit))
    logger.info("the tool %s failed: %s", call.name, failure)
    number = attempt + number - 1
    told = f"error: {failure}" if number == 1 else f"error in attempt {number}: {failure}"
    return ToolResult("error", clean_text(told, MAX_ERROR_CHARACTERS))


async def execute_alone(tool: AgentTool, call: ToolCall) -> Any:
    """Execute a call. A tool that calls `sys.exit` or raises `CancelledError` ends its call, not the run."""
    try:
        return await tool.execute(call.arguments)
    except SystemExit as error:
        raise RuntimeError(f"{call.name} called sys.exit({error})") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise RuntimeError(f"{call.name} was cancelled") from None


def call_tool(tool: Tool, call: ToolCall) -> str:
    """Call a tool in this thread and return its result as text. An error becomes text too.

    >>> def add(a: int, b: int) -> int:
    ...     return a + b
    >>> from afterglow.chat.tools.tool import parse_tools
    >>> call_tool(parse_tools([add])[0], ToolCall(id="1", name="add", arguments='{"a": 1, "b": 2}'))
    '3'
    """
    try:
        value = tool.call(call.arguments)
        if asyncio.iscoroutine(value):
            value = run_coroutine(value)
    except Exception as error:
        return report_error(tool, error)
    return clean_text(format_value(value), MAX_RESULT_CHARACTERS)


def run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine to its end: in a thread if this one has an event loop, e.g. that of a notebook."""
    if not has_event_loop():
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, coroutine).result()


def has_event_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


async def call_tool_async(tool: Tool, call: ToolCall) -> str:
    """Like `call_tool`: a coroutine runs in this event loop, any other function in a thread."""
    try:
        value = await asyncio.to_thread(tool.call, call.arguments)
        if asyncio.iscoroutine(value):
            value = await value
    except Exception as error:
        return report_error(tool, error)
    return clean_text(format_value(value), MAX_RESULT_CHARACTERS)


def report_error(tool: Tool, error: Exception) -> str:
    """Log the error of a call, in its handler, and return the text that the model gets."""
    if isinstance(error, InvalidArgument):  # the model wrote arguments that the tool does not accept
        logger.info("the model called the tool %s with invalid arguments: %s", tool.name, error)
    else:
        logger.exception("the tool %s raised an error, which the model gets as its result", tool.name)
    return clean_text(f"error: {describe_failure(error)}", MAX_ERROR_CHARACTERS)


def describe_failure(error: BaseException) -> str:
    """Return an error as text; its type if it has no message.

    >>> describe_failure(ValueError())
    'ValueError'
    """
    try:
        return str(error) or type(error).__name__
    except Exception:  # of a hostile `__str__`
        return type(error).__name__


def format_value(value: Any) -> str:
    """Return the result of a function as text: text as it is, bytes as UTF-8, everything else as JSON.

    >>> format_value({"a": 1}), format_value(b"caf\\xc3\\xa9"), format_value(None)
    ('{"a": 1}', 'café', 'null')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("utf-8", "replace")
    with contextlib.suppress(Exception):  # circular or deep values, keys that are no text
        return json.dumps(value, ensure_ascii=False, default=str)
    with contextlib.suppress(Exception):  # hostile methods
        return repr(value)
    return f"<{type(value).__name__}>"


def clean_text(text: str, limit: int) -> str:
    """Return a text that is valid UTF-8 without NUL, and at most `limit` characters long: its start and its end.

    Control tokens need no treatment: only chat templates can write them.

    >>> clean_text("a" * 30 + "z" * 30, 20)
    'aaaaaaaaaa\\n[40 characters are left out]\\nzzzzzzzzzz'
    >>> clean_text("\\ud800\\x00", 20)
    '\\ufffd\\ufffd'
    """
    head, tail = limit // 2, limit - limit // 2
    if len(text) > limit:
        text = f"{text[:head]}\n[{len(text) - limit:,} characters are left out]\n{text[-tail:]}"
    return INVALID_CHARACTERS.sub("\ufffd", text)
