"""Generation of responses, independent of the API that requests them.

An API converts its body to a `ConversationRequest` or a `PromptRequest`, starts it with `start_generation`, and formats
the `Generation` with a formatter of its own.
"""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from fastapi import Response
from fastapi.responses import JSONResponse

from afterglow.api.model import Model
from afterglow.api.options import GenerationOptions, PromptOptions
from afterglow.api.prompts import FittedPrompt
from afterglow.chat.chat import ChatPlan
from afterglow.chat.constraints.grammar import build_grammar
from afterglow.chat.constraints.response_format import parse_response_format
from afterglow.chat.messages import Message
from afterglow.chat.output.parts import OutputFormat, ReasoningDelta
from afterglow.chat.output.response import ChatResponse, ChatStream, Delta
from afterglow.chat.prompt import Breakpoint, ChatPrompt, PromptBreakpoint, Truncation, TruncationPolicy
from afterglow.chat.tools.enforcement import find_violation
from afterglow.chat.tools.tool import Tool
from afterglow.chat.truncation import fit_plan
from afterglow.engine.types.constraints import GrammarConstraint
from afterglow.engine.types.request import PrefillProgress, Request, Token
from afterglow.server import limits
from afterglow.server.errors import APIError, invalid_request_error
from afterglow.server.logs import get_record
from afterglow.server.media import load_media
from afterglow.server.schema.sampling import SamplingFields, build_sampling
from afterglow.server.sse import (
    EventStreamResponse,
    PingFormat,
    format_ping_comment,
    report_errors,
    wait_for_first_item,
)
from afterglow.server.state import ServerState, merge_streams
from afterglow.server.volatile import StablePrompt, move_volatile_spans


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """A prompt ready for the engine, and the format of its output."""

    request: Request
    output_format: OutputFormat
    breakpoints: tuple[PromptBreakpoint, ...] = ()
    unenforced_tools: tuple[Tool, ...] = ()  # tools whose calls must be checked after generation


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest(ABC):
    """Options of a generation. Subclasses add the prompt."""

    sampling_fields: SamplingFields
    n: int = 1  # choices of each prompt
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    salt: str = ""
    keep_alive: float | None = None  # seconds for which the model stays loaded after the request

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return self.n

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        limits.check_limit(state.settings, "max_choices", "n", self.n)
        limits.check_limit(state.settings, "max_logit_bias", "logit_bias", len(self.sampling_fields.logit_bias or {}))

    def adapt(self, state: ServerState, model: Model) -> GenerationRequest:
        """Return the request as the model can serve it, or raise the error of a field that it cannot honour."""
        fields, context = self.sampling_fields, model.context_length
        if fields.num_ctx is not None and fields.num_ctx > context:
            message = f"`num_ctx` is {fields.num_ctx:,}; the context length is {context:,} (setting `context`)"
            raise invalid_request_error("num_ctx", message)
        for token in fields.stop_token_ids or ():
            if not 0 <= token < model.vocabulary.size:
                message = f"`stop_token_ids` must be tokens from 0 to {model.vocabulary.size - 1}, not {token}"
                raise invalid_request_error("stop_token_ids", message)
        return self

    async def load_media(self, state: ServerState, model: Model, resources: contextlib.ExitStack) -> GenerationRequest:
        """Return the request with its media loaded. They are released with `resources`."""
        return self

    @abstractmethod
    def plan(self, model: Model, options: GenerationOptions) -> list[PlannedPrompt]:
        """Plan the prompts. `options` are those of `Model.build_request`. Blocking."""

    def build_options(self, state: ServerState, model: Model) -> GenerationOptions:
        """Build the options of `Model.build_request`. The deadline is the smaller of those of request and server."""
        fields = self.sampling_fields
        deadlines = [fields.deadline, state.settings.deadline]
        return {
            "max_tokens": self.max_tokens,
            "min_tokens": fields.min_tokens or 0,
            "ignore_eos": bool(fields.ignore_eos),
            "use_prefix_cache": fields.cache_prompt is not False,
            "sampling": build_sampling(
                fields,
                model.sampling_defaults.sampling,
                context_length=model.context_length,
                vocabulary_size=model.vocabulary.size,
            ),
            "stop": self.stop,
            "logprobs": self.logprobs,
            "deadline": min((value for value in deadlines if value is not None), default=None),
            "salt": self.cache_salt,
        }

    @property
    def cache_salt(self) -> str:
        """Salt of the tenant, with that of the request."""
        return (
            self.salt if self.sampling_fields.cache_salt is None else f"{self.salt}\n{self.sampling_fields.cache_salt}"
        )

    def add_stop_tokens(self, request: Request) -> Request:
        """Return the engine request with the stop tokens of the client."""
        tokens = frozenset(self.sampling_fields.stop_token_ids or ())
        return replace(request, stop_tokens=request.stop_tokens | tokens) if tokens else request


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRequest(GenerationRequest):
    """A conversation to continue."""

    messages: list[Message]
    tools: Sequence[Tool] = ()
    breakpoints: Sequence[Breakpoint] = ()  # positions that later prompts share, and how long they are pinned
    prompt_options: PromptOptions
    overflow: TruncationPolicy = "refuse"
    reasoning_field: str = "reasoning_effort"  # of the body, for the header with the fields that had no effect

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        settings = state.settings
        limits.check_limit(settings, "max_messages", "messages", len(self.messages))
        GenerationRequest.check_limits(self, state)
        limits.check_limit(settings, "max_tools", "tools", len(self.tools))
        limits.check_grammar_size("tools", [tool.definition for tool in self.tools], settings)
        limits.check_grammar_size("response_format", self.prompt_options.get("response_format"), settings)

    def adapt(self, state: ServerState, model: Model) -> GenerationRequest:
        """Return the request as the model can serve it, or raise the error of a field that it cannot honour."""
        GenerationRequest.adapt(self, state, model)
        return self.adapt_prompt(state, model)

    def adapt_prompt(self, state: ServerState, model: Model) -> ConversationRequest:
        """Return the request without reasoning if the model has none, and with volatile spans moved."""
        stable = move_volatile(state, self.messages, self.breakpoints)
        return replace(
            self,
            messages=stable.messages,
            breakpoints=stable.breakpoints,
            prompt_options=drop_reasoning_hint(model, self.prompt_options, self.reasoning_field),
        )

    async def load_media(
        self, state: ServerState, model: Model, resources: contextlib.ExitStack
    ) -> ConversationRequest:
        """Return the request with its media loaded. They are released with `resources`."""
        return replace(self, messages=await load_media(state, model, self.messages, resources))

    def plan_messages(self, model: Model, messages: Sequence[Message]) -> ChatPlan:
        """Plan the prompt of all messages, or of those that are left of a conversation that is too long. Blocking."""
        is_complete = len(messages) == len(self.messages)  # the positions are those of all messages
        return model.plan_chat(
            messages,
            tools=self.tools,
            salt=self.cache_salt,
            breakpoints=self.breakpoints if is_complete else (),
            **self.prompt_options,
        )

    def plan(self, model: Model, options: GenerationOptions) -> list[PlannedPrompt]:
        """Render the conversation to a prompt that fits the context. Blocking."""
        plan = fit_plan(
            self.messages,
            lambda messages: self.plan_messages(model, messages),
            self.overflow,
            context=model.context_length,
            max_tokens=self.max_tokens,
        )
        request = self.add_stop_tokens(plan.apply_to(model.build_request(plan.prompt, **options)))
        return [PlannedPrompt(request, plan.output_format, plan.prompt.breakpoints, plan.unenforced_tools)]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest(GenerationRequest):
    """Prompts to complete, without a chat template."""

    prompts: Sequence[FittedPrompt]
    response_format: Mapping[str, Any] | None = None

    @property
    def choices(self) -> int:
        """Number of choices of all prompts."""
        return self.n * len(self.prompts)

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        GenerationRequest.check_limits(self, state)
        limits.check_grammar_size("response_format", self.response_format, state.settings)

    def plan(self, model: Model, options: GenerationOptions) -> list[PlannedPrompt]:
        """Build the engine requests. Blocking."""
        spec = parse_response_format(self.response_format).spec
        constraint = None if spec is None else GrammarConstraint(grammar=build_grammar(spec))
        return [
            PlannedPrompt(
                replace(self.add_stop_tokens(model.build_request(prompt, **options)), constraint=constraint),
                model.build_text_format(prompt.truncation),
            )
            for prompt in self.prompts
        ]


def move_volatile(
    state: ServerState, messages: Sequence[Message], breakpoints: Sequence[Breakpoint] = ()
) -> StablePrompt:
    """Move the volatile spans of the system prompt to its end, as the settings say, and count them."""
    if state.settings.volatile == "keep":
        return StablePrompt(list(messages), list(breakpoints), Counter())
    stable = move_volatile_spans(messages, breakpoints)
    for rule, count in stable.hits.items():
        state.metrics.volatile_spans.labels(rule).inc(count)
    return stable


def drop_reasoning_hint(model: Model, options: PromptOptions, field: str) -> PromptOptions:
    """Return the options without reasoning if the model has none: its field is a hint then."""
    reasoning = options.get("reasoning")
    asks_for_reasoning = reasoning not in (None, "none") and reasoning is not False
    if asks_for_reasoning and not model.can_reason and get_record().accept_hint(field):
        return {**options, "reasoning": None}
    return options


async def build_prompt(
    state: ServerState, model: Model, request: ConversationRequest, resources: contextlib.ExitStack
) -> ChatPrompt:
    """Render the prompt that a request would have, without running it. Its media are released with `resources`."""
    loaded = await request.adapt_prompt(state, model).load_media(state, model, resources)
    return await state.run_text_work(lambda: loaded.plan_messages(model, loaded.messages).prompt)


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

    async def build_response(self) -> dict[str, Any]:
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
        resources: contextlib.ExitStack,
        prompts: list[PlannedPrompt],
        streams: list[ChatStream],
    ) -> None:
        """`resources` releases the admission ticket and the media budget."""
        self.model = model
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
        async for index, delta in merge_streams([stream.deltas_async() for stream in self._streams]):
            self.prefill_progress = delta.progress
            if delta.token is not None:
                self._latency_recorders[index].record_token()
                self._record.generated_tokens = (self._record.generated_tokens or 0) + 1
            self._reasoning_counters[index].add_delta(delta)
            yield index, delta

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
        formats the signs of life of the stream.
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
        for stream in self._streams:
            stream.cancel()
        self._resources.close()


async def start_generation(state: ServerState, model_name: str | None, request: GenerationRequest) -> Generation:
    """Admit a request, load its media and submit it to the engine."""
    model = await state.get_generating_model(model_name)
    request.check_limits(state)
    if request.keep_alive is not None:
        state.models.get_requested_slot(model_name).set_keep_alive(request.keep_alive)
    request = request.adapt(state, model)
    ticket = state.get_admission_queue(model).admit(request.choices)
    resources = contextlib.ExitStack()
    resources.callback(ticket.release)
    prompts: list[PlannedPrompt] = []
    try:
        loaded_request = await request.load_media(state, model, resources)

        def submit() -> list[ChatStream]:
            prompts.extend(loaded_request.plan(model, loaded_request.build_options(state, model)))
            return [
                stream
                for prompt in prompts
                for stream in model.start(prompt.request, prompt.output_format, request.stop, n=request.n)
            ]

        streams = list(await state.start_streams(submit))
    except BaseException:
        resources.close()
        raise
    for stream in streams:
        stream.events.limit_buffer(state.settings.max_buffered_tokens)  # for a slow client
        stream.events.call_at_end(ticket.release_one)
    return Generation(state, model, resources, prompts, streams)
