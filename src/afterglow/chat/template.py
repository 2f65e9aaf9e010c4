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

from afterglow.chat import template_child
from afterglow.chat.adapting import adapted, second_tries
from afterglow.chat.habits import Habits, Turn, learn
from afterglow.chat.messages import Message, readable
from afterglow.closing import Closing
from afterglow.errors import InvalidTemplate

PATIENCE = 5.0  # seconds for one rendering with all its attempts, and the child's start
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Refused(InvalidTemplate):
    """The template gave an answer, and it was no."""


class Exhausted(InvalidTemplate):
    """The template gave no answer in its time and memory: it is not asked again."""


class ChatTemplate(Closing):
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
        self._habits: Habits | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, open for the assistant's answer where `generation`.

        It is written as the template wants it: what that is, is found out once with small conversations
        (`chat.habits`), and heeded (`chat.adapting`). What the template refuses nevertheless is rewritten and tried
        again; what it refuses in every form is an `InvalidTemplate` with the first reason and its line. `arguments`
        are the template's own variables, such as `enable_thinking`. All of it together takes five seconds at most.
        """
        until = time.monotonic() + PATIENCE
        habits = self._learned(until)
        told = adapted(messages, habits)
        given = self._given(list(tools) or None, habits.nothing, generation) | dict(arguments or {})
        try:
            return self._written(told, habits, given, until)
        except Refused as refusal:
            for other in second_tries(told):
                with contextlib.suppress(Refused):
                    return self._written(other, habits, given, until)
            raise refusal from None

    def habits(self) -> Habits:
        """How this template wants conversations written, and what it does not show."""
        return self._learned(time.monotonic() + PATIENCE)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _learned(self, until: float) -> Habits:
        """Two threads may find it out at the same time; they find the same."""
        if self._habits is None:

            def attempt(turns: Sequence[Turn], tools: Sequence[Turn] | None, nothing: bool) -> str | None:
                try:
                    return self._render(turns, self._given(tools, nothing, True), until)
                except Refused:
                    return None

            self._habits = learn(self.source, attempt)
        return self._habits

    def _given(self, tools: Sequence[Any] | None, nothing: bool, generation: bool) -> dict[str, Any]:
        given: dict[str, Any] = {"add_generation_prompt": generation}
        if tools is not None or nothing:
            given["tools"] = tools
        return given | ({"documents": None} if nothing else {})

    def _written(self, messages: Sequence[Message], habits: Habits, given: dict[str, Any], until: float) -> str:
        return self._render([readable(message, habits) for message in messages], given, until)

    def _render(self, turns: Sequence[Turn], given: dict[str, Any], until: float) -> str:
        variables = {**self._variables, **given, "messages": turns}
        now = self._clock().isoformat()
        request = json.dumps({"template": self.source, "variables": variables, "now": now})
        with self._lock:
            answer = self._ask(request, until)
        if "error" in answer:
            raise Refused(answer["error"], answer["line"])
        return str(answer["text"])

    def _ask(self, request: str, until: float) -> dict[str, Any]:
        child = self._child or self._start()
        try:
            line = exchanged(child, request.encode() + b"\n", until)
        except BaseException:  # an interrupt: the answer that still comes must not be taken for the next one's
            self._end()
            raise
        if not line:
            self._end()
            raise Exhausted(f"it took longer than {PATIENCE:.0f} s, or more memory than it may have", None)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        # By its path: as a module it would import all of afterglow first, and take three times as long.
        command = [sys.executable, "-P", template_child.__file__]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0
        )
        assert self._child.stdin is not None
        os.set_blocking(self._child.stdin.fileno(), False)
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(BrokenPipeError):
                child.communicate()


def exchanged(child: subprocess.Popen[bytes], request: bytes, until: float) -> bytes | bytearray:
    """The line that a child answers with; nothing where it does not until then, also where it does not even read."""
    assert child.stdin is not None
    assert child.stdout is not None
    reading, writing = child.stdout.fileno(), child.stdin.fileno()
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    poll.register(writing, select.POLLOUT)
    line, unsent = bytearray(), memoryview(request)
    while not line.endswith(b"\n"):
        ready = dict(poll.poll(1000 * max(0.0, until - time.monotonic())))
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
