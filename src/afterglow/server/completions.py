"""/v1/completions: texts and tokens continued, with the log-probabilities of prompts where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.engine.scoring import Scored
from afterglow.engine.stream import Stream
from afterglow.server import limits
from afterglow.server.answers import deadline_of
from afterglow.server.completion_page import Page
from afterglow.server.continuing import Continuing, Prompt, Text, made
from afterglow.server.errors import invalid
from afterglow.server.overflow import fitting_tokens
from afterglow.server.security import tenant
from afterglow.server.service import Service
from afterglow.server.sse import streamed
from afterglow.server.types.completion import CompletionRequest, prompts_of
from afterglow.server.types.sampling import sampling_of
from afterglow.server.wire import StrictRoute
from afterglow.serving import ServedModel

MAX_TOKENS = 16  # OpenAI's default


def routes(service: Service) -> APIRouter:
    """The route, for an application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", summary="Continue a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await service.while_there(request, answer(service, body, tenant(request)), "prompt")

    return router


async def answer(service: Service, body: CompletionRequest, salt: str) -> Response:
    """Continue texts, whole or as it comes."""
    stops = check(service, body)
    model = await service.model(body.model)
    if not model.generates:
        raise invalid("model", f"the model {body.model!r} only makes embeddings", "unsupported_model")
    prompts = await service.text(lambda: [read(model, body, one) for one in prompts_of(body)])
    ticket = service.gate(model).enter(len(prompts) * made(body))
    try:
        echoes = [await echo(service, model, body, prompt) for prompt in prompts]
        streams = await service.begin(lambda: begin(service, model, body, prompts, stops, salt))
    except BaseException:
        ticket.release()
        raise
    running = Continuing(service, model, body, prompts, ticket, [Text(one, model, stops) for one in streams])
    page = Page(body, running, echoes)
    if not body.stream:
        try:
            return JSONResponse(page.whole(await running.texts()))
        finally:
            running.end()
    return await streamed(running.pieces(), page.events, ping=service.settings.ping_seconds, ended=running.end)


def check(service: Service, body: CompletionRequest) -> list[str]:
    """Limits, and what fields have to do with each other; the stop texts."""
    settings, prompts, count = service.settings, prompts_of(body), made(body)
    if not prompts or not all(prompts):
        raise invalid("prompt", "`prompt` must not be empty")
    limits.at_most(settings, "max_prompts", "prompt", len(prompts))
    limits.at_most(settings, "max_choices", "best_of" if body.best_of else "n", count)
    limits.at_most(settings, "max_logit_bias", "logit_bias", len(body.logit_bias or {}))
    if body.best_of is not None and (body.best_of < (body.n or 1) or (body.stream and body.best_of > (body.n or 1))):
        raise invalid("best_of", "`best_of` must be at least `n`, and in a stream not more")
    if body.suffix is not None and any(isinstance(prompt, list) for prompt in prompts):
        raise invalid("suffix", "`suffix` needs a `prompt` of text")
    if body.suffix is not None and body.echo:
        raise invalid("echo", "`echo` and `suffix` do not go together")
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "`stream_options` is for streams: set `stream`")
    return limits.stops(body.stop, settings)


def read(model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> Prompt:
    """A prompt as tokens that fit."""
    if body.suffix is not None:
        assert isinstance(prompt, str)
        tokens: Sequence[int] = model.infill(prompt, body.suffix)
    else:
        tokens = [int(token) for token in model.request(prompt).entries]  # type: ignore[arg-type]
    limit = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return Prompt(*fitting_tokens(tokens, body.overflow or "refuse", context=model.context_length, max_tokens=limit))


async def echo(service: Service, model: ServedModel, body: CompletionRequest, prompt: Prompt) -> list[Scored]:
    """How likely the prompt's own tokens are, where that is asked for."""
    if not body.echo or body.logprobs is None or len(prompt.tokens) < 2:
        return []
    alternatives = body.logprobs
    return await service.waiting(lambda: model.score(prompt.tokens, alternatives))


def begin(
    service: Service,
    model: ServedModel,
    body: CompletionRequest,
    prompts: Sequence[Prompt],
    stops: list[str],
    salt: str,
) -> list[Stream]:
    """Have the engine begin all answers, those to one prompt together."""
    sampling = sampling_of(body, context_length=model.context_length, vocabulary=model.vocabulary.size)
    requests = [
        model.request(
            prompt.tokens,
            max_tokens=MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            sampling=sampling,
            stop=stops,
            logprobs=body.logprobs if body.best_of is None else body.logprobs or 0,
            deadline=deadline_of(body, service),
            ignore_ends=bool(body.ignore_eos),
            salt=salt,
        )
        for prompt in prompts
    ]
    return [stream for request in requests for stream in model.submit(request, made(body))]
