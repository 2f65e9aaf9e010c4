"""Renders messages with the chat template of the model.

The template runs in a child process with limits on time and memory, because a template from a model file is untrusted.
The child has its own session: Ctrl-C in the terminal of the parent does not reach it.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from afterglow.chat.messages import Message, map_strings, to_template_message
from afterglow.chat.template.adapter import adapt_messages, iter_fallbacks
from afterglow.chat.template.capabilities import (
    TemplateCapabilities,
    TemplateDict,
    detect_capabilities,
    reads_variable,
    requires_thinking_variable,
)
from afterglow.closeable import Closeable
from afterglow.errors import InvalidTemplate

# Limits of one conversation: start of the child, capability detection and all fallbacks. The first is CPU time of the
# child: on busy cores the time on the clock says little. The second is that of all conversations of a call.
RENDER_CPU_SECONDS = 5.0
RENDER_WALL_SECONDS = 60.0
LIMIT_CHECK_SECONDS = 0.1  # interval between checks of the limits
MAX_CHILDREN_PER_REQUEST = 2
# Run by path: `-m` would import the afterglow package first and take three times as long to start.
CHILD_PROGRAM = Path(__file__).with_name("sandbox_child.py")
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateRefused(InvalidTemplate):
    """The template raised an error for this conversation."""


class TemplateExhausted(InvalidTemplate):
    """The template exceeded its time or memory limit. No fallback is tried."""


class ChildDied(Exception):
    """The child process ended before its reply."""


class ChatTemplate(Closeable):
    """Renders conversations. A model without a template uses ChatML.

    >>> with ChatTemplate(None) as template:
    ...     template.render([Message(role="user", content="Hello")])
    '<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(
        self,
        source: str | None,
        variables: Mapping[str, Any] | None = None,
        *,
        clock: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        self.source = CHATML if source is None else source
        self._variables = {
            **(variables or {}),
            **({"enable_thinking": True} if requires_thinking_variable(self.source) else {}),
        }
        self._reads_functions = reads_variable(self.source, "functions") and not reads_variable(self.source, "tools")
        self._clock = clock
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._capabilities: TemplateCapabilities | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        escape: Callable[[str], str] = str,
        separator: str = "",
    ) -> str:
        """Render a conversation to text. With `add_generation_prompt`, the text ends where the answer begins.

        The messages are adapted to the capabilities of the template, which are detected once. If the template rejects
        them nevertheless, the fallbacks of `template.adapter` are tried in turn. If it rejects all of them, raise
        `InvalidTemplate` with the first reason and its line. `chat_template_kwargs` are variables of the template,
        e.g. `enable_thinking`. `escape` is applied to every string that comes from the client: in messages, tools and
        variables. `separator` is the text that it inserts. Everything together takes at most five seconds of CPU
        time.
        """
        (text,) = self._render_all(
            [(messages, tools)],
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=chat_template_kwargs,
            escape=escape,
            separator=separator,
        )
        if isinstance(text, TemplateRefused):
            raise text
        return text

    def render_others(
        self, conversations: Sequence[tuple[Sequence[Message], Sequence[Mapping[str, Any]]]], **options: Any
    ) -> list[str | None]:
        """Render several conversations, each with its tools, in less time than one by one.

        The text of one that the template rejects is None. The options are those of `render`, and so is the time limit
        of each conversation.

        >>> with ChatTemplate("{{ messages[0].content }}!") as template:
        ...     template.render_others([([Message(role="user", content="Hello")], []), ([], [])])
        ['Hello!', None]
        """
        return [
            None if isinstance(text, TemplateRefused) else text for text in self._render_all(conversations, **options)
        ]

    def _render_all(
        self,
        conversations: Sequence[tuple[Sequence[Message], Sequence[Mapping[str, Any]]]],
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        escape: Callable[[str], str] = str,
        separator: str = "",
    ) -> list[str | TemplateRefused]:
        """Render conversations in one exchange with the child. Each one that the template rejects has its fallbacks."""
        budget = RenderBudget(len(conversations))
        capabilities = self.get_capabilities(budget)

        def escape_conversation(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
            variables = self._build_variables(list(tools) or None, capabilities.empty_as_none, add_generation_prompt)
            variables |= dict(chat_template_kwargs or {})
            variables |= {"messages": [to_template_message(message, capabilities) for message in messages]}
            return {name: map_strings(value, escape) for name, value in variables.items()}

        adapted = [(adapt_messages(messages, capabilities), tools) for messages, tools in conversations]
        requests = [escape_conversation(*conversation) for conversation in adapted]
        texts = self._send_conversations(requests, budget, separator)
        for index, (messages, tools) in enumerate(adapted):
            if isinstance(texts[index], str):
                continue
            for rewrite in iter_fallbacks(messages):
                (text,) = self._send_conversations([escape_conversation(rewrite, tools)], budget, separator)
                if isinstance(text, str):
                    texts[index] = text
                    break
        return texts

    def get_capabilities(self, budget: RenderBudget | None = None) -> TemplateCapabilities:
        """Return what the template supports. Detected on the first call."""
        # Without a lock: two threads may detect at the same time, with the same result.
        if self._capabilities is None:
            probe_budget = budget or RenderBudget()

            def render_probe(
                messages: Sequence[TemplateDict], tools: Sequence[TemplateDict] | None, empty_as_none: bool
            ) -> str | None:
                variables = self._build_variables(tools, empty_as_none, True) | {"messages": messages}
                (text,) = self._send_conversations([variables], probe_budget)
                return text if isinstance(text, str) else None

            self._capabilities = detect_capabilities(self.source, render_probe)
        return self._capabilities

    def close(self) -> None:
        with self._lock:
            self._stop_child()

    def _build_variables(
        self, tools: Sequence[Any] | None, empty_as_none: bool, add_generation_prompt: bool
    ) -> dict[str, Any]:
        variables: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if self._reads_functions:  # a template of Fireworks, with the definitions as JSON text
            variables["functions"] = json.dumps(
                [tool["function"] for tool in tools or ()], ensure_ascii=False, indent=4
            )
        if tools is not None or empty_as_none:
            variables["tools"] = tools
        return variables | ({"documents": None} if empty_as_none else {})

    def _send_conversations(
        self, conversations: Sequence[dict[str, Any]], budget: RenderBudget, separator: str = ""
    ) -> list[str | TemplateRefused]:
        """Let the child render conversations, each given by its variables."""
        now = self._clock()
        dates = {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}
        request = {
            "template": self.source,
            "variables": {**self._variables, **dates},
            "conversations": conversations,
            "separator": separator,
            "now": now.isoformat(),
        }
        with self._lock:
            replies = self._send_request(json.dumps(request), budget)
        return [
            TemplateRefused(reply["error"], reply["line"]) if "error" in reply else str(reply["text"])
            for reply in replies
        ]

    def _send_request(self, request: str, budget: RenderBudget) -> list[dict[str, Any]]:
        """Send a request to the child. If the child died, e.g. was killed, send it once more to a new one."""
        for _ in range(MAX_CHILDREN_PER_REQUEST):
            child = self._child or self._start_child()
            try:
                replies: list[dict[str, Any]] = json.loads(exchange_line(child, request.encode() + b"\n", budget))
                return replies
            except ChildDied:
                self._stop_child()
            except BaseException:  # e.g. an interrupt: the late reply must not be read as that to the next request
                self._stop_child()
                raise
        raise TemplateExhausted("its process died twice; it may have exceeded the memory limit", None)

    def _start_child(self) -> subprocess.Popen[bytes]:
        self._child = take_spare_child() or start_child()
        return self._child

    def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(BrokenPipeError):
                child.communicate()


_spare_children: list[tuple[int, subprocess.Popen[bytes]]] = []  # with the id of the process that started them


def prestart_child() -> None:
    """Start the child of the next template now, so that the first rendering does not wait for it.

    A child that no template takes ends with this process.
    """
    if not _spare_children:
        _spare_children.append((os.getpid(), start_child()))


def take_spare_child() -> subprocess.Popen[bytes] | None:
    """Return a child that was started in advance by this process and still runs."""
    while _spare_children:
        owner, child = _spare_children.pop()
        if owner == os.getpid() and child.poll() is None:
            return child
    return None


def start_child() -> subprocess.Popen[bytes]:
    """Start a child process, which waits for requests."""
    child = subprocess.Popen(
        [sys.executable, "-P", str(CHILD_PROGRAM)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,
        start_new_session=True,
    )
    assert child.stdin is not None
    os.set_blocking(child.stdin.fileno(), False)
    return child


class RenderBudget:
    """Time left to the rendering of some conversations, over all its requests to the child."""

    def __init__(self, conversations: int = 1) -> None:
        self._cpu_seconds = conversations * RENDER_CPU_SECONDS
        self._deadline = time.monotonic() + RENDER_WALL_SECONDS

    def is_spent(self, used_cpu_seconds: float) -> bool:
        """Return whether the current request, which used this much, must end."""
        return used_cpu_seconds >= self._cpu_seconds or time.monotonic() > self._deadline

    def subtract(self, used_cpu_seconds: float) -> None:
        """Count a request that has ended."""
        self._cpu_seconds -= used_cpu_seconds


def get_cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process; 0 if it ended."""
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def exchange_line(child: subprocess.Popen[bytes], request: bytes, budget: RenderBudget) -> bytearray:
    """Send a request line and return the reply line.

    Raises `ChildDied` if the child ends first, and `TemplateExhausted` if the budget is spent.
    """
    assert child.stdin is not None
    assert child.stdout is not None
    reading, writing = child.stdout.fileno(), child.stdin.fileno()
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(writing, select.POLLOUT)
    line, unsent = bytearray(), memoryview(request)
    started = last_check = time.monotonic()
    cpu_at_start, used = None, 0.0
    while not line.endswith(b"\n"):
        ready = dict(poll.poll(1000 * LIMIT_CHECK_SECONDS))
        if time.monotonic() - last_check >= LIMIT_CHECK_SECONDS:
            last_check, cpu_seconds = time.monotonic(), get_cpu_seconds(child.pid)
            if cpu_at_start is None:  # before the first check, at most the time that has passed
                cpu_at_start = cpu_seconds - (last_check - started)
            used = cpu_seconds - cpu_at_start
            if budget.is_spent(used):
                raise TemplateExhausted(f"it exceeded the limit of {RENDER_CPU_SECONDS:.0f} s", None)
        if writing in ready:
            try:
                unsent = unsent[os.write(writing, unsent) :]
            except BrokenPipeError:
                raise ChildDied from None
            if not unsent:
                poll.unregister(writing)
        if reading in ready:
            piece = os.read(reading, 1 << 16)
            if not piece:
                raise ChildDied
            line += piece
    budget.subtract(max(used, min(time.monotonic() - started, LIMIT_CHECK_SECONDS)))
    return line
