"""Plays a workload against one server, and keeps what came when.

It knows conversations and clocks. What the numbers mean, `measures.py` says.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from ideal import Ideal
from peers import Chunk, Peer
from workloads import Ask, HangUp, Message, Restart, Together, Workload

from afterglow.chat.chat import Chat, ChatOptions
from afterglow.llama.model import LlamaModel

PICTURE = "\N{FRAME WITH PICTURE}"  # stands for one where only texts are read


class Reader:
    """A model's conversations as tokens: what the ideal cache sees."""

    def __init__(self, model: LlamaModel) -> None:
        self.vocabulary = model.vocabulary
        self._chat = Chat(model.vocabulary, model.get_chat_template())

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        texts = [{**message, "content": text_of(message["content"])} for message in messages]
        return list(self._chat.plan(texts, ChatOptions()).prompt.tokens)

    def answer(self, text: str) -> list[int]:
        return list(self.vocabulary.tokenize(text))

    def close(self) -> None:
        self._chat.close()


@dataclass
class Reply:
    """One answer: when it was asked for, when its pieces came, and what its prompt cost."""

    ask: Ask
    asked: float
    times: list[float] = field(default_factory=list)  # of pieces with text
    text: str = ""
    ended: float = 0.0
    prompt: int = 0
    computed: int = 0
    needed: int = 0
    restarted: bool = False  # the first after a restart
    freed: bool = False  # asked when another client went away

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return (self.times[0] if self.times else self.ended) - self.asked

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces."""
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]


@dataclass
class Played:
    """One run of a workload."""

    replies: list[Reply] = field(default_factory=list)
    groups: list[list[Reply]] = field(default_factory=list)  # those that ran at once
    seconds: float = 0.0  # without restarts
    cache_bytes: int = 0  # that it added
    resident: int = 0


class Player:
    """Plays workloads against one server, and remembers what an ideal cache would have in its place."""

    def __init__(self, peer: Peer, reader: Reader) -> None:
        self.peer, self.ideal, self._reader = peer, Ideal(), reader
        self._talks: dict[str, list[Message]] = {}
        self._restarted = False

    def play(self, workload: Workload) -> Played:
        """All steps, in order."""
        self._talks, played, before = {}, Played(), self.peer.cache_bytes()
        for step in workload.steps:
            started = time.perf_counter()
            match step:
                case Ask():
                    played.replies += self._answer([step])
                case Together(asks):
                    played.groups.append(self._answer(asks))
                    played.replies += played.groups[-1]
                case HangUp():
                    played.replies.append(self._hang_up(step))
                case Restart():
                    self.peer.stop()
                    self.peer.start()
                    self._restarted = True
                    continue
            played.seconds += time.perf_counter() - started
        played.cache_bytes = self.peer.cache_bytes() - before
        played.resident = self.peer.resident
        return played

    def _answer(self, asks: Sequence[Ask]) -> list[Reply]:
        """Ask for all at once; those that come later wait for the others to have written so much."""
        bodies = [self._body(ask) for ask in asks]
        replies = [Reply(ask, 0.0) for ask in asks]
        progress = Progress([reply for reply in replies if not reply.ask.after])

        def run(reply: Reply, body: dict[str, Any]) -> None:
            progress.wait(reply.ask.after)
            receive(reply, self.peer.chat, body, progress.note)

        with ThreadPoolExecutor(len(asks)) as pool:
            for done in [pool.submit(run, reply, body) for reply, body in zip(replies, bodies, strict=True)]:
                done.result()
        for reply in replies:
            self._account(reply)
        return replies

    def _hang_up(self, step: HangUp) -> Reply:
        connection = self.peer.post(self._body(step.ask))
        time.sleep(step.seconds)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        reply = Reply(step.other, 0.0, freed=True)
        receive(reply, self.peer.chat, self._body(step.other))
        self._account(reply)
        return reply

    def _body(self, ask: Ask) -> dict[str, Any]:
        """The request; its messages are part of the conversation from now on."""
        if ask.of is not None:
            self._talks[ask.talk] = self._talks[ask.of[0]][: ask.of[1]]
        talk = self._talks.setdefault(ask.talk, [])
        talk += ask.says
        body: dict[str, Any] = {"messages": list(talk), "max_tokens": ask.answer}
        if ask.schema is None:
            return body | self.peer.endless()
        schema = {"name": "answer", "schema": ask.schema, "strict": True}
        return body | {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _account(self, reply: Reply) -> None:
        """What the ideal cache would have computed; the answer becomes part of the conversation."""
        talk = self._talks[reply.ask.talk]
        tokens = self._reader.prompt(talk)
        reply.needed = self.ideal.needed(tokens)
        if any(isinstance(message["content"], list) for message in reply.ask.says):
            reply.needed += reply.prompt - len(tokens)  # a new picture has to be computed, however many tokens it has
        self.ideal.answered(tokens, self._reader.answer(reply.text))
        talk.append({"role": "assistant", "content": reply.text})
        reply.restarted, self._restarted = self._restarted, False


class Progress:
    """Lets a request wait until others have written so many pieces."""

    def __init__(self, replies: list[Reply]) -> None:
        self._replies, self._changed = replies, threading.Condition()

    def note(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def wait(self, pieces: int) -> None:
        """Return when each has written so many, or has ended."""
        with self._changed:
            while not all(len(reply.times) >= pieces or reply.ended for reply in self._replies):
                self._changed.wait(1.0)


def text_of(content: str | list[dict[str, Any]]) -> str:
    """What a message says, with a sign for each picture.

    >>> text_of([{"type": "image_url"}, {"type": "text", "text": " What is it?"}]) == PICTURE + " What is it?"
    True
    """
    if isinstance(content, str):
        return content
    return "".join(part.get("text", PICTURE) for part in content)


def receive(
    reply: Reply,
    chat: Callable[[dict[str, Any]], Any],
    body: dict[str, Any],
    note: Callable[[], None] = lambda: None,
) -> None:
    """Take an answer to its end."""
    reply.asked = time.perf_counter()
    chunk: Chunk
    for chunk in chat(body):
        if chunk.text:
            reply.times.append(chunk.when)
            reply.text += chunk.text
            note()
        if chunk.prompt:
            reply.prompt, reply.computed = chunk.prompt, chunk.computed
    reply.ended = time.perf_counter()
    note()
