"""Incremental parsing of tool calls."""
