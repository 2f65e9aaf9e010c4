"""Runs a workload against one server and records the times and token counts of each reply.

`measures.py` computes the measures from these records.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ideal_cache import IdealCache
from peers import Chunk, Peer
from workloads import Ask, CallTools, HangUp, Message, Restart, Together, Workload, user

from afterglow.chat.chat import Chat, ChatOptions
from afterglow.chat.prompt import find_common_prefix
from afterglow.llama.model import LlamaModel

AGENT_TEMPLATE = Path(__file__).parent / "agent_template.jinja"
END_OF_TURN = "<|im_end|>"
IMAGE_PLACEHOLDER = "\N{FRAME WITH PICTURE}"


class PromptTokenizer:
    """Tokenizes conversations with the template and vocabulary of a model, for the ideal cache."""

    def __init__(self, model: LlamaModel) -> None:
        self.vocabulary = model.vocabulary
        self._chat = Chat(model.vocabulary, model.get_chat_template())
        self._agent_chat = Chat(model.vocabulary, AGENT_TEMPLATE.read_text())

    def tokenize_prompt(self, messages: Sequence[Message]) -> list[int]:
        texts = [{**message, "content": to_text(message["content"])} for message in messages]
        return list(self._chat.plan(texts, ChatOptions()).prompt.tokens)

    def count_needed(self, before: Sequence[Message], messages: Sequence[Message], tools: Sequence[Any]) -> int:
        """Count the prompt tokens that the next turn of an agent needs if all its sampled tokens are cached.

        `before` is the conversation of the last turn. These are the tokens after its answer, with its end token. If the
        template renders the text before the answer differently, they are all tokens from there on.
        """
        text = self._agent_chat.plan(messages, ChatOptions(tools=tools)).prompt.text
        start = 0
        if before:
            last = self._agent_chat.plan(before, ChatOptions(tools=tools)).prompt.text
            start = len(find_common_prefix(last, text))
            start = text.index(END_OF_TURN, start) if start == len(last) else start
        return len(self.vocabulary.tokenize(text[start:], parse_special=True))

    def tokenize(self, text: str) -> list[int]:
        return list(self.vocabulary.tokenize(text))

    def close(self) -> None:
        self._chat.close()
        self._agent_chat.close()


@dataclass
class Reply:
    """One streamed answer: its times, and the token counts of its prompt."""

    ask: Ask
    sent_at: float
    prompt: list[int] = field(default_factory=list)  # tokens, without those of images and native tools
    chunk_times: list[float] = field(default_factory=list)  # of chunks with text
    text: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)  # id, name and arguments of native tool calls
    generated_tokens: int = 0
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
        self._last_prompts: dict[str, list[Message]] = {}  # of agents with native tools
        self._was_restarted = False
        self._unmeasured_seconds = 0.0  # of preparations

    def run(self, workload: Workload) -> WorkloadRun:
        """Run all steps in order."""
        self._conversations, self._last_prompts = {}, {}
        run, before = WorkloadRun(), self.peer.get_cache_bytes()
        for step in workload.steps:
            started, self._unmeasured_seconds = time.perf_counter(), 0.0
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
            run.seconds += time.perf_counter() - started - self._unmeasured_seconds
        run.cache_bytes = self.peer.get_cache_bytes() - before
        run.resident_bytes = self.peer.resident_bytes
        return run

    def _send(self, asks: Sequence[Ask]) -> list[Reply]:
        """Send all requests at once. Those with `after` wait until the others have received that many chunks."""
        bodies = [self._build_body(ask) for ask in asks]
        replies = [self._start_reply(ask) for ask in asks]
        self._prepare(replies, bodies)
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
        gone, body = self._build_body(step.ask), self._build_body(step.other)
        reply = self._start_reply(step.other)
        reply.after_disconnect = True
        connection = self.peer.post(gone)
        time.sleep(step.seconds)
        assert connection.sock is not None
        connection.sock.close()
        connection.close()
        receive(reply, self.peer.chat, body)
        self._record(reply)
        return reply

    def _build_body(self, ask: Ask) -> dict[str, Any]:
        """Append the messages to their conversation and build the request."""
        if ask.of is not None:
            self._conversations[ask.talk] = self._conversations[ask.of[0]][: ask.of[1]]
        conversation = self._conversations.setdefault(ask.talk, [])
        conversation += ask.says
        body: dict[str, Any] = {"messages": list(conversation), "max_tokens": ask.answer}
        if isinstance(ask, CallTools):
            sampling = {"temperature": 0.7, "seed": ask.seed}
            tools = {"tools": ask.tools, "tool_choice": "required", "parallel_tool_calls": False}
            return body | sampling | tools | self.peer.build_reasoning_budget()
        if ask.schema is None:
            return body | self.peer.build_ignore_eos()
        schema = {"name": "answer", "schema": ask.schema, "strict": True}
        return body | {"response_format": {"type": "json_schema", "json_schema": schema}}

    def _start_reply(self, ask: Ask) -> Reply:
        """Count the tokens of the prompt that the ideal cache computes, without those of images, and add the prompt."""
        reply, conversation = Reply(ask, 0.0), self._conversations[ask.talk]
        if isinstance(ask, CallTools):
            before = self._last_prompts.get(ask.talk, [])
            reply.needed_tokens = self._tokenizer.count_needed(before, conversation, ask.tools)
            self._last_prompts[ask.talk] = list(conversation)
        else:
            reply.prompt = self._tokenizer.tokenize_prompt(conversation)
            reply.needed_tokens = self.ideal_cache.add_prompt(reply.prompt)
        return reply

    def _prepare(self, replies: Sequence[Reply], bodies: Sequence[dict[str, Any]]) -> None:
        """Let the server prepare for the requests, one per slot. That is not measured."""
        started = time.perf_counter()
        for slot, (reply, body) in enumerate(zip(replies, bodies, strict=True)):
            body |= self.peer.prepare(slot, reply.prompt[: -reply.needed_tokens])
        self._unmeasured_seconds += time.perf_counter() - started

    def _record(self, reply: Reply) -> None:
        """Append the answer to its conversation, and add it to the ideal cache."""
        conversation = self._conversations[reply.ask.talk]
        if isinstance(reply.ask, CallTools):
            self._record_calls(reply, reply.ask, conversation)
            return
        if any(isinstance(message["content"], list) for message in reply.ask.says):
            reply.needed_tokens += reply.prompt_tokens - len(reply.prompt)  # all tokens of a new image are needed
        self.ideal_cache.add_completion(reply.prompt, self._tokenizer.tokenize(reply.text))
        conversation.append({"role": "assistant", "content": reply.text})
        reply.after_restart, self._was_restarted = self._was_restarted, False

    def _record_calls(self, reply: Reply, ask: CallTools, conversation: list[Message]) -> None:
        """Append the calls and their results to the conversation, as a client that parses the arguments does."""
        calls = [
            {"id": call["id"], "type": "function", "function": {"name": call["name"], "arguments": arguments}}
            for call in reply.calls.values()
            for arguments in [reserialize(call["arguments"])]
        ]
        message = {"role": "assistant", "content": reply.text, "reasoning_content": reply.reasoning}
        conversation.append(message | ({"tool_calls": calls} if calls else {}))
        results = [{"role": "tool", "tool_call_id": call["id"], "content": ask.result} for call in calls]
        conversation += results or [user(ask.result)]  # a server may fail to enforce a call


def reserialize(arguments: str) -> str:
    """Parse arguments and write them with another order of keys. Broken ones stay as they are.

    >>> reserialize('{"a":1,"b":2}')
    '{"b": 2, "a": 1}'
    """
    with contextlib.suppress(ValueError, AttributeError):
        return json.dumps(dict(reversed(json.loads(arguments).items())))
    return arguments


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
        for call in chunk.delta.get("tool_calls") or ():
            known = reply.calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
            known["id"] = call.get("id") or known["id"]
            for name in ("name", "arguments"):
                known[name] += call.get("function", {}).get(name) or ""
        reply.reasoning += chunk.delta.get("reasoning_content") or ""
        reply.generated_tokens = chunk.generated_tokens or reply.generated_tokens
        if chunk.text or chunk.delta.get("reasoning_content") or chunk.delta.get("tool_calls"):
            reply.chunk_times.append(chunk.received_at)
            reply.text += chunk.text
            notify()
        if chunk.prompt_tokens:
            reply.prompt_tokens, reply.computed_tokens = chunk.prompt_tokens, chunk.computed_tokens
    reply.ended_at = time.perf_counter()
    notify()
