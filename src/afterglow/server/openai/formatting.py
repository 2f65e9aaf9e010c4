"""What the responses of several OpenAI routes share: usage, log-probabilities, finish reason, chunks of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from afterglow.api.model import Model
from afterglow.chat.output.response import ChatResponse
from afterglow.engine.types.request import PrefillProgress, Token, Usage
from afterglow.server.errors import APIError
from afterglow.server.generation import Generation
from afterglow.server.openai.errors import build_error_body
from afterglow.server.sse import DONE_EVENT, EventTemplate, format_event

FINISH_REASONS = {"deadline": "length"}  # OpenAI has no such reason; `stop_reason` reports it


def build_usage(generation: Generation) -> dict[str, Any]:
    """Build the usage of all choices of a finished generation. Each prompt counts once."""
    usages = [response.usage for response in generation.get_responses()]
    step = len(usages) // len(generation.prompts)
    usages_by_prompt = [usages[start : start + step] for start in range(0, len(usages), step)]
    prompt = sum(choices[0].prompt_tokens for choices in usages_by_prompt)
    generated = sum(usage.generated_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": build_prompt_details(usages_by_prompt),
        "completion_tokens_details": {
            "reasoning_tokens": generation.reasoning_tokens,
            **build_prediction_details(usages),
        },
    }


def build_prompt_details(usages_by_prompt: list[list[Usage]]) -> dict[str, Any]:
    """Build `prompt_tokens_details`: cached tokens, replay of earlier messages if there are any, and for prompts with
    media their tokens and encoder runs."""

    def sum_min(name: str) -> int:
        return sum(min(getattr(usage, name) for usage in usages) for usages in usages_by_prompt)

    cached: dict[str, Any] = {"cached_tokens": sum_min("cached_tokens")}
    if replayed_tokens := sum_min("replayed_tokens"):
        cached["replayed_tokens"] = replayed_tokens
    if misses := usages_by_prompt[0][0].replay_misses:
        cached["replay_misses"] = format_replay_misses(misses)
    if not (media_tokens := sum_min("media_tokens")):
        return cached
    audio_tokens = sum_min("audio_tokens")
    return cached | {
        "image_tokens": media_tokens - audio_tokens,
        "audio_tokens": audio_tokens,
        "cached_media_tokens": sum_min("cached_media_tokens"),
        "encoded_media": sum(usage.encoded_media for usages in usages_by_prompt for usage in usages),
    }


def format_replay_misses(misses: Iterable[tuple[int, str]]) -> list[dict[str, Any]]:
    """Format why messages of the assistant were not replayed.

    >>> format_replay_misses([(1, "message edited")])
    [{'message': 1, 'reason': 'message edited'}]
    """
    return [{"message": index, "reason": reason} for index, reason in misses]


def build_prediction_details(usages: list[Usage]) -> dict[str, float]:
    """Build the speculative decoding fields of `completion_tokens_details`.

    OpenAI calls accepted and rejected draft tokens prediction tokens.
    """
    accepted = sum(usage.accepted_tokens for usage in usages)
    rejected = sum(usage.draft_tokens for usage in usages) - accepted
    draft_steps = sum(usage.draft_steps for usage in usages)
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": rejected,
        "mean_draft_length": round((accepted + rejected) / draft_steps, 2) if draft_steps else 0.0,
        "speculation_seconds_saved": round(sum(usage.speculation_seconds_saved for usage in usages), 4),
    }


def build_token_logprobs(model: Model, token: Token) -> dict[str, Any]:
    """Build the log-probabilities of a token and its alternatives in the format of chat completions."""
    return {
        **_build_logprob(model, token.token, token.logprob or 0.0),
        "top_logprobs": [_build_logprob(model, alternative, value) for alternative, value in token.alternatives],
    }


def _build_logprob(model: Model, token: int, logprob: float) -> dict[str, Any]:
    piece = model.vocabulary.token_to_piece(token)
    return {"token": piece.decode("utf-8", "replace"), "bytes": list(piece), "logprob": logprob}


def build_finish(response: ChatResponse) -> dict[str, Any]:
    """Build OpenAI's `finish_reason` and the extension `stop_reason`."""
    stop_reason = response.stop_reason if isinstance(response.stop_reason, str) else None
    return {
        "finish_reason": FINISH_REASONS.get(response.finish_reason, response.finish_reason),
        "stop_reason": "deadline" if response.finish_reason == "deadline" else stop_reason,
    }


def build_violations(generation: Generation, response: ChatResponse) -> dict[str, Any]:
    """Build the extension `invalid_tool_calls`: calls of tools that are not enforced and violate their schema."""
    violations = generation.list_violations(response)
    calls = [{"id": id, "message": message} for id, message in violations.items()]
    return {"invalid_tool_calls": calls} if calls else {}


def build_truncation(generation: Generation) -> dict[str, Any]:
    """Build the extension `overflow`: what was dropped from the prompt, or a list for several prompts."""
    reports = [truncation.report for truncation in generation.truncations]
    return {"overflow": reports[0] if len(generation.prompts) == 1 else reports} if reports else {}


def build_progress(progress: PrefillProgress) -> dict[str, Any]:
    """Build the extension `prompt_progress` of llama-server, with the estimated seconds until the first token.

    >>> build_progress(PrefillProgress("1", computed_entries=300, prompt_entries=400, cached_entries=100, seconds=2.0))
    {'prompt_progress': {'total': 400, 'cache': 100, 'processed': 300, 'time_ms': 2000, 'seconds_left': 1.0}}
    """
    fields = {
        "total": progress.prompt_entries,
        "cache": progress.cached_entries,
        "processed": progress.computed_entries,
        "time_ms": round(progress.seconds * 1000),
        "seconds_left": None if progress.seconds_left is None else round(progress.seconds_left, 3),
    }
    return {"prompt_progress": fields}


class ChunkFormatter:
    """Common part of the formatters of completions and chat completions: head, chunks, and the end of a stream."""

    def __init__(self, generation: Generation, head: dict[str, Any], chunk_object: str, *, include_usage: bool) -> None:
        model = generation.model
        self._generation = generation
        self._include_usage = include_usage
        self._head = {
            **head,
            "created": generation.created,
            "model": model.name,
            "system_fingerprint": model.fingerprint,
        }
        self._chunk_template = EventTemplate({**self._head, "object": chunk_object})

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""
        return format_event(build_error_body(error))

    def _format_chunk(
        self, index: int, content: dict[str, Any], *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **choice}
        fields = {"choices": [choice], **(extra or {})}
        return self._chunk_template.format({**fields, "usage": None} if self._include_usage else fields)

    def _format_end(self, content: dict[str, Any]) -> Iterator[bytes]:
        """Format the last events: the finish reason of each choice, and the usage if it was requested."""
        for index, response in enumerate(self._generation.get_responses()):
            violations = build_violations(self._generation, response)
            yield self._format_chunk(index, content, **build_finish(response), **violations)
        if self._include_usage:
            yield self._chunk_template.format({"choices": [], "usage": build_usage(self._generation)})
        yield DONE_EVENT
