"""Calls of tools: how families of models write them, how they are read and enforced. Knows no model and no tokens."""

from afterglow.chat.tools.detection import FAMILIES, family_of
from afterglow.chat.tools.family import Family
from afterglow.chat.tools.generic import generic_messages
from afterglow.chat.tools.tool import Tool, tools

__all__ = ["FAMILIES", "Family", "Tool", "family_of", "generic_messages", "tools"]
