"""Tool calling: definitions, parsers and grammars of tool calls. Does not know models or tokens."""
