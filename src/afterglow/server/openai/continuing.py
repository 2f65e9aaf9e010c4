"""Texts being continued: what /v1/completions has running."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from afterglow.api.served_model import ServedModel
from afterglow.chat.output.detokenizer import Detokenizer
from afterglow.engine.host.stream import EventStream
from afterglow.engine.types.request import Failed, Finished, Token
from afterglow.server.admission import Ticket
from afterglow.server.generation import build_prediction_details
from afterglow.server.schema.completions import CompletionRequest
from afterglow.server.state import ServerState, merge_streams
from afterglow.server.truncation import Truncation


def count_generated_choices(body: CompletionRequest) -> int:
    """How many answers are made for one prompt."""
    return max(body.n or 1, body.best_of or 1)


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A prompt as tokens, and what was left out of it."""

    tokens: Sequence[int]
    truncation: Truncation | None


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one event brought."""

    text: str
    token: Token | None = None


class CompletionStream:
    """One answer as it comes, and whole once it is over."""

    def __init__(self, stream: EventStream, model: ServedModel, stops: list[str]) -> None:
        self.tokens: list[Token] = []
        self.text = ""
        self.finished: Finished | None = None
        self._stream = stream
        self._model = model
        self._detokenizer = Detokenizer(stops)

    async def stream_deltas(self) -> AsyncIterator[CompletionDelta]:
        async for one in self._stream:
            match one:
                case Token():
                    self.tokens.append(one)
                    piece = self._model.vocabulary.token_to_piece(one.token, special=False)
                    yield self._append_text(self._detokenizer.feed(piece), one)
                case Finished():
                    self.finished = one
                    stop = one.stop_reason.decode() if isinstance(one.stop_reason, bytes) else None
                    yield self._append_text(self._detokenizer.finish(stop))
                case Failed():
                    raise one.error
                case _:
                    yield CompletionDelta("")

    def cancel(self) -> None:
        self._stream.cancel()

    @property
    def mean_logprob(self) -> float:
        """The mean log-probability of its tokens."""
        values = [token.logprob or 0.0 for token in self.tokens]
        return sum(values) / len(values) if values else 0.0

    def _append_text(self, text: str, token: Token | None = None) -> CompletionDelta:
        self.text += text
        return CompletionDelta(text, token)


class CompletionGeneration:
    """The answers of one request while they are made. Whoever has it calls `end`, however it went."""

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
        """What comes, with the number of the choice it belongs to."""
        async for index, piece in merge_streams([text.stream_deltas() for text in self._streams]):
            if piece.token is not None:
                self._latency_recorders[index].record_token()
            yield index, piece

    async def collect_choices(self) -> list[CompletionStream]:
        """Wait for all, and give the likeliest of those that were made for each prompt."""
        async for _ in self.stream_deltas():
            pass
        return self.get_choices()

    def get_choices(self) -> list[CompletionStream]:
        """What was wanted of what was made, once all is over."""
        self._state.metrics.record_usage(
            self.model.name, [text.finished.usage for text in self._streams if text.finished]
        )
        if self._generated_per_prompt == self._returned_per_prompt:
            return self._streams
        groups = [
            self._streams[at : at + self._generated_per_prompt]
            for at in range(0, len(self._streams), self._generated_per_prompt)
        ]
        return [
            one
            for group in groups
            for one in sorted(group, key=lambda text: -text.mean_logprob)[: self._returned_per_prompt]
        ]

    def build_usage(self) -> dict[str, Any]:
        """What all answers took; each prompt counts once."""
        firsts = self._streams[:: self._generated_per_prompt]
        ends = [text.finished for text in self._streams if text.finished is not None]
        prompt = sum(text.finished.usage.prompt_tokens for text in firsts if text.finished is not None)
        cached = sum(text.finished.usage.cached_tokens for text in firsts if text.finished is not None)
        generated = sum(end.usage.generated_tokens for end in ends)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                **build_prediction_details(end.usage for end in ends),
            },
        }

    def close(self) -> None:
        """Give everything back; what still runs is cancelled."""
        for text in self._streams:
            text.cancel()
        self._ticket.release()
