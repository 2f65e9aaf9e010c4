"""Generated tokens as text, reasoning and tool calls."""
