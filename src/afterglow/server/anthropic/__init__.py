"""The Anthropic Messages API: bodies, conversion to messages, formatters and errors."""
