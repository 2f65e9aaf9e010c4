"""Incremental parsers of tool calls."""
