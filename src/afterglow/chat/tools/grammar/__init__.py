"""Grammar rules that enforce tool calls."""
