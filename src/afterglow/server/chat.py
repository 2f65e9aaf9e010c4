"""/v1/chat/completions."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.chat.parts import CallPart, Part, Reasoning, Text
from afterglow.chat.reply import Delta, Turn
from afterglow.server import limits
from afterglow.server.answers import Asked, Running, logprob_of, run, usage_of
from afterglow.server.errors import invalid
from afterglow.server.security import tenant
from afterglow.server.service import Service
from afterglow.server.sse import DONE, Headed, streamed
from afterglow.server.types.chat import ChatFields, ChatRequest, message, plain
from afterglow.server.wire import StrictRoute

FINISH = {"deadline": "length"}  # OpenAI has no word for it; `stop_reason` says it


def routes(service: Service) -> APIRouter:
    """The route, for an application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/chat/completions", summary="Answer a conversation")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await service.while_there(request, answer(service, body, tenant(request)), "messages")

    return router


async def answer(service: Service, body: ChatRequest, salt: str) -> Response:
    """Answer a conversation, whole or as it comes."""
    check(body)
    running = await run(service, body.model, asked_by(service, body, salt))
    page = Page(body, running)
    if not body.stream:
        try:
            return JSONResponse(page.whole(await running.turns()))
        finally:
            running.end()
    return await streamed(running.deltas(), page.events, ping=service.settings.ping_seconds, ended=running.end)


def check(body: ChatRequest) -> None:
    """What fields have to do with each other."""
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` is for streams: set `stream`")
    if body.top_logprobs is not None and not body.logprobs:
        raise invalid("top_logprobs", "`top_logprobs` needs `logprobs`")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        raise invalid("max_tokens", "`max_tokens` is the old name of `max_completion_tokens`: give one of them")


def asked_by(service: Service, body: ChatRequest, salt: str) -> Asked:
    """What the library is asked for."""
    return Asked(
        messages=[message(one) for one in body.messages],
        chat=chat_options(body),
        fields=body,
        n=body.n or 1,
        max_tokens=body.max_completion_tokens or body.max_tokens,
        stop=limits.stops(body.stop, service.settings),
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        overflow=body.overflow or "refuse",
        salt=salt,
    )


def chat_options(body: ChatFields) -> dict[str, Any]:
    """What makes the prompt and what leads the answer, as `Answering.plan` has it."""
    if body.reasoning_effort is not None and body.reasoning_budget is not None:
        raise invalid("reasoning_budget", "`reasoning_budget` and `reasoning_effort` say the same: give one of them")
    if body.tools is None and (body.tool_choice is not None or body.parallel_tool_calls is not None):
        raise invalid("tool_choice" if body.tool_choice else "parallel_tool_calls", "there are no `tools` to call")
    reasoning = body.reasoning_effort if body.reasoning_budget is None else body.reasoning_budget
    return {
        "tools": [plain(tool) for tool in body.tools or ()],
        "tool_choice": plain(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "response_format": plain(body.response_format),
        "reasoning": reasoning,
        "arguments": body.chat_template_kwargs,
    }


class Page:
    """An answer as OpenAI writes it, whole or in chunks."""

    def __init__(self, body: ChatRequest, running: Running) -> None:
        self._body = body
        self._running = running
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head: dict[str, Any] = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": running.created,
            "model": body.model,
            "system_fingerprint": running.model.fingerprint,
            "service_tier": "default",
        }
        self._chunks = Headed({**self._head, "object": "chat.completion.chunk"})

    def whole(self, turns: list[Turn]) -> dict[str, Any]:
        """The answer at once."""
        written: dict[str, Any] = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, turn) for index, turn in enumerate(turns)],
            "usage": usage_of(turns, self._running.tallies),
        }
        if self._body.metadata is not None:
            written["metadata"] = self._body.metadata
        return written | self._overflow()

    async def events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """The answer as it comes."""
        for index in range(self._body.n or 1):
            yield self._chunk(index, {"role": "assistant", "content": ""}, extra=self._overflow())
        async for index, delta in deltas:
            logprobs = self._logprobs([delta.token] if delta.token else [])
            if delta.parts or (logprobs and logprobs["content"]):
                yield self._chunk(index, delta_of(delta.parts), logprobs=logprobs)
        turns = self._running.finished()
        for index, turn in enumerate(turns):
            yield self._chunk(index, {}, **ending(turn))
        if self._usage:
            yield self._chunks.event({"choices": [], "usage": usage_of(turns, self._running.tallies)})
        yield DONE

    def _choice(self, index: int, turn: Turn) -> dict[str, Any]:
        written: dict[str, Any] = {"role": "assistant", "content": turn.text, "refusal": None}
        if turn.reasoning:
            written["reasoning_content"] = turn.reasoning
        if turn.calls:
            written["content"] = turn.text or None
            written["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in turn.calls
            ]
        return {"index": index, "message": written, "logprobs": self._logprobs(turn.tokens), **ending(turn)}

    def _chunk(self, index: int, delta: dict[str, Any], *, extra: dict[str, Any] | None = None, **choice: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **choice}
        rest = {"choices": [choice], **(extra or {})}
        return self._chunks.event({**rest, "usage": None} if self._usage else rest)

    def _logprobs(self, tokens: Sequence[Any]) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        running = self._running
        shown = [logprob_of(running.model, token) for token in tokens if running.shown(token)]
        return {"content": shown, "refusal": None}

    def _overflow(self) -> dict[str, Any]:
        cut = self._running.cut
        return {} if cut is None else {"overflow": cut.report}


def ending(turn: Turn) -> dict[str, Any]:
    """Why an answer ended: OpenAI's word, and ours beside it."""
    reason = "deadline" if turn.finish == "deadline" else turn.stop if isinstance(turn.stop, str) else None
    return {"finish_reason": FINISH.get(turn.finish, turn.finish), "stop_reason": reason}


def delta_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Parts of an answer as OpenAI's delta."""
    delta: dict[str, Any] = {}
    for part in parts:
        match part:
            case Text(text):
                delta["content"] = delta.get("content", "") + text
            case Reasoning(text):
                delta["reasoning_content"] = delta.get("reasoning_content", "") + text
            case CallPart():
                delta.setdefault("tool_calls", []).append(call_delta(part))
    return delta


def call_delta(part: CallPart) -> dict[str, Any]:
    """A piece of a call; the first has its id and name."""
    written: dict[str, Any] = {"index": part.index, "function": {"arguments": part.arguments}}
    if part.id is not None:
        written |= {"id": part.id, "type": "function"}
    if part.name is not None:
        written["function"]["name"] = part.name
    return written
