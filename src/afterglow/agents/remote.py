"""Generates with a running afterglow server, over its OpenAI API. The prefix cache of the server makes forks cheap."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from afterglow.api.options import ChatGenerationOptions, SamplingOptions, get_fields
from afterglow.chat.content import check_text
from afterglow.chat.messages import Message, to_openai_message
from afterglow.chat.output.parts import OutputPart, ReasoningDelta, TextDelta, ToolCallDelta, join_parts
from afterglow.chat.output.response import ChatResponse
from afterglow.chat.prompt import Compaction, Truncation
from afterglow.chat.tools.tool import Tool
from afterglow.engine.types.request import Usage
from afterglow.errors import EngineError, InvalidArgument, RequestError, UnsupportedOperation

CONNECT_SECONDS = 10.0
MAX_QUOTED_CHARACTERS = 200  # of an answer that cannot be read
SAME_FIELDS = frozenset(
    {
        *("max_tokens", "min_tokens", "seed", "stop", "deadline", "overflow", "ignore_eos", "replay"),
        *("tool_choice", "parallel_tool_calls", "response_format", "chat_template_kwargs"),
        *get_fields(SamplingOptions),
    }
)
RENAMED_FIELDS = {"salt": "cache_salt", "use_prefix_cache": "cache_prompt"}


class RemoteEndpoint:
    """A model of a server. `url` is that of the server, with or without `/v1`."""

    def __init__(self, url: str, model: str | None = None, api_key: str | None = None) -> None:
        if not is_server_url(check_text(url, "url")):
            raise InvalidArgument("url", f"must be http://HOST:PORT or https://HOST, not {url!r}")
        if api_key and not re.fullmatch("[!-~]+", check_text(api_key, "api_key")):
            raise InvalidArgument("api_key", "must have only visible characters of ASCII")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client: Any = None

    @property
    def fingerprint(self) -> str:
        return f"{self.url} {self.model or ''}".strip()

    async def start(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: ChatGenerationOptions
    ) -> RemoteStream:
        body: dict[str, Any] = {
            "messages": [to_openai_message(message) for message in messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **build_fields(options),
        }
        if self.model is not None:
            body["model"] = self.model
        if tools:
            body["tools"] = [tool.definition for tool in tools]
        return await self._post(body)

    async def _post(self, body: Mapping[str, Any]) -> RemoteStream:
        try:
            import httpx
        except ImportError:
            raise UnsupportedOperation("connect", "install it with `pip install afterglow-llm[agents]`") from None
        if self._client is None:
            # Idle connections belong to an event loop, and the next request may be made in another one.
            limits = httpx.Limits(max_keepalive_connections=0)
            self._client = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_SECONDS), limits=limits)
        url = f"{self.url}/v1/chat/completions"
        try:
            request = self._client.build_request("POST", url, json=body, headers=self._headers)
            response = await self._client.send(request, stream=True)
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                await response.aclose()
                kind = RequestError if response.status_code < 500 else EngineError
                raise kind(f"{self.url} answered {response.status_code}: {extract_message(text)}")
        except httpx.HTTPError as error:
            raise EngineError(f"{self.url} cannot be reached: {error or type(error).__name__}") from None
        return RemoteStream(response, self.url)

    async def close(self) -> None:
        """Close the connections. The next run opens them again."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class RemoteStream:
    """A response of a server while it is generated."""

    def __init__(self, response: Any, url: str) -> None:
        self._response, self._url = response, url
        self._parts: list[OutputPart] = []
        self._finish: dict[str, Any] = {}
        self._usage: dict[str, Any] = {}
        self._overflow: dict[str, Any] | None = None
        self._closing: asyncio.Task[None] | None = None

    async def __aiter__(self) -> AsyncIterator[OutputPart]:
        import httpx

        try:
            async for line in self._response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    for part in self._read_line(line.removeprefix("data: ")):
                        self._parts.append(part)
                        yield part
        except httpx.HTTPError as error:
            raise EngineError(f"the response of {self._url} was interrupted: {error or type(error).__name__}") from None
        finally:
            await self._response.aclose()
        if not self._finish:
            raise EngineError(f"the response of {self._url} has no end")

    def _read_line(self, line: str) -> list[OutputPart]:
        try:
            return self._read_chunk(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError):
            text = line if len(line) <= MAX_QUOTED_CHARACTERS else f"{line[:MAX_QUOTED_CHARACTERS]}…"
            raise EngineError(f"{self._url} does not answer as an OpenAI API does, but with {text!r}") from None

    def _read_chunk(self, chunk: dict[str, Any]) -> list[OutputPart]:
        if "error" in chunk:
            error = chunk["error"]
            raise EngineError(f"{self._url}: {error.get('message', error) if isinstance(error, dict) else error}")
        self._usage = chunk.get("usage") or self._usage
        self._overflow = chunk.get("overflow") or self._overflow
        parts: list[OutputPart] = []
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if delta.get("reasoning_content"):
                parts.append(ReasoningDelta(delta["reasoning_content"]))
            if delta.get("content"):
                parts.append(TextDelta(delta["content"]))
            for call in delta.get("tool_calls") or ():
                function = call.get("function") or {}
                parts.append(
                    ToolCallDelta(call["index"], function.get("arguments") or "", call.get("id"), function.get("name"))
                )
            if choice.get("finish_reason"):
                self._finish = choice
        return parts

    @property
    def response(self) -> ChatResponse:
        """The complete response. Only available after the end of the stream."""
        output, usage = join_parts(self._parts), self._usage
        details = usage.get("prompt_tokens_details") or {}
        is_late = self._finish.get("stop_reason") == "deadline"
        return ChatResponse(
            text=output.text,
            reasoning=output.reasoning,
            tool_calls=output.tool_calls,
            finish_reason="deadline" if is_late else self._finish["finish_reason"],
            stop_reason=self._finish.get("stop_reason"),
            tokens=(),
            truncation=None if self._overflow is None else parse_truncation(self._overflow),
            usage=Usage(
                prompt_tokens=usage.get("prompt_tokens", 0),
                cached_tokens=details.get("cached_tokens", 0),
                replayed_tokens=details.get("replayed_tokens", 0),
                generated_tokens=usage.get("completion_tokens", 0),
            ),
        )

    def cancel(self) -> None:
        """Close the connection, which ends the request on the server."""
        self._closing = asyncio.get_running_loop().create_task(self._response.aclose())


def build_fields(options: ChatGenerationOptions) -> dict[str, Any]:
    """Return the fields of a request for options of `Model.chat`.

    >>> build_fields({"temperature": 0, "reasoning": False, "salt": "a"})
    {'temperature': 0, 'enable_thinking': False, 'cache_salt': 'a'}
    """
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if value is None:
            continue
        if name == "reasoning":
            kinds = {bool: "enable_thinking", int: "reasoning_budget", str: "reasoning_effort"}
            fields[kinds[type(value)]] = value
        elif name in SAME_FIELDS or name in RENAMED_FIELDS:
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                raise InvalidArgument(name, f"cannot be sent to a server: {error}") from None
            fields[RENAMED_FIELDS.get(name, name)] = value
        else:
            raise InvalidArgument(name, "cannot be sent to a server: it is an option of a model in this process")
    return fields


def parse_truncation(report: Mapping[str, Any]) -> Truncation:
    """Return what the field `overflow` of a response reports.

    >>> parse_truncation({"policy": "shift", "dropped_messages": 2, "dropped_tokens": 90}).dropped_messages
    2
    """

    def select(kind: type[Truncation] | type[Compaction]) -> dict[str, Any]:
        return {field.name: report[field.name] for field in fields(kind) if field.name in report}

    return Truncation(
        **select(Truncation), compaction=Compaction(**select(Compaction)) if "summary" in report else None
    )


def is_server_url(url: str) -> bool:
    """Return whether a text is an HTTP URL with a host and a valid port, if any.

    >>> is_server_url("http://localhost:8080"), is_server_url("localhost:8080"), is_server_url("http://localhost:99999")
    (True, False, False)
    """
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and url.isprintable()
    except ValueError:  # the port
        return False


def extract_message(text: str) -> str:
    """Return the message of an error body.

    >>> extract_message('{"error": {"message": "no such model"}}')
    'no such model'
    """
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return text[:300]
