"""/v1/responses: answers that remember what was said before."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.chat.messages import plain as plain_message
from afterglow.chat.parts import Text
from afterglow.chat.reply import Delta
from afterglow.errors import AfterglowError
from afterglow.server.answers import Asked, Running, logprob_of, run, usage_of
from afterglow.server.errors import Refusal, invalid, refusal_of
from afterglow.server.response_items import Writer, messages_of, new_id
from afterglow.server.response_store import ResponseStore, Stored
from afterglow.server.security import tenant
from afterglow.server.service import Service
from afterglow.server.sse import event, streamed
from afterglow.server.types.chat import plain
from afterglow.server.types.response import FunctionTool, ResponseRequest
from afterglow.server.wire import StrictRoute

LOGPROBS = "message.output_text.logprobs"


def routes(service: Service) -> APIRouter:
    """The routes, for an application."""
    router = APIRouter(route_class=StrictRoute)
    store = ResponseStore(count=service.settings.stored_responses, nbytes=service.settings.stored_bytes)

    @router.post("/v1/responses", summary="Answer, after what was said before")
    async def create(body: ResponseRequest, request: Request) -> Response:
        return await service.while_there(request, answer(service, store, body, tenant(request)), "input")

    @router.get("/v1/responses/{id}", summary="A response that is remembered")
    async def retrieve(id: str, request: Request) -> dict[str, Any]:
        return found(store, id, tenant(request), 404, "id").response

    @router.delete("/v1/responses/{id}", summary="Forget a response")
    async def delete(id: str, request: Request) -> dict[str, Any]:
        found(store, id, tenant(request), 404, "id")
        store.remove(id)
        return {"id": id, "object": "response", "deleted": True}

    return router


def found(store: ResponseStore, id: str, salt: str, status: int, param: str) -> Stored:
    """A response that is remembered, or a refusal."""
    stored = store.get(id)
    if stored is None or stored.salt != salt:
        code = "previous_response_not_found" if param == "previous_response_id" else "response_not_found"
        raise Refusal(status, f"there is no response {id[:80]!r} here, or it was forgotten", param=param, code=code)
    return stored


async def answer(service: Service, store: ResponseStore, body: ResponseRequest, salt: str) -> Response:
    """Answer, whole or as it comes."""
    past: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        past = found(store, body.previous_response_id, salt, 400, "previous_response_id").messages
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` is for streams: set `stream`")
    said = [*past, *messages_of(body.input)]
    if not said:
        raise invalid("input", "`input` must not be empty")
    running = await run(service, body.model, asked_by(body, said, salt))
    page = Page(body, running, store, said, salt)
    if not body.stream:
        try:
            async for index, delta in running.deltas():
                page.take(index, delta)
            return JSONResponse(page.finish()[-1]["response"])
        finally:
            running.end()
    return await streamed(running.deltas(), page.events, ping=service.settings.ping_seconds, ended=running.end)


def asked_by(body: ResponseRequest, said: list[dict[str, Any]], salt: str) -> Asked:
    """What the library is asked for."""
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    wanted = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    overflow = body.overflow or ("shift" if body.truncation == "auto" else "refuse")
    return Asked(
        messages=[*system, *said],
        chat=chat_options(body),
        fields=body,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wanted else None,
        overflow=overflow,
        salt=salt,
    )


def chat_options(body: ResponseRequest) -> dict[str, Any]:
    """What leads the answer, as `Answering.plan` has it."""
    if not body.tools and (body.tool_choice not in (None, "none", "auto")):
        raise invalid("tool_choice", "there are no `tools` to call")
    choice = plain(body.tool_choice)
    if isinstance(choice, dict) and choice["type"] == "allowed_tools":
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": choice["mode"], "tools": choice["tools"]}}
    return {
        "tools": [{"type": "function", "function": _function(tool)} for tool in body.tools or ()],
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "response_format": response_format(body),
        "reasoning": None if body.reasoning is None else body.reasoning.effort,
    }


def _function(tool: FunctionTool) -> dict[str, Any]:
    return {key: value for key, value in plain(tool).items() if key != "type"}


def response_format(body: ResponseRequest) -> dict[str, Any] | None:
    """`text.format` as chat has it."""
    if body.text is None or body.text.format is None:
        return None
    written: dict[str, Any] = plain(body.text.format)
    kind = written.pop("type")
    return {"type": kind, "json_schema": written} if kind == "json_schema" else {"type": kind}


class Page:
    """A response as OpenAI writes it, whole or as events."""

    def __init__(
        self, body: ResponseRequest, running: Running, store: ResponseStore, said: list[dict[str, Any]], salt: str
    ) -> None:
        self._body = body
        self._running = running
        self._store = store
        self._said = said
        self._salt = salt
        self._writer = Writer()
        self._pending: list[dict[str, Any]] = []  # log-probabilities of tokens whose text is not certain yet
        self._number = 0
        self._head = head(body, running)

    def take(self, index: int, delta: Delta) -> list[dict[str, Any]]:
        """The events that one delta makes."""
        token, running = delta.token, self._running
        if token is not None and token.logprob is not None and running.shown(token):
            self._pending.append(logprob_of(running.model, token))
        events: list[dict[str, Any]] = []
        for part in delta.parts:
            logprobs, self._pending = (self._pending, []) if isinstance(part, Text) else ([], self._pending)
            events += self._writer.take(part, logprobs)
        return events

    async def events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """The response as it comes."""
        begun = {**self._head, "status": "in_progress", "output": [], "usage": None}
        for kind in ("response.created", "response.in_progress"):
            yield self._event({"type": kind, "response": begun})
        try:
            async for index, delta in deltas:
                for one in self.take(index, delta):
                    yield self._event(one)
            for one in self.finish():
                yield self._event(one)
        except AfterglowError as error:
            for one in self._failed(error):
                yield self._event(one)

    def finish(self) -> list[dict[str, Any]]:
        """The last events; the very last has the whole response."""
        (turn,) = self._running.finished()
        whole = turn.finish in ("stop", "tool_calls")
        events = list(self._writer.finish("completed" if whole else "incomplete"))
        response = {
            **self._head,
            "status": "completed" if whole else "incomplete",
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "output": self._writer.items,
            "usage": self._usage(usage_of([turn], self._running.tallies)),
        }
        if self._body.store is not False:
            self._store.put(response, [*self._said, plain_message(turn.message)], self._salt)
        return [*events, {"type": "response.completed" if whole else "response.incomplete", "response": response}]

    def _failed(self, error: AfterglowError) -> Iterator[dict[str, Any]]:
        refusal = refusal_of(error)
        yield {"type": "error", "code": refusal.code, "message": refusal.message, "param": refusal.param}
        failure = {"code": "server_error", "message": refusal.message}
        response = {**self._head, "status": "failed", "error": failure, "output": self._writer.items, "usage": None}
        yield {"type": "response.failed", "response": response}

    def _event(self, one: dict[str, Any]) -> bytes:
        self._number += 1
        return event({**one, "sequence_number": self._number - 1}, one["type"])

    def _usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        details = usage["prompt_tokens_details"]
        written = usage["prompt_tokens"] - details["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**details, "cache_write_tokens": written},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]},
            "total_tokens": usage["total_tokens"],
        }


def head(body: ResponseRequest, running: Running) -> dict[str, Any]:
    """What a response says about its request."""
    format = {"type": "text"} if body.text is None or body.text.format is None else plain(body.text.format)
    optional = {"description": None, "parameters": None, "strict": None}
    written = {
        "id": new_id("resp"),
        "object": "response",
        "created_at": running.created,
        "model": body.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning else None, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": format},
        "tool_choice": plain(body.tool_choice) or "auto",
        "tools": [{**optional, **plain(tool)} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
        "system_fingerprint": running.model.fingerprint,
    }
    return written if running.cut is None else {**written, "overflow": running.cut.report}
