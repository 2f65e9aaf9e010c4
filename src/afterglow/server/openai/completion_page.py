"""Continued texts as OpenAI writes them, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from afterglow.api.served_model import ServedModel
from afterglow.engine.sampling.logprobs import TokenLogprob
from afterglow.engine.types.request import Token
from afterglow.server.openai.continuing import CompletionDelta, CompletionGeneration, CompletionStream
from afterglow.server.schema.completions import CompletionRequest
from afterglow.server.sse import DONE_EVENT, EventTemplate


class CompletionFormatter:
    """Answers as OpenAI writes them, whole or in chunks."""

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
            "model": body.model,
            "system_fingerprint": generation.model.fingerprint,
        }
        self._chunk_template = EventTemplate(self._head)

    def build_response(self, streams: list[CompletionStream]) -> dict[str, Any]:
        """The answers at once."""
        choices = []
        for index, text in enumerate(streams):
            number = index // (self._body.n or 1)
            before, table = self._build_echo(number)
            if table is not None:
                self._add_logprobs(table, text.tokens, len(before))
            choices.append(
                {"index": index, "text": before + text.text, "logprobs": dump_logprobs(table), **build_finish(text)}
            )
        return {**self._head, "choices": choices, "usage": self._generation.build_usage(), **self._build_truncation()}

    async def stream_events(self, deltas: AsyncIterator[tuple[int, CompletionDelta]]) -> AsyncIterator[bytes]:
        """The answers as they come."""
        count = self._body.n or 1
        offsets = []
        for index in range(len(self._generation.prompts) * count):
            before, table = self._build_echo(index // count)
            offsets.append(len(before))
            if before or self._build_truncation():
                yield self._format_chunk(index, before, table, extra=self._build_truncation())
        async for index, piece in deltas:
            table = None if self._body.logprobs is None else LogprobsTable()
            if table is not None and piece.token is not None:
                self._add_logprobs(table, [piece.token], offsets[index])
            if piece.text or (table is not None and table.tokens):
                yield self._format_chunk(index, piece.text, table)
            offsets[index] += len(piece.text)
        for index, text in enumerate(self._generation.get_choices()):
            yield self._format_chunk(index, "", None, **build_finish(text))
        if self._include_usage:
            yield self._chunk_template.format({"choices": [], "usage": self._generation.build_usage()})
        yield DONE_EVENT

    def _format_chunk(
        self, index: int, text: str, table: LogprobsTable | None, *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": dump_logprobs(table), "finish_reason": None, **choice}
        rest = {"choices": [choice], **(extra or {})}
        return self._chunk_template.format({**rest, "usage": None} if self._include_usage else rest)

    def _build_echo(self, number: int) -> tuple[str, LogprobsTable | None]:
        """What stands before an answer: the prompt, with its log-probabilities, where that was asked for."""
        table = None if self._body.logprobs is None else LogprobsTable()
        if not self._body.echo:
            return "", table
        model, tokens = self._generation.model, self._generation.prompts[number].tokens
        if table is not None:
            scored: list[TokenLogprob | None] = [None, *self._prompt_scores[number]]
            offset = 0
            for token, score in zip(tokens, scored, strict=True):
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
        cuts = [prompt.truncation.report for prompt in self._generation.prompts if prompt.truncation is not None]
        return {"overflow": cuts[0] if len(self._generation.prompts) == 1 else cuts} if cuts else {}


class LogprobsTable:
    """OpenAI's table of log-probabilities: four lists of equal length."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, model: ServedModel, token: int, score: TokenLogprob | None, offset: int) -> None:
        self.tokens.append(format_token(model, token))
        self.token_logprobs.append(None if score is None else score[0])
        self.top_logprobs.append(
            None if score is None else {format_token(model, other): value for other, value in score[1]}
        )
        self.text_offset.append(offset)


def dump_logprobs(table: LogprobsTable | None) -> dict[str, Any] | None:
    return None if table is None else vars(table)


def format_token(model: ServedModel, token: int) -> str:
    """A token's text; where it is part of a character, its bytes as OpenAI spells them."""
    piece = model.vocabulary.token_to_piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def build_finish(stream: CompletionStream) -> dict[str, Any]:
    """Why an answer ended: OpenAI's word, and ours beside it."""
    assert stream.finished is not None
    stop = stream.finished.stop_reason.decode() if isinstance(stream.finished.stop_reason, bytes) else None
    late = stream.finished.finish_reason == "deadline"
    return {
        "finish_reason": "length" if late else stream.finished.finish_reason,
        "stop_reason": "deadline" if late else stop,
    }
