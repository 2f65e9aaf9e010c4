"""Calls of tools: how families of models write them, how they are read and enforced. Knows no model and no tokens."""

from afterglow.chat.tools.detection import TOOL_FAMILIES, detect_family
from afterglow.chat.tools.family import ToolFamily
from afterglow.chat.tools.text_tools import render_tools_as_text
from afterglow.chat.tools.tool import Tool, parse_tools

__all__ = ["TOOL_FAMILIES", "Tool", "ToolFamily", "detect_family", "parse_tools", "render_tools_as_text"]
