"""Conversations being answered: what /v1/chat/completions and /v1/responses share."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from afterglow.chat.chat import ChatPlan
from afterglow.chat.parts import Reasoning
from afterglow.chat.reply import Delta, Turn, TurnStream
from afterglow.engine.request import Token, Usage
from afterglow.server import limits
from afterglow.server.admission import Ticket
from afterglow.server.errors import invalid
from afterglow.server.media import brought
from afterglow.server.overflow import Cut, Policy, fitting_plan
from afterglow.server.service import Service, merged
from afterglow.server.types.sampling import SamplingFields, sampling_of
from afterglow.serving import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A conversation as the library reads it, and how it is to be answered."""

    messages: list[dict[str, Any]]
    chat: dict[str, Any]  # the options of `Answering.plan`
    fields: SamplingFields
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = field(default_factory=list)
    logprobs: int | None = None
    overflow: Policy = "refuse"
    salt: str = ""  # whose it is

    def check(self, service: Service) -> None:
        """Whether it is within the server's limits."""
        settings = service.settings
        limits.at_most(settings, "max_messages", "messages", len(self.messages))
        limits.at_most(settings, "max_choices", "n", self.n)
        limits.at_most(settings, "max_tools", "tools", len(self.chat.get("tools", ())))
        limits.at_most(settings, "max_logit_bias", "logit_bias", len(self.fields.logit_bias or {}))
        limits.grammar("tools", self.chat.get("tools"), settings)
        limits.grammar("response_format", self.chat.get("response_format"), settings)

    def plan(self, model: ServedModel) -> tuple[ChatPlan, Cut | None]:
        """The prompt, within the context; takes its time."""
        return fitting_plan(
            self.messages,
            lambda messages: model.plan(messages, **self.chat),
            self.overflow,
            context=model.context_length,
            max_tokens=self.max_tokens,
        )

    def begin(
        self, model: ServedModel, deadline: float | None, arrived: Callable[[], None]
    ) -> tuple[list[TurnStream], Cut | None]:
        """Have the engine begin; `arrived` is called just before."""
        plan, cut = self.plan(model)
        sampling = sampling_of(self.fields, context_length=model.context_length, vocabulary=model.vocabulary.size)
        arrived()
        streams = model.start(
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


class Tally:
    """Counts the tokens that a model spent on thinking."""

    def __init__(self) -> None:
        self.reasoning = 0
        self._undecided = 0  # tokens whose text is not certain yet
        self._thinking = False

    def take(self, delta: Delta) -> None:
        if delta.parts:
            self._thinking = isinstance(delta.parts[0], Reasoning)
            self.reasoning += self._undecided if self._thinking else 0
            self._undecided = 0
        if delta.token is not None:
            if delta.parts:
                self.reasoning += self._thinking
            else:
                self._undecided += 1


class Running:
    """Answers to one conversation while they are made. Whoever has it calls `end`, however it went."""

    def __init__(
        self, service: Service, model: ServedModel, ticket: Ticket, streams: list[TurnStream], cut: Cut | None
    ) -> None:
        self.model = model
        self.cut = cut
        self.created = int(time.time())
        self.tallies = [Tally() for _ in streams]
        self._service = service
        self._ticket = ticket
        self._streams = streams
        self._watches = [service.metrics.watch(model.name) for _ in streams]
        self._ends = model.vocabulary.ends
        self._noted = False

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes, with the number of the answer it belongs to."""
        async for index, delta in merged([stream.deltas_async() for stream in self._streams]):
            if delta.token is not None:
                self._watches[index].token()
            self.tallies[index].take(delta)
            yield index, delta

    async def turns(self) -> list[Turn]:
        """Wait for all of it."""
        async for _ in self.deltas():
            pass
        return self.finished()

    def finished(self) -> list[Turn]:
        """The whole answers, once they are over."""
        turns = [stream.turn for stream in self._streams]
        if not self._noted:
            self._noted = True
            self._service.metrics.note_usage(self.model.name, [turn.usage for turn in turns])
        return turns

    def shown(self, token: Token) -> bool:
        """Whether a token is part of the answer, and not its end."""
        return token.token not in self._ends

    def end(self) -> None:
        """Give everything back; what still runs is cancelled."""
        for stream in self._streams:
            stream.cancel()
        self._ticket.release()


async def run(service: Service, name: str, asked: Asked) -> Running:
    """Begin to answer a conversation, once there is room for it."""
    model = await service.model(name)
    if not model.generates:
        raise invalid("model", f"the model {name!r} only makes embeddings", "unsupported_model")
    asked.check(service)
    ticket = service.gate(model).enter(asked.n)
    cuts: list[Cut | None] = []
    try:
        whole = replace(asked, messages=await brought(service, model, asked.messages))
        arrived = model.announce()

        def begin() -> list[TurnStream]:
            try:
                streams, cut = whole.begin(model, deadline_of(asked.fields, service), arrived)
            finally:
                arrived()
            cuts.append(cut)
            return streams

        streams = await service.begin(begin)
    except BaseException:
        ticket.release()
        raise
    return Running(service, model, ticket, list(streams), cuts[0])


def deadline_of(fields: SamplingFields, service: Service) -> float | None:
    """Seconds that an answer may take: the request's, and never more than the server's."""
    given = [value for value in (fields.deadline, service.settings.deadline) if value is not None]
    return min(given, default=None)


def usage_of(turns: list[Turn], tallies: list[Tally]) -> dict[str, Any]:
    """What the answers to one conversation took; their prompt counts once."""
    prompt, generated = turns[0].usage.prompt, sum(turn.usage.generated for turn in turns)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": prompt_details([turn.usage for turn in turns]),
        "completion_tokens_details": {
            "reasoning_tokens": sum(tally.reasoning for tally in tallies),
            **predictions_of(turn.usage for turn in turns),
        },
    }


def prompt_details(usages: list[Usage]) -> dict[str, int]:
    """Of the prompt: what was in memory; where there are pictures and sounds, how much they are, how much of that was
    in memory, and how many had to be encoded."""
    cached = {"cached_tokens": min(usage.cached for usage in usages)}
    if not usages[0].media:
        return cached
    return cached | {
        "image_tokens": usages[0].media - usages[0].audio,
        "audio_tokens": usages[0].audio,
        "cached_media_tokens": min(usage.media_cached for usage in usages),
        "encoded_media": sum(usage.encoded for usage in usages),
    }


def predictions_of(usages: Iterable[Usage]) -> dict[str, float]:
    """Tokens that were guessed before they were drawn: those that were right and the others, how many at a time, and
    what that saved."""
    used = list(usages)
    accepted = sum(usage.accepted for usage in used)
    rejected = sum(usage.drafted for usage in used) - accepted
    drafts = sum(usage.drafts for usage in used)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
        "mean_prediction_length": round((accepted + rejected) / drafts, 2) if drafts else 0.0,
        "prediction_seconds_saved": round(sum(usage.seconds_saved for usage in used), 4),
    }


def logprob_of(model: ServedModel, token: Token) -> dict[str, Any]:
    """A token with its log-probability and those of the likeliest, as OpenAI's chat has it."""
    return {
        **_named(model, token.token, token.logprob or 0.0),
        "top_logprobs": [_named(model, other, value) for other, value in token.alternatives],
    }


def _named(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    piece = model.vocabulary.piece(token)
    return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}
