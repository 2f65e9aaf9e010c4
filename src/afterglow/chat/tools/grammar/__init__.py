"""Grammars that enforce tool calls."""
