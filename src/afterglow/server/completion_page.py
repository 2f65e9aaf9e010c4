"""Continued texts as OpenAI writes them, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from afterglow.engine.request import Token
from afterglow.engine.scoring import Scored
from afterglow.server.continuing import Continuing, Piece, Text
from afterglow.server.sse import DONE, Headed
from afterglow.server.types.completion import CompletionRequest
from afterglow.serving import ServedModel


class Page:
    """Answers as OpenAI writes them, whole or in chunks."""

    def __init__(self, body: CompletionRequest, running: Continuing, echoes: list[list[Scored]]) -> None:
        self._body = body
        self._running = running
        self._echoes = echoes
        self._usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": running.model.fingerprint,
        }
        self._chunks = Headed(self._head)

    def whole(self, texts: list[Text]) -> dict[str, Any]:
        """The answers at once."""
        choices = []
        for index, text in enumerate(texts):
            number = index // (self._body.n or 1)
            before, table = self._echo(number)
            if table is not None:
                self._add(table, text.tokens, len(before))
            choices.append({"index": index, "text": before + text.text, "logprobs": written(table), **ending(text)})
        return {**self._head, "choices": choices, "usage": self._running.usage(), **self._overflow()}

    async def events(self, pieces: AsyncIterator[tuple[int, Piece]]) -> AsyncIterator[bytes]:
        """The answers as they come."""
        count = self._body.n or 1
        offsets = []
        for index in range(len(self._running.prompts) * count):
            before, table = self._echo(index // count)
            offsets.append(len(before))
            if before or self._overflow():
                yield self._chunk(index, before, table, extra=self._overflow())
        async for index, piece in pieces:
            table = None if self._body.logprobs is None else Table()
            if table is not None and piece.token is not None:
                self._add(table, [piece.token], offsets[index])
            if piece.text or (table is not None and table.tokens):
                yield self._chunk(index, piece.text, table)
            offsets[index] += len(piece.text)
        for index, text in enumerate(self._running.finished()):
            yield self._chunk(index, "", None, **ending(text))
        if self._usage:
            yield self._chunks.event({"choices": [], "usage": self._running.usage()})
        yield DONE

    def _chunk(
        self, index: int, text: str, table: Table | None, *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choice = {"index": index, "text": text, "logprobs": written(table), "finish_reason": None, **choice}
        rest = {"choices": [choice], **(extra or {})}
        return self._chunks.event({**rest, "usage": None} if self._usage else rest)

    def _echo(self, number: int) -> tuple[str, Table | None]:
        """What stands before an answer: the prompt, with its log-probabilities, where that was asked for."""
        table = None if self._body.logprobs is None else Table()
        if not self._body.echo:
            return "", table
        model, tokens = self._running.model, self._running.prompts[number].tokens
        if table is not None:
            scored: list[Scored | None] = [None, *self._echoes[number]]
            offset = 0
            for token, score in zip(tokens, scored, strict=True):
                piece = model.vocabulary.piece(token)
                table.add(model, token, score, offset)
                offset += len(piece.decode("utf-8", "replace"))
        return model.detokenize(tokens, special=True), table

    def _add(self, table: Table, tokens: Sequence[Token], offset: int) -> None:
        model = self._running.model
        for token in tokens:
            table.add(model, token.token, (token.logprob or 0.0, token.alternatives), offset)
            offset += len(model.vocabulary.piece(token.token).decode("utf-8", "replace"))

    def _overflow(self) -> dict[str, Any]:
        cuts = [prompt.cut.report for prompt in self._running.prompts if prompt.cut is not None]
        return {"overflow": cuts[0] if len(self._running.prompts) == 1 else cuts} if cuts else {}


class Table:
    """OpenAI's table of log-probabilities: four lists of equal length."""

    def __init__(self) -> None:
        self.tokens: list[str] = []
        self.token_logprobs: list[float | None] = []
        self.top_logprobs: list[dict[str, float] | None] = []
        self.text_offset: list[int] = []

    def add(self, model: ServedModel, token: int, score: Scored | None, offset: int) -> None:
        self.tokens.append(token_text(model, token))
        self.token_logprobs.append(None if score is None else score[0])
        self.top_logprobs.append(
            None if score is None else {token_text(model, other): value for other, value in score[1]}
        )
        self.text_offset.append(offset)


def written(table: Table | None) -> dict[str, Any] | None:
    return None if table is None else vars(table)


def token_text(model: ServedModel, token: int) -> str:
    """A token's text; where it is part of a character, its bytes as OpenAI spells them."""
    piece = model.vocabulary.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def ending(text: Text) -> dict[str, Any]:
    """Why an answer ended: OpenAI's word, and ours beside it."""
    assert text.end is not None
    stop = text.end.stop.decode() if isinstance(text.end.stop, bytes) else None
    late = text.end.reason == "deadline"
    return {"finish_reason": "length" if late else text.end.reason, "stop_reason": "deadline" if late else stop}
