"""Every field that Anthropic's client knows is honoured, a hint or refused."""

from __future__ import annotations

from typing import Any

import pydantic
import pytest
from anthropic.types import (
    image_block_param,
    message_count_tokens_params,
    message_create_params,
    output_config_param,
    text_block_param,
    thinking_config_adaptive_param,
    thinking_config_enabled_param,
    tool_param,
    tool_result_block_param,
    tool_use_block_param,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params

from afterglow.server.anthropic import schema
from afterglow.server.logs import start_record

pytestmark = pytest.mark.slow  # the client takes a second to import

HEADERS = {"betas"}  # sent as the header `anthropic-beta`
MINIMAL = {"max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
HINTS: dict[str, Any] = {
    "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
    "speed": "fast",
    "user_profile_id": "profile",
    "workspace_id": "workspace",
    "metadata": {"user_id": "me"},
    "inference_geo": "us",
    "fallbacks": [{"model": "other"}],
    "fallback_credit_token": "token",
}
REFUSED: dict[str, Any] = {
    "container": {"id": "one"},
    "thread": {"type": "create"},
    "compaction": {"type": "enabled"},
    "mcp_servers": [{"type": "url", "url": "http://localhost", "name": "one"}],
}


@pytest.mark.parametrize(
    ("model", "documented"),
    [
        (schema.MessageRequest, message_create_params.MessageCreateParamsBase),
        (schema.MessageRequest, beta_create_params.MessageCreateParamsBase),
        (schema.CountTokensRequest, message_count_tokens_params.MessageCountTokensParams),
        (schema.CountTokensRequest, beta_count_params.MessageCountTokensParams),
        (schema.TextBlock, text_block_param.TextBlockParam),
        (schema.ImageBlock, image_block_param.ImageBlockParam),
        (schema.ToolUseBlock, tool_use_block_param.ToolUseBlockParam),
        (schema.ToolResultBlock, tool_result_block_param.ToolResultBlockParam),
        (schema.UserDefinedTool, tool_param.ToolParam),
        (schema.OutputConfig, output_config_param.OutputConfigParam),
        (schema.ThinkingEnabled, thinking_config_enabled_param.ThinkingConfigEnabledParam),
        (schema.ThinkingAdaptive, thinking_config_adaptive_param.ThinkingConfigAdaptiveParam),
    ],
)
def test_every_documented_field_is_declared(model: type[pydantic.BaseModel], documented: Any) -> None:
    assert set(documented.__annotations__) - HEADERS - set(model.model_fields) == set()


@pytest.mark.parametrize("name", HINTS)
def test_a_field_that_tunes_a_hosted_service_is_a_hint(name: str) -> None:
    record = start_record("POST", "/v1/messages")
    schema.MessageRequest.model_validate({**MINIMAL, name: HINTS[name]})
    assert record.ignored_fields == [name]
    start_record("POST", "/v1/messages", refuses_hints=True)
    with pytest.raises(pydantic.ValidationError, match=name):
        schema.MessageRequest.model_validate({**MINIMAL, name: HINTS[name]})


@pytest.mark.parametrize("name", REFUSED)
def test_a_field_that_would_change_the_response_is_refused(name: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=name):
        schema.MessageRequest.model_validate({**MINIMAL, name: REFUSED[name]})
    schema.MessageRequest.model_validate({**MINIMAL, name: None})


def test_a_block_that_is_not_text_or_an_image_is_refused_by_name() -> None:
    pdf = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "AAAA"}}
    for block in (pdf, {"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}):
        with pytest.raises(pydantic.ValidationError, match="does not match any of the expected tags"):
            schema.MessageRequest.model_validate({**MINIMAL, "messages": [{"role": "user", "content": [block]}]})
