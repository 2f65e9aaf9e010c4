"""The model's own chat template: messages in, the text that the model was trained on out.

It runs in a child process with bounded time and memory: whatever a model file brings, it gets an error and nothing
else.
"""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from afterglow.chat.messages import Message, readable
from afterglow.closing import Closing
from afterglow.errors import InvalidTemplate

PATIENCE = 5.0  # seconds for one rendering, and the child's start
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class ChatTemplate(Closing):
    """Renders conversations. A model without a template is written as ChatML.

    >>> with ChatTemplate(None) as template:
    ...     template.render([Message(role="user", content="Hello")])
    '<|im_start|>user\\nHello<|im_end|>\\n<|im_start|>assistant\\n'
    """

    def __init__(self, source: str | None, variables: Mapping[str, Any] | None = None) -> None:
        self.source = CHATML if source is None else source
        self._variables = dict(variables or {})
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        generation: bool = True,
        arguments: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text, open for the assistant's answer where `generation`.

        A template that refuses system messages gets their text in front of the first user message instead; what it
        refuses then is an `InvalidTemplate` with its reason and line.
        """
        extra = {"tools": list(tools) or None, "add_generation_prompt": generation, **(arguments or {})}
        try:
            return self._render(messages, extra)
        except InvalidTemplate:
            merged = without_system(messages)
            if merged == list(messages):
                raise
            return self._render(merged, extra)

    def close(self) -> None:
        with self._lock:
            self._end()

    def _render(self, messages: Sequence[Message], extra: dict[str, Any]) -> str:
        variables = {**self._variables, **extra, "messages": [readable(message) for message in messages]}
        request = json.dumps({"template": self.source, "variables": variables})
        with self._lock:
            answer = self._ask(request)
        if "error" in answer:
            raise InvalidTemplate(answer["error"], answer["line"])
        return str(answer["text"])

    def _ask(self, request: str) -> dict[str, Any]:
        child = self._child or self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        watch = threading.Timer(PATIENCE, child.kill)  # also where the pipe is full and nobody reads it
        watch.start()
        try:
            child.stdin.write(request + "\n")
            child.stdin.flush()
            line = child.stdout.readline() if select.select([child.stdout], [], [], PATIENCE)[0] else ""
        except BrokenPipeError:
            line = ""
        finally:
            watch.cancel()
        if not line:
            self._end()
            raise InvalidTemplate(f"it took longer than {PATIENCE:.0f} s, or more memory than it may have", None)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "afterglow.chat.template_child"]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        return self._child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            with contextlib.suppress(BrokenPipeError):
                child.communicate()


def without_system(messages: Sequence[Message]) -> list[Message]:
    """The conversation with the text of its system messages in front of the first user message."""
    system = [message.content for message in messages if message.role == "system" and message.content]
    rest = [message for message in messages if message.role != "system"]
    for index, message in enumerate(rest):
        if system and message.role == "user":
            rest[index] = replace(message, content="\n\n".join([*system, message.content]))
            return rest
    return list(messages)
