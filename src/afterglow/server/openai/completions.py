"""Route /v1/completions: completes texts or tokens, optionally with the log-probabilities of the prompt."""

from __future__ import annotations

import codecs
import functools
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from afterglow.api.model import Model
from afterglow.api.prompts import FittedPrompt
from afterglow.chat.output.parts import TextDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.types.request import Token
from afterglow.server import limits
from afterglow.server.adapters import build_lora
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation import Generation, start_generation
from afterglow.server.generation_requests import PromptRequest
from afterglow.server.installed import RequestDefaults
from afterglow.server.openai.formatting import (
    STREAM_FORMAT,
    ChunkFormatter,
    build_finish,
    build_timings,
    build_truncation,
    build_usage,
    build_verbose,
)
from afterglow.server.openai.schema.completions import CompletionRequest, list_prompts
from afterglow.server.openai.schema.foreign import build_response_format, find_format_field
from afterglow.server.priority import get_served_tier, is_batch_line
from afterglow.server.schema.base import StrictRoute
from afterglow.server.state import ServerState


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", summary="Create a completion")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request,
            create_completion(state, body, get_tenant_salt(request)),
            "prompt",
            STREAM_FORMAT if body.stream else None,
            {"response_format": find_format_field(body)},
        )

    return router


async def create_completion(state: ServerState, body: CompletionRequest, salt: str) -> Response:
    """Generate completions and return them whole or as a stream."""
    check_fields(state, body)
    model = await state.get_generating_model(body.model)
    defaults = state.models.get_requested_model(body.model).defaults
    prompts = await state.run_text_work(
        lambda: [fit_prompt(model, body, prompt, defaults) for prompt in list_prompts(body)]
    )
    request = PromptRequest(
        prompts=prompts,
        sampling_fields=body,
        n=max(body.n or 1, body.best_of or 1),
        max_tokens=body.max_tokens,
        response_format=build_response_format(body),
        stop=limits.parse_stops(body.stop, state.settings),
        logprobs=body.logprobs if body.best_of is None else body.logprobs or 0,
        salt=salt,
        service_tier=body.service_tier,
        keep_alive=body.keep_alive,
    )
    request.check_limits(state)
    prompt_scores = await score_prompts(state, model, body, prompts, salt)
    generation = await start_generation(state, body.model, request)
    formatter = CompletionFormatter(body, generation, prompts, prompt_scores)
    return await generation.respond(formatter, stream=bool(body.stream))


# --- the request


def check_fields(state: ServerState, body: CompletionRequest) -> None:
    """Check the number of prompts and the fields that exclude each other."""
    prompts = list_prompts(body)
    if not prompts or not all(prompts):
        raise invalid_request_error("prompt", "`prompt` must not be empty")
    limits.check_limit(state.settings, "max_prompts", "prompt", len(prompts))
    limits.check_limit(state.settings, "max_choices", "best_of", body.best_of or 1)
    if body.best_of is not None and (body.best_of < (body.n or 1) or (body.stream and body.best_of > (body.n or 1))):
        raise invalid_request_error("best_of", "`best_of` must be at least `n`, and equal to `n` in a stream")
    if body.suffix is not None and any(isinstance(prompt, list) for prompt in prompts):
        raise invalid_request_error("suffix", "`suffix` requires a text `prompt`")
    if body.suffix is not None and body.echo:
        raise invalid_request_error("echo", "`echo` and `suffix` exclude each other")
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` requires `stream`")


def fit_prompt(
    model: Model, body: CompletionRequest, prompt: str | list[int], defaults: RequestDefaults
) -> FittedPrompt:
    """Tokenize a prompt and truncate it to the context."""
    overflow = body.overflow or defaults.sampling.get("overflow", "refuse")
    max_tokens = limits.parse_max_tokens(defaults.max_tokens if body.max_tokens is None else body.max_tokens)
    if body.suffix is None:
        return model.fit_prompt(prompt, overflow, max_tokens)
    assert isinstance(prompt, str)
    tokens, special = model.build_infill_prompt(prompt, body.suffix), model.vocabulary.special_tokens
    keep_start = tokens.index(special["fim_pre"]) + 1  # only the text before the gap may lose its start
    keep_end = len(tokens) - tokens.index(special["fim_suf"])
    return model.fit_prompt(tokens, overflow, max_tokens, keep_start=keep_start, keep_end=keep_end)


async def score_prompts(
    state: ServerState, model: Model, body: CompletionRequest, prompts: Sequence[FittedPrompt], salt: str
) -> list[list[TokenLogprob]]:
    """Compute the log-probabilities of the prompt tokens if the request asks for them."""
    alternatives = body.logprobs
    if not body.echo or alternatives is None:
        return [[] for _ in prompts]
    lora = build_lora(state.models, model, body.model, body.lora)
    ticket = state.get_admission_queue(model).admit(1, is_background=is_batch_line())
    try:
        return [
            await state.run_engine_call(
                model.name, functools.partial(model.score, prompt.tokens, alternatives, lora=lora, salt=salt)
            )
            for prompt in prompts
        ]
    finally:
        ticket.release()


# --- the response


class CompletionFormatter(ChunkFormatter):
    """Formats a generation as a text completion, whole or in chunks."""

    def __init__(
        self,
        body: CompletionRequest,
        generation: Generation,
        prompts: list[FittedPrompt],
        prompt_scores: list[list[TokenLogprob]],
    ) -> None:
        tier = get_served_tier(body.service_tier)
        head = {"id": f"cmpl-{uuid.uuid4().hex}", "object": "text_completion", "service_tier": tier}
        super().__init__(generation, head, "text_completion", body, choices=len(prompts) * (body.n or 1))
        self._body = body
        self._prompts = prompts
        self._prompt_scores = prompt_scores
        self._choices_per_prompt = body.n or 1

    async def build_response(self) -> dict[str, Any]:
        """Build the whole completion."""
        responses = self._select_best(await self._generation.collect_responses())
        choices = []
        for index, response in enumerate(responses):
            echo, table = self._build_echo(index // self._choices_per_prompt)
            if table is not None:
                self._add_logprobs(table, response.tokens, CharacterCounter(len(echo)))
            text, logprobs = echo + response.text, dump_logprobs(table)
            choices.append({"index": index, "text": text, "logprobs": logprobs, **build_finish(response)})
        ends = {"usage": build_usage(self._generation), "timings": build_timings(responses[0].usage)}
        extra = build_truncation(self._generation) | build_verbose(self._generation, self._body)
        return {**self._head, "choices": choices, **ends, **extra}

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        truncation = build_truncation(self._generation)
        counters = []
        for index in range(len(self._prompts) * self._choices_per_prompt):
            echo, table = self._build_echo(index // self._choices_per_prompt)
            counters.append(CharacterCounter(len(echo)))
            if echo or truncation:
                yield self._format_chunk(index, {"text": echo}, logprobs=dump_logprobs(table), extra=truncation)
        async for index, delta in deltas:
            extra = self._build_extra(index, delta)
            if "prompt_progress" in extra:
                yield self._format_chunk(index, {"text": ""}, extra=extra)
            text = "".join(part.text for part in delta.parts if isinstance(part, TextDelta))
            table = None if self._body.logprobs is None else LogprobsTable()
            if table is not None and delta.token is not None:
                self._add_logprobs(table, [delta.token], counters[index])
            if text or (table is not None and table.tokens):
                extra.pop("prompt_progress", None)
                yield self._format_chunk(index, {"text": text}, logprobs=dump_logprobs(table), extra=extra)
        for event in self._format_end({"text": ""}):
            yield event

    def _select_best(self, responses: list[ChatResponse]) -> list[ChatResponse]:
        """Return the `n` most likely choices of each prompt."""
        generated = len(responses) // len(self._prompts)
        if generated == self._choices_per_prompt:
            return responses
        best: list[ChatResponse] = []
        for start in range(0, len(responses), generated):
            candidates = sorted(responses[start : start + generated], key=compute_mean_logprob, reverse=True)
            best += candidates[: self._choices_per_prompt]
        return best

    def _build_echo(self, prompt_index: int) -> tuple[str, LogprobsTable | None]:
        """Return the echoed prompt and the log-probabilities of its tokens, as far as requested."""
        table = None if self._body.logprobs is None else LogprobsTable()
        if not self._body.echo:
            return "", table
        model, tokens = self._generation.model, self._prompts[prompt_index].tokens
        if table is not None:
            scores: list[TokenLogprob | None] = [None, *self._prompt_scores[prompt_index]]
            counter = CharacterCounter()
            for token, score in zip(tokens, scores, strict=True):
                table.add(model, token, score, counter.count)
                counter.feed(model.vocabulary.token_to_piece(token))
        return model.detokenize(tokens, special=True), table

    def _add_logprobs(self, table: LogprobsTable, tokens: Sequence[Token], counter: CharacterCounter) -> None:
        model = self._generation.model
        for token in tokens:
            table.add(model, token.token, (token.logprob or 0.0, token.alternatives), counter.count)
            counter.feed(model.vocabulary.token_to_piece(token.token, special=False))


def compute_mean_logprob(response: ChatResponse) -> float:
    """Return the mean log-probability of the tokens of a choice."""
    values = [token.logprob or 0.0 for token in response.tokens]
    return sum(values) / len(values) if values else 0.0


class CharacterCounter:
    """Counts the characters of a text by its tokens, which may be parts of characters.

    >>> counter = CharacterCounter()
    >>> counter.feed(b"\\xc3")
    >>> counter.feed(b"\\xa9")
    >>> counter.count
    1
    """

    def __init__(self, count: int = 0) -> None:
        self.count = count
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, piece: bytes) -> None:
        """Add the bytes of a token."""
        self.count += len(self._decoder.decode(piece))


class LogprobsTable:
    """OpenAI's log-probabilities object: four lists of equal length."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, model: Model, token: int, score: TokenLogprob | None, offset: int) -> None:
        """Append a token. The first token of a prompt has no score."""
        self.tokens.append(format_token(model, token))
        self.token_logprobs.append(None if score is None else score[0])
        self.top_logprobs.append(
            None if score is None else {format_token(model, alternative): value for alternative, value in score[1]}
        )
        self.text_offset.append(offset)


def dump_logprobs(table: LogprobsTable | None) -> dict[str, Any] | None:
    """Convert a table to a dictionary."""
    return None if table is None else vars(table)


def format_token(model: Model, token: int) -> str:
    """Return the text of a token, or its bytes in OpenAI's notation if they are not valid UTF-8."""
    piece = model.vocabulary.token_to_piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)
