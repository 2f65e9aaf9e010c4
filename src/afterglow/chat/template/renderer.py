"""The model's own chat template: messages in, the text that the model was trained on out.

It runs in a child process with bounded time and memory: whatever a model file brings, it gets an error and nothing
else.
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
from typing import Any

from afterglow.chat.messages import Message, to_template_message
from afterglow.chat.template import sandbox_child
from afterglow.chat.template.adapter import adapt_messages, iter_fallbacks
from afterglow.chat.template.capabilities import TemplateCapabilities, TemplateDict, detect_capabilities
from afterglow.closeable import Closeable
from afterglow.errors import InvalidTemplate

RENDER_TIMEOUT_SECONDS = 5.0  # seconds for one rendering with all its attempts, and the child's start
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TemplateRefused(InvalidTemplate):
    """The template gave an answer, and it was no."""


class TemplateExhausted(InvalidTemplate):
    """The template gave no answer in its time and memory: it is not asked again."""


class ChatTemplate(Closeable):
    """Renders conversations. A model without a template is written as ChatML.

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
        self._variables = dict(variables or {})
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
    ) -> str:
        """The conversation as text, open for the assistant's answer where `generation`.

        It is written as the template wants it: what that is, is found out once with small conversations
        (`chat.habits`), and heeded (`chat.adapting`). What the template refuses nevertheless is rewritten and tried
        again; what it refuses in every form is an `InvalidTemplate` with the first reason and its line. `arguments`
        are the template's own variables, such as `enable_thinking`. All of it together takes five seconds at most.
        """
        until = time.monotonic() + RENDER_TIMEOUT_SECONDS
        habits = self._detect_capabilities(until)
        told = adapt_messages(messages, habits)
        given = self._build_variables(list(tools) or None, habits.empty_as_none, add_generation_prompt) | dict(
            chat_template_kwargs or {}
        )
        try:
            return self._render_messages(told, habits, given, until)
        except TemplateRefused as refusal:
            for other in iter_fallbacks(told):
                with contextlib.suppress(TemplateRefused):
                    return self._render_messages(other, habits, given, until)
            raise refusal from None

    def get_capabilities(self) -> TemplateCapabilities:
        """How this template wants conversations written, and what it does not show."""
        return self._detect_capabilities(time.monotonic() + RENDER_TIMEOUT_SECONDS)

    def close(self) -> None:
        with self._lock:
            self._stop_child()

    def _detect_capabilities(self, deadline: float) -> TemplateCapabilities:
        """Two threads may find it out at the same time; they find the same."""
        if self._capabilities is None:

            def attempt(
                turns: Sequence[TemplateDict], tools: Sequence[TemplateDict] | None, nothing: bool
            ) -> str | None:
                try:
                    return self._render_dicts(turns, self._build_variables(tools, nothing, True), deadline)
                except TemplateRefused:
                    return None

            self._capabilities = detect_capabilities(self.source, attempt)
        return self._capabilities

    def _build_variables(
        self, tools: Sequence[Any] | None, empty_as_none: bool, add_generation_prompt: bool
    ) -> dict[str, Any]:
        given: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools is not None or empty_as_none:
            given["tools"] = tools
        return given | ({"documents": None} if empty_as_none else {})

    def _render_messages(
        self,
        messages: Sequence[Message],
        capabilities: TemplateCapabilities,
        render_variables: dict[str, Any],
        deadline: float,
    ) -> str:
        return self._render_dicts(
            [to_template_message(message, capabilities) for message in messages], render_variables, deadline
        )

    def _render_dicts(self, messages: Sequence[TemplateDict], render_variables: dict[str, Any], deadline: float) -> str:
        variables = {**self._variables, **render_variables, "messages": messages}
        now = self._clock().isoformat()
        request = json.dumps({"template": self.source, "variables": variables, "now": now})
        with self._lock:
            answer = self._send_request(request, deadline)
        if "error" in answer:
            raise TemplateRefused(answer["error"], answer["line"])
        return str(answer["text"])

    def _send_request(self, request: str, deadline: float) -> dict[str, Any]:
        child = self._child or self._start_child()
        try:
            line = exchange_line(child, request.encode() + b"\n", deadline)
        except BaseException:  # an interrupt: the answer that still comes must not be taken for the next one's
            self._stop_child()
            raise
        if not line:
            self._stop_child()
            raise TemplateExhausted(
                f"it took longer than {RENDER_TIMEOUT_SECONDS:.0f} s, or more memory than it may have", None
            )
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start_child(self) -> subprocess.Popen[bytes]:
        # By its path: as a module it would import all of afterglow first, and take three times as long.
        command = [sys.executable, "-P", sandbox_child.__file__]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        return self._child

    def _stop_child(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(BrokenPipeError):
                child.communicate()


def exchange_line(child: subprocess.Popen[bytes], request: bytes, deadline: float) -> bytes | bytearray:
    """The line that a child answers with; nothing where it does not until then, also where it does not even read."""
    assert child.stdin is not None
    assert child.stdout is not None
    reading, writing = child.stdout.fileno(), child.stdin.fileno()
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(writing, select.POLLOUT)
    line, unsent = bytearray(), memoryview(request)
    while not line.endswith(b"\n"):
        ready = dict(poll.poll(1000 * max(0.0, deadline - time.monotonic())))
        if not ready:
            return b""
        if writing in ready:
            try:
                unsent = unsent[os.write(writing, unsent) :]
            except BrokenPipeError:
                return b""
            if not unsent:
                poll.unregister(writing)
        if reading in ready:
            piece = os.read(reading, 1 << 16)
            if not piece:  # it ended
                return b""
            line += piece
    return line
