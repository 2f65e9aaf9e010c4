"""/v1/completions: texts and tokens continued, with the log-probabilities of prompts where they are asked for."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.api.served_model import ServedModel
from afterglow.engine.host.stream import EventStream
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.server import limits
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation import resolve_deadline
from afterglow.server.openai.completion_page import CompletionFormatter
from afterglow.server.openai.continuing import (
    CompletionGeneration,
    CompletionStream,
    TokenizedPrompt,
    count_generated_choices,
)
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.completions import CompletionRequest, list_prompts
from afterglow.server.schema.sampling import build_sampling
from afterglow.server.sse import stream_response
from afterglow.server.state import ServerState
from afterglow.server.truncation import fit_tokens

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def build_router(state: ServerState) -> APIRouter:
    """The route, for an application."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", summary="Continue a text")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_completion(state, body, get_tenant_salt(request)), "prompt"
        )

    return router


async def create_completion(state: ServerState, body: CompletionRequest, salt: str) -> Response:
    """Continue texts, whole or as it comes."""
    stops = check_request(state, body)
    model = await state.get_model(body.model)
    if not model.can_generate:
        raise invalid_request_error("model", f"the model {body.model!r} only makes embeddings", "unsupported_model")
    prompts = await state.run_text_work(lambda: [tokenize_prompt(model, body, one) for one in list_prompts(body)])
    ticket = state.get_admission_queue(model).admit(len(prompts) * count_generated_choices(body))
    try:
        echoes = [await score_prompt(state, model, body, prompt) for prompt in prompts]
        streams = await state.start_streams(lambda: submit_requests(state, model, body, prompts, stops, salt))
    except BaseException:
        ticket.release()
        raise
    running = CompletionGeneration(
        state, model, body, prompts, ticket, [CompletionStream(one, model, stops) for one in streams]
    )
    page = CompletionFormatter(body, running, echoes)
    if not body.stream:
        try:
            return JSONResponse(page.build_response(await running.collect_choices()))
        finally:
            running.close()
    return await stream_response(
        running.stream_deltas(), page.stream_events, ping_seconds=state.settings.ping_seconds, on_close=running.close
    )


def check_request(state: ServerState, body: CompletionRequest) -> list[str]:
    """Limits, and what fields have to do with each other; the stop texts."""
    settings, prompts, count = state.settings, list_prompts(body), count_generated_choices(body)
    if not prompts or not all(prompts):
        raise invalid_request_error("prompt", "`prompt` must not be empty")
    limits.check_limit(settings, "max_prompts", "prompt", len(prompts))
    limits.check_limit(settings, "max_choices", "best_of" if body.best_of else "n", count)
    limits.check_limit(settings, "max_logit_bias", "logit_bias", len(body.logit_bias or {}))
    if body.best_of is not None and (body.best_of < (body.n or 1) or (body.stream and body.best_of > (body.n or 1))):
        raise invalid_request_error("best_of", "`best_of` must be at least `n`, and in a stream not more")
    if body.suffix is not None and any(isinstance(prompt, list) for prompt in prompts):
        raise invalid_request_error("suffix", "`suffix` needs a `prompt` of text")
    if body.suffix is not None and body.echo:
        raise invalid_request_error("echo", "`echo` and `suffix` do not go together")
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` is for streams: set `stream`")
    return limits.parse_stops(body.stop, settings)


def tokenize_prompt(model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> TokenizedPrompt:
    """A prompt as tokens that fit."""
    if body.suffix is not None:
        assert isinstance(prompt, str)
        tokens: Sequence[int] = model.build_infill_prompt(prompt, body.suffix)
    else:
        tokens = [int(token) for token in model.build_request(prompt).entries]  # type: ignore[arg-type]
    limit = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    return TokenizedPrompt(
        *fit_tokens(tokens, body.overflow or "refuse", context=model.context_length, max_tokens=limit)
    )


async def score_prompt(
    state: ServerState, model: ServedModel, body: CompletionRequest, prompt: TokenizedPrompt
) -> list[TokenLogprob]:
    """How likely the prompt's own tokens are, where that is asked for."""
    if not body.echo or body.logprobs is None or len(prompt.tokens) < 2:
        return []
    alternatives = body.logprobs
    return await state.run_engine_call(lambda: model.score(prompt.tokens, alternatives))


def submit_requests(
    state: ServerState,
    model: ServedModel,
    body: CompletionRequest,
    prompts: Sequence[TokenizedPrompt],
    stops: list[str],
    salt: str,
) -> list[EventStream]:
    """Have the engine begin all answers, those to one prompt together."""
    sampling = build_sampling(body, context_length=model.context_length, vocabulary_size=model.vocabulary.size)
    requests = [
        model.build_request(
            prompt.tokens,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            sampling=sampling,
            stop=stops,
            logprobs=body.logprobs if body.best_of is None else body.logprobs or 0,
            deadline=resolve_deadline(body, state),
            ignore_eos=bool(body.ignore_eos),
            salt=salt,
        )
        for prompt in prompts
    ]
    return [stream for request in requests for stream in model.submit(request, count_generated_choices(body))]
