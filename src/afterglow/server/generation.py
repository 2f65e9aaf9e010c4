"""Generation of chat responses, independent of the API that requests them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.api.served_model import ServedModel
from afterglow.chat.chat import ChatPlan
from afterglow.chat.output.parts import ReasoningDelta
from afterglow.chat.prompt import Truncation, TruncationPolicy
from afterglow.chat.response import ChatResponse, ChatStream, Delta
from afterglow.chat.truncation import fit_plan
from afterglow.engine.host.stream import EventStream
from afterglow.engine.types.request import Token, Usage
from afterglow.server import limits
from afterglow.server.admission import Ticket
from afterglow.server.errors import invalid_request_error
from afterglow.server.media import count_media_bytes, load_media
from afterglow.server.schema.chat import MessageDict
from afterglow.server.schema.sampling import SamplingFields, build_sampling
from afterglow.server.state import ServerState, merge_streams


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A conversation and the options for its response."""

    messages: list[MessageDict]
    chat_options: dict[str, Any]  # keyword arguments of `TextModel.plan_chat`
    sampling_fields: SamplingFields
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    overflow: TruncationPolicy = "refuse"
    salt: str = ""

    def check_limits(self, state: ServerState) -> None:
        """Raise `limit_exceeded` if the request exceeds a limit of the server."""
        settings = state.settings
        limits.check_limit(settings, "max_messages", "messages", len(self.messages))
        limits.check_limit(settings, "max_choices", "n", self.n)
        limits.check_limit(settings, "max_tools", "tools", len(self.chat_options.get("tools", ())))
        limits.check_limit(settings, "max_logit_bias", "logit_bias", len(self.sampling_fields.logit_bias or {}))
        limits.check_grammar_size("tools", self.chat_options.get("tools"), settings)
        limits.check_grammar_size("response_format", self.chat_options.get("response_format"), settings)

    def plan_chat(self, model: ServedModel) -> ChatPlan:
        """Render a prompt that fits the context. Blocking."""
        return fit_plan(
            self.messages,
            lambda messages: model.plan_chat(messages, **self.chat_options),
            self.overflow,
            context=model.context_length,
            max_tokens=self.max_tokens,
        )

    def submit(
        self, model: ServedModel, deadline: float | None, before_submit: Callable[[], None]
    ) -> tuple[list[ChatStream], Truncation | None]:
        """Plan the prompt and submit it to the engine. Calls `before_submit` between the two. Blocking."""
        plan = self.plan_chat(model)
        sampling = build_sampling(
            self.sampling_fields, context_length=model.context_length, vocabulary_size=model.vocabulary.size
        )
        before_submit()
        streams = model.submit_plan(
            plan,
            n=self.n,
            max_tokens=self.max_tokens,
            sampling=sampling,
            stop=self.stop,
            logprobs=self.logprobs,
            deadline=deadline,
            salt=self.salt,
        )
        return streams, plan.truncation


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


class Generation:
    """Running choices of one conversation. The owner must call `close`."""

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        resources: contextlib.ExitStack,
        streams: list[ChatStream],
        truncation: Truncation | None,
    ) -> None:
        """`resources` releases the admission ticket and the media budget."""
        self.model = model
        self.truncation = truncation
        self.created = int(time.time())
        self.reasoning_counters = [ReasoningTokenCounter() for _ in streams]
        self._state = state
        self._resources = resources
        self._streams = streams
        self._latency_recorders = [state.metrics.build_latency_recorder(model.name) for _ in streams]
        self._eog_tokens = model.vocabulary.eog_tokens
        self._usage_recorded = False

    async def stream_deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yield deltas as they arrive, each with the index of its choice."""
        async for index, delta in merge_streams([stream.deltas_async() for stream in self._streams]):
            if delta.token is not None:
                self._latency_recorders[index].record_token()
            self.reasoning_counters[index].add_delta(delta)
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
            self._state.metrics.record_usage(self.model.name, [response.usage for response in responses])
        return responses

    def is_visible_token(self, token: Token) -> bool:
        """Whether a token is part of the output. End-of-generation tokens are not."""
        return token.token not in self._eog_tokens

    def close(self) -> None:
        """Cancel running choices and release the resources of the request."""
        for stream in self._streams:
            stream.cancel()
        self._resources.close()


async def start_generation(state: ServerState, model_name: str | None, request: GenerationRequest) -> Generation:
    """Admit a request, load its media and submit it to the engine."""
    model = await state.get_model(model_name)
    if not model.can_generate:
        raise invalid_request_error("model", f"the model {model.name!r} supports embeddings only", "unsupported_model")
    request.check_limits(state)
    ticket = state.get_admission_queue(model).admit(request.n)
    resources = contextlib.ExitStack()
    resources.callback(ticket.release)
    truncations: list[Truncation | None] = []
    try:
        loaded_request = replace(request, messages=await load_media(state, model, request.messages))
        resources.callback(state.media_budget.reserve(count_media_bytes(loaded_request.messages)))
        withdraw_announcement = model.announce_request()

        def submit() -> list[ChatStream]:
            try:
                deadline = resolve_deadline(request.sampling_fields, state)
                streams, truncation = loaded_request.submit(model, deadline, withdraw_announcement)
            finally:
                withdraw_announcement()
            truncations.append(truncation)
            return streams

        resources.callback(withdraw_announcement)
        streams = await state.start_streams(submit)
    except BaseException:
        resources.close()
        raise
    bind_streams([stream.events for stream in streams], ticket, state)
    return Generation(state, model, resources, list(streams), truncations[0])


def bind_streams(streams: Iterable[EventStream], ticket: Ticket, state: ServerState) -> None:
    """Free the place of each choice when its generation ends, and bound what waits for a slow client."""
    for stream in streams:
        stream.limit_buffer(state.settings.max_buffered_tokens)
        stream.call_at_end(ticket.release_one)


def resolve_deadline(fields: SamplingFields, state: ServerState) -> float | None:
    """Return the deadline in seconds: the smaller of those of the request and the server."""
    deadlines = [value for value in (fields.deadline, state.settings.deadline) if value is not None]
    return min(deadlines, default=None)


def build_usage(responses: list[ChatResponse], reasoning_counters: list[ReasoningTokenCounter]) -> dict[str, Any]:
    """Build the usage of all choices of one conversation. The prompt counts once."""
    prompt = responses[0].usage.prompt_tokens
    generated = sum(response.usage.generated_tokens for response in responses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": build_prompt_details([response.usage for response in responses]),
        "completion_tokens_details": {
            "reasoning_tokens": sum(counter.reasoning_tokens for counter in reasoning_counters),
            **build_prediction_details(response.usage for response in responses),
        },
    }


def build_prompt_details(usages: list[Usage]) -> dict[str, int]:
    """Build `prompt_tokens_details`: cached tokens and, for prompts with media, media tokens and encoder runs."""
    cached = {"cached_tokens": min(usage.cached_tokens for usage in usages)}
    if not usages[0].media_tokens:
        return cached
    return cached | {
        "image_tokens": usages[0].media_tokens - usages[0].audio_tokens,
        "audio_tokens": usages[0].audio_tokens,
        "cached_media_tokens": min(usage.cached_media_tokens for usage in usages),
        "encoded_media": sum(usage.encoded_media for usage in usages),
    }


def build_prediction_details(usages: Iterable[Usage]) -> dict[str, float]:
    """Build the speculative decoding fields of `completion_tokens_details`.

    OpenAI calls accepted and rejected draft tokens prediction tokens.
    """
    usages = list(usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    rejected = sum(usage.draft_tokens for usage in usages) - accepted
    draft_steps = sum(usage.draft_steps for usage in usages)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
        "mean_draft_length": round((accepted + rejected) / draft_steps, 2) if draft_steps else 0.0,
        "speculation_seconds_saved": round(sum(usage.speculation_seconds_saved for usage in usages), 4),
    }


def build_token_logprobs(model: ServedModel, token: Token) -> dict[str, Any]:
    """Build the log-probabilities of a token and its alternatives in the format of chat completions."""
    return {
        **_build_logprob(model, token.token, token.logprob or 0.0),
        "top_logprobs": [_build_logprob(model, alternative, value) for alternative, value in token.alternatives],
    }


def _build_logprob(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    piece = model.vocabulary.token_to_piece(token)
    return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}
