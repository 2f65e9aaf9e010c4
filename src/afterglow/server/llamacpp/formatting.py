"""Completions in llama-server's format, whole or as a stream."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from afterglow.api.model import Model
from afterglow.chat.output.parts import TextDelta
from afterglow.chat.output.response import ChatResponse, Delta
from afterglow.engine.host.remote_calls import RunningRequest
from afterglow.engine.sampling.stops import IndentMatcher
from afterglow.engine.types.request import Request, Token
from afterglow.llama.sampling import Sampling
from afterglow.server.errors import APIError
from afterglow.server.generation import Generation
from afterglow.server.llamacpp.errors import build_error_body
from afterglow.server.llamacpp.schema import LlamaGenerationFields
from afterglow.server.openai.formatting import RunningUsage, build_timings
from afterglow.server.sse import StreamFormat, format_event

UNLIMITED = -1


def build_parameters(
    request: Request | RunningRequest, model: Model, body: LlamaGenerationFields | None = None
) -> dict[str, Any]:
    """Build the parameters of a request as /props, /slots and `generation_settings` return them.

    The engine does not know the fields of the `body` that have no effect on it; without one they have their defaults.
    """
    body = body or LlamaGenerationFields.model_validate({})
    sampling, scales = request.sampling, dict(request.adapters)  # also those of the model's name, or of the server
    names = (name for name in Sampling.__dataclass_fields__ if name not in ("logit_bias", "grammar", "seed"))
    n_predict = UNLIMITED if request.max_tokens is None else request.max_tokens
    return {
        **{name: getattr(sampling, name) for name in names},
        "dry_sequence_breakers": list(sampling.dry_sequence_breakers),
        "samplers": list(sampling.samplers),
        "seed": UNLIMITED if sampling.seed is None else sampling.seed,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.0,
        "min_keep": 0,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": body.n_keep or 0,
        "n_discard": body.n_discard or 0,
        "ignore_eos": request.ignore_eos,
        "stream": bool(body.stream),
        "n_probs": request.logprobs or 0,
        "chat_format": "Content-only",
        "reasoning_format": "none",
        "reasoning_in_content": False,
        "generation_prompt": "",
        "timings_per_token": bool(body.timings_per_token),
        "post_sampling_probs": False,
        "backend_sampling": False,
        "lora": [
            {"id": number, "scale": scales[adapter.name]}
            for number, adapter in enumerate(model.adapters)
            if adapter.name in scales
        ],
    }


def build_generation_settings(body: LlamaGenerationFields, request: Request, model: Model) -> dict[str, Any]:
    """Build the settings with which a request ran. JSON has no infinity: null is the bias of a forbidden token."""
    biases = {**request.sampling.logit_bias}
    if request.ignore_eos:
        biases |= dict.fromkeys(sorted(model.vocabulary.eog_tokens), -math.inf)
    return {
        **build_parameters(request, model, body),
        "stop": [text.decode("utf-8", "replace") for text in request.stop],
        "logit_bias": [{"token": token, "bias": None if bias == -math.inf else bias} for token, bias in biases.items()],
        "grammar": body.grammar or "",
        "grammar_lazy": False,
        "grammar_triggers": [],
        "preserved_tokens": [],
    }


def build_probabilities(model: Model, token: Token) -> dict[str, Any]:
    """Build the log-probability of a token, with those of the most likely tokens."""
    alternatives = [build_probability(model, other, logprob) for other, logprob in token.alternatives]
    return build_probability(model, token.token, token.logprob or 0.0) | {"top_logprobs": alternatives}


def build_probability(model: Model, token: int, logprob: float) -> dict[str, Any]:
    """Build the log-probability of one token."""
    piece = model.vocabulary.token_to_piece(token)
    return {"id": token, "token": piece.decode("utf-8", "ignore"), "bytes": list(piece), "logprob": logprob}


def select_fields(result: Mapping[str, Any], paths: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a result by their paths. Paths that lead nowhere are left out, as in llama-server.

    >>> select_fields({"content": "a", "timings": {"prompt_n": 3}}, ["timings/prompt_n", "absent"])
    {'timings/prompt_n': 3}
    """
    selected: dict[str, Any] = {}
    for path in paths:
        value: Any = result
        for step in path.split("/"):
            value = value.get(step) if isinstance(value, Mapping) else None
        if value is not None:
            selected[path] = value
    return selected


def find_short_line(text: str, min_indent: int | None) -> int | None:
    """Return the offset of the line that ended a completion because of its indentation, behind its white space.

    >>> find_short_line("é:\\n    b\\n  c", 4)
    11
    """
    if not min_indent:
        return None
    data = text.encode()
    offset = IndentMatcher(min_indent).feed(data)
    return None if offset is None else len(data[:offset].decode())


def find_stop_type(response: ChatResponse) -> str:
    """Return why a completion ended, in llama-server's words."""
    if response.finish_reason != "stop":
        return "limit"
    return "word" if isinstance(response.stop_reason, str) else "eos"


def format_stream_error(error: APIError) -> bytes:
    """Format the error that ends a stream."""
    return format_event(build_error_body(error))


STREAM_FORMAT = StreamFormat(format_stream_error)


class LlamaCompletionFormatter:
    """Formats a generation for /completion and /infill. Several completions are a list."""

    def __init__(self, body: LlamaGenerationFields, generation: Generation) -> None:
        self._body = body
        self._generation = generation
        self._choices = body.n_cmpl or 1
        self._slot = UNLIMITED if body.id_slot is None else body.id_slot  # while the response is streamed

    async def build_response(self) -> Any:
        """Read the generation to its end and return the body of the response."""
        responses = await self._generation.collect_responses()
        # A stream has sent the text of the last line already, as that of llama-server.
        texts = [response.text[: find_short_line(response.text, self._body.n_indent)] for response in responses]
        results = [
            self._build_result(index, *result) for index, result in enumerate(zip(responses, texts, strict=True))
        ]
        return results[0] if len(results) == 1 else results

    async def stream_events(self, deltas: AsyncIterator[tuple[int, Delta]]) -> AsyncIterator[bytes]:
        """Yield an event for each token, and one at the end of each completion with text that was held back."""
        count = len(self._generation.prompts) * self._choices
        usages, rests, counts = [RunningUsage() for _ in range(count)], [""] * count, [0] * count
        async for index, delta in deltas:
            is_last_progress = delta.token is not None and usages[index].is_prefill
            usages[index].add_delta(delta)
            timings = usages[index].build_timings() if self._body.timings_per_token else {}
            if self._body.return_progress and (delta.progress is not None or is_last_progress):
                progress = usages[index].build_progress()
                if progress:
                    yield format_event(self._build_chunk(index, "", [], counts[index]) | progress | timings)
            text = "".join(part.text for part in delta.parts if isinstance(part, TextDelta))
            if delta.token is None or not self._generation.is_visible_token(delta.token):
                rests[index] += text
                continue
            counts[index] += 1
            text, rests[index] = rests[index] + text, ""
            yield format_event(self._build_chunk(index, text, [delta.token], counts[index]) | timings)
        for index, response in enumerate(self._generation.get_responses()):
            yield format_event(self._build_result(index, response, rests[index]))

    def format_error(self, error: APIError) -> bytes:
        """Format the error that ends a stream."""
        return format_stream_error(error)

    def _build_chunk(self, index: int, text: str, tokens: Sequence[Token], count: int) -> dict[str, Any]:
        request = self._generation.prompts[index // self._choices].request
        chunk: dict[str, Any] = {
            "index": index,
            "content": text,
            "tokens": [token.token for token in tokens],
            "stop": False,
            "id_slot": self._slot,
            "tokens_predicted": count,
            "tokens_evaluated": len(request.entries),
        }
        if tokens and request.logprobs:
            chunk["completion_probabilities"] = [build_probabilities(self._generation.model, tokens[0])]
        return chunk

    def _build_result(self, index: int, response: ChatResponse, content: str) -> dict[str, Any]:
        """Build the whole result. In a stream, `content` is only what no other event has."""
        body, model, usage = self._body, self._generation.model, response.usage
        request = self._generation.prompts[index // self._choices].request
        visible = [token for token in response.tokens if self._generation.is_visible_token(token)]
        is_short_line = find_short_line(response.text, body.n_indent) is not None
        is_limited = usage.generated_tokens == request.max_tokens or is_short_line
        is_full = response.finish_reason == "length" and not is_limited
        result = {
            "index": index,
            "content": content,
            "tokens": [token.token for token in visible] if body.return_tokens and not body.stream else [],
            "id_slot": self._slot if usage.sequence is None else usage.sequence,
            "stop": True,
            "model": self._generation.model_name,
            "tokens_predicted": usage.generated_tokens,
            "tokens_evaluated": usage.prompt_tokens,
            "generation_settings": build_generation_settings(body, request, model),
            "prompt": model.detokenize([int(entry) for entry in request.entries], special=True),  # type: ignore[arg-type]
            "has_new_line": "\n" in response.text,
            "truncated": response.truncation is not None or is_full,
            "stop_type": find_stop_type(response),
            "stopping_word": response.stop_reason if isinstance(response.stop_reason, str) else "",
            "tokens_cached": usage.prompt_tokens + max(usage.generated_tokens - 1, 0),
            "timings": build_timings(usage),
        }
        if request.logprobs and not body.stream:
            result["completion_probabilities"] = [build_probabilities(model, token) for token in visible]
        return select_fields(result, body.response_fields) if body.response_fields else result
