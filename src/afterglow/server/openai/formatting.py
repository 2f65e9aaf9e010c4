"""Fields that the responses of several OpenAI routes share: usage, log-probabilities, finish reason, truncation."""

from __future__ import annotations

from typing import Any

from afterglow.api.model import Model
from afterglow.chat.response import ChatResponse
from afterglow.engine.types.request import Token, Usage
from afterglow.server.generation import Generation

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


def build_prompt_details(usages_by_prompt: list[list[Usage]]) -> dict[str, int]:
    """Build `prompt_tokens_details`: cached tokens and, for prompts with media, media tokens and encoder runs."""

    def sum_min(name: str) -> int:
        return sum(min(getattr(usage, name) for usage in usages) for usages in usages_by_prompt)

    cached = {"cached_tokens": sum_min("cached_tokens")}
    if not (media_tokens := sum_min("media_tokens")):
        return cached
    audio_tokens = sum_min("audio_tokens")
    return cached | {
        "image_tokens": media_tokens - audio_tokens,
        "audio_tokens": audio_tokens,
        "cached_media_tokens": sum_min("cached_media_tokens"),
        "encoded_media": sum(usage.encoded_media for usages in usages_by_prompt for usage in usages),
    }


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


def build_truncation(generation: Generation) -> dict[str, Any]:
    """Build the extension `overflow`: what was dropped from the prompt, or a list for several prompts."""
    reports = [truncation.report for truncation in generation.truncations]
    return {"overflow": reports[0] if len(generation.prompts) == 1 else reports} if reports else {}
