"""Recorded outputs of every tool family with their expected parse. Shared by the parser and grammar tests."""

from __future__ import annotations

from support.tool_outputs_json import JSON_OUTPUTS
from support.tool_outputs_text import TEXT_OUTPUTS
from support.tool_records import RecordedOutput

RECORDED_OUTPUTS: list[RecordedOutput] = [*JSON_OUTPUTS, *TEXT_OUTPUTS]
