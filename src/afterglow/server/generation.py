"""Generation of responses, independent of the API that requests them.

An API builds one of the requests of `generation_requests`, starts it with `start_generation`, and formats the
`Generation` with a formatter of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
from fastapi import Response
from fastapi.responses import JSONResponse
from numpy.typing import NDArray

from afterglow.api.model import Model
from afterglow.api.options import GenerationOptions
from afterglow.chat.output.parts import ReasoningDelta
from afterglow.chat.output.response import ChatResponse, ChatStream, Delta
from afterglow.chat.prompt import Truncation
from afterglow.chat.tools.enforcement import find_violation
from afterglow.engine.types.entries import Entry
from afterglow.engine.types.request import PlannedPrefix, PrefillProgress, Token
from afterglow.errors import Cancelled
from afterglow.server.adapters import build_lora
from afterglow.server.errors import APIError
from afterglow.server.explain import summarize_plan
from afterglow.server.generation_requests import GenerationRequest, PlannedPrompt
from afterglow.server.history import TrackedRequest, extract_difference
from afterglow.server.logs import get_record
from afterglow.server.priority import is_batch_line
from afterglow.server.sse import (
    EventStreamResponse,
    PingFormat,
    format_ping_comment,
    report_errors,
    wait_for_first_item,
)
from afterglow.server.state import ServerState, merge_streams


class ReasoningTokenCounter:
    """Counts the reasoning tokens of one choice."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._pending_tokens = 0  # tokens whose text has not been emitted yet
        self._in_reasoning = False

    def add_delta(self, delta: Delta) -> None:
        """Count the token of a delta."""
        if delta.parts:
            self._in_reasoning = isinstance(delta.parts[0], ReasoningDelta)
            self.reasoning_tokens += self._pending_tokens if self._in_reasoning else 0
            self._pending_tokens = 0
        if delta.token is not None:
            if delta.parts:
                self.reasoning_tokens += self._in_reasoning
            else:
                self._pending_tokens += 1


class Formatter(Protocol):
    """Formats a generation for one API."""

    async def build_response(self) -> Any:
        """Read the generation to its end and return the body of the response."""

    def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of a stream."""

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""


class StreamBuilder(Protocol):
    """Builds the streaming response of an API. It must call `on_close` when the stream ends."""

    def __call__(
        self,
        events: AsyncIterator[bytes],
        /,
        *,
        ping_seconds: float,
        build_ping: Callable[[], bytes],
        on_close: Callable[[], None],
    ) -> Response: ...


class Generation:
    """Running choices of one request, those of a prompt one after the other. The owner must call `close`."""

    def __init__(
        self,
        state: ServerState,
        model: Model,
        model_name: str,
        resources: contextlib.ExitStack,
        prompts: list[PlannedPrompt],
        streams: list[ChatStream],
        tracked: TrackedRequest,
    ) -> None:
        """`model_name` is that of the response. `resources` releases the admission ticket and the media budget."""
        self._tracked = tracked
        self._explanation: asyncio.Task[None] | None = None
        self.model, self.model_name = model, model_name
        self.prompts = prompts
        self.created = int(time.time())
        self.prefill_progress: PrefillProgress | None = None  # of the newest delta; None once there are tokens
        self._state = state
        self._resources = resources
        self._streams = streams
        self._reasoning_counters = [ReasoningTokenCounter() for _ in streams]
        self._latency_recorders = [state.metrics.build_latency_recorder(model.name) for _ in streams]
        self._eog_tokens = model.vocabulary.eog_tokens
        self._usage_recorded = False
        self._record = get_record()
        self._record.model, self._record.generated_tokens = model.name, 0
        self._unenforced_tools = {tool.name: tool for prompt in prompts for tool in prompt.unenforced_tools}
        self._record.unenforced_tools = list(self._unenforced_tools)

    @property
    def truncations(self) -> list[Truncation]:
        """What was dropped from prompts that were too long."""
        formats = (prompt.output_format for prompt in self.prompts)
        return [format.truncation for format in formats if format.truncation is not None]

    @property
    def reasoning_tokens(self) -> int:
        """Reasoning tokens of all choices."""
        return sum(counter.reasoning_tokens for counter in self._reasoning_counters)

    async def stream_deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield deltas as they arrive, each with the index of its choice. During prefill they have a `progress`."""
        try:
            async for index, delta in merge_streams([stream.deltas_async() for stream in self._streams]):
                self.prefill_progress = delta.progress
                if delta.token is not None:
                    self._latency_recorders[index].record_token()
                    self._record.generated_tokens = (self._record.generated_tokens or 0) + 1
                    self._tracked.record_token()
                elif delta.progress is not None and index == 0:
                    self._record_progress(delta.progress)
                self._reasoning_counters[index].add_delta(delta)
                yield index, delta
        except Exception as error:
            self._tracked.fail(error)
            raise

    def _record_progress(self, progress: PrefillProgress) -> None:
        """Record the progress of the first choice. The first one comes with the plan, which is explained as text."""
        self._tracked.record_progress(progress)
        if (plan := self._tracked.plan) is not None and self._explanation is None:
            entries = self.prompts[0].request.entries
            self._explanation = asyncio.ensure_future(
                explain_plan(self._state, self.model, self._tracked, plan, entries)
            )

    async def collect_responses(self) -> list[ChatResponse]:
        """Wait for all choices and return them."""
        async for _ in self.stream_deltas():
            pass
        return self.get_responses()

    def get_responses(self) -> list[ChatResponse]:
        """Return the finished choices and record their usage."""
        responses = [stream.response for stream in self._streams]
        if not self._usage_recorded:
            self._usage_recorded = True
            usages = [response.usage for response in responses]
            self._state.metrics.record_usage(self.model.name, usages)
            reasons = [response.finish_reason for response in responses]
            self._record.record_usage(usages, reasons, len(usages) // len(self.prompts))
            self._tracked.finish(usages, reasons, len(usages) // len(self.prompts))
        return responses

    def list_violations(self, response: ChatResponse) -> dict[str, str]:
        """Return how calls of tools that the grammar does not enforce violate their schemas, by the id of the call."""
        tools = self._unenforced_tools
        found = {
            call.id: find_violation(tools[call.name], call.arguments)
            for call in response.tool_calls
            if call.name in tools
        }
        return {id: violation for id, violation in found.items() if violation is not None}

    def is_visible_token(self, token: Token) -> bool:
        """Whether a token is part of the output. End-of-generation tokens are not."""
        return token.token not in self._eog_tokens

    async def respond(
        self,
        formatter: Formatter,
        *,
        stream: bool,
        build_stream: StreamBuilder = EventStreamResponse,
        format_ping: PingFormat = format_ping_comment,
    ) -> Response:
        """Return the HTTP response, whole or as a stream, by default of server-sent events.

        The generation is closed at its end. An error before the first event of a stream is raised. `format_ping`
        formats the keep-alive pings of the stream.
        """
        if not stream:
            with contextlib.closing(self):
                return JSONResponse(await formatter.build_response())
        try:
            deltas = await wait_for_first_item(self.stream_deltas(), lambda item: item[1].progress is None)
        except BaseException:
            self.close()
            raise
        events = report_errors(formatter.stream_events(deltas), formatter.format_error)
        return build_stream(
            events,
            ping_seconds=self._state.settings.ping_seconds,
            build_ping=lambda: format_ping(self.prefill_progress),
            on_close=self.close,
        )

    def close(self) -> None:
        """Cancel running choices and release the resources of the request."""
        self._tracked.fail(Cancelled("the client disconnected"))
        for stream in self._streams:
            stream.cancel()
        self._resources.close()


async def explain_plan(
    state: ServerState,
    model: Model,
    tracked: TrackedRequest,
    plan: PlannedPrefix,
    entries: Sequence[Entry] | NDArray[np.int64],
) -> None:
    """Record why not more of a prompt is reused. The text for that is built in a thread."""
    tracked.difference = difference = extract_difference(entries, plan)
    tracked.record_reason(await state.run_text_work(lambda: summarize_plan(model, plan, len(entries), difference)))


async def start_generation(state: ServerState, model_name: str | None, request: GenerationRequest) -> Generation:
    """Admit a request, load its media and submit it to the engine."""
    model = await state.get_generating_model(model_name)
    requested = state.models.get_requested_model(model_name)
    request.check_limits(state)
    request = request.apply_defaults(requested.defaults)
    lora = build_lora(state.models, model, model_name, request.sampling_fields.lora)
    request = replace(request.adapt(state, model), lora=lora)
    is_line, priority = is_batch_line(), request.priority
    ticket = state.get_admission_queue(model).admit(request.choices, is_background=priority < 0)
    resources = contextlib.ExitStack()
    resources.callback(ticket.release)
    record = get_record()
    tracked = state.history.start(
        record.id, model=model.name, path=record.path, salt=request.salt, first_words=request.get_newest_text(model)
    )
    prompts: list[PlannedPrompt] = []
    try:
        loaded_request = await request.load_media(state, model, resources)
        cancel = threading.Event()

        def submit() -> list[ChatStream]:
            options: GenerationOptions = {**loaded_request.build_options(state, model), "priority": priority}
            plans = loaded_request.plan(model, options, cancel)
            prompts.extend(
                replace(plan, request=replace(plan.request, explained=True, is_transient=is_line)) for plan in plans
            )
            return [
                stream
                for prompt in prompts
                for stream in model.start(prompt.request, prompt.output_format, request.stop, n=request.n)
            ]

        streams = list(
            await state.start_streams(
                submit, cancel, generates_with=model.name if loaded_request.generates_summaries else None
            )
        )
    except BaseException as error:
        tracked.fail(error)
        resources.close()
        raise
    if request.keep_alive is not None:  # a request that is refused changes nothing
        requested.slot.set_keep_alive(request.keep_alive)
    tracked.engine_ids = tuple(stream.events.id for stream in streams)
    tracked.report("admitted", prompt_tokens=sum(len(prompt.request.entries) for prompt in prompts))
    for stream in streams:
        stream.events.limit_buffer(state.settings.max_buffered_tokens)  # for a slow client
        stream.events.call_at_end(ticket.release_one)
    return Generation(state, model, requested.name, resources, prompts, streams, tracked)
