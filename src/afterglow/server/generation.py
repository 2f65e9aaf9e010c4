"""Conversations being answered: what /v1/chat/completions and /v1/responses share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.api.served_model import ServedModel
from afterglow.chat.chat import ChatPlan
from afterglow.chat.output.parts import ReasoningDelta
from afterglow.chat.response import ChatResponse, ChatStream, Delta
from afterglow.engine.types.request import Token, Usage
from afterglow.server import limits
from afterglow.server.admission import Ticket
from afterglow.server.errors import invalid_request_error
from afterglow.server.media import load_media
from afterglow.server.schema.sampling import SamplingFields, build_sampling
from afterglow.server.state import ServerState, merge_streams
from afterglow.server.truncation import Truncation, TruncationPolicy, fit_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A conversation as the library reads it, and how it is to be answered."""

    messages: list[dict[str, Any]]
    chat_options: dict[str, Any]  # the options of `Answering.plan`
    sampling_fields: SamplingFields
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    overflow: TruncationPolicy = "refuse"
    salt: str = ""  # whose it is

    def check_limits(self, state: ServerState) -> None:
        """Whether it is within the server's limits."""
        settings = state.settings
        limits.check_limit(settings, "max_messages", "messages", len(self.messages))
        limits.check_limit(settings, "max_choices", "n", self.n)
        limits.check_limit(settings, "max_tools", "tools", len(self.chat_options.get("tools", ())))
        limits.check_limit(settings, "max_logit_bias", "logit_bias", len(self.sampling_fields.logit_bias or {}))
        limits.check_grammar_size("tools", self.chat_options.get("tools"), settings)
        limits.check_grammar_size("response_format", self.chat_options.get("response_format"), settings)

    def plan_chat(self, model: ServedModel) -> tuple[ChatPlan, Truncation | None]:
        """The prompt, within the context; takes its time."""
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
        """Have the engine begin; `arrived` is called just before."""
        plan, cut = self.plan_chat(model)
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
        return streams, cut


class ReasoningTokenCounter:
    """Counts the tokens that a model spent on thinking."""

    def __init__(self) -> None:
        self.reasoning_tokens = 0
        self._pending_tokens = 0  # tokens whose text is not certain yet
        self._in_reasoning = False

    def add_delta(self, delta: Delta) -> None:
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
    """Answers to one conversation while they are made. Whoever has it calls `end`, however it went."""

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        ticket: Ticket,
        streams: list[ChatStream],
        truncation: Truncation | None,
    ) -> None:
        self.model = model
        self.truncation = truncation
        self.created = int(time.time())
        self.reasoning_counters = [ReasoningTokenCounter() for _ in streams]
        self._state = state
        self._ticket = ticket
        self._streams = streams
        self._latency_recorders = [state.metrics.build_latency_recorder(model.name) for _ in streams]
        self._eog_tokens = model.vocabulary.eog_tokens
        self._usage_recorded = False

    async def stream_deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes, with the number of the answer it belongs to."""
        async for index, delta in merge_streams([stream.deltas_async() for stream in self._streams]):
            if delta.token is not None:
                self._latency_recorders[index].record_token()
            self.reasoning_counters[index].add_delta(delta)
            yield index, delta

    async def collect_responses(self) -> list[ChatResponse]:
        """Wait for all of it."""
        async for _ in self.stream_deltas():
            pass
        return self.get_responses()

    def get_responses(self) -> list[ChatResponse]:
        """The whole answers, once they are over."""
        turns = [stream.response for stream in self._streams]
        if not self._usage_recorded:
            self._usage_recorded = True
            self._state.metrics.record_usage(self.model.name, [turn.usage for turn in turns])
        return turns

    def is_visible_token(self, token: Token) -> bool:
        """Whether a token is part of the answer, and not its end."""
        return token.token not in self._eog_tokens

    def close(self) -> None:
        """Give everything back; what still runs is cancelled."""
        for stream in self._streams:
            stream.cancel()
        self._ticket.release()


async def start_generation(state: ServerState, model_name: str, request: GenerationRequest) -> Generation:
    """Begin to answer a conversation, once there is room for it."""
    model = await state.get_model(model_name)
    if not model.can_generate:
        raise invalid_request_error("model", f"the model {model_name!r} only makes embeddings", "unsupported_model")
    request.check_limits(state)
    ticket = state.get_admission_queue(model).admit(request.n)
    cuts: list[Truncation | None] = []
    try:
        whole = replace(request, messages=await load_media(state, model, request.messages))
        arrived = model.announce_request()

        def begin() -> list[ChatStream]:
            try:
                streams, cut = whole.submit(model, resolve_deadline(request.sampling_fields, state), arrived)
            finally:
                arrived()
            cuts.append(cut)
            return streams

        streams = await state.start_streams(begin)
    except BaseException:
        ticket.release()
        raise
    return Generation(state, model, ticket, list(streams), cuts[0])


def resolve_deadline(fields: SamplingFields, state: ServerState) -> float | None:
    """Seconds that an answer may take: the request's, and never more than the server's."""
    given = [value for value in (fields.deadline, state.settings.deadline) if value is not None]
    return min(given, default=None)


def build_usage(responses: list[ChatResponse], reasoning_counters: list[ReasoningTokenCounter]) -> dict[str, Any]:
    """What the answers to one conversation took; their prompt counts once."""
    prompt, generated = responses[0].usage.prompt_tokens, sum(turn.usage.generated_tokens for turn in responses)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": build_prompt_details([turn.usage for turn in responses]),
        "completion_tokens_details": {
            "reasoning_tokens": sum(tally.reasoning_tokens for tally in reasoning_counters),
            **build_prediction_details(turn.usage for turn in responses),
        },
    }


def build_prompt_details(usages: list[Usage]) -> dict[str, int]:
    """Of the prompt: what was in memory; where there are pictures and sounds, how much they are, how much of that was
    in memory, and how many had to be encoded."""
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
    """Tokens that were guessed before they were drawn: those that were right and the others, how many at a time, and
    what that saved."""
    used = list(usages)
    accepted = sum(usage.accepted_tokens for usage in used)
    rejected = sum(usage.draft_tokens for usage in used) - accepted
    drafts = sum(usage.draft_steps for usage in used)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
        "mean_prediction_length": round((accepted + rejected) / drafts, 2) if drafts else 0.0,
        "prediction_seconds_saved": round(sum(usage.speculation_seconds_saved for usage in used), 4),
    }


def build_token_logprobs(model: ServedModel, token: Token) -> dict[str, Any]:
    """A token with its log-probability and those of the likeliest, as OpenAI's chat has it."""
    return {
        **_build_logprob(model, token.token, token.logprob or 0.0),
        "top_logprobs": [_build_logprob(model, other, value) for other, value in token.alternatives],
    }


def _build_logprob(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    piece = model.vocabulary.token_to_piece(token)
    return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}
