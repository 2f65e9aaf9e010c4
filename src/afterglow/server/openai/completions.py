"""Route /v1/completions: completes texts or tokens, optionally with the log-probabilities of the prompt."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from afterglow.api.served_model import ServedModel
from afterglow.chat.output.detokenizer import Detokenizer
from afterglow.chat.prompt import Truncation
from afterglow.chat.truncation import count_bos, fit_entries
from afterglow.engine.host.stream import EventStream
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.types.request import Failed, Finished, Token
from afterglow.server import limits
from afterglow.server.admission import Ticket
from afterglow.server.auth import get_tenant_salt
from afterglow.server.errors import invalid_request_error
from afterglow.server.generation import bind_streams, build_prediction_details, resolve_deadline
from afterglow.server.schema.base import StrictRoute
from afterglow.server.schema.completions import CompletionRequest, list_prompts
from afterglow.server.schema.sampling import build_sampling
from afterglow.server.sse import DONE_EVENT, EventTemplate, stream_response
from afterglow.server.state import ServerState, merge_streams

DEFAULT_MAX_TOKENS = 16  # OpenAI's default


def build_router(state: ServerState) -> APIRouter:
    """Return the router of this route."""
    router = APIRouter(route_class=StrictRoute)

    @router.post("/v1/completions", summary="Create a completion")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await state.run_while_connected(
            request, create_completion(state, body, get_tenant_salt(request)), "prompt"
        )

    return router


async def create_completion(state: ServerState, body: CompletionRequest, salt: str) -> Response:
    """Generate completions and return them whole or as a stream."""
    stops = check_request(state, body)
    model = await state.get_model(body.model)
    if not model.can_generate:
        raise invalid_request_error("model", f"the model {model.name!r} supports embeddings only", "unsupported_model")
    prompts = await state.run_text_work(lambda: [tokenize_prompt(model, body, prompt) for prompt in list_prompts(body)])
    ticket = state.get_admission_queue(model).admit(len(prompts) * count_generated_choices(body))
    try:
        prompt_scores = [await score_prompt(state, model, body, prompt) for prompt in prompts]
        streams = await state.start_streams(lambda: submit_requests(state, model, body, prompts, stops, salt))
    except BaseException:
        ticket.release()
        raise
    bind_streams(streams, ticket, state)
    generation = CompletionGeneration(
        state, model, body, prompts, ticket, [CompletionStream(stream, model, stops) for stream in streams]
    )
    formatter = CompletionFormatter(body, generation, prompt_scores)
    if not body.stream:
        try:
            return JSONResponse(formatter.build_response(await generation.collect_choices()))
        finally:
            generation.close()
    return await stream_response(
        generation.stream_deltas(),
        formatter.stream_events,
        ping_seconds=state.settings.ping_seconds,
        on_close=generation.close,
    )


# --- the request


def check_request(state: ServerState, body: CompletionRequest) -> list[str]:
    """Check limits and combinations of fields, and return the stop strings."""
    settings, prompts = state.settings, list_prompts(body)
    if not prompts or not all(prompts):
        raise invalid_request_error("prompt", "`prompt` must not be empty")
    limits.check_limit(settings, "max_prompts", "prompt", len(prompts))
    limits.check_limit(settings, "max_choices", "n", body.n or 1)
    limits.check_limit(settings, "max_choices", "best_of", body.best_of or 1)
    limits.check_limit(settings, "max_logit_bias", "logit_bias", len(body.logit_bias or {}))
    if body.best_of is not None and (body.best_of < (body.n or 1) or (body.stream and body.best_of > (body.n or 1))):
        raise invalid_request_error("best_of", "`best_of` must be at least `n`, and equal to `n` in a stream")
    if body.suffix is not None and any(isinstance(prompt, list) for prompt in prompts):
        raise invalid_request_error("suffix", "`suffix` requires a text `prompt`")
    if body.suffix is not None and body.echo:
        raise invalid_request_error("echo", "`echo` and `suffix` exclude each other")
    if body.stream_options is not None and not body.stream:
        raise invalid_request_error("stream_options", "`stream_options` requires `stream`")
    return limits.parse_stops(body.stop, settings)


def count_generated_choices(body: CompletionRequest) -> int:
    """Return the number of choices generated for each prompt."""
    return max(body.n or 1, body.best_of or 1)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Tokens of a prompt, and what was dropped from it."""

    tokens: Sequence[int]
    truncation: Truncation | None


def tokenize_prompt(model: ServedModel, body: CompletionRequest, prompt: str | list[int]) -> TokenizedPrompt:
    """Tokenize a prompt and truncate it to the context."""
    keep_end = 0
    if body.suffix is not None:
        assert isinstance(prompt, str)
        tokens = model.build_infill_prompt(prompt, body.suffix)
        special = model.vocabulary.special_tokens
        keep_start = tokens.index(special["fim_pre"]) + 1  # only the text before the gap may lose its start
        keep_end = len(tokens) - tokens.index(special["fim_suf"])
    else:
        tokens = [int(token) for token in model.build_request(prompt).entries]  # type: ignore[arg-type]
        keep_start = count_bos(tokens, model.vocabulary)
    fitted, truncation = fit_entries(
        tokens,
        body.overflow or "refuse",
        context=model.context_length,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
        keep_start=keep_start,
        keep_end=keep_end,
    )
    return TokenizedPrompt(fitted, truncation)  # type: ignore[arg-type]


async def score_prompt(
    state: ServerState, model: ServedModel, body: CompletionRequest, prompt: TokenizedPrompt
) -> list[TokenLogprob]:
    """Compute the log-probabilities of the prompt tokens if the request asks for them."""
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
    """Submit all prompts to the engine, the choices of one prompt together."""
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


# --- the running choices


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """Text and token of one event."""

    text: str
    token: Token | None = None


class CompletionStream:
    """One choice: a stream of deltas, and the whole text once it is finished."""

    def __init__(self, stream: EventStream, model: ServedModel, stops: list[str]) -> None:
        self.tokens: list[Token] = []
        self.text = ""
        self.finished: Finished | None = None
        self._stream = stream
        self._model = model
        self._detokenizer = Detokenizer(stops)

    async def stream_deltas(self) -> AsyncIterator[CompletionDelta]:
        """Yield a delta for each event of the engine."""
        async for event in self._stream:
            match event:
                case Token():
                    self.tokens.append(event)
                    piece = self._model.vocabulary.token_to_piece(event.token, special=False)
                    yield self._append_text(self._detokenizer.feed(piece), event)
                case Finished():
                    self.finished = event
                    stop = event.stop_reason.decode() if isinstance(event.stop_reason, bytes) else None
                    yield self._append_text(self._detokenizer.finish(stop))
                case Failed():
                    raise event.error
                case _:
                    yield CompletionDelta("")

    def cancel(self) -> None:
        """Stop generating."""
        self._stream.cancel()

    @property
    def mean_logprob(self) -> float:
        """Mean log-probability of the tokens."""
        values = [token.logprob or 0.0 for token in self.tokens]
        return sum(values) / len(values) if values else 0.0

    def _append_text(self, text: str, token: Token | None = None) -> CompletionDelta:
        self.text += text
        return CompletionDelta(text, token)


class CompletionGeneration:
    """Running choices of one request. The owner must call `close`."""

    def __init__(
        self,
        state: ServerState,
        model: ServedModel,
        body: CompletionRequest,
        prompts: list[TokenizedPrompt],
        ticket: Ticket,
        streams: list[CompletionStream],
    ) -> None:
        self.model = model
        self.prompts = prompts
        self._state = state
        self._generated_per_prompt = count_generated_choices(body)
        self._returned_per_prompt = body.n or 1
        self._ticket = ticket
        self._streams = streams
        self._latency_recorders = [state.metrics.build_latency_recorder(model.name) for _ in streams]

    async def stream_deltas(self) -> AsyncIterator[tuple[int, CompletionDelta]]:
        """Yield deltas as they arrive, each with the index of its choice."""
        async for index, delta in merge_streams([stream.stream_deltas() for stream in self._streams]):
            if delta.token is not None:
                self._latency_recorders[index].record_token()
            yield index, delta

    async def collect_choices(self) -> list[CompletionStream]:
        """Wait for all choices and return the most likely ones of each prompt."""
        async for _ in self.stream_deltas():
            pass
        return self.get_choices()

    def get_choices(self) -> list[CompletionStream]:
        """Return the `n` most likely finished choices of each prompt and record the usage of all."""
        usages = [stream.finished.usage for stream in self._streams if stream.finished]
        self._state.metrics.record_usage(self.model.name, usages)
        if self._generated_per_prompt == self._returned_per_prompt:
            return self._streams
        choices: list[CompletionStream] = []
        for start in range(0, len(self._streams), self._generated_per_prompt):
            candidates = self._streams[start : start + self._generated_per_prompt]
            choices += sorted(candidates, key=lambda stream: -stream.mean_logprob)[: self._returned_per_prompt]
        return choices

    def build_usage(self) -> dict[str, Any]:
        """Build the usage of all generated choices. Each prompt counts once."""
        usages = [stream.finished.usage for stream in self._streams if stream.finished is not None]
        first_choices = self._streams[:: self._generated_per_prompt]
        prompt_usages = [stream.finished.usage for stream in first_choices if stream.finished is not None]
        prompt = sum(usage.prompt_tokens for usage in prompt_usages)
        generated = sum(usage.generated_tokens for usage in usages)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in prompt_usages)},
            "completion_tokens_details": {"reasoning_tokens": 0, **build_prediction_details(usages)},
        }

    def close(self) -> None:
        """Cancel running choices and release the admission ticket."""
        for stream in self._streams:
            stream.cancel()
        self._ticket.release()


# --- the response


class CompletionFormatter:
    """Formats a generation as a text completion, whole or in chunks."""

    def __init__(
        self, body: CompletionRequest, generation: CompletionGeneration, prompt_scores: list[list[TokenLogprob]]
    ) -> None:
        self._body = body
        self._generation = generation
        self._prompt_scores = prompt_scores
        self._include_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": generation.model.name,
            "system_fingerprint": generation.model.fingerprint,
        }
        self._chunk_template = EventTemplate(self._head)

    def build_response(self, streams: list[CompletionStream]) -> dict[str, Any]:
        """Build the whole completion."""
        choices = []
        for index, stream in enumerate(streams):
            echo, table = self._build_echo(index // (self._body.n or 1))
            if table is not None:
                self._add_logprobs(table, stream.tokens, len(echo))
            choices.append(
                {"index": index, "text": echo + stream.text, "logprobs": dump_logprobs(table), **build_finish(stream)}
            )
        return {**self._head, "choices": choices, "usage": self._generation.build_usage(), **self._build_truncation()}

    async def stream_events(self, deltas: AsyncIterator[tuple[int, CompletionDelta]]) -> AsyncIterator[bytes]:
        """Yield the events of the stream."""
        count = self._body.n or 1
        offsets = []
        for index in range(len(self._generation.prompts) * count):
            echo, table = self._build_echo(index // count)
            offsets.append(len(echo))
            if echo or self._build_truncation():
                yield self._format_chunk(index, echo, table, extra=self._build_truncation())
        async for index, delta in deltas:
            table = None if self._body.logprobs is None else LogprobsTable()
            if table is not None and delta.token is not None:
                self._add_logprobs(table, [delta.token], offsets[index])
            if delta.text or (table is not None and table.tokens):
                yield self._format_chunk(index, delta.text, table)
            offsets[index] += len(delta.text)
        for index, stream in enumerate(self._generation.get_choices()):
            yield self._format_chunk(index, "", None, **build_finish(stream))
        if self._include_usage:
            yield self._chunk_template.format({"choices": [], "usage": self._generation.build_usage()})
        yield DONE_EVENT

    def _format_chunk(
        self, index: int, text: str, table: LogprobsTable | None, *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": dump_logprobs(table), "finish_reason": None, **choice}
        fields = {"choices": [choice], **(extra or {})}
        return self._chunk_template.format({**fields, "usage": None} if self._include_usage else fields)

    def _build_echo(self, prompt_index: int) -> tuple[str, LogprobsTable | None]:
        """Return the echoed prompt and the log-probabilities of its tokens, as far as requested."""
        table = None if self._body.logprobs is None else LogprobsTable()
        if not self._body.echo:
            return "", table
        model, tokens = self._generation.model, self._generation.prompts[prompt_index].tokens
        if table is not None:
            scores: list[TokenLogprob | None] = [None, *self._prompt_scores[prompt_index]]
            offset = 0
            for token, score in zip(tokens, scores, strict=True):
                piece = model.vocabulary.token_to_piece(token)
                table.add(model, token, score, offset)
                offset += len(piece.decode("utf-8", "replace"))
        return model.detokenize(tokens, special=True), table

    def _add_logprobs(self, table: LogprobsTable, tokens: Sequence[Token], offset: int) -> None:
        model = self._generation.model
        for token in tokens:
            table.add(model, token.token, (token.logprob or 0.0, token.alternatives), offset)
            offset += len(model.vocabulary.token_to_piece(token.token).decode("utf-8", "replace"))

    def _build_truncation(self) -> dict[str, Any]:
        prompts = self._generation.prompts
        reports = [prompt.truncation.report for prompt in prompts if prompt.truncation is not None]
        return {"overflow": reports[0] if len(prompts) == 1 else reports} if reports else {}


class LogprobsTable:
    """OpenAI's log-probabilities object: four lists of equal length."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, model: ServedModel, token: int, score: TokenLogprob | None, offset: int) -> None:
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


def format_token(model: ServedModel, token: int) -> str:
    """Return the text of a token, or its bytes in OpenAI's notation if they are not valid UTF-8."""
    piece = model.vocabulary.token_to_piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def build_finish(stream: CompletionStream) -> dict[str, Any]:
    """Build OpenAI's `finish_reason` and the extension `stop_reason`."""
    assert stream.finished is not None
    stop = stream.finished.stop_reason.decode() if isinstance(stream.finished.stop_reason, bytes) else None
    past_deadline = stream.finished.finish_reason == "deadline"
    return {
        "finish_reason": "length" if past_deadline else stream.finished.finish_reason,
        "stop_reason": "deadline" if past_deadline else stop,
    }
