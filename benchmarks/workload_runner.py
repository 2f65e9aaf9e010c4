"""Runs a workload against one server and records the times and token counts of each reply.

`measures.py` computes the measures from these records.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ideal_cache import IdealCache
from peers import Chunk, Peer
from workloads import Ask, HangUp, Message, Restart, Together, Workload

from afterglow.chat.chat import Chat, ChatOptions
from afterglow.llama.model import LlamaModel

IMAGE_PLACEHOLDER = "\N{FRAME WITH PICTURE}"


class PromptTokenizer:
    """Tokenizes conversations with the template and vocabulary of a model, for the ideal cache."""

    def __init__(self, model: LlamaModel) -> None:
        self.vocabulary = model.vocabulary
        self._chat = Chat(model.vocabulary, model.get_chat_template())

    def tokenize_prompt(self, messages: Sequence[Message]) -> list[int]:
        texts = [{**message, "content": to_text(message["content"])} for message in messages]
        return list(self._chat.plan(texts, ChatOptions()).prompt.tokens)

    def tokenize(self, text: str) -> list[int]:
        return list(self.vocabulary.tokenize(text))

    def close(self) -> None:
        self._chat.close()


@dataclass
class Reply:
    """One streamed answer: its times, and the token counts of its prompt."""

    ask: Ask
    sent_at: float
    chunk_times: list[float] = field(default_factory=list)  # of chunks with text
    text: str = ""
    ended_at: float = 0.0
    prompt_tokens: int = 0
    computed_tokens: int = 0
    needed_tokens: int = 0
    after_restart: bool = False  # the first one after a restart
    after_disconnect: bool = False  # sent when another client disconnected

    @property
    def first_token_seconds(self) -> float:
        return (self.chunk_times[0] if self.chunk_times else self.ended_at) - self.sent_at

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive chunks."""
        return [after - before for before, after in zip(self.chunk_times, self.chunk_times[1:], strict=False)]


@dataclass
class WorkloadRun:
    """Records of one run of a workload."""

    replies: list[Reply] = field(default_factory=list)
    groups: list[list[Reply]] = field(default_factory=list)  # concurrent replies
    seconds: float = 0.0  # without restarts
    cache_bytes: int = 0  # added by this run
    resident_bytes: int = 0


class WorkloadRunner:
    """Runs workloads against one server, and tracks what an ideal cache would hold in its place."""

    def __init__(self, peer: Peer, tokenizer: PromptTokenizer) -> None:
        self.peer, self.ideal_cache, self._tokenizer = peer, IdealCache(), tokenizer
        self._conversations: dict[str, list[Message]] = {}
        self._was_restarted = False

    def run(self, workload: Workload) -> WorkloadRun:
        """Run all steps in order."""
        self._conversations, run, before = {}, WorkloadRun(), self.peer.get_cache_bytes()
        for step in workload.steps:
            started = time.perf_counter()
            match step:
                case Ask():
                    run.replies += self._send([step])
                case Together(asks):
                    run.groups.append(self._send(asks))
                    run.replies += run.groups[-1]
                case HangUp():
                    run.replies.append(self._disconnect(step))
                case Restart():
                    self.peer.stop()
                    self.peer.start()
                    self._was_restarted = True
                    continue
            run.seconds += time.perf_counter() - started
        run.cache_bytes = self.peer.get_cache_bytes() - before
        run.resident_bytes = self.peer.resident_bytes
        return run

    def _send(self, asks: Sequence[Ask]) -> list[Reply]:
        """Send all requests at once. Those with `after` wait until the others have received that many chunks."""
        bodies = [self._build_body(ask) for ask in asks]
        replies = [Reply(ask, 0.0) for ask in asks]
        progress = Progress([reply for reply in replies if not reply.ask.after])

        def run(reply: Reply, body: dict[str, Any]) -> None:
            progress.wait(reply.ask.after)
            receive(reply, self.peer.chat, body, progress.notify)

        with ThreadPoolExecutor(len(asks)) as pool:
            for future in [pool.submit(run, reply, body) for reply, body in zip(replies, bodies, strict=True)]:
                future.result()
        for reply in replies:
            self._record(reply)
        return replies

    def _disconnect(self, step: HangUp) -> Reply:
        connection = self.peer.post(self._build_body(step.ask))
        time.sleep(step.seconds)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        reply = Reply(step.other, 0.0, after_disconnect=True)
        receive(reply, self.peer.chat, self._build_body(step.other))
        self._record(reply)
        return reply

    def _build_body(self, ask: Ask) -> dict[str, Any]:
        """Append the messages to their conversation and build the request."""
        if ask.of is not None:
            self._conversations[ask.talk] = self._conversations[ask.of[0]][: ask.of[1]]
        conversation = self._conversations.setdefault(ask.talk, [])
        conversation += ask.says
        body: dict[str, Any] = {"messages": list(conversation), "max_tokens": ask.answer}
        if ask.schema is None:
            return body | self.peer.build_ignore_eos()
        schema = {"name": "answer", "schema": ask.schema, "strict": True}
        return body | {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _record(self, reply: Reply) -> None:
        """Count the tokens that the ideal cache computes, and append the answer to its conversation."""
        conversation = self._conversations[reply.ask.talk]
        tokens = self._tokenizer.tokenize_prompt(conversation)
        reply.needed_tokens = self.ideal_cache.add_prompt(tokens)
        if any(isinstance(message["content"], list) for message in reply.ask.says):
            reply.needed_tokens += reply.prompt_tokens - len(tokens)  # all tokens of a new image are needed
        self.ideal_cache.add_completion(tokens, self._tokenizer.tokenize(reply.text))
        conversation.append({"role": "assistant", "content": reply.text})
        reply.after_restart, self._was_restarted = self._was_restarted, False


class Progress:
    """Lets a request wait until others have received a number of chunks."""

    def __init__(self, replies: list[Reply]) -> None:
        self._replies, self._changed = replies, threading.Condition()

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, chunks: int) -> None:
        """Return when each reply has received `chunks` chunks or has ended."""
        with self._changed:
            while not all(len(reply.chunk_times) >= chunks or reply.ended_at for reply in self._replies):
                self._changed.wait(1.0)


def to_text(content: str | list[dict[str, Any]]) -> str:
    """Return the text of a message, with a placeholder for each image.

    >>> to_text([{"type": "image_url"}, {"type": "text", "text": " What is it?"}]) == IMAGE_PLACEHOLDER + " What is it?"
    True
    """
    if isinstance(content, str):
        return content
    return "".join(part.get("text", IMAGE_PLACEHOLDER) for part in content)


def receive(
    reply: Reply,
    chat: Callable[[dict[str, Any]], Any],
    body: dict[str, Any],
    notify: Callable[[], None] = lambda: None,
) -> None:
    """Send a request and receive its answer to the end."""
    reply.sent_at = time.perf_counter()
    chunk: Chunk
    for chunk in chat(body):
        if chunk.text:
            reply.chunk_times.append(chunk.received_at)
            reply.text += chunk.text
            notify()
        if chunk.prompt_tokens:
            reply.prompt_tokens, reply.computed_tokens = chunk.prompt_tokens, chunk.computed_tokens
    reply.ended_at = time.perf_counter()
    notify()
