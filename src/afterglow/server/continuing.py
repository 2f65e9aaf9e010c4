"""Texts being continued: what /v1/completions has running."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.chat.detokenizer import Detokenizer
from afterglow.engine.request import Failed, Finished, Token
from afterglow.engine.stream import Stream
from afterglow.server.admission import Ticket
from afterglow.server.answers import predictions_of
from afterglow.server.overflow import Cut
from afterglow.server.service import Service, merged
from afterglow.server.types.completion import CompletionRequest
from afterglow.serving import ServedModel


def made(body: CompletionRequest) -> int:
    """How many answers are made for one prompt."""
    return max(body.n or 1, body.best_of or 1)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and what was left out of it."""

    tokens: Sequence[int]
    cut: Cut | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event brought."""

    text: str
    token: Token | None = None


class Text:
    """One answer as it comes, and whole once it is over."""

    def __init__(self, stream: Stream, model: ServedModel, stops: list[str]) -> None:
        self.tokens: list[Token] = []
        self.text = ""
        self.end: Finished | None = None
        self._stream = stream
        self._model = model
        self._detokenizer = Detokenizer(stops)

    async def pieces(self) -> AsyncIterator[Piece]:
        async for one in self._stream:
            match one:
                case Token():
                    self.tokens.append(one)
                    piece = self._model.vocabulary.piece(one.token, special=False)
                    yield self._note(self._detokenizer.feed(piece), one)
                case Finished():
                    self.end = one
                    stop = one.stop.decode() if isinstance(one.stop, bytes) else None
                    yield self._note(self._detokenizer.finish(stop))
                case Failed():
                    raise one.error
                case _:
                    yield Piece("")

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def likelihood(self) -> float:
        """The mean log-probability of its tokens."""
        values = [token.logprob or 0.0 for token in self.tokens]
        return sum(values) / len(values) if values else 0.0

    def _note(self, text: str, token: Token | None = None) -> Piece:
        self.text += text
        return Piece(text, token)


class Continuing:
    """The answers of one request while they are made. Whoever has it calls `end`, however it went."""

    def __init__(
        self,
        service: Service,
        model: ServedModel,
        body: CompletionRequest,
        prompts: list[Prompt],
        ticket: Ticket,
        texts: list[Text],
    ) -> None:
        self.model = model
        self.prompts = prompts
        self._service = service
        self._made = made(body)
        self._wanted = body.n or 1
        self._ticket = ticket
        self._texts = texts
        self._watches = [service.metrics.watch(model.name) for _ in texts]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """What comes, with the number of the choice it belongs to."""
        async for index, piece in merged([text.pieces() for text in self._texts]):
            if piece.token is not None:
                self._watches[index].token()
            yield index, piece

    async def texts(self) -> list[Text]:
        """Wait for all, and give the likeliest of those that were made for each prompt."""
        async for _ in self.pieces():
            pass
        return self.finished()

    def finished(self) -> list[Text]:
        """What was wanted of what was made, once all is over."""
        self._service.metrics.note_usage(self.model.name, [text.end.usage for text in self._texts if text.end])
        if self._made == self._wanted:
            return self._texts
        groups = [self._texts[at : at + self._made] for at in range(0, len(self._texts), self._made)]
        return [one for group in groups for one in sorted(group, key=lambda text: -text.likelihood)[: self._wanted]]

    def usage(self) -> dict[str, Any]:
        """What all answers took; each prompt counts once."""
        firsts = self._texts[:: self._made]
        ends = [text.end for text in self._texts if text.end is not None]
        prompt = sum(text.end.usage.prompt for text in firsts if text.end is not None)
        cached = sum(text.end.usage.cached for text in firsts if text.end is not None)
        generated = sum(end.usage.generated for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                **predictions_of(end.usage for end in ends),
            },
        }

    def end(self) -> None:
        """Give everything back; what still runs is cancelled."""
        for text in self._texts:
            text.cancel()
        self._ticket.release()
