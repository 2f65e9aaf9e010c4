"""What the responses of several OpenAI routes share: usage, timings, log-probabilities, finish reason, chunks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

from afterglow.api.model import Model
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.engine.types.entries import Media
from afterglow.engine.types.request import PrefillProgress, Token, Usage
from afterglow.server.errors import APIError
from afterglow.server.generation import Generation
from afterglow.server.openai.errors import build_error_body
from afterglow.server.openai.schema.foreign import ForeignFields
from afterglow.server.sse import DONE_EVENT, EventTemplate, StreamFormat, format_event

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


def build_timings(usage: Usage) -> dict[str, float]:
    """Build the extension `timings` of llama-server. The first token costs no decode, so rates do not count it.

    >>> usage = Usage(prompt_tokens=30, cached_tokens=10, generated_tokens=5, prefill_seconds=0.5, decode_seconds=2.0)
    >>> build_timings(usage)["prompt_per_second"], build_timings(usage)["predicted_per_second"]
    (40.0, 2.0)
    """
    computed, steps = usage.prompt_tokens - usage.cached_tokens, max(usage.generated_tokens - 1, 0)
    prompt_ms, predicted_ms = usage.prefill_seconds * 1000, usage.decode_seconds * 1000
    timings = {
        "cache_n": usage.cached_tokens,
        "prompt_n": computed,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": prompt_ms / computed if computed else 0.0,
        "prompt_per_second": 1000 / prompt_ms * computed if prompt_ms else 0.0,
        "predicted_n": usage.generated_tokens,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": predicted_ms / steps if steps else 0.0,
        "predicted_per_second": 1000 / predicted_ms * steps if predicted_ms else 0.0,
    }
    drafts = {"draft_n": usage.draft_tokens, "draft_n_accepted": usage.accepted_tokens} if usage.draft_tokens else {}
    return timings | drafts


def build_verbose(generation: Generation, fields: ForeignFields) -> dict[str, Any]:
    """Build the extension `__verbose` of llama-server: the rendered prompt, if the request asks for it."""
    if not fields.verbose:
        return {}
    entries = generation.prompts[0].request.entries
    tokens = [int(entry) for entry in entries if not isinstance(entry, Media)]
    return {"__verbose": {"prompt": generation.model.detokenize(tokens, special=True), "prompt_tokens": tokens}}


class RunningUsage:
    """Usage of a choice that is still running, from its deltas. The engine reports the exact one at the end."""

    def __init__(self) -> None:
        self._progress: PrefillProgress | None = None
        self._generated_tokens = 0
        self._prefill_started_at = 0.0
        self._first_token_at = 0.0

    @property
    def is_prefill(self) -> bool:
        """Whether there is no token yet."""
        return self._generated_tokens == 0

    def add_delta(self, delta: Delta) -> None:
        """Count the token or the progress of a delta."""
        if delta.progress is not None:
            self._progress = delta.progress
            self._prefill_started_at = self._prefill_started_at or time.monotonic()
        if delta.token is not None:
            self._first_token_at = self._first_token_at or time.monotonic()
            self._generated_tokens += 1

    def build_progress(self) -> dict[str, Any]:
        """Build `prompt_progress` of the newest delta: at the first token, the prompt is complete.

        Empty if that is known already: nothing of a cached prompt was computed.
        """
        progress = self._progress
        if progress is None:
            return {}
        if not self.is_prefill:
            if progress.computed_entries == progress.prompt_entries:
                return {}
            progress = replace(progress, computed_entries=progress.prompt_entries)
        return build_progress(progress)

    def build_timings(self) -> dict[str, Any]:
        """Build `timings` up to now. Before the first token, the computed part of the prompt counts."""
        if (progress := self._progress) is None:
            return {}
        is_prefill = self.is_prefill
        computed = progress.computed_entries - progress.cached_entries
        usage = Usage(
            prompt_tokens=progress.cached_tokens + computed if is_prefill else progress.prompt_tokens,
            cached_tokens=progress.cached_tokens,
            generated_tokens=self._generated_tokens,
            prefill_seconds=self._compute_prefill_seconds(progress),
            decode_seconds=0.0 if is_prefill else time.monotonic() - self._first_token_at,
        )
        return {"timings": build_timings(usage)}

    def _compute_prefill_seconds(self, progress: PrefillProgress) -> float:
        if not self.is_prefill:
            return max(progress.seconds, self._first_token_at - self._prefill_started_at)
        return progress.seconds if progress.computed_entries > progress.cached_entries else 0.0


def format_stream_error(error: APIError) -> bytes:
    """Format the error that ends a stream."""
    return format_event(build_error_body(error))


STREAM_FORMAT = StreamFormat(format_stream_error)


class ChunkFormatter:
    """Common part of the formatters of completions and chat completions: head, chunks, and the end of a stream."""

    def __init__(
        self, generation: Generation, head: dict[str, Any], chunk_object: str, body: ForeignFields, *, choices: int
    ) -> None:
        self._generation = generation
        self._include_usage = body.includes_usage
        self._fields = body
        self._usages = [RunningUsage() for _ in range(choices)]
        self._head = {
            **head,
            "created": generation.created,
            "model": generation.model_name,
            "system_fingerprint": generation.model.fingerprint,
        }
        self._chunk_template = EventTemplate({**self._head, "object": chunk_object})

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""
        return format_stream_error(error)

    def _format_chunk(
        self, index: int, content: dict[str, Any], *, extra: dict[str, Any] | None = None, **choice: Any
    ) -> bytes:
        return self._chunk_template.format(self._build_chunk(index, content, extra, **choice))

    def _build_chunk(
        self, index: int, content: dict[str, Any], extra: dict[str, Any] | None = None, **choice: Any
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": None, **choice}
        fields = {"choices": [choice], **(extra or {})}
        return {**fields, "usage": None} if self._include_usage else fields

    def _build_text_formatter(
        self, index: int, build_content: Callable[[str], dict[str, Any]]
    ) -> Callable[[str], bytes]:
        """Return a function that formats chunks which contain only a text: most of them."""
        return self._chunk_template.build_text_formatter(lambda text: self._build_chunk(index, build_content(text)))

    @property
    def _has_extensions(self) -> bool:
        """Whether the request asks for `prompt_progress` or `timings` in the chunks."""
        return bool(self._fields.return_progress or self._fields.timings_per_token)

    def _build_extra(self, index: int, delta: Delta) -> dict[str, Any]:
        """Build the extensions of a delta that the request asks for: `prompt_progress` and `timings`."""
        if not self._has_extensions:
            return {}
        usage, fields = self._usages[index], self._fields
        is_progress = delta.progress is not None or (delta.token is not None and usage.is_prefill)
        usage.add_delta(delta)
        progress = usage.build_progress() if fields.return_progress and is_progress else {}
        return progress | (usage.build_timings() if fields.timings_per_token else {})

    def _format_end(self, content: dict[str, Any]) -> Iterator[bytes]:
        """Format the last events: the finish reason of each choice, and the usage if it was requested."""
        responses = self._generation.get_responses()
        timings = {"timings": build_timings(responses[0].usage)}
        for index, response in enumerate(responses):
            violations = build_violations(self._generation, response)
            extra = timings if index == len(responses) - 1 and not self._include_usage else None
            yield self._format_chunk(index, content, extra=extra, **build_finish(response), **violations)
        if self._include_usage:
            yield self._chunk_template.format({"choices": [], "usage": build_usage(self._generation), **timings})
        yield DONE_EVENT
